// TestHistories proves that any random history of changes leaves the same rules in a real kernel as
// programming the final state on a clean node.
package iptables

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

// drawPort draws a Service port. There are few addresses and nodePorts, so that Service ports share
// some of them. They are close together, so that the trees fork.
func drawPort(t *rapid.T, id view.ServicePortID) *view.ServicePort {
	p := &view.ServicePort{ID: id}
	route := func(label string) view.Route {
		return view.Route{
			To:         rapid.SampledFrom([]view.Target{view.Reject, view.Drop, view.Cluster, view.Local}).Draw(t, label),
			Masquerade: rapid.Bool().Draw(t, label+" masquerade"),
		}
	}
	for range rapid.IntRange(1, 3).Draw(t, "frontends") {
		f := view.Frontend{Kind: rapid.SampledFrom([]view.FrontendKind{view.ClusterIP, view.ClusterIP, view.ExternalIP, view.LoadBalancer, view.NodePort}).Draw(t, "kind"), Port: 80}
		if f.Kind == view.NodePort {
			f.Port = uint16(30000 + rapid.IntRange(0, 200).Draw(t, "nodePort"))
		} else {
			f.Address = vip(id.Family, byte(rapid.IntRange(0, 79).Draw(t, "vip")))
		}
		switch rapid.IntRange(0, 5).Draw(t, "routes") {
		case 0:
			f.Pods, f.Node, f.Others = route("pods"), route("node"), route("others")
		case 1:
			f = localPolicy(f)
		case 2:
			f = rejected(f)
		case 3:
			f = everyone(f, view.Route{To: view.Cluster, Masquerade: true})
		default:
			usual := clusterIP(f.Address)
			f.Pods, f.Node, f.Others = usual.Pods, usual.Node, usual.Others
		}
		if f.Kind == view.LoadBalancer {
			for range rapid.IntRange(0, 2).Draw(t, "sources") {
				bits := rapid.IntRange(1, 24).Draw(t, "bits")
				f.Sources = append(f.Sources, netip.PrefixFrom(vip(id.Family, 9), bits).Masked())
			}
		}
		if !slices.ContainsFunc(p.Frontends, func(o view.Frontend) bool { return o.Address == f.Address && o.Port == f.Port }) {
			p.Frontends = append(p.Frontends, f)
		}
	}
	if rapid.IntRange(0, 4).Draw(t, "affinity") == 0 {
		p.Affinity = time.Duration(rapid.IntRange(1, 86400).Draw(t, "seconds")) * time.Second
	}
	leadsTo := func(set view.Target) bool {
		return slices.ContainsFunc(p.Frontends, func(f view.Frontend) bool { return f.Pods.To == set || f.Node.To == set || f.Others.To == set })
	}
	draw := func(label string) view.Backends {
		var backends []view.Backend
		count := rapid.SampledFrom([]int{1, 1, 1, 2, 2, 3, 3, 7, maxPlain + 1, 150}).Draw(t, label)
		first := rapid.IntRange(0, 3).Draw(t, label+" first")
		for i := range count {
			i += first
			address := netip.AddrFrom4([4]byte{10, 180, byte(i % 3), byte(i)})
			if id.Family == model.IPv6 {
				address = netip.AddrFrom16([16]byte{0xfd, 14: byte(i % 3), 15: byte(i)})
			}
			backends = append(backends, view.Backend{Address: netip.AddrPortFrom(address, 8080), Local: i%3 == 0})
		}
		return view.NewBackends(backends...)
	}
	if leadsTo(view.Cluster) {
		p.Cluster = draw("cluster")
	}
	if leadsTo(view.Local) {
		p.Local = draw("local")
	}
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
	return n
}

// TestHistories asserts that any history of Apply leaves the same rules as a Replace with the final
// state on a clean node, and that a new process finds nothing to write.
func TestHistories(t *testing.T) {
	eachVariant(t, func(t *testing.T, variant Variant) {
		node := testenv.NewNetwork(t).AddNode("a")
		id := func(t *rapid.T) view.ServicePortID {
			return serviceID(fmt.Sprint("s", rapid.IntRange(0, 49).Draw(t, "service")),
				rapid.SampledFrom(protocols).Draw(t, "protocol"), rapid.SampledFrom(families).Draw(t, "family"))
		}
		rules := func(h *inHost) string {
			return h.rules(t, model.IPv4, variant) + h.rules(t, model.IPv6, variant)
		}
		rapid.Check(t, func(rt *rapid.T) {
			state := view.State{Ports: map[view.ServicePortID]*view.ServicePort{}}
			state.Node = drawNode(rt)
			for range rapid.IntRange(0, 60).Draw(rt, "at first") {
				p := drawPort(rt, id(rt))
				state.Ports[p.ID] = p
			}
			h := newInHost(t, node.Host, Options{Variant: variant})
			replace := func() {
				setRouteLocalnet(t, node, "0") // or else a guard would stay
				require.NoError(rt, h.Replace(t.Context(), state))
			}
			replace()
			for range rapid.IntRange(1, 3).Draw(rt, "steps") {
				changes := map[view.ServicePortID]view.Change{}
				for range rapid.IntRange(1, 20).Draw(rt, "changes") {
					id := id(rt)
					if state.Ports[id] != nil && rapid.Bool().Draw(rt, "remove") {
						changes[id] = view.Change{Before: state.Ports[id]}
					} else {
						changes[id] = view.Change{Before: state.Ports[id], After: drawPort(rt, id)}
					}
				}
				var all []view.Change
				for id, c := range changes {
					all = append(all, c)
					delete(state.Ports, id)
					if c.After != nil {
						state.Ports[id] = c.After
					}
				}
				if rapid.IntRange(0, 3).Draw(rt, "how") == 0 {
					state.Node = drawNode(rt)
					replace()
				} else {
					require.NoError(rt, h.Apply(t.Context(), all))
				}
			}

			h.restoredBytes()
			again := newInHost(t, node.Host, Options{Variant: variant})
			require.NoError(rt, again.Replace(t.Context(), state))
			require.Empty(rt, string(slices.Concat(again.restored...)))
			applied := rules(h)
			require.NoError(rt, h.Cleanup(t.Context()))
			require.NoError(rt, h.Replace(t.Context(), state))
			require.Equal(rt, rules(h), applied)
			require.NoError(rt, h.Cleanup(t.Context()))
			require.NotContains(rt, rules(h), ChainPrefix)
		})
	})
}
