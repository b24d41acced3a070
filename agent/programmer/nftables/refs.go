package nftables

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/cespare/xxhash/v2"

	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/agent/view"
)

// ref identifies a part of the table that Service ports share. The part exists while at least one
// of them needs it.
type ref struct {
	kind    refKind
	number  uint32     // of refPolicy the policy, of refSources the prefix length, of refPart the set
	pick    pick       // of refPick
	address netip.Addr // of refClusterIP and refHairpin
}

type refKind uint8

// The kinds of parts. A part needs only parts of kinds before its own.
const (
	refClusterIP refKind = iota
	refHairpin
	refAffinity // the map of clients
	refSources  // a set of sources' prefixes of one length
	refPart     // a map of endpoints, except for the first part, which always exists
	refPolicy   // a policy's chain
	refPick     // a chain that chooses a backend
)

// kept reports whether a part of this kind, once it exists, is removed only by a Replace. It may be
// needed again soon, and the time that the kernel takes to create it grows with the number of
// elements in the maps.
func (k refKind) kept() bool {
	return k == refPolicy || k == refPick || k == refPart || k == refAffinity
}

// compareRefs orders parts by kind. The order within a kind only has to be stable.
func compareRefs(a, b ref) int {
	return cmp.Or(
		cmp.Compare(a.kind, b.kind), cmp.Compare(a.number, b.number), a.address.Compare(b.address),
		cmp.Compare(a.pick.set, b.pick.set), cmp.Compare(a.pick.via, b.pick.via), cmp.Compare(a.pick.class, b.pick.class))
}

// set returns the set that a part is. ok is false for parts that are elements.
func (r ref) set() (s setID, ok bool) {
	switch r.kind {
	case refAffinity:
		return affinity, true
	case refSources:
		return sources + setID(r.number), true
	case refPart:
		return setID(r.number), true
	}
	return 0, false
}

// refOfSet returns the part of the table that a set is. ok is false for sets that always exist.
func refOfSet(s setID) (r ref, ok bool) {
	switch {
	case s.always():
		return ref{}, false
	case s == affinity:
		return ref{kind: refAffinity}, true
	case s >= sources:
		return ref{kind: refSources, number: uint32(s - sources)}, true
	}
	return ref{kind: refPart, number: uint32(s)}, true
}

// element returns the element that a part is, with the chain that it leads to. A refClusterIP and a
// refHairpin lead to none.
func (r ref) element() (s setID, key []byte, chain string) {
	switch r.kind {
	case refPolicy:
		return policies, nft.Integer(r.number), policy(r.number).chain()
	case refPick:
		return picks(r.pick.set, r.pick.via), nft.Integer(uint32(r.pick.class)), r.pick.chain()
	}
	key = appendAddress(nil, r.address)
	if r.kind == refHairpin {
		return hairpins, appendAddress(key, r.address), ""
	}
	return clusterIPs, key, ""
}

// refOfChain returns the policy or pick that an element of policies or of one of the picks' maps
// stands for. ok is false if the key is not that of a valid policy or pick, or if the element does
// not lead to its chain.
func refOfChain(k elementKey, chain string) (r ref, ok bool) {
	number := integerOf([]byte(k.key))
	if k.set == policies {
		r = ref{kind: refPolicy, number: number}
		ok = policy(number).valid()
	} else {
		nth := k.set - firstPick
		r = ref{kind: refPick, pick: pick{nth % backendSets, via(nth / backendSets), class(number)}}
		ok = class(number).valid()
	}
	if !ok {
		return ref{}, false
	}
	_, _, expected := r.element()
	return r, chain == expected
}

func (f *family) rules(r ref) []nft.Rule {
	if r.kind == refPolicy {
		return f.policyChain(policy(r.number), f.node.Pods)
	}
	return f.pickChain(r.pick)
}

// classes returns the class of each of a Service port's sets of backends.
func classes(port *view.ServicePort, part uint8) [backendSets]class {
	t := timeout(port)
	return [backendSets]class{cluster: classOf(port.Cluster.Len(), t, part), local: classOf(port.Local.Len(), t, part)}
}

// timeout returns the timeout of affinity in whole seconds, rounded up. 0 means no affinity.
func timeout(port *view.ServicePort) uint32 {
	return uint32(min((port.Affinity+time.Second-1)/time.Second, maxTimeout))
}

func backendsOf(port *view.ServicePort, set backendSet) view.Backends {
	switch {
	case port == nil:
		return view.Backends{}
	case set == local:
		return port.Local
	}
	return port.Cluster
}

// refsOf calls each with every part of the table that a Service port needs, except hairpins.
func refsOf(port *view.ServicePort, part uint8, each func(ref)) {
	var by [vias]bool
	for _, f := range port.Frontends {
		each(ref{kind: refPolicy, number: uint32(policyOf(f))})
		switch f.Kind {
		case view.NodePort:
			by[viaNodePort] = true
			continue
		case view.ClusterIP:
			each(ref{kind: refClusterIP, address: f.Address})
		}
		by[viaAddress] = true
		for _, p := range f.Sources {
			each(ref{kind: refSources, number: uint32(p.Bits())})
		}
	}
	for set, c := range classes(port, part) {
		if c == 0 {
			continue
		}
		if c.timeout() > 0 {
			each(ref{kind: refAffinity})
		}
		if c.part() > 0 {
			each(ref{kind: refPart, number: uint32(endpoints(backendSet(set), part))})
		}
		for v := range vias {
			if by[v] {
				each(ref{kind: refPick, pick: pick{backendSet(set), v, c}})
			}
		}
	}
}

// element is one of the few elements of a Service port that do not hold a backend.
type element struct {
	set     setID
	key     string
	data    uint32 // 0 in sets of sources, which have no data
	comment string
}

func compareElements(a, b element) int {
	return cmp.Or(cmp.Compare(a.set, b.set), cmp.Compare(a.key, b.key))
}

// elementsOf returns the elements of a Service port under an id, sorted.
func elementsOf(port *view.ServicePort, id uint32, part uint8) []element {
	var out []element
	name := label(port.ID)
	for _, f := range port.Frontends {
		e := element{
			set: frontends, key: string(appendFrontend(nil, f, port.ID.Protocol)),
			data: id | uint32(policyOf(f)), comment: name + " " + f.Kind.String(),
		}
		if f.Kind == view.NodePort {
			e.set = nodePorts
			out = append(out, e)
			continue
		}
		out = append(out, e)
		for _, p := range f.Sources {
			key := appendAddress([]byte(e.key), p.Masked().Addr())
			out = append(out, element{set: sources + setID(p.Bits()), key: string(key)})
		}
	}
	for set, c := range classes(port, part) {
		if c != 0 {
			out = append(out, element{set: sizes + backendSet(set), key: string(nft.Integer(id)), data: uint32(c)})
		}
	}
	slices.SortFunc(out, compareElements)
	return slices.Compact(out)
}

// label returns a Service port's name for comments. Replace identifies the Service port by it. If
// the name is too long for a comment, its end is replaced by a hash.
func label(id view.ServicePortID) string {
	name := id.String()
	if len(name) > maxLabel {
		name = fmt.Sprintf("%s~%016x", name[:maxLabel-17], xxhash.Sum64String(name))
	}
	return name
}

// maxLabel is the longest label in bytes. It leaves room for the kind of a frontend.
const maxLabel = nft.MaxComment - 20

// nameOf returns the label in the comment of a frontend.
func nameOf(comment string) string {
	name, _, _ := strings.Cut(comment, " ")
	return name
}
