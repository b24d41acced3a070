// Package xtables asks the kernel for what it tells of iptables' tables for next to nothing: whether they have changed can
// be known without reading them. All is of the calling thread's network namespace.
package xtables

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"unsafe"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/internal/model"
)

// Generation asks nf_tables, over which newer iptables works, for the number of its generation. Each transaction makes it
// one more, whatever table it changes.
func Generation() (uint32, error) {
	request := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETGEN, 0)
	request.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_UNSPEC, Version: nl.NFNETLINK_V0})
	messages, err := request.Execute(unix.NETLINK_NETFILTER, 0)
	for _, m := range messages {
		if len(m) < nl.SizeofNfgenmsg || err != nil {
			continue
		}
		attributes, parseErr := nl.ParseRouteAttr(m[nl.SizeofNfgenmsg:])
		for _, a := range attributes {
			if a.Attr.Type&nl.NLA_TYPE_MASK == unix.NFTA_GEN_ID && len(a.Value) == 4 {
				return binary.BigEndian.Uint32(a.Value), nil
			}
		}
		err = parseErr
	}
	if err == nil {
		err = errors.New("it does not say")
	}
	return 0, fmt.Errorf("generation of nf_tables: %w", err)
}

// Size is the size of a table of the legacy interface.
type Size struct {
	// Entries are its rules and twice its chains, Bytes what they take.
	Entries, Bytes uint32
	// Base are the bytes of the base chains, by hook. Rules are up to a few hundred bytes each.
	Base [5]uint32
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

// SizeOf asks for the size of a table of the legacy interface. The kernel makes the table if there is none.
func SizeOf(family model.Family, table string) (Size, error) {
	domain, level := unix.AF_INET, unix.IPPROTO_IP
	if family == model.IPv6 {
		domain, level = unix.AF_INET6, unix.IPPROTO_IPV6
	}
	socket, err := unix.Socket(domain, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
	if err != nil {
		return Size{}, fmt.Errorf("size of the %v table %s: open a raw socket: %w", family, table, err)
	}
	defer func() { _ = unix.Close(socket) }()
	var info getInfo
	copy(info.name[:len(info.name)-1], table)
	length := uint32(unsafe.Sizeof(info))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(socket), uintptr(level), soGetInfo,
		uintptr(unsafe.Pointer(&info)), uintptr(unsafe.Pointer(&length)), 0)
	if errno != 0 {
		return Size{}, fmt.Errorf("size of the %v table %s: %w", family, table, errno)
	}
	s := Size{Entries: info.entries, Bytes: info.size}
	for h := range info.hookEntry {
		if info.validHooks&(1<<h) != 0 {
			s.Base[h] = info.underflow[h] - info.hookEntry[h]
		}
	}
	return s, nil
}

// HasChain asks nf_tables whether there is a chain. A kernel without nf_tables has none.
func HasChain(family model.Family, table, chain string) (bool, error) {
	messages, err := getChain(family, table, chain)
	return messages != nil, err
}

// Drops asks nf_tables whether there is a base chain with the policy DROP.
func Drops(family model.Family, table, chain string) (bool, error) {
	const drop = 0 // NF_DROP
	messages, err := getChain(family, table, chain)
	for _, m := range messages {
		attributes, parseErr := nl.ParseRouteAttr(m[min(len(m), nl.SizeofNfgenmsg):])
		for _, a := range attributes {
			if a.Attr.Type&nl.NLA_TYPE_MASK == unix.NFTA_CHAIN_POLICY && len(a.Value) == 4 && binary.BigEndian.Uint32(a.Value) == drop {
				return true, nil
			}
		}
		err = errors.Join(err, parseErr)
	}
	return false, err
}

// getChain gives the kernel's messages about a chain; nil: there is none.
func getChain(family model.Family, table, chain string) ([][]byte, error) {
	number := uint8(unix.NFPROTO_IPV4)
	if family == model.IPv6 {
		number = unix.NFPROTO_IPV6
	}
	request := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETCHAIN, 0)
	request.AddData(&nl.Nfgenmsg{NfgenFamily: number, Version: nl.NFNETLINK_V0})
	request.AddData(nl.NewRtAttr(unix.NFTA_CHAIN_TABLE, nl.ZeroTerminated(table)))
	request.AddData(nl.NewRtAttr(unix.NFTA_CHAIN_NAME, nl.ZeroTerminated(chain)))
	messages, err := request.Execute(unix.NETLINK_NETFILTER, 0)
	switch {
	case err == nil:
		return messages, nil
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.EPROTONOSUPPORT), errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EINVAL),
		errors.Is(err, unix.EAFNOSUPPORT):
		return nil, nil
	}
	return nil, fmt.Errorf("look for the %v chain %s in table %s of nf_tables: %w", family, chain, table, err)
}

// HasLegacy tells whether a table of the legacy interface is there, without making it.
func HasLegacy(family model.Family, table string) (bool, error) {
	name := "ip_tables_names"
	if family == model.IPv6 {
		name = "ip6_tables_names"
	}
	names, err := os.ReadFile("/proc/thread-self/net/" + name)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil // the interface's module is not loaded
	}
	if err != nil {
		return false, fmt.Errorf("look for tables of the legacy interface: %w", err)
	}
	return slices.Contains(strings.Fields(string(names)), table), nil
}
