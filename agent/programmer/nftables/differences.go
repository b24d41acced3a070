package nftables

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// Differences returns what the table of an IP family should have instead of what it has, in the
// network namespace of the calling thread. It changes nothing. Parts that this package has written
// and that nothing needs any more are no differences. Neither is a table that does not exist.
func Differences(ip model.Family, options Options, state view.State) (different []string, err error) {
	mark, err := programmer.MasqueradeMark(options.MasqueradeMark)
	if err != nil {
		return nil, err
	}
	conn, err := nft.Dial()
	if errors.Is(err, unix.EPROTONOSUPPORT) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("nftables: %w", err)
	}
	defer conn.Close()
	f := &family{dialect: newDialect(ip, mark), conn: conn, node: state.Node}
	f.liberal = programmer.TCPIsLiberal()
	c, err := f.read()
	if err != nil {
		return nil, fmt.Errorf("read nftables table %s: %w", Table, err)
	}
	add := func(format string, args ...any) { different = append(different, f.Should(format, args...)) }
	switch {
	case !c.exists:
		return nil, nil
	case c.foreign:
		add("other definitions of chains or sets")
		return different, nil
	}
	wanted, unknown := f.adopt(c)
	if held := c.chains[forwardChain]; held != nil && !slices.Equal(held.Rules, nft.Hashes(wanted[forwardChain], f.Family)) {
		// The setting may have changed since the chain was written.
		f.liberal = !f.liberal
		wanted[forwardChain] = f.fixedChains(f.node, false)[forwardChain]
	}
	different = f.Table.Differences(c.chains, wanted)
	for name := range unknown {
		add("no set %s", name)
	}
	for k := range c.stray {
		add("no element %x in set %v", k.key, k.set)
	}
	f.ofPorts(c, state, add)
	slices.Sort(different)
	return different, nil
}

// ofPorts calls add for each difference in the elements of Service ports.
func (f *family) ofPorts(c *content, state view.State, add func(format string, args ...any)) {
	byName := map[string]*found{}
	ids := map[*found]uint32{}
	for id, found := range c.found {
		ids[found] = id
		byName[found.name] = found
	}
	shared := map[ref]struct{}{}
	for id, port := range state.Ports {
		if id.Family != f.IP {
			continue
		}
		found := byName[label(id)]
		if found == nil {
			add("elements of %v", id)
			continue
		}
		refsOf(port, found.part, func(r ref) {
			if r.kind == refClusterIP {
				shared[r] = struct{}{}
			}
		})
		if !slices.Equal(found.elements, elementsOf(port, ids[found], found.part)) {
			add("other elements of %v", id)
		}
		delete(ids, found)
		for set := range backendSets {
			wanted := backendsOf(port, set)
			compareBackends(view.Backends{}, wanted, func(a netip.Addr, _ int) {
				shared[ref{kind: refHairpin, address: a}] = struct{}{}
			})
			if removed, added := compareSlots(found.slots[set], wanted); len(removed) > 0 || len(added) > 0 {
				add("other backends of %v in the set of %s backends", id, setChains[set])
			}
		}
	}
	for found, id := range ids {
		add("no elements of the Service port %q with the id %#x", found.name, id)
	}
	for r := range shared {
		if _, held := c.shared[r]; !held {
			set, _, _ := r.element()
			add("%v in set %v", r.address, set)
		}
	}
	for r := range c.shared {
		if _, wanted := shared[r]; !wanted {
			set, _, _ := r.element()
			add("no %v in set %v", r.address, set)
		}
	}
}
