package iptables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/netlink"
)

// These are the names of counters in the kernel (match nfacct), which rules count packets with.
// kube-proxy has such counters, too, with other names.
const (
	invalidCounter   = "slicecast_ct_state_invalid"
	localhostCounter = "slicecast_localhost_nodeports"
)

// counted returns the match that counts every packet that it sees.
func counted(counter string) string { return "-m nfacct --nfacct-name " + counter }

// support is what is known of the match nfacct.
type support int

const (
	unknown support = iota
	supported
	unsupported
)

// chooseCounters decides whether rules count packets, with counters that exist. Rules that the
// kernel holds prove that it can. Otherwise it writes a rule with the match, because
// iptables-restore --test does not ask the kernel.
func (f *kernelFamily) chooseCounters(ctx context.Context) {
	if !f.counters {
		return
	}
	if f.support == unknown && f.held.counted {
		f.support = supported
	}
	if f.support == unknown {
		var rules [tables]bytes.Buffer
		fmt.Fprintf(&rules[filter], "-A %s %s\n", checkChain, counted(invalidCounter))
		switch err := f.tool.try(ctx, &rules); {
		case err == nil:
			f.support = supported
		case errors.As(err, new(*rejectedError)):
			f.support = unsupported
			f.log.Info("The kernel or iptables lacks the match nfacct, some metrics of packets are missing",
				"family", f.family, "err", err)
		default:
			f.log.Debug("Cannot try counters of packets, trying again later", "family", f.family, "err", err)
		}
	}
	f.counters = f.support == supported
	if f.counters && f.metrics != nil {
		f.metrics.counted.Store(true)
	}
}

// withCounters calls use with a socket for counters.
func withCounters(use func(s *netlink.Socket, counter string) error) error {
	s, err := netlink.Open(unix.NETLINK_NETFILTER)
	if err != nil {
		return err
	}
	defer s.Close()
	return errors.Join(use(s, invalidCounter), use(s, localhostCounter))
}

// addCounters creates the counters that do not exist.
func addCounters() error { return withCounters((*netlink.Socket).AddCounter) }

// removeCounters removes the counters that no rule refers to any more.
func removeCounters() error { return withCounters((*netlink.Socket).RemoveCounter) }

// Metrics are kube-proxy's metrics of its mode iptables that are about rules, with kube-proxy's
// names. They have no values unless a Programmer has them.
type Metrics struct {
	rules, written *prometheus.GaugeVec
	// counted is set once a Programmer has created counters. Without it the kernel is not asked for
	// them, because it would load a module to answer.
	counted atomic.Bool
}

// NewMetrics returns Metrics and registers them. Those that the kernel counts are read in the
// network namespace of the thread that gathers metrics.
func NewMetrics(r prometheus.Registerer) *Metrics {
	f := promauto.With(r)
	gauge := func(name, help string) *prometheus.GaugeVec {
		return f.NewGaugeVec(prometheus.GaugeOpts{
			Namespace: "kubeproxy", Name: "sync_proxy_rules_iptables_" + name,
			Help: help + " With --programmer=iptables.",
		}, []string{"table", "ip_family"})
	}
	m := &Metrics{
		rules: gauge("total", "Number of rules in the agent's chains."),
		written: gauge("last", "Number of rules in the chains that the last operation wrote. An operation writes only "+
			"chains that have changed."),
	}
	if r != nil {
		r.MustRegister(
			m.newPackets(invalidCounter, "ct_state_invalid_dropped_packets_total",
				"Number of packets dropped because conntrack finds them invalid. With --programmer=iptables, if the kernel "+
					"and iptables have the match nfacct."),
			m.newPackets(localhostCounter, "localhost_nodeports_accepted_packets_total",
				"Number of connections accepted to NodePorts on loopback addresses, by their first packet. With "+
					"--programmer=iptables, if the kernel and iptables have the match nfacct."),
		)
	}
	return m
}

// wrote records a transaction that a family's kernel has accepted.
func (m *Metrics) wrote(f *kernelFamily, x *transaction) {
	if m == nil {
		return
	}
	for t := range tables {
		m.rules.WithLabelValues(t.String(), f.family.String()).Set(float64(f.held.rules[t]))
		n := bytes.Count(x.parts[t].fresh.Bytes(), []byte("\n")) + bytes.Count(x.parts[t].rules.Bytes(), []byte("\n"))
		m.written.WithLabelValues(t.String(), f.family.String()).Set(float64(n))
	}
}

// packets is a metric of a counter in the kernel. It has no value while there is no such counter.
type packets struct {
	metrics *Metrics
	counter string
	desc    *prometheus.Desc
}

func (m *Metrics) newPackets(counter, name, help string) *packets {
	return &packets{m, counter, prometheus.NewDesc("kubeproxy_iptables_"+name, help, nil, nil)}
}

// Kind returns the type of the metric, for the page of metrics.
func (*packets) Kind() string { return "counter" }

// Describe implements prometheus.Collector.
func (p *packets) Describe(to chan<- *prometheus.Desc) { to <- p.desc }

// Collect implements prometheus.Collector.
func (p *packets) Collect(to chan<- prometheus.Metric) {
	if !p.metrics.counted.Load() {
		return
	}
	s, err := netlink.Open(unix.NETLINK_NETFILTER)
	if err != nil {
		return
	}
	defer s.Close()
	if n, err := s.CounterPackets(p.counter); err == nil {
		to <- prometheus.MustNewConstMetric(p.desc, prometheus.CounterValue, float64(n))
	}
}
