// This file has the steps that operators take with Helm.
package adopt

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/testenv/cluster"
	"github.com/slicecast/slicecast/internal/testenv/repository"
)

// helmVariable holds the path of Helm.
const helmVariable = "SLICECAST_ADOPT_HELM"

// buildHelm builds Helm, which the isolated tests could not download.
func buildHelm() error {
	root, err := repository.Root()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(context.Background(), "internal/tools/helm.sh", "--path")
	cmd.Dir, cmd.Stderr = root, os.Stderr
	path, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("build Helm (see the output): %w", err)
	}
	return os.Setenv(helmVariable, strings.TrimSpace(string(path)))
}

// helm runs Helm with the release slicecast in kube-system.
func (w *walk) helm(command string, args ...string) {
	w.t.Helper()
	args = append([]string{command, "slicecast", "--namespace=kube-system", "--timeout=" + patience.String()}, args...)
	cmd := exec.CommandContext(w.t.Context(), os.Getenv(helmVariable), args...)
	cmd.Env = []string{"HOME=" + w.t.TempDir(), "KUBECONFIG=" + w.Kubeconfig, "PATH=" + os.Getenv("PATH")}
	out, err := cmd.CombinedOutput()
	require.NoError(w.t, err, "helm %s: %s", strings.Join(args, " "), out)
}

// install installs the chart, with flags for more values, and waits until Slicecast is ready.
func (w *walk) install(values ...string) {
	w.t.Helper()
	own := []string{
		w.deploy("helm", "slicecast"), "--set=agent.config.programmer=" + *programmer,
		// The nodes share the machine's connection tracking.
		"--set=agent.config.conntrack.maxPerCore=0,agent.config.conntrack.min=0",
	}
	w.helm("install", append(own, values...)...)
	require.NoError(w.t, w.AwaitSlicecast(w.t.Context()))
}

// set changes a value of the chart.
func (w *walk) set(value string) {
	w.t.Helper()
	w.helm("upgrade", w.deploy("helm", "slicecast"), "--reuse-values", "--set="+value)
}

// removeKubeProxy deletes kube-proxy and removes its rules from all nodes.
func (w *walk) removeKubeProxy() {
	w.t.Helper()
	w.deleteKubeProxy()
	w.set("cleanup.kubeProxy=true")
	w.rollout(cluster.AgentNamespace, "daemonset/slicecast-cleanup-kube-proxy")
	w.set("cleanup.kubeProxy=false")
}

// removeAgents has a cleaner take the place of each agent.
func (w *walk) removeAgents() {
	w.t.Helper()
	w.set("cleanup.agents=true")
	w.rollout(cluster.AgentNamespace, "daemonset/slicecast-agent")
}
