// Package xtables asks the kernel what it reports about the tables of iptables' legacy interface at
// little cost. That shows whether tables have changed without reading them. Everything refers to
// the network namespace of the calling thread. See agent/nft for the tables of nf_tables.
package xtables

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/internal/model"
)

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
