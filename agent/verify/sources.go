package verify

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// The names of interfaces that packets arrive over, where only the kind of interface matters.
var (
	outsideInterfaces = []string{"outside", "elsewhere"}
	anyPodInterface   = "pod"
)

// Source is where packets come from.
type Source struct {
	// Name describes the source, such as "a pod".
	Name    string
	Address netip.Addr
	// Over is the interface through which packets arrive. It is empty if the node sends them.
	Over string
}

// String returns the name and the address.
func (s Source) String() string { return fmt.Sprintf("%s (%v)", s.Name, s.Address) }

// Sources returns the sources from which Compare sends packets to a frontend.
func Sources(o Options, family model.Family, f view.Frontend) []Source {
	c := newComparison(o, nil, family)
	c.chooseSources()
	return c.sources(f)
}

// route returns which of a frontend's routes is that of a source.
func (c *comparison) route(f view.Frontend, s Source) view.Route {
	switch {
	case c.State.Node.Pods.Recognizes(s.Address, s.Over):
		return f.Pods
	case s.Over == "":
		return f.Node
	}
	return f.Others
}

func contains(prefixes []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(a) })
}

// chooseSources chooses addresses for a pod, the node and a client outside. None of them is a
// backend, because a backend's packets to itself are another matter.
func (c *comparison) chooseSources() {
	unused := func(a netip.Addr) bool {
		_, isBackend := c.backends[a]
		return a.IsValid() && !isBackend && !slices.Contains(c.Addresses, a)
	}
	for _, p := range c.podRanges() {
		a := last(p)
		for range 1 << 10 {
			if !p.Contains(a) {
				break
			}
			if unused(a) {
				c.pods = append(c.pods, a)
				break
			}
			a = a.Prev()
		}
	}
	served := map[netip.Addr]bool{}
	for _, p := range c.State.Ports {
		for _, f := range p.Frontends {
			served[f.Address] = true
		}
	}
	for _, a := range c.Addresses {
		if model.FamilyOf(a) != c.family || a.IsLoopback() || a.IsLinkLocalUnicast() {
			continue
		}
		// The node is no client at an address of a Service, which it may have for a program that serves
		// the Service itself.
		if !c.node.IsValid() || !served[a] {
			c.node = a
		}
		if !served[a] {
			break
		}
	}
	// reserved for documentation
	prefixes := []netip.Prefix{netip.MustParsePrefix("203.0.113.0/24"), netip.MustParsePrefix("192.0.2.0/24")}
	if c.family == model.IPv6 {
		prefixes = []netip.Prefix{netip.MustParsePrefix("2001:db8:ffff::/64"), netip.MustParsePrefix("3fff::/64")}
	}
	for _, p := range prefixes {
		if a := last(p).Prev(); unused(a) && !contains(c.State.Node.Pods.Prefixes, a) {
			c.outside = a
			break
		}
	}
}

// podRanges returns the ranges of this node's pods. The Node's podCIDRs come first, because rules
// of others may treat pods of other nodes in another way. A range by which pods are recognized is
// added if no podCIDR is in it.
func (c *comparison) podRanges() (ranges []netip.Prefix) {
	of := func(p netip.Prefix) bool { return p.IsValid() && model.FamilyOf(p.Addr()) == c.family }
	for _, p := range c.State.Node.PodCIDRs {
		if of(p) {
			ranges = append(ranges, p)
		}
	}
	for _, p := range c.State.Node.Pods.Prefixes {
		inside := func(o netip.Prefix) bool { return p.Contains(o.Addr()) && o.Bits() >= p.Bits() }
		if of(p) && !slices.ContainsFunc(c.State.Node.PodCIDRs, inside) {
			ranges = append(ranges, p)
		}
	}
	return ranges
}

// last returns the last address of a prefix but one, which is no broadcast address.
func last(p netip.Prefix) netip.Addr {
	b := p.Masked().Addr().AsSlice()
	for i := p.Bits(); i < 8*len(b); i++ {
		b[i/8] |= 0x80 >> (i % 8)
	}
	a, _ := netip.AddrFromSlice(b)
	if p.IsSingleIP() {
		return a
	}
	return a.Prev()
}

// sources returns where packets to a frontend come from.
func (c *comparison) sources(f view.Frontend) (all []Source) {
	over := outsideInterfaces[0]
	if p := c.State.Node.Pods.InterfacePrefix; p != "" && strings.HasPrefix(over, p) {
		over = outsideInterfaces[1]
	}
	add := func(name string, a netip.Addr, over string) {
		// Kernels drop what arrives from one of their own addresses, or from one that no host has.
		isOwn := a.IsLoopback() || slices.Contains(c.Addresses, a) || c.isServices(a)
		if a.IsValid() && (over == "" || !isOwn && !a.IsMulticast() && !a.IsUnspecified()) {
			all = append(all, Source{name, a, over})
		}
	}
	podInterface := anyPodInterface
	switch pods := c.State.Node.Pods; {
	case pods.Interface != "":
		podInterface = pods.Interface
	case pods.InterfacePrefix != "":
		podInterface = pods.InterfacePrefix + "0"
	}
	if len(c.pods) == 0 && podInterface != anyPodInterface {
		add("a pod", c.outside, podInterface)
	}
	for _, a := range c.pods {
		add("a pod", a, podInterface)
	}
	if c.isServices(f.Address) {
		add("the node", f.Address, "")
	} else {
		add("the node", c.node, "")
	}
	add("outside", c.outside, over)
	for _, p := range f.Sources {
		if model.FamilyOf(p.Addr()) != c.family || p.Bits() == 0 {
			continue
		}
		first := p.Masked().Addr()
		add("outside, in "+p.String(), first, over)
		if before := first.Prev(); !contains(f.Sources, before) {
			add("outside, just before "+p.String(), before, over)
		}
		end := first
		if !p.IsSingleIP() {
			end = last(p).Next()
			add("outside, in "+p.String(), end, over)
		}
		if after := end.Next(); !contains(f.Sources, after) {
			add("outside, just after "+p.String(), after, over)
		}
	}
	return all
}
