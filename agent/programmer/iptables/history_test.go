package iptables

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

// drawPort draws a Service port. Addresses and nodePorts are few, so that Service ports meet, and dense enough to make
// the trees fork.
func drawPort(t *rapid.T, id view.ServicePortID) *view.ServicePort {
	p := &view.ServicePort{ID: id}
	masquerade := rapid.SampledFrom([]view.Masquerade{view.MasqueradeNever, view.MasqueradeNonLocal, view.MasqueradeAlways})
	for range rapid.IntRange(1, 3).Draw(t, "frontends") {
		f := view.Frontend{Kind: view.ClusterIP, Port: 80, Masquerade: masquerade.Draw(t, "masquerade")}
		if rapid.IntRange(0, 3).Draw(t, "kind") == 0 {
			f.Kind, f.Port = view.NodePort, uint16(30000+rapid.IntRange(0, 60).Draw(t, "nodePort"))
		} else {
			f.Address = vip(id.Family, byte(rapid.IntRange(0, 79).Draw(t, "vip")))
		}
		if !slices.ContainsFunc(p.Frontends, func(o view.Frontend) bool { return o.Address == f.Address && o.Port == f.Port }) {
			p.Frontends = append(p.Frontends, f)
		}
	}
	count := rapid.SampledFrom([]int{0, 0, 1, 1, 1, 2, 2, 3, 3, maxPlain + 1, 150}).Draw(t, "backends")
	for i := range count {
		address := netip.AddrFrom4([4]byte{10, 180, byte(i % 3), byte(i)})
		if id.Family == model.IPv6 {
			address = netip.AddrFrom16([16]byte{0xfd, 14: byte(i % 3), 15: byte(i)})
		}
		p.Backends = append(p.Backends, view.Backend{Address: netip.AddrPortFrom(address, 8080), Local: i%3 == 0})
	}
	slices.SortFunc(p.Backends, func(a, b view.Backend) int { return a.Address.Compare(b.Address) })
	return p
}

// TestHistories holds that any history of Apply leaves the same rules as a Replace with the final state on a clean node,
// and that a new process finds nothing to write.
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
			state.Node.LocalPods = []netip.Prefix{netip.MustParsePrefix("10.180.0.0/16")}
			for range rapid.IntRange(0, 60).Draw(rt, "at first") {
				p := drawPort(rt, id(rt))
				state.Ports[p.ID] = p
			}
			h := newInHost(t, node.Host, Options{Variant: variant})
			require.NoError(rt, h.Replace(t.Context(), state))
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
				require.NoError(rt, h.Apply(t.Context(), all))
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
			require.NotContains(rt, rules(h), prefix)
		})
	})
}
