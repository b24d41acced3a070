package trace

import (
	"net/netip"
	"regexp"
	"slices"
	"strings"
)

// form is what a proxy's rules look like that ask what no packet of verify has.
type form struct{ chain, rule *regexp.Regexp }

// Intruders returns the rules in chains of proxies that packets came by and did not match, that ask
// for a source, a mark, a state of the connection or an interface, and that no proxy writes. What
// they do to others' packets has not been seen. With own, only Slicecast's chains count. It knows
// which packets there were, so it is called after all of them.
func (r *Rules) Intruders(own bool) (rules []*Rule) {
	if r.facts.IPVS {
		return nil // rules beside IPVS ask for what it has done to packets
	}
	for _, c := range r.chains {
		if !c.proxys || own && !c.slicecasts || !c.reached {
			continue
		}
		for _, rule := range c.rules {
			if rule.asksMore && rule.visited && !rule.matched && rule.why() == "" && rule.acts() && !c.writes(rule) {
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
	return c.accepts || c.refuses || c.changes || c.marks != 0 || len(c.chains) > 0
}

// writes reports whether a proxy writes such a rule in the chain.
func (c *chain) writes(r *Rule) bool {
	if slices.ContainsFunc(forms, func(f form) bool { return f.chain.MatchString(c.name) && f.rule.MatchString(r.Text) }) {
		return true
	}
	return c.isHairpin(r)
}

// A comment of kube-proxy comes before or after a match. No word of it looks like an option.
const comment = `(-m comment --comment( [^-\s]\S*)+ )?`

// forms are those of Slicecast, and of kube-proxy 1.32 to 1.37 in its modes nftables and iptables
// (proxier.go in pkg/proxy/nftables and pkg/proxy/iptables).
var forms = []form{
	of(`postrouting|masquerading`, `mark & \S+ != 0x0 mark & \S+ (\^ \S+ )?set mark masq`),
	of(`firewall-.*`, `source address lookup != @__set\d+ drop`),
	of(`guard-loopback`, `input interface != "lo" (source|destination) address & 255\.0\.0\.0 == 127\.0\.0\.0 drop`),
	of(`SLICECAST-LOCALNET`, `-m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP`),
	of(`SLICECAST-DISPATCH`, `-d 127\.0\.0\.0/8 -o lo -j SLICECAST-NODE`),
	of(`SLICECAST-R-.*`, `(-m addrtype --src-type LOCAL|-s \S+|-i \S+) (-j MARK --set-xmark \S+|-g SLICECAST-P-\S+)`),
	of(`KUBE-EXT-.*`, `(-s \S+ |-i \S+ )?`+comment+`(-m addrtype --src-type LOCAL )?-j KUBE-SVC-\S+`),
	of(`KUBE-EXT-.*`, comment+`-m addrtype --src-type LOCAL -j KUBE-MARK-MASQ`),
	of(`external-.*`, `(source address (& \S+ )?== \S+|input interface == \S+|type of the source == local) goto service-\S+( ".*")?`),
	of(`external-.*`, `type of the source == local (mark & \S+ \^ \S+ set mark|jump mark-for-masquerade)\b.*`),
	of(`KUBE-FW-.*`, `-s \S+ `+comment+`-j KUBE-(EXT|SVC)-\S+`),
	of(`SLICECAST-INPUT`, `-d 127\.0\.0\.0/8 -i lo -j SLICECAST-NODE`),
	of(`SLICECAST-POSTROUTING`, `-m mark ! --mark \S+ -m conntrack --ctstate DNAT -j SLICECAST-HAIRPIN`),
	of(`forward`, `ct state & invalid != 0 source address source address lookup @hairpins drop .*`),
	of(`forward|output-filter`, `ct state & new != 0 destination address (& \S+ )?== \S+ drop .*`),
	of(`pods-.*`, `source address (& \S+ )?== \S+ (mark & \S+ \^ \S+ set mark )?goto (cluster|local)`),
	of(`pods-.*`, `input interface == "\S+" (mark & \S+ \^ \S+ set mark )?goto (cluster|local)`),
	of(`pods-.*`, `type of the source == local (mark & \S+ \^ \S+ set mark )?goto (cluster|local)`),
	of(`(SLICECAST|KUBE)-FORWARD`, comment+`-m conntrack --ctstate INVALID (-m nfacct --nfacct-name \S+ )?-j DROP`),
	of(`(SLICECAST|KUBE)-FORWARD`, comment+`-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT`),
	of(`(SLICECAST|KUBE)-FORWARD`, comment+`-m mark --mark (0x[0-9a-f]+)/(0x[0-9a-f]+) -j ACCEPT`),
	of(`SLICECAST-SERVICES`, `-m mark --mark \S+ -g SLICECAST-DISPATCH`),
	of(`(SLICECAST|KUBE)-POSTROUTING`, `-m mark ! --mark \S+ -j RETURN`),
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
