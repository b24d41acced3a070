// These tests prove that the commands of the README install Slicecast by Helm as a cluster's only
// Service proxy, and that those for uninstalling it leave nothing. The cluster has kubelets and
// containers, and tells the chart everything that it needs.
package e2e

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/cluster"
)

const (
	servers, agents = "slicecast-system", "slicecast-agents"
	// patience bounds the time of a single step on a slow machine.
	patience = 2 * time.Minute
)

// helmPath is the path of Helm.
var helmPath string

func TestMain(m *testing.M) {
	// Building Helm needs a network, which isolated tests do not have.
	cmd := exec.CommandContext(context.Background(), "../../../internal/tools/helm.sh", "--path")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		fmt.Fprintln(os.Stderr, "build Helm (see its output):", err)
		os.Exit(1)
	}
	helmPath = strings.TrimSpace(string(out))
	cluster.Main(m)
}

// web is a pod that serves HTTP, and a Service in front of it.
const web = `
apiVersion: v1
kind: Pod
metadata: {name: web, labels: {app: web}}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - {name: web, image: ` + cluster.AgnhostImage + `, args: [netexec], readinessProbe: {httpGet: {path: /, port: 8080}, periodSeconds: 1}}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  ipFamilyPolicy: RequireDualStack
  selector: {app: web}
  ports: [{port: 80, targetPort: 8080}]
`

func TestHelm(t *testing.T) {
	ctx := t.Context()
	c, err := cluster.Start(ctx, cluster.Options{Nodes: 2, Logf: t.Logf})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Stop()) })
	helm := func(args ...string) string {
		t.Helper()
		began := time.Now()
		cmd := exec.CommandContext(ctx, helmPath, append(args, "--namespace=kube-system")...)
		cmd.Env = []string{"HOME=" + t.TempDir(), "KUBECONFIG=" + c.Kubeconfig, "PATH=" + os.Getenv("PATH")}
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, string(out))
		t.Logf("helm %s took %s", args[0], time.Since(began).Round(100*time.Millisecond))
		return string(out)
	}
	rollout := func(namespace, name string) {
		t.Helper()
		began := time.Now()
		require.NoError(t, c.AwaitRollout(ctx, namespace, name))
		t.Logf("%s took %s", name, time.Since(began).Round(100*time.Millisecond))
	}
	kubectl := func(args ...string) string {
		t.Helper()
		out, err := c.Kubectl(ctx, "", args...)
		require.NoError(t, err)
		return out
	}
	before := kubectl("get", "namespaces,clusterroles,clusterrolebindings,configmaps,secrets,daemonsets,deployments", "--all-namespaces", "--output=name")

	notes := helm("install", "slicecast", "../slicecast")
	require.Contains(t, notes, fmt.Sprintf("%s:%d", c.Network.World.IPv4, c.ControlPlane.Port()))
	require.Contains(t, notes, "the podCIDRs of each Node")
	rollout(servers, "deployment/slicecast-server")
	rollout(agents, "daemonset/slicecast-agent")
	_, err = c.Kubectl(ctx, web, "apply", "-f", "-")
	require.NoError(t, err)
	kubectl("wait", "--for=condition=Ready", "pod/web", fmt.Sprintf("--timeout=%s", patience))
	for _, family := range []string{"-4", "-6"} {
		testenv.Eventually(t, patience, func() error {
			_, err := c.Kubectl(ctx, "", "exec", "web", "--", "curl", "-sS", "-m5", family, "http://web.default.svc.cluster.local/hostname")
			return err
		})
	}
	testenv.Eventually(t, patience, func() error {
		var status string
		for _, pod := range strings.Fields(kubectl("--namespace="+servers, "get", "pods", "--output=name")) {
			status += kubectl("--namespace="+servers, "exec", pod, "--", "slicecast-server", "status", "--debug-socket=/run/slicecast/debug/server.sock")
		}
		if !strings.Contains(status, "node-1") || !strings.Contains(status, "node-2") {
			return fmt.Errorf("a node is not connected: %s", status)
		}
		return nil
	})

	// A cleaner takes the place of each agent.
	helm("upgrade", "slicecast", "../slicecast", "--reuse-values", "--set=cleanup.agents=true")
	rollout(agents, "daemonset/slicecast-agent")
	for _, node := range c.Nodes {
		left, err := node.Command(ctx, "sh", "-c", "nft list ruleset | grep -i slicecast; find /var/lib/slicecast -type f").Output()
		require.NoError(t, err)
		require.Empty(t, string(left), node.Name)
	}
	helm("uninstall", "slicecast", "--wait", fmt.Sprintf("--timeout=%s", patience))
	testenv.Eventually(t, patience, func() error {
		list, err := c.Client.CoreV1().Namespaces().List(ctx, metav1.ListOptions{LabelSelector: "app.kubernetes.io/part-of=slicecast"})
		if err != nil || len(list.Items) > 0 {
			return fmt.Errorf("%d namespaces are left, or %w", len(list.Items), err)
		}
		return nil
	})
	after := kubectl("get", "namespaces,clusterroles,clusterrolebindings,configmaps,secrets,daemonsets,deployments", "--all-namespaces", "--output=name")
	require.ElementsMatch(t, strings.Fields(before), strings.Fields(after))
}
