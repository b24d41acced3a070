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
		if err := r.answer(p, o); err != nil {
			return err
		}
	}
	return nil
}

// answer follows the first packet by which a backend answers. Conntrack knows the connection, so no
// chain that translates is asked. It restores the destination in the hook prerouting, and the
// source in the hook postrouting.
func (r *Rules) answer(p Packet, o *Outcome) error {
	x := &run{rules: r, bases: r.orders[0], budget: maxSteps, answers: true, client: netip.AddrPortFrom(p.Source, clientPort)}
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
		if x.over = "outside"; p.AnswersOver != nil {
			x.over = p.AnswersOver(o.Backend.Addr())
		}
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
		return ErrTooComplex
	}
	for _, s := range append(x.done, in...) {
		switch {
		case s.refusedBy != nil:
			o.AnswerRefusedBy, o.AnswerRefusal, o.AnswerDoubt = s.refusedBy, s.refusal, s.refusedDoubt
		case s.verdict != Pass && s.path != nil:
			o.AnswerRefusedBy, o.AnswerRefusal, o.AnswerDoubt = s.path.rule, s.verdict, s.doubt
		case s.untracked != nil && o.Scheduling.Scheduler == "": // IPVS translates without conntrack
			o.AnswerUntrackedBy = s.untracked
		}
	}
	return nil
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
