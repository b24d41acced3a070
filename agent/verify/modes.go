package verify

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/slicecast/slicecast/agent/trace"
	"github.com/slicecast/slicecast/agent/view"
)

// deviation is something that a mode does on purpose, although the view decides otherwise. Such
// packets are no difference, but are counted, and the deviation is a fact.
type deviation string

// These are the deviations. Those of kube-proxy's mode ipvs follow its pkg/proxy/ipvs/proxier.go.
// kube-proxy has one virtual service for an address and port, whose backends are the same for all
// sources. So has Slicecast with affinity. See docs/ipvs.md for the others of Slicecast.
const (
	asDecided        deviation = ""
	refusesOtherwise deviation = "kube-proxy's mode iptables refuses in its own way, or not at all, what leads to no backend"
	localForAll      deviation = "kube-proxy's mode ipvs binds connections of pods and of the node, too, to externalTrafficPolicy " +
		"Local, and does not masquerade them"
	anyForLocal deviation = "kube-proxy's mode ipvs leads to the backends of all nodes if a policy is Local and the node has no backend"
	ownAddress  deviation = "kube-proxy's mode ipvs lets a load balancer's address be the source of connections to this address only, " +
		"not to the Service's others"
	rejectsFirst deviation = "kube-proxy's mode ipvs rejects what the node sends to a load balancer's address without backends, even if " +
		"loadBalancerSourceRanges do not contain the node"
	masquerades deviation = "kube-proxy's mode ipvs masquerades the node's connections to cluster IPs even if pods are not told " +
		"from other sources"
	affinityForAll deviation = "with IPVS, a Service with affinity leads pods and the node to the same backends as all others"
	ownSource      deviation = "with IPVS, the node's connections to an address of a Service are masqueraded, because they come from " +
		"this address"
	onNode deviation = "a program on the node serves a Service itself: the node has the Service's address, and rules of others " +
		"keep conntrack from tracking what comes to it, as those of NodeLocal DNSCache do"
	noLoopback      deviation = "with IPVS, there are no NodePorts on loopback addresses"
	noLoopbackRules deviation = "kube-proxy's mode nftables has no rules that lead to NodePorts on loopback addresses; if a process " +
		"serves them (feature gate KubeProxyNFTablesLocalhostNodePorts), that is not compared"
	rejectsLoopback deviation = "kube-proxy rejects what comes to NodePorts on loopback addresses (feature gate " +
		"KubeProxyNFTablesLocalhostNodePorts)"
)

// deviates counts a packet that a mode treats in another way than the view.
func (c *comparison) deviates(d deviation) {
	c.Tolerated++
	c.deviations[d]++
}

// addDeviations adds the deviations to the facts.
func (c *comparison) addDeviations() {
	for _, d := range slices.Sorted(maps.Keys(c.deviations)) {
		c.Facts = append(c.Facts, fmt.Sprintf("%s (%s)", d, count(c.deviations[d], "packet")))
	}
}

// addMasquerades adds to the facts what rules of others masquerade.
func (c *comparison) addMasquerades() {
	for _, m := range slices.SortedFunc(maps.Keys(c.masquerades), func(a, b masquerading) int {
		return cmp.Or(strings.Compare(a.source, b.source), strings.Compare(a.rule, b.rule))
	}) {
		c.Facts = append(c.Facts, fmt.Sprintf("connections from %s keep their source as far as the proxy is concerned, but another "+
			"program masquerades them (%s to Services); see %s", m.source, count(c.masquerades[m], "packet"), m.rule))
	}
}

// loopbackNodePorts returns the deviation if the mode has no rules for NodePorts on loopback
// addresses, whatever the settings are.
func (c *comparison) loopbackNodePorts() deviation {
	switch {
	case c.rules.KubeProxyIPVS || c.rules.SlicecastIPVS:
		return noLoopback
	case c.rules.KubeProxyNFTables:
		return noLoopbackRules
	}
	return asDecided
}

// wanted returns what should happen to a packet, and the deviation if that is not what the view has
// decided.
func (c *comparison) wanted(q question) (view.Route, deviation) {
	route := c.route(q.frontend, q.source)
	isFiltered := len(q.frontend.Sources) > 0 && !contains(q.frontend.Sources, q.source.Address)
	if isFiltered {
		route = view.Route{To: view.Drop}
	}
	if c.rules.SlicecastIPVS {
		return c.ofSlicecastIPVS(q, route)
	}
	if !c.rules.KubeProxyIPVS || isFiltered && q.source.Over != "" {
		return route, asDecided
	}
	of, d := c.ofIPVS(q, route)
	switch {
	case isFiltered && of.To == view.Reject:
		return of, rejectsFirst
	case isFiltered:
		return route, asDecided
	}
	return of, d
}

// ofSlicecastIPVS returns what Slicecast does with IPVS instead of a route of the view.
func (c *comparison) ofSlicecastIPVS(q question, route view.Route) (out view.Route, d deviation) {
	out = route
	if !route.To.Leads() {
		return out, asDecided
	}
	if c.hasOwnSource(q, route) {
		out.Masquerade, d = true, ownSource
	}
	if q.port.Affinity == 0 {
		return out, d
	}
	for _, r := range []view.Route{q.frontend.Others, q.frontend.Node, q.frontend.Pods} {
		if r.To.Leads() {
			if r.To != out.To {
				out.To, d = r.To, affinityForAll
			}
			break
		}
	}
	return out, d
}

// hasOwnSource reports whether, with IPVS, a packet from the node is masqueraded only because its
// source is an address of a Service. It is one only if the packet goes to this address.
func (c *comparison) hasOwnSource(q question, route view.Route) bool {
	return q.source.Over == "" && !route.Masquerade && c.isServices(q.source.Address)
}

// staysOnNode reports whether a packet with such a source is led to the node itself. Then its
// source may remain, because the reply does not leave the node either.
func (c *comparison) staysOnNode(q question, backend netip.Addr) bool {
	return c.rules.SlicecastIPVS && c.hasOwnSource(q, c.route(q.frontend, q.source)) && slices.Contains(c.Addresses, backend)
}

// ofIPVS returns what kube-proxy's mode ipvs does instead of a route of the view.
func (c *comparison) ofIPVS(q question, route view.Route) (view.Route, deviation) {
	isClusterIP, pods := q.frontend.Kind == view.ClusterIP, c.State.Node.Pods
	// The route of sources that are neither pods nor the node says what the policy is.
	policy := q.frontend.Others.To
	out := view.Route{To: policy}
	if policy == view.Drop { // the policy is Local, and the node has no backend
		if out.To = view.Cluster; q.port.Cluster.Len() == 0 {
			out.To = view.Reject
		}
	}
	switch {
	case !out.To.Leads():
	case !isClusterIP:
		out.Masquerade = policy == view.Cluster
	case c.masqueradesAll(q.frontend):
		out.Masquerade = true
	case pods.Of(c.family):
		out.Masquerade = !pods.Recognizes(q.source.Address, q.source.Over)
	default: // kube-proxy masquerades what comes from addresses of Services
		out.Masquerade = q.source.Over == ""
	}
	switch {
	case out == route:
		return route, asDecided
	case policy == view.Drop:
		return out, anyForLocal
	case isClusterIP:
		return out, masquerades
	}
	return out, localForAll
}

// servedOnNode reports whether a program on the node serves the frontend instead of the backends,
// with rules that keep conntrack from tracking packets. Whoever may write such rules, and give the
// node the address, does so on purpose.
func (c *comparison) servedOnNode(q question, out []trace.Outcome) bool {
	return slices.Contains(c.Addresses, q.to.Addr()) && q.frontend.Kind != view.NodePort &&
		!slices.ContainsFunc(out, func(o trace.Outcome) bool {
			return o.Verdict != trace.Pass || o.Backend.IsValid() || o.UntrackedBy == nil || !o.UntrackedBy.Foreign
		})
}

// onlyOwnAddress reports whether kube-proxy's mode ipvs drops a packet because it comes from
// another load balancer's address of the Service. The view has such addresses among the sources,
// because a node may use them. With IPVS it uses the address that the connection goes to.
func (c *comparison) onlyOwnAddress(q question, out []trace.Outcome) bool {
	if !c.rules.KubeProxyIPVS || len(q.frontend.Sources) == 0 || q.source.Address == q.to.Addr() {
		return false
	}
	isAnother := func(f view.Frontend) bool { return f.Kind == view.LoadBalancer && f.Address == q.source.Address }
	passes := func(o trace.Outcome) bool { return o.Verdict != trace.Drop }
	return slices.ContainsFunc(q.port.Frontends, isAnother) && !slices.ContainsFunc(out, passes)
}

// masqueradesAll reports whether connections of pods to a cluster IP are masqueraded. If this one
// leads nowhere, others say it.
func (c *comparison) masqueradesAll(f view.Frontend) bool {
	if f.Pods.To.Leads() {
		return f.Pods.Masquerade
	}
	for _, p := range c.State.Ports {
		for _, f := range p.Frontends {
			if f.Kind == view.ClusterIP && f.Pods.To.Leads() {
				return f.Pods.Masquerade
			}
		}
	}
	return false
}

// tolerates reports whether a mode of kube-proxy does this to packets on purpose, although the view
// decides otherwise. wanted is the verdict that the view wants. No packet is led to a backend by
// that.
func (c *comparison) tolerates(q question, wanted trace.Verdict, out []trace.Outcome) bool {
	var d deviation
	does := func(trace.Verdict) bool { return false }
	switch {
	case c.rules.KubeProxyIPTables:
		d, does = refusesOtherwise, func(found trace.Verdict) bool { return tolerated(q, wanted, found) }
	case c.rules.KubeProxyNFTables && q.to.Addr().IsLoopback():
		d, does = rejectsLoopback, func(found trace.Verdict) bool { return found == trace.Reject }
	}
	if slices.ContainsFunc(out, func(o trace.Outcome) bool { return o.Backend.IsValid() || !does(o.Verdict) }) {
		return false
	}
	c.deviates(d)
	return true
}

// tolerated reports whether a verdict of kube-proxy's mode iptables may differ from the wanted one.
// For a port without endpoints, that mode rejects before it looks at source ranges, on all of the
// node's addresses. If a policy leaves none, it drops there. It refuses neither what the node sends
// to other addresses than cluster IPs.
func tolerated(q question, wanted, found trace.Verdict) bool {
	none := q.port.Cluster.Len() == 0
	noneLocal := q.frontend.Others.To == view.Drop || q.frontend.Others.To == view.Reject
	external := q.frontend.Kind != view.ClusterIP
	switch found {
	case trace.Reject:
		return none
	case trace.Drop:
		return external && noneLocal && (wanted == trace.Reject || q.frontend.Kind == view.NodePort && wanted == trace.Pass)
	}
	return external && q.source.Over == "" && none
}
