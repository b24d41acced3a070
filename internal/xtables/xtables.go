// Package xtables asks the kernel what it reports about the tables of iptables' legacy interface.
// That shows, without iptables' programs and at little cost, whether tables have changed and which
// chains there are. Everything refers to
// the network namespace of the calling thread. See agent/nft for the tables of nf_tables.
package xtables

import (
	"bytes"
	"encoding/binary"
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

// These are the socket options IPT_SO_GET_INFO and IPT_SO_GET_ENTRIES, which are also
// IP6T_SO_GET_INFO and IP6T_SO_GET_ENTRIES.
const (
	soGetInfo    = 64
	soGetEntries = 65
)

// SizeOf returns the size of a table of the legacy interface. If the table does not exist, the
// kernel creates it.
func SizeOf(family model.Family, table string) (s Size, err error) {
	err = ask(family, func(level int, socket int) error {
		info, err := infoOf(socket, level, table)
		s = Size{Entries: info.entries, Bytes: info.size}
		for h := range info.hookEntry {
			if info.validHooks&(1<<h) != 0 {
				s.Base[h] = info.underflow[h] - info.hookEntry[h]
			}
		}
		return err
	})
	if err != nil {
		return Size{}, fmt.Errorf("size of the %v table %s: %w", family, table, err)
	}
	return s, nil
}

// ask calls use with a socket for the tables of a family, and the level of its options.
func ask(family model.Family, use func(level, socket int) error) error {
	domain, level := unix.AF_INET, unix.IPPROTO_IP
	if family == model.IPv6 {
		domain, level = unix.AF_INET6, unix.IPPROTO_IPV6
	}
	socket, err := unix.Socket(domain, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
	if err != nil {
		return fmt.Errorf("open a raw socket: %w", err)
	}
	defer func() { _ = unix.Close(socket) }()
	return use(level, socket)
}

func infoOf(socket, level int, table string) (info getInfo, err error) {
	copy(info.name[:len(info.name)-1], table)
	return info, get(socket, level, soGetInfo, unsafe.Pointer(&info), unsafe.Sizeof(info))
}

func get(socket, level, option int, to unsafe.Pointer, length uintptr) error {
	n := uint32(length)
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(socket), uintptr(level), uintptr(option),
		uintptr(to), uintptr(unsafe.Pointer(&n)), 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// Chains returns the names of the chains of a table of the legacy interface, except for those that
// every table has. There are none if the table does not exist. It needs none of iptables' programs.
func Chains(family model.Family, table string) (names []string, err error) {
	if has, err := HasLegacy(family, table); err != nil || !has {
		return nil, err
	}
	err = ask(family, func(level, socket int) error {
		for range attempts {
			info, err := infoOf(socket, level, table)
			if err != nil {
				return err
			}
			// The kernel's struct ipt_get_entries: the name, the size, and the entries at the next multiple
			// of 8.
			const header = 40
			buffer := make([]byte, header+int(info.size))
			copy(buffer, table)
			binary.NativeEndian.PutUint32(buffer[len(info.name):], info.size)
			err = get(socket, level, soGetEntries, unsafe.Pointer(&buffer[0]), uintptr(len(buffer)))
			if errors.Is(err, unix.EAGAIN) { // others have changed the table's size
				continue
			}
			names = chainsIn(buffer[header:], family)
			return err
		}
		return unix.EAGAIN
	})
	if err != nil {
		return nil, fmt.Errorf("read the chains of the %v table %s: %w", family, table, err)
	}
	return names, nil
}

// attempts is how often a table that others change is read.
const attempts = 10

// chainsIn returns the names of chains in a table's entries. In the kernel's struct ipt_entry, the
// offsets of its target and of the next entry follow what the rule matches. The target ERROR, whose
// argument is a name, begins a chain.
func chainsIn(entries []byte, family model.Family) (names []string) {
	const nameAt, argumentAt = 2, 32 // in the target
	matches := 84 + 4
	if family == model.IPv6 {
		matches = 136 + 4
	}
	for len(entries) >= matches+4 {
		target := int(binary.NativeEndian.Uint16(entries[matches:]))
		next := int(binary.NativeEndian.Uint16(entries[matches+2:]))
		if next <= matches || next > len(entries) || target+argumentAt > next {
			break
		}
		if text(entries[target+nameAt:target+argumentAt]) == "ERROR" {
			names = append(names, text(entries[target+argumentAt:next]))
		}
		entries = entries[next:]
	}
	if len(names) > 0 {
		names = names[:len(names)-1] // the end of the table
	}
	return names
}

// text returns the text before the first zero.
func text(b []byte) string {
	before, _, _ := bytes.Cut(b, []byte{0})
	return string(before)
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
