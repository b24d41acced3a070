package app

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/slicecast/slicecast/agent/explain"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/show"
)

// explainTimeout bounds one explanation.
const explainTimeout = 2 * time.Minute

// explainOptions are the flags of explain.
type explainOptions struct {
	verifyOptions

	from string
}

func newExplainCommand() *cobra.Command {
	o := &explainOptions{verifyOptions: verifyOptions{show: show.Options{Wide: true, Once: true, AskTimeout: explainTimeout}}}
	c := &cobra.Command{
		Use:   "explain NAMESPACE/SERVICE[:PORT] --objects=FILE [-- AGENT-FLAGS]",
		Short: "Explain what this node does with the traffic of a Service",
		Long: `explain says for each address of a Service what this node should do with new connections and why, what the rules in the
kernel do with them, and where the flows in conntrack lead. -o wide adds the rules that lead to each backend.

Objects and settings are read as by "slicecast-agent verify". The command fails if the kernel does something else than it
should, or if something cannot be judged.`,
		Example: `  kubectl get services,endpointslices,nodes -A -o json | slicecast-agent explain default/web:http --objects=-`,
		Args: func(c *cobra.Command, args []string) error {
			if n := c.ArgsLenAtDash(); n == 1 || n < 0 && len(args) == 1 {
				return nil
			}
			return errors.New("name one Service: NAMESPACE/SERVICE or NAMESPACE/SERVICE:PORT")
		},
		SilenceUsage:  true,
		SilenceErrors: true, // main prints the error
		RunE: func(c *cobra.Command, args []string) error {
			return o.run(c.Context(), args[0], args[1:], c.InOrStdin(), c.OutOrStdout())
		},
	}
	o.addFlags(c.Flags())
	c.Flags().StringVar(&o.from, "from", "", "Address that connections come from. By default, that of a pod, of the node and of a client outside.")
	return c
}

// question returns what is asked.
func (o *explainOptions) question(name string) (q explain.Question, err error) {
	name, q.Port, _ = strings.Cut(name, ":")
	var ok bool
	if q.Service, ok = model.ParseServiceKey(name); !ok {
		return q, fmt.Errorf("%q is not the name of a Service: use NAMESPACE/SERVICE or NAMESPACE/SERVICE:PORT", name)
	}
	if o.from != "" {
		if q.From, err = netip.ParseAddr(o.from); err != nil {
			return q, fmt.Errorf("--from: %w; use an IP address", err)
		}
		q.From = q.From.Unmap()
	}
	return q, nil
}

// run explains and prints.
func (o *explainOptions) run(ctx context.Context, name string, flags []string, in io.Reader, out io.Writer) error {
	if o.objects == "" {
		return errors.New("--objects is not set: set it to a file, or to - for standard input")
	}
	q, err := o.question(name)
	if err != nil {
		return err
	}
	if err := o.show.Validate(); err != nil {
		return err
	}
	options, proxyName, _, err := settings(flags, o.proxyName)
	if err != nil {
		return err
	}
	objects, err := o.readObjects(in, proxyName)
	if err != nil {
		return err
	}
	v, err := objects.View(options)
	if err != nil {
		return err
	}
	var answer *explain.Answer
	err = o.show.Run(ctx, out, func(ctx context.Context) (show.Report, error) {
		if answer, err = explain.Kernel(ctx, v, q); err != nil {
			return nil, err
		}
		return &explain.Report{Answer: answer, Node: options.NodeName, Service: name}, nil
	})
	switch {
	case err != nil:
		return err
	case answer.Differs():
		return errDiffers
	case len(answer.Unjudged) > 0:
		return errUnjudged
	}
	return nil
}
