// These tests prove that Watch notices what others do to a real kernel, reads little for the
// programmer's own changes, and leaves a node's own addresses to the node.
package ipvs

import (
	"cmp"
	"context"
	"encoding/binary"
	"iter"
	"maps"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	mobyipvs "github.com/moby/ipvs"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/netlink"
	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

// TestWatch asserts that changes by others are noticed, and that the programmer's own are not
// reported.
func TestWatch(t *testing.T) {
	c := newCluster(t, Options{})
	c.set(c.web("web", model.IPv4, 1, 0), c.web("web", model.IPv6, 1, 0))
	require.NoError(t, c.Replace(t.Context(), c.state))
	web := c.state.Ports[serviceID("web", model.TCP, model.IPv4)]
	c.apply(t, web.ID, nil)
	c.apply(t, web.ID, web)
	c.apply(t, web.ID, c.web("web", model.IPv4, 1, 1))
	require.False(t, c.addressesChanged())
	_, err := c.a.Run(t.Context(), "sh", "-c", "nft add table ip other; nft flush set ip "+Table+" addresses; ip addr del 10.96.0.1/32 dev "+Device)
	require.NoError(t, err)
	c.device.watcher.Close() // as if it had failed
	ctx, cancel := context.WithCancel(t.Context())
	lost, done := make(chan string, 100), make(chan struct{})
	go func() {
		defer close(done)
		c.watchInHost(ctx, func(reason string) { lost <- reason })
	}()
	require.ElementsMatch(t, []string{
		"another process changed the IPv4 table: remove elements of set addresses", addressesLost,
		"changes by other processes may have been missed",
	}, []string{await(t, lost), await(t, lost), await(t, lost)})
	require.NoError(t, c.Replace(t.Context(), c.state))
	c.apply(t, web.ID, c.web("web", model.IPv4, 1, 1))
	c.apply(t, web.ID, c.web("web", model.IPv4, 1, 0))
	_, _, bad := c.serviceLost()
	require.False(t, bad)
	require.Empty(t, lost, "nobody else has changed anything")
	shell := func(command string) func() error {
		return func() error {
			_, err := c.a.Run(ctx, "sh", "-c", command)
			return err
		}
	}
	service := func() *mobyipvs.Service {
		return c.virtuals(serviceID("web", model.TCP, model.IPv4))[0].moby()
	}
	destination := func(weight int) *mobyipvs.Destination {
		backend := c.backends(model.IPv4, tcpPort, 0).List()[0].Address
		return &mobyipvs.Destination{Address: backend.Addr().AsSlice(), Port: backend.Port(), Weight: weight}
	}
	for what, damage := range map[string]func() error{
		"rules":      shell("nft flush ruleset"),
		"rule":       shell(`nft replace rule ip ` + Table + ` input $(nft -a list chain ip ` + Table + ` input | grep -o 'handle [0-9]*$' | tail -n 1) drop`),
		"policy":     shell("nft 'chain ip " + Table + " input { policy drop; }'"),
		"dormant":    shell("nft 'add table ip " + Table + " { flags dormant; }'"),
		"delivery":   shell("ip rule del pref 93"),
		"way back":   shell("ip -6 rule del pref 92"),
		"element":    shell("nft delete element ip " + Table + " addresses { 10.96.0.1 }"),
		"address":    shell("ip addr del 10.96.0.1/32 dev " + Device),
		"down":       shell("ip link set down dev " + Device),
		"device":     shell("ip link del " + Device),
		"addresses":  shell("ip -6 addr flush dev " + Device),
		"service":    func() error { return c.ipvs.DelService(service()) },
		"services":   func() error { return c.ipvs.Flush() },
		"backend":    func() error { return c.ipvs.DelDestination(service(), destination(1)) },
		"no backend": func() error { return c.ipvs.UpdateDestination(service(), destination(0)) },
		"weight":     func() error { return c.ipvs.UpdateDestination(service(), destination(5)) },
		"direct routing": func() error {
			d := destination(1)
			d.ConnectionFlags = mobyipvs.ConnectionFlagDirectRoute
			return c.ipvs.UpdateDestination(service(), d)
		},
		"limit": func() error {
			d := destination(1)
			d.UpperThreshold = 1
			return c.ipvs.UpdateDestination(service(), d)
		},
		"flag": func() error {
			s := service()
			s.Flags |= onePacket
			return c.ipvs.UpdateService(s)
		},
		"other backend": func() error {
			return c.ipvs.NewDestination(service(), &mobyipvs.Destination{Address: netip.MustParseAddr("10.180.77.77").AsSlice(), Port: tcpPort, Weight: 1})
		},
		"scheduler": func() error {
			s := service()
			s.SchedName = "lc"
			return c.ipvs.UpdateService(s)
		},
	} {
		require.NoError(t, damage(), what)
		t.Log(what, await(t, lost))
		require.NoError(t, c.Replace(t.Context(), c.state))
		r := c.client.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(vip(model.IPv4, 1), servicePort), 2, patient)
		require.True(t, r.All(testenv.Answered), "%s: %v", what, r)
		require.Equal(t, map[string]int{"pod0": 2}, r.Backends(), "%s: %v", what, r)
		for len(lost) > 0 {
			<-lost
		}
	}
	cancel()
	<-done
}

// TestElsewhere asserts that an address of a Service is the node's as long as another interface has
// it, for example as a virtual IP of keepalived.
func TestElsewhere(t *testing.T) {
	c := newCluster(t, Options{})
	c.a.Serve(testenv.TCP, 22)
	for _, family := range families {
		c.set(&view.ServicePort{
			ID:        serviceID("web", model.TCP, family),
			Frontends: []view.Frontend{clusterIP(vip(family, 1))},
			Cluster:   c.backends(family, tcpPort, 2),
		})
	}
	require.NoError(t, c.Replace(t.Context(), c.state))
	_, err := c.a.Run(t.Context(), "ip", "addr", "del", "10.96.0.1/32", "dev", Device)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	lost := make(chan string, 100)
	var watching sync.WaitGroup
	defer watching.Wait()
	defer cancel()
	watching.Go(func() { c.watchInHost(ctx, func(reason string) { lost <- reason }) })
	repair := func() {
		t.Helper()
		await(t, lost)
		require.NoError(t, c.Replace(t.Context(), c.state))
	}
	repair()
	_, err = c.a.Run(ctx, "ip", "link", "add", KubeProxyDevice, "type", "dummy")
	require.NoError(t, err)
	for _, family := range families {
		a := vip(family, 1)
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
		repair()
		check(true)
		_, err = c.a.Run(ctx, "ip", "addr", "del", netip.PrefixFrom(a, a.BitLen()).String(), "dev", "lo")
		require.NoError(t, err)
		repair()
		check(false)
		_, err = c.a.Run(ctx, "ip", "addr", "del", netip.PrefixFrom(a, a.BitLen()).String(), "dev", KubeProxyDevice)
		require.NoError(t, err)
	}
}

// TestArrivals asserts that Watch does not read all addresses for each address that is added to the
// device, because thousands may be added.
func TestArrivals(t *testing.T) {
	c := newCluster(t, Options{})
	c.set(c.web("web", model.IPv4, 1, 0))
	require.NoError(t, c.Replace(t.Context(), c.state))
	_, err := c.a.Run(t.Context(), "ip", "addr", "del", "10.96.0.1/32", "dev", Device)
	require.NoError(t, err)
	message := func(kind uint16) netlink.Message {
		w := &netlink.Writer{}
		at := w.Begin(kind, 0)
		w.Buf = binary.NativeEndian.AppendUint32(append(w.Buf, unix.AF_INET, 32, 0, 0), uint32(c.device.index()))
		w.Bytes(unix.IFA_ADDRESS, vip(model.IPv4, 1).AsSlice())
		w.End(at)
		next, stop := iter.Pull(netlink.Messages(w.Buf))
		defer stop()
		m, _ := next()
		return m
	}
	require.Empty(t, c.addressLoss(message(unix.RTM_NEWADDR)), "what is not there would be noticed by reading")
	require.Equal(t, addressesLost, c.addressLoss(message(unix.RTM_DELADDR)))
}

// TestPointToPoint asserts that Watch notices if a point-to-point device of the node gets an
// address of a Service. In the kernel's notification, the address of the other end comes first.
func TestPointToPoint(t *testing.T) {
	c := newCluster(t, Options{})
	c.set(c.web("web", model.IPv4, 1, 0))
	require.NoError(t, c.Replace(t.Context(), c.state))
	require.NoError(t, c.a.Do(c.device.watcher.Open))
	_, err := c.a.Run(t.Context(), "ip", "addr", "add", "10.96.0.1", "peer", "203.0.113.77", "dev", "lo")
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), patient.Timeout)
	defer cancel()
	var heard string
	c.device.watcher.Watch(ctx, time.Minute, c.addressLoss, func(reason string) {
		heard = reason
		cancel()
	}, func(err error) { require.NoError(t, err) })
	require.Equal(t, addressesLost, heard)
}

// requireNothingHeard asserts that no notifications about the tables wait: the first one is about
// what another process does now.
func (c *cluster) requireNothingHeard(t *testing.T) {
	t.Helper()
	_, err := c.a.Run(t.Context(), "nft", "add", "chain", "ip", Table, "marker")
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	var heard string
	c.nft.Watch(ctx, time.Minute, []nft.Table{tableOf(model.IPv4), tableOf(model.IPv6)}, func(reason string) {
		heard = cmp.Or(heard, reason)
		cancel()
	}, func(err error) { require.NoError(t, err) })
	require.Equal(t, "another process changed the IPv4 table: add chain marker", heard)
}

// await returns the next reason with which lost was called.
func await(t *testing.T, lost <-chan string) string {
	t.Helper()
	select {
	case reason := <-lost:
		return reason
	case <-time.After(20 * time.Second):
		require.Fail(t, "not noticed")
		return ""
	}
}

// watchInHost runs Watch with sockets in the host's namespace.
func (h *inHost) watchInHost(ctx context.Context, lost func(string)) {
	if err := h.host.Do(h.device.watcher.Open); err != nil {
		lost(err.Error())
	}
	h.Watch(ctx, lost)
}

// TestIntact asserts what a new programmer finds of an earlier one's rules, with a state that is
// older than the kernel's.
func TestIntact(t *testing.T) {
	c := newCluster(t, Options{})
	older := view.State{Node: c.state.Node, Ports: map[view.ServicePortID]*view.ServicePort{}}
	intact := func() (is bool) {
		next := newInHost(t, c.a.Host, Options{})
		require.NoError(t, c.a.Do(func() error { is = next.Intact(t.Context(), older); return nil }))
		return is
	}
	require.False(t, intact(), "nothing was ever programmed")
	c.set(c.web("web", model.IPv4, 1, 0), c.web("web", model.IPv6, 1, 0))
	maps.Copy(older.Ports, c.state.Ports)
	require.NoError(t, c.Replace(t.Context(), c.state))
	web := c.state.Ports[serviceID("web", model.TCP, model.IPv4)]
	c.apply(t, web.ID, c.web("web", model.IPv4, 1))
	require.True(t, intact())
	const flush = "flush of IPVS"
	for _, by := range []string{
		flush, "nft flush table ip " + Table, "nft delete table ip6 " + Table, "ip link del " + Device, "ip link set down " + Device,
	} {
		require.NoError(t, c.Replace(t.Context(), c.state))
		require.True(t, intact())
		if by == flush {
			require.NoError(t, c.ipvs.Flush())
		} else {
			_, err := c.a.Run(t.Context(), "sh", "-c", by)
			require.NoError(t, err)
		}
		require.False(t, intact(), by)
	}
}
