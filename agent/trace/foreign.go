package trace

import (
	"net"
	"net/netip"
	"regexp"
	"slices"
	"strings"
)

// form is what a proxy's rules look like that ask what no packet of verify has. Both expressions
// may have the group "service", whose texts must be the same. That of the rule may have the group
// "link" for an interface and the groups "source" and "mask" for a network. Only pods may come over
// that interface, or from that network.
type form struct{ chain, rule *regexp.Regexp }

// Source is what a rule may ask of a packet to tell where it comes from.
type Source struct {
	// Network contains the packet's source. If it is not valid, Interface is asked.
	Network netip.Prefix
	// Interface is the name of the interface that the packet arrives over. With IsPrefix, names
	// begin with it.
	Interface string
	IsPrefix  bool
}

// Intruders returns the rules in kube-proxy's chains that packets came by and did not match, that
// ask for a source, a mark, a state of the connection or an interface, and that kube-proxy does not
// write. What they do to others' packets has not been seen. ofPods reports whether a source is by
// what the proxy tells pods from others. Intruders knows which packets there were, so it is called
// after all of them.
func (r *Rules) Intruders(ofPods func(Source) bool) (rules []*Rule) {
	if r.facts.IPVS {
		return nil // rules beside IPVS ask for what it has done to packets
	}
	for _, c := range r.chains {
		for _, rule := range c.rules {
			if c.proxys && !c.slicecasts && c.reached && rule.asksMore && rule.visited && !rule.matched && rule.why() == "" && rule.acts() &&
				!c.writes(rule, ofPods) {
				rules = append(rules, rule)
			}
		}
	}
	slices.SortFunc(rules, func(a, b *Rule) int { return strings.Compare(a.String(), b.String()) })
	return rules
}

// acts reports whether a rule does something to packets.
func (r *Rule) acts() bool {
	var c consequence
	c.of(r.steps)
	return c.accepts || c.refuses() || c.changes || c.marks != 0 || len(c.chains) > 0
}

// writes reports whether a proxy writes such a rule in the chain.
func (c *chain) writes(r *Rule, ofPods func(Source) bool) bool {
	return c.isHairpin(r) || slices.ContainsFunc(forms, func(f form) bool { return f.is(c, r, ofPods) })
}

// is reports whether a rule of a chain has the form.
func (f form) is(c *chain, r *Rule, ofPods func(Source) bool) bool {
	ofChain, ofRule := f.chain.FindStringSubmatch(c.name), f.rule.FindStringSubmatch(r.Text)
	if ofChain == nil || ofRule == nil {
		return false
	}
	var service string
	if at := f.chain.SubexpIndex("service"); at > 0 {
		service = ofChain[at]
	}
	found := map[string]string{}
	for i, name := range f.rule.SubexpNames() {
		if name != "" {
			found[name] = ofRule[i]
		}
	}
	link, network := found["link"], found["source"]
	switch {
	case found["service"] != "" && found["service"] != service:
		return false
	case link != "":
		name := strings.TrimRight(link, "+*")
		return ofPods(Source{Interface: name, IsPrefix: name != link})
	case network != "":
		prefix, ok := networkOf(network, found["mask"])
		return ok && ofPods(Source{Network: prefix})
	}
	return true
}

// networkOf returns a network by its text, which may be an address with a mask.
func networkOf(text, mask string) (netip.Prefix, bool) {
	if p, err := netip.ParsePrefix(text); err == nil {
		return p, true
	}
	a, err := netip.ParseAddr(text)
	if err != nil {
		return netip.Prefix{}, false
	}
	bits := a.BitLen()
	if mask != "" {
		m, err := netip.ParseAddr(mask)
		if err != nil {
			return netip.Prefix{}, false
		}
		bits, _ = net.IPMask(m.AsSlice()).Size()
	}
	p, err := a.Prefix(bits)
	return p, err == nil
}

// A comment of kube-proxy comes before or after a match. No word of it looks like an option.
const comment = `(-m comment --comment( [^-\s]\S*)+ )?`

// network is how rules of nf_tables ask for a network.
const network = `(& (?P<mask>\S+) )?== (?P<source>\S+)`

// forms are those of kube-proxy 1.32 to 1.37 in its modes nftables and iptables
// (proxier.go in pkg/proxy/nftables and pkg/proxy/iptables).
var forms = []form{
	of(`masquerading`, `mark & \S+ != 0x0 mark & \S+ (\^ \S+ )?set mark masq`),
	of(`firewall-.*`, `source address lookup != @__set\d+ drop`),
	of(`KUBE-EXT-(?P<service>.*)`, `(-s (?P<source>\S+) |-i (?P<link>\S+) )?`+comment+`(-m addrtype --src-type LOCAL )?-j KUBE-SVC-(?P<service>\S+)`),
	of(`KUBE-EXT-.*`, comment+`-m addrtype --src-type LOCAL -j KUBE-MARK-MASQ`),
	of(`external-(?P<service>.*)`, `(source address `+network+`|input interface == "(?P<link>\S+)"|type of the source == local) goto service-(?P<service>\S+)( ".*")?`),
	of(`external-.*`, `type of the source == local (mark & \S+ \^ \S+ set mark|jump mark-for-masquerade)\b.*`),
	of(`KUBE-FW-(?P<service>.*)`, `-s \S+ `+comment+`-j KUBE-(EXT|SVC)-(?P<service>\S+)`),
	of(`KUBE-FORWARD`, comment+`-m conntrack --ctstate INVALID (-m nfacct --nfacct-name \S+ )?-j DROP`),
	of(`KUBE-FORWARD`, comment+`-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT`),
	of(`KUBE-FORWARD`, comment+`-m mark --mark (0x[0-9a-f]+)/(0x[0-9a-f]+) -j ACCEPT`),
	of(`KUBE-POSTROUTING`, `-m mark ! --mark \S+ -j RETURN`),
}

// of returns the form of rules in chains, both by expressions for all of the text.
func of(chain, rule string) form {
	return form{regexp.MustCompile("^(" + chain + ")$"), regexp.MustCompile("^" + rule + "$")}
}

// hairpin matches kube-proxy's rules by which a backend's connections to itself are masqueraded.
var hairpin = regexp.MustCompile(`^(?:-s (\S+?)/(?:32|128) .*-j KUBE-MARK-MASQ|source address == (\S+) jump mark-for-masquerade\b.*)$`)

// isHairpin reports whether the rule is for the backend that the chain leads to.
func (c *chain) isHairpin(r *Rule) bool {
	m := hairpin.FindStringSubmatch(r.Text)
	if m == nil {
		return false
	}
	source, err := netip.ParseAddr(m[1] + m[2])
	return err == nil && slices.ContainsFunc(c.rules, func(o *Rule) bool {
		isBackend := func(s step) bool { d, ok := s.(destination); return ok && d.to.Addr() == source }
		return slices.ContainsFunc(o.steps, isBackend) || strings.Contains(o.Text, " dnat to "+source.String()+" ")
	})
}
