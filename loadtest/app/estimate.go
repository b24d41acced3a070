package app

import (
	"fmt"
	"log/slog"

	"github.com/spf13/cobra"

	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/internal/source/kube"
	"github.com/slicecast/slicecast/loadtest/estimate"
	"github.com/slicecast/slicecast/loadtest/progress"
)

func newEstimateCommand() *cobra.Command {
	var o estimate.Options
	var log daemon.LogOptions
	var output string
	c := &cobra.Command{
		Use:   "estimate",
		Short: "Compute what the distribution of Services costs a cluster today and with Slicecast",
		Long: `estimate reads a cluster's Services and EndpointSlices, watches their changes for a while, and computes what their distribution
to all nodes costs: today, with kube-proxies that watch the API server, and with Slicecast. It writes nothing to the cluster. It
needs permission to list and watch Services and EndpointSlices, and to list Nodes.

Bytes are those of the cluster's own objects and changes, as an API server and as Slicecast encode them. CPU time is computed
from the measurements of docs/performance.md. Every figure comes with its arithmetic, and all assumptions are listed.

  slicecast-loadtest estimate --kubeconfig=$HOME/.kube/config --watch=1h
  slicecast-loadtest estimate --manifests=dump --nodes=5000 --flips-per-second=3
` + exitCodes,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := o.Validate(); err != nil {
				return usageError{err}
			}
			if output != outputText && output != outputJSON {
				return usageError{fmt.Errorf("--output is %q: use text or json", output)}
			}
			view := progress.New(c.ErrOrStderr())
			logger, err := log.NewLogger(view.Log())
			if err != nil {
				return usageError{err}
			}
			slog.SetDefault(logger)
			kube.RouteLogs(logger)
			end := show(c.Context(), view)
			e, err := estimate.Run(c.Context(), o, view)
			end()
			if err != nil {
				return err
			}
			return printResult(c.OutOrStdout(), output, e)
		},
	}
	o.AddFlags(c.Flags())
	c.Flags().StringVarP(&output, "output", "o", outputText, "output format: text or json")
	log.AddFlags(c.Flags())
	return c
}
