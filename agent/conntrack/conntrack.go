// Package conntrack removes stale UDP flows. The kernel translates a flow's packets as it did the first one, as long as
// there are any: a UDP client that never pauses would go on sending to an endpoint that is gone, or to a Service's address that
// was not one yet. TCP and SCTP connections end by themselves.
//
// What is stale goes by kube-proxy 1.36 (pkg/proxy/conntrack), and a little further:
//
//   - A flow to an address of a Service port that does not lead to one of its endpoints that serve, be it that it leads to
//     another one or nowhere else, is stale, if any endpoint serves: a flow stays as long as the client has nowhere better to go.
//   - A flow to an external IP, load balancer IP or NodePort that is no Service's any more, but leads to an endpoint, is stale.
//     (Those to a cluster IP that is gone stay, as connections do.)
//
// NodePorts count on the node's own addresses that they are on, so that other programs' flows to the same port number stay.
//
// Service ports that changed are looked at after the kernel has been programmed, in a goroutine of its own: one pass over the
// table for each IP family, however many Service ports have changed until then. Between passes there is a pause as long as the
// last one, so that a huge table costs half a CPU at most.
package conntrack

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/slicecast/slicecast/agent/nodeport"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// batch is how many stale flows are kept in memory until they are removed.
const batch = 4096

// Pauses before a pass that failed is tried again.
const (
	minRetry = time.Second
	maxRetry = time.Minute
)

// Options set up a Cleaner.
type Options struct {
	Logger     *slog.Logger          // nil: slog's default
	Registerer prometheus.Registerer // nil: no metrics
}

// Cleaner removes stale flows. It must be told of every change, and be run.
type Cleaner struct {
	logger   *slog.Logger
	open     func() (flows, error)
	addrs    func(view.Node) ([]netip.Addr, error)
	removed  prometheus.Counter
	failures prometheus.Counter
	seconds  prometheus.Histogram

	// wake holds a value when there is work.
	wake chan struct{}

	mu   sync.Mutex // guards what is below
	node view.Node
	// ports are the UDP Service ports that the kernel has.
	ports   map[view.ServicePortID]*view.ServicePort
	pending map[model.Family]*work
}

// flows is a table.
type flows interface {
	dump(family model.Family, f func(flow)) error
	remove(family model.Family, entry flow) error
	close()
}

// work is what the next pass has to look at.
type work struct {
	changed map[view.ServicePortID]struct{}
	// gone are frontends that a Service port had and has no more, see key.
	gone map[netip.AddrPort]struct{}
}

func newWork() *work {
	return &work{map[view.ServicePortID]struct{}{}, map[netip.AddrPort]struct{}{}}
}

func (w *work) add(o *work) {
	maps.Copy(w.changed, o.changed)
	maps.Copy(w.gone, o.gone)
}

// New makes a Cleaner.
func New(o Options) *Cleaner {
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	f := promauto.With(o.Registerer)
	return &Cleaner{
		logger: o.Logger, addrs: nodeport.Addresses, open: func() (flows, error) { return openTable() },
		removed: f.NewCounter(prometheus.CounterOpts{Namespace: "slicecast", Subsystem: "agent", Name: "conntrack_removed_flows_total",
			Help: "Stale UDP flows removed from the kernel's connection tracking table."}),
		failures: f.NewCounter(prometheus.CounterOpts{Namespace: "slicecast", Subsystem: "agent", Name: "conntrack_errors_total",
			Help: "Passes over the kernel's connection tracking table that failed; they are tried again."}),
		seconds: f.NewHistogram(prometheus.HistogramOpts{Namespace: "slicecast", Subsystem: "agent", Name: "conntrack_duration_seconds",
			Help:    "Time to look for stale UDP flows in the kernel's connection tracking table and to remove them.",
			Buckets: prometheus.ExponentialBuckets(1e-4, 4, 10)}),
		wake: make(chan struct{}, 1), ports: make(map[view.ServicePortID]*view.ServicePort),
		pending: map[model.Family]*work{model.IPv4: newWork(), model.IPv6: newWork()},
	}
}

// Changed tells that the kernel has these changes. It does not wait.
func (c *Cleaner) Changed(changes []view.Change, node view.Node) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.node = node
	for _, change := range changes {
		c.set(change.ID(), change.After)
	}
}

// Replaced tells that the kernel has this state, and nothing else. It does not wait.
func (c *Cleaner) Replaced(state view.State) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.node = state.Node
	for id := range c.ports {
		if state.Ports[id] == nil {
			c.set(id, nil)
		}
	}
	for id, port := range state.Ports {
		c.set(id, port)
	}
}

// set takes note of a Service port; nil: it is gone. c.mu is held.
func (c *Cleaner) set(id view.ServicePortID, after *view.ServicePort) {
	if id.Protocol != model.UDP {
		return
	}
	pending := c.pending[id.Family]
	if before := c.ports[id]; before != nil {
		for _, f := range before.Frontends {
			stays := after != nil && slices.ContainsFunc(after.Frontends, func(g view.Frontend) bool { return key(g) == key(f) })
			if f.Kind != view.ClusterIP && !stays {
				pending.gone[key(f)] = struct{}{}
			}
		}
	}
	if after == nil {
		delete(c.ports, id)
	} else {
		c.ports[id] = after
	}
	pending.changed[id] = struct{}{}
	c.alarm()
}

func (c *Cleaner) alarm() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// Run removes stale flows until the context ends.
func (c *Cleaner) Run(ctx context.Context) {
	var retry time.Duration
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.wake:
		}
		start := time.Now()
		err := errors.Join(c.pass(model.IPv4), c.pass(model.IPv6))
		pause := time.Since(start)
		c.seconds.Observe(pause.Seconds())
		switch {
		case err != nil:
			c.failures.Inc()
			if retry == 0 {
				c.logger.Warn("Can't remove stale UDP flows; some clients may go on sending to endpoints that are gone. It is tried again. "+
					"The agent needs the capability NET_ADMIN, and the kernel the module nf_conntrack_netlink", "err", err)
			}
			retry = min(max(2*retry, minRetry), maxRetry)
			pause = retry
			c.alarm()
		case retry > 0:
			c.logger.Info("Stale UDP flows are removed again")
			retry = 0
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
	}
}

// pass removes what is stale of the pending work of a family. After an error the work is pending again.
func (c *Cleaner) pass(family model.Family) error {
	c.mu.Lock()
	todo := c.pending[family]
	c.pending[family] = newWork()
	stale := c.judge(todo)
	node := c.node
	c.mu.Unlock()
	if len(stale.frontends) == 0 {
		return nil
	}
	err := c.clean(family, node, todo, stale)
	if err != nil {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.pending[family].add(todo)
	}
	return err
}

func (c *Cleaner) clean(family model.Family, node view.Node, todo *work, stale judge) error {
	var err error
	if stale.nodePorts {
		if stale.addrs, err = c.addrs(node); err != nil {
			return err
		}
	}
	dumped, err := c.open()
	if err != nil {
		return err
	}
	defer dumped.close()
	removed, err := c.open()
	if err != nil {
		return err
	}
	defer removed.close()
	var found []flow
	var failed error
	remove := func() {
		// The kernel may have been programmed anew since the pass began, and have made flows in accordance with that.
		c.mu.Lock()
		now := c.judge(todo, c.pending[family])
		c.mu.Unlock()
		now.addrs = stale.addrs
		for _, f := range found {
			if failed == nil && now.is(f) {
				if failed = removed.remove(family, f); failed == nil {
					c.removed.Inc()
				}
			}
		}
		found = found[:0]
	}
	err = dumped.dump(family, func(f flow) {
		if !stale.is(f) {
			return
		}
		f.message = bytes.Clone(f.message)
		if found = append(found, f); len(found) == batch {
			remove()
		}
	})
	remove()
	return errors.Join(err, failed)
}
