package trace

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/moby/ipvs"
	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	anetlink "github.com/slicecast/slicecast/agent/netlink"
)

// The hooks of IPVS follow net/netfilter/ipvs/ip_vs_core.c. A packet to a virtual service does not
// go on where it is, but begins anew in the hook output, with the address of the backend.
const (
	ipvsInput  = 99
	ipvsOutput = -98
)

// persistent is the flag of virtual services whose clients keep their backends, from
// include/uapi/linux/ip_vs.h.
const persistent = 0x1

// virtualKey identifies a virtual service of IPVS: by a mark that is not 0, or by a frontend.
type virtualKey struct {
	mark uint32
	Frontend
}

// virtualService is a virtual service of IPVS.
type virtualService struct {
	rule     *Rule
	affinity time.Duration
	weights  uint32
	backends []destinationServer
}

type destinationServer struct {
	to     netip.AddrPort
	weight uint32
	// untranslated means that the backend gets packets with the address that they came to, as with
	// direct routing.
	untranslated bool
}

// balancer is the kernel's IPVS.
type balancer struct {
	services map[virtualKey]*virtualService
	// untracked means that conntrack does not know of connections, so none is masqueraded.
	untracked bool
}

// ErrNoIPVS reports that the kernel has no IPVS.
var ErrNoIPVS = errors.New("the kernel has no IPVS")

// readIPVS reads the virtual services of the family.
func (r *Rules) readIPVS() error {
	if _, err := os.Stat("/proc/thread-self/net/ip_vs"); err != nil {
		return ErrNoIPVS // asking for it would load it
	}
	logrus.SetOutput(io.Discard) // the library logs
	h, err := ipvs.New("")
	if err != nil {
		return fmt.Errorf("open a socket for IPVS: %w", err)
	}
	defer h.Close()
	all, err := h.GetServices()
	if err != nil {
		return fmt.Errorf("read the virtual services of IPVS: %w", err)
	}
	b := &balancer{services: map[virtualKey]*virtualService{}}
	if text, err := os.ReadFile("/proc/sys/net/ipv4/vs/conntrack"); err == nil {
		b.untracked = strings.TrimSpace(string(text)) == "0"
	}
	for _, s := range all {
		if s.AddressFamily != uint16(anetlink.Domain(r.Family)) {
			continue
		}
		destinations, err := h.GetDestinations(s)
		if errors.Is(err, unix.ESRCH) {
			continue // it was removed meanwhile
		}
		if err != nil {
			return fmt.Errorf("read the backends of IPVS: %w", err)
		}
		r.addVirtual(b, s, destinations)
	}
	r.balance(b)
	return nil
}

// addVirtual adds a virtual service.
func (r *Rules) addVirtual(b *balancer, s *ipvs.Service, destinations []*ipvs.Destination) {
	v := &virtualService{}
	k := virtualKey{mark: s.FWMark}
	name := fmt.Sprintf("mark 0x%x", s.FWMark)
	if s.FWMark == 0 {
		a, _ := netip.AddrFromSlice(s.Address)
		k.Address, k.Port = a.Unmap(), s.Port
		k.Protocol, _ = protocolOf(byte(s.Protocol))
		name = k.String()
	}
	v.rule = &Rule{
		Table: "IPVS", Chain: "the virtual services", Position: len(b.services) + 1, Text: name,
		scheduler: s.SchedName,
	}
	if s.Flags&persistent != 0 {
		v.affinity = time.Duration(s.Timeout) * time.Second
	}
	for _, d := range destinations {
		a, ok := netip.AddrFromSlice(d.Address)
		if !ok || d.Weight <= 0 {
			continue
		}
		to := netip.AddrPortFrom(a.Unmap(), d.Port)
		v.backends = append(v.backends, destinationServer{to, uint32(d.Weight), d.ConnectionFlags&ipvs.ConnectionFlagFwdMask != ipvs.ConnectionFlagMasq})
		v.weights += uint32(d.Weight)
		if d.UpperThreshold > 0 {
			r.Unjudged = append(r.Unjudged, fmt.Sprintf("%v: no more than %d connections go to %v", v.rule, d.UpperThreshold, to))
		}
	}
	slices.SortFunc(v.backends, func(a, b destinationServer) int { return a.to.Compare(b.to) })
	b.services[k] = v
}

// balance lets packets pass IPVS.
func (r *Rules) balance(b *balancer) {
	r.balancer = b
	for hook, priority := range map[uint32]int32{unix.NF_INET_LOCAL_IN: ipvsInput, unix.NF_INET_LOCAL_OUT: ipvsOutput} {
		r.bases = append(r.bases, &base{
			chain: &chain{table: "IPVS", name: "the virtual services"}, hook: hook, priority: priority, balances: true,
		})
	}
}

// schedule lets IPVS choose a backend for a packet. It reports false if IPVS has no virtual service
// for the packet.
func (x *run) schedule(s state) (out []state, ok bool) {
	b := x.rules.balancer
	v := b.services[virtualKey{mark: s.mark}]
	if s.mark == 0 || v == nil {
		v = b.services[virtualKey{Frontend: Frontend{x.packet.Protocol, s.to.Addr(), s.to.Port()}}]
	}
	if v == nil || s.balanced() {
		return nil, false
	}
	s.path, s.by = &path{v.rule, s.path}, v.rule
	if len(v.backends) == 0 {
		s.verdict = Reject // see ip_vs_leave
		x.done = append(x.done, s)
		return nil, true
	}
	set, client := "ipvs "+v.rule.Text, x.packet.Source.String()
	known, _ := s.memory.find(set, client)
	if !slices.ContainsFunc(v.backends, func(o destinationServer) bool { return o.to.String() == known }) {
		known = "" // the backend gets no new connections
	}
	for _, d := range v.backends {
		if known != "" && known != d.to.String() {
			continue
		}
		if x.budget--; x.budget <= 0 {
			return nil, true
		}
		one := s
		if known == "" {
			one.probability *= float64(d.weight) / float64(v.weights)
		}
		port := cmp.Or(d.to.Port(), s.to.Port())
		one.to, one.translated, one.virtual = netip.AddrPortFrom(d.to.Addr(), port), !d.untranslated, s.to
		if v.affinity > 0 {
			one.memory = one.memory.put(remembered{set: set, key: client, data: d.to.String(), timeout: v.affinity})
		}
		out = append(out, one)
	}
	return out, true
}

// ipset is a set of the kernel that rules of iptables ask.
type ipset struct {
	// fields are the kinds of its fields: ip, net or port. Ports of a bitmap have no protocol.
	fields []string
	bitmap bool
	// exact are the entries without ranges, and others those with ranges.
	exact  map[string]struct{}
	others []ipsetEntry
	// frontends are the entries that are an address and a port, or a port without a protocol.
	frontends []Frontend
}

type ipsetEntry struct {
	addresses [2]netip.Prefix
	protocol  byte
	port      uint16
}

// key returns the key of an entry, or of a packet's fields.
func (s *ipset) key(addresses [2]netip.Addr, protocol byte, port uint16) string {
	b := append(addresses[0].AsSlice(), addresses[1].AsSlice()...)
	if slices.Contains(s.fields, "port") {
		b = binary.BigEndian.AppendUint16(b, port)
		if !s.bitmap {
			b = append(b, protocol)
		}
	}
	return string(b)
}

// readIPSets reads the ipsets that rules ask.
func (r *Rules) readIPSets() error {
	r.ipsets = map[string]*ipset{}
	err := anetlink.IPSetEntries(func(name, kind string, entries []anetlink.IPSetEntry) {
		s := r.ipsets[name]
		if s == nil {
			storage, fields, _ := strings.Cut(kind, ":")
			s = &ipset{fields: strings.Split(fields, ","), bitmap: storage == "bitmap", exact: map[string]struct{}{}}
			r.ipsets[name] = s
		}
		for _, e := range entries {
			s.addFrontend(e)
			if e.First.IsSingleIP() && (!e.Second.IsValid() || e.Second.IsSingleIP()) || !e.First.IsValid() {
				s.exact[s.key([2]netip.Addr{e.First.Addr(), e.Second.Addr()}, e.Protocol, e.Port)] = struct{}{}
			} else {
				s.others = append(s.others, ipsetEntry{[2]netip.Prefix{e.First, e.Second}, e.Protocol, e.Port})
			}
		}
	})
	return err
}

// addFrontend records an entry if it may be a frontend.
func (s *ipset) addFrontend(e anetlink.IPSetEntry) {
	protocol, known := protocolOf(e.Protocol)
	switch isPort := s.bitmap && slices.Equal(s.fields, []string{"port"}); {
	case isPort:
		s.frontends = append(s.frontends, Frontend{Port: e.Port})
	case known && e.First.IsSingleIP() && slices.Equal(s.fields, []string{"ip", "port"}):
		s.frontends = append(s.frontends, Frontend{protocol, e.First.Addr(), e.Port})
	}
}

// has reports whether the set has an entry for these fields.
func (s *ipset) has(addresses [2]netip.Addr, protocol byte, port uint16) bool {
	if _, ok := s.exact[s.key(addresses, protocol, port)]; ok {
		return true
	}
	return slices.ContainsFunc(s.others, func(e ipsetEntry) bool {
		for i, p := range e.addresses {
			if p.IsValid() && !p.Contains(addresses[i]) {
				return false
			}
		}
		return !slices.Contains(s.fields, "port") || e.port == port && (s.bitmap || e.protocol == protocol)
	})
}

// matchSet compiles --match-set: a name, and for each field whether it is of the source or the
// destination.
func (p *ruleParser) matchSet(name, flags string, not bool) error {
	s := p.ipsets[name]
	if s == nil {
		return fmt.Errorf("the ipset %q does not exist", name)
	}
	of := strings.Split(flags, ",")
	if len(of) < len(s.fields) {
		return errOption
	}
	for i, field := range s.fields {
		known := field == "ip" || field == "net" || field == "port" && of[i] == "dst"
		if !known {
			return fmt.Errorf("the ipset %q has a field %q of the %s, which is not known", name, field, of[i])
		}
	}
	if p.chains[p.rule.Chain].proxys && !not && !strings.Contains(flags, "src") {
		for _, f := range s.frontends {
			if !f.Address.IsValid() {
				if f.Protocol = p.frontend.Protocol; f.Protocol == 0 {
					continue // the port of a health check
				}
			}
			p.frontends[f] = "ipset " + name
		}
	}
	p.match(not, func(x *run, st *state) bool {
		var addresses [2]netip.Addr
		at := 0
		for i, field := range s.fields {
			if field == "port" || at == len(addresses) {
				continue
			}
			addresses[at] = st.to.Addr()
			if of[i] == "src" {
				addresses[at] = x.packet.Source
			}
			at++
		}
		return s.has(addresses, protocolNumber(x.packet.Protocol), st.to.Port())
	})
	return nil
}

// virtual compiles the options of the match ipvs: what a packet was for before IPVS chose a backend
// for it. They match no other packets (net/netfilter/xt_ipvs.c).
func (p *ruleParser) virtual(option, text string, not bool) error {
	var is func(x *run, s *state) bool
	switch option {
	case "--vaddr":
		prefix, err := netip.ParsePrefix(text)
		if a, single := netip.ParseAddr(text); single == nil {
			prefix, err = netip.PrefixFrom(a, a.BitLen()), nil
		}
		if err != nil {
			return errOption
		}
		is = func(_ *run, s *state) bool { return prefix.Contains(s.virtual.Addr()) }
	case "--vport":
		port, err := strconv.ParseUint(text, 10, 16)
		if err != nil {
			return errOption
		}
		is = func(_ *run, s *state) bool { return uint64(s.virtual.Port()) == port }
	default:
		number, ok := protocolNumbers[text]
		if !ok {
			return errOption
		}
		is = func(x *run, _ *state) bool { return protocolNumber(x.packet.Protocol) == number }
	}
	p.match(false, func(x *run, s *state) bool { return s.balanced() && is(x, s) != not })
	return nil
}

// addVirtualFrontends records the frontends of virtual services.
func (r *Rules) addVirtualFrontends() {
	for k, v := range r.balancer.services {
		if k.mark == 0 {
			r.frontends[k.Frontend] = v.rule.String()
		}
	}
}
