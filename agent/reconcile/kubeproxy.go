package reconcile

import (
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/slicecast/slicecast/agent/client"
	"github.com/slicecast/slicecast/agent/client/cache"
	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// maxProgramming is the longest time between a change and its programming that counts as measured.
// A longer one says that clocks differ, or that somebody has made up the time of the change.
const maxProgramming = 24 * time.Hour

// kubeProxyMetrics are the metrics of kube-proxy 1.37 about syncs of its rules, with kube-proxy's
// names, types, labels and buckets (pkg/proxy/metrics of Kubernetes). Their label ip_family is
// model.Family.String.
type kubeProxyMetrics struct {
	seconds, fullSeconds, partialSeconds *prometheus.HistogramVec
	programming                          *prometheus.HistogramVec
	lastQueued, lastTimestamp            *prometheus.GaugeVec
	noLocalEndpoints                     *prometheus.GaugeVec
	// failures and partialFailures count operations that could not program everything of a family, and
	// those of them that were not a Replace. They are nil if kube-proxy's mode of the same name has no
	// such metric.
	failures, partialFailures *prometheus.CounterVec
	// implausible counts, by reason, changes whose time cannot be true.
	implausible *prometheus.CounterVec

	// started is when the process started to watch; earlier changes are not measured.
	started time.Time
	// triggers are the times of changes that the kernel does not hold yet.
	triggers []client.Trigger
	// noLocal counts, by policy and family, the Service ports that drop what is led to local
	// endpoints.
	noLocal map[localPolicy]int
}

// localPolicy is a traffic policy (internal or external) in an IP family.
type localPolicy struct {
	policy string
	family model.Family
}

// newKubeProxyMetrics returns the metrics and registers them. The failures that kube-proxy counts
// in one of its modes only have values in that mode only.
func newKubeProxyMetrics(r prometheus.Registerer, mode string, c *client.Cache, families []model.Family) *kubeProxyMetrics {
	f := promauto.With(r)
	label := []string{"ip_family"}
	histogram := func(name, help string, buckets []float64) *prometheus.HistogramVec {
		return f.NewHistogramVec(prometheus.HistogramOpts{Namespace: "kubeproxy", Name: name, Help: help, Buckets: buckets}, label)
	}
	gauge := func(name, help string, labels ...string) *prometheus.GaugeVec {
		return f.NewGaugeVec(prometheus.GaugeOpts{Namespace: "kubeproxy", Name: name, Help: help}, append(labels, label...))
	}
	durations := prometheus.ExponentialBuckets(0.001, 2, 15)
	k := &kubeProxyMetrics{
		seconds: histogram("sync_proxy_rules_duration_seconds",
			"Time to program the kernel in seconds. What changes in both IP families is programmed in one operation, "+
				"whose time counts for both.", durations),
		programming: histogram("network_programming_duration_seconds",
			"Time from a change of endpoints, by the EndpointSlice's last-change-trigger-time, until the kernel had it, in "+
				"seconds. It is only as exact as the clocks of the node and the control plane agree; see "+
				"slicecast_agent_implausible_trigger_times_total.", programmingBuckets()),
		lastQueued: gauge("sync_proxy_rules_last_queued_timestamp_seconds",
			"Time at which the agent last noticed changes to program, in seconds since 1970."),
		lastTimestamp: gauge("sync_proxy_rules_last_timestamp_seconds",
			"Time at which the kernel last held everything of the IP family, in seconds since 1970."),
		noLocalEndpoints: gauge("sync_proxy_rules_no_local_endpoints_total",
			"Number of Service ports with endpoints, but with none on this node although their traffic policy "+
				"(internal or external) is Local. Unlike with kube-proxy, a port without an address or NodePort for "+
				"clients outside of the cluster does not count as external.", "traffic_policy"),
		implausible: f.NewCounterVec(prometheus.CounterOpts{
			Namespace: "slicecast", Subsystem: "agent", Name: "implausible_trigger_times_total",
			Help: "Number of changes of endpoints that are missing in kubeproxy_network_programming_duration_seconds " +
				"because of their time, by reason: future (the clocks of node and control plane differ) or old (before the " +
				"agent's start, or more than a day ago).",
		}, []string{"reason"}),
		started: time.Now(),
	}
	for _, reason := range []string{"future", "old"} {
		k.implausible.WithLabelValues(reason)
	}
	k.fullSeconds = histogram("sync_full_proxy_rules_duration_seconds",
		"Time to program the whole state of the kernel in seconds; see kubeproxy_sync_proxy_rules_duration_seconds.",
		durations)
	k.partialSeconds = histogram("sync_partial_proxy_rules_duration_seconds",
		"Time to program changes in the kernel in seconds; see kubeproxy_sync_proxy_rules_duration_seconds.", durations)
	k.registerFailures(f, mode, families)
	k.registerCounts(f, c)
	return k
}

// registerFailures registers the metrics of operations that failed, and chooses those of a mode.
func (k *kubeProxyMetrics) registerFailures(f promauto.Factory, mode string, families []model.Family) {
	failures := func(name, help string) *prometheus.CounterVec {
		return f.NewCounterVec(prometheus.CounterOpts{
			Namespace: "kubeproxy", Name: "sync_proxy_rules_" + name, Help: help,
		}, []string{"ip_family"})
	}
	restores := failures("iptables_restore_failures_total",
		"Number of operations that could not program everything of the IP family. With --programmer=iptables or ipvs; "+
			"the latter does not use iptables.")
	partialRestores := failures("iptables_partial_restore_failures_total",
		"Number of operations that could not program all changes of the IP family. With --programmer=iptables.")
	syncs := failures("nftables_sync_failures_total",
		"Number of operations that could not program everything of the IP family. With --programmer=nftables.")
	switch mode {
	case "iptables":
		k.failures, k.partialFailures = restores, partialRestores
	case "ipvs":
		k.failures = restores
	case "nftables":
		k.failures = syncs
	}
	for _, v := range []*prometheus.CounterVec{k.failures, k.partialFailures} {
		for _, family := range families {
			if v != nil {
				v.WithLabelValues(family.String())
			}
		}
	}
}

// registerCounts registers the metrics about changes that the cache has noticed.
func (k *kubeProxyMetrics) registerCounts(f promauto.Factory, c *client.Cache) {
	for _, one := range []struct {
		name, help string
		of         func(cache.Counts) uint64
	}{
		{"endpoint", "changes of EndpointSlices", func(n cache.Counts) uint64 { return n.Slices }},
		{"service", "changes of Services", func(n cache.Counts) uint64 { return n.Services }},
	} {
		name := "sync_proxy_rules_" + one.name + "_changes_"
		f.NewCounterFunc(prometheus.CounterOpts{
			Namespace: "kubeproxy", Name: name + "total",
			Help: "Number of " + one.help + " that the agent has received. Changes that the servers have merged count once.",
		}, func() float64 {
			all, _ := c.Counts()
			return float64(one.of(all))
		})
		f.NewGaugeFunc(prometheus.GaugeOpts{
			Namespace: "kubeproxy", Name: name + "pending",
			Help: "Number of " + one.help + " that the agent has received and not begun to program.",
		}, func() float64 {
			_, pending := c.Counts()
			return float64(one.of(pending))
		})
	}
}

// programmingBuckets returns kube-proxy's buckets of network_programming_duration_seconds. The
// first one, which is for negative durations, is always empty here.
func programmingBuckets() []float64 {
	return slices.Concat(
		[]float64{0}, prometheus.LinearBuckets(0.25, 0.25, 2), prometheus.LinearBuckets(1, 1, 59),
		prometheus.LinearBuckets(60, 5, 12), prometheus.LinearBuckets(120, 30, 7),
	)
}

// queued notes that there are changes to program.
func (k *kubeProxyMetrics) queued(families []model.Family) {
	for _, family := range families {
		k.lastQueued.WithLabelValues(family.String()).SetToCurrentTime()
	}
}

// observe records an operation of the programmer that concerned these families.
func (k *kubeProxyMetrics) observe(full bool, families []model.Family, took time.Duration, err error) {
	ports, failed := programmer.Split(err, families)
	byKind := k.partialSeconds
	if full {
		byKind = k.fullSeconds
	}
	for _, family := range families {
		label := family.String()
		k.seconds.WithLabelValues(label).Observe(took.Seconds())
		byKind.WithLabelValues(label).Observe(took.Seconds())
		refused := slices.ContainsFunc(ports, func(p *programmer.PortError) bool { return p.ID.Family == family })
		if failed[family] == nil && !refused {
			continue
		}
		if k.failures != nil {
			k.failures.WithLabelValues(label).Inc()
		}
		if k.partialFailures != nil && !full {
			k.partialFailures.WithLabelValues(label).Inc()
		}
	}
}

// wait adds the times of changes that were taken from the cache.
func (k *kubeProxyMetrics) wait(triggers []client.Trigger) {
	room := max(cache.MaxTriggers-len(k.triggers), 0)
	k.triggers = append(k.triggers, triggers[:min(len(triggers), room)]...)
}

// programmed records the changes that the kernel holds by now. lacks reports whether it lacks
// something of a Service in a family.
func (k *kubeProxyMetrics) programmed(now time.Time, lacks func(model.ServiceKey, model.Family) bool) {
	k.triggers = slices.DeleteFunc(k.triggers, func(t client.Trigger) bool {
		at := time.UnixMilli(t.TimeMS)
		took := now.Sub(at)
		switch {
		case at.Before(k.started), took > maxProgramming:
			k.implausible.WithLabelValues("old").Inc()
		case lacks(t.Service, t.Family):
			return false
		case took < 0:
			k.implausible.WithLabelValues("future").Inc()
		default:
			k.programming.WithLabelValues(t.Family.String()).Observe(took.Seconds())
		}
		return true
	})
	if len(k.triggers) == 0 {
		k.triggers = nil // a large change must not keep its memory
	}
}

// countLocal counts the Service ports without local endpoints anew. If state is nil, it counts what
// changes have made of the last count.
func (k *kubeProxyMetrics) countLocal(families []model.Family, changes []view.Change, state *view.State) {
	if state != nil {
		k.noLocal = make(map[localPolicy]int)
		for _, port := range state.Ports {
			k.addLocal(port, 1)
		}
	} else {
		for _, c := range changes {
			k.addLocal(c.Before, -1)
			k.addLocal(c.After, 1)
		}
	}
	for _, family := range families {
		for _, policy := range []string{"internal", "external"} {
			n := k.noLocal[localPolicy{policy, family}]
			k.noLocalEndpoints.WithLabelValues(policy, family.String()).Set(float64(n))
		}
	}
}

// addLocal adds n to the counts that a Service port belongs to. The view drops connections only if
// a traffic policy is Local and no endpoint of the node can have them.
func (k *kubeProxyMetrics) addLocal(port *view.ServicePort, n int) {
	if port == nil {
		return
	}
	var internal, external bool
	for _, f := range port.Frontends {
		if f.Others.To == view.Drop {
			internal = internal || f.Kind == view.ClusterIP
			external = external || f.Kind != view.ClusterIP
		}
	}
	if internal {
		k.noLocal[localPolicy{"internal", port.ID.Family}] += n
	}
	if external {
		k.noLocal[localPolicy{"external", port.ID.Family}] += n
	}
}
