// Package app is the slicecast-loadtest command: its flags, and a run from the start of the server to the report.
package app

import (
	"fmt"
	"log/slog"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"

	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/loadtest/target"
	"github.com/slicecast/slicecast/loadtest/usage"
)

// serveCommand is the command with which a run starts its server.
const serveCommand = "serve-generated"

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
	c.AddCommand(newRunCommand(), newShowCommand(), newCompareCommand(), newServeCommand())
	return c
}

func newRunCommand() *cobra.Command {
	o := &Options{}
	c := &cobra.Command{
		Use:   "run",
		Short: "Run simulated nodes against a server",
		Long: `run connects simulated nodes to a server, each with a connection and a client certificate of its own, waits until all have
the whole state, lets the state change, and reports what that cost.

Without --server it starts a server with generated state as a separate process and drives the changes: at the times that
--churn says, whether or not earlier ones have arrived. With --server it observes the changes that a running server has.

It fails if at the end a node does not hold exactly the true state.
` + exitCodes,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			logger, err := o.Log.NewLogger(c.ErrOrStderr())
			if err != nil {
				return err
			}
			slog.SetDefault(logger)
			if err := collectLess(); err != nil {
				return err
			}
			return Run(c.Context(), *o, logger, c.OutOrStdout(), c.ErrOrStderr())
		},
	}
	o.AddFlags(c.Flags())
	return c
}

// collectLess has garbage collected less often, as long as there is room for it: the caches of thousands of nodes are long to
// scan, and the CPU time is needed.
func collectLess() error {
	const share = 2
	machine, err := usage.ThisMachine()
	if err != nil {
		return err
	}
	debug.SetGCPercent(garbagePercent)
	debug.SetMemoryLimit(machine.Memory / share)
	return nil
}

const garbagePercent = 400

// pauseCollection collects garbage for the last time until resume is called, as long as there is room for what comes: each of
// a thousand nodes would else wait for what is collected of the others, as nodes with a machine of their own do not.
func pauseCollection() (resume func()) {
	runtime.GC()
	debug.SetGCPercent(-1)
	return func() { debug.SetGCPercent(garbagePercent) }
}

func newServeCommand() *cobra.Command {
	var log daemon.LogOptions
	c := &cobra.Command{
		Use:    serveCommand,
		Short:  "Serve generated state, as standard input says",
		Hidden: true, // it is run's
		Args:   cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			logger, err := log.NewLogger(c.ErrOrStderr())
			if err != nil {
				return err
			}
			logger = logger.With("process", "server")
			slog.SetDefault(logger)
			return target.Serve(c.Context(), c.InOrStdin(), c.OutOrStdout(), logger)
		},
	}
	log.AddFlags(c.Flags())
	return c
}
