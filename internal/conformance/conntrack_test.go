// This file creates the entries of a case in the node's real connection tracking table, and checks
// which of them are still there.
package conformance

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/internal/testenv"
)

// conntrack is the node's connection tracking table, with the entries that a case has created.
type conntrack struct {
	node    *testenv.Host
	entries map[string]ConntrackEntry // by ID
}

// entryTimeout is the lifetime of an entry in seconds. It exceeds the duration of any case.
const entryTimeout = 3600

var protocolNumbers = map[Proto]uint8{TCP: unix.IPPROTO_TCP, UDP: unix.IPPROTO_UDP, SCTP: unix.IPPROTO_SCTP}

// Inject creates entries.
func (c *conntrack) Inject(entries []ConntrackEntry) error {
	if c.entries == nil {
		c.entries = map[string]ConntrackEntry{}
	}
	return c.node.Do(func() error {
		for _, e := range entries {
			family := netlink.InetFamily(unix.AF_INET)
			if e.Orig.Dst.Is6() {
				family = unix.AF_INET6
			}
			flow := &netlink.ConntrackFlow{
				FamilyType: uint8(family), TimeOut: entryTimeout, Forward: e.Orig.kernel(e.Proto), Reverse: e.Reply.kernel(e.Proto),
			}
			if err := netlink.ConntrackCreate(netlink.ConntrackTable, family, flow); err != nil {
				return fmt.Errorf("create conntrack entry %s: %w", e.ID, err)
			}
			c.entries[e.ID] = e
		}
		return nil
	})
}

// Await waits until the entries that must be kept exist and those that must be deleted do not.
func (c *conntrack) Await(ctx context.Context, want ExpectConntrack) error {
	return testenv.WaitFor(ctx, func() error {
		there, err := c.list()
		if err != nil {
			return err
		}
		var errs []error
		for _, id := range want.Kept {
			if !there[c.entries[id].key()] {
				errs = append(errs, fmt.Errorf("entry %s was deleted", id))
			}
		}
		for _, id := range want.Deleted {
			if there[c.entries[id].key()] {
				errs = append(errs, fmt.Errorf("entry %s still exists", id))
			}
		}
		return errors.Join(errs...)
	})
}

// list returns the keys of the kernel's entries. It uses the conntrack command, because the netlink
// package does not read the ports of SCTP.
func (c *conntrack) list() (map[string]bool, error) {
	there := map[string]bool{}
	for _, family := range []string{"ipv4", "ipv6"} {
		out, err := c.node.Command(context.Background(), "conntrack", "-L", "-f", family).Output()
		if err != nil {
			return nil, fmt.Errorf("conntrack -L: %w", err)
		}
		for line := range strings.Lines(string(out)) {
			key, _, _ := strings.Cut(line, " ")
			for field := range strings.FieldsSeq(line) {
				name, value, _ := strings.Cut(field, "=")
				if slices.Contains([]string{"src", "dst", "sport", "dport"}, name) {
					key += " " + value
				}
			}
			there[key] = true
		}
	}
	return there, nil
}

// key returns the protocol and the two tuples in the order of the conntrack command.
func (e ConntrackEntry) key() string {
	key := strings.ToLower(string(e.Proto))
	for _, t := range []Tuple{e.Orig, e.Reply} {
		key += fmt.Sprintf(" %s %s %d %d", t.Src, t.Dst, t.Sport, t.Dport)
	}
	return key
}

func (t Tuple) kernel(proto Proto) netlink.IPTuple {
	return netlink.IPTuple{
		Protocol: protocolNumbers[proto],
		SrcIP:    t.Src.AsSlice(), SrcPort: t.Sport, DstIP: t.Dst.AsSlice(), DstPort: t.Dport,
	}
}
