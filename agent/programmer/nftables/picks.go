package nftables

import (
	"fmt"
	"slices"
	"time"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// via is how a connection came to a Service port: it tells how to find that again.
type via uint8

const (
	viaAddress via = iota
	viaNodePort
	vias
)

// found loads what is held of the frontend: a Service port's id, and a policy.
func (d *dialect) found(v via, to int) []expr.Any {
	if v == viaNodePort {
		return append(nodePortKey(to), lookupInteger(nodePorts, to, to)...)
	}
	return append(d.key(to), lookupInteger(frontends, to, to)...)
}

// id loads a Service port's id.
func (d *dialect) id(v via, to int) []expr.Any { return append(d.found(v, to), andMask(to, idBits)...) }

// setChain gives the rules of the chain that leads to a backend of a set. What came to a nodePort is known by no address:
// else it would have been treated as such.
func (d *dialect) setChain(set backendSet) []rule {
	var rules []rule
	for v := range vias {
		rules = append(rules, do(d.id(v, 0), lookupInteger(sizes+set, 0, 0), lookupChain(picks(set, v))))
	}
	return rules
}

// pick names one of the chains that choose a backend of a set.
type pick struct {
	set backendSet
	via via
	class
}

// class is what a chain to choose a backend is made for: the size in its lowest two hexadecimal digits, as sizeOf has it, the part
// that the backends are in in the third, 0 with affinity, and the timeout of affinity in seconds in the others, 0 without. The class 0
// is that of a set without backends.
type class uint32

// maxTimeout is as long as a class can tell, twelve days; Kubernetes allows one.
const maxTimeout = 1<<20 - 1

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

// valid tells whether classOf could have given it.
func (c class) valid() bool {
	e, m := c>>4&0xf, c&0xf
	return m > 0 && m <= exactSize && (e == 0 || m > exactSize/2) && (c.timeout() == 0 || c.part() == 0)
}

// chain gives a name such as cluster-56, cluster-56-part-2, or local-3-affinity-10800-nodeport.
func (p pick) chain() string {
	name := fmt.Sprintf("%s-%d%s", setChains[p.set], p.draws()[0], partSuffix(p.part()))
	if t := p.timeout(); t > 0 {
		name += fmt.Sprintf("-affinity-%d", t)
	}
	if p.via == viaNodePort {
		name += "-nodeport"
	}
	return name
}

// exactSize is the largest number of backends for which there is a size of its own, and tries is how often an index is
// drawn for larger ones before the last rule.
const (
	exactSize = 8
	tries     = 14
	// maxBackends is the largest that there is.
	maxBackends = exactSize << 15
)

// sizeOf rounds a number of backends up by at most a quarter, to m × 2^e with m up to exactSize; it gives e in the second
// hexadecimal digit and m in the first. Chains are needed only for such sizes, so that a backend that comes or goes
// hardly ever asks for another one: the kernel looks at all elements of the maps that a new chain's rules refer to. When
// the index that was drawn has no backend another is drawn, so that each backend is as likely as any other.
func sizeOf(backends int) uint32 {
	e := 0
	for backends > exactSize<<e {
		e++
	}
	return uint32(e<<4 | (backends+1<<e-1)>>e)
}

// draws gives the moduli of the indices to draw one after the other, until one has a backend. The last is drawn with a
// chance of at most 5^-14, about 2^-32, which is how exact random numbers are for the kernel; it always has one, yet the
// last backends are never drawn then.
func (c class) draws() []uint32 {
	e, m := uint32(c>>4)&0xf, uint32(c)&0xf
	if e == 0 {
		return []uint32{m}
	}
	return append(slices.Repeat([]uint32{m << e}, tries), (m-1)<<e)
}

// pickChain gives the rules of a chain that chooses a backend.
func (d *dialect) pickChain(p pick) []rule {
	random := func(modulus uint32) []expr.Any {
		return []expr.Any{&expr.Numgen{Register: register(1), Modulus: modulus, Type: unix.NFT_NG_RANDOM}}
	}
	var rules []rule
	if p.timeout() == 0 {
		for _, modulus := range p.draws() {
			rules = append(rules, do(d.id(p.via, 0), random(modulus), lookup(endpoints(p.set, p.part()), 0, 0), d.dnat(0)))
		}
		return rules
	}
	// id . index is at 0, and so is id . client. Behind what it takes to load an id there is id . number, and the backend.
	client, kept := 1, d.keyWords()
	number, backend := kept+1, kept+2
	id := slices.Concat(d.found(p.via, 0), copyMasked(0, kept, idBits), andMask(0, idBits))
	key := slices.Concat(id, d.source(client))
	draw := func(modulus uint32) []expr.Any {
		return slices.Concat(id, random(modulus), lookupInteger(numbers+p.set, 0, number))
	}
	dynset := func(operation uint32, timeout time.Duration) []expr.Any {
		return []expr.Any{&expr.Dynset{
			SrcRegKey: register(0), SrcRegData: register(number), SetName: affinity.String(), Operation: operation, Timeout: timeout,
		}}
	}
	renew := dynset(unix.NFT_DYNSET_OP_UPDATE, time.Duration(p.timeout())*time.Second)
	forget := append([]expr.Any{&expr.Immediate{Register: register(number), Data: integer(0)}}, dynset(dynsetDelete, 0)...) // the kernel wants a number
	find := lookup(backends+p.set, kept, backend)
	send := slices.Concat(find, d.dnat(backend))
	rules = append(rules,
		do(key, lookupInteger(affinity, 0, number), find, renew, d.dnat(backend)).because("the backend of last time"),
		do(key, forget).because("that backend is gone"))
	// If two connections of a client come at once, both go to the backend that is held in the end.
	for _, modulus := range p.draws() {
		rules = append(rules, do(draw(modulus), d.source(client), renew, lookupInteger(affinity, 0, number), send))
	}
	for i, modulus := range p.draws() {
		r := do(draw(modulus), send)
		if i == 0 {
			r = r.because("there are too many clients to remember this one")
		}
		rules = append(rules, r)
	}
	return rules
}

// dynsetDelete is NFT_DYNSET_OP_DELETE of include/uapi/linux/netfilter/nf_tables.h.
const dynsetDelete = 2
