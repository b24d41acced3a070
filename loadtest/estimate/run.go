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
)

// Options say what to estimate from. Zero counts of nodes and API servers are taken from the cluster.
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
	fs.StringVar(&o.Kubeconfig, "kubeconfig", "", "kubeconfig file of the cluster, which is only read; default: that of the pod that this runs in")
	fs.StringVar(&o.Manifests, "manifests", "", "a directory of manifests in place of a cluster, such as kubectl get services,endpointslices,nodes -A -o yaml writes")
	fs.DurationVar(&o.Watch, "watch", 10*time.Minute, "how long to watch the cluster; with --manifests: the time that is computed for")
	fs.Float64Var(&o.FlipsPerSecond, "flips-per-second", 0, "with --manifests: how many endpoints turn ready or not ready in a second, which no manifest tells")
	fs.IntVar(&o.Nodes, "nodes", 0, "nodes to compute for; default: as many as there are")
	fs.IntVar(&o.APIServers, "api-servers", 0, "API servers that the nodes' watches are spread over; default: as many as there are, or 1 with --manifests")
	fs.IntVar(&o.Servers, "servers", 2, "Slicecast servers to compute for")
	fs.StringVar(&o.ServiceProxyName, "service-proxy-name", "", "label service.kubernetes.io/service-proxy-name of the Services to serve; default: those without")
}

// Validate finds all that is wrong with the options.
func (o *Options) Validate() error {
	var errs []error
	wrong := func(is bool, format string, args ...any) {
		if is {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	wrong(o.Kubeconfig != "" && o.Manifests != "", "--kubeconfig and --manifests are both given: use one of them")
	if o.Manifests != "" {
		_, err := os.ReadDir(o.Manifests)
		wrong(err != nil, "--manifests: %w: give a directory", err)
	}
	wrong(o.Watch <= 0, "--watch is %v: use a positive duration", o.Watch)
	wrong(o.FlipsPerSecond < 0, "--flips-per-second is %g: use 0 or more", o.FlipsPerSecond)
	wrong(o.FlipsPerSecond > 0 && o.Manifests == "", "--flips-per-second is an assumption for --manifests; a cluster tells by itself")
	wrong(o.Nodes < 0, "--nodes is %d: use 0 (as many as there are) or more", o.Nodes)
	wrong(o.APIServers < 0, "--api-servers is %d: use 0 (as many as there are) or more", o.APIServers)
	errs = append(errs, source.ValidateProxyName(o.ServiceProxyName))
	wrong(o.Servers < 1, "--servers is %d: use at least 1", o.Servers)
	return errors.Join(errs...)
}

// Run makes an estimate, and shows in the view how that goes.
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

var errNoNodes = errors.New("there is no Node to be seen: give --nodes")

// fromManifests counts what is in files, and gives what has to be assumed for that.
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
	flips := "No endpoint flips: no manifest tells how many do, and --flips-per-second is 0."
	if o.FlipsPerSecond > 0 {
		flips = fmt.Sprintf("%g endpoints a second flip (--flips-per-second), each by itself and at random over all EndpointSlices; no manifest tells how many do. "+
			"%d flips were encoded and stand for all.", o.FlipsPerSecond, sampleFlips)
	} else {
		slog.Warn("Nothing changes in this estimate, and what changes is what costs: give --flips-per-second")
	}
	return append([]string{
		flips,
		"Objects have what their files have; what an API server adds to them is missing in today's figures if the files are not from one.",
	}, append(assumptions, m.leftOut()...)...), m.flips(ctx, c, o.FlipsPerSecond, o.Watch)
}

// fromCluster counts what a live cluster has and does, and gives what has to be known about that.
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
	view.Set(func() progress.Status { return progress.Status{Phase: "reading what is there"} })
	if o.Nodes == 0 {
		if o.Nodes, err = l.nodes(ctx); err != nil {
			return nil, err
		}
	}
	if o.Nodes == 0 {
		return nil, errNoNodes // before the watch, which is long
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
			Phase: fmt.Sprintf("watching the cluster, %v to go (^C ends it now, with what there is)", time.Until(end).Round(time.Second)), Received: events.Load(),
		}
	})
	cut, err := l.follow(ctx, c, o.Watch, func(n int) { events.Store(int64(n)) })
	if err != nil {
		return nil, err
	}
	if cut != "" {
		remarks = append(remarks, fmt.Sprintf("The cluster was watched for %.0f s of the %v that were asked for: %s.", c.seconds, o.Watch, cut))
	}
	return remarks, nil
}
