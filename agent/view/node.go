package view

import (
	"net/netip"
	"slices"

	"github.com/slicecast/slicecast/internal/model"
)

// zoneLabel is the label of a Node that names its zone.
const zoneLabel = "topology.kubernetes.io/zone"

// DetectLocalMode is how connections from pods are distinguished from others. The names are
// kube-proxy's.
type DetectLocalMode string

// These are the modes. The zero value means ByClusterCIDR. Without any ClusterCIDRs, that mode
// recognizes no pods.
const (
	// ByClusterCIDR recognizes pods by an address in Options.ClusterCIDRs.
	ByClusterCIDR DetectLocalMode = "ClusterCIDR"
	// ByNodeCIDR recognizes this node's pods by an address in the Node's podCIDRs.
	ByNodeCIDR DetectLocalMode = "NodeCIDR"
	// ByBridgeInterface recognizes pods by traffic that arrives through Options.BridgeInterface.
	ByBridgeInterface DetectLocalMode = "BridgeInterface"
	// ByInterfaceNamePrefix recognizes pods by traffic that arrives through an interface whose name
	// begins with Options.InterfaceNamePrefix.
	ByInterfaceNamePrefix DetectLocalMode = "InterfaceNamePrefix"
)

// Options are the settings of the node that decide what it does for Services.
type Options struct {
	// NodeName decides which endpoints are local, and which node hints are for this node. If it is
	// empty, none are.
	NodeName string
	// DetectLocal selects which of the next three fields applies.
	DetectLocal         DetectLocalMode
	ClusterCIDRs        []netip.Prefix
	BridgeInterface     string
	InterfaceNamePrefix string
	// MasqueradeAll masquerades all connections to cluster IPs, including those from pods.
	MasqueradeAll bool
	// RefuseExternalIPs ignores the external IPs of all Services, as kube-proxy does without the
	// feature gate AllowServiceExternalIPs.
	RefuseExternalIPs bool
	// NodePortAddresses are the prefixes of the addresses on which NodePorts are open. A family
	// without any prefix is not restricted. NodePortPrimary adds the Node's first address of each
	// family, and restricts both families: a family in which the Node has no address and
	// NodePortAddresses has no prefix gets no NodePorts. If neither is set, NodePortPrimary is
	// implied, unless LocalhostNodePorts is set.
	//
	// In a family in which the Node has no InternalIP, kube-proxy opens NodePorts on all addresses.
	// "primary" does not promise that. It would open to everybody what is meant for one address, and
	// it would do so until the Node has been assigned its addresses.
	NodePortAddresses []netip.Prefix
	NodePortPrimary   bool
	// LocalhostNodePorts asks for NodePorts as kube-proxy has them in iptables mode: on all addresses
	// unless restricted and, if it is true, also on IPv4 loopback addresses. nil means that the
	// setting was not given.
	LocalhostNodePorts *bool
	// Schedulers are the programmer's schedulers that a Service may choose from with its annotation
	// slicecast.io/ipvs-scheduler. For any other name, the Service has a Problem and is served as if
	// it had no annotation. Empty means that the annotation is ignored.
	Schedulers []string
}

// node is what the view needs to know about the Node.
type node struct {
	zone string
	// ips are the Node's InternalIPs and ExternalIPs. A client that may use one of them as its source
	// address may be the node itself.
	ips []netip.Addr
	// programmed is what programmers need to know.
	programmed Node
}

func (n *node) equal(o *node) bool {
	return n.zone == o.zone && slices.Equal(n.ips, o.ips) && n.programmed.equal(o.programmed)
}

// equal reports whether the same is programmed for both, which follow from the same Options.
func (n Node) equal(o Node) bool {
	return slices.Equal(n.Pods.Prefixes, o.Pods.Prefixes) && slices.Equal(n.NodePorts, o.NodePorts) &&
		n.LocalhostNodePorts == o.LocalhostNodePorts && slices.Equal(n.ServiceCIDRs, o.ServiceCIDRs) &&
		n.Primary == o.Primary
}

// node returns what follows from the options and the Node.
func (o *Options) node(n *model.Node) node {
	out := node{zone: n.Labels[zoneLabel], ips: n.Addresses}
	out.programmed.ServiceCIDRs, out.programmed.PodCIDRs = disjoint(n.ServiceCIDRs), canonical(n.PodCIDRs)
	pods := &out.programmed.Pods
	switch o.DetectLocal {
	case ByNodeCIDR:
		pods.Prefixes = canonical(n.PodCIDRs)
	case ByBridgeInterface:
		pods.Interface = o.BridgeInterface
	case ByInterfaceNamePrefix:
		pods.InterfacePrefix = o.InterfaceNamePrefix
	default:
		pods.Prefixes = canonical(o.ClusterCIDRs)
	}

	primary := o.NodePortPrimary || len(o.NodePortAddresses) == 0 && o.LocalhostNodePorts == nil
	for _, unspecified := range []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()} {
		family := model.FamilyOf(unspecified)
		of := ofFamily(o.NodePortAddresses, family)
		if primary {
			if i := slices.IndexFunc(out.ips, func(a netip.Addr) bool { return model.FamilyOf(a) == family }); i >= 0 {
				of = append(of, netip.PrefixFrom(out.ips[i], out.ips[i].BitLen()))
			}
		} else if len(of) == 0 {
			of = []netip.Prefix{netip.PrefixFrom(unspecified, 0)}
		}
		out.programmed.NodePorts = append(out.programmed.NodePorts, disjoint(of)...)
	}
	loopback := netip.PrefixFrom(netip.AddrFrom4([4]byte{127}), 8)
	out.programmed.LocalhostNodePorts = o.LocalhostNodePorts != nil && *o.LocalhostNodePorts &&
		slices.ContainsFunc(out.programmed.NodePorts, loopback.Overlaps)
	out.programmed.Primary = model.IPv4
	if len(out.ips) > 0 {
		out.programmed.Primary = model.FamilyOf(out.ips[0])
	}
	return out
}

// canonical returns the prefixes sorted, each once, with their host bits cleared.
func canonical(prefixes []netip.Prefix) []netip.Prefix {
	var out []netip.Prefix
	for _, p := range prefixes {
		out = append(out, p.Masked())
	}
	slices.SortFunc(out, netip.Prefix.Compare)
	return slices.Compact(out)
}

// disjoint returns the prefixes as canonical does, but without those inside another prefix.
func disjoint(prefixes []netip.Prefix) []netip.Prefix {
	var out []netip.Prefix
	for _, p := range canonical(prefixes) {
		// A prefix sorts before the prefixes inside it.
		if len(out) == 0 || !out[len(out)-1].Overlaps(p) {
			out = append(out, p)
		}
	}
	return out
}

// ofFamily returns the prefixes of one family, as canonical does.
func ofFamily(prefixes []netip.Prefix, family model.Family) []netip.Prefix {
	var out []netip.Prefix
	for _, p := range prefixes {
		if model.FamilyOf(p.Addr()) == family {
			out = append(out, p)
		}
	}
	return canonical(out)
}
