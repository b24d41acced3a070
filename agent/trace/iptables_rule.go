// This file compiles rules as iptables-save prints them.

package trace

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"math/bits"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/internal/model"
)

// harmlessTargets are the targets that change nothing of what happens to a packet, apart from the
// translation of its source.
var harmlessTargets = []string{
	"MASQUERADE", "SNAT", "LOG", "NFLOG", "TRACE", "AUDIT", "CHECKSUM", "CLASSIFY", "CONNSECMARK", "DSCP", "ECN", "IDLETIMER", "LED", "RATEEST",
	"SECMARK", "TCPMSS", "TOS",
}

// consequenceOf returns what a rule that cannot be judged would do to a packet that it matches.
func (s *saved) consequenceOf(words []string) (c consequence) {
	at := slices.IndexFunc(words, func(w string) bool { return w == "-j" || w == "-g" })
	if at < 0 || at+1 == len(words) {
		return c // it only counts
	}
	target, arguments := words[at+1], words[at+2:]
	switch {
	case s.chains[target] != nil:
		c.chains = []*chain{s.chains[target]}
	case slices.Contains(harmlessTargets, target):
	case target == "RETURN", target == "ACCEPT":
		c.accepts = true
	case target == "DROP":
		c.drops = true
	case target == "REJECT":
		c.rejects = true
	case target == "MARK" || target == "CONNMARK":
		c.marks = ^uint32(0)
		if len(arguments) == 2 && arguments[0] == "--set-xmark" {
			if value, mask, err := valueAndMask(arguments[1]); err == nil {
				c.marks = value | mask
			}
		}
	default:
		c.changes, c.drops, c.rejects = true, true, true
	}
	return c
}

// ruleParser compiles a rule.
type ruleParser struct {
	*saved
	rule  *Rule
	words []string
	// frontend is the destination that the rule matches, as far as it is one.
	frontend Frontend
	// decides means that the rule does something beyond letting a packet pass.
	decides bool
	// target are the steps of the target, which come last.
	target []step
	// recent is what the match recent does, as far as it was read.
	recent recent
	// connmark means that the last match was connmark, whose options are those of mark.
	connmark bool
	// targets is the name of the target.
	targets string
}

var (
	errOption     = errors.New("it is malformed")
	errClientPort = errors.New("the client's port is not known")
	// errOutput leaves the rest of the rule readable.
	errOutput = errors.New("the interface that a packet leaves by is not known")
)

// next removes the first word.
func (p *ruleParser) next() string {
	if len(p.words) == 0 {
		return ""
	}
	w := p.words[0]
	p.words = p.words[1:]
	return w
}

// match adds a match.
func (p *ruleParser) match(not bool, matches func(x *run, s *state) bool) {
	p.rule.steps = append(p.rule.steps, matcher{matches, not})
}

// sourcePort is a match of the source port, which is known of answers only.
type sourcePort struct{ matcher }

// matcher matches if matches returns true, or false if not is set.
type matcher struct {
	matches func(x *run, s *state) bool
	not     bool
}

func (m matcher) do(x *run, s *state) result {
	if m.matches(x, s) != m.not {
		return result{kind: goOn}
	}
	return result{}
}

func (p *ruleParser) parse() error {
	if len(p.words) == 0 {
		return errors.New("iptables prints nothing of it")
	}
	not := false
	var failed error
	for len(p.words) > 0 {
		option := p.next()
		if option == "!" {
			not = true
			continue
		}
		if err := p.option(option, not); err != nil {
			failed = cmp.Or(failed, fmt.Errorf("%s cannot be judged: %w", option, err))
			if !errors.Is(err, errOutput) {
				return failed
			}
		}
		not = false
	}
	if failed != nil {
		return failed
	}
	if p.recent.name != "" || p.recent.op != "" {
		p.rule.steps = append(p.rule.steps, p.recent)
	}
	p.rule.steps = append(p.rule.steps, p.target...)
	return nil
}

// protocolNumbers are the protocols by the names that iptables-save prints, and by the numbers that
// it prints for the match ipvs.
var protocolNumbers = map[string]byte{
	"tcp": unix.IPPROTO_TCP, "udp": unix.IPPROTO_UDP, "sctp": unix.IPPROTO_SCTP, "icmp": 1, "ipv6-icmp": 58,
	"6": unix.IPPROTO_TCP, "17": unix.IPPROTO_UDP, "132": unix.IPPROTO_SCTP,
}

// known are the matches whose options option knows.
var known = []string{
	"tcp", "udp", "sctp", "comment", "conntrack", "state", "set", "mark", "connmark", "addrtype", "statistic", "recent", "nfacct", "multiport",
	"physdev", "ipvs", "rpfilter",
}

// asked are the options that ask for no more than a packet's protocol and destination.
var asked = []string{"-d", "-p", "-m", "--comment", "--nfacct-name", "--dport", "--dports", "--dst-type", "--probability", "--mode", "-j", "-g"}

func (p *ruleParser) option(option string, not bool) error {
	p.rule.asksMore = p.rule.asksMore || len(p.target) == 0 && p.targets == "" && !slices.Contains(asked, option)
	switch option {
	case "-s", "-d":
		return p.address(option, not)
	case "-p":
		number, ok := protocolNumbers[p.next()]
		if !ok {
			return errors.New("the protocol is not known")
		}
		if protocol, ok := protocolOf(number); ok && !not {
			p.frontend.Protocol = protocol
		}
		p.match(not, func(x *run, _ *state) bool { return protocolNumber(x.packet.Protocol) == number })
	case "-i", "-o":
		return p.iface(option, p.next(), not)
	case "-m":
		m := p.next()
		if !slices.Contains(known, m) {
			return fmt.Errorf("the match %q is not known", m)
		}
		p.connmark = m == "connmark"
	case "--comment", "--nfacct-name", "--mask", "--reject-with":
		p.next()
	case "--loose", "--validmark", "--accept-local":
	case "--invert":
		// Packets come from where the routes to their sources lead; see the package comment.
		p.match(false, func(*run, *state) bool { return false })
	case "--reap", "--rsource", "--random-fully", "--random", "--persistent":
	case "--dport", "--dports", "--sport", "--sports":
		return p.ports(option, p.next(), not)
	case "--ctstate", "--state":
		states := strings.Split(p.next(), ",")
		p.match(not, func(x *run, s *state) bool {
			switch x.tracking(s) {
			case invalid:
				return slices.Contains(states, "INVALID")
			case untracked:
				return slices.Contains(states, "UNTRACKED")
			case established:
				return slices.Contains(states, "ESTABLISHED") || slices.Contains(states, "DNAT") || s.masqueraded && slices.Contains(states, "SNAT")
			}
			return slices.Contains(states, "NEW") || s.translated && !s.balanced() && slices.Contains(states, "DNAT") ||
				s.masqueraded && slices.Contains(states, "SNAT")
		})
	case "--match-set":
		name := p.next()
		return p.matchSet(name, p.next(), not)
	case "--mark":
		value, mask, err := valueAndMask(p.next())
		if err != nil {
			return err
		}
		p.rule.asksMark |= mask
		if p.connmark {
			p.match(not, func(x *run, s *state) bool { return x.tracking(s).known() && s.ctMark&mask == value })
			return nil
		}
		p.match(not, func(_ *run, s *state) bool { return s.mark&mask == value })
	case "--src-type", "--dst-type":
		return p.addressType(option, p.next(), not)
	case "--physdev-is-in":
		p.bridges = true
		p.match(not, func(x *run, _ *state) bool { return x.bridged })
	case "--vaddr", "--vport", "--vproto":
		return p.virtual(option, p.next(), not)
	case "--mode":
		if mode := p.next(); mode != "random" {
			return fmt.Errorf("the mode %q is not known", mode)
		}
	case "--probability":
		probability, err := strconv.ParseFloat(p.next(), 64)
		if err != nil || probability < 0 || probability > 1 {
			return errOption
		}
		if not {
			probability = 1 - probability
		}
		p.rule.steps = append(p.rule.steps, chance(probability))
	case "--set", "--rcheck", "--update", "--remove", "--name", "--seconds":
		return p.recentOption(option, not)
	case "-j", "-g":
		return p.targetOption(option)
	case "--set-xmark", "--to-destination", "--to-source", "--to-ports", "--nfmask", "--ctmask":
		return p.targetArgument(option, p.next())
	case "--tcp-flags":
		return p.tcpFlags(p.next(), p.next(), not)
	case "--save-mark", "--restore-mark", "--notrack":
		return p.targetSwitch(option)
	default:
		return errors.New("it is not known")
	}
	return nil
}

// address compiles -s and -d. The mask may have any bits.
func (p *ruleParser) address(option string, not bool) error {
	text, maskText, hasMask := strings.Cut(p.next(), "/")
	a, err := netip.ParseAddr(text)
	if err != nil || model.FamilyOf(a) != p.Family {
		return errOption
	}
	value := a.AsSlice()
	mask := bytes.Repeat([]byte{0xff}, len(value))
	if n, err := strconv.Atoi(maskText); err == nil && hasMask {
		if n < 0 || n > a.BitLen() {
			return errOption
		}
		clear(mask)
		for i := range n {
			mask[i/8] |= 0x80 >> (i % 8)
		}
	} else if m, err := netip.ParseAddr(maskText); err == nil {
		copy(mask, m.AsSlice())
	} else if hasMask {
		return errOption
	}
	exact := true
	for _, b := range mask {
		exact = exact && bits.OnesCount8(b) == 8
	}
	if option == "-d" && exact && !not {
		p.rule.to, p.frontend.Address = a, a
	}
	p.match(not, func(x *run, s *state) bool {
		of := s.to.Addr()
		if option == "-s" {
			of = x.packet.Source
		}
		b := of.As16()
		o := b[16-len(value):]
		for i := range value {
			if o[i]&mask[i] != value[i]&mask[i] {
				return false
			}
		}
		return true
	})
	return nil
}

// iface compiles -i and -o. It is known of the output only whether it is lo.
func (p *ruleParser) iface(option, name string, not bool) error {
	if option == "-o" {
		if name != "lo" {
			return errOutput
		}
		p.match(not, func(x *run, s *state) bool { return x.sent && x.rules.facts.local(s.to.Addr()) })
		return nil
	}
	prefix, wildcard := strings.CutSuffix(name, "+")
	p.match(not, func(x *run, _ *state) bool {
		return x.over == name || wildcard && x.over != "" && strings.HasPrefix(x.over, prefix)
	})
	return nil
}

// ports compiles lists of ports.
func (p *ruleParser) ports(option, text string, not bool) error {
	var ranges [][2]uint64
	for one := range strings.SplitSeq(text, ",") {
		from, to, isRange := strings.Cut(one, ":")
		first, err := strconv.ParseUint(from, 10, 16)
		last := first
		if isRange && err == nil {
			last, err = strconv.ParseUint(to, 10, 16)
		}
		if err != nil {
			return errOption
		}
		ranges = append(ranges, [2]uint64{first, last})
	}
	if strings.HasPrefix(option, "--sport") {
		p.rule.unknownOfClients = option + " cannot be judged: " + errClientPort.Error()
		p.rule.steps = append(p.rule.steps, sourcePort{matcher{func(x *run, _ *state) bool {
			b, _ := x.transport.get(0, 2)
			port := bigEndian(b)
			return slices.ContainsFunc(ranges, func(r [2]uint64) bool { return r[0] <= port && port <= r[1] })
		}, not}})
		return nil
	}
	if len(ranges) == 1 && ranges[0][0] == ranges[0][1] && !not {
		p.frontend.Port = uint16(ranges[0][0])
	}
	p.match(not, func(_ *run, s *state) bool {
		port := uint64(s.to.Port())
		return slices.ContainsFunc(ranges, func(r [2]uint64) bool { return r[0] <= port && port <= r[1] })
	})
	return nil
}

// addressTypes are the types of addresses by the names that iptables prints.
var addressTypes = map[string]uint32{
	"UNICAST": unix.RTN_UNICAST, "LOCAL": unix.RTN_LOCAL, "BROADCAST": unix.RTN_BROADCAST, "MULTICAST": unix.RTN_MULTICAST,
}

func (p *ruleParser) addressType(option, name string, not bool) error {
	var kinds []uint32
	for one := range strings.SplitSeq(name, ",") {
		kind, ok := addressTypes[one]
		if !ok {
			return fmt.Errorf("the type %q is not known", one)
		}
		kinds = append(kinds, kind)
	}
	p.match(not, func(x *run, s *state) bool {
		a := s.to.Addr()
		if option == "--src-type" {
			a = x.packet.Source
		}
		return slices.Contains(kinds, x.rules.facts.kind(a))
	})
	return nil
}

// chance matches with a probability.
type chance float64

func (chance) do(*run, *state) result { return result{kind: branches} }

func (c chance) branch(_ *run, s state, next func(*state, result)) {
	one := s
	if c > 0 {
		one.probability *= float64(c)
		next(&one, result{kind: goOn})
	}
	if c < 1 {
		s.probability *= 1 - float64(c)
		next(&s, result{})
	}
}

// recent is the match recent: it adds a client to a list, or matches the clients of a list.
type recent struct {
	op, name string
	timeout  time.Duration
}

func (r recent) do(x *run, s *state) result {
	set, key := "recent "+r.name, x.packet.Source.String()
	if r.op != "--set" {
		if _, known := s.memory.find(set, key); !known {
			return result{}
		}
	}
	if r.op != "--rcheck" {
		s.memory = s.memory.put(remembered{set: set, key: key, timeout: r.timeout, forgotten: r.op == "--remove"})
	}
	return result{kind: goOn}
}

func (p *ruleParser) recentOption(option string, not bool) error {
	switch option {
	case "--name":
		p.recent.name = p.next()
		p.recent.timeout = p.seconds[p.recent.name]
	case "--seconds":
		p.next()
	default:
		if not || p.recent.op != "" {
			return errors.New("it is used in an unusual way")
		}
		p.recent.op = option
	}
	return nil
}

func valueAndMask(text string) (value, mask uint32, err error) {
	v, m, hasMask := strings.Cut(text, "/")
	n, err := strconv.ParseUint(v, 0, 32)
	if err != nil {
		return 0, 0, errOption
	}
	k := uint64(1<<32 - 1)
	if hasMask {
		if k, err = strconv.ParseUint(m, 0, 32); err != nil {
			return 0, 0, errOption
		}
	}
	return uint32(n), uint32(k), nil
}

func (p *ruleParser) targetOption(option string) error {
	name := p.next()
	p.targets = name
	simple := map[string]resultKind{"ACCEPT": accept, "DROP": drop, "REJECT": reject, "RETURN": leave}
	kind, isSimple := simple[name]
	switch to := p.chains[name]; {
	case to != nil:
		to.reached = true
		p.decides = true
		kind = call
		if option == "-g" {
			kind = jump
		}
		p.target = append(p.target, verdict{result{kind: kind, chain: to}})
	case isSimple:
		p.decides = kind != leave && kind != accept
		p.target = append(p.target, verdict{result{kind: kind}})
	case name == "MASQUERADE":
		p.target = append(p.target, masquerade{})
	case slices.Contains([]string{"MARK", "CONNMARK", "CT", "DNAT", "SNAT"}, name):
		p.decides = name == "DNAT"
	case name == "NOTRACK":
		p.target = append(p.target, notrack{})
	case slices.Contains(harmlessTargets, name):
		p.words = nil // its options change nothing
	default:
		return fmt.Errorf("the target %q is not known", name)
	}
	return nil
}

// targetSwitch compiles an option of a target that has no argument.
func (p *ruleParser) targetSwitch(option string) error {
	switch {
	case option == "--notrack" && p.targets == "CT":
		p.target = append(p.target, notrack{})
	case option != "--notrack" && p.targets == "CONNMARK":
		p.target = append(p.target, &connmark{save: option == "--save-mark", nfMask: ^uint32(0), ctMask: ^uint32(0)})
	default:
		return errOption
	}
	return nil
}

func (p *ruleParser) targetArgument(option, text string) error {
	switch option {
	case "--set-xmark":
		value, mask, err := valueAndMask(text)
		if err != nil {
			return err
		}
		p.target = append(p.target, xmark{value, mask, p.targets == "CONNMARK"})
	case "--nfmask", "--ctmask":
		mask, _, err := valueAndMask(text)
		if err != nil {
			return err
		}
		if len(p.target) == 0 {
			return errOption
		}
		c, ok := p.target[len(p.target)-1].(*connmark)
		switch {
		case !ok:
			return errOption
		case option == "--nfmask":
			c.nfMask = mask
		default:
			c.ctMask = mask
		}
	case "--to-source":
		p.target = append(p.target, masquerade{})
	case "--to-destination":
		if to, err := netip.ParseAddrPort(text); err == nil {
			p.target = append(p.target, destination{to})
			return nil
		}
		a, err := netip.ParseAddr(strings.Trim(text, "[]"))
		if err != nil {
			return errors.New("it translates to a range")
		}
		p.target = append(p.target, destination{netip.AddrPortFrom(a, 0)})
	default:
		return errors.New("it is not known")
	}
	return nil
}

// xmark changes bits of the mark of the packet or of the connection.
type xmark struct {
	value, mask uint32
	connection  bool
}

func (m xmark) do(x *run, s *state) result {
	switch {
	case !m.connection:
		s.mark = s.mark&^m.mask ^ m.value
	case x.tracking(s).known():
		s.ctMark = s.ctMark&^m.mask ^ m.value
	}
	return result{kind: goOn}
}

// connmark copies bits between the marks of the packet and of the connection.
type connmark struct {
	save           bool
	nfMask, ctMask uint32
}

func (m *connmark) do(x *run, s *state) result {
	switch {
	case !x.tracking(s).known():
	case m.save:
		s.ctMark = s.ctMark&^m.ctMask ^ s.mark&m.nfMask
	default:
		s.mark = s.mark&^m.nfMask ^ s.ctMark&m.ctMask
	}
	return result{kind: goOn}
}

// notrack keeps conntrack from tracking the packet, unless it does already.
type notrack struct{}

func (notrack) do(x *run, s *state) result {
	if x.tracking(s) == invalid {
		s.untracked = x.current
	}
	return result{kind: goOn}
}

// tcpFlags compiles --tcp-flags: exactly the flags of set must be there among those of mask. The
// first packet of a connection has SYN.
func (p *ruleParser) tcpFlags(mask, set string, not bool) error {
	asks := func(flag string) bool { return mask == "ALL" || slices.Contains(strings.Split(mask, ","), flag) }
	sets := func(flag string) bool { return set == "ALL" || slices.Contains(strings.Split(set, ","), flag) }
	others := slices.ContainsFunc([]string{"FIN", "RST", "PSH", "URG"}, sets)
	p.match(not, func(x *run, _ *state) bool {
		return x.packet.Protocol == model.TCP && !others && asks("SYN") == sets("SYN") && (asks("ACK") && x.answers) == sets("ACK")
	})
	return nil
}

// destination translates to an address and, unless it is 0, a port.
type destination struct{ to netip.AddrPort }

func (d destination) do(_ *run, s *state) result {
	to := d.to
	if to.Port() == 0 {
		to = netip.AddrPortFrom(to.Addr(), s.to.Port())
	}
	s.to, s.translated = to, true
	return result{kind: accept}
}
