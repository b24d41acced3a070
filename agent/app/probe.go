package app

import (
	"fmt"
	"log/slog"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/slicecast/slicecast/internal/probe"
)

// newProbeCommand returns the command that kubectl slicecast runs in Pods of its own.
func newProbeCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "probe",
		Short: "Send packets to Services and answer them, for kubectl slicecast",
		Long:  `probe is what the Pods of "kubectl slicecast connectivity" run. It connects to no server of Slicecast and needs no privileges.`,
		Args:  cobra.NoArgs,
	}
	s := probe.Server{}
	serve := &cobra.Command{
		Use:   "serve",
		Short: "Answer each request with a name and the client's address",
		Args:  cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			s.Logger = slog.New(slog.NewTextHandler(c.ErrOrStderr(), nil))
			return s.Run(c.Context())
		},
	}
	serve.Flags().StringVar(&s.Name, "name", "", "Name in answers.")
	serve.Flags().IntVar(&s.Port, "port", 8080, "First port of TCP and UDP.")
	serve.Flags().IntVar(&s.Ports, "ports", 1, "Number of ports.")
	serve.Flags().IntVar(&s.HealthPort, "health-port", 8078, "Port of /ready, by HTTP.")
	dial := &cobra.Command{
		Use:   "dial",
		Short: "Carry out the plans on standard input, a JSON array, and print a line of JSON for each attempt",
		Args:  cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return probe.Run(c.Context(), c.InOrStdin(), c.OutOrStdout())
		},
	}
	ready := &cobra.Command{
		Use:   "ready true|false",
		Short: "Make the server in this Pod ready or not",
		Args:  cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			ready, err := strconv.ParseBool(args[0])
			if err != nil {
				return fmt.Errorf("%q: use true or false", args[0])
			}
			return probe.SetReady(c.Context(), ready)
		},
	}
	wait := &cobra.Command{
		Use:   "wait",
		Short: "Do nothing, so that other commands can be run in this Pod",
		Args:  cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			<-c.Context().Done()
			return nil
		},
	}
	for _, sub := range []*cobra.Command{serve, dial, ready, wait} {
		sub.SilenceUsage, sub.SilenceErrors = true, true // main prints the error
		c.AddCommand(sub)
	}
	return c
}
