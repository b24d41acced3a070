package iptables

import (
	"encoding/binary"
	"fmt"
	"unsafe"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/internal/model"
)

// stamp is what the kernel tells of its tables for next to nothing. Two that differ tell that something was changed.
type stamp struct {
	// generation counts the changes of nf_tables, in all of its tables.
	generation uint32
	// legacy has the tables nat and filter of both families.
	legacy [4]legacyInfo
}

// legacyInfo tells the size of a table.
type legacyInfo struct {
	entries, size uint32
	// base are the sizes of the base chains: a rule more or less in one of them shows, however many others there are.
	base [5]uint32
}

// follows tells whether a stamp may be that of the tables after so many changes of this package since an earlier one, and
// none of others. For the legacy variant that is known of base chains only.
func (s stamp) follows(earlier stamp, commits int) bool {
	for i := range s.legacy {
		if s.legacy[i].base != earlier.legacy[i].base {
			return false
		}
	}
	return s.generation-earlier.generation == uint32(commits) || s.generation == 0
}

// stamp gives the present stamp of the tables in use. Where it cannot be had it is one that never follows another.
func (p *Programmer) stamp() stamp {
	var s stamp
	for family, f := range p.families {
		var err error
		if f.tool.variant == NFT {
			s.generation, err = generation()
		} else {
			err = legacyStamp(family, &s)
		}
		if err != nil {
			p.log.Debug("no stamp of the tables", "family", family, "err", err)
			p.watch.unreadable++
			return stamp{generation: p.watch.unreadable << 16}
		}
	}
	return s
}

// generation asks nf_tables for the number of its generation, which each transaction makes one more.
func generation() (uint32, error) {
	request := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETGEN, 0)
	request.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_UNSPEC, Version: nl.NFNETLINK_V0})
	messages, err := request.Execute(unix.NETLINK_NETFILTER, 0)
	if err != nil {
		return 0, fmt.Errorf("ask nf_tables for its generation: %w", err)
	}
	for _, m := range messages {
		if len(m) < nl.SizeofNfgenmsg {
			continue
		}
		attributes, err := nl.ParseRouteAttr(m[nl.SizeofNfgenmsg:])
		if err != nil {
			return 0, fmt.Errorf("ask nf_tables for its generation: %w", err)
		}
		for _, a := range attributes {
			if a.Attr.Type&nl.NLA_TYPE_MASK == unix.NFTA_GEN_ID && len(a.Value) == 4 {
				return binary.BigEndian.Uint32(a.Value), nil
			}
		}
	}
	return 0, fmt.Errorf("ask nf_tables for its generation: no answer")
}

// getInfo is the kernel's struct ipt_getinfo, and ip6t_getinfo.
type getInfo struct {
	name       [32]byte
	validHooks uint32
	hookEntry  [5]uint32
	underflow  [5]uint32
	entries    uint32
	size       uint32
}

// soGetInfo is the socket option IPT_SO_GET_INFO, and IP6T_SO_GET_INFO.
const soGetInfo = 64

// legacyStamp asks ip_tables or ip6_tables for the sizes of its tables.
func legacyStamp(family model.Family, s *stamp) error {
	domain, level, first := unix.AF_INET, unix.IPPROTO_IP, 0
	if family == model.IPv6 {
		domain, level, first = unix.AF_INET6, unix.IPPROTO_IPV6, 2
	}
	socket, err := unix.Socket(domain, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
	if err != nil {
		return fmt.Errorf("open a raw socket: %w", err)
	}
	defer func() { _ = unix.Close(socket) }()
	for t := range tables {
		var info getInfo
		copy(info.name[:], t.String())
		length := uint32(unsafe.Sizeof(info))
		_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(socket), uintptr(level), soGetInfo,
			uintptr(unsafe.Pointer(&info)), uintptr(unsafe.Pointer(&length)), 0)
		if errno != 0 {
			return fmt.Errorf("ask for the size of table %v: %w", t, errno)
		}
		l := legacyInfo{entries: info.entries, size: info.size}
		for h := range info.hookEntry {
			if info.validHooks&(1<<h) != 0 {
				l.base[h] = info.underflow[h] - info.hookEntry[h]
			}
		}
		s.legacy[first+int(t)] = l
	}
	return nil
}
