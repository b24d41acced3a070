package estimate

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync/atomic"
	"time"

	"github.com/spf13/pflag"

	"github.com/slicecast/slicecast/internal/source"
	"github.com/slicecast/slicecast/internal/source/kube"
	"github.com/slicecast/slicecast/loadtest/performance"
	"github.com/slicecast/slicecast/loadtest/progress"
	"github.com/slicecast/slicecast/loadtest/scenario"
)

// Options say what to estimate from. If Nodes or APIServers is 0, the number comes from the
// cluster.
type Options struct {
	Kubeconfig       string
	Manifests        string
	ServiceProxyName string
	Watch            time.Duration
	FlipsPerSecond   float64
	Nodes            int
	APIServers       int
	Servers          int
}

// AddFlags adds the flags, with their defaults.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&o.Kubeconfig, "kubeconfig", "",
		"kubeconfig of the cluster, which is only read; by default, that of the pod that the program runs in")
	fs.StringVar(&o.Manifests, "manifests", "", "directory of manifests to use instead of a cluster, such as the "+
		"output of kubectl get services,endpointslices,nodes -A -o yaml")
	fs.DurationVar(&o.Watch, "watch", 10*time.Minute, "how long to watch the cluster; with --manifests: the time to compute for")
	fs.Float64Var(&o.FlipsPerSecond, "flips-per-second", 0, "with --manifests: how many endpoints become ready or not ready per second")
	fs.IntVar(&o.Nodes, "nodes", 0, "number of nodes to compute for; by default, that of the cluster or the manifests")
	fs.IntVar(&o.APIServers, "api-servers", 0,
		"number of API servers that share the nodes' watches; by default, that of the cluster, or 1 with --manifests")
	fs.IntVar(&o.Servers, "servers", 2, "number of Slicecast servers to compute for")
	fs.StringVar(&o.ServiceProxyName, "service-proxy-name", "", "value of the label "+
		"service.kubernetes.io/service-proxy-name of the Services to serve; by default, those without the label")
}

// Validate returns all errors in the options.
func (o *Options) Validate() error {
	var wrong scenario.Mistakes
	wrong.When(o.Kubeconfig != "" && o.Manifests != "", "--kubeconfig and --manifests are both given: use one of them")
	if o.Manifests != "" {
		_, err := os.ReadDir(o.Manifests)
		wrong.When(err != nil, "--manifests: %w: use a directory", err)
	}
	wrong.When(o.Watch <= 0, "--watch is %v: use a positive duration", o.Watch)
	wrong.When(o.FlipsPerSecond < 0, "--flips-per-second is %g: use 0 or more", o.FlipsPerSecond)
	wrong.When(o.FlipsPerSecond > 0 && o.Manifests == "", "--flips-per-second requires --manifests: with a cluster, changes are counted")
	wrong.When(o.Nodes < 0, "--nodes is %d: use 0 (the number of the cluster) or more", o.Nodes)
	wrong.When(o.APIServers < 0, "--api-servers is %d: use 0 (the number of the cluster) or more", o.APIServers)
	wrong = append(wrong, source.ValidateProxyName(o.ServiceProxyName))
	wrong.When(o.Servers < 1, "--servers is %d: use at least 1", o.Servers)
	return errors.Join(wrong...)
}

// Run computes an estimate, and shows its progress in the view.
func Run(ctx context.Context, o Options, view *progress.View) (*Estimate, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	c, err := newCount(o.ServiceProxyName)
	if err != nil {
		return nil, err
	}
	out := &Estimate{Schema: Schema, Start: time.Now()}
	var own []string
	if o.Manifests != "" {
		own, err = o.fromManifests(ctx, c, out)
	} else {
		own, err = o.fromCluster(ctx, c, out, view)
	}
	view.Set(nil)
	if err != nil {
		return nil, err
	}
	c.end()
	m, err := performance.CheckedIn()
	if err != nil {
		return nil, err
	}
	if out.Sections, out.Assumptions, err = conclude(m, c, o.Nodes, o.APIServers, o.Servers); err != nil {
		return nil, err
	}
	out.Assumptions = append(own, out.Assumptions...)
	return out, nil
}

var errNoNodes = errors.New("there are no Nodes: use --nodes")

// fromManifests counts the objects in files. It returns the assumptions that this requires.
func (o *Options) fromManifests(ctx context.Context, c *count, out *Estimate) (assumptions []string, err error) {
	m, err := readManifests(o.Manifests, o.ServiceProxyName)
	if err != nil {
		return nil, err
	}
	out.Source = "manifests in " + o.Manifests
	for _, x := range m.objects {
		if err := c.begin(x); err != nil {
			return nil, err
		}
	}
	if err := c.begun(); err != nil {
		return nil, err
	}
	if o.Nodes == 0 {
		o.Nodes = m.nodes
	}
	if o.Nodes == 0 {
		return nil, errNoNodes
	}
	if o.APIServers == 0 {
		o.APIServers = 1
		assumptions = append(assumptions, "There is one API server (--api-servers).")
	}
	flips := "No endpoint flips: manifests do not say how many do, and --flips-per-second is 0."
	if o.FlipsPerSecond > 0 {
		flips = fmt.Sprintf("%g endpoints per second flip (--flips-per-second), each by itself and at random over "+
			"all EndpointSlices; manifests do not say how many do. "+
			"%d flips were encoded and represent all of them.", o.FlipsPerSecond, sampleFlips)
	} else {
		slog.Warn("The estimate has no changes, which cause most of the costs; set --flips-per-second")
	}
	return append([]string{
		flips,
		"Objects have the content of their files. If the files are not from an API server, today's figures lack what an API server would add.",
	}, append(assumptions, m.leftOut()...)...), m.flips(ctx, c, o.FlipsPerSecond, o.Watch)
}

// fromCluster counts the objects and events of a live cluster. It returns remarks for readers of
// the estimate.
func (o *Options) fromCluster(ctx context.Context, c *count, out *Estimate, view *progress.View) (remarks []string, err error) {
	config, err := kube.Config(o.Kubeconfig)
	if err != nil {
		return nil, err
	}
	out.Source = "cluster " + config.Host
	l, err := newCluster(config, o.ServiceProxyName)
	if err != nil {
		return nil, err
	}
	view.Set(func() progress.Status { return progress.Status{Phase: "reading the cluster's objects"} })
	if o.Nodes == 0 {
		if o.Nodes, err = l.nodes(ctx); err != nil {
			return nil, err
		}
	}
	if o.Nodes == 0 {
		return nil, errNoNodes // fail before the long watch
	}
	if o.APIServers == 0 {
		if o.APIServers, err = l.apiServers(ctx); err != nil {
			return nil, err
		}
	}
	if err := l.list(ctx, c); err != nil {
		return nil, err
	}
	if err := c.begun(); err != nil {
		return nil, err
	}
	var events atomic.Int64
	end := time.Now().Add(o.Watch)
	view.Set(func() progress.Status {
		return progress.Status{
			Phase: fmt.Sprintf("watching the cluster, %v left (^C ends the watch and computes the estimate)",
				time.Until(end).Round(time.Second)), Received: events.Load(),
		}
	})
	cut, err := l.follow(ctx, c, o.Watch, func(n int) { events.Store(int64(n)) })
	if err != nil {
		return nil, err
	}
	if cut != "" {
		remarks = append(remarks, fmt.Sprintf("The cluster was watched for %.0f s of the requested %v: %s.", c.seconds, o.Watch, cut))
	}
	return remarks, nil
}
