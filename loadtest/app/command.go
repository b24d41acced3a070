// Package app is the slicecast-loadtest command: its flags, and what becomes of reports.
package app

import (
	"context"
	"fmt"
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

// NewCommand makes the command.
func NewCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "slicecast-loadtest",
		Short: "Measure what Slicecast costs with thousands of nodes",
		Long: `slicecast-loadtest simulates the nodes of a cluster on one machine, with the agent's own client, and measures what a
server spends on them and how long changes take to reach them.
` + exitCodes,
		Version:           daemon.Version(),
		SilenceUsage:      true,
		SilenceErrors:     true, // Execute prints it
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
	}
	c.SetVersionTemplate(fmt.Sprintln("slicecast-loadtest", "{{.Version}}"))
	c.AddCommand(newRunCommand(), newAPIServerCommand(), newCompareCommand(), newEstimateCommand(), newShowCommand(), newTargetCommand(), newWorkerCommand())
	return c
}

func newRunCommand() *cobra.Command {
	return newEngineCommand(report.Slicecast, &cobra.Command{
		Use:   "run",
		Short: "Run simulated nodes against Slicecast",
		Long: `run plays a scenario: it connects simulated nodes to servers, each with a connection and a client certificate of its own,
waits until all have the whole state, lets the state change, and reports what that cost. Changes are made at the times that
the scenario says, whether or not earlier ones have arrived.

The state is generated, in a server that run starts; or it is written to a Kubernetes API server (--kube-apiserver) that
run's servers watch; or it is that of a running Slicecast server (--server), whose own changes are observed.

It fails if at the end a node does not hold exactly the true state. What the same would cost with an API server that all nodes watch is what
compare measures, and what a cluster of yours pays what estimate computes.
` + exitCodes,
	})
}

func newAPIServerCommand() *cobra.Command {
	return newEngineCommand(report.KubeAPIServer, &cobra.Command{
		Use:   "apiserver",
		Short: "Run simulated kube-proxies against a Kubernetes API server",
		Long: `apiserver plays a scenario as run does, with nodes that watch a Kubernetes API server as kube-proxies do: Services,
EndpointSlices and their own Node, in protobuf, each over a connection of its own. Without a kubeconfig it starts an API
server. In the cluster of a kubeconfig it writes nothing unless --write-namespace is given.

It fails if at the end a node does not hold exactly what the API server has.
` + exitCodes,
	})
}

// newEngineCommand makes the command that runs a scenario against a peer.
func newEngineCommand(peer report.Peer, c *cobra.Command) *cobra.Command {
	o := &Options{Options: engine.Options{Peer: peer}}
	c.Args = cobra.NoArgs
	c.RunE = func(c *cobra.Command, _ []string) error {
		return Run(c.Context(), *o, c.OutOrStdout(), c.ErrOrStderr())
	}
	o.AddFlags(c.Flags())
	return c
}

func newTargetCommand() *cobra.Command {
	return newChildCommand(engine.ServeCommand, "Serve, as a run says", target.Serve)
}

func newWorkerCommand() *cobra.Command {
	return newChildCommand(engine.WorkCommand, "Simulate nodes, as a run says", worker.Serve)
}

// newChildCommand makes a command with which a run starts parts of itself.
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
