// These tests prove that a long change reaches the kernel in short transactions, which hold up no
// packets, and in an order in which packets never find only a part of a Service port.
package nftables

import (
	"context"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/netlink"
	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

// many is the number of Service ports of a long change.
const many = 1000

// manyPorts adds Service ports with two backends each to the state.
func (c *testCluster) manyPorts() (ids []view.ServicePortID) {
	for i := range many {
		p := benchPort(1000+i, 2)
		c.set(p)
		ids = append(ids, p.ID)
	}
	return ids
}

// transactions calls change, and returns the sets of the elements that each transaction of it adds
// or removes, by the kernel's notifications.
func (c *testCluster) transactions(t *testing.T, change func()) (all [][]setID) {
	t.Helper()
	var other *nft.Conn
	require.NoError(t, c.a.Do(func() (err error) {
		if other, err = nft.Dial(); err == nil {
			err = other.Watcher.Open()
		}
		return err
	}))
	defer other.Close()
	change()
	c.nft(t, "add table ip end")
	defer c.nft(t, "delete table ip end")

	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var sets []setID
	see := func(m netlink.Message) string {
		const generic = 4 // the length of nfgenmsg in bytes
		// The attribute has the same number in all messages.
		name := func(kind uint16) string { return netlink.Text(netlink.Attribute(m.Attributes(generic), kind)) }
		switch m.Kind & 0xff {
		case unix.NFT_MSG_NEWTABLE:
			if name(unix.NFTA_TABLE_NAME) == "end" {
				stop()
			}
		case unix.NFT_MSG_NEWSETELEM, unix.NFT_MSG_DELSETELEM:
			s, ok := c.inHost.families[0].setOf(name(unix.NFTA_SET_ELEM_LIST_SET))
			require.True(t, ok)
			sets = append(sets, s)
		case unix.NFT_MSG_NEWGEN:
			if len(sets) > 0 {
				all = append(all, sets)
			}
			sets = nil
		}
		return ""
	}
	var watching sync.WaitGroup
	watching.Go(func() {
		other.Watcher.Watch(ctx, time.Minute, see, func(reason string) { t.Error(reason) }, func(err error) { t.Error(err) })
	})
	watching.Wait()
	return all
}

// TestLongChangesAreShortTransactions asserts that adding many Service ports and removing them
// takes transactions of a limited length. Frontends are there only while all that they lead to is,
// and cluster IPs, which refuse other ports, only while their frontends are.
func TestLongChangesAreShortTransactions(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.replace(t)
	ids := c.manyPorts()
	var changes []view.Change
	for _, id := range ids {
		changes = append(changes, view.Change{Before: c.state.Ports[id]})
	}
	check := func(all [][]setID) {
		t.Helper()
		const shortest = 16 // an element with a key of four bytes
		for _, sets := range all {
			require.LessOrEqual(t, len(sets), nft.PartLength/shortest)
		}
		order := slices.Concat(all...)
		count := map[setID]int{}
		for _, s := range order {
			count[s]++
		}
		for _, s := range []setID{sizes + cluster, frontends, clusterIPs} {
			require.Equal(t, many, count[s], s)
		}
		require.Equal(t, 2*many, count[endpoints(cluster, 0)])
		if first := order[0]; first == clusterIPs {
			slices.Reverse(order) // elements were removed
		}
		var ordered []setID
		for _, s := range order {
			if s != firstPick+cluster && s != policies { // shared by Service ports, and kept
				ordered = append(ordered, s)
			}
		}
		require.Equal(t, []setID{endpoints(cluster, 0), sizes + cluster, frontends, clusterIPs}, slices.Compact(ordered))
	}
	added := c.transactions(t, func() { c.replace(t) })
	check(added)
	c.inHost.families[0].holds(t)
	removed := c.transactions(t, func() { require.NoError(t, c.inHost.Apply(t.Context(), changes)) })
	check(removed)
	clear(c.state.Ports)
	c.inHost.families[0].holds(t)
}

// TestRefusedPart asserts that a Service port which the kernel refuses in the middle of a long
// change keeps no other one from being programmed, and that the table is not created again.
func TestRefusedPart(t *testing.T) {
	t.Parallel()
	var log strings.Builder
	c := newCluster(t)
	c.inHost = newInHost(t, c.a.Host, Options{Log: slog.New(slog.NewTextHandler(&log, nil))})
	c.replace(t)
	c.manyPorts()
	served := c.web(model.IPv4, 1, 2)
	// Two Service ports with one address are never wanted at once. Here they stand for what the
	// kernel refuses.
	one, rival := c.web(model.IPv4, 5, 2), c.web(model.IPv4, 5, 3)
	rival.ID.Service.Name = "rival"
	c.set(served, one, rival)
	for range 2 {
		ports, ok := programmer.PortErrors(c.inHost.Replace(t.Context(), c.state))
		require.True(t, ok)
		require.Len(t, ports, 1)
		require.Contains(t, []view.ServicePortID{one.ID, rival.ID}, ports[0].ID)
		for _, i := range []byte{1, 5} {
			require.True(t, c.client.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(vip(model.IPv4, i), servicePort), 1, patient).All(testenv.Answered))
		}
	}
	require.NotContains(t, log.String(), "Recreating the nftables table")
	delete(c.state.Ports, rival.ID)
	c.replace(t)
	c.inHost.families[0].holds(t)
}
