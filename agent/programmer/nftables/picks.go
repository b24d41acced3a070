package nftables

import (
	"fmt"
	"slices"
	"time"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/internal/model"
)

// via is how a connection reached a Service port. The rules of later chains look the Service port
// up again in the same way.
type via uint8

const (
	viaAddress via = iota
	viaNodePort
	vias
)

// value loads the value of the frontend: the Service port's id and a policy.
func (d *dialect) value(v via, to int) []expr.Any {
	if v == viaNodePort {
		return append(nft.Port(to), lookupInteger(nodePorts, to, to)...)
	}
	return append(d.Frontend(to), lookupInteger(frontends, to, to)...)
}

func (d *dialect) id(v via, to int) []expr.Any {
	return append(d.value(v, to), nft.AndMask(to, idBits)...)
}

// targets returns the chains that lead to a backend of a set. sticky means that the table has
// affinity, which is large and exists only if a Service port needs it.
//
// A connection whose address and port are in frontends never comes by a nodePort, so the rules for
// at most one of the two find something.
func (d *dialect) targets(sticky bool) map[string][]nft.Rule {
	chains := map[string][]nft.Rule{}
	for set := range backendSets {
		var rules []nft.Rule
		for v := range vias {
			class := append(d.id(v, 0), lookupInteger(sizes+set, 0, 0)...)
			rules = append(rules, nft.Do(class, lookupChain(picks(set, v))))
			if !sticky {
				continue
			}
			hasTimeout := append(nft.AndMask(0, timeoutBits), nft.Compare(expr.CmpOpNeq, nft.Integer(0))...)
			rules = append(rules, nft.Do(class, hasTimeout, nft.Goto(step{stickyStep, set, v}.chain())))
			for kind := range stepKinds {
				s := step{kind, set, v}
				chains[s.chain()] = d.stepRules(s)
			}
		}
		chains[setChains[set]] = rules
	}
	return chains
}

// step identifies one of the chains that connections with affinity pass, whatever their Service.
//
// Only the last of the rules that a connection passes depends on the timeout, and it depends on
// nothing else. So the number of chains is the sum of the numbers of sizes and of timeouts, which
// are both bounded, and not their product: anybody may change the timeout of a Service as often as
// they like.
type step struct {
	kind stepKind
	set  backendSet
	via  via
}

type stepKind uint8

const (
	// stickyStep sends a client to the backend that affinity holds. If there is none, it draws one.
	stickyStep stepKind = iota
	// drawStep leads to the chain that draws a backend for the size of the set.
	drawStep
	// renewStep leads to the chain that makes affinity last for the timeout, from now on.
	renewStep
	stepKinds
)

// chain returns a name such as cluster-affinity or local-renew-nodeport.
func (s step) chain() string {
	kind := [stepKinds]string{stickyStep: "-affinity", drawStep: "-draw", renewStep: "-renew"}[s.kind]
	return setChains[s.set] + kind + viaSuffixes[s.via]
}

var viaSuffixes = [vias]string{viaNodePort: "-nodeport"}

func (d *dialect) stepRules(s step) []nft.Rule {
	class := append(d.id(s.via, 0), lookupInteger(sizes+s.set, 0, 0)...)
	switch s.kind {
	case drawStep:
		return []nft.Rule{nft.Do(class, nft.AndMask(0, sizeBits), lookupChain(draws(s.set, s.via)))}
	case renewStep:
		return []nft.Rule{nft.Do(class, nft.AndMask(0, timeoutBits), lookupChain(timeouts+setID(s.via)))}
	}
	a := d.affinity(s.via)
	find := lookup(backends+s.set, a.kept, a.backend)
	renew := nft.Do(nft.Jump(step{renewStep, s.set, s.via}.chain()))
	send := nft.Do(a.key, lookupInteger(affinity, 0, a.number), find, d.DNAT(a.backend))
	// the kernel requires a value
	forget := slices.Concat(a.key, nft.Immediate(0, a.number), a.dynset(dynsetDelete, 0))
	return []nft.Rule{
		renew,
		send.Because("the backend of last time"),
		nft.Do(forget).Because("that backend is gone"),
		nft.Do(nft.Jump(step{drawStep, s.set, s.via}.chain())),
		renew,
		// If two connections of a client arrive at once, both go to the backend that affinity holds
		// in the end.
		send,
	}
}

// timeoutRules returns the rules of the chain that makes affinity last for a timeout in seconds.
func (d *dialect) timeoutRules(seconds uint32, v via) []nft.Rule {
	a := d.affinity(v)
	renew := a.dynset(unix.NFT_DYNSET_OP_UPDATE, time.Duration(seconds)*time.Second)
	return []nft.Rule{nft.Do(a.key, lookupInteger(affinity, 0, a.number), renew)}
}

// affine is how rules access affinity. They load the key id . index at register 0, and so they do
// id . client. After the registers that loading an id needs come the key id . number, and then the
// backend.
type affine struct {
	id, key                       []expr.Any // load these
	client, kept, number, backend int        // registers
}

func (d *dialect) affinity(v via) affine {
	a := affine{client: 1, kept: d.FrontendWords()}
	a.number, a.backend = a.kept+1, a.kept+2
	a.id = slices.Concat(d.value(v, 0), nft.CopyMasked(0, a.kept, idBits), nft.AndMask(0, idBits))
	a.key = slices.Concat(a.id, d.Source(a.client))
	return a
}

func (a affine) dynset(operation uint32, timeout time.Duration) []expr.Any {
	return nft.UpdateSet(affinity.String(), operation, 0, a.number, timeout)
}

// units are in seconds. A timeout of affinity is rounded up to a multiple of the largest unit that
// is at most a tenth of it, so there are few different timeouts.
var units = []uint32{3600, 1800, 900, 600, 300, 120, 60, 30, 15, 10, 5, 2, 1}

// maxTimeout is the longest timeout in seconds. Kubernetes allows no longer one.
const maxTimeout = model.MaxAffinitySeconds

// roundTimeout returns the timeout in seconds that stands for this one.
func roundTimeout(seconds uint32) uint32 {
	seconds = min(seconds, maxTimeout)
	for _, unit := range units {
		if seconds >= 10*unit || unit == 1 {
			return (seconds + unit - 1) / unit * unit
		}
	}
	return 0
}

// pick identifies one of the chains that choose a backend of a set. Its class has no timeout, so
// that Service ports with different timeouts share the chain.
type pick struct {
	set backendSet
	via via
	class
}

// class is the kind of chain that a backend set needs. Its lowest two hexadecimal digits are the
// size (see sizeOf). The third digit is the part that holds the backends, or 0 with affinity. The
// remaining digits are the timeout of affinity in seconds, or 0 without affinity. Class 0 is that
// of a set without backends.
type class uint32

const (
	sizeBits    = 1<<8 - 1
	timeoutBits = 1<<32 - 1<<12
)

func classOf(backends int, timeout uint32, part uint8) class {
	switch {
	case backends == 0:
		return 0
	case timeout > 0:
		part = 0
	}
	return class(timeout<<12 | uint32(part)<<8 | sizeOf(backends))
}

func (c class) timeout() uint32 { return uint32(c >> 12) }

func (c class) part() uint8 { return uint8(c >> 8 & 0xf) }

// valid reports whether c is a result that classOf can return without affinity.
func (c class) valid() bool {
	e, m := c>>4&0xf, c&0xf
	return m > 0 && m <= exactSize && (e == 0 || m > exactSize/2) && c.timeout() == 0
}

// chain returns a name such as cluster-56, cluster-56-part-2 or local-3-nodeport.
func (p pick) chain() string { return p.name("") + viaSuffixes[p.via] }

// drawChain returns a name such as cluster-56-affinity or local-3-affinity-nodeport.
func (p pick) drawChain() string { return p.name("-affinity") + viaSuffixes[p.via] }

func (p pick) name(suffix string) string {
	return fmt.Sprintf("%s-%d%s%s", setChains[p.set], p.draws()[0], partSuffix(p.part()), suffix)
}

// exactSize is the largest number of backends that is a size of its own. tries is how often an
// index is drawn for larger sizes before the last rule.
const (
	exactSize = 8
	tries     = 14
	// maxBackends is the largest size.
	maxBackends = exactSize << 15
)

// sizeOf rounds a number of backends up by at most a quarter, to m × 2^e with m up to exactSize. It
// returns e in the second hexadecimal digit and m in the first.
//
// Chains are needed only for such sizes, so adding or removing a backend rarely requires a new
// chain. New chains are expensive, because the kernel looks at all elements of the maps that their
// rules refer to. If the drawn index has no backend, another one is drawn, so each backend is
// equally likely.
func sizeOf(backends int) uint32 {
	e := 0
	for backends > exactSize<<e {
		e++
	}
	return uint32(e<<4 | (backends+1<<e-1)>>e)
}

// draws returns the moduli of the indices to draw, in order, until one has a backend. The last
// modulus is drawn with a probability of at most 5^-14, about 2^-32, which is the precision of the
// kernel's random numbers. Each of its indices has a backend, but it never draws the last backends.
func (c class) draws() []uint32 {
	e, m := uint32(c>>4)&0xf, uint32(c)&0xf
	if e == 0 {
		return []uint32{m}
	}
	return append(slices.Repeat([]uint32{m << e}, tries), (m-1)<<e)
}

func (d *dialect) pickRules(p pick) []nft.Rule {
	var rules []nft.Rule
	for _, modulus := range p.draws() {
		backend := lookup(endpoints(p.set, p.part()), 0, 0)
		rules = append(rules, nft.Do(d.id(p.via, 0), nft.RandomIndex(modulus, 1), backend, d.DNAT(0)))
	}
	return rules
}

// drawRules returns the rules that draw a backend and have affinity hold it. If affinity is full,
// they send the client to one that it does not hold.
func (d *dialect) drawRules(p pick) []nft.Rule {
	var rules []nft.Rule
	a := d.affinity(p.via)
	draw := func(modulus uint32) []expr.Any {
		return slices.Concat(a.id, nft.RandomIndex(modulus, 1), lookupInteger(numbers+p.set, 0, a.number))
	}
	remember := append(d.Source(a.client), a.dynset(unix.NFT_DYNSET_OP_UPDATE, drawn)...)
	send := append(lookup(backends+p.set, a.kept, a.backend), d.DNAT(a.backend)...)
	for _, modulus := range p.draws() {
		rules = append(rules, nft.Do(draw(modulus), remember, nft.Return()))
	}
	for i, modulus := range p.draws() {
		r := nft.Do(draw(modulus), send)
		if i == 0 {
			r = r.Because("there are too many clients to remember this one")
		}
		rules = append(rules, r)
	}
	return rules
}

// drawn is how long affinity holds a backend that was drawn, until the same packet has it renewed.
const drawn = 10 * time.Second

// dynsetDelete is NFT_DYNSET_OP_DELETE of include/uapi/linux/netfilter/nf_tables.h.
const dynsetDelete = 2
