package trace

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/netlink"
	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/agent/programmer/iptables"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/xtables"
)

// The matches and targets follow iptables-extensions(8).

// kubeProxyChain matches the names of kube-proxy's chains, 1.32 to 1.37. Its canary is left out,
// because nothing leads to it.
var kubeProxyChain = regexp.MustCompile(`^(KUBE-(SERVICES|EXTERNAL-SERVICES|NODEPORTS|POSTROUTING|MARK-MASQ|FORWARD|` +
	`PROXY-FIREWALL|NODE-PORT|LOAD-BALANCER|SOURCE-RANGES-FIREWALL|IPVS-FILTER|IPVS-OUT-FILTER|(SVC|SVL|EXT|FW|SEP)-[A-Z2-7]{16}))$`)

// iptablesHooks are the kernel's base chains.
var iptablesHooks = map[string]uint32{
	"PREROUTING": unix.NF_INET_PRE_ROUTING, "INPUT": unix.NF_INET_LOCAL_IN, "FORWARD": unix.NF_INET_FORWARD,
	"OUTPUT": unix.NF_INET_LOCAL_OUT, "POSTROUTING": unix.NF_INET_POST_ROUTING,
}

var iptablesTables = []string{"raw", "mangle", "nat", "filter", "security"}

// isIPTables reports whether iptables' variant for nf_tables has made a table.
func isIPTables(h *nft.Held) bool {
	if !slices.Contains(iptablesTables, h.Name) {
		return false
	}
	for name := range h.Chains {
		if _, standard := iptablesHooks[name]; standard {
			return true
		}
	}
	return false
}

// maxSaved bounds what iptables-save may print, in bytes. 100,000 Services take about 150 MB.
const maxSaved = 1 << 29

// program returns the name of a program of iptables.
func (r *Rules) program(variant, what string) string {
	if r.Family == model.IPv6 {
		return "ip6tables-" + variant + what
	}
	return "iptables-" + variant + what
}

// output returns what a program of iptables prints, also if it fails.
func output(ctx context.Context, stdin, name string, args ...string) (string, error) {
	command := exec.CommandContext(ctx, name, args...)
	command.Stdin = strings.NewReader(stdin)
	var stdout, stderr limited
	command.Stdout, command.Stderr = &stdout, &stderr
	if err := command.Run(); err != nil {
		return stdout.String(), fmt.Errorf("%s: %w: %s", name, err, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}

// readLegacy adds the rules of the legacy variant of iptables, as its program for saving prints
// them.
func (r *Rules) readLegacy(ctx context.Context) error {
	name, exists := r.program("legacy", "-save"), ""
	for _, table := range iptablesTables {
		has, err := xtables.HasLegacy(r.Family, table)
		if err != nil {
			return err
		}
		if has {
			exists = table
		}
	}
	if exists == "" {
		return nil
	}
	if _, err := exec.LookPath(name); err != nil {
		r.Unjudged = append(r.Unjudged, "the kernel has table "+exists+" of iptables' legacy interface, but there is no program "+
			name+" to read it with: install iptables")
		return nil //nolint:nilerr // it is reported as unjudged
	}
	text, err := output(ctx, "", name)
	if err != nil {
		return err
	}
	if err := r.needIPSets(text); err != nil {
		return err
	}
	r.addSaved(text, "legacy", nil)
	return nil
}

// readNFT adds the rules in tables that iptables' variant for nf_tables has made, as its programs
// print them. Of a table with rules that they do not know, they print chains without such rules,
// and the others are read like all tables of nf_tables.
func (r *Rules) readNFT(ctx context.Context, tables []*nft.Held) error {
	if len(tables) == 0 {
		return nil
	}
	name := r.program("nft", "-save")
	if _, err := exec.LookPath(name); err != nil {
		r.Unjudged = append(r.Unjudged, "there are rules of iptables in nf_tables, but no program "+name+" to read them with: "+
			"install iptables")
		return nil //nolint:nilerr // it is reported as unjudged
	}
	text, err := output(ctx, "", name)
	if err == nil && !strings.Contains(text, "' is incompatible") {
		if err = r.needIPSets(text); err == nil {
			r.addSaved(text, "nft", nil)
		}
		return err
	}
	for _, h := range tables {
		var unprinted *nft.Held
		text, err := output(ctx, "", name, "-t", h.Name)
		if err != nil || !strings.Contains(text, "*"+h.Name+"\n") {
			unprinted = h
			text, err = r.listChains(ctx, h)
		}
		if err == nil {
			err = r.needIPSets(text)
		}
		if err != nil {
			return err
		}
		r.addSaved(text, "nft", unprinted)
	}
	return nil
}

// needIPSets reads the sets of ipset if rules of iptables ask them.
func (r *Rules) needIPSets(text string) error {
	if r.ipsets != nil || !strings.Contains(text, " --match-set ") {
		return nil
	}
	return r.readIPSets()
}

// ofIPTables are the expressions of which iptables makes rules, and which it prints.
var ofIPTables = []string{"counter", "match", "target", "immediate", "payload", "cmp", "bitwise", "meta"}

// isNative reports whether iptables does not know a rule, or changes it when it prints it.
func isNative(h nft.HeldRule) bool {
	for _, e := range netlink.Attributes(h.Expressions) {
		name := netlink.Text(netlink.Attribute(e, unix.NFTA_EXPR_NAME))
		sets := name == "meta" && netlink.Attribute(netlink.Attribute(e, unix.NFTA_EXPR_DATA), unix.NFTA_META_SREG) != nil
		if sets || !slices.Contains(ofIPTables, name) {
			return true
		}
	}
	return false
}

// listChains returns the rules of a table in the form in which iptables-save prints them. What
// iptables does not print is a rule "--native" with its index.
func (r *Rules) listChains(ctx context.Context, h *nft.Held) (string, error) {
	var head, rules, list strings.Builder
	for _, name := range slices.Sorted(maps.Keys(h.Chains)) {
		policy := "-"
		if hook := h.Chains[name].Hook; hook.Kind != "" {
			policy = "ACCEPT"
			if hook.Drops {
				policy = "DROP"
			}
		}
		fmt.Fprintf(&head, ":%s %s [0:0]\n", name, policy)
		held := h.Chains[name].Rules
		if !slices.ContainsFunc(held, isNative) {
			fmt.Fprintf(&list, "-S %s\n", name)
			continue
		}
		// If the program fails, it has printed the rules before the one that it does not know.
		text, err := output(ctx, "", r.program("nft", ""), "-t", h.Name, "-S", name)
		if err != nil && ctx.Err() != nil {
			return "", err
		}
		var lines []string
		for line := range strings.Lines(text) {
			if strings.HasPrefix(line, "-A ") {
				lines = append(lines, line)
			}
		}
		for i, rule := range held {
			if i < len(lines) && !isNative(rule) {
				rules.WriteString(lines[i])
			} else {
				fmt.Fprintf(&rules, "-A %s --native %d\n", name, i)
			}
		}
	}
	if list.Len() > 0 {
		text, err := output(ctx, "*"+h.Name+"\n"+list.String()+"COMMIT\n", r.program("nft", "-restore"), "--noflush")
		if err != nil {
			return "", err
		}
		rules.WriteString(text)
	}
	return "*" + h.Name + "\n" + head.String() + rules.String() + "COMMIT\n", nil
}

// limited is a buffer with a bound.
type limited struct{ bytes.Buffer }

// Write implements io.Writer.
func (l *limited) Write(p []byte) (int, error) {
	if l.Len()+len(p) > maxSaved {
		return 0, fmt.Errorf("it prints more than %d bytes", maxSaved)
	}
	return l.Buffer.Write(p)
}

// saved is a table of iptables while it is compiled.
type saved struct {
	*Rules
	name   string
	table  string
	nat    bool
	chains map[string]*chain
	// seconds are how long the lists of clients count, by their names.
	seconds map[string]time.Duration
	// held has the rules that iptables does not print, or is nil. native compiles them.
	held   *nft.Held
	native *table
}

// addSaved compiles what iptables-save prints. held has the rules that it does not print, or is
// nil.
func (r *Rules) addSaved(text, variant string, held *nft.Held) {
	var s *saved
	var lines [][]string
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(line, "*"):
			name := line[1:]
			family := "iptables"
			if r.Family == model.IPv6 {
				family = "ip6tables"
			}
			s = &saved{
				Rules: r, name: fmt.Sprintf("table %s of %s-%s", name, family, variant), table: name, nat: name == "nat",
				chains: map[string]*chain{}, seconds: map[string]time.Duration{}, held: held,
			}
			lines = nil
		case s == nil:
		case strings.HasPrefix(line, ":"):
			name, rest, _ := strings.Cut(line[1:], " ")
			c := &chain{table: s.name, name: name, slicecasts: strings.HasPrefix(name, iptables.ChainPrefix)}
			c.proxys = c.slicecasts || kubeProxyChain.MatchString(name)
			c.firewalls = !s.nat && !c.proxys
			r.KubeProxyIPTables = r.KubeProxyIPTables || name == "KUBE-SERVICES" && !r.facts.IPVS
			r.kubeProxys = r.kubeProxys || name == "KUBE-SERVICES"
			if name == iptables.ServicesChain {
				r.slicecasts, r.otherProgrammers = true, true
				r.IPTables = append(r.IPTables, variant)
			}
			s.chains[name] = c
			r.chains = append(r.chains, c)
			s.addBase(c, strings.HasPrefix(rest, "DROP"))
		case strings.HasPrefix(line, "-A "):
			words := split(line)
			s.noteSeconds(words)
			lines = append(lines, words)
		case line == "COMMIT":
			for _, words := range lines {
				s.addRule(words)
			}
			s = nil
		}
	}
}

// iptablesPriorities are the priorities of the base chains of tables. Those of nat depend on the
// hook, too.
var iptablesPriorities = map[string]int32{"raw": -300, "mangle": -150, "filter": 0, "security": 50}

// addBase adds a base chain.
func (s *saved) addBase(c *chain, drops bool) {
	hook, isBase := iptablesHooks[c.name]
	priority, isKnown := iptablesPriorities[s.table]
	if !isBase || !isKnown && !s.nat {
		return
	}
	// Chains of proxies refuse packets in the table filter, so all packets pass it.
	b := &base{chain: c, hook: hook, nat: s.nat, priority: priority, firewall: !s.nat && s.table != "filter"}
	switch {
	case s.nat && (hook == unix.NF_INET_POST_ROUTING || hook == unix.NF_INET_LOCAL_IN):
		b.priority = 100
	case s.nat:
		b.priority = -100
	}
	c.drops = drops && s.nat // the policy of filter belongs to a firewall
	if drops && !s.nat {
		c.policy = policyOf(c)
	}
	s.bases = append(s.bases, b)
}

// split returns the words of a rule, without the quotes.
func split(line string) (words []string) {
	var word strings.Builder
	inQuotes, inWord := false, false
	for i := 0; i < len(line); i++ {
		switch c := line[i]; {
		case c == '\\' && inQuotes && i+1 < len(line):
			i++
			word.WriteByte(line[i])
		case c == '"':
			inQuotes, inWord = !inQuotes, true
		case c == ' ' && !inQuotes:
			if inWord {
				words = append(words, word.String())
			}
			word.Reset()
			inWord = false
		default:
			word.WriteByte(c)
			inWord = true
		}
	}
	if inWord {
		words = append(words, word.String())
	}
	return words
}

// noteSeconds records how long a list of clients counts.
func (s *saved) noteSeconds(words []string) {
	name, seconds, checks := "", 0, false
	for i, w := range words[:len(words)-1] {
		switch w {
		case "--name":
			name = words[i+1]
		case "--seconds":
			seconds, _ = strconv.Atoi(words[i+1])
		case "--rcheck", "--update":
			checks = true
		}
	}
	if d := time.Duration(seconds) * time.Second; checks && d > 0 && (s.seconds[name] == 0 || d < s.seconds[name]) {
		s.seconds[name] = d
	}
}

// addRule compiles a rule: -A, a chain, and options with their arguments.
func (s *saved) addRule(words []string) {
	if len(words) < 2 {
		return
	}
	c := s.chains[words[1]]
	if c == nil {
		return
	}
	if s.held != nil && len(words) == 4 && words[2] == "--native" {
		s.addNative(c, words[3])
		return
	}
	r := &Rule{Table: s.name, Chain: c.name, Position: len(c.rules) + 1, Text: strings.Join(words[2:], " ")}
	p := &ruleParser{saved: s, rule: r, words: words[2:]}
	err := p.parse()
	if err != nil || r.unknownOfClients != "" {
		r.certain = slices.DeleteFunc(slices.Clone(r.steps), func(s step) bool { _, isMatch := s.(matcher); return !isMatch })
		r.consequence = s.consequenceOf(words)
	}
	if err != nil {
		r.unknown, r.steps = err.Error(), nil
	}
	c.rules = append(c.rules, r)
	if p.frontend.Port > 0 && c.proxys && !c.slicecasts && r.why() == "" && p.decides {
		s.frontends[p.frontend] = r.String()
	}
}

// addNative compiles the rule of a chain with this index as one of nf_tables.
func (s *saved) addNative(c *chain, index string) {
	i, err := strconv.Atoi(index)
	held := s.held.Chains[c.name]
	if err != nil || held == nil || i < 0 || i >= len(held.Rules) {
		return
	}
	if s.native == nil {
		s.native = &table{Rules: s.Rules, name: s.name, chains: s.chains, sets: map[string]*set{}}
		for name, one := range s.held.Sets {
			s.native.sets[name] = s.native.compileSet(name, one)
		}
	}
	c.rules = append(c.rules, s.native.compileRule(c, len(c.rules)+1, held.Rules[i]))
}
