package conformance

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/internal/testenv"
)

// conntrack is the node's memory of connections, with the entries that a case has put there.
type conntrack struct {
	node    *testenv.Host
	entries map[string]ConntrackEntry
}

// entryTimeout is how long an entry lives, in seconds: longer than a case.
const entryTimeout = 3600

var protocolNumbers = map[Proto]uint8{TCP: unix.IPPROTO_TCP, UDP: unix.IPPROTO_UDP, SCTP: unix.IPPROTO_SCTP}

// Inject makes entries.
func (c *conntrack) Inject(entries []ConntrackEntry) error {
	if c.entries == nil {
		c.entries = map[string]ConntrackEntry{}
	}
	return c.node.Do(func() error {
		for _, e := range entries {
			flow := &netlink.ConntrackFlow{
				FamilyType: familyOf(e.Orig.Dst.Addr), TimeOut: entryTimeout,
				Forward: e.Orig.kernel(e.Proto), Reverse: e.Reply.kernel(e.Proto),
			}
			if err := netlink.ConntrackCreate(netlink.ConntrackTable, netlink.InetFamily(flow.FamilyType), flow); err != nil {
				return fmt.Errorf("make the conntrack entry %s: %w", e.ID, err)
			}
			c.entries[e.ID] = e
		}
		return nil
	})
}

// Await waits until those entries are there that must be, and no others.
func (c *conntrack) Await(ctx context.Context, want ExpectConntrack) error {
	if len(want.Deleted)+len(want.Kept) == 0 {
		return nil
	}
	return testenv.WaitFor(ctx, func() error {
		there, err := c.list()
		if err != nil {
			return err
		}
		var errs []error
		for _, id := range want.Kept {
			if !there[c.entries[id].key()] {
				errs = append(errs, fmt.Errorf("%s is gone", id))
			}
		}
		for _, id := range want.Deleted {
			if there[c.entries[id].key()] {
				errs = append(errs, fmt.Errorf("%s is still there", id))
			}
		}
		return errors.Join(errs...)
	})
}

// list gives the keys of what the kernel has.
func (c *conntrack) list() (map[string]bool, error) {
	there := map[string]bool{}
	err := c.node.Do(func() error {
		for _, family := range []netlink.InetFamily{unix.AF_INET, unix.AF_INET6} {
			flows, err := netlink.ConntrackTableList(netlink.ConntrackTable, family)
			if err != nil {
				return err
			}
			for _, flow := range flows {
				there[fmt.Sprint(flow.Forward.Protocol, tupleOf(flow.Forward), tupleOf(flow.Reverse))] = true
			}
		}
		return nil
	})
	return there, err
}

func (e ConntrackEntry) key() string {
	return fmt.Sprint(protocolNumbers[e.Proto], tupleOf(e.Orig.kernel(e.Proto)), tupleOf(e.Reply.kernel(e.Proto)))
}

func (t Tuple) kernel(proto Proto) netlink.IPTuple {
	return netlink.IPTuple{
		Protocol: protocolNumbers[proto],
		SrcIP:    t.Src.AsSlice(), SrcPort: t.Sport, DstIP: t.Dst.AsSlice(), DstPort: t.Dport,
	}
}

func tupleOf(t netlink.IPTuple) [2]netip.AddrPort {
	src, _ := netip.AddrFromSlice(t.SrcIP)
	dst, _ := netip.AddrFromSlice(t.DstIP)
	return [2]netip.AddrPort{netip.AddrPortFrom(src.Unmap(), t.SrcPort), netip.AddrPortFrom(dst.Unmap(), t.DstPort)}
}

func familyOf(addr netip.Addr) uint8 {
	if addr.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}
