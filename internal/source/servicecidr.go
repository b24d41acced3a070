package source

import (
	"net/netip"
	"slices"
	"sync"

	networkingv1 "k8s.io/api/networking/v1"

	"github.com/slicecast/slicecast/internal/model"
)

// ServiceCIDR is an object with ranges for the cluster's cluster IPs (KEP-1880).
type ServiceCIDR struct {
	Name  string
	CIDRs []netip.Prefix
}

// Key returns the key of the ServiceCIDR.
func (s *ServiceCIDR) Key() model.Key { return model.Key{Kind: model.KindServiceCIDR, Name: s.Name} }

// FromServiceCIDR converts a ServiceCIDR. Its result is never nil. As in kube-proxy, a ServiceCIDR
// counts while it exists, whatever its conditions are, as Services may keep addresses in it.
func (c *Converter) FromServiceCIDR(o *networkingv1.ServiceCIDR) (*ServiceCIDR, []Skip) {
	var skips SkipList
	cidrs := skips.prefixes(o.Spec.CIDRs, "spec.cidrs")
	return &ServiceCIDR{o.Name, cidrs}, skips
}

// WithServiceCIDRs returns a Sink that also accepts ServiceCIDRs. It passes each Node on to the
// given sink with the ranges of all ServiceCIDRs. When the ranges change, it passes all Nodes on
// again, as nodes have no other way to learn of them. Ranges beyond model.MaxServiceCIDRs of a
// family are left out, and reported for the ServiceCIDR allServiceCIDRs.
func WithServiceCIDRs(sink Sink, skips *Skips) Sink {
	return &nodeSink{Sink: sink, skips: skips, nodes: map[model.Key]*model.Node{}, ranges: map[model.Key][]netip.Prefix{}}
}

// allServiceCIDRs stands for all ServiceCIDRs together. It is not a valid name of an object.
const allServiceCIDRs = "*"

type nodeSink struct {
	Sink
	skips *Skips

	// mu guards the fields below. It is held during calls for Nodes, as calls for Nodes and for
	// ServiceCIDRs may be concurrent and both change Nodes.
	mu     sync.Mutex
	nodes  map[model.Key]*model.Node    // by key, without ranges
	ranges map[model.Key][]netip.Prefix // by the key of their ServiceCIDR
	all    []netip.Prefix               // ranges of all ServiceCIDRs, ascending, each once
}

// Upsert implements Sink.
func (s *nodeSink) Upsert(o model.Keyed, resourceVersion uint64) {
	switch o := o.(type) {
	case *model.Node:
		s.mu.Lock()
		defer s.mu.Unlock()
		s.nodes[o.Key()] = o
		s.Sink.Upsert(s.withRangesLocked(o), resourceVersion)
	case *ServiceCIDR:
		s.mu.Lock()
		defer s.mu.Unlock()
		s.ranges[o.Key()] = o.CIDRs
		s.changedLocked()
	default:
		s.Sink.Upsert(o, resourceVersion)
	}
}

// Remove implements Sink.
func (s *nodeSink) Remove(key model.Key, resourceVersion uint64) {
	switch key.Kind {
	case model.KindNode:
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.nodes, key)
		s.Sink.Remove(key, resourceVersion)
	case model.KindServiceCIDR:
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.ranges, key)
		s.changedLocked()
	default:
		s.Sink.Remove(key, resourceVersion)
	}
}

// Replace implements Sink.
func (s *nodeSink) Replace(kind model.Kind, objects []model.Keyed, resourceVersion uint64) {
	switch kind {
	case model.KindNode:
		s.mu.Lock()
		defer s.mu.Unlock()
		clear(s.nodes)
		nodes := make([]model.Keyed, 0, len(objects))
		for _, o := range objects {
			n := o.(*model.Node) // kind says so
			s.nodes[n.Key()] = n
			nodes = append(nodes, s.withRangesLocked(n))
		}
		s.Sink.Replace(kind, nodes, resourceVersion)
	case model.KindServiceCIDR:
		s.mu.Lock()
		defer s.mu.Unlock()
		clear(s.ranges)
		for _, o := range objects {
			s.ranges[o.Key()] = o.(*ServiceCIDR).CIDRs // kind says so
		}
		s.changedLocked()
	default:
		s.Sink.Replace(kind, objects, resourceVersion)
	}
}

// Progress implements Sink.
func (s *nodeSink) Progress(kind model.Kind, resourceVersion uint64) {
	if kind != model.KindServiceCIDR {
		s.Sink.Progress(kind, resourceVersion)
	}
}

// changedLocked passes all Nodes on again if the ranges have changed. They have no resource version
// then, as the version of a ServiceCIDR does not say how far the watch of Nodes is.
func (s *nodeSink) changedLocked() {
	var all []netip.Prefix
	for _, r := range s.ranges {
		all = append(all, r...)
	}
	slices.SortFunc(all, netip.Prefix.Compare)
	all = slices.Compact(all)
	all = s.bounded(all)
	if slices.Equal(s.all, all) {
		return
	}
	s.all = all
	for _, n := range s.nodes {
		s.Sink.Upsert(s.withRangesLocked(n), 0)
	}
}

// withRangesLocked returns a copy of the Node with the ranges. Readers of the Sink may hold the
// original.
func (s *nodeSink) withRangesLocked(n *model.Node) *model.Node {
	out := *n
	out.ServiceCIDRs = s.all
	return &out
}

// bounded returns the ranges that Nodes are given. all must be ascending.
func (s *nodeSink) bounded(all []netip.Prefix) []netip.Prefix {
	counts := map[model.Family]int{}
	kept := slices.DeleteFunc(slices.Clone(all), func(p netip.Prefix) bool {
		counts[model.FamilyOf(p.Addr())]++
		return counts[model.FamilyOf(p.Addr())] > model.MaxServiceCIDRs
	})
	var skips SkipList
	if left := len(all) - len(kept); left > 0 {
		skips.Add(TooMany, "spec.cidrs", "of all ServiceCIDRs together, %d ranges beyond %d of a family are left out", left, model.MaxServiceCIDRs)
	}
	s.skips.Set(model.Key{Kind: model.KindServiceCIDR, Name: allServiceCIDRs}, skips)
	return kept
}
