package trace

import (
	"bytes"
	"context"
	"fmt"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/internal/model"
)

// The matches and targets follow iptables-extensions(8).

// proxyChain matches the names of chains that belong to a proxy: those of Slicecast, and those of
// kube-proxy 1.32 to 1.37. kube-proxy's canary is left out, because nothing leads to it.
var proxyChain = regexp.MustCompile(`^(SLICECAST-.*|KUBE-(SERVICES|EXTERNAL-SERVICES|NODEPORTS|POSTROUTING|MARK-MASQ|FORWARD|` +
	`PROXY-FIREWALL|NODE-PORT|LOAD-BALANCER|SOURCE-RANGES-FIREWALL|IPVS-FILTER|IPVS-OUT-FILTER|(SVC|SVL|EXT|FW|SEP)-[A-Z2-7]{16}))$`)

// iptablesHooks are the kernel's base chains.
var iptablesHooks = map[string]uint32{
	"PREROUTING": unix.NF_INET_PRE_ROUTING, "INPUT": unix.NF_INET_LOCAL_IN, "FORWARD": unix.NF_INET_FORWARD,
	"OUTPUT": unix.NF_INET_LOCAL_OUT, "POSTROUTING": unix.NF_INET_POST_ROUTING,
}

// isIPTables reports whether iptables' variant for nf_tables has made a table.
func isIPTables(h *nft.Held) bool {
	if !slices.Contains([]string{"raw", "mangle", "nat", "filter", "security"}, h.Name) {
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

// readIPTables adds the rules that a variant of iptables has, as its program for saving prints
// them. It reports false if the program does not exist.
func (r *Rules) readIPTables(ctx context.Context, variant string) (ok bool, err error) {
	name := "iptables-" + variant + "-save"
	if r.Family == model.IPv6 {
		name = "ip6tables-" + variant + "-save"
	}
	path, err := exec.LookPath(name)
	if err != nil {
		return false, nil //nolint:nilerr // a machine without the program has no such rules
	}
	command := exec.CommandContext(ctx, path)
	var stdout, stderr limited
	command.Stdout, command.Stderr = &stdout, &stderr
	if err := command.Run(); err != nil {
		said := strings.TrimSpace(stderr.String())
		if strings.Contains(said, "not supported") || strings.Contains(said, "do you need to insmod?") {
			return true, nil // the kernel lacks the variant
		}
		return true, fmt.Errorf("%s: %w: %s", name, err, said)
	}
	if r.ipsets == nil && bytes.Contains(stdout.Bytes(), []byte(" --match-set ")) {
		if err := r.readIPSets(); err != nil {
			return true, err
		}
	}
	r.addSaved(stdout.String(), variant)
	for _, m := range incompatible.FindAllStringSubmatch(stdout.String(), -1) {
		r.Unjudged = append(r.Unjudged, fmt.Sprintf("%s does not print table %s, because another program has made rules there "+
			"that iptables does not know: see nft list table %s %s", name, m[1], r.nftFamily(), m[1]))
	}
	return true, nil
}

// incompatible matches what iptables-nft-save prints of a table that it cannot read.
var incompatible = regexp.MustCompile("(?m)^# Table `([^']*)' is incompatible")

// nftFamily returns nft's name of the IP family.
func (r *Rules) nftFamily() string {
	if r.Family == model.IPv6 {
		return "ip6"
	}
	return "ip"
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
}

// addSaved compiles what iptables-save prints.
func (r *Rules) addSaved(text, variant string) {
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
				chains: map[string]*chain{}, seconds: map[string]time.Duration{},
			}
			lines = nil
		case s == nil:
		case strings.HasPrefix(line, ":"):
			name, rest, _ := strings.Cut(line[1:], " ")
			c := &chain{
				table: s.name, name: name, firewalls: !s.nat && !proxyChain.MatchString(name), proxys: proxyChain.MatchString(name), slicecasts: strings.HasPrefix(name, "SLICECAST-"),
			}
			r.KubeProxyIPTables = r.KubeProxyIPTables || name == "KUBE-SERVICES" && !r.facts.IPVS
			r.kubeProxys = r.kubeProxys || name == "KUBE-SERVICES"
			if name == "SLICECAST-SERVICES" {
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
	if p.frontend.Port > 0 && c.proxys && r.why() == "" && p.decides {
		s.addFrontend(p.frontend, r.String(), c.slicecasts)
	}
}
