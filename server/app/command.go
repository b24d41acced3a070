// Package app implements the slicecast-server command: its flags, and the server that they
// configure.
package app

import (
	"context"
	"log/slog"
	"os"

	"github.com/spf13/cobra"

	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/internal/source/kube"
)

// run runs a server until ctx ends. Errors name the flags that they are about.
func (o *Options) run(ctx context.Context) error {
	logger, err := o.log.NewLogger(os.Stderr)
	if err != nil {
		return err
	}
	slog.SetDefault(logger)
	kube.RouteLogs(logger)
	config, err := o.Complete(logger)
	if err != nil {
		return err
	}
	server, err := New(config)
	if err != nil {
		return err
	}
	return server.Run(ctx)
}

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
			if err := options.file.Read(fileKind, &serverConfiguration{}, command.Flags()); err != nil {
				return err
			}
			return options.file.Named(options.run(command.Context()))
		},
	}
	daemon.AddVersion(command)
	options.AddFlags(command.Flags())
	command.AddCommand(newStatusCommand())
	return command
}
