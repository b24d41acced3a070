package ipvs

import (
	"context"
	"encoding/binary"
	"errors"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	mdnetlink "github.com/mdlayher/netlink"
	mobyipvs "github.com/moby/ipvs"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

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
	require.False(t, c.rulesetChanged())
	require.False(t, c.addressesChanged())
	_, err := c.a.Run(t.Context(), "sh", "-c", "nft add table ip other; ip addr del 10.96.0.1/32 dev "+Device)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	lost, done := make(chan string, 100), make(chan struct{})
	go func() {
		defer close(done)
		c.watchInHost(ctx, func(reason string) { lost <- reason })
	}()
	require.ElementsMatch(t, []string{
		"others have changed nftables table " + Table + " unseen", "others have changed the addresses of " + Device + " or of the node unseen",
	}, []string{await(t, lost), await(t, lost)})
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
		"element":    shell("nft delete element ip " + Table + " addresses { 10.96.0.1 }"),
		"address":    shell("ip addr del 10.96.0.1/32 dev " + Device),
		"down":       shell("ip link set down dev " + Device),
		"device":     shell("ip link del " + Device),
		"addresses":  shell("ip -6 addr flush dev " + Device),
		"service":    func() error { return c.ipvs.DelService(service()) },
		"services":   func() error { return c.ipvs.Flush() },
		"backend":    func() error { return c.ipvs.DelDestination(service(), destination(1)) },
		"no backend": func() error { return c.ipvs.UpdateDestination(service(), destination(0)) },
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
	repair := func() {
		t.Helper()
		await(t, lost)
		require.NoError(t, c.Replace(t.Context(), c.state))
	}
	repair()
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
	message := func(kind mdnetlink.HeaderType) mdnetlink.Message {
		data := binary.NativeEndian.AppendUint32([]byte{unix.AF_INET, 32, 0, 0}, uint32(c.device.Attrs().Index))
		attribute, err := mdnetlink.MarshalAttributes([]mdnetlink.Attribute{{Type: unix.IFA_ADDRESS, Data: vip(model.IPv4, 1).AsSlice()}})
		require.NoError(t, err)
		return mdnetlink.Message{Header: mdnetlink.Header{Type: kind}, Data: append(data, attribute...)}
	}
	require.False(t, c.addressLost(message(unix.RTM_NEWADDR)), "what is not there would be noticed by reading")
	require.True(t, c.addressLost(message(unix.RTM_DELADDR)))
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

// watchInHost runs Watch in the host's namespace. The first socket for addresses fails and is
// replaced.
func (h *inHost) watchInHost(ctx context.Context, lost func(string)) {
	in := func(dial dialer) dialer {
		return func() (conn *mdnetlink.Conn, err error) {
			return conn, h.host.Do(func() error {
				conn, err = dial()
				return err
			})
		}
	}
	failed := false
	h.watch(ctx, lost, in(h.followTables), in(func() (*mdnetlink.Conn, error) {
		conn, err := followAddresses()
		if err == nil && !failed {
			failed = true
			err = errors.Join(errors.New("no socket yet"), conn.Close())
		}
		return conn, err
	}), time.Millisecond)
}
