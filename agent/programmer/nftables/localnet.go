package nftables

import (
	"fmt"
	"os"
	"slices"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// routeLocalnetPath is the sysctl by which the kernel routes packets of loopback addresses to and from the network.
const routeLocalnetPath = "/proc/sys/net/ipv4/conf/all/route_localnet"

// routeLocalnet switches that on if loopback addresses have nodePorts, with the guard in place. It is never switched off:
// others may rely on it.
func (p *Programmer) routeLocalnet(node view.Node) {
	if f := p.ipv4(); !node.LocalhostNodePorts || f == nil || !f.known { // then the guard may be missing
		return
	}
	if err := setRouteLocalnet(); err != nil {
		p.log.Error("nodePorts on loopback addresses do not work; run the agent once with --init-only in a privileged container before", "err", err)
	}
}

// ipv4 gives the family, nil if this machine does not have it.
func (p *Programmer) ipv4() *family {
	i := slices.IndexFunc(p.families, func(f *family) bool { return f.family == model.IPv4 })
	if i < 0 {
		return nil
	}
	return p.families[i]
}

func setRouteLocalnet() error {
	if isOne(routeLocalnetPath) {
		return nil // in a container without privileges it can be read only
	}
	if err := os.WriteFile(routeLocalnetPath, []byte("1"), 0o644); err != nil {
		return fmt.Errorf("set the sysctl net.ipv4.conf.all.route_localnet to 1: %w", err)
	}
	return nil
}

// RouteLocalnet does ahead what of a Replace with nodePorts on loopback addresses takes a privileged container: it switches
// on the routing of these, with the guard in place. It is for nodes on which a Replace with such nodePorts follows, since any
// other removes the guard.
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
