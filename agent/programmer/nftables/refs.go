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
	kind refKind
	// number is the policy of a refPolicy, the prefix length of a refSources, the set of a refPart,
	// and the timeout in seconds of a refTimeout.
	number  uint32
	pick    pick       // of refPick and refDraw; of refTimeout only the via
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
	refTimeout  // a chain that makes affinity last
	refPick     // a chain that chooses a backend
	refDraw     // a chain that chooses a backend, which affinity then holds
)

// kept reports whether a part of this kind, once it exists, is removed only by a Replace. It may be
// needed again soon, and the time that the kernel takes to create it grows with the number of
// elements in the maps. There are so few of each of these kinds that the table may hold them all,
// because anybody may have them created by changing a Service.
func (k refKind) kept() bool { return k == refAffinity || k >= refPart }

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
	case refTimeout:
		chain = fmt.Sprintf("affinity-%d%s", r.number, viaSuffixes[r.pick.via])
		return timeouts + setID(r.pick.via), nft.Integer(r.number << 12), chain
	case refPick:
		return picks(r.pick.set, r.pick.via), nft.Integer(uint32(r.pick.class)), r.pick.chain()
	case refDraw:
		return draws(r.pick.set, r.pick.via), nft.Integer(uint32(r.pick.class)), r.pick.drawChain()
	}
	key = appendAddress(nil, r.address)
	if r.kind == refHairpin {
		return hairpins, appendAddress(key, r.address), ""
	}
	return clusterIPs, key, ""
}

// refOfChain returns the part of the table that an element of a set that leads to chains stands
// for. ok is false if there can be no such part, or if the element does not lead to its chain.
func refOfChain(k elementKey, chain string) (r ref, ok bool) {
	number := integerOf([]byte(k.key))
	pickOf := func(nth setID) pick { return pick{nth % backendSets, via(nth / backendSets), class(number)} }
	switch {
	case k.set == policies:
		r, ok = ref{kind: refPolicy, number: number}, policy(number).valid()
	case k.set >= timeouts:
		seconds := class(number).timeout()
		r = ref{kind: refTimeout, number: seconds, pick: pick{via: via(k.set - timeouts)}}
		ok = seconds > 0 && seconds == roundTimeout(seconds) && number == seconds<<12
	case k.set >= firstDraw:
		r, ok = ref{kind: refDraw, pick: pickOf(k.set - firstDraw)}, class(number).valid() && class(number).part() == 0
	default:
		r, ok = ref{kind: refPick, pick: pickOf(k.set - firstPick)}, class(number).valid()
	}
	if !ok {
		return ref{}, false
	}
	_, _, expected := r.element()
	return r, chain == expected
}

func (f *family) rules(r ref) []nft.Rule {
	switch r.kind {
	case refPolicy:
		return f.policyChain(policy(r.number), f.node.Pods)
	case refTimeout:
		return f.timeoutRules(r.number, r.pick.via)
	case refDraw:
		return f.drawRules(r.pick)
	}
	return f.pickRules(r.pick)
}

// classes returns the class of each of a Service port's sets of backends.
func classes(port *view.ServicePort, part uint8) [backendSets]class {
	t := timeout(port)
	return [backendSets]class{cluster: classOf(port.Cluster.Len(), t, part), local: classOf(port.Local.Len(), t, part)}
}

// timeout returns the timeout of affinity in whole seconds, rounded up. 0 means no affinity.
func timeout(port *view.ServicePort) uint32 {
	return roundTimeout(uint32(min((port.Affinity+time.Second-1)/time.Second, maxTimeout)))
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
		if c.part() > 0 {
			each(ref{kind: refPart, number: uint32(endpoints(backendSet(set), part))})
		}
		for v := range vias {
			p := pick{backendSet(set), v, c &^ timeoutBits}
			switch {
			case !by[v]:
			case c.timeout() == 0:
				each(ref{kind: refPick, pick: p})
			default:
				each(ref{kind: refAffinity})
				each(ref{kind: refTimeout, number: c.timeout(), pick: pick{via: v}})
				each(ref{kind: refDraw, pick: p})
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
