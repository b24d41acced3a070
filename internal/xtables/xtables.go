// Package xtables asks the kernel what it reports about the tables of iptables at little cost. That
// shows whether tables have changed without reading them. Everything refers to the network
// namespace of the calling thread.
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

// Generation returns the generation number of nf_tables, which newer versions of iptables work
// over. Each transaction increases the number by one, whichever table it changes.
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
	// Entries is the number of rules plus twice the number of chains. Bytes is their size in bytes.
	Entries, Bytes uint32
	// Base holds the size of each base chain in bytes, by hook. A rule takes up to a few hundred
	// bytes.
	Base [5]uint32
}

// getInfo is the kernel's struct ipt_getinfo, which is also ip6t_getinfo.
type getInfo struct {
	name       [32]byte
	validHooks uint32
	hookEntry  [5]uint32
	underflow  [5]uint32
	entries    uint32
	size       uint32
}

// soGetInfo is the socket option IPT_SO_GET_INFO, which is also IP6T_SO_GET_INFO.
const soGetInfo = 64

// SizeOf returns the size of a table of the legacy interface. If the table does not exist, the
// kernel creates it.
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

// HasChain reports whether nf_tables has a chain. It reports false if the kernel lacks nf_tables.
func HasChain(family model.Family, table, chain string) (bool, error) {
	messages, err := getChain(family, table, chain)
	return messages != nil, err
}

// Drops reports whether nf_tables has a base chain of this name with the policy DROP.
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

// getChain returns the kernel's messages about a chain. nil means that there is no such chain.
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

// HasLegacy reports whether a table of the legacy interface exists. Unlike SizeOf, it does not
// create the table.
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
