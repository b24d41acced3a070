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
// where a Replace with such nodePorts follows, because any other Replace removes the guard.
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
	m := &nft.Messages{Table: f.Table}
	m.AddTable()
	m.AddChain(guardChain, hooks[guardChain])
	m.SetRules(guardChain, f.fixedChains(view.Node{LocalhostNodePorts: true}, false)[guardChain])
	if err := p.conn.Commit(m.Batch()); err != nil {
		return fmt.Errorf("nftables: guard loopback addresses: %w", err)
	}
	return programmer.SetSysctl(programmer.RouteLocalnet, "1")
}
