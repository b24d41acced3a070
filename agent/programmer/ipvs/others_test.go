// These tests prove that what kube-proxy and other programs have in a real kernel is adopted, left
// alone or removed as it should be, and that their locks and refusals keep no Service from being
// programmed.
package ipvs

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	mobyipvs "github.com/moby/ipvs"
	"github.com/stretchr/testify/require"
	vnetlink "github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/netlink"
	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

// TestAdopted asserts that a virtual service of others for an address with affinity, such as
// kube-proxy's, gets the Service port's backends and loses backends that are unknown.
func TestAdopted(t *testing.T) {
	c := newCluster(t, Options{})
	dead := netip.MustParseAddrPort("10.180.77.77:8080")
	adopted := func(last byte) *view.ServicePort {
		foreign := &mobyipvs.Service{Address: vip(model.IPv4, last).AsSlice(), Port: servicePort, Protocol: 6, AddressFamily: 2, Netmask: 1<<32 - 1, SchedName: "rr"}
		require.NoError(t, c.ipvs.NewService(foreign))
		for _, b := range []netip.AddrPort{dead, c.backends(model.IPv4, tcpPort, 1).List()[0].Address} {
			require.NoError(t, c.ipvs.NewDestination(foreign, &mobyipvs.Destination{Address: b.Addr().AsSlice(), Port: b.Port(), Weight: 1}))
		}
		sticky := c.web(fmt.Sprint("sticky", last), model.IPv4, last, 1, 2)
		sticky.Affinity = time.Hour
		sticky.Frontends = sticky.Frontends[:1]
		return sticky
	}
	check := func(sticky *view.ServicePort) {
		t.Helper()
		require.Equal(t, map[netip.AddrPort]uint32{dead: 0, sticky.Cluster.List()[0].Address: 1, sticky.Cluster.List()[1].Address: 1}, c.destinations(t, sticky.ID))
		r := c.client.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(sticky.Frontends[0].Address, servicePort), 4, patient)
		require.True(t, r.All(testenv.Answered), "%v", r)
		require.Len(t, r.Backends(), 1, "%v", r)
	}
	first, second := adopted(1), adopted(2)
	c.set(first)
	require.NoError(t, c.Replace(t.Context(), c.state))
	check(first)
	c.apply(t, second.ID, second)
	check(second)
	c.endDrains(time.Now())
	require.NotContains(t, c.destinations(t, first.ID), dead)
	require.NotContains(t, c.destinations(t, second.ID), dead)
}

// TestExcluded asserts that within the excluded networks, a virtual service of others stays theirs
// and serves its address, whatever happens to a Service port with the same address. Everything else
// is served, including what is kube-proxy's.
func TestExcluded(t *testing.T) {
	c := newCluster(t, Options{ExcludeCIDRs: []netip.Prefix{netip.PrefixFrom(vip(model.IPv4, 1), 32)}})
	foreign := &mobyipvs.Service{Address: vip(model.IPv4, 1).AsSlice(), Port: servicePort, Protocol: 6, AddressFamily: 2, Netmask: 1<<32 - 1, SchedName: "rr"}
	theirs := c.backends(model.IPv4, tcpPort, 3).List()[0].Address
	occupy := func() {
		require.NoError(t, c.ipvs.NewService(foreign))
		require.NoError(t, c.ipvs.NewDestination(foreign, &mobyipvs.Destination{Address: theirs.Addr().AsSlice(), Port: theirs.Port(), Weight: 1}))
	}
	requireTheirs := func(served bool) {
		t.Helper()
		held, err := c.ipvs.GetDestinations(foreign)
		require.NoError(t, err)
		require.Len(t, held, 1)
		require.True(t, held[0].Address.Equal(theirs.Addr().AsSlice()) && held[0].Weight == 1, "%v", held[0])
		if served {
			r := c.client.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(vip(model.IPv4, 1), servicePort), 2, patient)
			require.Equal(t, map[string]int{"pod3": 2}, r.Backends(), "%v", r)
		}
	}
	requireOurs := func(last ...byte) {
		t.Helper()
		for _, a := range last {
			r := c.client.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(vip(model.IPv4, a), servicePort), 2, patient)
			require.True(t, r.All(testenv.Answered), "%v", r)
			require.NotContains(t, r.Backends(), "pod3")
		}
	}
	sticky := c.web("sticky", model.IPv4, 1, 1, 2)
	sticky.Affinity = time.Hour
	sticky.Frontends = []view.Frontend{clusterIP(vip(model.IPv4, 1)), clusterIP(vip(model.IPv4, 2))}
	plain := c.web("plain", model.IPv4, 3, 0)
	plain.Frontends = []view.Frontend{clusterIP(vip(model.IPv4, 3))}
	refused := func(err error) {
		t.Helper()
		failed, ok := programmer.PortErrors(err)
		require.True(t, ok, "%v", err)
		require.Len(t, failed, 1)
		require.Equal(t, sticky.ID, failed[0].ID)
		require.ErrorContains(t, failed[0].Err, "virtual service TCP 10.96.0.1:")
		require.True(t, failed[0].Lasting, "Watch tells when it is gone")
		requireTheirs(true)
		requireOurs(2, 3)
	}
	lost := func() bool {
		c.unseen = nil
		_, _, lost := c.serviceLost()
		return lost
	}
	occupy()
	c.set(plain, sticky)
	refused(c.Replace(t.Context(), c.state))
	refused(c.Replace(t.Context(), c.state))
	more, loose := *sticky, *sticky
	more.Cluster = c.backends(model.IPv4, tcpPort, 0, 1, 2)
	loose.Affinity = 0
	refused(c.Apply(t.Context(), []view.Change{{Before: sticky, After: &more}}))
	require.NoError(t, c.Apply(t.Context(), []view.Change{{Before: &more, After: &loose}}))
	requireTheirs(false)
	requireOurs(1, 2, 3) // by mark
	refused(c.Apply(t.Context(), []view.Change{{Before: &loose, After: sticky}}))
	require.NoError(t, c.Apply(t.Context(), []view.Change{{Before: sticky}}))
	requireTheirs(false)
	refused(c.Apply(t.Context(), []view.Change{{After: sticky}}))
	require.False(t, lost())

	require.NoError(t, c.ipvs.DelService(foreign))
	require.True(t, lost())
	require.NoError(t, c.Replace(t.Context(), c.state))
	requireOurs(1, 2, 3)
	require.NoError(t, c.Replace(t.Context(), c.state), "what is tagged is not another's")
	require.False(t, lost())

	// If others take the place of a virtual service, they do not lose it when the Service is removed.
	require.NoError(t, c.ipvs.DelService(foreign))
	occupy()
	require.NoError(t, c.Apply(t.Context(), []view.Change{{Before: sticky}}))
	requireTheirs(false)
	refused(c.Apply(t.Context(), []view.Change{{After: sticky}}))

	device := &vnetlink.Dummy{LinkAttrs: vnetlink.LinkAttrs{Name: KubeProxyDevice}}
	require.NoError(t, c.device.links.LinkAdd(device))
	require.NoError(t, c.device.links.AddrAdd(device, &vnetlink.Addr{IPNet: vnetlink.NewIPNet(vip(model.IPv4, 1).AsSlice())}))
	require.NoError(t, c.Replace(t.Context(), c.state))
	requireOurs(1, 2, 3)
}

// TestBusyRuleset asserts that Services are programmed even if others change nftables all the time.
func TestBusyRuleset(t *testing.T) {
	c := newCluster(t, Options{})
	c.set(c.web("web", model.IPv4, 1, 0))
	require.NoError(t, c.Replace(t.Context(), c.state))
	var other *nft.Conn
	require.NoError(t, c.a.Do(func() (err error) {
		other, err = nft.Dial()
		return err
	}))
	defer other.Close()
	ctx, cancel := context.WithCancel(t.Context())
	var busy sync.WaitGroup
	defer busy.Wait()
	defer cancel()
	changes := make(chan error, 1)
	busy.Go(func() {
		m := nft.Messages{Table: nft.Table{Family: nft.FamilyOf(model.IPv4), Name: "busy"}}
		m.AddTable()
		m.RemoveTable()
		for n := 0; ctx.Err() == nil; n++ {
			err := other.Commit(m.Batch())
			if err != nil || n == 0 {
				changes <- err
			}
			if err != nil {
				return
			}
		}
	})
	require.NoError(t, <-changes)
	for range 5 {
		require.NoError(t, c.Replace(t.Context(), c.state))
	}
	require.Empty(t, changes)
}

// occupyTable makes another process own the table of an IP family, until the returned socket is
// closed. Meanwhile, the kernel refuses changes to the table.
func (c *cluster) occupyTable(t *testing.T, family model.Family) *nft.Conn {
	t.Helper()
	const owned = 2 // NFT_TABLE_F_OWNER: the table is removed with its owner's socket
	var other *nft.Conn
	require.NoError(t, c.a.Do(func() (err error) {
		other, err = nft.Dial()
		return err
	}))
	b := nft.NewBatch(tableOf(family))
	at := b.Begin(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE)
	b.Buf = append(b.Buf, b.Number, unix.NFNETLINK_V0, 0, 0)
	b.Text(unix.NFTA_TABLE_NAME, Table)
	b.BigUint32(unix.NFTA_TABLE_FLAGS, owned)
	b.End(at)
	require.NoError(t, other.Commit(b))
	return other
}

// TestRefusedTransaction asserts that if the kernel refuses a transaction, here because another
// process owns the table, the next ones are not affected.
func TestRefusedTransaction(t *testing.T) {
	c := newCluster(t, Options{})
	web := c.web("web", model.IPv4, 1, 0)
	c.set(web)
	other := c.occupyTable(t, model.IPv4)
	require.ErrorIs(t, c.Replace(t.Context(), c.state), unix.EPERM)
	require.ErrorIs(t, c.Replace(t.Context(), c.state), unix.EPERM, "the answer to this one, and not to the one before")

	// A backend that such a transaction was to drain is not removed, before it is wanted again or
	// after.
	destinations := func() (n int) {
		t.Helper()
		all, err := c.ipvs.GetServices()
		require.NoError(t, err)
		for _, s := range all {
			held, err := c.ipvs.GetDestinations(s)
			require.NoError(t, err)
			n += len(held)
		}
		return n
	}
	require.Equal(t, 1, destinations())
	without := *web
	without.Cluster = view.Backends{}
	c.set(&without)
	for range 2 {
		require.ErrorIs(t, c.Replace(t.Context(), c.state), unix.EPERM)
		require.Len(t, c.family(model.IPv4).draining, 1)
		c.endDrains(time.Now())
		require.Equal(t, 1, destinations())
		require.Empty(t, c.family(model.IPv4).draining)
	}
	require.ErrorIs(t, c.Replace(t.Context(), c.state), unix.EPERM)
	c.set(web)
	other.Close()
	require.NoError(t, c.Replace(t.Context(), c.state))
	c.endDrains(time.Now())
	require.Equal(t, 1, destinations())
	c.requireNothingHeard(t)
	r := c.client.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(vip(model.IPv4, 1), servicePort), 2, patient)
	require.Equal(t, map[string]int{"pod0": 2}, r.Backends(), "%v", r)
}

// TestSettingsOfOthers asserts that settings which cannot be made, because /proc/sys is read-only
// in the agent's container, do not keep Services from being programmed. The exception is the one
// that IPVS must have at first.
func TestSettingsOfOthers(t *testing.T) {
	var log strings.Builder
	c := newCluster(t, Options{Log: slog.New(slog.NewTextHandler(&log, nil))})
	c.set(c.web("web", model.IPv4, 1, 0))
	set := func(name, value string) {
		t.Helper()
		require.NoError(t, c.a.Do(func() error {
			require.NoError(t, unix.Mount("", "/proc/sys", "", unix.MS_BIND|unix.MS_REMOUNT, ""))
			require.NoError(t, os.WriteFile("/proc/sys/"+name, []byte(value), 0))
			return unix.Mount("", "/proc/sys", "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, "")
		}))
	}
	require.NoError(t, unix.Mount("/proc/sys", "/proc/sys", "", unix.MS_BIND, ""))
	defer func() { require.NoError(t, unix.Unmount("/proc/sys", 0)) }()
	set(conntrackSysctl, "0")
	require.ErrorContains(t, c.Replace(t.Context(), c.state), "set the sysctl net.ipv4.vs.conntrack to 1: open /proc/sys/net/ipv4/vs/conntrack: read-only file system")
	set(conntrackSysctl, "1")
	require.NoError(t, c.Replace(t.Context(), c.state))
	require.Contains(t, log.String(), "set the sysctl net.ipv4.vs.expire_nodest_conn to 1")
	require.NotContains(t, log.String(), "set the sysctl net.ipv4.vs.conntrack")
	log.Reset()
	require.NoError(t, c.Replace(t.Context(), c.state))
	require.Empty(t, log.String(), "it was said")
	set(conntrackSysctl, "0")
	require.NoError(t, c.Replace(t.Context(), c.state))
	require.Contains(t, log.String(), "set the sysctl net.ipv4.vs.conntrack to 1")
	r := c.client.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(vip(model.IPv4, 1), servicePort), 1, hasty)
	require.Len(t, r.Attempts, 1)
}

// TestInterruptedProbe asserts that what a killed process has left of a probe for the scheduler
// does not make the next probe fail.
func TestInterruptedProbe(t *testing.T) {
	c := newCluster(t, Options{})
	left := &virtual{serviceKey: serviceKey{number: maxID, family: model.IPv4}, scheduler: "wrr"}
	require.NoError(t, c.ipvs.NewService(left.moby()))
	newInHost(t, c.a.Host, Options{})
	require.False(t, c.ipvs.IsServicePresent(left.moby()))
}

// TestKubeProxysSets asserts that kube-proxy's ipsets are removed, and those of others with similar
// names are not.
func TestKubeProxysSets(t *testing.T) {
	host := testenv.NewNetwork(t).AddNode("a")
	theirs := []string{"KUBE-CLUSTER-IP", "KUBE-6-CLUSTER-IP", "KUBE-IPVS-IPS", "KUBE-LOAD-BALANCER-SOURCE-CIDR", "KUBE-6-LOAD-BALANCER-SOURCE-CID"}
	others := []string{"KUBE-SRC-ABCDEFGHIJKLMNOP", "KUBE-DST-ABCDEFGHIJKLMNOP", "KUBE-6-SRC-ABCDEFGHIJKLMNOP", "KUBE-CLUSTER-IPS", "other"}
	require.NoError(t, host.Do(func() error {
		for _, name := range append(theirs, others...) {
			require.NoError(t, vnetlink.IpsetCreate(name, "hash:ip", vnetlink.IpsetCreateOptions{}), name)
		}
		require.NoError(t, CleanupKubeProxySets())
		require.NoError(t, CleanupKubeProxySets(), "nothing left to clean")
		var left []string
		err := netlink.IPSets(func(name string, _ []netip.AddrPort) { left = append(left, name) })
		require.ElementsMatch(t, others, left)
		return err
	}))
}

// TestKubeProxysServices asserts that kube-proxy's virtual services are removed, even if its device
// was removed before them, and that those of others are not.
func TestKubeProxysServices(t *testing.T) {
	t.Run("with the device", func(t *testing.T) { testKubeProxysServices(t, true) })
	t.Run("without", func(t *testing.T) { testKubeProxysServices(t, false) })
}

func testKubeProxysServices(t *testing.T, hasDevice bool) {
	c := newCluster(t, Options{})
	tcp, port, nodePort := uint8(6), uint16(servicePort), uint16(30080)
	service := func(a netip.Addr, port uint16) *mobyipvs.Service {
		return &mobyipvs.Service{Address: a.AsSlice(), Port: port, Protocol: 6, AddressFamily: 2, Netmask: 1<<32 - 1, SchedName: "rr"}
	}
	theirs := []*mobyipvs.Service{service(vip(model.IPv4, 1), port), service(c.a.IPv4, nodePort)}
	others := []*mobyipvs.Service{service(netip.MustParseAddr("203.0.113.1"), port), service(c.a.IPv4, port)}
	require.NoError(t, c.a.Do(func() error {
		if hasDevice {
			device := &vnetlink.Dummy{LinkAttrs: vnetlink.LinkAttrs{Name: KubeProxyDevice}}
			require.NoError(t, vnetlink.LinkAdd(device))
			onDevice := vip(model.IPv4, 2) // in no ipset
			require.NoError(t, vnetlink.AddrAdd(device, &vnetlink.Addr{IPNet: vnetlink.NewIPNet(onDevice.AsSlice())}))
			theirs = append(theirs, service(onDevice, port))
		}
		for _, s := range append(theirs, others...) {
			require.NoError(t, c.ipvs.NewService(s))
		}
		require.NoError(t, vnetlink.IpsetCreate("KUBE-CLUSTER-IP", "hash:ip,port", vnetlink.IpsetCreateOptions{}))
		require.NoError(t, vnetlink.IpsetAdd("KUBE-CLUSTER-IP", &vnetlink.IPSetEntry{IP: vip(model.IPv4, 1).AsSlice(), Protocol: &tcp, Port: &port}))
		require.NoError(t, vnetlink.IpsetCreate("KUBE-NODE-PORT-TCP", "hash:ip,port", vnetlink.IpsetCreateOptions{}))
		require.NoError(t, vnetlink.IpsetAdd("KUBE-NODE-PORT-TCP", &vnetlink.IPSetEntry{IP: c.a.IPv4.AsSlice(), Protocol: &tcp, Port: &nodePort}))
		require.NoError(t, CleanupKubeProxy(t.Context()))
		_, err := vnetlink.LinkByName(KubeProxyDevice)
		require.ErrorAs(t, err, new(vnetlink.LinkNotFoundError))
		return CleanupKubeProxySets()
	}))
	for _, s := range theirs {
		require.False(t, c.ipvs.IsServicePresent(s), "%v:%d", s.Address, s.Port)
	}
	for _, s := range others {
		require.True(t, c.ipvs.IsServicePresent(s), "%v:%d", s.Address, s.Port)
	}
}

// TestLacking asserts that a kernel which lacks something that a rule needs is noticed before
// anything is programmed.
func TestLacking(t *testing.T) {
	const loader = "/proc/sys/kernel/modprobe"
	host := testenv.NewNetwork(t).AddNode("a")
	path, err := os.ReadFile(loader)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(loader, []byte("/nowhere"), 0))
	defer func() { require.NoError(t, os.WriteFile(loader, path, 0)) }()
	require.Eventually(t, func() bool {
		// Tables of namespaces that are being removed may use it for a while.
		err := unix.DeleteModule("nft_masq", 0)
		return err == nil || errors.Is(err, unix.ENOENT)
	}, 30*time.Second, 100*time.Millisecond)
	require.NoError(t, host.Do(func() error {
		_, err := New(Options{Log: slog.New(slog.DiscardHandler)})
		require.ErrorContains(t, err, "this node has no nftables with all that is needed (kernel module nf_tables)")
		out, err := host.Run(t.Context(), "nft", "list", "ruleset")
		require.Empty(t, out)
		return err
	}))
}
