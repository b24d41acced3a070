package trace

import (
	"encoding/binary"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/internal/model"
)

// clientPort is the port of clients. The rules of firewalls are judged for it, because kernels
// choose such ports by default. It is not known to those rules that translate.
const clientPort = 40000

// maxAnswers is how many backends' answers are followed for one packet.
const maxAnswers = 50

// Fate is what happens to the first packet by which a backend answers.
type Fate struct {
	// RefusedBy is the rule that drops or rejects the answer, or nil. It may also be a proxy's.
	RefusedBy *Rule
	// Refusal is what RefusedBy does: Drop or Reject.
	Refusal Verdict
	// Doubt is a rule before RefusedBy that may have accepted the answer, but cannot be judged. It is
	// nil if there is none.
	Doubt *Rule
	// UntrackedBy is the rule because of which conntrack does not track the answer, so that nothing
	// translates it back, or nil.
	UntrackedBy *Rule
}

// weight is higher the more certain it is that the answer does not reach the client.
func (f Fate) weight() int {
	switch {
	case f.RefusedBy != nil && f.Doubt == nil:
		return 3
	case f.UntrackedBy != nil:
		return 2
	case f.RefusedBy != nil:
		return 1
	}
	return 0
}

// addAnswers follows the first answers of backends, and adds to outcomes what refuses them.
func (r *Rules) addAnswers(p Packet, out []Outcome) error {
	followed := 0
	for i := range out {
		o := &out[i]
		if o.Verdict != Pass || !o.Backend.IsValid() || o.RefusedBy != nil {
			continue
		}
		if followed++; followed > maxAnswers {
			return nil
		}
		var err error
		if o.Answer, err = r.answer(p, o, false); err != nil {
			return err
		}
		if !r.bridges || r.facts.local(o.Backend.Addr()) {
			continue
		}
		bridged, err := r.answer(p, o, true)
		switch {
		case err != nil:
			return err
		case bridged != o.Answer:
			return ErrBridge
		}
	}
	return nil
}

// answer follows the first packet by which a backend answers. Conntrack knows the connection, so no
// chain that translates is asked, and the order of such chains does not matter. It restores the
// destination in the hook prerouting, and the source in the hook postrouting. If bridged is true,
// the answer comes through a port of a bridge. If several things may happen, the one that is worst
// for the client is returned.
func (r *Rules) answer(p Packet, o *Outcome, bridged bool) (worst Fate, err error) {
	x := &run{
		rules: r, bases: r.orders[0], budget: maxSteps, answers: true, bridged: bridged,
		client: netip.AddrPortFrom(p.Source, clientPort),
	}
	x.packet = Packet{Protocol: p.Protocol, Source: o.Backend.Addr(), Destination: x.client, Firewalls: true}
	x.setHeaders()
	x.transport.set(0, binary.BigEndian.AppendUint16(nil, o.Backend.Port()))
	first := state{probability: 1, to: x.client, translated: true, masqueraded: o.Masquerade, ctMark: o.ctMark}
	if own := r.ownAddress(); o.Masquerade && own.IsValid() {
		first.to = netip.AddrPortFrom(own, clientPort)
	}
	in := []state{first}
	isOwn := r.facts.local(x.client.Addr())
	switch {
	case r.facts.local(o.Backend.Addr()):
		x.sent = true
		in = x.hook(unix.NF_INET_POST_ROUTING, x.hook(unix.NF_INET_LOCAL_OUT, in))
		if isOwn {
			x.over, x.sent, x.looped = "lo", false, true
			in = x.hook(unix.NF_INET_LOCAL_IN, x.hook(unix.NF_INET_PRE_ROUTING, in))
		}
	default:
		x.over = r.facts.InterfaceTo(o.Backend.Addr())
		in = x.hook(unix.NF_INET_PRE_ROUTING, in)
		for i := range in {
			in[i].to = x.client
		}
		if isOwn {
			in = x.hook(unix.NF_INET_LOCAL_IN, in)
		} else {
			in = x.hook(unix.NF_INET_POST_ROUTING, x.hook(unix.NF_INET_FORWARD, x.forward(in)))
		}
	}
	if x.budget <= 0 {
		return Fate{}, ErrTooComplex
	}
	for _, s := range append(x.done, in...) {
		var f Fate
		switch {
		case s.refusedBy != nil:
			f.RefusedBy, f.Refusal, f.Doubt = s.refusedBy, s.refusal, s.refusedDoubt
		case s.verdict != Pass && s.path != nil:
			f.RefusedBy, f.Refusal, f.Doubt = s.path.rule, s.verdict, s.doubt
		case o.Scheduler == "": // IPVS translates without conntrack
			f.UntrackedBy = s.untracked
		}
		if f.weight() > worst.weight() {
			worst = f
		}
	}
	return worst, nil
}

// ownAddress returns an address of the node by which it masquerades.
func (r *Rules) ownAddress() netip.Addr {
	at := slices.IndexFunc(r.facts.Addresses, func(a netip.Addr) bool {
		return model.FamilyOf(a) == r.Family && !a.IsLoopback() && !a.IsLinkLocalUnicast()
	})
	if at < 0 {
		return netip.Addr{}
	}
	return r.facts.Addresses[at]
}
