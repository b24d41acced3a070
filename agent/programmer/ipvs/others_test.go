package ipvs

import (
	"context"
	"encoding/binary"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	mdnetlink "github.com/mdlayher/netlink"
	mobyipvs "github.com/moby/ipvs"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

// TestAdopted holds that a virtual service that somebody else has for an address with affinity, e.g. kube-proxy, gets our backends and
// loses those that are dead.
func TestAdopted(t *testing.T) {
	c := newCluster(t, Options{})
	dead := netip.MustParseAddrPort("10.180.77.77:8080")
	adopted := func(last byte) *view.ServicePort {
		foreign := &mobyipvs.Service{Address: vip(model.IPv4, last).AsSlice(), Port: servicePort, Protocol: 6, AddressFamily: 2, Netmask: 1<<32 - 1, SchedName: "rr"}
		require.NoError(t, c.ipvs.NewService(foreign))
		for _, b := range []netip.AddrPort{dead, c.backends(model.IPv4, tcpPort, 1)[0].Address} {
			require.NoError(t, c.ipvs.NewDestination(foreign, &mobyipvs.Destination{Address: b.Addr().AsSlice(), Port: b.Port(), Weight: 1}))
		}
		sticky := c.web(fmt.Sprint("sticky", last), model.IPv4, last, 1, 2)
		sticky.Affinity = time.Hour
		sticky.Frontends = sticky.Frontends[:1]
		return sticky
	}
	check := func(sticky *view.ServicePort) {
		t.Helper()
		require.Equal(t, map[netip.AddrPort]uint32{dead: 0, sticky.Cluster[0].Address: 1, sticky.Cluster[1].Address: 1}, c.destinations(t, sticky.ID))
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

// TestBusyRuleset holds that what others do to nftables all the time keeps nobody from programming.
func TestBusyRuleset(t *testing.T) {
	c := newCluster(t, Options{})
	c.set(c.web("web", model.IPv4, 1, 0))
	require.NoError(t, c.Replace(t.Context(), c.state))
	var other *tables
	require.NoError(t, c.a.Do(func() (err error) {
		other, err = dialTables()
		return err
	}))
	defer other.conn.CloseLasting() //nolint:errcheck // of a test
	ctx, cancel := context.WithCancel(t.Context())
	var busy sync.WaitGroup
	defer busy.Wait()
	defer cancel()
	changes := make(chan error, 1)
	busy.Go(func() {
		l := newLayout(model.IPv4, view.Node{}, 0)
		l.table.Name = "busy"
		for n := 0; ctx.Err() == nil; n++ {
			other.conn.AddTable(l.table)
			other.conn.DelTable(l.table)
			err := other.conn.Flush()
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

// TestElsewhere holds that an address of a Service that another interface gets, e.g. a virtual one of keepalived, is the node's as long as
// it has it.
func TestElsewhere(t *testing.T) {
	c := newCluster(t, Options{})
	c.a.Serve(testenv.TCP, 22)
	for _, family := range families {
		c.set(&view.ServicePort{
			ID:        serviceID("web", model.TCP, family),
			Frontends: []view.Frontend{everywhere(view.Frontend{Kind: view.ExternalIP, Address: ingress(family, 1), Port: servicePort}, view.Cluster, true)},
			Cluster:   c.backends(family, tcpPort, 2),
		})
	}
	require.NoError(t, c.Replace(t.Context(), c.state))
	_, err := c.a.Run(t.Context(), "ip", "addr", "del", "198.51.100.1/32", "dev", Device)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	lost := make(chan string, 100)
	var watching sync.WaitGroup
	defer watching.Wait()
	defer cancel()
	watching.Go(func() { c.watchInHost(ctx, func(reason string) { lost <- reason }) })
	await := func() {
		t.Helper()
		select {
		case <-lost:
		case <-time.After(20 * time.Second):
			require.Fail(t, "not noticed")
		}
		require.NoError(t, c.Replace(t.Context(), c.state))
	}
	await()
	_, err = c.a.Run(ctx, "ip", "link", "add", KubeProxyDevice, "type", "dummy")
	require.NoError(t, err)
	for _, family := range families {
		a := ingress(family, 1)
		check := func(elsewhere bool) {
			t.Helper()
			out, err := c.a.Run(ctx, "ip", "addr", "show", "dev", Device)
			require.NoError(t, err)
			require.NotEqual(t, elsewhere, strings.Contains(out, a.String()+"/"), out)
			r := c.client.Probe(ctx, testenv.TCP, netip.AddrPortFrom(a, servicePort), 2, patient)
			require.Equal(t, map[string]int{"pod2": 2}, r.Backends(), "%v", r)
			other := c.client.Probe(ctx, testenv.TCP, netip.AddrPortFrom(a, 22), 1, patient)
			require.Equal(t, elsewhere, other.All(testenv.Answered), "%v", other)
		}
		check(false)
		_, err := c.a.Run(ctx, "ip", "addr", "add", netip.PrefixFrom(a, a.BitLen()).String(), "dev", KubeProxyDevice)
		require.NoError(t, err)
		require.NoError(t, c.Replace(ctx, c.state))
		check(false)
		_, err = c.a.Run(ctx, "ip", "addr", "add", netip.PrefixFrom(a, a.BitLen()).String(), "dev", "lo")
		require.NoError(t, err)
		await()
		check(true)
		_, err = c.a.Run(ctx, "ip", "addr", "del", netip.PrefixFrom(a, a.BitLen()).String(), "dev", "lo")
		require.NoError(t, err)
		await()
		check(false)
		_, err = c.a.Run(ctx, "ip", "addr", "del", netip.PrefixFrom(a, a.BitLen()).String(), "dev", KubeProxyDevice)
		require.NoError(t, err)
	}
}

// TestArrivals holds that nobody reads all addresses because one has come to the device: it would be done for each of thousands.
func TestArrivals(t *testing.T) {
	c := newCluster(t, Options{})
	c.set(c.web("web", model.IPv4, 1, 0))
	require.NoError(t, c.Replace(t.Context(), c.state))
	_, err := c.a.Run(t.Context(), "ip", "addr", "del", "10.96.0.1/32", "dev", Device)
	require.NoError(t, err)
	message := func(kind mdnetlink.HeaderType) mdnetlink.Message {
		data := binary.NativeEndian.AppendUint32([]byte{unix.AF_INET, 32, 0, 0}, uint32(c.device.Attrs().Index))
		attribute, err := mdnetlink.MarshalAttributes([]mdnetlink.Attribute{{Type: unix.IFA_ADDRESS, Data: vip(model.IPv4, 1).AsSlice()}})
		require.NoError(t, err)
		return mdnetlink.Message{Header: mdnetlink.Header{Type: kind}, Data: append(data, attribute...)}
	}
	require.False(t, c.addressLost(message(unix.RTM_NEWADDR)), "what is not there would be noticed by reading")
	require.True(t, c.addressLost(message(unix.RTM_DELADDR)))
}

// TestSettingsOfOthers holds that settings that can't be made, as /proc/sys is read only in the agent's container, keep no Services from being
// programmed, but for the one that IPVS must have at first.
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
	require.ErrorContains(t, c.Replace(t.Context(), c.state), "set sysctl net/ipv4/vs/conntrack to 1: open /proc/sys/net/ipv4/vs/conntrack: read-only file system")
	set(conntrackSysctl, "1")
	require.NoError(t, c.Replace(t.Context(), c.state))
	require.Contains(t, log.String(), "set sysctl net/ipv4/vs/expire_nodest_conn to 1")
	require.NotContains(t, log.String(), "set sysctl net/ipv4/vs/conntrack")
	log.Reset()
	require.NoError(t, c.Replace(t.Context(), c.state))
	require.Empty(t, log.String(), "it was said")
	set(conntrackSysctl, "0")
	require.NoError(t, c.Replace(t.Context(), c.state))
	require.Contains(t, log.String(), "set sysctl net/ipv4/vs/conntrack to 1")
	r := c.client.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(vip(model.IPv4, 1), servicePort), 1, hasty)
	require.Len(t, r.Attempts, 1)
}

// TestInterruptedProbe holds that what a killed process has left of looking for the scheduler is no reason to do without.
func TestInterruptedProbe(t *testing.T) {
	c := newCluster(t, Options{})
	left := &virtual{serviceKey: serviceKey{number: maxID, family: model.IPv4}, scheduler: "wrr"}
	require.NoError(t, c.ipvs.NewService(left.moby()))
	newInHost(t, c.a.Host, Options{})
	require.False(t, c.ipvs.IsServicePresent(left.moby()))
}

// TestKubeProxysSets holds that the ipsets that are removed are kube-proxy's, and those of others are not though they have names like these.
func TestKubeProxysSets(t *testing.T) {
	host := testenv.NewNetwork(t).AddNode("a")
	theirs := []string{"KUBE-CLUSTER-IP", "KUBE-6-CLUSTER-IP", "KUBE-IPVS-IPS", "KUBE-LOAD-BALANCER-SOURCE-CIDR", "KUBE-6-LOAD-BALANCER-SOURCE-CID"}
	others := []string{"KUBE-SRC-ABCDEFGHIJKLMNOP", "KUBE-DST-ABCDEFGHIJKLMNOP", "KUBE-6-SRC-ABCDEFGHIJKLMNOP", "KUBE-CLUSTER-IPS", "other"}
	require.NoError(t, host.Do(func() error {
		for _, name := range append(theirs, others...) {
			require.NoError(t, netlink.IpsetCreate(name, "hash:ip", netlink.IpsetCreateOptions{}), name)
		}
		require.NoError(t, CleanupKubeProxySets())
		require.NoError(t, CleanupKubeProxySets(), "nothing left to clean")
		var left []string
		err := eachIPSet(func(name string, _ []uint16) { left = append(left, name) })
		require.ElementsMatch(t, others, left)
		return err
	}))
}
