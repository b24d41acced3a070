// Package app implements the slicecast-loadtest command: its flags, and the presentation of
// reports.
package app

import (
	"context"
	"io"
	"log/slog"
	"os"

	"github.com/spf13/cobra"

	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/loadtest/engine"
	"github.com/slicecast/slicecast/loadtest/report"
	"github.com/slicecast/slicecast/loadtest/target"
	"github.com/slicecast/slicecast/loadtest/worker"
)

// NewCommand returns the command.
func NewCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "slicecast-loadtest",
		Short: "Measure what Slicecast costs with thousands of nodes",
		Long: `slicecast-loadtest simulates the nodes of a cluster on one machine, with the agent's own client. It measures what the nodes
cost a server and how long changes take to reach them.
` + exitCodes,
		SilenceUsage:      true,
		SilenceErrors:     true, // Execute prints them
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
	}
	daemon.AddVersion(c)
	c.AddCommand(newRunCommand(), newAPIServerCommand(), newCompareCommand(), newEstimateCommand(), newShowCommand(),
		newChildCommand(engine.ServeCommand, "Serve state as a run configures it", target.Serve),
		newChildCommand(engine.WorkCommand, "Simulate nodes as a run configures them", worker.Serve))
	return c
}

func newRunCommand() *cobra.Command {
	return newEngineCommand(report.Slicecast, &cobra.Command{
		Use:   "run",
		Short: "Run simulated nodes against Slicecast",
		Long: `run plays a scenario. It connects simulated nodes to servers, each with a connection and a client certificate of its own,
waits until all nodes have the whole state, lets the state change, and reports the costs. Changes happen at the times that
the scenario sets, whether or not earlier changes have arrived.

By default, a server that run starts generates the state. With --kube-apiserver, the state is that of a Kubernetes API server,
which run's servers watch. With --server, the state is that of a running Slicecast server, whose own changes are observed.

The run fails if a node does not hold exactly the true state at the end. See compare for what the same scenario costs with an
API server that all nodes watch, and estimate for the costs in your cluster.
` + exitCodes,
	})
}

func newAPIServerCommand() *cobra.Command {
	return newEngineCommand(report.KubeAPIServer, &cobra.Command{
		Use:   "apiserver",
		Short: "Run simulated kube-proxies against a Kubernetes API server",
		Long: `apiserver plays a scenario as run does, but its nodes watch a Kubernetes API server as kube-proxies do: Services,
EndpointSlices and their own Node, in protobuf. Each node has a connection of its own. Without a kubeconfig, apiserver starts
an API server. With a kubeconfig, it writes nothing to the cluster unless --write-namespace is set.

The run fails if a node does not hold exactly what the API server has at the end.
` + exitCodes,
	})
}

func newEngineCommand(peer report.Peer, c *cobra.Command) *cobra.Command {
	o := &Options{Options: engine.Options{Peer: peer}}
	c.Args = cobra.NoArgs
	c.RunE = func(c *cobra.Command, _ []string) error {
		return Run(c.Context(), *o, c.OutOrStdout(), c.ErrOrStderr())
	}
	o.AddFlags(c.Flags())
	return c
}

// newChildCommand returns a hidden command with which a run starts a server or a worker.
func newChildCommand(name, short string, serve func(context.Context, io.Reader, io.WriteCloser, *slog.Logger) error) *cobra.Command {
	var log daemon.LogOptions
	c := &cobra.Command{
		Use:    name,
		Short:  short,
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			logger, err := log.NewLogger(c.ErrOrStderr())
			if err != nil {
				return err
			}
			logger = logger.With("process", name)
			slog.SetDefault(logger)
			return serve(c.Context(), os.Stdin, os.Stdout, logger)
		},
	}
	log.AddFlags(c.Flags())
	return c
}
