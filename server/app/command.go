// Package app implements the slicecast-server command: its flags, and the server that they
// configure.
package app

import (
	"log/slog"
	"os"

	"github.com/spf13/cobra"

	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/internal/source/kube"
)

// NewCommand returns the command.
func NewCommand() *cobra.Command {
	options := &Options{}
	command := &cobra.Command{
		Use:   "slicecast-server",
		Short: "Stream changes of Kubernetes Services to the agents on the nodes",
		Long: `slicecast-server watches the Services and EndpointSlices of a cluster once, and streams their changes to the agents
on the nodes, over gRPC.

An agent authenticates with its kubelet's client certificate (--client-ca-file) or with a ServiceAccount token
(--agent-service-account). It is served as the node that its credentials name. The organization of a client certificate
also identifies relays (slicecast:relays), observers (slicecast:observers) and operators (system:masters).`,
		Args:              cobra.NoArgs,
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
		SilenceUsage:      true,
		SilenceErrors:     true, // main prints the error
		RunE: func(command *cobra.Command, _ []string) error {
			logger, err := options.log.NewLogger(os.Stderr)
			if err != nil {
				return err
			}
			slog.SetDefault(logger)
			kube.RouteLogs(logger)
			config, err := options.Complete(logger)
			if err != nil {
				return err
			}
			server, err := New(config)
			if err != nil {
				return err
			}
			return server.Run(command.Context())
		},
	}
	daemon.AddVersion(command)
	options.AddFlags(command.Flags())
	command.AddCommand(newStatusCommand())
	return command
}
