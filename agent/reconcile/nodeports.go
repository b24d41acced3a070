package reconcile

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// noteNodePorts logs, once for each IP family, that Services have NodePorts for which the node has
// no address. With NodePorts on the primary addresses, this happens if the Node has no InternalIP
// of the family. It logs again if the node gains such an address and loses it. Nothing is logged
// about a family in which no Service asks for a NodePort, as in a single-stack cluster.
func (r *Reconciler) noteNodePorts(changes []view.Change, node bool) {
	for _, family := range []model.Family{model.IPv4, model.IPv6} {
		isFamily := func(p netip.Prefix) bool { return model.FamilyOf(p.Addr()) == family }
		if slices.ContainsFunc(r.View.State().Node.NodePorts, isFamily) {
			delete(r.nowhere, family)
			continue
		}
		isNodePort := func(f view.Frontend) bool { return f.Kind == view.NodePort }
		wants := func(p *view.ServicePort) bool {
			return p != nil && p.ID.Family == family && slices.ContainsFunc(p.Frontends, isNodePort)
		}
		if r.nowhere[family] || !slices.ContainsFunc(changes, func(c view.Change) bool { return wants(c.After) }) &&
			!(node && slices.ContainsFunc(slices.Collect(maps.Values(r.View.State().Ports)), wants)) {
			continue
		}
		r.nowhere[family] = true
		r.Logger.Warn("NodePorts of an IP family are not served: the Node has no InternalIP of the family, and "+
			"--nodeport-addresses has no CIDR of it", "family", family.String())
	}
}
