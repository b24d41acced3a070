package nftables

import (
	"fmt"
	"os"
	"slices"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// routeLocalnetPath is the sysctl that makes the kernel route packets of loopback addresses to and
// from the network.
const routeLocalnetPath = "/proc/sys/net/ipv4/conf/all/route_localnet"

// routeLocalnet sets that sysctl if loopback addresses have nodePorts and the guard chain is in
// place. It never resets the sysctl, because others may rely on it.
func (p *Programmer) routeLocalnet(node view.Node) {
	if f := p.ipv4(); !node.LocalhostNodePorts || f == nil || !f.known {
		// if the family is not known, the guard may be missing
		return
	}
	if err := setRouteLocalnet(); err != nil {
		p.log.Error("nodePorts on loopback addresses do not work; run the agent once with --init-only in a privileged container before", "err", err)
	}
}

// ipv4 returns the IPv4 family, or nil if this machine does not have it.
func (p *Programmer) ipv4() *family {
	i := slices.IndexFunc(p.families, func(f *family) bool { return f.family == model.IPv4 })
	if i < 0 {
		return nil
	}
	return p.families[i]
}

func setRouteLocalnet() error {
	if isOne(routeLocalnetPath) {
		return nil // a container without privileges can read the sysctl but not set it
	}
	if err := os.WriteFile(routeLocalnetPath, []byte("1"), 0o644); err != nil {
		return fmt.Errorf("set the sysctl net.ipv4.conf.all.route_localnet to 1: %w", err)
	}
	return nil
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
	o := objects{dialect: f.dialect}
	o.addTable()
	o.addChain(guardChain)
	o.setRules(guardChain, f.fixedChains(view.Node{LocalhostNodePorts: true})[guardChain])
	b := newBatch(nil)
	b.append(o.buf)
	if err := p.conn.commit(b); err != nil {
		return fmt.Errorf("nftables: keep others from loopback addresses: %w", err)
	}
	return setRouteLocalnet()
}
