// These tests prove which UDP flows the Cleaner removes from a real kernel's connection tracking
// table, and which it leaves, when Services, endpoints and addresses come and go.
package conntrack

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	vnetlink "github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/netlink"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// kernelFlow is a connection in the kernel's table.
type kernelFlow struct {
	protocol                   uint8
	source, destination, reply string // addresses with ports
}

func (f kernelFlow) entry() *vnetlink.ConntrackFlow {
	source, destination, reply := netip.MustParseAddrPort(f.source), netip.MustParseAddrPort(f.destination), netip.MustParseAddrPort(f.reply)
	e := &vnetlink.ConntrackFlow{
		FamilyType: familyOf(destination), TimeOut: 3600,
		Forward: vnetlink.IPTuple{Protocol: f.protocol, SrcIP: source.Addr().AsSlice(), SrcPort: source.Port(),
			DstIP: destination.Addr().AsSlice(), DstPort: destination.Port()},
		Reverse: vnetlink.IPTuple{Protocol: f.protocol, SrcIP: reply.Addr().AsSlice(), SrcPort: reply.Port(),
			DstIP: source.Addr().AsSlice(), DstPort: source.Port()},
	}
	if f.protocol == unix.IPPROTO_TCP {
		e.ProtoInfo = &vnetlink.ProtoInfoTCP{State: 3} // TCP_CONNTRACK_ESTABLISHED
	}
	return e
}

func familyOf(a netip.AddrPort) uint8 {
	if a.Addr().Is6() {
		return unix.AF_INET6
	}
	return unix.AF_INET
}

// inject creates connections in the kernel's table, and flushes the table when the test ends.
func inject(t *testing.T, list map[string]kernelFlow) {
	t.Helper()
	t.Cleanup(func() { require.NoError(t, vnetlink.ConntrackTableFlush(vnetlink.ConntrackTable)) })
	for name, f := range list {
		require.NoError(t, vnetlink.ConntrackCreate(vnetlink.ConntrackTable, vnetlink.InetFamily(familyOf(netip.MustParseAddrPort(f.destination))), f.entry()), name)
	}
}

// left returns the names of those connections that the kernel still has.
func left(t *testing.T, list map[string]kernelFlow) []string {
	t.Helper()
	type identity struct {
		protocol            uint8
		source, destination netip.AddrPort
	}
	have := map[identity]bool{}
	for _, family := range []vnetlink.InetFamily{unix.AF_INET, unix.AF_INET6} {
		entries, err := vnetlink.ConntrackTableList(vnetlink.ConntrackTable, family) //nolint:forbidigo // Linux never calls this list interrupted
		require.NoError(t, err)
		for _, e := range entries {
			source, _ := netip.AddrFromSlice(e.Forward.SrcIP)
			destination, _ := netip.AddrFromSlice(e.Forward.DstIP)
			if e.Forward.Protocol == unix.IPPROTO_SCTP { // the library does not read the ports of SCTP
				have[identity{e.Forward.Protocol, netip.AddrPortFrom(source, 0), netip.AddrPortFrom(destination, 0)}] = true
				continue
			}
			have[identity{e.Forward.Protocol, netip.AddrPortFrom(source, e.Forward.SrcPort), netip.AddrPortFrom(destination, e.Forward.DstPort)}] = true
		}
	}
	var names []string
	for name, f := range list {
		id := identity{f.protocol, netip.MustParseAddrPort(f.source), netip.MustParseAddrPort(f.destination)}
		if f.protocol == unix.IPPROTO_SCTP {
			id.source, id.destination = netip.AddrPortFrom(id.source.Addr(), 0), netip.AddrPortFrom(id.destination.Addr(), 0)
		}
		if have[id] {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

func udp(source, destination, reply string) kernelFlow {
	return kernelFlow{unix.IPPROTO_UDP, source, destination, reply}
}

var (
	dns4 = view.ServicePortID{Service: model.ServiceKey{Namespace: "kube-system", Name: "dns"}, Port: "dns", Protocol: model.UDP, Family: model.IPv4}
	dns6 = view.ServicePortID{Service: dns4.Service, Port: "dns", Protocol: model.UDP, Family: model.IPv6}
)

func backends(addresses ...string) view.Backends {
	var list []view.Backend
	for _, a := range addresses {
		list = append(list, view.Backend{Address: netip.MustParseAddrPort(a)})
	}
	return view.NewBackends(list...)
}

// port returns a Service port with these frontends and these serving endpoints.
func port(id view.ServicePortID, frontends []view.Frontend, serving ...string) *view.ServicePort {
	p := &view.ServicePort{ID: id, Frontends: frontends}
	p.Serving = backends(serving...)
	return p
}

func at(kind view.FrontendKind, address string) view.Frontend {
	a := netip.MustParseAddrPort(address)
	return view.Frontend{Kind: kind, Address: a.Addr(), Port: a.Port()}
}

func nodePort(number uint16) view.Frontend { return view.Frontend{Kind: view.NodePort, Port: number} }

func state(ports ...*view.ServicePort) view.State {
	s := view.State{Ports: map[view.ServicePortID]*view.ServicePort{}}
	for _, p := range ports {
		s.Ports[p.ID] = p
	}
	return s
}

// giveAddresses adds addresses to this network namespace.
func giveAddresses(t *testing.T, addresses ...string) {
	t.Helper()
	lo, err := vnetlink.LinkByName("lo")
	require.NoError(t, err)
	for _, a := range addresses {
		address, err := vnetlink.ParseAddr(a)
		require.NoError(t, err)
		address.Flags = unix.IFA_F_NODAD
		require.NoError(t, vnetlink.AddrReplace(lo, address))
		t.Cleanup(func() { require.NoError(t, vnetlink.AddrDel(lo, address)) })
	}
}

// running is a Cleaner whose passes the test makes, and which counts its dumps.
type running struct {
	*Cleaner
	t     *testing.T
	dumps map[model.Family]int
}

// counted is a table that counts its dumps.
type counted struct {
	table
	dumps map[model.Family]int
}

func (c counted) Flows(family model.Family, protocol byte, each func(netlink.Flow)) error {
	c.dumps[family]++
	return c.table.Flows(family, protocol, each)
}

func newCleaner(t *testing.T) *running {
	t.Helper()
	r := &running{New(Options{Logger: slog.New(slog.DiscardHandler)}), t, map[model.Family]int{}}
	open := r.open
	r.open = func() (table, error) {
		t, err := open()
		return counted{t, r.dumps}, err
	}
	return r
}

// clean does what a running Cleaner does when it is woken.
func (r *running) clean() {
	r.t.Helper()
	require.NoError(r.t, r.pass(model.IPv4))
	require.NoError(r.t, r.pass(model.IPv6))
}

func TestOnlyStaleFlowsGo(t *testing.T) {
	giveAddresses(t, "192.168.0.2/32", "2001:db8::1/128")
	list := map[string]kernelFlow{}
	add := func(name string, f kernelFlow) { list[name] = f }
	for kind, f := range map[string]struct{ client, frontend string }{
		"clusterIP": {"10.180.0.9", "10.96.16.1:53"}, "externalIP": {"10.180.0.10", "192.168.99.100:53"},
		"loadBalancer": {"10.180.0.11", "198.51.100.4:53"}, "nodePort": {"10.180.0.12", "192.168.0.2:32000"},
	} {
		frontend := f.frontend
		add(kind+" serves", udp(f.client+":40001", frontend, "10.180.0.4:9090"))
		add(kind+" stale old port", udp(f.client+":40002", frontend, "10.180.0.4:8080"))
		add(kind+" stale endpoint gone", udp(f.client+":40003", frontend, "10.180.2.6:9090"))
		add(kind+" stale untranslated", udp(f.client+":40004", frontend, frontend))
		add(kind+" of TCP", kernelFlow{unix.IPPROTO_TCP, f.client + ":40005", frontend, "10.180.2.6:9090"})
		add(kind+" of SCTP", kernelFlow{unix.IPPROTO_SCTP, f.client + ":40006", frontend, "10.180.2.6:9090"})
	}
	add("other port", udp("10.180.0.9:40007", "10.96.16.1:3000", "10.180.2.6:9090"))
	add("unchanged Service", udp("10.180.0.9:40008", "10.96.16.2:53", "10.180.2.6:9090"))
	add("somebody else's", udp("10.180.0.9:40009", "8.8.8.8:53", "8.8.8.8:53"))
	add("somebody else's with the NodePort's number", udp("10.180.0.9:40010", "8.8.8.8:32000", "8.8.8.8:32000"))
	add("IPv6 serves", udp("[fd00:10:180::9]:40001", "[fd00:10:96::1]:53", "[fd00:10:180::4]:9090"))
	add("IPv6 stale", udp("[fd00:10:180::9]:40002", "[fd00:10:96::1]:53", "[fd00:10:180::6]:9090"))
	add("IPv6 stale NodePort", udp("[fd00:10:180::9]:40003", "[2001:db8::1]:32000", "[fd00:10:180::6]:9090"))
	inject(t, list)

	r := newCleaner(t)
	other := dns4
	other.Service.Name = "other"
	r.Changed([]view.Change{{Before: port(other, nil), After: port(other, []view.Frontend{at(view.ClusterIP, "10.96.16.2:53")}, "10.180.2.6:9090")}})
	frontends := []view.Frontend{at(view.ClusterIP, "10.96.16.1:53"), at(view.ExternalIP, "192.168.99.100:53"), at(view.LoadBalancer, "198.51.100.4:53"), nodePort(32000)}
	r.Changed([]view.Change{
		{After: port(dns4, frontends, "10.180.0.4:9090", "10.180.1.7:9090")},
		{After: port(dns6, []view.Frontend{at(view.ClusterIP, "[fd00:10:96::1]:53"), nodePort(32000)}, "[fd00:10:180::4]:9090")},
	})
	r.clean()
	for _, name := range left(t, list) {
		require.NotContains(t, name, "stale")
		delete(list, name)
	}
	for name := range list {
		require.Contains(t, name, "stale", "it is gone")
	}
	require.EqualValues(t, 14, testutil.ToFloat64(r.removed))
	require.Equal(t, map[model.Family]int{model.IPv4: 1, model.IPv6: 1}, r.dumps)
	r.clean()
	require.Equal(t, map[model.Family]int{model.IPv4: 1, model.IPv6: 1}, r.dumps, "nothing has changed")
}

// TestLastEndpoint asserts that a Service port that loses its last serving endpoint loses its
// flows, except for those to endpoints that receive new connections nevertheless.
func TestLastEndpoint(t *testing.T) {
	list := map[string]kernelFlow{
		"untranslated": udp("10.180.0.9:40001", "10.96.16.1:53", "10.96.16.1:53"),
		"dead":         udp("10.180.0.9:40002", "10.96.16.1:53", "10.180.0.4:53"),
		"other":        udp("10.180.0.9:40003", "10.96.16.1:53", "10.180.0.5:53"),
		"IPv6":         udp("[fd00:10:180::9]:40001", "[fd00:10:96::1]:53", "[fd00:10:180::4]:53"),
	}
	frontends := []view.Frontend{at(view.ClusterIP, "10.96.16.1:53")}
	before, none := port(dns4, frontends, "10.180.0.4:53", "10.180.0.5:53"), port(dns4, frontends)
	notReady, notReadyLocal := port(dns4, frontends), port(dns4, frontends)
	notReady.Cluster, notReadyLocal.Local = backends("10.180.0.5:53"), backends("10.180.0.5:53")
	for name, c := range map[string]struct {
		after *view.ServicePort
		left  []string
	}{
		"none": {none, []string{"IPv6"}}, "one that is not ready": {notReady, []string{"IPv6", "other"}},
		"one here": {notReadyLocal, []string{"IPv6", "other"}},
	} {
		t.Run(name, func(t *testing.T) {
			r := newCleaner(t)
			r.Replaced(state(before))
			r.clean()
			inject(t, list)
			r.Changed([]view.Change{{Before: before, After: c.after}})
			r.clean()
			require.Equal(t, c.left, left(t, list))
			require.Equal(t, map[model.Family]int{model.IPv4: 2}, r.dumps)
		})
	}
}

// TestFlowsFromBeforeTheFirstProgramming covers flows that are not translated, or that another
// proxy has translated.
func TestFlowsFromBeforeTheFirstProgramming(t *testing.T) {
	giveAddresses(t, "192.168.0.2/32")
	list := map[string]kernelFlow{
		"served":                      udp("10.180.0.9:40001", "10.96.16.1:53", "10.180.0.4:53"),
		"stale":                       udp("10.180.0.9:40002", "10.96.16.1:53", "10.96.16.1:53"),
		"stale NodePort":              udp("203.0.113.2:40001", "192.168.0.2:32000", "192.168.0.2:32000"),
		"stale, without endpoints":    udp("10.180.0.9:40003", "10.96.16.2:53", "10.96.16.2:53"),
		"stale, and once an endpoint": udp("10.180.0.9:40004", "10.96.16.2:53", "10.180.0.4:53"),
		"no Service's":                udp("10.180.0.9:40005", "10.96.16.3:53", "10.180.0.4:53"),
	}
	inject(t, list)
	empty := dns4
	empty.Service.Name = "empty"
	r := newCleaner(t)
	r.Replaced(state(
		port(dns4, []view.Frontend{at(view.ClusterIP, "10.96.16.1:53"), nodePort(32000)}, "10.180.0.4:53"),
		port(empty, []view.Frontend{at(view.ClusterIP, "10.96.16.2:53")}),
	))
	r.clean()
	require.Equal(t, []string{"no Service's", "served"}, left(t, list))
}

// TestFrontendsThatWentWhileTheAgentWasAway asserts that translated flows to such frontends are
// removed, unless a Service port has the frontend now, whether it is the same port or another one.
func TestFrontendsThatWentWhileTheAgentWasAway(t *testing.T) {
	giveAddresses(t, "192.168.0.2/32")
	list := map[string]kernelFlow{
		"served":                   udp("10.180.0.9:40001", "10.96.16.1:53", "10.180.0.4:53"),
		"another's now":            udp("10.180.0.9:40002", "192.168.99.100:53", "10.180.0.5:53"),
		"untranslated":             udp("10.180.0.9:40003", "10.96.16.3:53", "10.96.16.3:53"),
		"the same port elsewhere":  udp("10.180.0.9:40004", "192.168.0.3:32000", "10.180.0.6:53"),
		"stale cluster IP":         udp("10.180.0.9:40005", "10.96.16.3:53", "10.180.0.6:53"),
		"stale external IP":        udp("10.180.0.9:40006", "192.168.99.101:53", "10.180.0.6:53"),
		"stale NodePort":           udp("10.180.0.9:40007", "192.168.0.2:32000", "10.180.0.6:53"),
		"stale, of one that stays": udp("10.180.0.9:40008", "192.168.99.102:53", "10.180.0.4:53"),
		"IPv6 stale":               udp("[fd00:10:180::9]:40001", "[fd00:10:96::3]:53", "[fd00:10:180::6]:53"),
	}
	inject(t, list)
	gone, gone6, other, tcp := dns4, dns6, dns4, dns4
	gone.Service.Name, gone6.Service.Name, other.Service.Name, tcp.Protocol = "gone", "gone", "other", model.TCP
	cluster, taken := at(view.ClusterIP, "10.96.16.1:53"), at(view.ExternalIP, "192.168.99.100:53")
	r := newCleaner(t)
	now := state(port(dns4, []view.Frontend{cluster}, "10.180.0.4:53"), port(other, []view.Frontend{taken}, "10.180.0.5:53"))
	r.Replaced(now)
	r.clean()
	require.Len(t, left(t, list), len(list))
	r.Earlier(state(
		port(dns4, []view.Frontend{cluster, at(view.ExternalIP, "192.168.99.102:53")}),
		port(gone, []view.Frontend{
			at(view.ClusterIP, "10.96.16.3:53"), taken, at(view.ExternalIP, "192.168.99.101:53"), nodePort(32000),
		}),
		port(gone6, []view.Frontend{at(view.ClusterIP, "[fd00:10:96::3]:53")}),
		port(tcp, []view.Frontend{at(view.ClusterIP, "10.96.16.4:53")}),
	).Ports)
	r.clean()
	require.Equal(t, []string{"another's now", "served", "the same port elsewhere", "untranslated"}, left(t, list))
	require.Empty(t, r.gone)
}

func TestFirstEndpoint(t *testing.T) {
	list := map[string]kernelFlow{
		"untranslated": udp("10.180.0.9:40001", "10.96.16.1:53", "10.96.16.1:53"),
		"dead":         udp("10.180.0.9:40002", "10.96.16.1:53", "10.180.0.4:53"),
		"new":          udp("10.180.0.9:40003", "10.96.16.1:53", "10.180.0.5:53"),
	}
	r := newCleaner(t)
	frontends := []view.Frontend{at(view.ClusterIP, "10.96.16.1:53")}
	none := port(dns4, frontends)
	r.Replaced(state(none))
	r.clean()
	inject(t, list)
	r.Changed([]view.Change{{Before: none, After: port(dns4, frontends, "10.180.0.5:53")}})
	r.clean()
	require.Equal(t, []string{"new"}, left(t, list))
}

// TestEndpointsThatDoNotServe asserts that such endpoints lose their flows if another endpoint
// serves, even if they receive new connections because of publishNotReadyAddresses.
func TestEndpointsThatDoNotServe(t *testing.T) {
	list := map[string]kernelFlow{
		"serves":        udp("10.180.0.9:40001", "10.96.16.1:53", "10.180.0.4:53"),
		"gets new ones": udp("10.180.0.9:40002", "10.96.16.1:53", "10.180.0.3:53"),
	}
	inject(t, list)
	p := port(dns4, []view.Frontend{at(view.ClusterIP, "10.96.16.1:53")}, "10.180.0.4:53")
	p.Cluster = backends("10.180.0.3:53", "10.180.0.4:53")
	r := newCleaner(t)
	r.Changed([]view.Change{{After: p}})
	r.clean()
	require.Equal(t, []string{"serves"}, left(t, list))
}

// TestFrontendsThatCome covers a client that sent to an address before a Service had it.
func TestFrontendsThatCome(t *testing.T) {
	giveAddresses(t, "192.168.0.2/32")
	list := map[string]kernelFlow{
		"external IP": udp("203.0.113.2:40001", "192.168.99.100:53", "192.168.99.100:53"),
		"NodePort":    udp("203.0.113.2:40001", "192.168.0.2:32000", "192.168.0.2:32000"),
		"to the new":  udp("203.0.113.2:40002", "192.168.0.2:32000", "10.180.0.4:53"),
	}
	inject(t, list)
	r := newCleaner(t)
	before := port(dns4, []view.Frontend{at(view.ClusterIP, "10.96.16.1:53")}, "10.180.0.4:53")
	r.Replaced(state(before))
	r.clean()
	require.Len(t, left(t, list), 3)
	after := port(dns4, []view.Frontend{at(view.ClusterIP, "10.96.16.1:53"), at(view.ExternalIP, "192.168.99.100:53"), nodePort(32000)}, "10.180.0.4:53")
	r.Changed([]view.Change{{Before: before, After: after}})
	r.clean()
	require.Equal(t, []string{"to the new"}, left(t, list))
}

// TestFrontendsThatGo asserts that translated flows to frontends that are gone are removed. If
// another Service port has the frontend by then, flows to that port's endpoints stay.
func TestFrontendsThatGo(t *testing.T) {
	giveAddresses(t, "192.168.0.2/32")
	cluster, external := at(view.ClusterIP, "10.96.16.1:53"), at(view.ExternalIP, "192.168.99.100:53")
	list := map[string]kernelFlow{
		"cluster IP":              udp("10.180.0.9:40001", "10.96.16.1:53", "10.180.0.4:53"),
		"external IP":             udp("10.180.0.9:40002", "192.168.99.100:53", "10.180.0.4:53"),
		"untranslated":            udp("10.180.0.9:40003", "192.168.99.101:53", "192.168.99.101:53"),
		"NodePort":                udp("10.180.0.9:40006", "192.168.0.2:32000", "10.180.0.4:53"),
		"the same port elsewhere": udp("10.180.0.9:40007", "192.168.0.3:32000", "10.180.0.4:53"),
	}
	all := []view.Frontend{cluster, external, nodePort(32000)}
	before := port(dns4, all, "10.180.0.4:53")
	other := dns4
	other.Port = "renamed"
	for name, c := range map[string]struct {
		changes []view.Change
		kept    []string
	}{
		"all but the cluster IP":   {[]view.Change{{Before: before, After: port(dns4, []view.Frontend{cluster}, "10.180.0.4:53")}}, []string{"cluster IP"}},
		"the Service":              {[]view.Change{{Before: before}}, nil},
		"to one without endpoints": {[]view.Change{{Before: before}, {After: port(other, all)}}, nil},
		"to one with the same": {[]view.Change{{Before: before}, {After: port(other, all, "10.180.0.4:53")}},
			[]string{"NodePort", "cluster IP", "external IP"}},
		"to one with others": {[]view.Change{{After: port(other, []view.Frontend{external, nodePort(32000)}, "10.180.0.5:53")}, {Before: before}}, nil},
		"and come again":     {[]view.Change{{Before: before}, {After: before}}, []string{"NodePort", "cluster IP", "external IP"}},
	} {
		t.Run(name, func(t *testing.T) {
			inject(t, list)
			r := newCleaner(t)
			r.Replaced(state(before))
			r.clean()
			require.Len(t, left(t, list), len(list))
			r.Changed(c.changes)
			r.clean()
			kept := append([]string{"the same port elsewhere", "untranslated"}, c.kept...)
			slices.Sort(kept)
			require.Equal(t, kept, left(t, list))
		})
	}
	t.Run("in a state", func(t *testing.T) {
		inject(t, list)
		r := newCleaner(t)
		r.Replaced(state(before))
		r.Replaced(state())
		r.clean()
		require.Equal(t, []string{"the same port elsewhere", "untranslated"}, left(t, list))
		require.Empty(t, r.gone)
	})
	t.Run("to somebody else", func(t *testing.T) {
		r := newCleaner(t)
		r.Replaced(state(before))
		r.Replaced(state())
		list := map[string]kernelFlow{"untranslated": udp("10.180.0.9:40002", "192.168.99.100:53", "192.168.99.100:53")}
		inject(t, list)
		r.clean()
		require.Len(t, left(t, list), 1)
	})
}

// TestManyFrontendsThatGo asserts that there is a bound on what is remembered while passes fail,
// and that what is remembered is cleaned later.
func TestManyFrontendsThatGo(t *testing.T) {
	m := newMemory("10.180.0.4:53")
	c := New(Options{})
	c.open = func() (table, error) { return m, nil }
	m.dumpErrors = []error{unix.EPERM}
	first := port(dns4, frontends, "10.180.0.4:53")
	c.Replaced(state(first))
	c.Changed([]view.Change{{Before: first}})
	require.Error(t, c.pass(model.IPv4))
	for i := range maxGone + 1 {
		id := dns4
		id.Service.Name = fmt.Sprint(i)
		p := port(id, []view.Frontend{at(view.ClusterIP, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 97, byte(i >> 8), byte(i)}), uint16(53+i>>16)).String())})
		c.Changed([]view.Change{{After: p}})
		c.Changed([]view.Change{{Before: p}})
	}
	require.Len(t, c.gone, maxGone)
	require.NoError(t, c.pass(model.IPv4))
	require.Empty(t, m.left())
	require.Empty(t, c.gone)
}

// TestNodePorts asserts that NodePorts count on all addresses of the node, except where another
// Service port has that address and port.
func TestNodePorts(t *testing.T) {
	giveAddresses(t, "192.168.0.2/32", "192.168.1.2/32", "198.51.100.4/32")
	list := map[string]kernelFlow{
		"node":          udp("203.0.113.2:40001", "192.168.0.2:32000", "192.168.0.2:32000"),
		"another":       udp("203.0.113.2:40001", "192.168.1.2:32000", "10.180.0.9:53"),
		"loopback":      udp("127.0.0.1:40001", "127.0.0.1:32000", "127.0.0.1:32000"),
		"not ours":      udp("203.0.113.2:40001", "192.168.0.3:32000", "192.168.0.3:32000"),
		"VIP":           udp("203.0.113.2:40001", "198.51.100.4:32000", "10.180.0.6:53"),
		"another's VIP": udp("203.0.113.2:40002", "198.51.100.4:32000", "10.180.0.4:53"),
	}
	inject(t, list)
	other := dns4
	other.Service.Name = "other"
	r := newCleaner(t)
	r.Replaced(state(port(other, []view.Frontend{at(view.LoadBalancer, "198.51.100.4:32000")}, "10.180.0.6:53")))
	r.Changed([]view.Change{{After: port(dns4, []view.Frontend{nodePort(32000)}, "10.180.0.4:53")}})
	r.clean()
	require.Equal(t, []string{"VIP", "not ours"}, left(t, list))
}

// TestOthersAreLookedAtToo asserts that a change of one Service port causes a search for stale
// flows of all of them.
func TestOthersAreLookedAtToo(t *testing.T) {
	list := map[string]kernelFlow{"stale": udp("10.180.0.9:40001", "10.96.16.1:53", "10.180.0.9:53")}
	r := newCleaner(t)
	r.Replaced(state(port(dns4, []view.Frontend{at(view.ClusterIP, "10.96.16.1:53")}, "10.180.0.4:53")))
	r.clean()
	inject(t, list)
	r.clean()
	require.Equal(t, []string{"stale"}, left(t, list), "nothing has changed")
	other := dns4
	other.Service.Name = "other"
	r.Changed([]view.Change{{After: port(other, []view.Frontend{at(view.ClusterIP, "10.96.16.2:53")})}})
	r.clean()
	require.Empty(t, left(t, list))
}

// TestManyInOnePass covers a hundred Service ports with a hundred stale flows each. A running
// Cleaner removes them in one pass over the table.
func TestManyInOnePass(t *testing.T) {
	list := map[string]kernelFlow{}
	s := state()
	for i := range 100 {
		id := dns4
		id.Service.Name = string(rune('a' + i))
		frontend := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 96, 1, byte(i)}), 53)
		s.Ports[id] = port(id, []view.Frontend{at(view.ClusterIP, frontend.String())}, "10.180.0.4:53")
		for j := range 100 {
			source := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 180, 3, byte(j)}), uint16(1000+i)).String()
			list[source] = udp(source, frontend.String(), "10.180.0.5:53")
		}
	}
	inject(t, list)
	r := newCleaner(t)
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	r.Replaced(s)
	running.Go(func() { r.Run(ctx) })
	require.Eventually(t, func() bool { return testutil.ToFloat64(r.removed) == 10_000 }, time.Minute, time.Millisecond)
	cancel()
	running.Wait()
	require.Empty(t, left(t, list))
	require.Equal(t, map[model.Family]int{model.IPv4: 1}, r.dumps)
}
