// These tests prove that conntrack, health checks and the node's health follow what the kernel
// holds, not what the server has sent. They also prove when everything is programmed anew, and how
// long a change counts as pending. The kernel is a fake, and the clock is a bubble's.
package reconcile

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/client"
	"github.com/slicecast/slicecast/agent/client/checkpoint"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/bounded"
	"github.com/slicecast/slicecast/internal/model"
)

// follower implements Flows and Health, and records its calls.
type follower struct {
	heard   []string
	earlier map[view.ServicePortID]*view.ServicePort
	checks  map[view.HealthCheckID]view.HealthCheck
	node    view.Node
	syncs   int
}

func (f *follower) Changed(changes []view.Change) {
	for _, c := range changes {
		f.heard = append(f.heard, "changed "+c.ID().Service.Name)
	}
}

func (f *follower) Replaced(view.State) { f.heard = append(f.heard, "replaced") }

func (f *follower) Earlier(ports map[view.ServicePortID]*view.ServicePort) {
	f.heard, f.earlier = append(f.heard, "earlier"), ports
}

func (f *follower) Sync(checks map[view.HealthCheckID]view.HealthCheck, node view.Node) {
	f.checks, f.node = checks, node
	f.syncs++
}

func TestFlowsFollowTheKernel(t *testing.T) {
	f := &follower{}
	run(t, func(t *testing.T, n *node) {
		n.write(map[string]int{"a": 1})
		require.Empty(t, f.heard)
		n.sync()
		require.Equal(t, []string{"replaced"}, f.heard)
		n.write(map[string]int{"a": 2})
		require.Equal(t, []string{"changed a"}, f.heard[1:])
		n.kernel.failures = 2
		n.write(map[string]int{"b": 2})
		require.Len(t, f.heard, 2, "nothing is known to be programmed")
		n.pass(minRetry)
		require.Equal(t, []string{"replaced"}, f.heard[2:])
		n.store.Upsert(model.NewService(model.Service{Namespace: "default", Name: "headless", Type: model.ClusterIP}), 0)
		synctest.Wait()
		require.Len(t, f.heard, 3, "nothing has changed")
	}, func(o *Options) { o.Flows = f })
}

// TestFlowsReceiveEarlierPorts asserts that an agent that starts with a checkpoint calls Earlier
// once, when the kernel has the present state. The call has all UDP Service ports that the kernel
// may have held before, with all their frontends.
func TestFlowsReceiveEarlierPorts(t *testing.T) {
	f := &follower{}
	var kept *checkpoint.Checkpoint
	path := filepath.Join(t.TempDir(), "checkpoint")
	edit := func(o *Options) {
		o.Flows = f
		kept = checkpoint.Open(checkpoint.Options{Path: path, NodeName: "node-1", Cache: o.Cache, Logger: o.Logger})
	}
	dns := model.NewService(model.Service{
		Namespace: "default", Name: "dns", Type: model.LoadBalancer, ClusterIPs: []netip.Addr{clusterIP("dns")},
		ExternalIPs: []netip.Addr{netip.MustParseAddr("192.168.99.100")}, LoadBalancerIngress: []model.LoadBalancerIngress{{IP: netip.MustParseAddr("198.51.100.4")}},
		Ports: []model.ServicePort{
			{Name: "udp", Protocol: model.UDP, Port: 53, NodePort: 30053}, {Name: "tcp", Protocol: model.TCP, Port: 53, NodePort: 30053},
		},
	})
	run(t, func(t *testing.T, n *node) {
		n.store.Upsert(dns, 0)
		n.write(map[string]int{"web": 1})
		n.sync()
		n.write(map[string]int{"web": 2})
		require.Equal(t, []string{"replaced", "changed web"}, f.heard, "there was no checkpoint")
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		kept.Run(ctx)
	}, edit)

	*f = follower{}
	run(t, func(t *testing.T, n *node) {
		n.kernel.failures = 1
		n.write(map[string]int{"web": 1})
		n.sync()
		require.Empty(t, f.heard)
		n.pass(minRetry)
		require.Equal(t, []string{"replaced", "earlier"}, f.heard)
		udp := view.ServicePortID{Service: dns.ServiceKey(), Port: "udp", Protocol: model.UDP, Family: model.IPv4}
		require.Contains(t, f.earlier, udp)
		var frontends []string
		for _, at := range f.earlier[udp].Frontends {
			frontends = append(frontends, fmt.Sprint(at.Kind, " ", at.Address, " ", at.Port))
		}
		require.ElementsMatch(t, []string{
			"clusterIP 10.96.0.100 53", "externalIP 192.168.99.100 53", "loadBalancer 198.51.100.4 53", "nodePort invalid IP 30053",
		}, frontends)
		n.kernel.lost("somebody flushed the table")
		synctest.Wait()
		require.Equal(t, []string{"replaced"}, f.heard[2:], "once")
	}, edit)
}

// keeper is a kernel that holds what an earlier agent programmed.
type keeper struct {
	*kernel
	intact bool
}

func (k *keeper) Intact(context.Context, view.State) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.intact
}

func (k *keeper) set(intact bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.intact = intact
}

// TestKernelAheadIsKept asserts that a checkpoint is not programmed over what may be later, as long
// as that is intact: until a server has brought the cache in sync, or others have removed it. For
// health checks the node is programmed meanwhile.
func TestKernelAheadIsKept(t *testing.T) {
	path := filepath.Join(t.TempDir(), "checkpoint")
	open := func(o *Options) *checkpoint.Checkpoint {
		return checkpoint.Open(checkpoint.Options{Path: path, NodeName: "node-1", Cache: o.Cache, Logger: o.Logger})
	}
	lb := model.NewService(model.Service{
		Namespace: "default", Name: "lb", Type: model.LoadBalancer, ClusterIPs: []netip.Addr{clusterIP("lb")},
		ExternalTrafficPolicy: model.TrafficLocal, HealthCheckNodePort: 31000, Ports: []model.ServicePort{{Protocol: model.TCP, Port: 80}},
	})
	var saved *checkpoint.Checkpoint
	run(t, func(t *testing.T, n *node) {
		n.store.Upsert(lb, 0)
		n.write(map[string]int{"web": 1})
		n.sync()
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		saved.Run(ctx)
	}, func(o *Options) { saved = open(o) })

	for name, test := range map[string]func(t *testing.T, n *node, k *keeper, f *follower){
		"until a server is in reach": func(t *testing.T, n *node, _ *keeper, f *follower) {
			n.store.Upsert(lb, 0)
			n.write(map[string]int{"web": 1})
			n.sync()
			require.Equal(t, 1, n.kernel.replaces, "the kernel may hold something else, although the cache is the same")
			require.Equal(t, []string{"web=1"}, n.kernel.names()[1:])
			require.Equal(t, []string{"replaced"}, f.heard)
			n.requireAcked()
		},
		"until others remove it": func(t *testing.T, n *node, k *keeper, _ *follower) {
			k.set(false)
			n.pass(keptCheck)
			require.Equal(t, 1, n.kernel.replaces)
			require.Empty(t, n.reports.acked)
			k.set(true)
			n.pass(time.Hour)
			require.Equal(t, 1, n.kernel.replaces, "the kernel holds the checkpoint")
			n.kernel.lost("somebody flushed the table")
			synctest.Wait()
			require.Equal(t, 2, n.kernel.replaces, "nothing later is left")
		},
	} {
		t.Run(name, func(t *testing.T) {
			f, k := &follower{}, &keeper{intact: true}
			var cache *client.Cache
			run(t, func(t *testing.T, n *node) {
				require.True(t, cache.UseRestored())
				n.pass(time.Hour)
				require.Zero(t, n.kernel.replaces)
				require.True(t, n.isProgrammed())
				require.False(t, n.LastProgrammed(model.IPv4).IsZero())
				_, pending := n.Pending(model.IPv4)
				require.False(t, pending)
				require.NotZero(t, f.syncs, "load balancers go on asking")
				require.Empty(t, f.heard)
				require.Zero(t, n.Status().Time, "of an operation")
				test(t, n, k, f)
			}, func(o *Options) {
				open(o)
				k.kernel = o.Programmer.(*kernel)
				o.Programmer, o.Flows, o.Health, o.Ahead, cache = k, f, f, true, o.Cache
			})
		})
	}
	run(t, func(t *testing.T, n *node) {
		n.Cache.UseRestored()
		synctest.Wait()
		require.Equal(t, 1, n.kernel.replaces, "the kernel is not ahead")
	}, func(o *Options) {
		open(o)
		o.Programmer = &keeper{kernel: o.Programmer.(*kernel), intact: true}
	})
}

func TestHealthChecksFollowTheKernel(t *testing.T) {
	f := &follower{}
	run(t, func(t *testing.T, n *node) {
		n.write(map[string]int{"a": 1})
		n.sync()
		require.Zero(t, f.syncs)
		lb := model.NewService(model.Service{
			Namespace: "default", Name: "lb", Type: model.LoadBalancer, ClusterIPs: []netip.Addr{clusterIP("lb")},
			Ports: []model.ServicePort{{Protocol: model.TCP, Port: 80}}, ExternalTrafficPolicy: model.TrafficLocal, HealthCheckNodePort: 31000,
		})
		n.kernel.failures = 2
		n.store.Upsert(lb, 0)
		synctest.Wait()
		require.Zero(t, f.syncs, "it is not programmed yet")
		n.pass(minRetry)
		id := view.HealthCheckID{Service: lb.ServiceKey(), Family: model.IPv4}
		require.Equal(t, map[view.HealthCheckID]view.HealthCheck{id: {Port: 31000}}, f.checks)

		// A local endpoint counts even if the kernel has nothing to do for it, because its port is
		// not one of the Service's.
		applies := n.kernel.applies
		n.store.Upsert(model.NewSlice(model.Slice{
			Namespace: "default", Name: "lb", Service: "lb", Family: model.IPv4, Ports: []model.SlicePort{{Name: "other", Protocol: model.TCP, Port: 80}},
			Endpoints: []model.Endpoint{{Address: netip.MustParseAddr("10.0.0.1"), NodeName: "node-1", Conditions: model.Conditions{Ready: true}}},
		}), 0)
		synctest.Wait()
		require.Equal(t, applies, n.kernel.applies)
		require.Equal(t, map[view.HealthCheckID]view.HealthCheck{id: {Port: 31000, LocalEndpoints: 1}}, f.checks)
		require.Equal(t, 2, f.syncs)
		n.write(map[string]int{"a": 2})
		require.Equal(t, 2, f.syncs)

		n.store.Upsert(&model.Node{Name: "node-1", Addresses: []netip.Addr{netip.MustParseAddr("192.168.0.2")}}, 0)
		synctest.Wait()
		require.Equal(t, 3, f.syncs, "they are on the addresses that NodePorts are on")
		require.Equal(t, n.kernel.node, f.node)
		require.Equal(t, map[view.HealthCheckID]view.HealthCheck{id: {Port: 31000, LocalEndpoints: 1}}, f.checks)
	}, func(o *Options) { o.Health = f })
}

// TestNodeDecides asserts that a change of the Node that matters to the kernel causes a Replace at
// once. Other changes of the Node only change Service ports.
func TestNodeDecides(t *testing.T) {
	var log bytes.Buffer
	run(t, func(t *testing.T, n *node) {
		nodePorts := func(prefixes ...string) {
			t.Helper()
			var want []netip.Prefix
			for _, p := range prefixes {
				want = append(want, netip.MustParsePrefix(p))
			}
			require.Equal(t, want, n.kernel.node.NodePorts)
		}
		set := func(o model.Node) {
			o.Name = "node-1"
			n.store.Upsert(&o, 0)
			synctest.Wait()
		}
		n.sync()
		nodePorts()
		n.write(map[string]int{"a": 1})
		require.Equal(t, 1, strings.Count(log.String(), "No Node object"))
		require.NotContains(t, log.String(), "NodePorts of an IP family are not served", "no Service has any")

		addresses := []netip.Addr{netip.MustParseAddr("192.168.0.2")}
		set(model.Node{Addresses: addresses})
		nodePorts("192.168.0.2/32")
		require.Equal(t, 2, n.kernel.replaces)
		applies := n.kernel.applies
		set(model.Node{Addresses: addresses, Labels: map[string]string{"topology.kubernetes.io/zone": "a"}, Deleting: true})
		require.Equal(t, 2, n.kernel.replaces, "nothing that it programs")
		require.Equal(t, applies, n.kernel.applies)

		// A Replace that fails is tried again.
		n.kernel.failures = 1
		set(model.Node{Addresses: []netip.Addr{netip.MustParseAddr("192.168.0.3")}})
		nodePorts("192.168.0.2/32")
		n.pass(minRetry)
		nodePorts("192.168.0.3/32")

		// The addresses of a deleted Node stay in use.
		n.store.Remove(model.Key{Kind: model.KindNode, Name: "node-1"}, 0)
		synctest.Wait()
		nodePorts("192.168.0.3/32")
		require.Equal(t, 4, n.kernel.replaces)
		require.Equal(t, 1, strings.Count(log.String(), "No Node object"))
	}, func(o *Options) { o.Logger = slog.New(slog.NewTextHandler(&log, nil)) })
}

// TestNodePortsWithoutAddress asserts that NodePorts without an address are logged once for each IP
// family in which Services have them, and again after they had an address in between.
func TestNodePortsWithoutAddress(t *testing.T) {
	var log bytes.Buffer
	told := func(n *node, four, six int) {
		n.t.Helper()
		synctest.Wait()
		require.Equal(n.t, four, strings.Count(log.String(), "not served: the Node has no InternalIP of the family, and --nodeport-addresses has no CIDR of it\" family=IPv4"), log.String())
		require.Equal(n.t, six, strings.Count(log.String(), "no CIDR of it\" family=IPv6"), log.String())
	}
	run(t, func(t *testing.T, n *node) {
		service := func(name string, ips ...string) {
			s := model.Service{Namespace: "default", Name: name, Type: model.NodePort, Ports: []model.ServicePort{{Protocol: model.TCP, Port: 80, NodePort: uint16(30000) + uint16(name[0])}}}
			for _, ip := range ips {
				s.ClusterIPs = append(s.ClusterIPs, netip.MustParseAddr(ip))
			}
			n.store.Upsert(model.NewService(s), 0)
		}
		set := func(ips ...string) {
			o := &model.Node{Name: "node-1"}
			for _, ip := range ips {
				o.Addresses = append(o.Addresses, netip.MustParseAddr(ip))
			}
			n.store.Upsert(o, 0)
		}
		set("192.168.0.2")
		service("a", "10.96.0.1")
		n.sync()
		told(n, 0, 0)
		service("b", "10.96.0.2", "fd00::2")
		told(n, 0, 1)
		service("c", "fd00::3")
		told(n, 0, 1)
		set("192.168.0.2", "2001:db8::2")
		told(n, 0, 1)
		set("2001:db8::2")
		told(n, 1, 1)
		set("192.168.0.2")
		told(n, 1, 2)
	}, func(o *Options) { o.Logger = slog.New(slog.NewTextHandler(&log, nil)) })
}

func TestNodeThatIsThereFromTheBeginning(t *testing.T) {
	var log bytes.Buffer
	run(t, func(t *testing.T, n *node) {
		n.store.Upsert(&model.Node{Name: "node-1", Addresses: []netip.Addr{netip.MustParseAddr("192.168.0.2")}}, 0)
		n.sync()
		require.Equal(t, []netip.Prefix{netip.MustParsePrefix("192.168.0.2/32")}, n.kernel.node.NodePorts)
		require.Equal(t, 1, n.kernel.replaces)
		require.NotContains(t, log.String(), "Node object")
	}, func(o *Options) { o.Logger = slog.New(slog.NewTextHandler(&log, nil)) })
}

// TestProblems asserts that what the view cannot serve is reported like what the kernel refuses.
func TestProblems(t *testing.T) {
	var log bytes.Buffer
	run(t, func(t *testing.T, n *node) {
		n.sync()
		n.write(map[string]int{"a": 1})
		n.write(map[string]int{"a2": 2})
		problem := "10.96.0.97 port 80/TCP goes first to Service default/a, which is older or comes first by name"
		require.Equal(t, []string{"a2: " + problem}, n.reports.nacks)
		require.Equal(t, []string{"a=1"}, n.kernel.names())
		require.Equal(t, problem, n.Status().Failures[0].Reason)
		require.EqualValues(t, 1, testutil.ToFloat64(n.metrics.nacks))
		n.requireAcked()
		n.write(map[string]int{"a": 3})
		n.pass(time.Hour)
		require.Len(t, n.reports.nacks, 1)
		require.Equal(t, 1, n.kernel.replaces, "trying again would not help")
		require.Equal(t, 1, strings.Count(log.String(), problem))

		n.kernel.broken["a"] = true
		n.write(map[string]int{"a": 4})
		require.EqualValues(t, 2, testutil.ToFloat64(n.metrics.nacks))
		delete(n.kernel.broken, "a")
		n.write(map[string]int{"a": -1})
		require.Equal(t, []string{"a2=2"}, n.kernel.names())
		require.Contains(t, n.reports.nacks, "a2: resolved")
		require.Equal(t, 1, strings.Count(log.String(), `msg="Service is completely programmed, or was removed" service=default/a2`))
	}, func(o *Options) { o.Logger = slog.New(slog.NewTextHandler(&log, nil)) })
}

// TestLinesAboutServicesAreBounded checks that a tenant who changes a Service over and over, each
// time so that it has a problem or has it no more, does not fill the log.
func TestLinesAboutServicesAreBounded(t *testing.T) {
	var log bytes.Buffer
	run(t, func(t *testing.T, n *node) {
		n.sync()
		n.write(map[string]int{"a2": 1})
		const changes = bounded.LinesAtOnce
		for i := range changes {
			n.write(map[string]int{"a": i}) // a2 conflicts with it
			n.write(map[string]int{"a": -1})
		}
		require.Equal(t, 2*changes, len(n.reports.nacks), "servers are told each time")
		require.Equal(t, bounded.LinesOfNamespaceAtOnce, strings.Count(log.String(), "service=default/a2"))
	}, func(o *Options) { o.Logger = slog.New(slog.NewTextHandler(&log, nil)) })
}

func TestChangesGatherForMinSyncPeriod(t *testing.T) {
	run(t, func(t *testing.T, n *node) {
		n.sync()
		n.write(map[string]int{"a": 1})
		n.write(map[string]int{"b": 1})
		since, pending := n.Pending(model.IPv4)
		require.True(t, pending)
		require.Equal(t, time.Now(), since)
		n.pass(time.Second)
		n.write(map[string]int{"b": 2})
		n.pass(4*time.Second - 1)
		require.Zero(t, n.kernel.applies)
		stillSince, _ := n.Pending(model.IPv4)
		require.Equal(t, since, stillSince)
		n.pass(1)
		require.Equal(t, 1, n.kernel.applies)
		require.Equal(t, []string{"a=1", "b=2"}, n.kernel.names())
		_, pending = n.Pending(model.IPv4)
		require.False(t, pending)

		n.pass(5 * time.Second)
		n.write(map[string]int{"a": 2})
		require.Equal(t, 2, n.kernel.applies, "at once, as the last one is long ago")
	}, func(o *Options) { o.MinSyncPeriod = 5 * time.Second })
}

func TestSyncPeriod(t *testing.T) {
	run(t, func(t *testing.T, n *node) {
		n.sync()
		n.write(map[string]int{"a": 1})
		n.pass(time.Hour - 1)
		require.Equal(t, 1, n.kernel.replaces)
		n.kernel.ports = map[view.ServicePortID]*view.ServicePort{}
		n.pass(1)
		require.Equal(t, 2, n.kernel.replaces)
		require.Equal(t, []string{"a=1"}, n.kernel.names())
		n.pass(time.Hour)
		require.Equal(t, 3, n.kernel.replaces)
	}, func(o *Options) { o.SyncPeriod = time.Hour })
}

// TestRepair asserts that what others remove is repaired at once a few times,
// but at most once a second if they keep removing it.
func TestRepair(t *testing.T) {
	run(t, func(t *testing.T, n *node) {
		require.Nil(t, n.kernel.lost, "nothing is programmed yet")
		n.sync()
		n.write(map[string]int{"a": 1})
		repairs := 0
		remove := func() {
			n.kernel.lost("somebody flushed the table")
			synctest.Wait()
		}
		requireRepairs := func(more int) {
			t.Helper()
			repairs += more
			require.Equal(t, 1+repairs, n.kernel.replaces)
			_, pending := n.Pending(model.IPv4)
			require.Equal(t, testutil.ToFloat64(n.metrics.repairs) > float64(repairs), pending)
		}
		for range repairsAtOnce {
			remove()
			requireRepairs(1)
		}
		for range 10 {
			for range 10 {
				remove()
				requireRepairs(0)
			}
			n.pass(repairPause - 1)
			requireRepairs(0)
			n.pass(1)
			requireRepairs(1)
		}
		// A Replace for another reason repairs the loss, too, and later repairs need not wait for
		// it.
		for range 10 {
			remove()
			n.kernel.failures = 1
			n.write(map[string]int{"a": n.kernel.replaces})
			requireRepairs(1)
		}
		n.pass(repairPause)
		requireRepairs(0)
		for range 2 {
			n.pass(time.Minute)
			for range repairsAtOnce {
				remove()
				requireRepairs(1)
			}
			remove()
			requireRepairs(0)
			n.pass(repairPause)
			requireRepairs(1)
		}
		require.EqualValues(t, repairs, testutil.ToFloat64(n.metrics.repairs))
	})
}

// TestWhatIsRepairedAlready asserts that a loss reported before a Replace needs no repair after it.
func TestWhatIsRepairedAlready(t *testing.T) {
	run(t, func(t *testing.T, n *node) {
		n.sync()
		n.kernel.busy, n.kernel.failures = make(chan struct{}), 1
		n.write(map[string]int{"a": 1})
		n.kernel.lost("somebody flushed the table")
		close(n.kernel.busy)
		n.pass(time.Minute)
		require.Equal(t, 2, n.kernel.replaces)
		require.Zero(t, testutil.ToFloat64(n.metrics.repairs))
		_, pending := n.Pending(model.IPv4)
		require.False(t, pending)
	})
}

func TestPending(t *testing.T) {
	run(t, func(t *testing.T, n *node) {
		require.Zero(t, n.LastProgrammed(model.IPv4))
		n.sync()
		require.Equal(t, time.Now(), n.LastProgrammed(model.IPv4))
		n.pass(time.Minute)
		n.kernel.failures = 3
		begin := time.Now()
		n.write(map[string]int{"a": 1})
		for range 2 {
			since, pending := n.Pending(model.IPv4)
			require.True(t, pending)
			require.Equal(t, begin, since)
			require.Equal(t, begin.Add(-time.Minute), n.LastProgrammed(model.IPv4))
			n.pass(minRetry)
		}
		n.pass(minRetry)
		_, pending := n.Pending(model.IPv4)
		require.False(t, pending)
		require.Equal(t, time.Now(), n.LastProgrammed(model.IPv4))

		// While a step hangs, the changes that it should program are pending.
		n.kernel.busy = make(chan struct{})
		begin = time.Now()
		n.write(map[string]int{"a": 2})
		time.Sleep(time.Minute) //nolint:forbidigo // the bubble's time; the kernel is busy
		since, pending := n.Pending(model.IPv4)
		require.True(t, pending)
		require.Equal(t, begin, since)
		close(n.kernel.busy)
	})
}

// TestHangingOperation asserts that every operation counts as pending until it has ended, because
// the changes that arrive meanwhile wait for it.
func TestHangingOperation(t *testing.T) {
	run(t, func(t *testing.T, n *node) {
		n.write(map[string]int{"a": 1})
		n.sync()
		begin := time.Now().Add(time.Minute)
		n.kernel.mu.Lock()
		n.kernel.busy = make(chan struct{})
		n.kernel.mu.Unlock()
		// The Replace that is due in this time hangs.
		time.Sleep(time.Minute + time.Second) //nolint:forbidigo // the bubble's time
		n.write(map[string]int{"a": 2})
		for range 3 {
			time.Sleep(time.Minute) //nolint:forbidigo // as above
			for _, family := range n.Families() {
				since, pending := n.Pending(family)
				require.True(t, pending)
				require.Equal(t, begin, since)
			}
		}
		close(n.kernel.busy)
		synctest.Wait()
		require.Equal(t, []string{"a=2"}, n.kernel.names())
		_, pending := n.Pending(model.IPv4)
		require.False(t, pending)
	}, func(o *Options) { o.SyncPeriod = time.Minute })
}

// TestFailedRepairIsPending asserts that a loss is pending until a Replace succeeds, whatever
// else is programmed.
func TestFailedRepairIsPending(t *testing.T) {
	requirePending := func(n *node, since time.Time) {
		t.Helper()
		got, pending := n.Pending(model.IPv4)
		require.Equal(t, !since.IsZero(), pending)
		require.Equal(t, since, got)
	}
	run(t, func(t *testing.T, n *node) {
		n.sync()
		n.pass(time.Minute)
		n.kernel.failures = 3
		begin := time.Now()
		n.kernel.lost("somebody flushed the table")
		synctest.Wait()
		requirePending(n, begin)
		n.pass(2 * minRetry)
		requirePending(n, begin)
		n.pass(maxRetry)
		requirePending(n, time.Time{})

		// The repair has to wait for its second. A change that is programmed meanwhile does not end
		// what is pending.
		for range repairsAtOnce {
			n.kernel.lost("somebody flushed the table")
			synctest.Wait()
			requirePending(n, time.Time{})
		}
		begin = time.Now()
		n.kernel.lost("somebody flushed the table")
		synctest.Wait()
		n.pass(repairPause / 2)
		n.write(map[string]int{"a": 1})
		require.Equal(t, []string{"a=1"}, n.kernel.names())
		requirePending(n, begin)
		n.pass(repairPause)
		requirePending(n, time.Time{})

		// A failed Replace counts as pending, too, if SyncPeriod was its reason.
		n.kernel.failures = 1
		n.pass(time.Hour - minRetry/2)
		require.Equal(t, 0, n.kernel.failures)
		_, pending := n.Pending(model.IPv4)
		require.True(t, pending)
		n.pass(minRetry)
		requirePending(n, time.Time{})
	}, func(o *Options) { o.SyncPeriod = time.Hour })
}
