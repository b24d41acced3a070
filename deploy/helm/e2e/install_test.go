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

// install is an installation in a cluster.
type install struct {
	*testing.T
	*cluster.Cluster
}

// helm runs Helm with a release in kube-system, and returns what it prints.
func (i install) helm(args ...string) string {
	i.Helper()
	began := time.Now()
	cmd := exec.CommandContext(i.Context(), helmPath, append(args, "--namespace=kube-system")...)
	cmd.Env = []string{"HOME=" + i.TempDir(), "KUBECONFIG=" + i.Kubeconfig, "PATH=" + os.Getenv("PATH")}
	out, err := cmd.CombinedOutput()
	require.NoError(i, err, string(out))
	i.Logf("helm %s took %s", args[0], time.Since(began).Round(100*time.Millisecond))
	return string(out)
}

// rollout waits until all pods of a workload are ready.
func (i install) rollout(namespace, name string) {
	i.Helper()
	began := time.Now()
	require.NoError(i, i.AwaitRollout(i.Context(), namespace, name))
	i.Logf("%s took %s", name, time.Since(began).Round(100*time.Millisecond))
}

// kubectl runs kubectl and returns what it prints.
func (i install) kubectl(args ...string) string {
	i.Helper()
	out, err := i.Kubectl(i.Context(), "", args...)
	require.NoError(i, err)
	return out
}

// objects returns the names of the objects that an install could leave.
func (i install) objects() []string {
	i.Helper()
	kinds := "namespaces,clusterroles,clusterrolebindings,roles,rolebindings,serviceaccounts,configmaps,secrets,services,daemonsets,deployments"
	return strings.Fields(i.kubectl("get", kinds, "--all-namespaces", "--output=name"))
}

func TestHelm(t *testing.T) {
	c, err := cluster.Start(t.Context(), cluster.Options{Nodes: 2, Logf: t.Logf})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Stop()) })
	i := install{t, c}
	before := i.objects()

	notes := i.helm("install", "slicecast", "../slicecast")
	require.Contains(t, notes, fmt.Sprintf("%s:%d", c.Network.World.IPv4, c.ControlPlane.Port()))
	require.Contains(t, notes, "the podCIDRs of each Node")
	i.rollout(servers, "deployment/slicecast-server")
	i.rollout(agents, "daemonset/slicecast-agent")
	i.requireService()
	i.requireStatus()

	// A cleaner takes the place of each agent.
	i.helm("upgrade", "slicecast", "../slicecast", "--reuse-values", "--set=cleanup.agents=true")
	i.rollout(agents, "daemonset/slicecast-agent")
	for _, node := range c.Nodes {
		left, err := node.Command(t.Context(), "sh", "-c", "nft list ruleset | grep -i slicecast; find /var/lib/slicecast -type f").Output()
		require.NoError(t, err)
		require.Empty(t, string(left), node.Name)
	}
	i.helm("uninstall", "slicecast", "--wait", fmt.Sprintf("--timeout=%s", patience))
	testenv.Eventually(t, patience, func() error {
		if left := i.kubectl("get", "namespaces", "--selector=app.kubernetes.io/part-of=slicecast", "--output=name"); left != "" {
			return fmt.Errorf("left: %s", left)
		}
		return nil
	})
	require.ElementsMatch(t, before, i.objects())
}

// requireService requires that a pod is reached through a Service of both families, by its name.
func (i install) requireService() {
	i.Helper()
	_, err := i.Kubectl(i.Context(), cluster.Web, "apply", "-f", "-")
	require.NoError(i, err)
	i.rollout("default", "daemonset/web")
	for _, family := range []string{"-4", "-6"} {
		testenv.Eventually(i.T, patience, func() error {
			_, err := i.Kubectl(i.Context(), "", "exec", "daemonset/web", "--", "curl", "-sS", "-m5", family, "http://web.default.svc.cluster.local/hostname")
			return err
		})
	}
	i.kubectl("delete", "service/web", "daemonset/web")
}

// requireStatus requires that the servers say that all nodes are connected.
func (i install) requireStatus() {
	i.Helper()
	testenv.Eventually(i.T, patience, func() error {
		var status string
		for _, pod := range strings.Fields(i.kubectl("--namespace="+servers, "get", "pods", "--output=name")) {
			status += i.kubectl("--namespace="+servers, "exec", pod, "--", "slicecast-server", "status", "--debug-socket=/run/slicecast/debug/server.sock")
		}
		if !strings.Contains(status, "node-1") || !strings.Contains(status, "node-2") {
			return fmt.Errorf("a node is not connected: %s", status)
		}
		return nil
	})
}
