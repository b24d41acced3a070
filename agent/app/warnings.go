package app

import (
	"context"
	"fmt"
	"iter"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/kubeproxy"
	"github.com/slicecast/slicecast/agent/netlink"
	"github.com/slicecast/slicecast/agent/verify"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// check returns a function that says what should be mended on this node.
func (a *agent) check(options view.Options) func(context.Context) map[pb.NodeWarning]string {
	// Without rules of its own, there is nothing that a kube-proxy could interfere with.
	expected := a.options.kubeProxyExpected() || a.options.programsNothing()
	var detector kubeproxy.Detector
	var seen routes
	return func(ctx context.Context) map[pb.NodeWarning]string {
		out := make(map[pb.NodeWarning]string)
		node := a.cache.Node()
		if next, err := readRoutes(node); err == nil {
			seen = next
		} else {
			a.logger.Debug("Cannot read the routes to pods", "err", err)
		}
		unrecognized := options.UnrecognizedPods(node, a.localPods(seen))
		for family, w := range map[model.Family]pb.NodeWarning{
			model.IPv4: pb.NodeWarning_NODE_WARNING_POD_RANGE_IPV4, model.IPv6: pb.NodeWarning_NODE_WARNING_POD_RANGE_IPV6,
		} {
			if reason := unrecognized[family]; reason != "" {
				out[w] = reason
			}
		}
		if shadow, ok := a.programmer.Programmer.(*verify.Shadow); ok && shadow.Reason() != "" {
			out[pb.NodeWarning_NODE_WARNING_KERNEL_DIFFERS] = shadow.Reason()
		}
		if problem := a.services.Problem(); problem != "" {
			out[pb.NodeWarning_NODE_WARNING_NOT_SERVED] = problem
		}
		if expected {
			return out
		}
		where, err := detector.Find(ctx)
		if err != nil {
			a.logger.Debug("Cannot look for rules of kube-proxy", "err", err)
		}
		if where != "" {
			out[pb.NodeWarning_NODE_WARNING_KUBE_PROXY] = fmt.Sprintf("kube-proxy runs on this node (%s) and programs the same "+
				"Services: end it here and remove its rules with slicecast-agent cleanup --kube-proxy, or set besideKubeProxy if "+
				"it serves other Services; delete its DaemonSet only if all nodes have an agent that programs them", where)
		}
		return out
	}
}

// localPods yields the addresses of the endpoints that EndpointSlices have on this node, and that
// are pods by the kernel's routes. Whoever may write an EndpointSlice can name any node and
// address.
func (a *agent) localPods(by routes) iter.Seq[netip.Addr] {
	return func(yield func(netip.Addr) bool) {
		for _, key := range a.cache.Services() {
			_, list := a.cache.Service(key)
			for _, slice := range list {
				for i := range slice.Endpoints {
					e := &slice.Endpoints[i]
					if e.NodeName == a.options.NodeName && by.isPod(e.Address) && !yield(e.Address) {
						return
					}
				}
			}
		}
	}
}

// routes are the routes of a machine by their destination, and whether pods of it are there.
type routes struct {
	pods map[netip.Prefix]bool
	bits []int // the lengths of these prefixes, longest first
}

// isPod reports whether the most specific route to an address leads to pods.
func (r routes) isPod(a netip.Addr) bool {
	for _, bits := range r.bits {
		if p, err := a.Prefix(bits); err == nil {
			if is, ok := r.pods[p]; ok {
				return is
			}
		}
	}
	return false
}

// readRoutes reads the routes of this machine. The Node says which interface is not for pods.
func readRoutes(n *model.Node) (routes, error) {
	s, err := netlink.Open(unix.NETLINK_ROUTE)
	if err != nil {
		return routes{}, err
	}
	defer s.Close()
	held, err := s.Addresses(unix.AF_UNSPEC)
	if err != nil {
		return routes{}, fmt.Errorf("list this machine's addresses: %w", err)
	}
	var all []netlink.Route
	for _, family := range []model.Family{model.IPv4, model.IPv6} {
		list, err := s.Routes(family)
		if err != nil {
			return routes{}, fmt.Errorf("list this machine's routes: %w", err)
		}
		all = append(all, list...)
	}
	return newRoutes(all, held, n), nil
}

// newRoutes returns those routes of the main table that list has, of a machine that has the
// addresses held. A route leads to pods if it has no gateway, or one of the machine's own addresses
// as the gateway, and if its interface is neither that of a default route nor one with an address
// of the Node.
func newRoutes(list []netlink.Route, held []netlink.Address, n *model.Node) routes {
	out := routes{pods: make(map[netip.Prefix]bool)}
	own, uplinks := make(map[netip.Addr]bool), make(map[int]bool)
	for _, a := range held {
		own[a.Addr()] = true
		if n != nil && slices.Contains(n.Addresses, a.Addr()) {
			uplinks[a.Link] = true
		}
	}
	for i := range list {
		if r := &list[i]; r.Table == unix.RT_TABLE_MAIN && !r.Destination.IsValid() {
			for _, link := range append(r.Hops, r.Link) {
				uplinks[link] = true
			}
		}
	}
	for i := range list {
		r := &list[i]
		if r.Table != unix.RT_TABLE_MAIN || !r.Destination.IsValid() {
			continue
		}
		p := r.Destination.Masked()
		direct := r.Type == unix.RTN_UNICAST && r.Link != 0 && !r.Via && (!r.Gateway.IsValid() || own[r.Gateway])
		// Of several routes to one destination, any could be used.
		before, again := out.pods[p]
		out.pods[p] = direct && !uplinks[r.Link] && (before || !again)
		if !slices.Contains(out.bits, p.Bits()) {
			out.bits = append(out.bits, p.Bits())
		}
	}
	slices.SortFunc(out.bits, func(a, b int) int { return b - a })
	return out
}
