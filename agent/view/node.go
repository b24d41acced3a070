package view

import (
	"net/netip"
	"slices"

	"github.com/slicecast/slicecast/internal/model"
)

// zoneLabel is the label of a Node that names its zone.
const zoneLabel = "topology.kubernetes.io/zone"

// DetectLocalMode tells how connections of pods are told from others; the names are kube-proxy's.
type DetectLocalMode string

// The modes. The zero value is ByClusterCIDR, and that without ClusterCIDRs means that pods are not told.
const (
	ByClusterCIDR         DetectLocalMode = "ClusterCIDR"         // pods have addresses in Options.ClusterCIDRs
	ByNodeCIDR            DetectLocalMode = "NodeCIDR"            // the node's pods have addresses in the Node's podCIDRs
	ByBridgeInterface     DetectLocalMode = "BridgeInterface"     // pods' traffic comes in by Options.BridgeInterface
	ByInterfaceNamePrefix DetectLocalMode = "InterfaceNamePrefix" // or by interfaces whose names begin with Options.InterfaceNamePrefix
)

// Options are the node's settings that decide how Services look from it.
type Options struct {
	// NodeName tells which endpoints are local, and which node hints are for this node. Empty: none are.
	NodeName string
	// DetectLocal selects which of the three below counts.
	DetectLocal         DetectLocalMode
	ClusterCIDRs        []netip.Prefix
	BridgeInterface     string
	InterfaceNamePrefix string
	// MasqueradeAll masquerades all connections to cluster IPs, those of pods too.
	MasqueradeAll bool
	// RefuseExternalIPs leaves out the external IPs of all Services, as kube-proxy does without AllowServiceExternalIPs.
	RefuseExternalIPs bool
	// NodePortAddresses are where NodePorts are; a family without any is not restricted. NodePortPrimary puts them on the
	// Node's first InternalIP of each family, too, and restricts both families: in one of which the Node has no InternalIP, and
	// NodePortAddresses has nothing, there are none. Neither of both is the same as NodePortPrimary, unless LocalhostNodePorts is given.
	//
	// kube-proxy has NodePorts on all addresses of a family in which the Node has none. That is not what "primary" promises, and
	// opens to everybody what is to be open on one address, also as long as the Node has not been given its addresses.
	NodePortAddresses []netip.Prefix
	NodePortPrimary   bool
	// LocalhostNodePorts asks for NodePorts as kube-proxy has them in iptables mode: on all addresses unless restricted,
	// and if true on IPv4 loopback addresses too. nil: not given.
	LocalhostNodePorts *bool
	// Schedulers are those that the programmer has and that a Service may choose from by its annotation slicecast.io/ipvs-scheduler.
	// Any other name is a Problem, and the Service is served as without it. Empty: the annotation means nothing.
	Schedulers []string
}

// node is what the view needs to know of the Node.
type node struct {
	zone string
	// ips are the Node's InternalIPs: whoever may come from one of them may come from the node.
	ips []netip.Addr
	// programmed is what programmers need to know.
	programmed Node
}

func (n *node) equal(o *node) bool {
	return n.zone == o.zone && slices.Equal(n.ips, o.ips) && n.programmed.equal(o.programmed)
}

func (n Node) equal(o Node) bool {
	return n.Pods.Interface == o.Pods.Interface && n.Pods.InterfacePrefix == o.Pods.InterfacePrefix &&
		slices.Equal(n.Pods.Prefixes, o.Pods.Prefixes) && slices.Equal(n.NodePorts, o.NodePorts) &&
		n.LocalhostNodePorts == o.LocalhostNodePorts && slices.Equal(n.ServiceCIDRs, o.ServiceCIDRs) &&
		n.Primary == o.Primary
}

// node returns what the options and the Node come to.
func (o *Options) node(n *model.Node) node {
	out := node{zone: n.Labels[zoneLabel], ips: n.InternalIPs}
	out.programmed.ServiceCIDRs = disjoint(n.ServiceCIDRs)
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
	for _, all := range []netip.Prefix{netip.PrefixFrom(netip.IPv4Unspecified(), 0), netip.PrefixFrom(netip.IPv6Unspecified(), 0)} {
		family := model.FamilyOf(all.Addr())
		of := ofFamily(o.NodePortAddresses, family)
		if primary {
			if i := slices.IndexFunc(out.ips, func(a netip.Addr) bool { return model.FamilyOf(a) == family }); i >= 0 {
				of = append(of, netip.PrefixFrom(out.ips[i], out.ips[i].BitLen()))
			}
		} else if len(of) == 0 {
			of = []netip.Prefix{all}
		}
		of = disjoint(of)
		out.programmed.NodePorts = append(out.programmed.NodePorts, of...)
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

// canonical gives prefixes in their order, each once and without the host's bits.
func canonical(prefixes []netip.Prefix) []netip.Prefix {
	var out []netip.Prefix
	for _, p := range prefixes {
		out = append(out, p.Masked())
	}
	slices.SortFunc(out, model.ComparePrefix)
	return slices.Compact(out)
}

// disjoint gives prefixes as canonical does, without those within another.
func disjoint(prefixes []netip.Prefix) []netip.Prefix {
	var out []netip.Prefix
	for _, p := range canonical(prefixes) {
		// A prefix comes before those within it.
		if len(out) == 0 || !out[len(out)-1].Overlaps(p) {
			out = append(out, p)
		}
	}
	return out
}

// ofFamily gives the prefixes of a family, as canonical does.
func ofFamily(prefixes []netip.Prefix, family model.Family) []netip.Prefix {
	var out []netip.Prefix
	for _, p := range prefixes {
		if model.FamilyOf(p.Addr()) == family {
			out = append(out, p)
		}
	}
	return canonical(out)
}

func isZero(p netip.Prefix) bool { return p.Bits() == 0 }
