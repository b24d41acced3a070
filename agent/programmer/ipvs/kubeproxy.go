package ipvs

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	mobyipvs "github.com/moby/ipvs"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/internal/model"
)

// kubeProxySets are kube-proxy's ipsets for IPv4. addressSets are those with addresses and ports of
// Services, and nodePortSets those with NodePorts (k8s.io/kubernetes/pkg/proxy/ipvs/ipset.go, 1.32
// to 1.37). A prefix is not enough to recognize them, because others have sets with similar names,
// for example for kube-router's network policies.
var (
	kubeProxySets = []string{
		"KUBE-LOOP-BACK", "KUBE-CLUSTER-IP", "KUBE-EXTERNAL-IP", "KUBE-EXTERNAL-IP-LOCAL",
		"KUBE-LOAD-BALANCER", "KUBE-LOAD-BALANCER-LOCAL", "KUBE-LOAD-BALANCER-FW", "KUBE-LOAD-BALANCER-SOURCE-IP", "KUBE-LOAD-BALANCER-SOURCE-CIDR",
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
// isKubeProxys. Otherwise, connections from the node itself would lose their source address. So
// CleanupKubeProxy gives them another source first, and waits settleTime for connections that are
// being established.
func CleanupKubeProxy(ctx context.Context) error {
	if _, err := os.Stat("/proc/net/ip_vs"); errors.Is(err, os.ErrNotExist) {
		return nil // asking for IPVS would load it
	}
	m := &machine{}
	defer m.close()
	if err := m.openLinks(); err != nil {
		return err
	}
	if err := m.openIPVS(); err != nil {
		return fmt.Errorf("open a socket for IPVS: %w", err)
	}
	device, err := m.kubeProxyDevice()
	if err != nil {
		return err
	}
	theirs, err := m.kubeProxyServices(device)
	if err != nil {
		return err
	}
	led := ledFrontends{}
	for _, s := range theirs {
		if err := m.ipvs.DelService(s); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("remove kube-proxy's virtual service %v:%d from IPVS: %w", s.Address, s.Port, err)
		}
		if k, ok := keyOf(s); ok {
			led.addService(k)
		}
	}
	if device == nil {
		return nil
	}
	if _, err := m.links.LinkByName(Device); err != nil { // without that device, IPVS leads no longer
		if err := led.forget(); err != nil {
			return err
		}
		// kube-proxy leaves the device down, and routes require it to be up.
		if err := errors.Join(m.links.LinkSetUp(device), preferOtherSources(m.links, device)); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(settleTime):
		}
	}
	if err := m.links.LinkDel(device); err != nil {
		return fmt.Errorf("remove the device %s: %w", KubeProxyDevice, err)
	}
	return nil
}

// kubeProxyDevice returns kube-proxy's device, or nil if it is gone.
func (m *machine) kubeProxyDevice() (netlink.Link, error) {
	device, err := m.links.LinkByName(KubeProxyDevice)
	switch {
	case errors.As(err, new(netlink.LinkNotFoundError)):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("find the device %s: %w", KubeProxyDevice, err)
	}
	return device, nil
}

// kubeProxyServices returns kube-proxy's virtual services. device is nil if it is gone.
func (m *machine) kubeProxyServices(device netlink.Link) ([]*mobyipvs.Service, error) {
	addresses := map[netip.Addr]bool{}
	if device != nil {
		var err error
		if addresses, err = m.deviceAddresses(device, unix.AF_UNSPEC); err != nil {
			return nil, err
		}
	}
	type nodePort struct {
		protocol model.Protocol
		port     uint16
	}
	nodePorts := map[nodePort]bool{}
	err := eachIPSet(func(name string, entries []netip.AddrPort) {
		name = strings.Replace(name, "KUBE-6-", "KUBE-", 1)
		protocol, hasNodePorts := nodePortSets[name]
		hasAddresses := slices.Contains(addressSets, name)
		for _, e := range entries {
			switch {
			case hasNodePorts:
				nodePorts[nodePort{protocol, e.Port()}] = true
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
	var theirs []*mobyipvs.Service
	for _, s := range all {
		k, ok := keyOf(s)
		if !ok || k.number != 0 || s.Flags&tagged != 0 || !addresses[k.address] && !(nodePorts[nodePort{k.protocol, k.port}] && m.isLocal(k.address)) {
			continue
		}
		theirs = append(theirs, s)
	}
	return theirs, nil
}

// isLocal reports whether an address is the node's.
func (m *machine) isLocal(a netip.Addr) bool {
	routes, err := m.links.RouteGetWithOptions(a.AsSlice(), &netlink.RouteGetOptions{FIBMatch: true})
	return err == nil && len(routes) > 0 && routes[0].Type == unix.RTN_LOCAL
}

// CleanupKubeProxySets removes kube-proxy's ipsets. No rule may refer to them any more.
func CleanupKubeProxySets() error {
	theirs := map[string]bool{}
	err := eachIPSet(func(name string, _ []netip.AddrPort) {
		if isKubeProxySet(name) {
			theirs[name] = true
		}
	})
	errs := []error{err}
	for name := range theirs {
		if err := netlink.IpsetDestroy(name); err != nil {
			errs = append(errs, fmt.Errorf("remove the ipset %s: %w", name, err))
		}
	}
	return errors.Join(errs...)
}

// eachIPSet calls f with the name of each ipset and the addresses and ports of its entries, if they
// have any. For a large ipset it calls f several times. A kernel without ipsets has none. The
// library's own function would write to the log.
func eachIPSet(f func(name string, entries []netip.AddrPort)) error {
	r := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_IPSET<<8|nl.IPSET_CMD_LIST, unix.NLM_F_DUMP)
	r.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_UNSPEC, Version: nl.NFNETLINK_V0})
	r.AddData(nl.NewRtAttr(nl.IPSET_ATTR_PROTOCOL, nl.Uint8Attr(nl.IPSET_PROTOCOL)))
	err := r.ExecuteIter(unix.NETLINK_NETFILTER, 0, func(message []byte) bool {
		var name string
		var entries []netip.AddrPort
		for kind, value := range attributes(message[min(nl.SizeofNfgenmsg, len(message)):]) {
			switch kind {
			case nl.IPSET_ATTR_SETNAME:
				name = nl.BytesToString(value)
			case nl.IPSET_ATTR_ADT:
				for _, entry := range attributes(value) {
					entries = append(entries, ipsetEntry(entry))
				}
			}
		}
		f(name, entries)
		return true
	})
	switch {
	case err == nil, errors.Is(err, unix.EPROTONOSUPPORT), errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EINVAL):
		return nil
	}
	return fmt.Errorf("list ipsets: %w", err)
}

func ipsetEntry(b []byte) netip.AddrPort {
	var address netip.Addr
	var port uint16
	for kind, value := range attributes(b) {
		switch {
		case kind == nl.IPSET_ATTR_PORT && len(value) == 2:
			port = binary.BigEndian.Uint16(value)
		case kind == nl.IPSET_ATTR_IP:
			for _, a := range attributes(value) {
				address, _ = netip.AddrFromSlice(a)
			}
		}
	}
	return netip.AddrPortFrom(address, port)
}
