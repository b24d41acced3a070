// These tests prove that Changes reports exactly what differs: when Services, the Node or the
// health checks change, and what stays when a Node is deleted. They call the view's public methods
// only.
package view_test

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

func TestOnlyWhatDiffersChanges(t *testing.T) {
	v := view.New(options)
	v.SetNode(thisNode)
	_, node := v.Update()
	require.True(t, node, "NodePorts are on the Node's addresses now")

	s := service(web, ports(http, dns), loadBalancer("192.0.2.1"), externalLocal)
	both := []model.SlicePort{http8080, dns5353}
	four := sliceOf("4", both, endpoint("10.180.0.1", local), endpoint("10.180.1.1"))
	v.Set(web, s, []*model.Slice{four})
	changes, node := v.Update()
	require.False(t, node)
	require.Len(t, changes, 2)
	first := v.State().Ports[id(http, model.IPv4)]

	none := func() {
		t.Helper()
		changes, node := v.Update()
		require.Empty(t, changes)
		require.False(t, node)
	}
	none()
	v.Set(web, s, []*model.Slice{four})
	none()
	v.Set(web, s, []*model.Slice{four, sliceOf("5", both, endpoint("10.180.1.9", unready))})
	none()
	v.Set(web, service(web), nil)
	v.Set(web, s, []*model.Slice{four})
	none()
	v.SetNode(&model.Node{Name: here, Labels: map[string]string{"topology.kubernetes.io/zone": "zone-z", "other": "label"},
		Addresses: thisNode.Addresses, Deleting: true})
	none()
	require.Same(t, first, v.State().Ports[id(http, model.IPv4)])

	// Before and After share what a change leaves as it was.
	v.Set(web, s, []*model.Slice{sliceOf("4", both, endpoint("10.180.0.1", local), endpoint("10.180.1.2"))})
	changes, _ = v.Update()
	require.Len(t, changes, 2)
	for _, c := range changes {
		require.Same(t, &c.Before.Frontends[0], &c.After.Frontends[0])
		require.True(t, c.After.Local.Same(c.Before.Local))
		require.False(t, c.After.Cluster.Same(c.Before.Cluster))
	}
	require.Equal(t, at("10.180.0.1* 10.180.1.1"), first.Cluster, "what was given out stays as it was")

	v.Set(web, nil, []*model.Slice{four})
	changes, _ = v.Update()
	require.Len(t, changes, 2)
	for _, c := range changes {
		require.Nil(t, c.After)
	}
	require.Empty(t, v.State().Ports)
	v.Set(api, nil, nil)
	none()
}

// TestServiceChanges covers types, families, cluster IPs and ports that change at run time.
func TestServiceChanges(t *testing.T) {
	f := newFight(t)
	f.set(web, loadBalancer("192.0.2.1"), dualStack)
	f.change()
	for _, c := range []struct {
		edit []func(*model.Service)
		want []string
	}{
		{[]func(*model.Service){externalIP("203.0.113.1")}, []string{"clusterIP 10.96.0.1:80/TCP", "externalIP 203.0.113.1:80/TCP"}},
		{[]func(*model.Service){clusterIP("fd00:96::1")}, []string{"clusterIP fd00:96::1:80/TCP"}},
		{[]func(*model.Service){clusterIP("fd00:96::2")}, []string{"clusterIP fd00:96::2:80/TCP"}},
		{[]func(*model.Service){dualStack, loadBalancer("192.0.2.2")}, []string{"clusterIP 10.96.0.1:80/TCP", "clusterIP fd00:96::1:80/TCP",
			"loadBalancer 192.0.2.2:80/TCP", "nodePort 30080/TCP/IPv4", "nodePort 30080/TCP/IPv6"}},
		{[]func(*model.Service){ports(dns)}, []string{"clusterIP 10.96.0.1:53/UDP"}},
		{[]func(*model.Service){clusterIP()}, []string{}},
		{[]func(*model.Service){}, []string{}},
	} {
		f.set(web, c.edit...)
		f.change()
		require.Equal(t, c.want, f.has(web))
	}
}

// TestNodeChanges covers what depends on the Node's addresses and pod CIDRs.
func TestNodeChanges(t *testing.T) {
	v := view.New(view.Options{NodeName: here, DetectLocal: view.ByNodeCIDR})
	v.Set(web, service(web, loadBalancer("192.0.2.1"), ranges("192.168.0.0/24"), externalLocal), []*model.Slice{slice("s", endpoint("10.180.1.1"))})
	vip := func() view.Frontend { return v.State().Ports[id(http, model.IPv4)].Frontends[1] }
	change := func(n *model.Node) (changed, node bool) {
		v.SetNode(n)
		changes, node := v.Update()
		return len(changes) > 0, node
	}
	changed, node := change(nil)
	require.True(t, changed)
	require.False(t, node)
	require.Equal(t, view.Drop, vip().Pods.To)
	require.Equal(t, prefixes("192.168.0.0/24"), vip().Sources)

	changed, node = change(thisNode)
	require.True(t, changed)
	require.True(t, node)
	require.Equal(t, view.Cluster, vip().Pods.To)
	require.Equal(t, prefixes("192.0.2.1/32", "192.168.0.0/24"), vip().Sources)
	require.Equal(t, thisNode.PodCIDRs, v.State().Node.Pods.Prefixes)

	// A second address of the Node may be the source of its own connections.
	changed, node = change(&model.Node{Addresses: addrs("192.168.0.2", "192.168.7.7", "2001:db8::2"), PodCIDRs: thisNode.PodCIDRs})
	require.False(t, changed)
	require.False(t, node)
	changed, node = change(&model.Node{Addresses: addrs("192.168.7.7", "192.168.0.2", "2001:db8::2"), PodCIDRs: thisNode.PodCIDRs})
	require.False(t, changed)
	require.True(t, node, "NodePorts are elsewhere")

	// A change that is undone before the next call of Update is none.
	v.SetNode(thisNode)
	changed, node = change(&model.Node{Addresses: addrs("192.168.7.7", "192.168.0.2", "2001:db8::2"), PodCIDRs: thisNode.PodCIDRs})
	require.False(t, changed)
	require.False(t, node)
}

// TestLastKnownNodeStaysValid asserts that nothing changes when the Node is deleted: pods are still
// recognized, hints for the node's zone still count, and nothing is programmed anew. A new Node
// replaces the old one.
func TestLastKnownNodeStaysValid(t *testing.T) {
	v := view.New(view.Options{NodeName: here, DetectLocal: view.ByNodeCIDR})
	n := *thisNode
	n.ServiceCIDRs = prefixes("10.96.0.0/16")
	v.SetNode(&n)
	hinted := endpoint("10.180.1.1", func(e *model.Endpoint) { e.ZoneHints = []string{"zone-a"} })
	other := endpoint("10.180.1.2", func(e *model.Endpoint) { e.ZoneHints = []string{"zone-b"} })
	v.Set(web, service(web, loadBalancer("192.0.2.1"), externalLocal), []*model.Slice{slice("s", hinted, other)})
	v.Update()
	for _, o := range []*model.Node{nil, &n} {
		v.SetNode(o)
		changes, node := v.Update()
		require.Empty(t, changes)
		require.False(t, node)
		p := v.State().Ports[id(http, model.IPv4)]
		require.Equal(t, view.Cluster, p.Frontends[1].Pods.To)
		require.Equal(t, 1, p.Cluster.Len())
		require.Equal(t, thisNode.PodCIDRs, v.State().Node.Pods.Prefixes)
		require.Equal(t, n.ServiceCIDRs, v.State().Node.ServiceCIDRs)
	}

	v.SetNode(&model.Node{Name: here, Addresses: n.Addresses, PodCIDRs: prefixes("10.180.7.0/24")})
	changes, node := v.Update()
	require.Len(t, changes, 1, "it says that it is in no zone")
	require.True(t, node)
	require.Equal(t, prefixes("10.180.7.0/24"), v.State().Node.Pods.Prefixes)
	require.Empty(t, v.State().Node.ServiceCIDRs)
}

func TestServiceCIDRs(t *testing.T) {
	v := view.New(options)
	is := func(why string, changed bool, want []netip.Prefix, ranges ...string) {
		t.Helper()
		v.SetNode(&model.Node{Name: here, Addresses: thisNode.Addresses, ServiceCIDRs: prefixes(ranges...)})
		_, node := v.Update()
		require.Equal(t, changed, node, why)
		require.Equal(t, want, v.State().Node.ServiceCIDRs, why)
	}
	is("the Node's addresses are new", true, nil)
	both := prefixes("10.96.0.0/16", "fd00:10:96::/112")
	is("ranges are new", true, both, "10.96.0.0/16", "fd00:10:96::/112")
	is("another order", false, both, "fd00:10:96::/112", "10.96.0.0/16", "10.96.0.0/16")
	is("some are within others, and the host's bits do not count", false, both,
		"10.96.0.0/20", "10.96.255.0/24", "10.96.0.7/16", "fd00:10:96::/120", "fd00:10:96::/112")
	is("neighbors", true, prefixes("10.96.0.0/16", "10.97.0.0/16"), "10.97.0.0/16", "10.96.0.0/16")
	is("a wider one", true, prefixes("10.96.0.0/12"), "10.97.0.0/16", "10.96.0.0/12", "10.96.0.0/16")
	is("none", true, nil)
}

func TestSchedulers(t *testing.T) {
	v := view.New(view.Options{NodeName: here, Schedulers: []string{"rr", "lc"}})
	asksFor := func(name string) func(*model.Service) { return func(s *model.Service) { s.IPVSScheduler = name } }
	set := func(name string) (scheduler string, changes int) {
		v.Set(web, service(web, asksFor(name)), []*model.Slice{slice("s", endpoint("10.180.1.1"))})
		list, _ := v.Update()
		return v.State().Ports[id(http, model.IPv4)].Scheduler, len(list)
	}
	is := func(why, name, want string, changed int) {
		t.Helper()
		scheduler, changes := set(name)
		require.Equal(t, want, scheduler, why)
		require.Equal(t, changed, changes, why)
	}
	is("it is new", "lc", "lc", 1)
	is("another", "rr", "rr", 1)
	require.Empty(t, v.Problems())
	is("an unknown one is none", "best", "", 1)
	require.Equal(t, []view.Problem{{
		Service: web, Reason: `the annotation asks for the IPVS scheduler "best": use one of rr, lc; the default scheduler is used instead`,
	}}, v.Problems())
	is("none", "", "", 0)
	require.Empty(t, v.Problems())

	require.Empty(t, see(t, options, service(web, asksFor("best")))[id(http, model.IPv4)].Scheduler, "nothing for other programmers")
}

func TestHealthChecks(t *testing.T) {
	healthCheck := func(s *model.Service) { s.HealthCheckNodePort = 31000 }
	four, six := view.HealthCheckID{Service: web, Family: model.IPv4}, view.HealthCheckID{Service: web, Family: model.IPv6}
	v := view.New(options)
	checks, changed := v.TakeHealthChecks()
	require.False(t, changed)
	require.Empty(t, checks)
	set := func(s *model.Service, endpointSlices ...*model.Slice) (map[view.HealthCheckID]view.HealthCheck, bool) {
		v.Set(web, s, endpointSlices)
		v.Update()
		return v.TakeHealthChecks()
	}
	is := func(port uint16, endpoints int, addresses ...netip.Addr) view.HealthCheck {
		return view.HealthCheck{Port: port, LocalEndpoints: endpoints, Addresses: addresses}
	}
	vip := addr("192.0.2.1")

	lb := service(web, loadBalancer("192.0.2.1"), externalLocal, healthCheck)
	endpoints := sliceOf("s", []model.SlicePort{http8080, dns5353}, endpoint("10.180.0.1", local), endpoint("10.180.0.2", local),
		endpoint("10.180.0.3", local, terminating), endpoint("10.180.0.4", local, unready), endpoint("10.180.1.1"))
	other := sliceOf("o", []model.SlicePort{{Name: "other", Protocol: model.TCP, Port: 1}}, endpoint("10.180.0.1", local), endpoint("10.180.0.9", local))
	portless := sliceOf("p", nil, endpoint("10.180.0.10", local))
	checks, changed = set(lb, endpoints, other, portless, slice("6", endpoint("fd00:180::1", local)))
	require.True(t, changed)
	require.Equal(t, map[view.HealthCheckID]view.HealthCheck{four: is(31000, 3, vip)}, checks, "each address once, whatever its port; families are apart")
	_, changed = set(lb, endpoints, other)
	require.False(t, changed)

	// Only ready endpoints count, although terminating ones receive traffic.
	checks, _ = set(lb, slice("s", endpoint("10.180.0.3", local, terminating), endpoint("10.180.1.1")))
	require.Equal(t, map[view.HealthCheckID]view.HealthCheck{four: is(31000, 0, vip)}, checks)
	checks, _ = set(lb)
	require.Nil(t, checks, "it was 0 already")
	checks, _ = set(service(web, loadBalancer("192.0.2.1"), externalLocal, healthCheck, dualStack), endpoints, slice("6", endpoint("fd00:180::1", local)))
	require.Equal(t, map[view.HealthCheckID]view.HealthCheck{four: is(31000, 2, vip), six: is(31000, 1)}, checks)
	given := checks

	// Only a LoadBalancer with externalTrafficPolicy Local has a health check.
	for _, s := range []*model.Service{
		service(web, loadBalancer("192.0.2.1"), healthCheck), service(web, externalLocal, healthCheck),
		service(web, externalLocal, healthCheck, loadBalancer(), func(s *model.Service) { s.Type = model.NodePort }), service(web, loadBalancer("192.0.2.1"), externalLocal), nil,
	} {
		checks, changed = set(s, endpoints)
		require.True(t, changed)
		require.Empty(t, checks)
		_, changed = set(lb, endpoints)
		require.True(t, changed)
	}
	require.Len(t, given, 2, "what was given out stays as it was")

	// Health checks listen on the addresses of NodePorts, so a change of these addresses counts as a
	// change of the checks.
	v.SetNode(thisNode)
	_, changed = set(lb, endpoints)
	require.True(t, changed)
	v.SetNode(&model.Node{Addresses: thisNode.Addresses, Labels: map[string]string{"topology.kubernetes.io/zone": "zone-b"}})
	_, changed = set(lb, endpoints)
	require.False(t, changed)
}

// TestManyProblems asserts that the problems reported for one Service are bounded.
func TestManyProblems(t *testing.T) {
	f := newFight(t)
	many := func(s *model.Service) {
		s.Ports = nil
		for i := range uint16(100) {
			s.Ports = append(s.Ports, model.ServicePort{Name: string(rune('a' + i)), Protocol: model.TCP, Port: 1000 + i})
		}
	}
	f.set(web, many, created(1))
	f.set(api, many, created(2))
	f.change()
	require.Len(t, f.Problems(), 1)
	require.Less(t, len(f.Problems()[0].Reason), 500)
	require.Contains(t, f.Problems()[0].Reason, "; and more")
}

// TestPortsOf asserts that PortsOf returns the ports of the given Services, even if the view has
// their addresses itself, and that it does not change the view.
func TestPortsOf(t *testing.T) {
	v := view.New(view.Options{})
	v.SetNode(thisNode)
	s := service(web, ports(http, dns), loadBalancer("192.0.2.1"), externalIP("203.0.113.1"), ranges("192.168.0.0/24"))
	v.Set(web, s, []*model.Slice{sliceOf("4", []model.SlicePort{http8080, dns5353}, endpoint("10.180.1.1"))})
	v.Update()
	before := v.State()
	got := v.PortsOf([]*model.Service{s})
	require.Len(t, got, 2)
	of := got[id(dns, model.IPv4)]
	require.Zero(t, of.Cluster.Len())
	require.Len(t, of.Frontends, len(before.Ports[id(dns, model.IPv4)].Frontends))
	for i, f := range before.Ports[id(dns, model.IPv4)].Frontends {
		require.Equal(t, f.Sources, of.Frontends[i].Sources, "they include the load balancer's address, as the node is among them")
	}
	require.Equal(t, before, v.State())
	changes, node := v.Update()
	require.Empty(t, changes)
	require.False(t, node)
}

// TestHealthChecksOfTheLoadBalancersAddresses asserts at which addresses of a load balancer health
// checks are answered: a bounded number of those that nodes capture.
func TestHealthChecksOfTheLoadBalancersAddresses(t *testing.T) {
	addresses := func(edit func(*model.Service)) []netip.Addr {
		v := view.New(options)
		v.Set(web, service(web, edit, externalLocal, func(s *model.Service) { s.HealthCheckNodePort = 31000 }), nil)
		v.Update()
		checks, _ := v.TakeHealthChecks()
		return checks[view.HealthCheckID{Service: web, Family: model.IPv4}].Addresses
	}
	require.Equal(t, addrs("192.0.2.1", "192.0.2.2"), addresses(loadBalancer("192.0.2.2", "192.0.2.1", "2001:db8:5::1")))
	require.Empty(t, addresses(func(s *model.Service) {
		loadBalancer("192.0.2.1")(s)
		s.LoadBalancerIngress[0].ProxyMode = true
	}))
	many := make([]string, 300)
	for i := range many {
		many[i] = fmt.Sprintf("192.0.%d.%d", 2+i/250, 1+i%250)
	}
	require.Len(t, addresses(loadBalancer(many...)), 16, "docs/security.md names this number")
}
