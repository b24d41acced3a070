package app

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/slicecast/slicecast/agent/client"
	"github.com/slicecast/slicecast/agent/kubeproxy"
	"github.com/slicecast/slicecast/agent/programmer/iptables"
	"github.com/slicecast/slicecast/agent/programmer/ipvs"
	"github.com/slicecast/slicecast/agent/programmer/nftables"
	"github.com/slicecast/slicecast/internal/daemon"
)

func newCleanupCommand() *cobra.Command {
	var checkpoint string
	var kubeProxys bool
	c := &cobra.Command{
		Use:   "cleanup",
		Short: "Remove everything that agents have programmed on this node, and their checkpoint; or what kube-proxy has",
		Long: `cleanup removes everything that agents have programmed on this node, in whichever way, and their checkpoint. Do so when no agent
runs and something else serves the node's Services.

While an agent runs on the node it is refused, as far as that can be seen from here: from within a container it may not be.

With --kube-proxy it removes what kube-proxy has programmed instead, in whichever mode, and leaves alone what is the kubelet's or
Slicecast's. Do so when kube-proxy is gone and the agent has programmed the node; connections go on. While a kube-proxy runs on the
node it is refused.`,
		Args:         cobra.NoArgs,
		SilenceUsage: true,
		RunE: func(c *cobra.Command, _ []string) error {
			if kubeProxys {
				if checkpoint != "" {
					return errors.New("--kube-proxy and --checkpoint exclude each other: kube-proxy has no checkpoint")
				}
				return kubeproxy.Cleanup(c.Context())
			}
			if process := runningAgent(); process != "" {
				return fmt.Errorf("an agent runs in this network (process %s), which would program everything again: stop it before", process)
			}
			err := errors.Join(nftables.Cleanup(c.Context()), iptables.Cleanup(c.Context()), ipvs.Cleanup(c.Context()))
			if checkpoint != "" {
				if failed := client.RemoveCheckpoint(checkpoint); failed != nil {
					err = errors.Join(err, fmt.Errorf("--checkpoint: %w", failed))
				}
			}
			return err
		},
	}
	c.Flags().StringVar(&checkpoint, "checkpoint", "", "what the agents were started with as --checkpoint; it is removed too")
	c.Flags().BoolVar(&kubeProxys, "kube-proxy", false, "remove what kube-proxy has programmed, and nothing else")
	return c
}

// runningAgent returns the id of a process that is an agent and programs this network namespace. It
// returns "" if it sees none.
func runningAgent() string {
	name, err := os.ReadFile("/proc/self/comm") // the name that the program has on this node
	if err != nil {
		return ""
	}
	for _, process := range daemon.InNetwork(strings.TrimSpace(string(name))) {
		line, err := os.ReadFile(filepath.Join(process, "cmdline"))
		programsNothing := func(argument string) bool {
			return slices.Contains([]string{"status", "cleanup", "--init-only", "--programmer=printer"}, argument) || strings.HasPrefix(argument, "--migrate-config")
		}
		if err == nil && !slices.ContainsFunc(strings.Split(string(line), "\x00"), programsNothing) {
			return filepath.Base(process)
		}
	}
	return ""
}
