// Package conntrack removes stale UDP flows. The kernel translates all packets of a flow as it
// translated the first one, for as long as packets keep coming. A UDP client that never pauses
// would otherwise go on sending to an endpoint that is gone, or untranslated to an address that has
// become a Service's since. TCP and SCTP connections end by themselves.
//
// A flow to an address of a Service port is stale if it does not lead to one of the port's serving
// endpoints: it leads elsewhere, or is not translated. This is what kube-proxy does
// (pkg/proxy/conntrack), with three additions that kube-proxy 1.36 lacks:
//
//   - Flows of a Service port without serving endpoints are stale, too
//     (kubernetes/kubernetes#139628). Its clients are refused, rather than left sending to an
//     endpoint that is gone. If new connections go to endpoints that do not serve, flows to these
//     endpoints stay.
//   - If a Service port or one of its addresses is gone, translated flows to it are stale
//     (kubernetes/kubernetes#141371). Otherwise, nothing would end such a flow when its endpoint is
//     removed later. This includes what was removed while the agent was away, as far as a
//     checkpoint knows it (Cleaner.Earlier).
//   - These rules apply from the first programming on, so that untranslated flows from before it
//     end (kubernetes/kubernetes#126532).
//
// A NodePort counts on all addresses of the node, even on those where it is not open, because
// kube-proxy's iptables mode may have led flows there. Unlike in kube-proxy, it counts on no other
// addresses, so that flows of other programs to the same port number elsewhere stay.
//
// After the kernel has been programmed, a goroutine looks for stale flows of all Service ports if a
// UDP Service port has changed. It makes one pass over the table for each IP family, however many
// ports have changed until then. After a pass it pauses for as long as the pass took, so that a
// huge table costs at most half a CPU.
package conntrack

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/netlink"
	"github.com/slicecast/slicecast/agent/nodeport"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// batch is the number of stale flows that are collected before they are removed.
const batch = 4096

// minRetry and maxRetry bound the back-off before a failed pass is tried again.
const (
	minRetry = time.Second
	maxRetry = time.Minute
)

// Options configure a Cleaner.
type Options struct {
	Logger     *slog.Logger          // nil means slog's default logger
	Registerer prometheus.Registerer // nil means that metrics are not registered
}

// Cleaner removes stale flows. Its Changed and Replaced have to be called for every change of the
// kernel's state, and Run has to be running.
//
// Invariants, while mu is not held:
//
//  1. frontends contains exactly the frontends of the entries of ports.
//  2. A frontend in frontends is not in gone.
//  3. If ports or gone have changed since a family's last successful pass began, the family is in
//     pending, or a pass over it is in progress.
type Cleaner struct {
	logger   *slog.Logger
	open     func() (table, error)
	removed  prometheus.Counter
	failures prometheus.Counter
	seconds  prometheus.Histogram
	// familySeconds and familyRemoved are kube-proxy's metrics of the same, by family.
	familySeconds *prometheus.HistogramVec
	familyRemoved *prometheus.CounterVec

	// wake holds a value if there is work.
	wake chan struct{}

	mu sync.Mutex // guards the fields below
	// ports are the UDP Service ports that the kernel holds.
	ports map[view.ServicePortID]*view.ServicePort
	// frontends are the frontends of ports, with the Service port that has each.
	frontends map[frontend]*view.ServicePort
	// gone contains the frontends that no Service port has any more, until a pass takes them.
	gone map[frontend]struct{}
	// pending contains the families whose flows have to be looked at.
	pending map[model.Family]bool
}

// table is a socket for the kernel's connection tracking table.
type table interface {
	Flows(family model.Family, protocol byte, each func(netlink.Flow)) error
	RemoveFlow(family model.Family, attributes []byte) error
	Close()
}

// New returns a Cleaner.
func New(o Options) *Cleaner {
	f := promauto.With(o.Registerer)
	return &Cleaner{
		logger: cmp.Or(o.Logger, slog.Default()),
		open:   func() (table, error) { return netlink.Open(unix.NETLINK_NETFILTER) },
		removed: f.NewCounter(prometheus.CounterOpts{
			Namespace: "slicecast", Subsystem: "agent", Name: "conntrack_removed_flows_total",
			Help: "Stale UDP flows removed from the kernel's connection tracking table.",
		}),
		failures: f.NewCounter(prometheus.CounterOpts{
			Namespace: "slicecast", Subsystem: "agent", Name: "conntrack_errors_total",
			Help: "Passes over the kernel's connection tracking table that failed; they are tried again.",
		}),
		seconds: f.NewHistogram(prometheus.HistogramOpts{
			Namespace: "slicecast", Subsystem: "agent", Name: "conntrack_duration_seconds",
			Help:    "Time to look for stale UDP flows in the kernel's connection tracking table and to remove them.",
			Buckets: prometheus.ExponentialBuckets(1e-4, 4, 10),
		}),
		familySeconds: f.NewHistogramVec(prometheus.HistogramOpts{
			Namespace: "kubeproxy", Name: "conntrack_reconciler_sync_duration_seconds",
			Help:    "Time to look for stale UDP flows of an IP family and to remove them, in seconds.",
			Buckets: prometheus.ExponentialBuckets(0.001, 2, 15),
		}, []string{"ip_family"}),
		familyRemoved: f.NewCounterVec(prometheus.CounterOpts{
			Namespace: "kubeproxy", Name: "conntrack_reconciler_deleted_entries_total",
			Help: "Stale UDP flows of an IP family removed from the kernel's connection tracking table.",
		}, []string{"ip_family"}),
		wake: make(chan struct{}, 1), ports: make(map[view.ServicePortID]*view.ServicePort),
		frontends: make(map[frontend]*view.ServicePort), gone: make(map[frontend]struct{}),
		pending: make(map[model.Family]bool),
	}
}

// Changed records that the kernel holds these changes. It does not block.
func (c *Cleaner) Changed(changes []view.Change) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, change := range changes {
		c.set(change.ID(), change.After)
	}
}

// Replaced records that the kernel holds this state and nothing else. It does not block.
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

// Earlier records Service ports that an earlier agent may have programmed. Those of their frontends
// that no Service port has now count as gone. It has to follow the first Replaced, and does not
// block.
func (c *Cleaner) Earlier(ports map[view.ServicePortID]*view.ServicePort) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for id, port := range ports {
		if id.Protocol != model.UDP {
			continue
		}
		for _, f := range port.Frontends {
			c.markGone(frontendOf(id, f))
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

// Run removes stale flows until ctx ends.
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
				c.logger.Warn("Cannot remove stale UDP flows, trying again; the agent needs the capability NET_ADMIN and the "+
					"kernel module nf_conntrack_netlink", "err", err)
			}
			retry = min(max(2*retry, minRetry), maxRetry)
			pause = retry
			c.alarm()
		case retry > 0:
			c.logger.Info("Removing stale UDP flows works again")
			retry = 0
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
	}
}

// pass removes the stale flows of a family if the family is pending. If that fails, the family is
// pending again.
func (c *Cleaner) pass(family model.Family) error {
	c.mu.Lock()
	due := c.pending[family]
	c.pending[family] = false
	gone := c.takeGone(family)
	c.mu.Unlock()
	if !due {
		return nil
	}
	start := time.Now()
	err := c.clean(family, gone)
	c.familySeconds.WithLabelValues(family.String()).Observe(time.Since(start).Seconds())
	if err != nil {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.pending[family] = true // invariant 3
		for at := range gone {
			c.markGone(at)
		}
	}
	return err
}

func (c *Cleaner) clean(family model.Family, gone map[frontend]struct{}) error {
	addresses, err := nodeport.Local()
	if err != nil {
		return err
	}
	stale := func(f netlink.Flow) bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.stale(family, gone, addresses, f)
	}
	dumped, err := c.open()
	if err != nil {
		return err
	}
	defer dumped.Close()
	removed, err := c.open()
	if err != nil {
		return err
	}
	defer removed.Close()
	var found []netlink.Flow
	var failed error
	count := c.familyRemoved.WithLabelValues(family.String())
	remove := func() {
		for _, f := range found {
			// The flow may have been made by rules that were programmed since it was found.
			if failed == nil && stale(f) {
				if failed = removed.RemoveFlow(family, f.Attributes); failed == nil {
					c.removed.Inc()
					count.Inc()
				}
			}
		}
		found = found[:0]
	}
	err = dumped.Flows(family, unix.IPPROTO_UDP, func(f netlink.Flow) {
		if f.Original.Protocol != unix.IPPROTO_UDP || !stale(f) {
			return
		}
		f.Attributes = bytes.Clone(f.Attributes)
		if found = append(found, f); len(found) == batch {
			remove()
		}
	})
	remove()
	return errors.Join(err, failed)
}
