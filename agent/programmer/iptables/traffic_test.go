// These tests prove with real packets that no connection is lost, new or open, while rules change,
// the agent restarts and the variant of iptables changes. None goes past a Service while only one
// of the tables has changed.
package iptables

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

// stream makes connections from the client to one address after the other until stop is called.
// stop asserts that all of them were answered. A moment without the rules would be an error,
// because nothing else knows these addresses.
func (c *cluster) stream(t *testing.T, to ...netip.AddrPort) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	results := make([]testenv.Result, len(to))
	var wait sync.WaitGroup
	for i, address := range to {
		wait.Go(func() {
			for ctx.Err() == nil {
				r := c.client.Probe(context.WithoutCancel(ctx), testenv.TCP, address, 20, patient)
				results[i].Attempts = append(results[i].Attempts, r.Attempts...)
			}
		})
	}
	return func() {
		t.Helper()
		cancel()
		wait.Wait()
		for i, r := range results {
			require.True(t, r.All(testenv.Answered), "%v: %v", to[i], r)
			require.NotEmpty(t, r.Attempts)
		}
	}
}

// TestTraffic asserts that no connection is lost, new or established, while other Services change,
// the agent restarts, pods are recognized in another way, and the variant changes.
func TestTraffic(t *testing.T) {
	eachVariant(t, func(t *testing.T, variant Variant) {
		c := newCluster(t, Options{Variant: variant})
		var open []*testenv.Conn
		var addresses []netip.AddrPort
		for _, family := range families {
			web := c.web("web", family, 1, 1, 2)
			sticky := c.sticky(family, transports[0], time.Hour, []int{0, 1, 2}, []int{0, 1})
			sticky.Frontends = []view.Frontend{localPolicy(external(vip(family, 2))), localPolicy(nodePort(30002))}
			sticky.Frontends[0].Kind = view.LoadBalancer
			sticky.Frontends[0].Sources = []netip.Prefix{netip.PrefixFrom(c.client.Addr(family == model.IPv6), 24)}
			c.set(web, sticky, &view.ServicePort{
				ID: serviceID("plain", model.TCP, family), Frontends: []view.Frontend{clusterIP(vip(family, 3))}, Cluster: web.Cluster,
			})
			node := c.a.Addr(family == model.IPv6)
			addresses = append(addresses, netip.AddrPortFrom(vip(family, 1), servicePort), netip.AddrPortFrom(node, 30001),
				netip.AddrPortFrom(vip(family, 2), servicePort), netip.AddrPortFrom(node, 30002), netip.AddrPortFrom(vip(family, 3), servicePort))
		}
		require.NoError(t, c.inHost.Replace(t.Context(), c.state))
		for _, to := range addresses {
			for range 3 {
				conn, err := c.client.Dial(t.Context(), testenv.TCP, to, patient)
				require.NoError(t, err)
				defer conn.Close()
				open = append(open, conn)
			}
		}

		stop := c.stream(t, addresses...)
		for i := range byte(20) {
			var changes []view.Change
			for _, family := range families {
				after := c.web(string('a'+rune(i)), family, 10+i, 0, 3)
				changes = append(changes, view.Change{After: after})
				c.set(after)
			}
			require.NoError(t, c.inHost.Apply(t.Context(), changes))
			if i%4 == 0 {
				c.state.Node.Pods.Prefixes = append(c.state.Node.Pods.Prefixes, netip.PrefixFrom(netip.AddrFrom4([4]byte{172, 16, i, 0}), 24))
			}
			c.inHost = newInHost(t, c.a.Host, c.options)
			require.NoError(t, c.inHost.Replace(t.Context(), c.state))
		}
		for _, v := range []Variant{map[Variant]Variant{NFT: Legacy, Legacy: NFT}[variant], variant} {
			c.options.Variant = v
			c.inHost = newInHost(t, c.a.Host, c.options)
			require.NoError(t, c.inHost.Replace(t.Context(), c.state))
			require.NoError(t, c.inHost.RetireOtherVariant(t.Context()))
			for _, family := range families {
				require.NotContains(t, c.inHost.rules(t, family, map[Variant]Variant{NFT: Legacy, Legacy: NFT}[v]), ChainPrefix)
			}
		}
		stop()
		c.requireFresh(t)

		for _, family := range families {
			require.NoError(t, c.inHost.Apply(t.Context(), []view.Change{{Before: c.web("web", family, 1, 1, 2), After: c.web("web", family, 1, 1)}}))
			r := c.client.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(vip(family, 1), servicePort), 20, patient)
			require.Equal(t, map[string]int{"pod1": 20}, r.Backends())
		}
		for _, conn := range open {
			reply, err := conn.Echo(t.Context(), "still there?")
			require.NoError(t, err)
			require.Equal(t, "still there?", reply.Echo)
		}
	})
}

// TestNothingPassesBetweenTables asserts that packets do not pass a Service while one of the tables
// nat and filter has changed and the other one has not. They neither leave the node with the
// Service's address nor reach what listens on the node at a NodePort.
func TestNothingPassesBetweenTables(t *testing.T) {
	eachVariant(t, func(t *testing.T, variant Variant) {
		c := newCluster(t, Options{Variant: variant})
		c.a.Serve(testenv.TCP, 30001)
		eachFamily(t, func(t *testing.T, family model.Family) {
			client := c.client.Addr(family == model.IPv6)
			own := netip.PrefixFrom(client, client.BitLen())
			state := func(route view.Route, pods int, frontends ...view.Frontend) *view.ServicePort {
				p := &view.ServicePort{ID: serviceID("web", model.TCP, family)}
				for _, f := range frontends {
					f.Others, f.Node = route, route
					p.Frontends = append(p.Frontends, f)
				}
				if pods > 0 {
					p.Cluster = c.backends(family, tcpPort, 2)
				}
				return p
			}
			at := vip(family, 1)
			cluster, reject, drop := view.Route{To: view.Cluster, Masquerade: true}, view.Route{To: view.Reject}, view.Route{To: view.Drop}
			sourced := func(sources ...netip.Prefix) view.Frontend {
				f := external(at)
				f.Kind, f.Sources = view.LoadBalancer, sources
				return f
			}
			other := state(cluster, 1, clusterIP(at), nodePort(30001))
			other.ID.Service.Name = "other"
			states := []*view.ServicePort{
				state(cluster, 1, external(at), nodePort(30001)),
				state(reject, 0, rejected(external(at)), rejected(nodePort(30001))), // the last endpoint went
				state(cluster, 1, external(at), nodePort(30001)),
				state(drop, 1, external(at), nodePort(30001)), // no local endpoint is left
				state(reject, 0, rejected(external(at)), rejected(nodePort(30001))),
				state(drop, 1, external(at), nodePort(30001)),
				state(cluster, 1, sourced(own), nodePort(30001)),
				state(reject, 0, rejected(sourced(own)), rejected(nodePort(30001))),
				state(cluster, 1, sourced(netip.PrefixFrom(at, at.BitLen())), nodePort(30001)),
				state(cluster, 1, sourced(own), nodePort(30001)),
				state(reject, 0, rejected(external(at)), rejected(nodePort(30001))),
			}
			main := programName(family, variant)
			run := func(args ...string) string {
				out, err := c.a.Run(t.Context(), main, append([]string{"-w", "5", "-t", "mangle"}, args...)...)
				require.NoError(t, err)
				return out
			}
			run("-A", "POSTROUTING", "-d", at.String(), "-j", "DROP")
			stage, checks := "", 0
			check := func() {
				checks++
				for _, to := range []netip.AddrPort{netip.AddrPortFrom(at, servicePort), netip.AddrPortFrom(c.a.Addr(family == model.IPv6), 30001)} {
					r := c.client.Probe(t.Context(), testenv.TCP, to, 1, testenv.ProbeOptions{Timeout: 100 * time.Millisecond})
					require.NotContains(t, r.Backends(), "a", "%s: reaches the node", stage)
				}
				require.Contains(t, run("-S", "POSTROUTING", "-v"), "-c 0 0 -j DROP", "%s: leaves the node", stage)
			}
			c.state.Ports = map[view.ServicePortID]*view.ServicePort{states[0].ID: states[0]}
			require.NoError(t, c.inHost.Replace(t.Context(), c.state))
			c.inHost.between = check
			defer func() { c.inHost.between = nil }()
			apply := func(name string, changes ...view.Change) {
				stage, checks = name, 0
				require.NoError(t, c.inHost.Apply(t.Context(), changes))
				require.NotZero(t, checks)
			}
			for i, s := range states[1:] {
				apply(fmt.Sprint("change ", i+1), view.Change{Before: states[i], After: s})
			}
			apply("another Service takes the address", view.Change{Before: states[len(states)-1]}, view.Change{After: other})
			c.inHost.between = nil
			c.state.Ports = map[view.ServicePortID]*view.ServicePort{other.ID: other}
			c.requireFresh(t)
		})
	})
}
