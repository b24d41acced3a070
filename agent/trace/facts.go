package trace

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	anetlink "github.com/slicecast/slicecast/agent/netlink"
	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/xtables"
)

// kubeProxyDevice is the device of kube-proxy's mode ipvs.
const kubeProxyDevice = "kube-ipvs0"

// serviceDevices are the devices whose addresses are those of Services, in the modes for IPVS.
var serviceDevices = []string{"slicecast-ipvs0", kubeProxyDevice}

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
		f.KubeProxyIPVS = f.KubeProxyIPVS || l.Attrs().Name == kubeProxyDevice
		f.IPVS = f.IPVS || ofServices[l.Attrs().Index]
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
		if ofServices[a.LinkIndex] && !address.IsLinkLocalUnicast() {
			f.Services = append(f.Services, address)
		}
		if !ofServices[a.LinkIndex] {
			f.Addresses = append(f.Addresses, address)
		}
	}
	slices.SortFunc(f.Addresses, netip.Addr.Compare)
	f.Addresses = slices.Compact(f.Addresses)
	return f, nil
}

// Read reads the rules of an IP family that the kernel holds, in the network namespace of the
// calling thread. It uses the programs for saving of both variants of iptables, if they are there.
func Read(ctx context.Context, family model.Family, facts Facts) (*Rules, error) {
	r := newRules(family, facts)
	if facts.IPVS {
		if err := errors.Join(r.readIPSets(), r.readIPVS()); err != nil {
			return nil, err
		}
	}
	c, err := nft.Dial()
	hasIPTables := false
	switch {
	case errors.Is(err, unix.EPROTONOSUPPORT): // then it holds no rules
	case err != nil:
		return nil, fmt.Errorf("read the rules of nf_tables: %w", err)
	default:
		defer c.Close()
		if hasIPTables, err = r.addNFTables(c); err != nil {
			return nil, err
		}
	}
	if hasIPTables {
		ok, err := r.readIPTables(ctx, "nft")
		if err != nil {
			return nil, err
		}
		if !ok {
			r.Unjudged = append(r.Unjudged, "there are rules of iptables in nf_tables, but no program iptables-nft-save to read "+
				"them with: install iptables")
		}
	}
	read, err := r.readIPTables(ctx, "legacy")
	if err != nil {
		return nil, err
	}
	for _, table := range []string{"nat", "filter"} {
		if exists, err := xtables.HasLegacy(family, table); !read && (err != nil || exists) {
			r.Unjudged = append(r.Unjudged, "the kernel has table "+table+" of iptables' legacy interface, but there is no program "+
				"iptables-legacy-save to read it with: install iptables")
		}
	}
	r.finish()
	return r, nil
}

// Has reports whether the kernel has an IP family, even if no interface has an address of it.
func Has(family model.Family) bool {
	fd, err := unix.Socket(int(anetlink.Domain(family)), unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		_ = unix.Close(fd)
	}
	return !errors.Is(err, unix.EAFNOSUPPORT)
}
