// This file has what all installs share: the list of installs, and the steps that operators take.
package e2e

import (
	"context"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/plugin"
	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/cluster"
)

const (
	servers, agents = "slicecast-system", "slicecast-agents"
	// patience bounds the time of a single step on a slow machine.
	patience = 2 * time.Minute
	// serverName is the name in the servers' certificate.
	serverName = "slicecast-server." + servers + ".svc"
	// serverPods selects the servers' pods.
	serverPods = "app.kubernetes.io/name=slicecast-server"
)

var (
	chosen     = flag.String("e2e.installs", "alone", "installs of the chart, separated by commas")
	programmer = flag.String("e2e.programmer", "nftables", "programmer of the agents in tests of connectivity: nftables or iptables")
)

// installs are all installs by their names. The files of the tests add theirs.
var installs = map[string]func(*testing.T){}

// tools are the programs that installs need, besides those of the cluster, by the installs' names.
// Isolated tests could not download them. The values are commands that build a program and print
// its path.
var tools = map[string][]string{"": {"internal/tools/helm.sh", "--path"}}

// toolVariable is the beginning of the names of environment variables that hold the paths of tools.
const toolVariable = "SLICECAST_E2E_TOOL_"

func TestMain(m *testing.M) {
	if filepath.Base(os.Args[0]) == pluginName {
		os.Exit(plugin.Main())
	}
	flag.Parse()
	var build []func() error
	for _, name := range append(strings.Split(*chosen, ","), "") {
		if command := tools[name]; command != nil {
			build = append(build, func() error { return buildTool(name, command) })
		}
	}
	cluster.Main(m, build...)
}

// buildTool runs the command for a tool of an install, and keeps what it prints for [tool].
func buildTool(install string, command []string) error {
	cmd := exec.CommandContext(context.Background(), command[0], command[1:]...)
	cmd.Dir, cmd.Stderr = "../../..", os.Stderr
	path, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("%s (see its output): %w", strings.Join(command, " "), err)
	}
	return os.Setenv(toolVariable+install, strings.TrimSpace(string(path)))
}

// tool returns the path of the tool of an install; that of Helm has no install.
func tool(install string) string { return os.Getenv(toolVariable + install) }

// TestInstalls makes the chosen installs, each in a cluster of its own.
func TestInstalls(t *testing.T) {
	for name := range strings.SplitSeq(*chosen, ",") {
		install := installs[name]
		require.NotNil(t, install, "install %s: choose from %s", name, slices.Sorted(maps.Keys(installs)))
		t.Run(name, install)
	}
}

// install is an installation in a cluster.
type install struct {
	*testing.T
	*cluster.Cluster
}

// start starts a cluster of two nodes without a Service proxy.
func start(t *testing.T) install {
	t.Helper()
	c, err := cluster.Start(t.Context(), cluster.Options{Nodes: 2, Logf: t.Logf})
	require.NoError(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			for _, args := range [][]string{{"get", "pods", "--all-namespaces", "--output=wide"}, {"events", "--all-namespaces"}} {
				out, err := c.Kubectl(context.Background(), "", args...)
				t.Log(out, err)
			}
		}
		require.NoError(t, c.Stop())
	})
	return install{t, c}
}

// helm runs Helm with a release in kube-system, and returns what it prints.
func (i install) helm(args ...string) string {
	i.Helper()
	began := time.Now()
	cmd := exec.CommandContext(i.Context(), tool(""), append(args, "--namespace=kube-system")...)
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

// apply applies a manifest.
func (i install) apply(manifest string) {
	i.Helper()
	_, err := i.Kubectl(i.Context(), manifest, "apply", "--server-side", "-f", "-")
	require.NoError(i, err)
}

// startUntilEnd starts a command that runs until the test's context or the cluster ends, and logs
// its output if the test has failed by then.
func (i install) startUntilEnd(cmd *exec.Cmd, name string) {
	i.Helper()
	// A file, unlike a buffer, does not keep Wait waiting for the command's children.
	path := filepath.Join(i.TempDir(), "log")
	log, err := os.Create(path)
	require.NoError(i, err)
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	require.NoError(i, cmd.Start())
	i.Cleanup(func() {
		_ = cmd.Wait() // the context's end has killed it
		if i.Failed() {
			content, err := os.ReadFile(path)
			i.Logf("---- %s: %v\n%s", name, err, content)
		}
	})
}

// requireService requires that a pod is reached through a Service of both families, by its name.
func (i install) requireService() {
	i.Helper()
	i.apply(cluster.Web)
	i.rollout("default", "daemonset/web")
	for _, family := range []string{"-4", "-6"} {
		testenv.Eventually(i.T, patience, func() error {
			_, err := i.Kubectl(i.Context(), "", "exec", "daemonset/web", "--", "curl", "-sS", "-m5", family, "http://web.default.svc.cluster.local/hostname")
			return err
		})
	}
	i.kubectl("delete", "service/web", "daemonset/web")
}

// requireStatus requires that the servers say that all nodes are connected. A server that ends may
// be gone before it is asked.
func (i install) requireStatus() {
	i.Helper()
	testenv.Eventually(i.T, patience, func() error {
		var status string
		for _, pod := range strings.Fields(i.kubectl("--namespace="+servers, "get", "pods", "--selector="+serverPods, "--output=name")) {
			one, err := i.Kubectl(i.Context(), "", "--namespace="+servers, "exec", pod, "--",
				"slicecast-server", "status", "--debug-socket=/run/slicecast/debug/server.sock")
			if err != nil {
				return err
			}
			status += one
		}
		if !strings.Contains(status, "node-1") || !strings.Contains(status, "node-2") {
			return fmt.Errorf("a node is not connected: %s", status)
		}
		return nil
	})
}
