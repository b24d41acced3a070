package nftables

import (
	"fmt"
	"slices"

	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// routeLocalnet lets NodePorts be on loopback addresses, if they shall be and the guard chain is in
// place.
func (p *Programmer) routeLocalnet(node view.Node) {
	if f := p.ipv4(); !node.LocalhostNodePorts || f == nil || !f.known {
		// if the family is not known, the guard may be missing
		return
	}
	if err := programmer.SetSysctl(programmer.RouteLocalnet, "1"); err != nil {
		p.log.Error("NodePorts on loopback addresses do not work; run the agent with --init-only in a privileged "+
			"init container", "err", err)
	}
}

// ipv4 returns the IPv4 family, or nil if this machine does not have it.
func (p *Programmer) ipv4() *family {
	i := slices.IndexFunc(p.families, func(f *family) bool { return f.IP == model.IPv4 })
	if i < 0 {
		return nil
	}
	return p.families[i]
}

// RouteLocalnet does in advance the part of a Replace with nodePorts on loopback addresses that
// needs a privileged container. It adds the guard chain, then sets the sysctl. Use it only on nodes
// where a Replace with such nodePorts follows. Any other Replace keeps the guard as long as the
// sysctl is set.
func RouteLocalnet(options Options) error {
	p, err := New(options)
	if err != nil {
		return err
	}
	defer p.Close()
	f := p.ipv4()
	if f == nil {
		return nil
	}
	if err := guard(p.conn, f.Table); err != nil {
		return fmt.Errorf("nftables: guard loopback addresses: %w", err)
	}
	return programmer.SetSysctl(programmer.RouteLocalnet, "1")
}

// guard adds the guard to a table of IPv4, which it creates if it does not exist.
func guard(c *nft.Conn, t nft.Table) error {
	d := &dialect{Table: t}
	m := &nft.Messages{Table: t}
	m.AddTable()
	m.AddChain(guardChain, hooks[guardChain])
	m.SetRules(guardChain, d.fixedChains(view.Node{LocalhostNodePorts: true}, false)[guardChain])
	return c.Commit(m.Batch())
}

// removeTable removes a table of this package. If packets of loopback addresses are routed and
// nothing else keeps the node's neighbors from them, the guard stays.
func removeTable(c *nft.Conn, t nft.Table) error {
	if t.Name != Table || t.IP != model.IPv4 {
		return c.RemoveTable(t)
	}
	guarded, err := nft.HasChain(t.IP, t.Name, guardChain)
	if err == nil && guarded {
		guarded, err = programmer.NeedsGuard()
	}
	if err != nil {
		return err
	}
	if !guarded {
		return c.RemoveTable(t)
	}
	// Another table has the guard while this one goes.
	standIn := nft.Table{Family: t.Family, Name: StandInTable}
	for _, step := range []func() error{
		func() error { return guard(c, standIn) }, func() error { return c.RemoveTable(t) },
		func() error { return guard(c, t) }, func() error { return c.RemoveTable(standIn) },
	} {
		if err := step(); err != nil {
			return fmt.Errorf("keep the guard of loopback addresses: %w", err)
		}
	}
	return nil
}
