// These tests prove that interfaces, addresses and routes are read as the kernel has them, and that
// a list that was interrupted is read again.
package netlink

import (
	"encoding/binary"
	"fmt"
	"math"
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

func TestLists(t *testing.T) {
	t.Parallel()
	host := testenv.NewNetwork(t).AddNode("a").Host
	for _, args := range [][]string{
		{"link", "add", "veth1", "mtu", "1400", "type", "veth", "peer", "name", "veth2"},
		{"link", "set", "veth2", "up"},
		{"link", "set", "veth1", "up"},
		{"address", "add", "192.0.2.1", "peer", "192.0.2.2/30", "dev", "veth1"},
		{"-6", "address", "add", "2001:db8::1/64", "dev", "veth1", "nodad"},
		{"route", "add", "198.51.100.0/24", "dev", "veth1", "src", "192.0.2.1", "proto", "static"},
		{"-6", "route", "add", "2001:db8:1::/48", "dev", "veth1", "proto", "static"},
		{"route", "add", "203.0.113.0/28", "via", "192.0.2.2"},
		{"route", "add", "203.0.113.16/28", "via", "inet6", "2001:db8::2", "dev", "veth1"},
		{"route", "add", "203.0.113.32/28", "nexthop", "via", "192.0.2.2", "nexthop", "dev", "lo"},
	} {
		_, err := host.Run(t.Context(), "ip", args...)
		require.NoError(t, err)
	}
	var links []Link
	var addresses []Address
	require.NoError(t, host.Do(func() (err error) {
		if links, err = Links(); err != nil {
			return err
		}
		addresses, err = Addresses()
		return err
	}))
	index := 0
	byName := map[string]Link{}
	for _, l := range links {
		byName[l.Name] = l
		if l.Name == "veth1" {
			index = l.Index
		}
	}
	require.Equal(t, Link{index, 1400, "veth1", "veth", net.FlagUp | net.FlagBroadcast | net.FlagMulticast | net.FlagRunning}, byName["veth1"])
	require.Equal(t, Link{1, 65536, "lo", "", net.FlagUp | net.FlagLoopback | net.FlagRunning}, byName["lo"])
	require.Contains(t, addresses, Address{netip.MustParsePrefix("192.0.2.1/30"), index})
	require.Contains(t, addresses, Address{netip.MustParsePrefix("2001:db8::1/64"), index})
	require.Contains(t, addresses, Address{netip.MustParsePrefix("127.0.0.1/8"), 1})

	s := open(t, host, unix.NETLINK_ROUTE)
	one, err := s.Addresses(unix.AF_INET6)
	require.NoError(t, err)
	require.Contains(t, one, Address{netip.MustParsePrefix("2001:db8::1/64"), index})
	require.NotContains(t, one, Address{netip.MustParsePrefix("127.0.0.1/8"), 1})
	routes, err := s.Routes(model.IPv4)
	require.NoError(t, err)
	source := netip.MustParseAddr("192.0.2.1")
	for _, want := range []Route{
		{Destination: netip.MustParsePrefix("198.51.100.0/24"), Source: source, Link: index, Protocol: unix.RTPROT_STATIC},
		{Destination: netip.MustParsePrefix("203.0.113.0/28"), Gateway: netip.MustParseAddr("192.0.2.2"), Link: index, Protocol: unix.RTPROT_BOOT},
		{Destination: netip.MustParsePrefix("203.0.113.16/28"), Via: true, Link: index, Protocol: unix.RTPROT_BOOT},
		{Destination: netip.MustParsePrefix("203.0.113.32/28"), Hops: []int{index, 1}, Protocol: unix.RTPROT_BOOT},
	} {
		want.Table, want.Type = unix.RT_TABLE_MAIN, unix.RTN_UNICAST
		require.Contains(t, routes, want)
	}
	require.Contains(t, routes, Route{
		Destination: netip.MustParsePrefix("192.0.2.1/32"), Source: source, Link: index,
		Table: unix.RT_TABLE_LOCAL, Protocol: unix.RTPROT_KERNEL, Type: unix.RTN_LOCAL,
	})
	routes, err = s.Routes(model.IPv6)
	require.NoError(t, err)
	require.Contains(t, routes, Route{
		Destination: netip.MustParsePrefix("2001:db8:1::/48"), Link: index,
		Table: unix.RT_TABLE_MAIN, Protocol: unix.RTPROT_STATIC, Type: unix.RTN_UNICAST,
	})
}

// TestRules asserts that rules of the routing policy are read with all of their fields, and that
// routes of tables with large numbers are.
func TestRules(t *testing.T) {
	t.Parallel()
	host := testenv.NewNetwork(t).AddNode("a").Host
	s := open(t, host, unix.NETLINK_ROUTE)
	for family, option := range map[model.Family]string{model.IPv4: "-4", model.IPv6: "-6"} {
		for _, command := range []string{
			"rule add pref 9 nop", "rule add pref 7 iif lo fwmark 0x12000000 goto 9", "rule add pref 8 fwmark 0x12000000/0xff000000 lookup 70000",
			"route add local default dev lo table 70000 proto 92",
		} {
			_, err := host.Run(t.Context(), "ip", append([]string{option}, strings.Fields(command)...)...)
			require.NoError(t, err)
		}
		rules, err := s.Rules(family)
		require.NoError(t, err)
		require.Subset(t, rules, []Rule{
			{Priority: 7, Mark: 0x12 << 24, Mask: math.MaxUint32, Incoming: "lo", Action: unix.FR_ACT_GOTO, Goto: 9},
			{Priority: 8, Mark: 0x12 << 24, Mask: 0xff << 24, Action: unix.FR_ACT_TO_TBL, Table: 70000},
			{Priority: 9, Action: unix.FR_ACT_NOP},
		})
		routes, err := s.Routes(family)
		require.NoError(t, err)
		require.Contains(t, routes, Route{Link: 1, Table: 70000, Protocol: 92, Type: unix.RTN_LOCAL})
	}
}

// TestAddressesAreReadOnce asserts that all addresses are read by one request, however many
// interfaces there are. One request for each, which returns all addresses each time, would take
// tens of seconds on nodes with many Services (kubernetes/kubernetes#138927).
func TestAddressesAreReadOnce(t *testing.T) {
	t.Parallel()
	host := testenv.NewNetwork(t).AddNode("a").Host
	const pairs = 20
	for i := range byte(pairs) {
		name := fmt.Sprint("veth", i)
		_, err := host.Run(t.Context(), "ip", "link", "add", name, "type", "veth", "peer", "name", name+"b")
		require.NoError(t, err)
		_, err = host.Run(t.Context(), "ip", "address", "add", netip.AddrFrom4([4]byte{198, 18, i, 1}).String(), "dev", name)
		require.NoError(t, err)
	}
	s := open(t, host, unix.NETLINK_ROUTE)
	before := s.seq
	addresses, err := s.Addresses(unix.AF_INET)
	require.NoError(t, err)
	require.Equal(t, before+1, s.seq)
	links := map[int]bool{}
	for _, a := range addresses {
		links[a.Link] = true
	}
	require.Greater(t, len(links), pairs, "these, and what each machine has")
}

// TestInterruptedLists asserts that what an interrupted attempt returned does not remain, and that
// messages that are too short are left out.
func TestInterruptedLists(t *testing.T) {
	t.Parallel()
	message := func(seq uint32, flags uint16, last byte) []byte {
		w := &Writer{}
		at := w.Begin(unix.RTM_NEWADDR, flags)
		binary.NativeEndian.PutUint32(w.Buf[at+8:], seq)
		w.Buf = append(w.Buf, unix.AF_INET, 24, 0, 0, 7, 0, 0, 0)
		binary.NativeEndian.PutUint32(w.Buf[len(w.Buf)-4:], 7)
		w.Bytes(unix.IFA_LOCAL, []byte{192, 0, 2, last})
		w.End(at)
		return w.Buf
	}
	s, kernel := newKernel(t)
	require.NoError(t, unix.Send(kernel.fd, message(1, unix.NLM_F_DUMP_INTR, 1), 0))
	kernel.answer(1, 2, 0, 0) // two short messages and the end
	require.NoError(t, unix.Send(kernel.fd, message(2, 0, 2), 0))
	kernel.answer(2, 0, 0, 0)
	list, err := s.Addresses(unix.AF_INET)
	require.NoError(t, err)
	require.Equal(t, []Address{{netip.MustParsePrefix("192.0.2.2/24"), 7}}, list)
}
