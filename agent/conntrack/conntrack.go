// Package conntrack removes stale UDP flows. The kernel translates a flow's packets as it did the first one, as long as
// there are any: a UDP client that never pauses would go on sending to an endpoint that is gone, or to a Service's address that
// was not one yet. TCP and SCTP connections end by themselves.
//
// A flow to an address of a Service port is stale if it does not lead to one of the port's endpoints that serve: it leads to another one,
// or is not translated. That goes by kube-proxy (pkg/proxy/conntrack), but for three things that kube-proxy 1.36 does not do:
//
//   - Flows of a Service port without endpoints that serve are stale, too (kubernetes/kubernetes#139628): its clients are refused rather than left
//     to send to an endpoint that is gone. If new connections are led to endpoints that do not serve, flows to those stay.
//   - If a Service port, or one of its addresses, is gone, translated flows to it are stale
//     (kubernetes/kubernetes#141371): nothing else would end those to an endpoint that goes later. This
//     holds also for what went while the agent was away, as far as a checkpoint has it (Cleaner.Earlier).
//   - This holds from the first programming on, so that flows from before it, which are not translated, do not last (kubernetes/kubernetes#126532).
//
// NodePorts count on all addresses of the node, also those that they are not on: kube-proxy's iptables mode may have led flows there. Unlike in kube-proxy they
// count on no others, so that the flows of programs to the same port number elsewhere stay.
//
// When UDP Service ports have changed, all of them are looked at after the kernel has been programmed, in a goroutine of its own: one pass over the
// table for each IP family, however many have changed until then. Between passes there is a pause as long as the
// last one, so that a huge table costs half a CPU at most.
package conntrack

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
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
	removed  prometheus.Counter
	failures prometheus.Counter
	seconds  prometheus.Histogram

	// wake holds a value when there is work.
	wake chan struct{}

	mu sync.Mutex // guards what is below
	// ports are the UDP Service ports that the kernel has.
	ports map[view.ServicePortID]*view.ServicePort
	// frontends are theirs.
	frontends map[frontend]*view.ServicePort
	// gone are the frontends that are no Service port's since the last pass.
	gone map[frontend]struct{}
	// pending are the families of which ports have changed.
	pending map[model.Family]bool
}

// flows is a table.
type flows interface {
	dump(family model.Family, f func(flow)) error
	remove(family model.Family, entry flow) error
	close()
}

// New makes a Cleaner.
func New(o Options) *Cleaner {
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	f := promauto.With(o.Registerer)
	return &Cleaner{
		logger: o.Logger, open: func() (flows, error) { return openTable() },
		removed: f.NewCounter(prometheus.CounterOpts{Namespace: "slicecast", Subsystem: "agent", Name: "conntrack_removed_flows_total",
			Help: "Stale UDP flows removed from the kernel's connection tracking table."}),
		failures: f.NewCounter(prometheus.CounterOpts{Namespace: "slicecast", Subsystem: "agent", Name: "conntrack_errors_total",
			Help: "Passes over the kernel's connection tracking table that failed; they are tried again."}),
		seconds: f.NewHistogram(prometheus.HistogramOpts{Namespace: "slicecast", Subsystem: "agent", Name: "conntrack_duration_seconds",
			Help:    "Time to look for stale UDP flows in the kernel's connection tracking table and to remove them.",
			Buckets: prometheus.ExponentialBuckets(1e-4, 4, 10)}),
		wake: make(chan struct{}, 1), ports: make(map[view.ServicePortID]*view.ServicePort),
		frontends: make(map[frontend]*view.ServicePort), gone: make(map[frontend]struct{}), pending: make(map[model.Family]bool),
	}
}

// Changed tells that the kernel has these changes. It does not wait.
func (c *Cleaner) Changed(changes []view.Change) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, change := range changes {
		c.set(change.ID(), change.After)
	}
}

// Replaced tells that the kernel has this state, and nothing else. It does not wait.
func (c *Cleaner) Replaced(state view.State) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for id := range c.ports {
		if state.Ports[id] == nil {
			c.set(id, nil)
		}
	}
	for id, port := range state.Ports {
		c.set(id, port)
	}
}

// Earlier tells of Service ports that an earlier agent may have programmed. Of their frontends, those
// that no Service port has by now are gone. It follows the first Replaced, and does not wait.
func (c *Cleaner) Earlier(ports map[view.ServicePortID]*view.ServicePort) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for id, port := range ports {
		if id.Protocol != model.UDP {
			continue
		}
		for _, f := range port.Frontends {
			c.lose(frontendOf(id, f))
		}
		c.pending[id.Family] = true
	}
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

// pass removes what is stale of a family if any of its Service ports have changed. After an error it is as if they had again.
func (c *Cleaner) pass(family model.Family) error {
	c.mu.Lock()
	due := c.pending[family]
	c.pending[family] = false
	gone := c.takeGone(family)
	c.mu.Unlock()
	if !due {
		return nil
	}
	err := c.clean(family, gone)
	if err != nil {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.putBack(family, gone)
	}
	return err
}

func (c *Cleaner) clean(family model.Family, gone map[frontend]struct{}) error {
	addresses, err := nodeport.Local()
	if err != nil {
		return err
	}
	stale := func(f flow) bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.stale(family, gone, addresses, f)
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
		for _, f := range found {
			if failed == nil && stale(f) { // still: the kernel may have been programmed anew meanwhile, and have made flows in accordance with that
				if failed = removed.remove(family, f); failed == nil {
					c.removed.Inc()
				}
			}
		}
		found = found[:0]
	}
	err = dumped.dump(family, func(f flow) {
		if !stale(f) {
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
