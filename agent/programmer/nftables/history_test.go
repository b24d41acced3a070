// TestHistories proves that any random history of changes, by one process or several, leaves in a
// real kernel what a Replace with the final state creates from nothing.
package nftables

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

var protocols = []model.Protocol{model.TCP, model.UDP, model.SCTP}

// drawPort draws a Service port. Its addresses belong to it alone, except for those in shared,
// which no two Service ports have at once.
func drawPort(t *rapid.T, id view.ServicePortID, shared map[string]view.ServicePortID) *view.ServicePort {
	p := &view.ServicePort{ID: id}
	route := func(label string) view.Route {
		to := rapid.SampledFrom([]view.Target{view.Reject, view.Drop, view.Cluster, view.Cluster, view.Local}).Draw(t, label)
		return view.Route{To: to, Masquerade: to >= view.Cluster && rapid.Bool().Draw(t, label+" masquerade")}
	}
	for range rapid.IntRange(1, 4).Draw(t, "frontends") {
		f := view.Frontend{
			Kind: rapid.SampledFrom([]view.FrontendKind{view.ClusterIP, view.ClusterIP, view.ExternalIP, view.LoadBalancer, view.NodePort}).Draw(t, "kind"),
			Port: uint16(80 + rapid.IntRange(0, 1).Draw(t, "port")),
		}
		if f.Kind == view.NodePort {
			f.Port = uint16(30000 + rapid.IntRange(0, 20).Draw(t, "nodePort"))
		} else {
			f.Address = vip(id.Family, byte(rapid.IntRange(0, 20).Draw(t, "vip")))
		}
		switch rapid.IntRange(0, 3).Draw(t, "routes") {
		case 0:
			f = routed(f, route("pods"), route("node"), route("others"))
		case 1:
			f = localPolicy(f)
		case 2:
			f = everyone(f, route("all"))
		default:
			f = routed(f, toCluster, toClusterMasquerade, toClusterMasquerade)
		}
		if f.Kind == view.LoadBalancer {
			for range rapid.IntRange(0, 2).Draw(t, "sources") {
				bits := rapid.IntRange(1, 24).Draw(t, "bits")
				f.Sources = append(f.Sources, netip.PrefixFrom(vip(id.Family, 9), bits).Masked())
			}
		}
		key := fmt.Sprint(f.Address, f.Port, id.Protocol, id.Family)
		if _, taken := shared[key]; !taken {
			shared[key] = id
			p.Frontends = append(p.Frontends, f)
		}
	}
	if rapid.IntRange(0, 2).Draw(t, "affinity") == 0 {
		p.Affinity = time.Duration(rapid.IntRange(1, 3).Draw(t, "hours")) * time.Hour
	}
	draw := func(label string, target view.Target) view.Backends {
		if !slices.ContainsFunc(p.Frontends, func(f view.Frontend) bool { return f.Pods.To == target || f.Node.To == target || f.Others.To == target }) {
			return view.Backends{}
		}
		var backends []view.Backend
		count := rapid.SampledFrom([]int{1, 1, 2, 3, 7, 8, 9, 40, 41, 60}).Draw(t, label)
		first := rapid.IntRange(0, 30).Draw(t, label+" first")
		for i := first; i < first+count; i++ {
			a := netip.AddrFrom4([4]byte{10, 180, byte(i % 3), byte(i)})
			if id.Family == model.IPv6 {
				a = netip.AddrFrom16([16]byte{0xfd, 14: byte(i % 3), 15: byte(i)})
			}
			backends = append(backends, view.Backend{Address: netip.AddrPortFrom(a, 8080), Local: i%3 == 0})
		}
		return view.NewBackends(backends...)
	}
	p.Cluster, p.Local = draw("cluster", view.Cluster), draw("local", view.Local)
	return p
}

// drawNode draws what depends on the node.
func drawNode(t *rapid.T) (n view.Node) {
	switch rapid.IntRange(0, 3).Draw(t, "pods by") {
	case 0:
		n.Pods.Prefixes = podCIDRs
	case 1:
		n.Pods.Prefixes = []netip.Prefix{netip.MustParsePrefix("10.180.7.0/24"), netip.MustParsePrefix("10.180.1.0/24")}
	case 2:
		n.Pods.Interface = "cni0"
	case 3:
		n.Pods.InterfacePrefix = "veth"
	}
	n.NodePorts = rapid.SampledFrom([][]netip.Prefix{
		nil, everywhere, {netip.MustParsePrefix("192.168.0.2/32"), netip.MustParsePrefix("2001:db8::/64")},
		{netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("10.0.0.0/8")},
	}).Draw(t, "nodePort addresses")
	n.LocalhostNodePorts = rapid.Bool().Draw(t, "localhost")
	n.ServiceCIDRs = rapid.SampledFrom([][]netip.Prefix{
		nil, {netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd00:10:96::/112")}, {netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("10.97.0.0/16")},
	}).Draw(t, "service CIDRs")
	return n
}

// holds is the content of a family's table without what depends on its history: ids, numbers, the
// order of slots, the part that holds backends, and unused parts that are kept.
type holds struct {
	Chains    map[string]nft.HeldChain
	Sets      []string
	Vmaps     map[string]string
	Addresses []string
	Ports     map[string]heldPort
}

type heldPort struct {
	Elements []string
	Backends [backendSets][]netip.AddrPort
	Sticky   bool
}

// holds reads the table. It asserts what must be true of any table, and that the table agrees with
// what the family remembers.
func (f *family) holds(t require.TestingT) holds {
	c, err := f.read()
	require.NoError(t, err)
	require.False(t, c.foreign)
	require.Empty(t, c.stray)
	out := holds{Chains: map[string]nft.HeldChain{}, Vmaps: map[string]string{}, Ports: map[string]heldPort{}}
	for name, chain := range c.chains {
		out.Chains[name] = *chain
	}
	for k, chain := range c.vmaps {
		r, ok := refOfChain(k, chain)
		require.True(t, ok)
		require.Equal(t, nft.Hashes(f.rules(r), f.Family), c.chains[chain].Rules)
		delete(out.Chains, chain)
		if f.held[r] > 0 {
			key := integerOf([]byte(k.key))
			if part := r.pick.part(); part > 0 {
				require.Contains(t, c.sets, endpoints(r.pick.set, part).String())
				key &^= 0xf00
				chain = strings.Replace(chain, partSuffix(part), "", 1)
			}
			out.Vmaps[fmt.Sprint(k.set, " ", key)] = chain
		}
	}
	out.Sets = slices.DeleteFunc(slices.Sorted(maps.Keys(c.sets)), func(name string) bool { return strings.Contains(name, "-part-") })
	if f.held[ref{kind: refAffinity}] == 0 {
		out.Sets = slices.DeleteFunc(out.Sets, func(name string) bool { return name == affinity.String() })
		remaining := f.targets(false)
		for name := range f.targets(true) {
			if delete(out.Chains, name); remaining[name] != nil {
				out.Chains[name] = nft.HeldChain{Rules: nft.Hashes(remaining[name], f.Family)}
			}
		}
	}
	for r := range c.shared {
		out.Addresses = append(out.Addresses, fmt.Sprint(r.kind, r.address))
		require.Positive(t, f.held[r])
	}
	slices.Sort(out.Addresses)
	var loads [parts]int
	for _, held := range f.ports {
		loads[held.part] += held.load()
	}
	require.Equal(t, f.loads, loads)
	require.Len(t, c.found, len(f.ports))
	require.Len(t, f.ids, len(f.ports))
	for id, held := range f.ports {
		found := c.found[held.id]
		require.NotNil(t, found, "%v", id)
		require.Equal(t, label(id), found.name)
		p := heldPort{Sticky: held.sticky}
		numbers := map[netip.AddrPort]uint32{}
		for set := range backendSets {
			require.True(t, held.sticky || len(found.slots[set]) == 0 || held.part == found.part)
			require.True(t, slices.Equal(held.slots[set], found.slots[set]), "%v: %v, %v", id, held.slots[set], found.slots[set])
			for _, s := range held.slots[set] {
				require.False(t, s.empty())
				require.Equal(t, held.sticky, s.number > 0)
				if n, again := numbers[s.address()]; again {
					require.Equal(t, n, s.number)
				}
				numbers[s.address()] = s.number
				p.Backends[set] = append(p.Backends[set], s.address())
			}
			slices.SortFunc(p.Backends[set], netip.AddrPort.Compare)
		}
		for _, e := range found.elements {
			switch {
			case e.set == frontends || e.set == nodePorts:
				e.data &= policyBits
			case e.set < sources: // the set is one of sizes
				if e.key = ""; !held.sticky {
					require.Equal(t, held.part, class(e.data).part())
					e.data &^= 0xf00
				}
			}
			p.Elements = append(p.Elements, fmt.Sprintf("%+v", e))
		}
		slices.Sort(p.Elements)
		out.Ports[label(id)] = p
	}
	return out
}

// TestHistories asserts that any history of Apply and Replace, by one process or several, leaves
// what a Replace with the final state creates from nothing. Another process then finds nothing to
// do.
func TestHistories(t *testing.T) {
	t.Parallel()
	node := testenv.NewNetwork(t).AddNode("a")
	rapid.Check(t, func(rt *rapid.T) {
		id := func() view.ServicePortID {
			return serviceID(fmt.Sprint("s", rapid.IntRange(0, 15).Draw(rt, "service")),
				rapid.SampledFrom(protocols).Draw(rt, "protocol"), rapid.SampledFrom(families).Draw(rt, "family"))
		}
		state, shared := newState(), map[string]view.ServicePortID{}
		state.Node = drawNode(rt)
		// set changes a Service port and keeps track of which Service port has each address.
		set := func(id view.ServicePortID, remove bool) view.Change {
			change := view.Change{Before: state.Ports[id]}
			maps.DeleteFunc(shared, func(_ string, owner view.ServicePortID) bool { return owner == id })
			delete(state.Ports, id)
			if !remove {
				if p := drawPort(rt, id, shared); len(p.Frontends) > 0 {
					change.After, state.Ports[id] = p, p
				}
			}
			return change
		}
		for range rapid.IntRange(0, 30).Draw(rt, "at first") {
			set(id(), false)
		}
		start := func() *inHost {
			h := newInHost(t, node.Host, Options{})
			for _, f := range h.families {
				f.partSize = rapid.SampledFrom([]int{partSize, 100}).Draw(rt, "part size")
			}
			return h
		}
		h := start()
		replace := func() {
			// Or else a guard would stay.
			_, err := node.Run(t.Context(), "sysctl", "-qw", "net.ipv4.conf.all.route_localnet=0")
			require.NoError(rt, err)
			require.NoError(rt, h.Replace(t.Context(), state))
		}
		replace()
		for range rapid.IntRange(1, 4).Draw(rt, "steps") {
			changes := map[view.ServicePortID]view.Change{}
			for range rapid.IntRange(1, 12).Draw(rt, "changes") {
				id := id()
				change := set(id, rapid.IntRange(0, 2).Draw(rt, "remove") == 0)
				if first, again := changes[id]; again {
					change.Before = first.Before
				}
				changes[id] = change
			}
			maps.DeleteFunc(changes, func(_ view.ServicePortID, c view.Change) bool { return c.Before == nil && c.After == nil })
			switch rapid.IntRange(0, 4).Draw(rt, "how") {
			case 0:
				state.Node = drawNode(rt)
				replace()
			case 1:
				h = start()
				replace()
			default:
				require.NoError(rt, h.Apply(t.Context(), slices.Collect(maps.Values(changes))))
			}
			for _, f := range h.families {
				f.holds(rt)
			}
		}

		var held, fresh [2]holds
		for i, f := range h.families {
			held[i] = f.holds(rt)
		}
		again := newInHost(t, node.Host, Options{})
		require.NoError(rt, again.Replace(t.Context(), state)) // removes parts that were kept
		before, err := h.conn.Generation()
		require.NoError(rt, err)
		require.NoError(rt, again.Replace(t.Context(), state))
		after, err := h.conn.Generation()
		require.NoError(rt, err)
		require.Equal(rt, before, after, "there was nothing to do")
		require.NoError(rt, h.Cleanup(t.Context()))
		require.NoError(rt, h.Replace(t.Context(), state))
		for i, f := range h.families {
			fresh[i] = f.holds(rt)
		}
		require.Equal(rt, fresh, held)
		require.NoError(rt, h.Cleanup(t.Context()))
	})
}
