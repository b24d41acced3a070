package app

import (
	"bufio"
	"cmp"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/slicecast/slicecast/agent/config"
	"github.com/slicecast/slicecast/agent/programmer/ipvs"
	"github.com/slicecast/slicecast/agent/verify"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/show"
	"github.com/slicecast/slicecast/internal/source/file"
)

// errDiffers is the error of verify if there are differences, and errUnjudged if something could
// not be judged.
var (
	errDiffers  = errors.New("the kernel does not do what the Services say")
	errUnjudged = errors.New("not everything could be judged")
)

// verifyOptions are the flags of verify.
type verifyOptions struct {
	objects   string
	proxyName string
	settle    time.Duration
	show      show.Options
}

func newVerifyCommand() *cobra.Command {
	o := &verifyOptions{show: show.Options{Once: true}}
	c := &cobra.Command{
		Use:   "verify --objects=FILE [-- AGENT-FLAGS]",
		Short: "Compare what this node's kernel does with what the Services say",
		Long: `verify reads the rules that the kernel holds, whether Slicecast or kube-proxy has made them, and evaluates them for
packets to each frontend of each Service, from pods, from the node and from outside. It names each difference from what
the objects say: missing backends and others, policies, masquerading, session affinity, and what no Service has any more.
Nothing is changed, and no packet is sent.

The objects are Services, EndpointSlices, ServiceCIDRs and this machine's Node, as "kubectl get -o json" or "-o yaml"
prints them; gzip is recognized. Kubernetes 1.32 has no ServiceCIDRs, so leave them out there. The settings, such as
--cluster-cidr, are those of the agent that runs on this node. They can also follow after --, for example on a node that
still runs kube-proxy.

A difference that ends within --settle is a change on its way into the kernel and not reported. The command fails if there
are differences, or if something cannot be judged.`,
		Example: `  kubectl get services,endpointslices,servicecidrs,nodes -A -o json | slicecast-agent verify --objects=-
  slicecast-agent verify --objects=objects.json -o json -- --cluster-cidr=10.244.0.0/16 --node-name=node-1`,
		SilenceUsage:  true,
		SilenceErrors: true, // main prints the error
		RunE: func(c *cobra.Command, flags []string) error {
			return o.run(c.Context(), flags, c.InOrStdin(), c.OutOrStdout())
		},
	}
	o.addFlags(c.Flags())
	c.Flags().DurationVar(&o.settle, "settle", 5*time.Second,
		"Time within which a difference may end before it is reported.")
	return c
}

// addFlags adds the flags of both verify and explain.
func (o *verifyOptions) addFlags(fs *pflag.FlagSet) {
	o.show.AddFlags(fs)
	fs.StringVar(&o.objects, "objects", "", "Path of the file with the objects, or - for standard input.")
	fs.StringVar(&o.proxyName, "service-proxy-name", "",
		"Value of the label service.kubernetes.io/service-proxy-name of the Services that the servers serve. Agents beside "+
			"kube-proxy need it. Agents without servers have a setting of their own.")
}

// run compares and prints the result.
func (o *verifyOptions) run(ctx context.Context, flags []string, in io.Reader, out io.Writer) error {
	switch {
	case o.objects == "":
		return errors.New("--objects is not set: set it to a file, or to - for standard input")
	case o.settle < 0:
		return fmt.Errorf("--settle is %v: use 0 or more", o.settle)
	}
	if err := o.show.Validate(); err != nil {
		return err
	}
	options, proxyName, what, err := settings(flags, o.proxyName)
	if err != nil {
		return err
	}
	if what.State, err = o.read(in, proxyName, options); err != nil {
		return err
	}
	o.show.AskTimeout = verifyTimeout + o.settle
	var result verify.Result
	err = o.show.Run(ctx, out, func(ctx context.Context) (show.Report, error) {
		if result, err = verify.Settled(ctx, what, o.settle); err != nil {
			return nil, err
		}
		return &verify.Report{Result: result, Node: options.NodeName}, nil
	})
	switch {
	case err != nil:
		return err
	case len(result.Differences) > 0:
		return errDiffers
	case len(result.Unjudged) > 0:
		return errUnjudged
	}
	return nil
}

// verifyTimeout bounds one comparison.
const verifyTimeout = 5 * time.Minute

// read reads the objects, and returns what the node should do for them.
func (o *verifyOptions) read(in io.Reader, proxyName string, options view.Options) (view.State, error) {
	objects, err := o.readObjects(in, proxyName)
	if err != nil {
		return view.State{}, err
	}
	return objects.State(options)
}

// readObjects reads the objects.
func (o *verifyOptions) readObjects(in io.Reader, proxyName string) (*verify.Objects, error) {
	if o.objects != "-" {
		f, err := os.Open(o.objects)
		if err != nil {
			return nil, fmt.Errorf("--objects: %w", err)
		}
		defer func() { _ = f.Close() }()
		in = f
	}
	in, err := plain(in)
	if err != nil {
		return nil, fmt.Errorf("--objects: %w", err)
	}
	objects := &verify.Objects{}
	err = file.Read(in, "--objects", file.Options{ServiceProxyName: proxyName, Log: slog.New(slog.DiscardHandler)}, objects)
	if err != nil {
		return nil, err
	}
	return objects, nil
}

// plain returns what in has, decompressed if it is compressed by gzip.
func plain(in io.Reader) (io.Reader, error) {
	b := bufio.NewReader(in)
	if magic, err := b.Peek(2); err != nil || magic[0] != 0x1f || magic[1] != 0x8b {
		return b, nil //nolint:nilerr // what is short is not compressed
	}
	return gzip.NewReader(b)
}

// errNoAgent means that no agent runs in this network namespace.
var errNoAgent = errors.New("no agent runs on this node")

// runningFlags returns the flags that the agent on this node was started with.
func runningFlags() ([]string, error) {
	process := runningAgent(false)
	if process == "" {
		return nil, errNoAgent
	}
	line, err := os.ReadFile(filepath.Join("/proc", process, "cmdline"))
	if err != nil {
		return nil, fmt.Errorf("read the flags of the agent that runs: %w", err)
	}
	return strings.Split(strings.TrimSuffix(string(line), "\x00"), "\x00")[1:], nil
}

// parseFlags returns the options that flags of the agent and its configuration file stand for.
func parseFlags(flags []string) (*Options, error) {
	o := &Options{}
	fs := pflag.NewFlagSet("agent", pflag.ContinueOnError)
	o.AddFlags(fs)
	if err := fs.Parse(flags); err != nil {
		return nil, fmt.Errorf("the agent's flags: %w", err)
	}
	return o, cmp.Or(o.file.Read(config.Kind, &config.Agent{}, fs), o.complete())
}

// settings returns the settings that flags of the agent stand for. Without flags, they are those of
// the agent that runs on this node. The name is that of the Services that servers serve. An agent
// with a source of its own knows it better. what lacks the state.
func settings(flags []string, name string) (options view.Options, proxyName string, what verify.Options, err error) {
	if len(flags) == 0 {
		if flags, err = runningFlags(); err != nil {
			return options, "", what, fmt.Errorf("%w: add its flags after --, such as -- --node-name=node-1 --cluster-cidr=10.244.0.0/16", err)
		}
	}
	o, err := parseFlags(flags)
	if err != nil {
		return options, "", what, err
	}
	if err := o.Node.validate(); err != nil {
		return options, "", what, o.file.Named(err)
	}
	if proxyName = name; o.Source != "" {
		proxyName = o.ProxyName
	}
	if o.BesideKubeProxy && proxyName == "" {
		return options, "", what, errors.New("the agent has --beside-kube-proxy, so servers choose its Services: set " +
			"--service-proxy-name to the servers' value or, if they have none, give them one")
	}
	options, err = o.Node.view(o.NodeName)
	if o.Programmer == programmerIPVS {
		options.Schedulers, what.IPVS = ipvs.Schedulers(), o.ipvs(nil)
	}
	what.Beside, what.MasqueradeMark = proxyName != "", 1<<o.Node.MasqueradeBit
	return options, proxyName, what, err
}
