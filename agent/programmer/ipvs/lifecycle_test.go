// These tests prove that changes, restarts and failures leave a real kernel as a Replace would,
// that open connections go on and drains end, and which of the kernel's settings are made.
package ipvs

import (
	"errors"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	mobyipvs "github.com/moby/ipvs"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/netlink"
	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

// web returns a TCP Service port with a cluster IP, a nodePort and these pods.
func (c *cluster) web(name string, family model.Family, last byte, pods ...int) *view.ServicePort {
	p := &view.ServicePort{
		ID:        serviceID(name, model.TCP, family),
		Frontends: []view.Frontend{clusterIP(vip(family, last)), nodePort(30000 + uint16(last))},
		Cluster:   c.backends(family, tcpPort, pods...),
	}
	if len(pods) == 0 {
		for i, f := range p.Frontends {
			p.Frontends[i] = everywhere(f, view.Reject, f.Kind == view.NodePort)
		}
	}
	return p
}

// kernel returns everything of this package on node a, as text.
func (c *cluster) kernel(t *testing.T) string {
	t.Helper()
	var b strings.Builder
	for _, args := range [][]string{
		{"nft", "-a", "-s", "list", "table", "ip", Table}, {"nft", "-a", "-s", "list", "table", "ip6", Table},
		{"ip", "-o", "addr", "show", "dev", Device},
		{"cat", "/proc/self/net/ip_vs"},
	} {
		out, err := c.a.Run(t.Context(), args[0], args[1:]...)
		require.NoError(t, err)
		b.WriteString(out)
	}
	return b.String()
}

// destinations returns the weights of a virtual service's destinations.
func (c *cluster) destinations(t *testing.T, id view.ServicePortID) map[netip.AddrPort]uint32 {
	t.Helper()
	list, err := c.ipvs.readBackends(nil, c.virtuals(id)[0].serviceKey)
	require.NoError(t, err)
	weights := map[netip.AddrPort]uint32{}
	for _, b := range list {
		weights[b.address] = b.weight
	}
	return weights
}

// TestReplaceAgain asserts that a Replace with the current state changes nothing, even by another
// process, and that connections and affinity survive it.
func TestReplaceAgain(t *testing.T) {
	c := newCluster(t, Options{})
	sticky := c.web("sticky", model.IPv4, 2, 0, 1, 2, 3)
	sticky.Affinity = time.Hour
	limited := &view.ServicePort{
		ID: serviceID("limited", model.TCP, model.IPv4), Frontends: []view.Frontend{everywhere(view.Frontend{
			Kind: view.LoadBalancer, Address: ingress(model.IPv4, 9), Port: servicePort,
			Sources: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("10.180.0.0/16"), netip.MustParsePrefix("192.0.2.0/24")},
		}, view.Cluster, true)},
		Cluster: c.backends(model.IPv4, tcpPort, 1),
	}
	c.set(c.web("web", model.IPv4, 1, 0, 1), c.web("web", model.IPv6, 1, 2), c.web("none", model.IPv6, 3), sticky, limited)
	require.NoError(t, c.Replace(t.Context(), c.state))
	before := c.kernel(t)
	numbers := c.programmed(serviceID("web", model.TCP, model.IPv4)).numbers

	open, err := c.client.Dial(t.Context(), testenv.TCP, netip.AddrPortFrom(vip(model.IPv4, 1), servicePort), patient)
	require.NoError(t, err)
	defer open.Close()
	first := c.client.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(vip(model.IPv4, 2), servicePort), 1, patient)
	require.True(t, first.All(testenv.Answered), "%v", first)

	require.NoError(t, c.Replace(t.Context(), c.state))
	require.Equal(t, withoutCounts(before), withoutCounts(c.kernel(t)))

	again := newInHost(t, c.a.Host, Options{})
	require.NoError(t, again.Replace(t.Context(), c.state))
	require.Equal(t, withoutCounts(before), withoutCounts(c.kernel(t)))
	require.Equal(t, numbers, again.programmed(serviceID("web", model.TCP, model.IPv4)).numbers)
	_, err = open.Echo(t.Context(), "still there")
	require.NoError(t, err)
	later := c.client.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(vip(model.IPv4, 2), servicePort), 6, patient)
	require.Equal(t, []string{keys(first.Backends())[0]}, keys(later.Backends()), "%v, then %v", first, later)
}

// TestNodeChanges asserts that a different Node changes rules only, and that packets in the rules
// find the elements of maps all the time.
func TestNodeChanges(t *testing.T) {
	c := newCluster(t, Options{})
	web := c.web("web", model.IPv4, 1, 0, 1)
	c.set(web)
	require.NoError(t, c.Replace(t.Context(), c.state))
	maps := func() (out []string) {
		for line := range strings.Lines(c.kernel(t)) {
			if kind := strings.Fields(line); len(kind) > 0 && (kind[0] == "map" || kind[0] == "set") {
				out = append(out, line) // includes its handle
			}
		}
		return out
	}
	before := maps()
	require.NotEmpty(t, before)
	for i := range 20 {
		c.state.Node.Pods = view.PodDetector{Prefixes: c.state.Node.Pods.Prefixes}
		if i%2 == 0 {
			c.state.Node.Pods.Interface = "pod1"
		}
		require.NoError(t, c.Replace(t.Context(), c.state))
		require.Equal(t, i%2 == 0, strings.Contains(c.kernel(t), `iifname "pod1"`))
		r := c.client.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(vip(model.IPv4, 1), servicePort), 4, patient)
		require.True(t, r.All(testenv.Answered), "%v", r)
	}
	require.Equal(t, before, maps())

	// Other chains in the table are removed, such as those of an earlier version.
	_, err := c.a.Run(t.Context(), "nft", "add chain ip "+Table+" earlier { type filter hook input priority 0; policy drop; }")
	require.NoError(t, err)
	require.NoError(t, c.Replace(t.Context(), c.state))
	require.NotContains(t, c.kernel(t), "earlier")
}

// withoutCounts removes the numbers of connections.
func withoutCounts(text string) string {
	var b strings.Builder
	for line := range strings.Lines(text) {
		if fields := strings.Fields(line); len(fields) > 3 && fields[0] == "->" {
			line = strings.Join(fields[:4], " ") + "\n"
		}
		b.WriteString(line)
	}
	return b.String()
}

func keys(m map[string]int) (names []string) {
	for k := range m {
		names = append(names, k)
	}
	return names
}

// TestApply asserts that changes leave the kernel as a Replace would.
func TestApply(t *testing.T) {
	c := newCluster(t, Options{})
	web, other := c.web("web", model.IPv4, 1, 0, 1), c.web("other", model.IPv4, 2, 2)
	c.set(web, other)
	require.NoError(t, c.Replace(t.Context(), c.state))
	to := func(last byte) testenv.Result {
		return c.client.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(vip(model.IPv4, last), servicePort), 4, patient)
	}
	c.apply(t, web.ID, c.web("web", model.IPv4, 1, 1, 3))
	require.Equal(t, map[string]int{"pod1": 2, "pod3": 2}, to(1).Backends())
	c.apply(t, web.ID, c.web("web", model.IPv4, 1))
	require.True(t, to(1).All(testenv.Refused))
	c.apply(t, web.ID, c.web("web", model.IPv4, 1, 3))
	require.Equal(t, map[string]int{"pod3": 4}, to(1).Backends())

	// Two Services exchange their addresses and nodePorts at once.
	swapped, back := c.web("web", model.IPv4, 2, 3), c.web("other", model.IPv4, 1, 2)
	require.NoError(t, c.Apply(t.Context(), []view.Change{{Before: c.state.Ports[web.ID], After: swapped}, {Before: other, After: back}}))
	c.set(swapped, back)
	require.Equal(t, map[string]int{"pod2": 4}, to(1).Backends())
	require.Equal(t, map[string]int{"pod3": 4}, to(2).Backends())

	c.apply(t, web.ID, nil)
	r := c.client.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(vip(model.IPv4, 2), servicePort), 1, hasty)
	require.Equal(t, 1, r.Count(testenv.Unreachable)+r.Count(testenv.TimedOut), "the address is nobody's any more: %v", r)
	require.Equal(t, map[string]int{"pod2": 4}, to(1).Backends())

	changed := c.kernel(t)
	require.NoError(t, c.Replace(t.Context(), c.state))
	require.Equal(t, withoutCounts(changed), withoutCounts(c.kernel(t)))
}

// TestAffinity asserts that clients stay with their backend until it is removed, at each address of
// a Service port.
func TestAffinity(t *testing.T) {
	c := newCluster(t, Options{})
	for _, family := range families {
		for _, tr := range transports {
			f := localPolicy(view.Frontend{Kind: view.LoadBalancer, Address: ingress(family, 1), Port: servicePort}, view.Local)
			c.set(&view.ServicePort{
				ID: serviceID("sticky", tr.protocol, family), Affinity: time.Hour,
				Frontends: []view.Frontend{clusterIP(vip(family, 1)), f, nodePort(30001)},
				Cluster:   c.backends(family, tr.port, 0, 1, 2, 3), Local: c.backends(family, tr.port, 0, 1),
			})
		}
	}
	require.NoError(t, c.Replace(t.Context(), c.state))
	each(t, func(t *testing.T, family model.Family, tr transport, probe func(*testenv.Host, netip.Addr, uint16, int) testenv.Result) {
		id := serviceID("sticky", tr.protocol, family)
		nodePort := netip.AddrPortFrom(c.a.Addr(family == model.IPv6), 30001)
		for _, from := range []*testenv.Host{c.client.Host, c.pods[1].Host, c.a.Host} {
			for _, to := range []netip.AddrPort{
				netip.AddrPortFrom(vip(family, 1), servicePort), netip.AddrPortFrom(ingress(family, 1), servicePort), nodePort,
			} {
				r := probe(from, to.Addr(), to.Port(), 5)
				require.True(t, r.All(testenv.Answered), "%s to %v: %v", from.Name, to, r)
				require.Len(t, r.Backends(), 1, "%s to %v: %v", from.Name, to, r)
			}
		}
		seen := map[string]bool{}
		for _, from := range append([]*testenv.Host{c.client.Host, c.a.Host}, c.pods[0].Host, c.pods[1].Host) {
			seen[keys(probe(from, vip(family, 1), servicePort, 1).Backends())[0]] = true
		}
		require.Greater(t, len(seen), 1, "not all are together")

		chosen := probe(c.client.Host, vip(family, 1), servicePort, 1).Attempts[0].Reply.Server
		less, all := *c.state.Ports[id], c.state.Ports[id]
		less.Cluster = view.NewBackends(slices.DeleteFunc(slices.Clone(all.Cluster.List()), func(b view.Backend) bool { return b.Address == chosen })...)
		c.apply(t, id, &less)
		r := probe(c.client.Host, vip(family, 1), servicePort, 5)
		require.NotContains(t, r.Servers(), chosen, "%v", r)
		require.Len(t, r.Backends(), 1, "%v", r)
		c.apply(t, id, all)
		require.Equal(t, keys(r.Backends()), keys(probe(c.client.Host, vip(family, 1), servicePort, 5).Backends()), "who came back is not gone back to")
	})
	// Without affinity, there is again one virtual service by mark.
	id := serviceID("sticky", model.TCP, model.IPv4)
	plain := *c.state.Ports[id]
	plain.Affinity = 0
	c.apply(t, id, &plain)
	r := c.client.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(c.a.IPv4, 30001), 4, patient)
	require.Len(t, r.Backends(), 4, "%v", r)
	changed := c.kernel(t)
	require.NoError(t, c.Replace(t.Context(), c.state))
	require.Equal(t, withoutCounts(changed), withoutCounts(c.kernel(t)))
}

// TestInterrupted asserts that virtual services by address do not outlive their Service ports if a
// change of them ends halfway, before or after the table has changed.
func TestInterrupted(t *testing.T) {
	c := newCluster(t, Options{})
	sticky := func(name string, last byte) *view.ServicePort {
		p := c.web(name, model.IPv4, last, 0)
		p.Affinity = time.Hour
		return p
	}
	plain := c.web("plain", model.IPv4, 1, 1)
	services := func() int {
		t.Helper()
		all, err := c.ipvs.GetServices()
		require.NoError(t, err)
		return len(all)
	}
	begin := func() {
		t.Helper()
		c.state.Ports = map[view.ServicePortID]*view.ServicePort{}
		held := sticky("held", 2)
		held.Frontends = held.Frontends[1:]
		c.set(plain, held)
		require.NoError(t, c.Replace(t.Context(), c.state))
		require.Equal(t, 2, services())
	}
	// Addresses can be neither added to the device nor removed from it.
	interrupted := func(said string, changes ...view.Change) {
		t.Helper()
		_, err := c.a.Run(t.Context(), "ip", "link", "del", Device)
		require.NoError(t, err)
		require.ErrorContains(t, c.Apply(t.Context(), changes), said)
		delete(c.state.Ports, serviceID("held", model.TCP, model.IPv4))
	}
	departs := func() {
		interrupted("to device "+Device, view.Change{Before: c.state.Ports[serviceID("held", model.TCP, model.IPv4)]},
			view.Change{After: sticky("new", 3)})
	}
	arrives := func() {
		interrupted("remove address", view.Change{Before: plain}, view.Change{After: sticky("new", 3)})
	}
	for name, interrupt := range map[string]func(){"after": departs, "before": arrives} {
		for _, again := range []*inHost{c.inHost, newInHost(t, c.a.Host, Options{})} {
			begin()
			interrupt()
			require.Greater(t, services(), 2, name)
			require.NoError(t, again.Replace(t.Context(), c.state), name)
			require.Equal(t, 1, services(), name)
		}
		begin()
		interrupt()
		require.NoError(t, c.Cleanup(t.Context()))
		require.Zero(t, services(), name)
	}
}

// TestOpenConnections asserts that connections go on when their Service port is renamed, and that
// TCP connections go on when affinity is added or removed. That holds for changes and for a Replace
// by another process.
func TestOpenConnections(t *testing.T) {
	c := newCluster(t, Options{})
	web := c.web("web", model.IPv4, 1, 0, 2)
	dns := c.web("dns", model.IPv4, 2)
	dns.ID.Protocol, dns.Cluster = model.UDP, c.backends(model.IPv4, udpPort, 0, 2)
	for i, f := range dns.Frontends {
		dns.Frontends[i] = everywhere(f, view.Cluster, f.Kind == view.NodePort)
	}
	sticky := c.web("sticky", model.IPv4, 3, 0, 2)
	sticky.Affinity = time.Hour
	c.set(web, dns, sticky)
	require.NoError(t, c.Replace(t.Context(), c.state))

	type open struct {
		*testenv.Conn
		proto testenv.Proto
		to    netip.AddrPort
		pod   string
	}
	var all []*open
	dial := func() {
		t.Helper()
		for _, of := range all {
			of.Close()
		}
		all = nil
		for last, proto := range map[byte]testenv.Proto{1: testenv.TCP, 2: testenv.UDP, 3: testenv.TCP} {
			for _, to := range []netip.AddrPort{netip.AddrPortFrom(vip(model.IPv4, last), servicePort), netip.AddrPortFrom(c.a.IPv4, 30000+uint16(last))} {
				conn, err := c.client.Dial(t.Context(), proto, to, patient)
				require.NoError(t, err)
				reply, err := conn.Echo(t.Context(), "begin")
				require.NoError(t, err)
				all = append(all, &open{conn, proto, to, reply.Name})
			}
		}
	}
	goOn := func(what string, proto testenv.Proto) {
		t.Helper()
		for _, of := range all {
			if of.proto == proto {
				reply, err := of.Echo(t.Context(), "go on")
				require.NoError(t, err, "%s: %v", what, of.to)
				require.Equal(t, of.pod, reply.Name, "%s: %v", what, of.to)
			}
			r := c.client.Probe(t.Context(), of.proto, of.to, 2, patient)
			require.True(t, r.All(testenv.Answered), "%s: new ones to %v: %v", what, of.to, r)
		}
	}
	current := c.inHost
	program := map[string]func(what string, changes ...view.Change){
		"changes": func(what string, changes ...view.Change) {
			require.NoError(t, current.Apply(t.Context(), changes), what)
		},
		"another process": func(what string, _ ...view.Change) {
			current = newInHost(t, c.a.Host, Options{})
			require.NoError(t, current.Replace(t.Context(), c.state), what)
		},
	}
	for how, program := range program {
		dial()
		for _, name := range []string{"http", "p"} {
			var changes []view.Change
			for id, port := range c.state.Ports {
				renamed := *port
				renamed.ID.Port = name
				changes = append(changes, view.Change{Before: port}, view.Change{After: &renamed})
				delete(c.state.Ports, id)
			}
			for _, change := range changes {
				if change.After != nil {
					c.set(change.After)
				}
			}
			what := "renamed to " + name + " by " + how
			program(what, changes...)
			goOn(what, testenv.TCP)
			goOn(what, testenv.UDP)
		}
		for range 2 {
			var changes []view.Change
			for _, port := range c.state.Ports {
				toggled := *port
				toggled.Affinity = time.Hour - port.Affinity
				changes = append(changes, view.Change{Before: port, After: &toggled})
			}
			for _, change := range changes {
				c.set(change.After)
			}
			what := "affinity toggled by " + how
			program(what, changes...)
			goOn(what, testenv.TCP)
		}
	}
	draining := func() (n int) {
		for _, of := range current.family(model.IPv4).draining {
			n += len(of)
		}
		return n
	}
	require.Equal(t, 6, draining(), "to two backends each: by the mark of one, by two addresses of the other")
	current.endDrains(time.Now().Add(DefaultDrainLimit))
	require.Zero(t, draining())
	for _, of := range all {
		of.Close()
	}
}

// TestDrain asserts that TCP connections to a backend that was removed go on until they end, and
// that UDP flows do not.
func TestDrain(t *testing.T) {
	c := newCluster(t, Options{})
	web := c.web("web", model.IPv4, 1, 0)
	udp := &view.ServicePort{
		ID: serviceID("dns", model.UDP, model.IPv4), Frontends: []view.Frontend{clusterIP(vip(model.IPv4, 1))}, Cluster: c.backends(model.IPv4, udpPort, 0),
	}
	c.set(web, udp)
	require.NoError(t, c.Replace(t.Context(), c.state))
	target := netip.AddrPortFrom(vip(model.IPv4, 1), servicePort)
	var open []*testenv.Conn
	for _, proto := range []testenv.Proto{testenv.TCP, testenv.UDP} {
		conn, err := c.client.Dial(t.Context(), proto, target, patient)
		require.NoError(t, err)
		defer conn.Close()
		_, err = conn.Echo(t.Context(), "begin")
		require.NoError(t, err)
		open = append(open, conn)
	}
	c.apply(t, web.ID, c.web("web", model.IPv4, 1, 2))
	moved := *udp
	moved.Cluster = c.backends(model.IPv4, udpPort, 2)
	c.apply(t, udp.ID, &moved)
	gone := c.backends(model.IPv4, tcpPort, 0).List()[0].Address
	require.Equal(t, map[netip.AddrPort]uint32{gone: 0, c.backends(model.IPv4, tcpPort, 2).List()[0].Address: 1}, c.destinations(t, web.ID))
	require.Len(t, c.destinations(t, udp.ID), 1)

	reply, err := open[0].Echo(t.Context(), "go on")
	require.NoError(t, err)
	require.Equal(t, "pod0", reply.Name)
	require.Equal(t, map[string]int{"pod2": 4}, c.client.Probe(t.Context(), testenv.TCP, target, 4, patient).Backends())

	// A backend that comes back is used at once, and is removed again.
	c.apply(t, web.ID, c.web("web", model.IPv4, 1, 0, 2))
	require.Equal(t, uint32(1), c.destinations(t, web.ID)[gone])
	c.apply(t, web.ID, c.web("web", model.IPv4, 1, 2))

	c.endDrains(time.Now())
	require.Contains(t, c.destinations(t, web.ID), gone, "its connection is open")
	c.endDrains(time.Now().Add(DefaultDrainLimit))
	require.NotContains(t, c.destinations(t, web.ID), gone)

	c.apply(t, web.ID, c.web("web", model.IPv4, 1))
	require.Equal(t, map[netip.AddrPort]uint32{c.backends(model.IPv4, tcpPort, 2).List()[0].Address: 0}, c.destinations(t, web.ID))
	again := newInHost(t, c.a.Host, Options{})
	require.NoError(t, again.Replace(t.Context(), c.state))
	require.Len(t, again.family(model.IPv4).draining, 1, "a new process waits as well")
}

// TestSources asserts that clients outside a load balancer's source ranges get no answer.
func TestSources(t *testing.T) {
	c := newCluster(t, Options{})
	for _, family := range families {
		own := c.client.Addr(family == model.IPv6)
		wide := netip.PrefixFrom(own, own.BitLen()-8).Masked()
		for last, sources := range map[byte][]netip.Prefix{
			1: {wide, netip.PrefixFrom(own, own.BitLen())},
			2: {netip.PrefixFrom(c.pods[0].Addr(family == model.IPv6), own.BitLen())},
		} {
			f := everywhere(view.Frontend{Kind: view.LoadBalancer, Address: ingress(family, last), Port: servicePort, Sources: sources}, view.Cluster, true)
			c.set(&view.ServicePort{
				ID: serviceID("limited"+string('0'+rune(last)), model.TCP, family), Frontends: []view.Frontend{f}, Cluster: c.backends(family, tcpPort, 2),
			})
		}
	}
	require.NoError(t, c.Replace(t.Context(), c.state))
	for _, family := range families {
		to := func(from *testenv.Host, last byte, options testenv.ProbeOptions) testenv.Result {
			return from.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(ingress(family, last), servicePort), 1, options)
		}
		require.True(t, to(c.client.Host, 1, patient).All(testenv.Answered))
		require.True(t, to(c.client.Host, 2, hasty).All(testenv.TimedOut))
		require.True(t, to(c.pods[0].Host, 2, patient).All(testenv.Answered))
		require.True(t, to(c.pods[0].Host, 1, hasty).All(testenv.TimedOut))
		require.True(t, to(c.a.Host, 1, hasty).All(testenv.TimedOut))
	}
}

// TestSchedulers asserts that the kernel has all of the schedulers, and that connections reach a
// backend with each.
func TestSchedulers(t *testing.T) {
	c := newCluster(t, Options{})
	c.set(c.web("web", model.IPv4, 1, 0, 1, 2, 3), c.web("web", model.IPv6, 1, 0, 1, 2, 3))
	for _, scheduler := range Schedulers() {
		h := newInHost(t, c.a.Host, Options{Scheduler: scheduler})
		require.NoError(t, h.Replace(t.Context(), c.state), scheduler)
		for _, family := range families {
			s, err := h.ipvs.GetService(h.virtuals(serviceID("web", model.TCP, family))[0].serviceKey.moby())
			require.NoError(t, err)
			require.Equal(t, scheduler, s.SchedName)
			r := c.client.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(vip(family, 1), servicePort), 20, patient)
			require.True(t, r.All(testenv.Answered), "%s: %v", scheduler, r)
			if scheduler == "mh" {
				require.Greater(t, len(r.Backends()), 1, "by the source's port, too, or else a chance of 4^-19: %v", r)
			}
		}
	}
	// Each Service may have its own scheduler. If the kernel lacks it, that is reported, and the
	// default serves the Service.
	own, lacking := c.web("own", model.IPv4, 2, 0, 1), c.web("lacking", model.IPv4, 3, 2)
	own.Scheduler, lacking.Scheduler = "lc", "best"
	scheduler := func(id view.ServicePortID) string {
		s, err := c.ipvs.GetService(c.virtuals(id)[0].serviceKey.moby())
		require.NoError(t, err)
		return s.SchedName
	}
	c.set(own, lacking)
	for _, program := range []func() error{
		func() error { return c.Replace(t.Context(), c.state) },
		func() error { return c.Replace(t.Context(), c.state) },
		func() error {
			plain := *lacking
			plain.Scheduler = ""
			c.apply(t, lacking.ID, &plain)
			return c.Apply(t.Context(), []view.Change{{Before: &plain, After: lacking}})
		},
	} {
		ports, ok := programmer.PortErrors(program())
		require.True(t, ok)
		require.Len(t, ports, 1)
		require.Equal(t, lacking.ID, ports[0].ID)
		require.True(t, ports[0].Lasting, "nobody is to try all again")
		require.Empty(t, c.schedulerFound())
		require.ErrorContains(t, ports[0], "no IPVS scheduler best (kernel module ip_vs_best), using the default")
		require.Equal(t, "lc", scheduler(own.ID))
		require.Equal(t, DefaultScheduler, scheduler(lacking.ID))
		r := c.client.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(vip(model.IPv4, 3), servicePort), 2, patient)
		require.Equal(t, map[string]int{"pod2": 2}, r.Backends())
	}
	c.set(lacking)
	c.family(model.IPv4).lacking["lc"] = true // as if its module had been loaded meanwhile
	require.Equal(t, "lc", c.schedulerFound())
	require.Error(t, c.Replace(t.Context(), c.state))
	require.Equal(t, map[string]bool{"best": true}, c.family(model.IPv4).lacking)
	changed := *own
	changed.Scheduler = "sh"
	c.apply(t, own.ID, &changed)
	require.Equal(t, "sh", scheduler(own.ID))
	_, err := New(Options{Scheduler: "best"})
	require.ErrorContains(t, err, "use one of rr, wrr")
}

// TestNodesOwn asserts that a node's own address that a Service also has stays the node's.
func TestNodesOwn(t *testing.T) {
	c := newCluster(t, Options{})
	c.a.Serve(testenv.TCP, 22)
	for _, family := range families {
		c.set(&view.ServicePort{
			ID:        serviceID("web", model.TCP, family),
			Frontends: []view.Frontend{everywhere(view.Frontend{Kind: view.ExternalIP, Address: c.a.Addr(family == model.IPv6), Port: servicePort}, view.Cluster, true)},
			Cluster:   c.backends(family, tcpPort, 2),
		})
	}
	require.NoError(t, c.Replace(t.Context(), c.state))
	check := func() {
		for _, family := range families {
			a := c.a.Addr(family == model.IPv6)
			require.Equal(t, map[string]int{"pod2": 2}, c.client.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(a, servicePort), 2, patient).Backends())
			require.Equal(t, map[string]int{"a": 1}, c.client.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(a, 22), 1, patient).Backends())
		}
		out, err := c.a.Run(t.Context(), "ip", "addr", "show", "dev", Device)
		require.NoError(t, err)
		require.NotContains(t, out, c.a.IPv4.String())
	}
	check()
	web := c.state.Ports[serviceID("web", model.TCP, model.IPv4)]
	c.apply(t, web.ID, nil)
	c.apply(t, web.ID, web)
	check()
}

// TestRefused asserts that a Service port is served without a backend that IPVS refuses.
func TestRefused(t *testing.T) {
	c := newCluster(t, Options{})
	bad := c.web("bad", model.IPv4, 1, 0)
	bad.Cluster = view.NewBackends(append(bad.Cluster.List(), view.Backend{Address: netip.MustParseAddrPort("224.0.0.1:80")})...)
	c.set(bad, c.web("good", model.IPv4, 2, 1))
	check := func(err error) {
		ports, ok := programmer.PortErrors(err)
		require.True(t, ok, "%v", err)
		require.Len(t, ports, 1)
		require.Equal(t, bad.ID, ports[0].ID)
		require.ErrorContains(t, err, "add backend 224.0.0.1:80")
		for last, pod := range map[byte]string{1: "pod0", 2: "pod1"} {
			r := c.client.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(vip(model.IPv4, last), servicePort), 2, patient)
			require.Equal(t, map[string]int{pod: 2}, r.Backends())
		}
	}
	check(c.Replace(t.Context(), c.state))
	c.apply(t, bad.ID, nil)
	check(c.Apply(t.Context(), []view.Change{{After: bad}}))
}

// TestSettings asserts that the kernel's settings are made.
func TestSettings(t *testing.T) {
	c := newCluster(t, Options{StrictARP: true, TCPTimeout: 111 * time.Second, UDPTimeout: 33 * time.Second})
	require.NoError(t, c.Replace(t.Context(), c.state))
	require.NoError(t, c.a.Do(func() error {
		for _, settings := range []map[string]string{sysctls, strictARP} {
			for name, want := range settings {
				value, err := os.ReadFile("/proc/sys/" + strings.TrimPrefix(name, "?"))
				require.NoError(t, err)
				require.Equal(t, want, strings.TrimSpace(string(value)), name)
			}
		}
		return nil
	}))
	config, err := c.ipvs.GetConfig()
	require.NoError(t, err)
	require.Equal(t, 111*time.Second, config.TimeoutTCP)
	require.Equal(t, 33*time.Second, config.TimeoutUDP)
	require.NotZero(t, config.TimeoutTCPFin)
}

// TestSlowReuse asserts on which kernels reuse of connections is set as by kube-proxy. On newer
// ones, it is left alone.
func TestSlowReuse(t *testing.T) {
	for release, slow := range map[string]bool{
		"4.18.0-553.el8.x86_64\n": true, "5.4.0-200-generic\n": true, "5.8.18": true, "5.9.0-rc1": false, "5.10.0-30-amd64\n": false, "6.1.0": false, "10.0": false,
	} {
		require.Equal(t, slow, slowReuse(release), release)
	}
	c := newCluster(t, Options{})
	require.NoError(t, c.a.Do(func() error {
		path := "/proc/sys/" + strings.TrimPrefix(reuseSysctl, "?")
		for _, value := range []string{"1", "2"} {
			require.NoError(t, os.WriteFile(path, []byte(value), 0))
			require.NoError(t, c.Replace(t.Context(), c.state))
			is, err := os.ReadFile(path)
			require.NoError(t, err)
			require.Equal(t, value, strings.TrimSpace(string(is)), "the machine's kernel is newer")
		}
		return nil
	}))
}

// TestMissing asserts that everything that a kernel lacks is reported, with the modules that would
// help, and that New tries to load these.
func TestMissing(t *testing.T) {
	loaded := map[string]bool{}
	absent := errors.New("absent")
	probes := []probe{
		{"one", "mod_one", func() error { return nil }},
		{"two", "mod_two", func() error {
			if loaded["mod_two"] {
				return nil
			}
			return absent
		}},
		{"three", "mod_three", func() error { return absent }},
		{"four", "mod_four", func() error { return absent }},
	}
	err := find(probes, func(module string) error {
		loaded[module] = true
		return nil
	})
	require.Equal(t, map[string]bool{"mod_two": true, "mod_three": true, "mod_four": true}, loaded)
	require.EqualError(t, err, "this node has no three (kernel module mod_three): absent\nthis node has no four (kernel module mod_four): absent")
}

// TestOpenFails asserts that an attempt to open the sockets for IPVS leaves none of them open if
// one cannot be opened, whichever it is.
func TestOpenFails(t *testing.T) {
	host := testenv.NewNetwork(t).AddNode("a").Host
	newInHost(t, host, Options{}) // makes the kernel load what it needs
	openFiles := func() (numbers []int) {
		list, err := os.ReadDir("/proc/self/fd")
		require.NoError(t, err)
		for _, entry := range list {
			number, err := strconv.Atoi(entry.Name())
			require.NoError(t, err)
			numbers = append(numbers, number)
		}
		return numbers
	}
	// Without gaps in the numbers of open files, a limit is a number of files that can be opened.
	last := 0
	for highest := slices.Max(openFiles()); last <= highest; {
		file, err := unix.Dup(0)
		require.NoError(t, err)
		defer func() { require.NoError(t, unix.Close(file)) }()
		last = file
	}
	var limit unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	require.NoError(t, host.Do(func() error {
		for more := 0; ; more++ {
			before := openFiles()
			require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(last + 1 + more), Max: limit.Max}))
			b, err := openBalancer()
			require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit))
			if err == nil {
				b.close()
				require.GreaterOrEqual(t, more, 3, "three sockets were opened")
				return nil
			}
			require.ErrorIs(t, err, unix.EMFILE)
			require.Equal(t, before, openFiles(), "after %d sockets", more)
		}
	}))
}

// TestOthersServices asserts that virtual services of others, such as kube-proxy's, stay as they
// are all the time. For the same address, those of this package get the connections. In the end,
// nothing of this package is left.
func TestOthersServices(t *testing.T) {
	c := newCluster(t, Options{})
	foreign := &mobyipvs.Service{Address: vip(model.IPv4, 1).AsSlice(), Port: servicePort, Protocol: 6, AddressFamily: 2, Netmask: 1<<32 - 1, SchedName: "rr"}
	var before string
	require.NoError(t, c.a.Do(func() error {
		require.NoError(t, c.prepare())
		require.NoError(t, c.ipvs.NewService(foreign))
		backend := c.backends(model.IPv4, tcpPort, 3).List()[0].Address
		require.NoError(t, c.ipvs.NewDestination(foreign, &mobyipvs.Destination{Address: backend.Addr().AsSlice(), Port: backend.Port(), Weight: 1}))
		text, err := os.ReadFile("/proc/thread-self/net/ip_vs")
		before = string(text)
		return err
	}))
	c.set(c.web("web", model.IPv4, 1, 0), c.web("none", model.IPv6, 2))
	require.NoError(t, c.Replace(t.Context(), c.state))
	r := c.client.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(vip(model.IPv4, 1), servicePort), 2, patient)
	require.Equal(t, map[string]int{"pod0": 2}, r.Backends())
	require.ErrorContains(t, func() error {
		require.NoError(t, c.Cleanup(t.Context()))
		return c.Apply(t.Context(), []view.Change{{After: c.web("web", model.IPv4, 1, 0)}})
	}(), "call Replace first")
	require.NoError(t, c.a.Do(func() error {
		require.NoError(t, Cleanup(t.Context()), "nothing left to clean")
		text, err := os.ReadFile("/proc/thread-self/net/ip_vs")
		require.Equal(t, withoutCounts(before), withoutCounts(string(text)))
		return err
	}))
	out, err := c.a.Run(t.Context(), "sh", "-c", "nft list ruleset; ip addr")
	require.NoError(t, err)
	require.NotContains(t, out, "slicecast")
}

// TestFailsAsAWhole asserts that if Replace cannot read anything, the error concerns both IP
// families and not each Service port.
func TestFailsAsAWhole(t *testing.T) {
	c := newCluster(t, Options{})
	for _, family := range families {
		c.set(c.web("web", family, 1, 0), c.web("more", family, 2, 1))
	}
	works := c.nft
	c.nft = &nft.Conn{Socket: &netlink.Socket{}, Watcher: works.Watcher} // on a file that is no socket
	ports, failed := programmer.Split(c.Replace(t.Context(), c.state), c.Families())
	require.Empty(t, ports)
	require.Len(t, failed, len(families))
	c.nft = works
	require.NoError(t, c.Replace(t.Context(), c.state))
	for _, family := range families {
		r := c.client.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(vip(family, 1), servicePort), 2, patient)
		require.Equal(t, map[string]int{"pod0": 2}, r.Backends())
	}
}
