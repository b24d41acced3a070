// This file breaks an installation in the ways that docs/debug.md is about, and requires that the
// commands of the page name each cause. A cluster that is whole shows none of the causes.
package e2e

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/testenv"
)

// pluginName is the name of the plugin's program. This test program is it if it has that name.
const pluginName = "kubectl-slicecast"

const (
	breakScript = "../../../internal/testenv/cluster/break.sh"
	debugPage   = "../../../docs/debug.md"
)

// symptoms are the sections of docs/debug.md, by their titles, with the failures that they are
// about and a text that names the cause of each.
var symptoms = map[string]map[string]string{
	"A pod gets no traffic on a node": {
		"wrong-port":   `:8081`,
		"not-ready":    `rejected: no endpoint is ready`,
		"local-policy": `the policy is Local`,
		"firewall":     `table inet firewall`,
	},
	"A deploy is slow to take effect": {
		"lossy-node":  `node-2 \(lacks it\), node-1 \(`,
		"slow-pod":    `web-\S+ +0/1 +Running`,
		"deaf-server": `not asked|stale`,
	},
	"One node differs": {
		"hung-agent": `never leads to`,
		"old-rule":   `table ip legacy`,
		"cut-off":    `not connected`,
		"kube-proxy": `kube-proxy runs on this node`,
	},
}

// requireDebug requires that docs/debug.md leads to the cause of each failure of break.sh.
func (i install) requireDebug() {
	i.Helper()
	page, err := os.ReadFile(debugPage)
	require.NoError(i, err)
	help, err := i.shell(breakScript).CombinedOutput()
	require.Error(i, err, "it needs the name of a failure")
	i.breakCluster("shop")
	tried := 0
	for _, title := range slices.Sorted(maps.Keys(symptoms)) {
		commands := i.commands(string(page), title)
		require.Len(i, commands, 3, title)
		for _, failure := range slices.Sorted(maps.Keys(symptoms[title])) {
			require.Contains(i, string(help), failure)
			cause := regexp.MustCompile(symptoms[title][failure])
			// What has just been mended may show for a moment.
			testenv.Eventually(i.T, patience, func() error {
				for _, command := range commands {
					if strings.Contains(command, "connectivity") {
						continue // it takes half a minute, and what it shows is not what is asked for
					}
					if out := i.output(command); cause.MatchString(out) {
						return fmt.Errorf("%s shows %s before it happens:\n%s", command, failure, out)
					}
				}
				return nil
			})
			began := time.Now()
			i.breakCluster(failure, "node-2")
			testenv.Eventually(i.T, patience, func() error {
				var all strings.Builder
				for _, command := range commands {
					out := i.output(command)
					if cause.MatchString(out) {
						i.Logf("%s was found after %s by %s", failure, time.Since(began).Round(100*time.Millisecond), command)
						return nil
					}
					fmt.Fprintf(&all, "$ %s\n%s\n", command, out)
				}
				return fmt.Errorf("%s is not found:\n%s", failure, &all)
			})
			i.breakCluster("mend")
			tried++
		}
	}
	i.kubectl("delete", "namespace", "shop")
	require.Equal(i, strings.Count(string(help), "\n")-1, tried, "all failures of the script are tried")
}

// commands returns the commands in the first block of a section.
func (i install) commands(page, title string) []string {
	i.Helper()
	_, section, found := strings.Cut(page, "\n## "+title+"\n")
	require.True(i, found, title)
	_, block, found := strings.Cut(section, "```sh\n")
	require.True(i, found, title)
	block, _, _ = strings.Cut(block, "```")
	return strings.Split(strings.TrimSpace(strings.ReplaceAll(block, "\\\n", "")), "\n")
}

// output returns what a command of the page prints, whether it succeeds or not.
func (i install) output(command string) string {
	i.Helper()
	out, _ := i.shell("bash", "-c", command).CombinedOutput()
	return string(out)
}

// breakCluster runs break.sh.
func (i install) breakCluster(args ...string) {
	i.Helper()
	out, err := i.shell(breakScript, args...).CombinedOutput()
	require.NoError(i, err, string(out))
}

// shell returns a command that uses the cluster as the README's reader does: with kubectl and the
// plugin on its PATH, and a kubeconfig in the cluster's folder.
func (i install) shell(name string, args ...string) *exec.Cmd {
	i.Helper()
	kubeconfig, bin := filepath.Join(i.Dir, "kubeconfig"), filepath.Join(i.Dir, "tools")
	if _, err := os.Stat(bin); err != nil {
		require.NoError(i, os.Mkdir(bin, 0o755))
		self, err := os.Executable()
		require.NoError(i, err)
		require.NoError(i, os.Symlink(self, filepath.Join(bin, pluginName)))
		content, err := os.ReadFile(i.Kubeconfig)
		require.NoError(i, err)
		require.NoError(i, os.WriteFile(kubeconfig, content, 0o600))
	}
	cmd := exec.CommandContext(i.Context(), name, args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+kubeconfig, fmt.Sprintf("PATH=%s:%s:%s", bin, filepath.Dir(i.KubectlPath), os.Getenv("PATH")))
	return cmd
}
