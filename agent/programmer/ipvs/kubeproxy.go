package ipvs

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"

	mobyipvs "github.com/moby/ipvs"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// kubeProxySets is what the names of kube-proxy's ipsets begin with, nodePortSets those of its sets of NodePorts
// (k8s.io/kubernetes/pkg/proxy/ipvs/ipset.go).
const kubeProxySets = "KUBE-"

var nodePortSets = map[string]model.Protocol{
	"KUBE-NODE-PORT-TCP": model.TCP, "KUBE-NODE-PORT-UDP": model.UDP, "KUBE-NODE-PORT-SCTP-HASH": model.SCTP,
}

// CleanupKubeProxy removes what kube-proxy's IPVS mode has left in IPVS, and its device. Of virtual services these are the ones
// of the device's addresses and those of its NodePorts, but for what is this package's. A device's address that is a
// Service's here, too, stays the node's all the time: see isKubeProxys.
func CleanupKubeProxy() error {
	if _, err := os.Stat("/proc/net/ip_vs"); errors.Is(err, os.ErrNotExist) {
		return nil // and asking for IPVS would have it loaded
	}
	p := &Programmer{}
	var err error
	if p.links, err = netlink.NewHandle(); err != nil {
		return fmt.Errorf("open a netlink socket: %w", err)
	}
	device, err := p.links.LinkByName(KubeProxyDevice)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		p.links.Close()
		return nil
	}
	if err != nil {
		p.links.Close()
		return fmt.Errorf("find the device %s: %w", KubeProxyDevice, err)
	}
	if p.tables, err = dialTables(); err != nil {
		p.links.Close()
		return fmt.Errorf("open a socket for nftables: %w", err)
	}
	defer p.close()
	if err := p.openIPVS(); err != nil {
		return fmt.Errorf("open a socket for IPVS: %w", err)
	}
	p.device = device
	theirs, err := p.kubeProxyServices()
	if err != nil {
		return err
	}
	for _, s := range theirs {
		if err := p.ipvs.DelService(s); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("remove kube-proxy's virtual service %v:%d from IPVS: %w", s.Address, s.Port, err)
		}
	}
	if err := p.links.LinkDel(device); err != nil {
		return fmt.Errorf("remove the device %s: %w", KubeProxyDevice, err)
	}
	return nil
}

// kubeProxyServices gives the virtual services that are kube-proxy's, whose device is p's.
func (p *Programmer) kubeProxyServices() ([]*mobyipvs.Service, error) {
	onDevice, err := p.deviceAddresses()
	if err != nil {
		return nil, err
	}
	type nodePort struct {
		protocol model.Protocol
		port     uint16
	}
	nodePorts := map[nodePort]bool{}
	for name, protocol := range nodePortSets {
		for _, set := range []string{name, strings.Replace(name, kubeProxySets, kubeProxySets+"6-", 1)} {
			list, err := netlink.IpsetList(set)
			if err != nil {
				continue // there is none if there are no such NodePorts
			}
			for _, e := range list.Entries {
				if e.Port != nil {
					nodePorts[nodePort{protocol, *e.Port}] = true
				}
			}
		}
	}
	ours, err := p.affinityServices()
	if err != nil {
		return nil, err
	}
	all, err := p.ipvs.GetServices()
	if err != nil {
		return nil, fmt.Errorf("read IPVS' virtual services: %w", err)
	}
	var theirs []*mobyipvs.Service
	for _, s := range all {
		k, ok := keyOf(s)
		if !ok || k.number != 0 || ours[k] || !onDevice[k.address] && !(nodePorts[nodePort{k.protocol, k.port}] && p.isLocal(k.address)) {
			continue
		}
		theirs = append(theirs, s)
	}
	return theirs, nil
}

// affinityServices gives our virtual services that are no mark's, as our tables name them.
func (p *Programmer) affinityServices() (map[serviceKey]bool, error) {
	ours := map[serviceKey]bool{}
	for _, family := range []model.Family{model.IPv4, model.IPv6} {
		l := newLayout(family, view.Node{}, 0)
		held, _, err := p.tables.read(l)
		if err != nil {
			return nil, err
		}
		for k := range held {
			if k.set == setAffinity {
				ours[l.affinityKey(k.key)] = true
			}
		}
	}
	return ours, nil
}

// isLocal tells whether an address is the node's.
func (p *Programmer) isLocal(a netip.Addr) bool {
	routes, err := p.links.RouteGetWithOptions(a.AsSlice(), &netlink.RouteGetOptions{FIBMatch: true})
	return err == nil && len(routes) > 0 && routes[0].Type == unix.RTN_LOCAL
}

// CleanupKubeProxySets removes kube-proxy's ipsets, which no rule may refer to any more.
func CleanupKubeProxySets() error {
	all, err := netlink.IpsetListAll()
	if err != nil {
		return nil //nolint:nilerr // a kernel without ipsets has none
	}
	var errs []error
	seen := map[string]bool{} // a large set comes in parts
	for _, s := range all {
		if seen[s.SetName] || !strings.HasPrefix(s.SetName, kubeProxySets) {
			continue
		}
		seen[s.SetName] = true
		if err := netlink.IpsetDestroy(s.SetName); err != nil {
			errs = append(errs, fmt.Errorf("remove the ipset %s: %w", s.SetName, err))
		}
	}
	return errors.Join(errs...)
}
