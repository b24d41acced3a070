// These tests prove that kubectl slicecast connectivity finds nothing wrong with a working proxy,
// Slicecast or kube-proxy. It names the scenarios and the node if the rules of one node are old or
// gone. It leaves nothing when it is interrupted, or after --cleanup when it was killed.
package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/testenv/cluster"
)

const connectivityTool = "connectivity"

func init() {
	installs[connectivityTool] = connectivityOfSlicecast
	installs["connectivity-kube-proxy"] = connectivityOfKubeProxy
	build := []string{"sh", "-c", `go build -o "$PWD/bin/kubectl-slicecast" ./deploy/kubectl-slicecast && echo "$PWD/bin/kubectl-slicecast"`}
	tools[connectivityTool], tools["connectivity-kube-proxy"] = build, build
}

// withProxy starts a cluster of two nodes with a proxy.
func withProxy(t *testing.T, proxy cluster.Proxy) install {
	t.Helper()
	c, err := cluster.Start(t.Context(), cluster.Options{Nodes: 2, Proxy: proxy, Programmer: *programmer, Logf: t.Logf})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Stop()) })
	return install{t, c}
}

// scenario is a result of connectivity.
type scenario struct{ Scenario, Node, Target, State, Detail string }

// connectivity runs the command, requires its exit code, and returns the results.
func (i install) connectivity(program string, code int, args ...string) (results []scenario) {
	i.Helper()
	ctx, cancel := context.WithTimeout(i.Context(), 2*patience)
	defer cancel()
	began := time.Now()
	cmd := exec.CommandContext(ctx, program, append([]string{"connectivity", "--kubeconfig=" + i.Kubeconfig, "--output=json"}, args...)...)
	var out, progress bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &progress
	err := cmd.Run()
	require.Equal(i, code, cmd.ProcessState.ExitCode(), "%v\n%s\n%s", err, &progress, &out)
	var report struct{ Results []scenario }
	require.NoError(i, json.Unmarshal(out.Bytes(), &report), out.String())
	i.Logf("connectivity: %d results in %s", len(report.Results), time.Since(began).Round(time.Second))
	i.requireNothingLeft()
	return report.Results
}

// requireNothingLeft requires that no object of a run is left.
func (i install) requireNothingLeft() {
	i.Helper()
	left := i.kubectl("get", "namespaces,pods,services,endpointslices", "--all-namespaces",
		"--selector=slicecast.io/temporary-run", "--output=name", "--ignore-not-found")
	require.Empty(i, left)
}

// failures returns the nodes on which each scenario has failed.
func failures(results []scenario) map[string][]string {
	out := map[string][]string{}
	for _, s := range results {
		if s.State == "FAILED" && !strings.Contains(strings.Join(out[s.Scenario], ","), s.Node) {
			out[s.Scenario] = append(out[s.Scenario], s.Node)
		}
	}
	return out
}

func connectivityOfKubeProxy(t *testing.T) {
	i := withProxy(t, cluster.KubeProxy)
	image := "--image=ghcr.io/slicecast/slicecast-agent-iptables:" + cluster.OwnTag
	program := tool("connectivity-kube-proxy")
	require.Greater(t, len(i.connectivity(program, 0, image, "--host-network")), 50)
}

func connectivityOfSlicecast(t *testing.T) {
	i := withProxy(t, cluster.Slicecast)
	program := tool(connectivityTool)
	require.Greater(t, len(i.connectivity(program, 0, "--host-network")), 50)

	for _, signal := range []syscall.Signal{syscall.SIGINT, syscall.SIGKILL} {
		i.signalMidway(program, signal, " checks on ", "connectivity")
	}

	// The rules of node-2 are old: those of DNS stand, and those of new Services are missing.
	i.kubectl("label", "node", "node-1", "agent=yes")
	i.kubectl("--namespace="+agents, "patch", "daemonset", "slicecast-agent", "--patch", `{"spec":{"template":{"spec":{"nodeSelector":{"agent":"yes"}}}}}`)
	i.rollout(agents, "daemonset/slicecast-agent")
	i.kubectl("--namespace="+agents, "wait", "--for=delete", "pods", "--field-selector=spec.nodeName=node-2", "--selector=app.kubernetes.io/component=agent", fmt.Sprintf("--timeout=%s", patience))
	// Nothing about changes follows if no backend is reached before.
	old := failures(i.connectivity(program, 1, "node-1", "node-2"))
	for _, name := range []string{"ClusterIP, all backends", "ClusterIP, many backends", "NodePort of each node", "no endpoints", "sessionAffinity ClientIP", "a backend turns unready"} {
		require.Equal(t, []string{"node-2"}, old[name], "%s: %v", name, old)
	}
	for name, nodes := range old {
		require.Equal(t, []string{"node-2"}, nodes, name)
	}
	require.Empty(t, old["headless name by DNS"])

	out, err := i.Node("node-2").Command(t.Context(), "nft", "flush", "ruleset").CombinedOutput()
	require.NoError(t, err, string(out))
	gone := failures(i.connectivity(program, 1, "node-1", "node-2"))
	require.Equal(t, []string{"node-2"}, gone["headless name by DNS"], gone)
	require.Equal(t, []string{"node-2"}, gone["ClusterIP, all backends"], gone)
}

// signalMidway sends a signal to a command when it says something, and requires that nothing is
// left; after SIGKILL, once connectivity --cleanup was run.
func (i install) signalMidway(program string, signal syscall.Signal, says string, args ...string) {
	i.Helper()
	ctx, cancel := context.WithTimeout(i.Context(), 2*patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, append(args, "--kubeconfig="+i.Kubeconfig)...)
	progress, err := cmd.StderrPipe()
	require.NoError(i, err)
	require.NoError(i, cmd.Start())
	var text []byte
	for part := make([]byte, 4096); ; {
		n, err := progress.Read(part)
		before := bytes.Contains(text, []byte(says))
		text = append(text, part[:n]...)
		if !before && bytes.Contains(text, []byte(says)) {
			require.NoError(i, cmd.Process.Signal(signal))
		}
		if err != nil {
			break
		}
	}
	_ = cmd.Wait() // it ends with an error in either case
	require.Contains(i, string(text), says)
	if signal == syscall.SIGKILL {
		require.NotEmpty(i, i.kubectl("get", "namespaces", "--selector=slicecast.io/temporary-run", "--output=name"))
		i.connectivity(program, 0, "--cleanup")
	}
	i.requireNothingLeft()
}
