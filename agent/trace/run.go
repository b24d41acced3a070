package trace

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/internal/model"
)

const (
	// maxSteps is how many steps a packet may take, over all branches. A Service port with 10,000
	// backends needs about a million.
	maxSteps = 1 << 25
	// maxStates is how many branches a packet may end in. A set has at most 262,144 backends.
	maxStates = 1 << 19
	// maxDepth is how deep chains may call each other. The kernel allows 16 in nf_tables.
	maxDepth = 64
	// registers is the size of nf_tables' registers in bytes.
	registers = 80
)

// state is a packet on its way, in one of the branches.
type state struct {
	probability float64
	mark        uint32
	ctMark      uint32
	to          netip.AddrPort
	translated  bool
	masqueraded bool
	verdict     Verdict
	memory      Memory
	path        *path
	// by is the rule that has translated the destination.
	by *Rule
	// virtual is what the packet was for when IPVS chose the backend. It is not valid if IPVS did
	// not. Conntrack does not take that for a translation.
	virtual netip.AddrPort
	// doubt is a rule of a firewall that may have accepted the packet in the base chain that it
	// passes, but cannot be judged.
	doubt *Rule
	// masqueradedBy is the rule that has translated the source.
	masqueradedBy *Rule
	// untracked is the rule that keeps conntrack from tracking the packet, or nil.
	untracked *Rule
	// refusedBy is the first rule of a firewall that refuses the packet, if that is asked for.
	refusedBy *Rule
	// refusal is what refusedBy does.
	refusal Verdict
	// refusedDoubt is doubt when the packet was refused.
	refusedDoubt *Rule
}

// balanced reports whether IPVS has chosen the backend.
func (s *state) balanced() bool { return s.virtual.IsValid() }

// like reports whether two states will have the same future.
func (s *state) like(o *state) bool {
	return s.mark == o.mark && s.ctMark == o.ctMark && s.to == o.to && s.translated == o.translated &&
		s.masqueradedBy == o.masqueradedBy && s.untracked == o.untracked && s.refusedBy == o.refusedBy && s.memory == o.memory
}

// tracking is what conntrack has done with a packet.
type tracking uint8

const (
	tracked tracking = iota
	// untracked means that a rule has kept it from tracking the packet.
	untracked
	// invalid means that the packet has not come to it yet.
	invalid
	// established means that the packet is an answer.
	established
)

// tracking returns what conntrack has done with the packet when it comes to a chain.
func (x *run) tracking(s *state) tracking {
	switch {
	case s.untracked != nil:
		return untracked
	case x.early && !x.looped && !s.balanced():
		return invalid
	case x.answers:
		return established
	}
	return tracked
}

// known reports whether conntrack knows the packet's connection.
func (t tracking) known() bool { return t == tracked || t == established }

// priorityConntrack is NF_IP_PRI_CONNTRACK: where conntrack comes to know of a packet.
const priorityConntrack = -200

// beforeConntrack reports whether packets pass the chain before conntrack comes to know of them.
func (b *base) beforeConntrack() bool {
	return b.priority < priorityConntrack && (b.hook == unix.NF_INET_PRE_ROUTING || b.hook == unix.NF_INET_LOCAL_OUT)
}

// path is a list of rules, last one first.
type path struct {
	rule   *Rule
	before *path
}

func (p *path) list() (rules []*Rule) {
	for ; p != nil; p = p.before {
		rules = append(rules, p.rule)
	}
	slices.Reverse(rules)
	return rules
}

// Memory is what the kernel remembers of clients, newest first. The zero Memory is empty.
type Memory struct{ last *remembered }

type remembered struct {
	set, key, data string
	timeout        time.Duration
	forgotten      bool
	before         *remembered
}

func (m Memory) find(set, key string) (data string, ok bool) {
	for r := m.last; r != nil; r = r.before {
		if r.set == set && r.key == key {
			return r.data, !r.forgotten
		}
	}
	return "", false
}

// put returns the Memory with one more element.
func (m Memory) put(r remembered) Memory {
	r.before = m.last
	return Memory{&r}
}

// since returns the timeout of what was remembered last since an earlier Memory.
func (m Memory) since(earlier Memory) time.Duration {
	for r := m.last; r != nil && r != earlier.last; r = r.before {
		if !r.forgotten {
			return r.timeout
		}
	}
	return 0
}

// step is a part of a rule: something that changes the state, a match, or a verdict.
type step interface {
	// do carries out the step on a branch.
	do(x *run, s *state) result
}

// choice is a step that returns branches.
type choice interface {
	step
	// branch calls next for each branch, with how the step ends there.
	branch(x *run, s state, next func(*state, result))
}

// result is how a step or a rule ends.
type result struct {
	kind  resultKind
	chain *chain
}

type resultKind uint8

const (
	miss resultKind = iota // the rule does not match
	goOn                   // with the rule, and after its last step with the next rule
	accept
	drop
	reject
	leave // the chain
	call
	jump
	branches
)

// run follows a packet.
type run struct {
	rules  *Rules
	packet Packet
	bases  []*base
	budget int
	depth  int
	hooked uint32
	// over is the interface over which the packet has come to the hook, and sent means that the
	// node sends it.
	over string
	sent bool
	// bridged means that the packet has come to the node through a port of a bridge.
	bridged bool
	// looped means that the packet comes to the node for the second time, over lo.
	looped bool
	// firewall means that the chain belongs to a base with that field, and early that the base comes
	// before conntrack.
	firewall, early bool
	// answers means that the packet is a backend's answer to client.
	answers bool
	client  netip.AddrPort
	// current is the rule that is carried out.
	current *Rule
	done    []state
	// stolen are the packets for which IPVS has chosen backends.
	stolen []state

	network, transport headers
	// destination is what the headers have.
	destination netip.AddrPort

	// A rule reads only registers that it has written, so those of a branch go no further. scratch is
	// for a value on its way to registers.
	regs    [registers]byte
	scratch [unix.IFNAMSIZ]byte
	// branch is the branch with which a rule begins. results are what rules do, of which missed is the
	// index of the current rule's last one that does not match, or -1.
	branch  state
	results []ruleResult
	missed  int
	// accepted are the states that a base chain accepts, and frames what chains work with, by depth.
	// Both are used again.
	accepted []state
	frames   []*frame
}

// frame is what the evaluation of a chain works with. ended stays until the next chain of the same
// depth.
type frame struct {
	current, ended []state
	results        []ruleResult
}

// headers are the bytes of a header and which of them are known.
type headers struct {
	bytes [40]byte
	known [40]bool
}

func (h *headers) set(offset int, b []byte) {
	copy(h.bytes[offset:], b)
	for i := range b {
		h.known[offset+i] = true
	}
}

func (h *headers) get(offset, length uint32) ([]byte, bool) {
	if offset > 40 || length > 40 || offset+length > 40 {
		return nil, false
	}
	for _, known := range h.known[offset : offset+length] {
		if !known {
			return nil, false
		}
	}
	return h.bytes[offset : offset+length], true
}

func protocolNumber(p model.Protocol) byte {
	switch p {
	case model.UDP:
		return unix.IPPROTO_UDP
	case model.SCTP:
		return unix.IPPROTO_SCTP
	}
	return unix.IPPROTO_TCP
}

// setHeaders writes what is known of the packet's headers, except for the destination.
func (x *run) setHeaders() {
	x.transport.set(0, binary.BigEndian.AppendUint16(nil, clientPort))
	protocol := []byte{protocolNumber(x.packet.Protocol)}
	if x.packet.Family() == model.IPv4 {
		x.network.set(9, protocol)
		x.network.set(12, x.packet.Source.AsSlice())
	} else {
		x.network.set(6, protocol)
		x.network.set(8, x.packet.Source.AsSlice())
	}
}

// setDestination writes the destination of a state into the headers.
func (x *run) setDestination(s *state) {
	if s.to == x.destination {
		return
	}
	x.destination = s.to
	offset := 16
	if x.packet.Family() == model.IPv6 {
		offset = 24
	}
	x.network.set(offset, s.to.Addr().AsSlice())
	x.transport.set(2, binary.BigEndian.AppendUint16(nil, s.to.Port()))
}

// hook lets packets pass the base chains of a hook. It returns those that go on, if possible in the
// same array.
func (x *run) hook(hook uint32, in []state) []state {
	x.hooked = hook
	for _, b := range x.bases {
		if b.hook != hook || b.firewall && !x.packet.Firewalls && !b.alters {
			continue
		}
		if x.answers {
			if b.nat || b.balances {
				continue // they are asked for the first packet of a connection only
			}
			for i := range in {
				if hook == unix.NF_INET_PRE_ROUTING && b.priority > -100 {
					in[i].to = x.client // conntrack has restored it
				}
			}
		}
		out, own := in[:0], false
		for i, s := range in {
			if b.balances {
				if chosen, ok := x.schedule(s); ok {
					x.stolen = append(x.stolen, chosen...)
				} else {
					out = append(out, s)
				}
				continue
			}
			// The kernel translates a connection once in each direction, if conntrack tracks it.
			if b.nat && (s.untracked != nil || s.balanced() && x.rules.balancer.untracked || x.looped || s.masqueraded || s.translated && hook != unix.NF_INET_POST_ROUTING) {
				out = append(out, s)
				continue
			}
			accepted := x.base(b, s)
			if len(out)+len(accepted) > i+1 && !own {
				out, own = slices.Clip(out), true // the rest of in is still to come
			}
			out = append(out, accepted...)
		}
		in = out
	}
	return in
}

// base lets a packet pass a base chain. It returns the branches that go on to the next one, which
// stay until the next call.
func (x *run) base(b *base, s state) []state {
	x.accepted = x.accepted[:0]
	x.firewall, x.early = b.firewall, b.beforeConntrack()
	ended := x.chain(b.chain, s)
	x.firewall = false
	for i := range ended {
		switch {
		case b.policy != nil:
			x.refuse(&ended[i], b.policy, Drop)
			x.accepted = append(x.accepted, ended[i])
		case b.drops:
			ended[i].verdict = Drop
			x.done = append(x.done, ended[i])
		default:
			x.accepted = append(x.accepted, ended[i])
		}
	}
	for i := range x.accepted {
		x.accepted[i].doubt = nil // an accept ends this base chain only
	}
	return x.accepted
}

// forward returns the states that the kernel forwards.
func (x *run) forward(all []state) []state {
	if len(all) == 0 || !x.packet.Firewalls {
		return all
	}
	f := &x.rules.forwarding
	switch {
	case f.none != nil:
		for i := range all {
			x.refuse(&all[i], f.none, Drop)
		}
	case f.some != nil:
		x.rules.unjudged[f.some] = struct{}{}
	}
	return all
}

// refuse notes that a rule of a firewall refuses a packet.
func (x *run) refuse(s *state, by *Rule, as Verdict) {
	if x.packet.Firewalls && s.refusedBy == nil {
		s.refusedBy, s.refusal, s.refusedDoubt = by, as, s.doubt
	}
}

// ruleResult is what a rule does with a branch.
type ruleResult struct {
	result
	state state
	// accepted is the index in run.accepted, if the rule accepts the branch.
	accepted int
}

// chain lets a packet pass a chain. It returns the branches that come to its end or leave it. Those
// that are accepted are added to x.accepted.
func (x *run) chain(c *chain, s state) []state {
	if x.depth++; x.depth > maxDepth {
		x.budget = 0
	}
	defer func() { x.depth-- }()
	for len(x.frames) < x.depth {
		x.frames = append(x.frames, &frame{})
	}
	f := x.frames[x.depth-1]
	f.current, f.ended, f.results = append(f.current[:0], s), f.ended[:0], f.results[:0]
	for r := range c.candidates(s.to.Addr()) {
		if len(f.current) == 0 || x.budget <= 0 {
			break
		}
		// A rule that does the same as the one before, with the same packet, has the same results.
		again, factor := r.same && len(f.current) == 1 && len(f.results) > 0 && f.current[0].like(&s), 1.0
		if again {
			factor = f.current[0].probability / s.probability
		} else {
			f.results = f.results[:0]
			for i := range f.current {
				f.results = x.rule(r, &f.current[i], f.results)
			}
			s = f.current[0]
		}
		f.current = f.current[:0]
		for i := range f.results {
			one := &f.results[i]
			s := one.state
			s.probability *= factor
			switch {
			case one.kind != accept:
				x.apply(c, r, f, one.result, s)
			case again:
				x.accepted[one.accepted].probability += s.probability
				r.matched = true
			default:
				one.accepted = len(x.accepted)
				x.apply(c, r, f, one.result, s)
			}
		}
	}
	f.ended = x.join(f.ended, f.current...)
	return f.ended
}

// apply does with a branch what a rule of a chain says.
func (x *run) apply(c *chain, r *Rule, f *frame, one result, s state) {
	if one.kind != miss {
		r.matched = true
		s.path = &path{r, s.path}
	}
	switch one.kind {
	case miss, goOn:
		f.current = x.join(f.current, s)
	case accept:
		if s.translated && s.by == nil {
			s.by = r
		}
		if x.accepted = append(x.accepted, s); len(x.accepted) > maxStates {
			x.budget = 0
		}
	case drop, reject:
		refusal := Drop
		if one.kind == reject {
			refusal = Reject
		}
		if c.firewalls || x.firewall {
			x.refuse(&s, r, refusal)
			f.current = x.join(f.current, s)
			return
		}
		s.verdict = refusal
		x.done = append(x.done, s)
	case leave:
		f.ended = x.join(f.ended, s)
	case call:
		f.current = x.join(f.current, x.chain(one.chain, s)...)
	case jump:
		f.ended = x.join(f.ended, x.chain(one.chain, s)...)
	}
}

// join adds states to others, merging those with the same future.
func (x *run) join(to []state, others ...state) []state {
	for i := range others {
		if x.budget -= len(to); x.budget <= 0 {
			return to
		}
		o := &others[i]
		at := slices.IndexFunc(to, func(s state) bool { return s.like(o) })
		if at >= 0 {
			to[at].probability += o.probability
			continue
		}
		to = append(to, *o)
	}
	return to
}

// rule carries out a rule for one branch. It adds to results.
func (x *run) rule(r *Rule, s *state, results []ruleResult) []ruleResult {
	x.setDestination(s)
	x.current, x.branch, x.results, x.missed = r, *s, results, -1
	if r.unknown != "" || r.unknownOfClients != "" && !x.answers && !r.firewalls && !x.firewall {
		one := ruleResult{state: *s}
		x.follow(r.certain, &x.branch)
		if slices.ContainsFunc(x.results[len(results):], func(o ruleResult) bool { return o.kind == goOn }) {
			x.cannotJudge(r, &one.state)
		}
		return append(results, one)
	}
	r.visited = true
	x.follow(r.steps, &x.branch)
	return x.results
}

// follow carries out a rule's steps for one branch. It adds to x.results.
func (x *run) follow(steps []step, s *state) {
	for i, one := range steps {
		if x.budget--; x.budget <= 0 {
			return
		}
		switch end := one.do(x, s); end.kind {
		case goOn:
		case branches:
			one.(choice).branch(x, *s, func(next *state, end result) {
				if end.kind == goOn {
					x.follow(steps[i+1:], next)
				} else {
					x.end(next, end)
				}
			})
			return
		default:
			x.end(s, end)
			return
		}
	}
	x.end(s, result{kind: goOn})
}

// end adds the end of a branch to x.results.
func (x *run) end(s *state, end result) {
	if end.kind == miss {
		if x.missed >= 0 && x.results[x.missed].state.like(s) {
			x.results[x.missed].state.probability += s.probability
			return
		}
		x.missed = len(x.results)
	}
	if x.results = append(x.results, ruleResult{result: end, state: *s}); len(x.results) > maxStates {
		x.budget = 0
	}
}

// cannotJudge records that a packet may match a rule that cannot be judged.
func (x *run) cannotJudge(r *Rule, s *state) {
	may := r.consequence
	isFirewall := r.firewalls || x.firewall
	if isFirewall && (may.accepts || may.marks != 0 || may.changes) {
		s.doubt = r
	}
	isHarmless := !may.accepts && !may.refuses() && !may.changes && may.marks == 0
	if r.alters || x.packet.Firewalls && r.decides || !isFirewall && !isHarmless {
		x.rules.unjudged[r] = struct{}{}
	}
}

// minIndexed is the number of rules from which a chain has an index.
const minIndexed = 32

// index finds the rules of a long chain that may match a packet.
type index struct {
	always []int
	to     map[netip.Addr][]int
}

func newIndex(rules []*Rule) *index {
	if len(rules) < minIndexed {
		return nil
	}
	x := &index{to: map[netip.Addr][]int{}}
	for i, r := range rules {
		if r.to.IsValid() {
			x.to[r.to] = append(x.to[r.to], i)
		} else {
			x.always = append(x.always, i)
		}
	}
	return x
}

// candidates yields the rules that may match a packet to an address, in their order.
func (c *chain) candidates(to netip.Addr) func(yield func(*Rule) bool) {
	return func(yield func(*Rule) bool) {
		if c.index == nil {
			for _, r := range c.rules {
				if !yield(r) {
					return
				}
			}
			return
		}
		a, b := c.index.always, c.index.to[to]
		for len(a) > 0 || len(b) > 0 {
			var at int
			if len(b) == 0 || len(a) > 0 && a[0] < b[0] {
				at, a = a[0], a[1:]
			} else {
				at, b = b[0], b[1:]
			}
			if !yield(c.rules[at]) {
				return
			}
		}
	}
}
