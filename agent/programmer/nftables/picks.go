package nftables

import (
	"fmt"
	"slices"
	"time"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/nft"
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

// setChain returns the rules of the chain that leads to a backend of a set. A connection whose
// address and port are in frontends never comes by a nodePort, so at most one of the two lookups
// finds something.
func (d *dialect) setChain(set backendSet) []nft.Rule {
	var rules []nft.Rule
	for v := range vias {
		rules = append(rules, nft.Do(d.id(v, 0), lookupInteger(sizes+set, 0, 0), lookupChain(picks(set, v))))
	}
	return rules
}

// pick identifies one of the chains that choose a backend of a set.
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

// maxTimeout is the longest timeout in seconds that a class can express, twelve days. Kubernetes
// allows one day.
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

// valid reports whether c is a result that classOf can return.
func (c class) valid() bool {
	e, m := c>>4&0xf, c&0xf
	return m > 0 && m <= exactSize && (e == 0 || m > exactSize/2) && (c.timeout() == 0 || c.part() == 0)
}

// chain returns a name such as cluster-56, cluster-56-part-2 or local-3-affinity-10800-nodeport.
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

func (d *dialect) pickChain(p pick) []nft.Rule {
	var rules []nft.Rule
	if p.timeout() == 0 {
		for _, modulus := range p.draws() {
			backend := lookup(endpoints(p.set, p.part()), 0, 0)
			rules = append(rules, nft.Do(d.id(p.via, 0), nft.RandomIndex(modulus, 1), backend, d.DNAT(0)))
		}
		return rules
	}
	// The key id . index is loaded at register 0, and so is id . client. After the registers that
	// loading an id needs come the key id . number, and then the backend.
	client, kept := 1, d.FrontendWords()
	number, backend := kept+1, kept+2
	id := slices.Concat(d.value(p.via, 0), nft.CopyMasked(0, kept, idBits), nft.AndMask(0, idBits))
	key := slices.Concat(id, d.Source(client))
	draw := func(modulus uint32) []expr.Any {
		return slices.Concat(id, nft.RandomIndex(modulus, 1), lookupInteger(numbers+p.set, 0, number))
	}
	dynset := func(operation uint32, timeout time.Duration) []expr.Any {
		return nft.UpdateSet(affinity.String(), operation, 0, number, timeout)
	}
	renew := dynset(unix.NFT_DYNSET_OP_UPDATE, time.Duration(p.timeout())*time.Second)
	// the kernel requires a value
	forget := append(nft.Immediate(0, number), dynset(dynsetDelete, 0)...)
	find := lookup(backends+p.set, kept, backend)
	send := slices.Concat(find, d.DNAT(backend))
	rules = append(rules,
		nft.Do(key, lookupInteger(affinity, 0, number), find, renew, d.DNAT(backend)).Because("the backend of last time"),
		nft.Do(key, forget).Because("that backend is gone"))
	// If two connections of a client arrive at once, both go to the backend that affinity holds in the
	// end.
	for _, modulus := range p.draws() {
		rules = append(rules, nft.Do(draw(modulus), d.Source(client), renew, lookupInteger(affinity, 0, number), send))
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

// dynsetDelete is NFT_DYNSET_OP_DELETE of include/uapi/linux/netfilter/nf_tables.h.
const dynsetDelete = 2
