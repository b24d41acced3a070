package trace

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/agent/programmer/ipvs"
	"github.com/slicecast/slicecast/agent/programmer/nftables"
	"github.com/slicecast/slicecast/internal/model"
)

// ownTables are the tables of nf_tables that belong to Slicecast, and kubeProxyTable is
// kube-proxy's.
var ownTables = []string{nftables.Table, nftables.StandInTable, ipvs.Table}

const kubeProxyTable = "kube-proxy"

// addNFTables adds the rules of nf_tables, except for those in the tables that iptables' variant
// for nf_tables has made, which it returns.
func (r *Rules) addNFTables(c *nft.Conn) (ofIPTables []*nft.Held, err error) {
	f := nft.FamilyOf(r.Family)
	held, err := c.ReadTables([]nft.Family{f, f.Inet()}, func(nft.Table) bool { return true })
	if err != nil {
		return nil, fmt.Errorf("read the %v rules of nf_tables: %w", r.Family, err)
	}
	for _, h := range held {
		if h.Number != unix.NFPROTO_INET && isIPTables(h) {
			ofIPTables = append(ofIPTables, h)
		} else {
			r.addTable(h)
		}
	}
	return ofIPTables, nil
}

// table is a table of nf_tables while it is compiled.
type table struct {
	*Rules
	name string
	// proxys and slicecasts are as in chain.
	proxys, slicecasts bool

	chains map[string]*chain
	sets   map[string]*set
	// words are those of the rule that is compiled.
	words *words
}

// addTable compiles a table.
func (r *Rules) addTable(h *nft.Held) {
	r.ipvsTable = r.ipvsTable || h.Name == ipvs.Table
	r.NFTables = r.NFTables || h.Name == nftables.Table
	if h.Flags&unix.NFT_TABLE_F_DORMANT != 0 {
		return
	}
	family := "ip"
	switch h.Number {
	case unix.NFPROTO_IPV6:
		family = "ip6"
	case unix.NFPROTO_INET:
		family = "inet"
	}
	t := &table{
		Rules: r, name: "table " + family + " " + h.Name, slicecasts: slices.Contains(ownTables, h.Name), chains: map[string]*chain{}, sets: map[string]*set{},
	}
	t.proxys = t.slicecasts || h.Name == kubeProxyTable
	r.slicecasts = r.slicecasts || t.slicecasts
	r.otherProgrammers = r.otherProgrammers || t.slicecasts && h.Name != ipvs.Table
	if t.proxys && !t.slicecasts {
		r.kubeProxys, r.KubeProxyNFTables = true, true
	}
	for name := range h.Chains {
		c := &chain{table: t.name, name: name, proxys: t.proxys, slicecasts: t.slicecasts}
		t.chains[name] = c
		r.chains = append(r.chains, c)
	}
	slices.SortFunc(r.chains, func(a, b *chain) int { return strings.Compare(a.table+" "+a.name, b.table+" "+b.name) })
	for name, s := range h.Sets {
		t.sets[name] = t.compileSet(name, s)
	}
	for name, held := range h.Chains {
		c := t.chains[name]
		for i, rule := range held.Rules {
			c.rules = append(c.rules, t.compileRule(c, i+1, rule))
			if i > 0 && string(rule.Expressions) == string(held.Rules[i-1].Expressions) {
				c.rules[i].same = true
			}
		}
		if hook := held.Hook; hook.Kind != "" {
			c.drops = hook.Drops
			b := &base{chain: c, hook: hook.Number, priority: hook.Priority, nat: hook.Kind == "nat", handle: held.Handle}
			b.firewall = !b.nat && !t.proxys
			if b.firewall && c.drops {
				c.policy = policyOf(c)
			}
			r.bases = append(r.bases, b)
		}
	}
}

// policyOf returns a rule that stands for the policy of a firewall's chain.
func policyOf(c *chain) *Rule {
	return &Rule{Table: c.table, Chain: c.name, Text: "policy drop", Foreign: true}
}

// set is a set or a map.
type set struct {
	name    string
	dynamic bool
	exact   map[string]*element
	// others is the element for keys that no other element has, or nil.
	others *element
	// ranges are intervals. Those of a single field are sorted.
	ranges []interval
	fields []int
	// isRange means that the set has intervals.
	isRange         bool
	keyLen, dataLen int
	timeout         time.Duration
}

// elements yields all elements.
func (s *set) elements() iter.Seq[*element] {
	return func(yield func(*element) bool) {
		for _, e := range s.exact {
			if !yield(e) {
				return
			}
		}
		for _, r := range s.ranges {
			if !yield(r.element) {
				return
			}
		}
		if s.others != nil {
			yield(s.others)
		}
	}
}

type element struct {
	data    string
	verdict result
	// valid reports whether verdict is known.
	valid bool
	place string
}

// interval is an element for all keys from first to last.
type interval struct {
	first, last string
	*element
}

// fieldLengths are the lengths of nft's types in bytes, by their numbers.
var fieldLengths = map[uint32]int{7: 4, 8: 16, 12: 1, 13: 2, 19: 4, 41: 16}

// fieldsOf returns the lengths of a key's fields, or nil if they are not known.
func fieldsOf(kind uint32) (lengths []int) {
	for ; kind > 0; kind >>= 6 {
		length, ok := fieldLengths[kind&63]
		if !ok {
			return nil
		}
		lengths = append([]int{length}, lengths...)
	}
	return lengths
}

func (t *table) compileSet(name string, h *nft.HeldElements) *set {
	s := &set{
		name: name, dynamic: h.Dynamic(), exact: map[string]*element{}, fields: fieldsOf(h.KeyType),
		isRange: h.Flags&unix.NFT_SET_INTERVAL != 0, keyLen: int(h.KeyLen), dataLen: int(h.DataLen), timeout: h.Timeout,
	}
	simple := s.isRange && len(s.fields) < 2
	var ends []string
	kind := "set"
	if h.Flags&unix.NFT_SET_MAP != 0 {
		kind = "map"
	}
	for _, e := range h.Elements {
		one := &element{data: e.Data, place: fmt.Sprintf("%s %s of %s", kind, name, t.name)}
		if e.Verdict.Valid {
			one.verdict, one.valid = t.verdict(e.Verdict)
		}
		switch {
		case e.Key == "" && !e.IsEnd:
			s.others = one
		case simple && e.IsEnd:
			ends = append(ends, e.Key)
		case simple:
			s.ranges = append(s.ranges, interval{first: e.Key, element: one})
		case e.End != "":
			s.ranges = append(s.ranges, interval{e.Key, e.End, one})
		default:
			s.exact[e.Key] = one
		}
		if !e.IsEnd && e.End == "" {
			t.addElement(h.KeyType, e.Key, one.place)
		}
	}
	if simple {
		s.closeRanges(ends)
	}
	return s
}

// closeRanges sets the ends of intervals of one field, which the kernel holds as elements of their
// own. An interval without one goes to the last key.
func (s *set) closeRanges(ends []string) {
	slices.Sort(ends)
	slices.SortFunc(s.ranges, func(a, b interval) int { return strings.Compare(a.first, b.first) })
	for i := range s.ranges {
		r := &s.ranges[i]
		if at, _ := slices.BinarySearch(ends, r.first+"\x00"); at < len(ends) {
			r.last = ends[at] // exclusive
		}
	}
}

// find returns the element for a key.
func (s *set) find(key string) *element {
	return cmp.Or(s.findListed(key), s.others)
}

func (s *set) findListed(key string) *element {
	if e := s.exact[key]; e != nil {
		return e
	}
	if len(s.fields) < 2 {
		at, found := slices.BinarySearchFunc(s.ranges, key, func(r interval, key string) int { return strings.Compare(r.first, key) })
		if !found {
			at--
		}
		if at >= 0 && (s.ranges[at].last == "" || key < s.ranges[at].last) {
			return s.ranges[at].element
		}
		return nil
	}
	for _, r := range s.ranges {
		if s.inside(r, key) {
			return r.element
		}
	}
	return nil
}

// inside reports whether each field of a key is in the interval.
func (s *set) inside(r interval, key string) bool {
	at := 0
	for _, length := range s.fields {
		if at+length > min(len(key), len(r.first), len(r.last)) {
			return false
		}
		field := key[at : at+length]
		if field < r.first[at:at+length] || field > r.last[at:at+length] {
			return false
		}
		at += (length + 3) &^ 3
	}
	return true
}

// Types of keys that are frontends; see nft.Field.
const (
	keyNodePort  = 12<<6 | 13
	keyFrontend4 = 7<<12 | keyNodePort
	keyFrontend6 = 8<<12 | keyNodePort
)

// addElement records the key of an element that is a frontend of kube-proxy.
func (t *table) addElement(kind uint32, key, place string) {
	length := 0
	switch {
	case kind == keyFrontend4:
		length = 4
	case kind == keyFrontend6:
		length = 16
	case kind != keyNodePort:
		return
	}
	if !t.proxys || t.slicecasts || len(key) != length+8 {
		return
	}
	f := Frontend{Port: binary.BigEndian.Uint16([]byte(key[length+4 : length+6]))}
	if length > 0 {
		f.Address, _ = netip.AddrFromSlice([]byte(key[:length]))
	}
	var ok bool
	if f.Protocol, ok = protocolOf(key[length]); ok {
		t.frontends[f] = place
	}
}

func protocolOf(number byte) (model.Protocol, bool) {
	switch number {
	case unix.IPPROTO_TCP:
		return model.TCP, true
	case unix.IPPROTO_UDP:
		return model.UDP, true
	case unix.IPPROTO_SCTP:
		return model.SCTP, true
	}
	return 0, false
}

// verdict returns what a verdict does. It reports false if that is not known.
func (t *table) verdict(v nft.HeldVerdict) (r result, ok bool) {
	switch v.Kind {
	case unix.NFT_CONTINUE:
		r.kind = goOn
	case unix.NFT_BREAK:
	case unix.NFT_RETURN:
		r.kind = leave
	case unix.NFT_JUMP, unix.NFT_GOTO:
		r.kind = call
		if v.Kind == unix.NFT_GOTO {
			r.kind = jump
		}
		if r.chain = t.chains[v.Chain]; r.chain == nil {
			return r, false
		}
		r.chain.reached = true
	case 0: // NF_DROP
		r.kind = drop
	case 1: // NF_ACCEPT
		r.kind = accept
	default:
		return r, false
	}
	return r, true
}
