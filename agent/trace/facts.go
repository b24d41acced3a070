package trace

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
)

// serviceDevices are the devices whose addresses are those of Services, in the modes for IPVS.
var serviceDevices = []string{"slicecast-ipvs0", "kube-ipvs0"}

// ReadFacts reads the addresses of the node in the network namespace of the calling thread.
func ReadFacts() (Facts, error) {
	f := Facts{Local: map[netip.Addr]bool{}}
	links, err := netlink.LinkList()
	if err != nil {
		return f, fmt.Errorf("list this machine's interfaces: %w", err)
	}
	ofServices := map[int]bool{}
	for _, l := range links {
		ofServices[l.Attrs().Index] = slices.Contains(serviceDevices, l.Attrs().Name)
	}
	list, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return f, fmt.Errorf("list this machine's addresses: %w", err)
	}
	for _, a := range list {
		address, ok := netip.AddrFromSlice(a.IP)
		if !ok {
			continue
		}
		address = address.Unmap()
		f.Local[address] = true
		if !ofServices[a.LinkIndex] {
			f.Addresses = append(f.Addresses, address)
		}
	}
	slices.SortFunc(f.Addresses, netip.Addr.Compare)
	f.Addresses = slices.Compact(f.Addresses)
	return f, nil
}
