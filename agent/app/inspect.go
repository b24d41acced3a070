package app

import (
	"github.com/spf13/cobra"

	"github.com/slicecast/slicecast/agent/inspect"
)

// newInspectCommand returns the command that kubectl slicecast bugreport runs in agents' Pods.
func newInspectCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "inspect",
		Short: "Print what the kernel of this node holds and what the agent serves, for bug reports",
		Long: `inspect prints the rules of nftables, iptables and IPVS, the kernel's version, modules and settings, the counts of
connection tracking, the addresses, and the metrics and settings of the agent that runs on this node. It changes nothing.
Of an agent that does not serve its settings, as beside kube-proxy, they are what its command line and its configuration
file say. The output has a JSON object for each part, one a line. "kubectl slicecast bugreport" runs it in the agents'
Pods.`,
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true, // main prints the error
		RunE: func(c *cobra.Command, _ []string) error {
			return inspect.Write(c.Context(), inspectOptions(), c.OutOrStdout())
		},
	}
}

// inspectOptions returns where the pages of the running agent are, and its settings.
func inspectOptions() (i inspect.Options) {
	flags, err := runningFlags()
	var o *Options
	if err == nil {
		o, err = parseFlags(flags)
	}
	if err != nil {
		i.Unknown = err
		return i
	}
	i.Pages, i.SecureMetrics, i.Settings = o.Pages, o.SecureMetricsAddress, o.configz()
	if len(o.MetricsAddresses) > 0 {
		i.Address = o.MetricsAddresses[0]
	}
	return i
}
