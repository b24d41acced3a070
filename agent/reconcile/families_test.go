// These tests prove that an IP family that fails does not keep the other from being programmed,
// acked and counted as healthy, and that nothing of the failed one is reported as programmed. The
// client's cache and the store are real; the kernel is a fake that fails on request.
package reconcile

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/client"
	"github.com/slicecast/slicecast/agent/client/cache"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

var errLocked = errors.New("another program holds the lock")

// leave makes the kernel refuse everything of exactly these families from now on.
func (n *node) leave(families ...model.Family) {
	n.kernel.out = map[model.Family]error{}
	for _, f := range families {
		n.kernel.out[f] = errLocked
	}
}

// dual writes a Service of both families, with a healthCheckNodePort and a local endpoint in each.
func (n *node) dual(name string) {
	n.t.Helper()
	addresses := map[model.Family][2]string{
		model.IPv4: {fmt.Sprint("10.96.1.", name[0]), "10.0.1.1"}, model.IPv6: {fmt.Sprint("fd00:96::", name[0]), "fd00::1"},
	}
	service := model.Service{
		Namespace: "default", Name: name, Type: model.LoadBalancer, Ports: []model.ServicePort{{Protocol: model.TCP, Port: 80}},
		ExternalTrafficPolicy: model.TrafficLocal, HealthCheckNodePort: 31000 + uint16(name[0]),
	}
	for _, family := range []model.Family{model.IPv4, model.IPv6} {
		service.ClusterIPs = append(service.ClusterIPs, netip.MustParseAddr(addresses[family][0]))
	}
	// The Service comes first: slices without a Service need no programming and would be acked.
	n.store.Upsert(model.NewService(service), 0)
	for family, a := range addresses {
		n.store.Upsert(model.NewSlice(model.Slice{
			Namespace: "default", Name: name + family.String(), Service: name, Family: family, Ports: []model.SlicePort{{Protocol: model.TCP, Port: 80}},
			Endpoints: []model.Endpoint{{Address: netip.MustParseAddr(a[1]), NodeName: "node-1", Conditions: model.Conditions{Ready: true}}},
		}), 0)
	}
	synctest.Wait()
}

// TestFailedFamily asserts that a failed family causes one log line and one nack,
// however many Services it has and however long the failure lasts. Nothing of the family is acked.
// The other family is empty, but it does not make the node count as programmed.
func TestFailedFamily(t *testing.T) {
	var log bytes.Buffer
	run(t, func(t *testing.T, n *node) {
		n.leave(model.IPv4)
		start := time.Now()
		n.write(map[string]int{"a": 1, "b": 1, "c": 1})
		n.sync()
		reason := "nothing of IPv4 is programmed: another program holds the lock"
		for i := range 5 {
			require.Equal(t, []string{"the node: " + reason}, n.reports.nacks)
			// One warning is about the missing Node.
			require.Equal(t, 1, strings.Count(log.String(), "level=ERROR")+strings.Count(log.String(), "level=WARN")-1,
				log.String())
			require.Empty(t, n.reports.acked)
			require.False(t, n.isProgrammed())
			require.Zero(t, n.LastProgrammed(model.IPv4))
			require.NotZero(t, n.LastProgrammed(model.IPv6))
			since, pending := n.Pending(model.IPv4)
			require.True(t, pending)
			require.Equal(t, start, since)
			_, pending = n.Pending(model.IPv6)
			require.False(t, pending)
			require.Equal(t, reason, n.Status().Err)
			require.Zero(t, n.Status().ServicePorts)
			require.EqualValues(t, 1, testutil.ToFloat64(n.metrics.failing.WithLabelValues("IPv4")))
			require.Zero(t, testutil.ToFloat64(n.metrics.failing.WithLabelValues("IPv6")))
			require.Zero(t, n.kernel.applies)
			n.write(map[string]int{"a": 2 + i})
			n.pass(time.Hour)
		}
		n.leave()
		n.pass(maxRetry)
		require.Equal(t, []string{"the node: resolved"}, n.reports.nacks[1:])
		require.Equal(t, []string{"a=6", "b=1", "c=1"}, n.kernel.names())
		require.True(t, n.isProgrammed())
		n.requireAcked()
		require.Empty(t, n.Status().Err)
		require.Zero(t, testutil.ToFloat64(n.metrics.failing.WithLabelValues("IPv4")))

		// A family that worked fails: what has changed in it since then is not acked.
		acked := n.reports.acked[0]
		n.pass(time.Minute)
		n.leave(model.IPv4)
		start = time.Now()
		n.write(map[string]int{"a": 1})
		since, _ := n.Pending(model.IPv4)
		require.Equal(t, start, since)
		n.pass(time.Hour)
		n.write(map[string]int{"a": -1})
		require.Equal(t, acked, n.reports.acked[0])
		require.Len(t, n.reports.nacks, 3)
		n.leave()
		n.pass(maxRetry)
		n.requireAcked()
		require.Len(t, n.reports.nacks, 4)
	}, func(o *Options) { o.Logger = slog.New(slog.NewTextHandler(&log, nil)) })
}

// TestPrimaryFamilyMissing asserts that a node without its primary family is neither ready nor
// healthy, and that it is no fault to lack the other family.
func TestPrimaryFamilyMissing(t *testing.T) {
	run(t, func(t *testing.T, n *node) {
		node := func(ips ...string) {
			o := &model.Node{Name: "node-1"}
			for _, ip := range ips {
				o.Addresses = append(o.Addresses, netip.MustParseAddr(ip))
			}
			n.store.Upsert(o, 0)
			n.pass(maxRetry)
		}
		start := time.Now()
		n.write(map[string]int{"a": 1})
		n.sync()
		for range 3 {
			require.Equal(t, []model.Family{model.IPv4, model.IPv6}, n.Families())
			since, pending := n.Pending(model.IPv4)
			require.True(t, pending)
			require.Equal(t, start, since)
			_, pending = n.Pending(model.IPv6)
			require.False(t, pending)
			require.False(t, n.isProgrammed())
			require.Empty(t, n.reports.acked)
			require.Len(t, n.reports.nacks, 1)
			require.Contains(t, n.reports.nacks[0], "the node: nothing of IPv4 is programmed: ")
			require.EqualValues(t, 1, testutil.ToFloat64(n.metrics.failing.WithLabelValues("IPv4")))
			n.pass(time.Hour)
		}
		node("2001:db8::2", "192.168.0.2")
		require.Equal(t, []model.Family{model.IPv6}, n.Families())
		require.True(t, n.isProgrammed())
		n.requireAcked()
		require.Equal(t, []string{"the node: resolved"}, n.reports.nacks[1:])
		require.Zero(t, testutil.ToFloat64(n.metrics.failing.WithLabelValues("IPv4")))

		node("192.168.0.2")
		require.Equal(t, []model.Family{model.IPv4, model.IPv6}, n.Families())
		_, pending := n.Pending(model.IPv4)
		require.True(t, pending)
	}, func(o *Options) { o.Programmer.(*kernel).families = []model.Family{model.IPv6} })
}

// TestOtherFamilyGoesOn asserts that the failure of one family does not prevent the other from
// being programmed and acked. What concerns both families is acked once both have it.
func TestOtherFamilyGoesOn(t *testing.T) {
	run(t, func(t *testing.T, n *node) {
		n.leave(model.IPv6)
		n.write(map[string]int{"a": 1})
		n.sync()
		n.write(map[string]int{"a": 2, "b": 1})
		require.Equal(t, []string{"a=2", "b=1"}, n.kernel.names())
		n.requireAcked()
		require.Equal(t, 2, n.Status().ServicePorts)
		require.False(t, n.isProgrammed())
		require.NotNil(t, n.kernel.lost, "what is programmed is watched")

		acked := n.reports.acked[0]
		n.dual("d")
		require.Equal(t, []string{"a=2", "b=1", "d=1"}, n.kernel.names())
		n.write(map[string]int{"a": 3})
		require.Equal(t, []string{"a=3", "b=1", "d=1"}, n.kernel.names())
		require.Equal(t, acked, n.reports.acked[0])
		n.store.Remove(model.Key{Kind: model.KindService, Namespace: "default", Name: "d"}, 0)
		n.pass(time.Hour)
		require.Equal(t, acked, n.reports.acked[0], "it is not known that nothing of it is there")
		n.leave()
		n.pass(maxRetry)
		n.requireAcked()
		require.True(t, n.isProgrammed())
		require.Len(t, n.reports.nacks, 2)

		// A Service port fails, and then its family fails as a whole. The port does not count as
		// programmed.
		n.kernel.broken["e"] = true
		n.dual("e")
		require.Len(t, n.reports.nacks, 3)
		n.leave(model.IPv6)
		n.pass(maxRetry)
		delete(n.kernel.broken, "e")
		n.pass(time.Hour)
		require.Len(t, n.reports.nacks, 5)
		require.Equal(t, "e: default/e:/TCP/IPv6: no such port", n.reports.nacks[4])
		n.leave()
		n.pass(maxRetry)
		require.ElementsMatch(t, []string{"the node: resolved", "e: resolved"}, n.reports.nacks[5:])
	})
}

// TestAcksWithAFailedFamily asserts that only shards with something of the failed family are not
// acked.
func TestAcksWithAFailedFamily(t *testing.T) {
	const shards = 16
	runSharded(t, shards, func(t *testing.T, n *node) {
		n.leave(model.IPv6)
		n.write(map[string]int{"a": 1, "b": 1, "c": 1, "d": 1, "e": 1, "f": 1})
		n.sync()
		require.Len(t, n.reports.acked, shards)
		n.dual("g")
		concerned := model.ServiceKey{Namespace: "default", Name: "g"}.Shard(shards)
		n.write(map[string]int{"a": 2, "b": 2, "c": 2, "d": 2, "e": 2, "f": 2})
		for i := range uint32(shards) {
			current := n.reports.acked[i] == n.store.Snapshot(i).Sequence()
			require.Equal(t, i != concerned, current, i)
		}
		n.leave()
		n.pass(maxRetry)
		require.Equal(t, n.store.Snapshot(concerned).Sequence(), n.reports.acked[concerned])
	})
}

// TestHealthChecksOfAFailedFamily asserts that load balancers learn nothing that is not
// programmed.
func TestHealthChecksOfAFailedFamily(t *testing.T) {
	f := &follower{}
	run(t, func(t *testing.T, n *node) {
		id := func(family model.Family) view.HealthCheckID {
			return view.HealthCheckID{Service: model.ServiceKey{Namespace: "default", Name: "d"}, Family: family}
		}
		check := view.HealthCheck{Port: 31100, LocalEndpoints: 1}
		n.leave(model.IPv4)
		n.dual("d")
		n.sync()
		require.Equal(t, map[view.HealthCheckID]view.HealthCheck{id(model.IPv6): check}, f.checks)
		n.leave()
		n.pass(maxRetry)
		require.Equal(t, map[view.HealthCheckID]view.HealthCheck{id(model.IPv6): check, id(model.IPv4): check}, f.checks)
		syncs := f.syncs
		n.write(map[string]int{"a": 1})
		require.Equal(t, syncs, f.syncs)

		n.leave(model.IPv4)
		n.store.Remove(model.Key{Kind: model.KindService, Namespace: "default", Name: "d"}, 0)
		synctest.Wait()
		require.Equal(t, map[view.HealthCheckID]view.HealthCheck{id(model.IPv4): check}, f.checks)
		n.leave()
		n.pass(maxRetry)
		require.Empty(t, f.checks)
	}, func(o *Options) { o.Health = f })
}

// TestHealthCheckOfAFailedService asserts that no load balancer is led to a node whose kernel
// lacks the Service, whichever operation failed, and that it is led there once the kernel has the
// Service.
func TestHealthCheckOfAFailedService(t *testing.T) {
	f := &follower{}
	run(t, func(t *testing.T, n *node) {
		id := view.HealthCheckID{Service: model.ServiceKey{Namespace: "default", Name: "d"}, Family: model.IPv4}
		local := func(want int) {
			t.Helper()
			require.Equal(t, view.HealthCheck{Port: 31100, LocalEndpoints: want}, f.checks[id])
		}
		n.dual("d")
		n.dual("e")
		n.kernel.broken["d"] = true
		n.sync() // by a Replace
		local(0)
		n.pass(time.Hour)
		local(0)
		syncs := f.syncs
		n.write(map[string]int{"a": 1})
		require.Equal(t, syncs, f.syncs)
		delete(n.kernel.broken, "d")
		n.pass(maxRetry)
		local(1)

		endpoint := func(address string) {
			n.store.Upsert(model.NewSlice(model.Slice{
				Namespace: "default", Name: "dIPv4", Service: "d", Family: model.IPv4, Ports: []model.SlicePort{{Protocol: model.TCP, Port: 80}},
				Endpoints: []model.Endpoint{{Address: netip.MustParseAddr(address), NodeName: "node-1", Conditions: model.Conditions{Ready: true}}},
			}), 0)
			synctest.Wait()
		}
		n.kernel.broken["d"], n.kernel.lasting = true, true
		endpoint("10.0.1.2") // by an Apply, which leaves the count of endpoints as it was
		local(0)
		delete(n.kernel.broken, "d")
		endpoint("10.0.1.3")
		local(1)
		for other, check := range f.checks {
			require.Equal(t, 1, check.LocalEndpoints, other)
		}

		// A Service that is served otherwise than it asks for stays a target.
		n.kernel.broken["d"], n.kernel.served = true, []bool{true}
		endpoint("10.0.1.4")
		local(1)
		require.Len(t, n.Status().Failures, 1)
		for i, served := range [][]bool{{false}, {false, true}, {true, false}} {
			n.kernel.served = served
			endpoint(fmt.Sprint("10.0.1.", 5+i))
			local(0)
		}
	}, func(o *Options) { o.Health = f })
}

// TestFailedServicePorts asserts that a Service port that the kernel lacks does not count as
// served.
func TestFailedServicePorts(t *testing.T) {
	run(t, func(t *testing.T, n *node) {
		n.kernel.broken = map[string]bool{"a": true, "b": true}
		n.write(map[string]int{"a": 1, "b": 1})
		n.sync()
		require.Zero(t, n.Status().ServicePorts)
		require.Zero(t, testutil.ToFloat64(n.metrics.ports))
		n.write(map[string]int{"c": 1})
		require.Equal(t, 1, n.Status().ServicePorts)
		n.leave(model.IPv6)
		n.kernel.failures = 1
		n.write(map[string]int{"c": 2})
		require.Equal(t, 1, n.Status().ServicePorts)
		n.leave()
		clear(n.kernel.broken)
		n.pass(maxRetry)
		require.Equal(t, 3, n.Status().ServicePorts)
		n.kernel.broken["c"] = true
		n.write(map[string]int{"c": 3})
		require.Equal(t, 2, n.Status().ServicePorts)
		require.EqualValues(t, 2, testutil.ToFloat64(n.metrics.ports))
	})
}

// TestPositionsOfAnEarlierEpoch asserts that positions that could not be acknowledged, because an
// IP family had failed, are not acknowledged as positions of the next epoch.
func TestPositionsOfAnEarlierEpoch(t *testing.T) {
	w := &cache.Writer{Cache: client.NewCache()}
	k := &kernel{t: t, ports: map[view.ServicePortID]*view.ServicePort{}, broken: map[string]bool{}}
	k.out = map[model.Family]error{model.IPv4: errLocked}
	got := &reports{acked: map[uint32]uint64{}}
	r := New(Options{
		Cache: w.Cache, View: view.New(view.Options{NodeName: "node-1"}), Programmer: k, Reporter: got, FreeMemory: func() {},
		Logger: slog.New(slog.DiscardHandler),
	})
	service := model.NewService(model.Service{
		Namespace: "default", Name: "a", Type: model.ClusterIP, ClusterIPs: []netip.Addr{clusterIP("a")},
		Ports: []model.ServicePort{{Protocol: model.TCP, Port: 80}},
	})
	require.NoError(t, w.Welcome(1, 1))
	_, err := w.Apply(&model.Update{To: 7, Full: true, Services: []*model.Service{service}})
	require.NoError(t, err)
	require.NoError(t, w.InSync([]uint64{7}, model.ResourceVersions{}))
	r.run(t.Context(), time.Now())
	require.Equal(t, map[uint32]uint64{0: 7}, r.unacked)
	require.Empty(t, got.acked)

	require.NoError(t, w.Welcome(2, 1))
	k.out = nil
	r.run(t.Context(), time.Now().Add(time.Hour))
	require.Len(t, k.ports, 1)
	require.EqualValues(t, 2, got.epoch)
	require.Empty(t, got.acked)

	require.NoError(t, w.InSync([]uint64{3}, model.ResourceVersions{}))
	r.run(t.Context(), time.Now())
	require.Equal(t, map[uint32]uint64{0: 3}, got.acked)
}
