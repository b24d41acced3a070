package app

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"sigs.k8s.io/yaml"

	"github.com/slicecast/slicecast/agent/client/checkpoint"
	"github.com/slicecast/slicecast/agent/kubeproxy"
	"github.com/slicecast/slicecast/agent/programmer/iptables"
	"github.com/slicecast/slicecast/agent/programmer/ipvs"
	"github.com/slicecast/slicecast/agent/programmer/nftables"
	"github.com/slicecast/slicecast/internal/daemon"
)

func newCleanupCommand() *cobra.Command {
	var path string
	var kubeProxys bool
	c := &cobra.Command{
		Use:   "cleanup",
		Short: "Remove the rules and the checkpoint of agents from this node, or the rules of kube-proxy",
		Long: `cleanup removes all rules that agents have programmed on this node, whichever programmer they used, and their
checkpoint. Run it when no agent runs on the node and something else serves the node's Services. If an agent runs, cleanup
fails, unless the agent programs nothing (--programmer=shadow or printer). From within a container, it may not see a running
agent.

With --kube-proxy, cleanup instead removes all rules that kube-proxy has programmed, in any of its modes. It keeps those of
the kubelet and of Slicecast. Run it when kube-proxy is stopped and the agent has programmed the node. Established
connections go on. If a kube-proxy runs on the node, cleanup fails.`,
		Args:         cobra.NoArgs,
		SilenceUsage: true,
		RunE: func(c *cobra.Command, _ []string) error {
			if kubeProxys {
				if path != "" {
					return errors.New("--kube-proxy and --checkpoint exclude each other: remove --checkpoint, " +
						"because kube-proxy has none")
				}
				return kubeproxy.Cleanup(c.Context())
			}
			if process := runningAgent(true); process != "" {
				return fmt.Errorf("an agent runs on this node (process %s) and would program its rules again: stop "+
					"it first", process)
			}
			err := errors.Join(nftables.Cleanup(c.Context()), iptables.Cleanup(c.Context()), ipvs.Cleanup(c.Context()))
			if path != "" {
				if failed := checkpoint.Remove(path); failed != nil {
					err = errors.Join(err, fmt.Errorf("--checkpoint: %w", failed))
				}
			}
			return err
		},
	}
	c.Flags().StringVar(&path, "checkpoint", "",
		"Path of the checkpoint, as the agents were started with. It is removed, too.")
	c.Flags().BoolVar(&kubeProxys, "kube-proxy", false, "Remove the rules of kube-proxy, and nothing else.")
	return c
}

// runningAgent returns the id of a process that is an agent in this network namespace and, if
// programs is set, programs it. It returns "" if it sees none.
func runningAgent(programs bool) string {
	name, err := os.ReadFile("/proc/self/comm") // the name that the program has on this node
	if err != nil {
		return ""
	}
	for _, process := range daemon.InNetwork(strings.TrimSpace(string(name))) {
		line, err := os.ReadFile(filepath.Join(process, "cmdline"))
		arguments := strings.Split(strings.TrimSuffix(string(line), "\x00"), "\x00")
		// A zombie has no line.
		if err == nil && len(line) > 0 && isAgent(process, arguments[1:], programs) {
			return filepath.Base(process)
		}
	}
	return ""
}

// isAgent reports whether a slicecast-agent with these arguments is an agent and no other command
// and, if programs is set, programs the kernel. process is its folder in /proc. Flags of other
// versions do not matter.
func isAgent(process string, arguments []string, programs bool) bool {
	root := NewCommand()
	root.FParseErrWhitelist.UnknownFlags = true
	if c, _, err := root.Find(arguments); err != nil || c != root {
		return false
	}
	if err := root.ParseFlags(arguments); err != nil {
		return !errors.Is(err, pflag.ErrHelp)
	}
	flags := root.Flags()
	if flags.Changed("init-only") || flags.Changed("migrate-config") {
		return false
	}
	programmer := flags.Lookup("programmer").Value.String()
	if path := flags.Lookup("config").Value.String(); path != "" && !flags.Changed("programmer") {
		programmer = configuredProgrammer(process, path)
	}
	return !programs || programmer != programmerPrinter && programmer != programmerShadow
}

// configuredProgrammer returns the programmer in a configuration file, at the path as a process
// sees it. It returns an empty string if the file does not say or cannot be read.
func configuredProgrammer(process, path string) string {
	start := "cwd"
	if filepath.IsAbs(path) {
		start = "root"
	}
	content, err := os.ReadFile(filepath.Join(process, start, path))
	if err != nil {
		return ""
	}
	var file struct {
		Programmer string `json:"programmer"`
	}
	if err := yaml.Unmarshal(content, &file); err != nil { // fields of other versions do not matter
		return ""
	}
	return file.Programmer
}
