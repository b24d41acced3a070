package conntrack

import (
	"net/netip"
	"slices"

	"github.com/slicecast/slicecast/agent/view"
)

// judge tells which flows are stale.
type judge struct {
	// frontends have all that flows may be stale of, see key.
	frontends map[netip.AddrPort]frontend
	// nodePorts: some of frontends are NodePorts, and addrs, ascending, are the node's addresses that they are on.
	nodePorts bool
	addrs     []netip.Addr
}

// frontend is what is known of where a flow is to.
type frontend struct {
	// endpoints are those that flows to it may lead to, ascending. Empty: flows may lead anywhere.
	endpoints []netip.AddrPort
	// gone: it was a Service's; flows to it should lead to none of its endpoints.
	gone bool
}

// key is a frontend's address and port; NodePorts have no address.
func key(f view.Frontend) netip.AddrPort { return netip.AddrPortFrom(f.Address, f.Port) }

// judge makes a judge for what has changed. c.mu is held.
func (c *Cleaner) judge(changes ...*work) judge {
	j := judge{frontends: make(map[netip.AddrPort]frontend)}
	for _, w := range changes {
		for k := range w.gone {
			j.frontends[k] = frontend{gone: true}
		}
	}
	for _, w := range changes {
		for id := range w.changed {
			port := c.ports[id]
			if port == nil || port.Serving.Len() == 0 {
				continue
			}
			to := frontend{endpoints: endpoints(port)}
			for _, f := range port.Frontends {
				j.frontends[key(f)] = to
			}
		}
	}
	for k := range j.frontends {
		j.nodePorts = j.nodePorts || !k.Addr().IsValid()
	}
	return j
}

// endpoints gives those that serve, and those that get new flows: an endpoint may be ready by decree (publishNotReadyAddresses)
// and not serve.
func endpoints(port *view.ServicePort) []netip.AddrPort {
	var out []netip.AddrPort
	for _, set := range []view.Backends{port.Serving, port.Cluster, port.Local} {
		for b := range set.All() {
			out = append(out, b.Address)
		}
	}
	slices.SortFunc(out, netip.AddrPort.Compare)
	return slices.Compact(out)
}

// is tells whether a flow is stale.
func (j *judge) is(f flow) bool {
	to, ok := j.frontends[f.original]
	if !ok && j.nodePorts {
		to, ok = j.frontends[netip.AddrPortFrom(netip.Addr{}, f.original.Port())]
		if ok {
			_, ok = slices.BinarySearchFunc(j.addrs, f.original.Addr(), netip.Addr.Compare)
		}
	}
	switch {
	case !ok:
		return false
	case len(to.endpoints) > 0:
		_, fine := slices.BinarySearchFunc(to.endpoints, f.reply, netip.AddrPort.Compare)
		return !fine
	default:
		return to.gone && f.reply != f.original
	}
}
