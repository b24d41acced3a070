package ipvs

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	vnetlink "github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/netlink"
	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/internal/model"
)

// kubeProxySets are kube-proxy's ipsets for IPv4. addressSets are those with addresses and ports of
// Services, and nodePortSets those with NodePorts (k8s.io/kubernetes/pkg/proxy/ipvs/ipset.go, 1.32
// to 1.37). A prefix is not enough to recognize them, because others have sets with similar names,
// for example for kube-router's network policies.
var (
	kubeProxySets = []string{
		"KUBE-LOOP-BACK", "KUBE-CLUSTER-IP", "KUBE-EXTERNAL-IP", "KUBE-EXTERNAL-IP-LOCAL",
		"KUBE-LOAD-BALANCER", "KUBE-LOAD-BALANCER-LOCAL", "KUBE-LOAD-BALANCER-FW",
		"KUBE-LOAD-BALANCER-SOURCE-IP", "KUBE-LOAD-BALANCER-SOURCE-CIDR",
		"KUBE-NODE-PORT-TCP", "KUBE-NODE-PORT-LOCAL-TCP", "KUBE-NODE-PORT-UDP", "KUBE-NODE-PORT-LOCAL-UDP",
		"KUBE-NODE-PORT-SCTP-HASH", "KUBE-NODE-PORT-LOCAL-SCTP-HASH", "KUBE-HEALTH-CHECK-NODE-PORT", "KUBE-IPVS-IPS",
	}
	addressSets  = []string{"KUBE-CLUSTER-IP", "KUBE-EXTERNAL-IP", "KUBE-EXTERNAL-IP-LOCAL", "KUBE-LOAD-BALANCER"}
	nodePortSets = map[string]model.Protocol{
		"KUBE-NODE-PORT-TCP": model.TCP, "KUBE-NODE-PORT-UDP": model.UDP, "KUBE-NODE-PORT-SCTP-HASH": model.SCTP,
	}
)

// ipv6Set returns the name of the IPv6 set that corresponds to an IPv4 set. Names have at most 31
// bytes.
func ipv6Set(name string) string {
	name = strings.Replace(name, "KUBE-", "KUBE-6-", 1)
	return name[:min(len(name), 31)]
}

func isKubeProxySet(name string) bool {
	return slices.ContainsFunc(kubeProxySets, func(s string) bool { return name == s || name == ipv6Set(s) })
}

// settleTime is the time that CleanupKubeProxy leaves for connections that are being established.
const settleTime = 10 * time.Second

// CleanupKubeProxy removes what kube-proxy's IPVS mode has left in IPVS, and its device. It removes
// the virtual services for addresses of that device and for kube-proxy's NodePorts, except those of
// this package. The device may be gone already, so it also considers the addresses in kube-proxy's
// ipsets.
//
// If this package's device has an address, too, the address stays the node's all the time: see
// device.kubeProxys. Otherwise, connections from the node itself would lose their source address.
// So CleanupKubeProxy gives them another source first, and waits settleTime for connections that
// are being established.
func CleanupKubeProxy(ctx context.Context) error {
	m, err := openLoaded()
	if m == nil || err != nil {
		return err
	}
	defer m.close()
	if m.ipvs == nil {
		return nil
	}
	theirs, err := m.kubeProxyServices()
	if err != nil {
		return err
	}
	led := newLedFrontends()
	for _, k := range theirs {
		led[k.family][addressKey(k.address)+portKey(nft.ProtocolNumber(k.protocol), k.port)] = true
	}
	if err := m.removeServices(theirs); err != nil {
		return err
	}
	link, err := findLink(m.device.links, KubeProxyDevice)
	if link == nil || err != nil {
		return err
	}
	if exists, err := m.device.find(); err != nil {
		return err
	} else if !exists { // IPVS leads no longer
		if err := led.forget(); err != nil {
			return err
		}
		// kube-proxy leaves the device down, and routes require it to be up.
		kubeProxys := &device{links: m.device.links, addresses: m.device.addresses, link: link}
		if err := errors.Join(kubeProxys.links.LinkSetUp(link), kubeProxys.preferOtherSources()); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(settleTime):
		}
	}
	if err := m.device.links.LinkDel(link); err != nil {
		return fmt.Errorf("remove device %s: %w", KubeProxyDevice, err)
	}
	return nil
}

// kubeProxyServices returns kube-proxy's virtual services.
func (m *machine) kubeProxyServices() (theirs []serviceKey, err error) {
	addresses := map[netip.Addr]bool{}
	link, err := findLink(m.device.links, KubeProxyDevice)
	if err != nil {
		return nil, err
	}
	if link != nil {
		list, err := m.device.addresses.Addresses(unix.AF_UNSPEC)
		if err != nil {
			return nil, fmt.Errorf("read the addresses of %s: %w", KubeProxyDevice, err)
		}
		for _, a := range list {
			addresses[a.Addr()] = addresses[a.Addr()] || a.Link == link.Attrs().Index
		}
	}
	nodePorts := map[serviceKey]bool{} // with protocol and port only
	err = netlink.IPSets(func(name string, entries []netip.AddrPort) {
		name = strings.Replace(name, "KUBE-6-", "KUBE-", 1)
		protocol, hasNodePorts := nodePortSets[name]
		hasAddresses := slices.Contains(addressSets, name)
		for _, e := range entries {
			switch {
			case hasNodePorts:
				nodePorts[serviceKey{protocol: protocol, port: e.Port()}] = true
			case hasAddresses:
				addresses[e.Addr()] = true
			}
		}
	})
	if err != nil {
		return nil, err
	}
	all, err := m.ipvs.GetServices()
	if err != nil {
		return nil, fmt.Errorf("read IPVS' virtual services: %w", err)
	}
	for _, s := range all {
		k, ok := keyOf(s)
		isNodePort := nodePorts[serviceKey{protocol: k.protocol, port: k.port}]
		if ok && !isOurs(k, s) && (addresses[k.address] || isNodePort && m.device.local(k.address) != 0) {
			theirs = append(theirs, k)
		}
	}
	return theirs, nil
}

// CleanupKubeProxySets removes kube-proxy's ipsets. No rule may refer to them any more.
func CleanupKubeProxySets() error {
	theirs := map[string]bool{}
	err := netlink.IPSets(func(name string, _ []netip.AddrPort) {
		if isKubeProxySet(name) {
			theirs[name] = true
		}
	})
	errs := []error{err}
	for name := range theirs {
		if err := vnetlink.IpsetDestroy(name); err != nil {
			errs = append(errs, fmt.Errorf("remove the ipset %s: %w", name, err))
		}
	}
	return errors.Join(errs...)
}
