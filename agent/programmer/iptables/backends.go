package iptables

import (
	"bytes"
	"crypto/sha256"
	"encoding/base32"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"time"

	"github.com/cespare/xxhash/v2"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

type portChain struct {
	table table
	name  string
	write func(w *bytes.Buffer)
}

// Prefixes of the chains of one Service port.
const (
	clusterChainPrefix = ChainPrefix + "P-" // choose a backend of the cluster set
	localChainPrefix   = ChainPrefix + "L-" // choose a backend of the local set
	groupChainPrefix   = ChainPrefix + "G-" // choose a backend of a group of either set
	routesChainPrefix  = ChainPrefix + "R-" // choose a set by the class of the client
	sourcesChainPrefix = ChainPrefix + "S-" // filter by source
)

// chainsOf returns all chains of a Service port, each once. nil has none.
func (d *dialect) chainsOf(port *plan) []portChain {
	if port == nil {
		return nil
	}
	chains := d.frontendChains(port)
	if port.inline == nil {
		for _, set := range port.sets {
			chains = append(chains, setChains(port.ServicePort, set, port.sets)...)
		}
	}
	seen := map[[2]string]bool{}
	return slices.DeleteFunc(chains, func(c portChain) bool {
		key := [2]string{c.table.String(), c.name}
		again := seen[key]
		seen[key] = true
		return again
	})
}

// maxPlain is the largest number of backends in a set without groups. In a larger set, each group
// has a chain. A packet then passes a few dozen rules instead of half as many as there are
// backends. If a backend joins or leaves, only its group is written again.
const maxPlain = 64

// groupCount returns the number of groups for a number of backends: a power of two near its square
// root, or 0 for no groups.
func groupCount(backends int) int {
	if backends <= maxPlain {
		return 0
	}
	count := 1
	for 4*count*count <= backends {
		count *= 2
	}
	return count
}

// groupOf returns a backend's group. It is chosen by a hash, so that it does not depend on the
// other backends.
func groupOf(b view.Backend, groups int) int {
	text, _ := b.Address.MarshalBinary() // never fails
	return int(xxhash.Sum64(text) & uint64(groups-1))
}

// setChains returns the chains that choose one of a set's backends. sets are all sets that the
// Service port uses.
func setChains(port *view.ServicePort, set view.Target, sets []view.Target) []portChain {
	name, backends := setChain(port.ID, set), port.Backends(set).List()
	protocol := match{protocol: "-p " + lower(port.ID.Protocol)} // DNAT requires a protocol
	groups := make([][]view.Backend, groupCount(len(backends)))
	if len(groups) == 0 {
		return []portChain{{nat, name, func(w *bytes.Buffer) {
			affinity(w, name, protocol, port, set, sets)
			destinations(w, name, protocol, "", port, backends)
		}}}
	}
	for _, b := range backends {
		g := groupOf(b, len(groups))
		groups[g] = append(groups[g], b)
	}
	groupChain := func(g int) string { return groupChainPrefix + digest(fmt.Sprintf("%s/%d", name, g)) }
	chains := []portChain{{nat, name, func(w *bytes.Buffer) {
		affinity(w, name, protocol, port, set, sets)
		left := len(backends)
		for g, members := range groups {
			if len(members) > 0 {
				w.WriteString(match{}.rule(name, chance(len(members), left), "-g "+groupChain(g)))
			}
			left -= len(members)
		}
	}}}
	for g, members := range groups {
		if len(members) > 0 {
			chains = append(chains, portChain{nat, groupChain(g), func(w *bytes.Buffer) {
				destinations(w, groupChain(g), protocol, "", port, members)
			}})
		}
	}
	return chains
}

// destinations writes rules that lead packets which match m to each backend with the same
// probability. If the Service port has affinity, the rules also put the client on that backend's
// list. The first rule has the comment.
func destinations(
	w *bytes.Buffer, chain string, m match, comment string, port *view.ServicePort, backends []view.Backend,
) {
	for i, b := range backends {
		remember := ""
		if port.Affinity > 0 {
			remember = recent(port, b, "--set")
		}
		w.WriteString(m.rule(chain, comment, chance(1, len(backends)-i), remember, dnat(b)))
		comment = ""
	}
}

// affinity writes the rules that lead clients to the backend that they had last, and renew their
// entry. A client without a backend of this set is assigned one of it by the rules that follow.
// Then its entry for the other set is forgotten, so that a client has one backend at most.
func affinity(w *bytes.Buffer, chain string, m match, port *view.ServicePort, set view.Target, sets []view.Target) {
	if port.Affinity <= 0 {
		return
	}
	backends := port.Backends(set)
	seconds := (port.Affinity + time.Second - 1) / time.Second
	for b := range backends.All() {
		w.WriteString(m.rule(chain, recent(port, b, fmt.Sprintf("--update --seconds %d --reap", seconds)), dnat(b)))
	}
	for _, other := range sets {
		if other == set {
			continue
		}
		for b := range port.Backends(other).All() {
			if !backends.Contains(b.Address) {
				w.WriteString(match{}.rule(chain, recent(port, b, "--remove")))
			}
		}
	}
}

// recent returns a match on the list of clients of a backend of a Service port. All frontends share
// the list. The kernel keeps it as long as a rule names it.
func recent(port *view.ServicePort, b view.Backend, action string) string {
	mask := "255.255.255.255"
	if port.ID.Family == model.IPv6 {
		mask = "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"
	}
	name := ChainPrefix + digest(fmt.Sprintf("%v/%v", port.ID, b.Address))
	return fmt.Sprintf("-m recent %s --name %s --mask %s --rsource", action, name, mask)
}

func dnat(b view.Backend) string { return "-j DNAT --to-destination " + b.Address.String() }

// chance returns the match that holds with probability part/whole, as iptables-save prints it. Both
// must be above 0. The kernel counts in units of 2^-31. If part equals whole, there is nothing to
// match, and chance returns "".
func chance(part, whole int) string {
	if part == whole {
		return ""
	}
	const unit = 1 << 31
	p := math.Round(float64(part) / float64(whole) * unit)
	return fmt.Sprintf("-m statistic --mode random --probability %.11f", p/unit)
}

func setChain(id view.ServicePortID, set view.Target) string {
	if set == view.Local {
		return localChainPrefix + digest(id.String())
	}
	return clusterChainPrefix + digest(id.String())
}

// digest returns 16 characters that identify a text. They have 80 bits, so that nobody can
// construct two names with the same digest. With a prefix they make up the 28 characters that
// iptables accepts in a chain's name.
func digest(text string) string {
	sum := sha256.Sum256([]byte(text))
	return base32.StdEncoding.EncodeToString(sum[:10])
}

// localAddresses returns the addresses of this node's backends that a Service port leads to, each
// once and sorted.
func (p *plan) localAddresses() []netip.Addr {
	var addresses []netip.Addr
	for _, set := range p.sets {
		for b := range p.Backends(set).All() {
			if b.Local {
				addresses = append(addresses, b.Address.Addr())
			}
		}
	}
	slices.SortFunc(addresses, netip.Addr.Compare)
	return slices.Compact(addresses)
}

// hairpin is the address of a local backend, and one of the Service ports that lead to it.
type hairpin struct {
	port    *plan
	address netip.Addr
}

// hairpinRules writes the rule for connections that local backends at an address make to
// themselves.
func (d *dialect) hairpinRules(w *bytes.Buffer, chain string, hairpins []hairpin) {
	p := netip.PrefixFrom(hairpins[0].address, d.bits)
	w.WriteString(from(p).and(to(p)).rule(chain, d.masquerade()))
}
