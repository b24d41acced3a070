package app

import (
	"fmt"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/slicecast/slicecast/agent/config"
	"github.com/slicecast/slicecast/agent/inspect"
)

// newInspectCommand returns the command that kubectl slicecast bugreport runs in agents' Pods.
func newInspectCommand() *cobra.Command {
	var config string
	c := &cobra.Command{
		Use:   "inspect",
		Short: "Print what the kernel of this node holds and what the agent serves, for bug reports",
		Long: `inspect prints the rules of nftables, iptables and IPVS, the kernel's version, modules and settings, the counts of
connection tracking, the addresses, and the agent's metrics and settings. It changes nothing. The output has a JSON object
for each part, one a line. "kubectl slicecast bugreport" runs it in the agents' Pods.`,
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true, // main prints the error
		RunE: func(c *cobra.Command, _ []string) error {
			address, err := pagesAddress(config)
			if err != nil {
				return err
			}
			return inspect.Write(c.Context(), inspect.Options{Pages: address}, c.OutOrStdout())
		},
	}
	c.Flags().StringVar(&config, "config", "", "Path to the configuration file that the agent was started with.")
	return c
}

// pagesAddress returns the first address of the agent's pages, according to a configuration file;
// empty if there is none.
func pagesAddress(path string) (string, error) {
	o := &Options{}
	fs := pflag.NewFlagSet("", pflag.ContinueOnError)
	o.AddFlags(fs)
	if err := fs.Set("config", path); err != nil {
		return "", fmt.Errorf("--config: %w", err)
	}
	if err := o.file.Read(config.Kind, &config.Agent{}, fs); err != nil {
		return "", err
	}
	if len(o.MetricsAddresses) == 0 {
		return "", nil
	}
	return o.MetricsAddresses[0], nil
}
