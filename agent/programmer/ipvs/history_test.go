// TestHistories proves that after any random changes a real kernel holds the same as after a
// Replace by another process, apart from backends that drain.
package ipvs

import (
	"maps"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

// heldState is everything of this package that the kernel holds.
type heldState struct {
	Elements  map[model.Family]elements
	Services  map[serviceKey]map[netip.AddrPort]uint32
	Addresses map[netip.Addr]bool
}

func (h *inHost) read(t require.TestingT) (s heldState) {
	s = heldState{
		Elements: map[model.Family]elements{}, Services: map[serviceKey]map[netip.AddrPort]uint32{}, Addresses: map[netip.Addr]bool{},
	}
	all, err := h.ipvs.GetServices()
	require.NoError(t, err)
	for _, f := range h.families {
		list, different, err := h.readTable(f.layout)
		require.NoError(t, err)
		require.Empty(t, different)
		s.Elements[f.family] = list
		services, err := f.readServices(all)
		require.NoError(t, err)
		for k, service := range services {
			weights := map[netip.AddrPort]uint32{}
			for _, b := range service.backends {
				weights[b.address] = b.weight
			}
			s.Services[k] = weights
		}
		own, _, err := h.device.read(f.family)
		require.NoError(t, err)
		maps.Copy(s.Addresses, own)
	}
	return s
}

// TestHistories asserts that after any changes the kernel holds the same as after a Replace by
// another process, apart from draining backends.
func TestHistories(t *testing.T) {
	n := testenv.NewNetwork(t)
	host := n.AddNode("a")
	h := newInHost(t, host.Host, Options{})
	nodeState := view.Node{
		Pods:      view.PodDetector{Prefixes: []netip.Prefix{netip.MustParsePrefix("10.180.0.0/16")}},
		NodePorts: []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.PrefixFrom(host.IPv6, 128)},
	}
	backends := func(t *rapid.T, family model.Family, label string) view.Backends {
		var list []view.Backend
		for i := range byte(4) {
			if !rapid.Bool().Draw(t, label) {
				continue
			}
			a := netip.AddrFrom4([4]byte{10, 180, 0, 1 + i})
			if family == model.IPv6 {
				a = netip.AddrFrom16([16]byte{0xfd, 0, 15: 1 + i})
			}
			list = append(list, view.Backend{Address: netip.AddrPortFrom(a, 8080), Local: i%2 == 0})
		}
		return view.NewBackends(list...)
	}
	draw := func(t *rapid.T, id view.ServicePortID, number byte) *view.ServicePort {
		p := &view.ServicePort{ID: id, Scheduler: rapid.SampledFrom([]string{"", "", "lc", "mh"}).Draw(t, "scheduler"), Affinity: time.Duration(rapid.SampledFrom([]int{0, 0, 10, 60}).Draw(t, "affinity")) * time.Second}
		p.Cluster, p.Local = backends(t, id.Family, "cluster"), backends(t, id.Family, "local")
		to := func() view.Route {
			targets := []view.Target{view.Reject, view.Drop}
			if p.Cluster.Len() > 0 {
				targets = append(targets, view.Cluster)
			}
			if p.Local.Len() > 0 {
				targets = append(targets, view.Local)
			}
			return view.Route{To: rapid.SampledFrom(targets).Draw(t, "target"), Masquerade: rapid.Bool().Draw(t, "masquerade")}
		}
		for _, kind := range rapid.SliceOfNDistinct(rapid.SampledFrom([]view.FrontendKind{view.ClusterIP, view.LoadBalancer, view.NodePort}), 1, 3, rapid.ID).Draw(t, "kinds") {
			f := view.Frontend{Kind: kind, Port: 80, Pods: to(), Node: to(), Others: to()}
			switch kind {
			case view.ClusterIP:
				f.Address = vip(id.Family, number)
			case view.LoadBalancer:
				// Service ports with other numbers share this address, with other ports on it.
				f.Address, f.Port = ingress(id.Family, 1), 80+uint16(number)
				if rapid.Bool().Draw(t, "limited") {
					f.Sources = []netip.Prefix{netip.PrefixFrom(f.Address, 20+rapid.IntRange(0, 4).Draw(t, "bits")).Masked()}
				}
			case view.NodePort:
				f.Port = 30000 + uint16(number)
			}
			p.Frontends = append(p.Frontends, f)
		}
		return p
	}
	rapid.Check(t, func(rt *rapid.T) {
		state := view.State{Node: nodeState, Ports: map[view.ServicePortID]*view.ServicePort{}}
		require.NoError(rt, h.Replace(t.Context(), state))
		// A place decides on addresses and ports. It can move from one Service port to another.
		type place struct {
			family   model.Family
			protocol model.Protocol
			number   byte
		}
		owner := map[place]view.ServicePortID{}
		for range rapid.IntRange(1, 6).Draw(rt, "steps") {
			changes := map[view.ServicePortID]*view.Change{}
			change := func(id view.ServicePortID, after *view.ServicePort) {
				if changes[id] == nil {
					changes[id] = &view.Change{Before: state.Ports[id]}
				}
				if changes[id].After = after; after == nil {
					delete(state.Ports, id)
				} else {
					state.Ports[id] = after
				}
			}
			for range rapid.IntRange(1, 4).Draw(rt, "changes") {
				at := place{
					rapid.SampledFrom(families).Draw(rt, "family"), rapid.SampledFrom([]model.Protocol{model.TCP, model.UDP}).Draw(rt, "protocol"),
					rapid.ByteRange(1, 3).Draw(rt, "number"),
				}
				if last, ok := owner[at]; ok {
					change(last, nil)
					delete(owner, at)
				}
				id := serviceID(rapid.SampledFrom([]string{"a", "b", "c"}).Draw(rt, "name"), at.protocol, at.family)
				for other, has := range owner {
					if has == id {
						delete(owner, other)
					}
				}
				if rapid.IntRange(0, 3).Draw(rt, "remove") > 0 {
					owner[at] = id
					change(id, draw(rt, id, at.number))
				} else if state.Ports[id] != nil {
					change(id, nil)
				}
			}
			var list []view.Change
			for _, c := range changes {
				if c.Before != nil || c.After != nil {
					list = append(list, *c)
				}
			}
			require.NoError(rt, h.Apply(t.Context(), list))
		}
		h.endDrains(time.Now())
		applied := h.read(rt)
		again := newInHost(t, host.Host, Options{})
		require.NoError(rt, again.Replace(t.Context(), state))
		require.Equal(rt, applied, again.read(rt))
		for _, family := range families {
			require.Equal(rt, len(h.family(family).shared), len(again.family(family).shared))
		}
	})
}
