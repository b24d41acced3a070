package view

import (
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"strings"

	"github.com/slicecast/slicecast/internal/model"
)

// UnrecognizedPods says for each IP family in which DetectLocal does not recognize pods of the Node
// by their addresses which pods these are, and what to do. local are the addresses of pods on the
// Node, in any order and of any family; it is read only if the Node's podCIDRs do not answer.
//
//   - The Node's podCIDRs must be in the range of pods. They do not count if pods are in the range,
//     but not in the podCIDRs. The network then has address management of its own.
//   - If the Node has no podCIDRs, no pod may be outside of the range. Pods with an address of the
//     Node are in its network and do not count.
//
// Modes that recognize pods by interfaces have nothing to check. Nor has ByClusterCIDR without any
// ClusterCIDRs, which recognizes no pods on purpose.
func (o *Options) UnrecognizedPods(n *model.Node, local iter.Seq[netip.Addr]) map[model.Family]string {
	if n == nil {
		return nil
	}
	ranges, name := o.ClusterCIDRs, "clusterCIDR"
	switch o.DetectLocal {
	case ByNodeCIDR:
		ranges, name = n.PodCIDRs, "the Node's podCIDRs"
	case ByBridgeInterface, ByInterfaceNamePrefix:
		return nil
	default:
		if len(ranges) == 0 {
			return nil
		}
	}
	out := make(map[model.Family]string)
	for _, family := range []model.Family{model.IPv4, model.IPv6} {
		recognized := ofFamily(ranges, family)
		which := unrecognized(n, family, recognized, local)
		if which == "" {
			continue
		}
		out[family] = fmt.Sprintf("%v pods at %s are not in %s (%s), so their traffic to Services is treated as that of "+
			"clients outside of the cluster: set clusterCIDR to the ranges of all pods, or choose another detectLocalMode",
			family, which, name, list(recognized))
	}
	return out
}

// unrecognized names pods of an IP family that are not in the recognized prefixes. It returns "" if
// none are known.
func unrecognized(n *model.Node, family model.Family, recognized []netip.Prefix, local iter.Seq[netip.Addr]) string {
	podCIDRs := ofFamily(n.PodCIDRs, family)
	var outside []netip.Prefix
	for _, p := range podCIDRs {
		if !covered(p, recognized) {
			outside = append(outside, p)
		}
	}
	if len(podCIDRs) > 0 && len(outside) == 0 {
		return ""
	}
	// Without an address of the Node, pods cannot be told from endpoints in the node's network.
	if hasIP(n.Addresses, family) {
		used, elsewhere := false, false
		for a := range local {
			if model.FamilyOf(a) != family || slices.Contains(n.Addresses, a) {
				continue
			}
			if !contains(recognized, a) {
				return a.String()
			}
			used, elsewhere = used || contains(podCIDRs, a), true
		}
		if elsewhere && !used {
			return ""
		}
	}
	if len(outside) == 0 {
		return ""
	}
	return list(outside)
}

func hasIP(ips []netip.Addr, family model.Family) bool {
	return slices.ContainsFunc(ips, func(a netip.Addr) bool { return model.FamilyOf(a) == family })
}

func contains(prefixes []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(a) })
}

// covered reports whether prefixes, together, contain all addresses of p.
func covered(p netip.Prefix, prefixes []netip.Prefix) bool {
	overlap := false
	for _, q := range prefixes {
		if q.Bits() <= p.Bits() && q.Contains(p.Addr()) {
			return true
		}
		overlap = overlap || q.Overlaps(p)
	}
	if !overlap {
		return false
	}
	// Some prefix is a part of p, so p has halves.
	low := netip.PrefixFrom(p.Addr(), p.Bits()+1)
	b := p.Addr().AsSlice()
	b[p.Bits()/8] |= 0x80 >> (p.Bits() % 8)
	high, _ := netip.AddrFromSlice(b) // has the length of an address
	return covered(low, prefixes) && covered(netip.PrefixFrom(high, p.Bits()+1), prefixes)
}

// list returns the prefixes as text.
func list(prefixes []netip.Prefix) string {
	if len(prefixes) == 0 {
		return "none"
	}
	var out []string
	for _, p := range prefixes {
		out = append(out, p.String())
	}
	return strings.Join(out, ", ")
}
