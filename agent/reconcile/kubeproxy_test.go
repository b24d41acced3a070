// These tests prove what kube-proxy's metrics report: how long changes took until the kernel had
// them, by whichever clock, how many operations failed in which family and mode, and how many
// Service ports have no local endpoints. The client's cache and the store are real; the kernel is a
// fake that fails on request.
package reconcile

import (
	"maps"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/client"
	"github.com/slicecast/slicecast/agent/client/cache"
	"github.com/slicecast/slicecast/internal/model"
)

// inMode returns an edit for run that makes metrics of one of kube-proxy's modes.
func inMode(mode string, r *prometheus.Registry) func(*Options) {
	return func(o *Options) { o.Mode, o.Registerer = mode, r }
}

// values returns the values of a metric, by the values of its labels. Of histograms, it is the
// number of observations.
func values(t *testing.T, r *prometheus.Registry, name string) map[string]float64 {
	t.Helper()
	out := map[string]float64{}
	each(t, r, name, func(labels string, m *dto.Metric) {
		out[labels] = m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
	})
	return out
}

func each(t *testing.T, r *prometheus.Registry, name string, do func(labels string, m *dto.Metric)) {
	t.Helper()
	families, err := r.Gather()
	require.NoError(t, err)
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			labels := ""
			for _, l := range m.GetLabel() {
				labels += " " + l.GetValue()
			}
			do(labels[min(1, len(labels)):], m)
		}
	}
}

// trigger writes the slice of a Service with this number of endpoints, as changed at a time.
func (n *node) trigger(name string, count int, at time.Time) {
	n.t.Helper()
	slice := model.Slice{
		Namespace: "default", Name: name, Service: name, Family: model.IPv4, Ports: []model.SlicePort{{Protocol: model.TCP, Port: 80}},
		LastChangeTriggerTimeMS: at.UnixMilli(),
	}
	for i := range count {
		slice.Endpoints = append(slice.Endpoints, model.Endpoint{
			Address: netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), Conditions: model.Conditions{Ready: true},
		})
	}
	n.store.Upsert(model.NewSlice(slice), 0)
	synctest.Wait()
}

const (
	programmingName = "kubeproxy_network_programming_duration_seconds"
	implausibleName = "slicecast_agent_implausible_trigger_times_total"
)

// TestNetworkProgrammingDuration asserts that a change is measured once, from its
// last-change-trigger-time until the kernel has it, and that times that cannot be true are counted
// apart.
func TestNetworkProgrammingDuration(t *testing.T) {
	r := prometheus.NewRegistry()
	sum := func() (seconds float64) {
		each(t, r, programmingName, func(labels string, m *dto.Metric) {
			require.Equal(t, "IPv4", labels)
			seconds = m.GetHistogram().GetSampleSum()
		})
		return seconds
	}
	run(t, func(t *testing.T, n *node) {
		started := time.Now()
		n.pass(time.Hour)
		n.write(map[string]int{"a": 1})
		n.trigger("b", 1, time.Now().Add(-time.Minute))
		n.sync()
		require.Empty(t, values(t, r, programmingName), "the first state is no change")

		n.trigger("a", 2, time.Now().Add(-3*time.Second))
		require.Equal(t, map[string]float64{"IPv4": 1}, values(t, r, programmingName))
		require.InDelta(t, 3, sum(), 0.1)
		n.trigger("a", 3, time.Now().Add(-3*time.Second)) // the same time says nothing new
		require.InDelta(t, 3, sum(), 0.1)
		n.write(map[string]int{"a": 4}) // no time at all
		require.Equal(t, map[string]float64{"IPv4": 1}, values(t, r, programmingName))
		require.Equal(t, map[string]float64{"future": 0, "old": 0}, values(t, r, implausibleName))

		n.trigger("a", 5, time.Now().Add(time.Minute))
		require.Equal(t, map[string]float64{"future": 1, "old": 0}, values(t, r, implausibleName))
		n.trigger("a", 6, started.Add(-time.Second))
		require.Equal(t, map[string]float64{"future": 1, "old": 1}, values(t, r, implausibleName))
		n.pass(48 * time.Hour)
		n.trigger("a", 7, time.Now().Add(-25*time.Hour))
		require.Equal(t, map[string]float64{"future": 1, "old": 2}, values(t, r, implausibleName))
		require.Equal(t, map[string]float64{"IPv4": 1}, values(t, r, programmingName))
	}, inMode("nftables", r))
}

// TestProgrammingThatFails asserts that a change is measured only once the kernel has it, whether
// its family or its Service had failed.
func TestProgrammingThatFails(t *testing.T) {
	r := prometheus.NewRegistry()
	run(t, func(t *testing.T, n *node) {
		n.write(map[string]int{"a": 1, "b": 1})
		n.sync()
		for i, fail := range []struct{ begin, end func() }{
			{func() { n.leave(model.IPv4) }, func() { n.leave() }},
			{func() { n.kernel.broken["a"] = true }, func() { delete(n.kernel.broken, "a") }},
		} {
			fail.begin()
			n.trigger("a", 2+i, time.Now())
			n.pass(5 * time.Second)
			require.Len(t, values(t, r, programmingName), min(i, 1), "nothing more")
			require.Equal(t, float64(i), values(t, r, programmingName)["IPv4"])
			fail.end()
			n.pass(time.Minute)
			require.Equal(t, map[string]float64{"IPv4": float64(i + 1)}, values(t, r, programmingName))
			require.Empty(t, n.kubeProxy.triggers)
		}
	}, inMode("iptables", r))
	each(t, r, programmingName, func(_ string, m *dto.Metric) {
		require.Greater(t, m.GetHistogram().GetSampleSum(), 10.0, "the time of the failures counts")
	})
}

// TestTriggersThatWaitAreBounded asserts that however many changes wait for a kernel that fails,
// their times take little memory.
func TestTriggersThatWaitAreBounded(t *testing.T) {
	k := newKubeProxyMetrics(nil, "nftables", nil, nil)
	for range 3 {
		k.wait(make([]client.Trigger, cache.MaxTriggers/2+1))
	}
	require.Len(t, k.triggers, cache.MaxTriggers)
	k.programmed(time.Now(), func(model.ServiceKey, model.Family) bool { return true })
	require.Empty(t, k.triggers, "they are old")
}

// TestSyncMetrics asserts what is recorded of operations, in each of kube-proxy's modes.
func TestSyncMetrics(t *testing.T) {
	const prefix = "kubeproxy_sync_proxy_rules_"
	for mode, failures := range map[string]map[string]float64{
		"iptables": {"iptables_restore_failures_total": 2, "iptables_partial_restore_failures_total": 1},
		"ipvs":     {"iptables_restore_failures_total": 2},
		"nftables": {"nftables_sync_failures_total": 2},
		"printer":  {},
	} {
		t.Run(mode, func(t *testing.T) {
			r := prometheus.NewRegistry()
			run(t, func(t *testing.T, n *node) {
				require.Empty(t, values(t, r, prefix+"last_timestamp_seconds"))
				n.write(map[string]int{"a": 1, "b": 2})
				n.sync()
				both := map[string]float64{"IPv4": 1, "IPv6": 1}
				require.Equal(t, both, values(t, r, prefix+"duration_seconds"))
				require.Equal(t, both, values(t, r, "kubeproxy_sync_full_proxy_rules_duration_seconds"))
				require.Empty(t, values(t, r, "kubeproxy_sync_partial_proxy_rules_duration_seconds"))
				at := float64(time.Now().Unix())
				require.Equal(t, map[string]float64{"IPv4": at, "IPv6": at}, values(t, r, prefix+"last_timestamp_seconds"))

				n.pass(time.Minute)
				n.write(map[string]int{"a": 2})
				require.Equal(t, map[string]float64{"IPv4": 1}, values(t, r, "kubeproxy_sync_partial_proxy_rules_duration_seconds"))
				require.Equal(t, map[string]float64{"IPv4": at + 60, "IPv6": at + 60}, values(t, r, prefix+"last_timestamp_seconds"))
				require.Equal(t, map[string]float64{"IPv4": at + 60, "IPv6": at + 60}, values(t, r, prefix+"last_queued_timestamp_seconds"))
				require.Equal(t, map[string]float64{"": 2}, values(t, r, prefix+"service_changes_total"))
				require.Equal(t, map[string]float64{"": 3}, values(t, r, prefix+"endpoint_changes_total"))

				// An Apply and the Replace after it fail.
				n.pass(time.Minute)
				n.kernel.failures = 2
				n.write(map[string]int{"a": 3})
				require.Equal(t, at+60, values(t, r, prefix+"last_timestamp_seconds")["IPv4"])
				require.Equal(t, at+120, values(t, r, prefix+"last_queued_timestamp_seconds")["IPv4"])
				for _, name := range []string{"iptables_restore_failures_total", "iptables_partial_restore_failures_total", "nftables_sync_failures_total"} {
					want := map[string]float64{}
					if n, ok := failures[name]; ok {
						want = map[string]float64{"IPv4": n, "IPv6": max(n-1, 0)} // the Apply was about IPv4
					}
					require.Equal(t, want, values(t, r, prefix+name), name)
				}
			}, inMode(mode, r))
		})
	}
}

// TestTimestampOfWhatIsComplete asserts that a family with a refused Service port does not count as
// programmed, as kube-proxy's timestamp stands still while a sync fails.
func TestTimestampOfWhatIsComplete(t *testing.T) {
	const name = "kubeproxy_sync_proxy_rules_last_timestamp_seconds"
	r := prometheus.NewRegistry()
	run(t, func(t *testing.T, n *node) {
		n.write(map[string]int{"a": 1, "b": 1})
		n.sync()
		at := float64(time.Now().Unix())
		n.pass(time.Minute)
		n.kernel.broken["a"], n.kernel.lasting = true, true
		n.write(map[string]int{"a": 2, "b": 2})
		later := float64(time.Now().Unix())
		require.Greater(t, later, at)
		require.Equal(t, map[string]float64{"IPv4": at, "IPv6": later}, values(t, r, name), "Service a is IPv4")
		delete(n.kernel.broken, "a")
		n.pass(time.Minute)
		n.write(map[string]int{"a": 3})
		require.Equal(t, float64(time.Now().Unix()), values(t, r, name)["IPv4"])
	}, inMode("nftables", r))
}

// TestPendingChanges asserts that changes count as pending until a step takes them.
func TestPendingChanges(t *testing.T) {
	r := prometheus.NewRegistry()
	run(t, func(t *testing.T, n *node) {
		n.write(map[string]int{"a": 1})
		n.sync()
		n.kernel.busy = make(chan struct{})
		n.trigger("a", 2, time.Now()) // the step that takes this does not end
		n.trigger("a", 3, time.Now())
		n.write(map[string]int{"b": 1})
		require.Equal(t, 1.0, values(t, r, "kubeproxy_sync_proxy_rules_service_changes_pending")[""])
		require.Equal(t, 2.0, values(t, r, "kubeproxy_sync_proxy_rules_endpoint_changes_pending")[""])
		close(n.kernel.busy)
		synctest.Wait()
		require.Equal(t, 0.0, values(t, r, "kubeproxy_sync_proxy_rules_service_changes_pending")[""])
		require.Equal(t, 0.0, values(t, r, "kubeproxy_sync_proxy_rules_endpoint_changes_pending")[""])
	}, inMode("nftables", r))
}

// TestNoLocalEndpoints asserts that a Service port counts while it has endpoints, none of them on
// this node, and its policy is Local, and that changes are counted as the whole state is.
func TestNoLocalEndpoints(t *testing.T) {
	r := prometheus.NewRegistry()
	run(t, func(t *testing.T, n *node) {
		write := func(name string, internal, external model.TrafficPolicy, nodes ...string) {
			service := model.Service{
				Namespace: "default", Name: name, Type: model.LoadBalancer, ClusterIPs: []netip.Addr{clusterIP(name)},
				Ports:                 []model.ServicePort{{Protocol: model.TCP, Port: 80}},
				LoadBalancerIngress:   []model.LoadBalancerIngress{{IP: netip.AddrFrom4([4]byte{198, 51, 100, name[0]})}},
				InternalTrafficPolicy: internal, ExternalTrafficPolicy: external,
			}
			slice := model.Slice{Namespace: "default", Name: name, Service: name, Family: model.IPv4, Ports: []model.SlicePort{{Protocol: model.TCP, Port: 80}}}
			for i, node := range nodes {
				slice.Endpoints = append(slice.Endpoints, model.Endpoint{
					Address: netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), NodeName: node, Conditions: model.Conditions{Ready: true},
				})
			}
			n.store.Upsert(model.NewService(service), 0)
			n.store.Upsert(model.NewSlice(slice), 0)
			synctest.Wait()
		}
		requireCounts := func(internal, external float64) {
			t.Helper()
			// The labels are sorted by name: ip_family, then traffic_policy.
			want := map[string]float64{"IPv4 internal": internal, "IPv4 external": external, "IPv6 internal": 0, "IPv6 external": 0}
			require.Equal(t, want, values(t, r, "kubeproxy_sync_proxy_rules_no_local_endpoints_total"))
			incremental := maps.Clone(n.kubeProxy.noLocal)
			state := n.View.State()
			n.kubeProxy.countLocal(n.families, nil, &state)
			require.Equal(t, n.kubeProxy.noLocal[localPolicy{"internal", model.IPv4}], incremental[localPolicy{"internal", model.IPv4}])
			require.Equal(t, n.kubeProxy.noLocal[localPolicy{"external", model.IPv4}], incremental[localPolicy{"external", model.IPv4}])
		}
		write("a", model.TrafficLocal, model.TrafficLocal, "node-2")
		write("b", model.TrafficCluster, model.TrafficLocal, "node-2")
		n.sync()
		requireCounts(1, 2)
		write("c", model.TrafficLocal, model.TrafficCluster, "node-2", "node-3")
		requireCounts(2, 2)
		write("a", model.TrafficLocal, model.TrafficLocal, "node-2", "node-1")
		requireCounts(1, 1)
		write("b", model.TrafficCluster, model.TrafficLocal) // no endpoints at all
		requireCounts(1, 0)
		n.write(map[string]int{"c": -1})
		requireCounts(0, 0)
	}, inMode("nftables", r))
}
