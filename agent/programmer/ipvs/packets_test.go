// These tests prove what happens to real packets to Services of each kind, also if another
// programmer has translated and marked them.
package ipvs

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/health"
	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

// TestPackets asserts what happens to real packets to Services of each kind.
func TestPackets(t *testing.T) {
	c := newCluster(t, Options{})
	for _, family := range families {
		for _, tr := range transports {
			c.set(
				&view.ServicePort{
					ID:        serviceID("web", tr.protocol, family),
					Frontends: []view.Frontend{clusterIP(vip(family, 1)), nodePort(30001)},
					Cluster:   c.backends(family, tr.port, 0, 1, 2, 3),
				},
				&view.ServicePort{
					ID:        serviceID("own", tr.protocol, family),
					Frontends: []view.Frontend{clusterIP(vip(family, 2))},
					Cluster:   c.backends(family, tr.port, 0),
				},
				&view.ServicePort{
					ID: serviceID("none", tr.protocol, family),
					Frontends: []view.Frontend{
						everywhere(view.Frontend{Kind: view.ClusterIP, Address: vip(family, 3), Port: servicePort}, view.Reject, false),
						everywhere(view.Frontend{Kind: view.NodePort, Port: 30003}, view.Reject, true),
					},
				},
				&view.ServicePort{
					ID: serviceID("local", tr.protocol, family),
					Frontends: []view.Frontend{
						localPolicy(view.Frontend{Kind: view.LoadBalancer, Address: ingress(family, 4), Port: servicePort}, view.Local),
						localPolicy(view.Frontend{Kind: view.NodePort, Port: 30004}, view.Local),
					},
					Cluster: c.backends(family, tr.port, 0, 2), Local: c.backends(family, tr.port, 0),
				},
				&view.ServicePort{
					ID: serviceID("nolocal", tr.protocol, family),
					Frontends: []view.Frontend{
						localPolicy(view.Frontend{Kind: view.LoadBalancer, Address: ingress(family, 5), Port: servicePort}, view.Drop),
					},
					Cluster: c.backends(family, tr.port, 2),
				},
			)
		}
	}
	c.state.Node.ServiceCIDRs = []netip.Prefix{netip.MustParsePrefix("10.96.0.0/24"), netip.MustParsePrefix("fd00:10:96::/112")}
	// Another proxy refuses connections to its Service, at the priority of kube-proxy's chains. Of
	// chains with the same priority, the kernel would call its own last, because they are older.
	for _, family := range families {
		table := map[model.Family]string{model.IPv4: "ip", model.IPv6: "ip6"}[family]
		for _, hook := range []string{"forward", "output"} {
			_, err := c.a.Run(t.Context(), "nft", fmt.Sprintf("add table %[1]s other; add chain %[1]s other %[2]s { type filter hook %[2]s priority 0; }; "+
				"add rule %[1]s other %[2]s %[1]s daddr %[3]v meta l4proto tcp reject with tcp reset; add rule %[1]s other %[2]s %[1]s daddr %[3]v reject",
				table, hook, vip(family, 98)))
			require.NoError(t, err)
		}
	}
	require.NoError(t, c.Replace(t.Context(), c.state))
	all := map[string]*testenv.Host{"local pod": c.pods[0].Host, "remote pod": c.pods[2].Host, "node": c.a.Host, "client": c.client.Host}

	each(t, func(t *testing.T, family model.Family, tr transport, probe func(*testenv.Host, netip.Addr, uint16, int) testenv.Result) {
		ip := func(h *testenv.Host) netip.Addr { return h.Addr(family == model.IPv6) }
		for name, from := range all {
			if name == "remote pod" {
				continue // node b has no Services and sends to nodePorts only
			}
			viaVIP := probe(from, vip(family, 1), servicePort, 8)
			require.Len(t, viaVIP.Backends(), 4, "%s: %v", name, viaVIP)
			for i, pod := range c.pods {
				clients := viaVIP.Clients(pod.Name)
				switch {
				case name == "client", name == "node" && i >= 2:
					require.NotContains(t, clients, ip(c.client.Host), "%s to %s: %v", name, pod.Name, viaVIP)
					require.NotContains(t, clients, vip(family, 1), "%s to %s: %v", name, pod.Name, viaVIP)
				case name == "local pod" && i > 0:
					require.Equal(t, []netip.Addr{ip(from)}, clients, "%s to %s: %v", name, pod.Name, viaVIP)
				case name == "local pod":
					require.NotContains(t, clients, ip(from), "hairpin: %v", viaVIP)
				}
			}
			for _, rejected := range []netip.AddrPort{
				netip.AddrPortFrom(vip(family, 3), servicePort), netip.AddrPortFrom(ip(c.a.Host), 30003), netip.AddrPortFrom(vip(family, 1), servicePort+1),
				netip.AddrPortFrom(vip(family, 98), servicePort),
			} {
				r := probe(from, rejected.Addr(), rejected.Port(), 2)
				require.Equal(t, 2, r.Count(testenv.Refused)+r.Count(testenv.Denied), "%s to %v: %v", name, rejected, r)
			}
		}
		for name, from := range all {
			viaNode := probe(from, ip(c.a.Host), 30001, 8)
			require.Len(t, viaNode.Backends(), 4, "%s: %v", name, viaNode)
			if name != "node" {
				for _, pod := range c.pods {
					require.NotContains(t, viaNode.Clients(pod.Name), ip(from), "%s: %v", name, viaNode)
				}
			}
			if name == "remote pod" {
				continue // pods on its own node would reply to it without passing node a
			}
			viaNode = probe(from, ip(c.a.Host), 30004, 4)
			switch name {
			case "client":
				require.Equal(t, map[string]int{"pod0": 4}, viaNode.Backends(), "%s: %v", name, viaNode)
				require.Equal(t, []netip.Addr{ip(from)}, viaNode.Clients("pod0"), "%s: %v", name, viaNode)
			default:
				require.Len(t, viaNode.Backends(), 2, "%s: %v", name, viaNode)
				if name != "node" {
					require.Equal(t, []netip.Addr{ip(from)}, viaNode.Clients("pod2"), "%s: %v", name, viaNode)
				} else {
					require.Equal(t, []netip.Addr{ip(c.a.Host)}, viaNode.Clients("pod2"), "%s: %v", name, viaNode)
				}
			}
		}
		for name, from := range all {
			if name == "remote pod" {
				continue
			}
			r := from.Probe(t.Context(), tr.probe, netip.AddrPortFrom(vip(family, 99), servicePort), 1, hasty)
			require.True(t, r.All(testenv.TimedOut) || r.All(testenv.Denied), "no Service has it, from %s: %v", name, r)
		}
		r := probe(c.pods[0].Host, vip(family, 2), servicePort, 3)
		require.True(t, r.All(testenv.Answered), "hairpin: %v", r)
		require.NotContains(t, r.Clients("pod0"), ip(c.pods[0].Host), "hairpin: %v", r)

		for _, from := range []*testenv.Host{c.pods[1].Host, c.a.Host} {
			r := probe(from, ingress(family, 5), servicePort, 2)
			require.Equal(t, map[string]int{"pod2": 2}, r.Backends(), "%s: %v", from.Name, r)
		}
		r = c.client.Probe(t.Context(), tr.probe, netip.AddrPortFrom(ingress(family, 5), servicePort), 1, hasty)
		require.True(t, r.All(testenv.TimedOut), "%v", r)
		r = probe(c.client.Host, ingress(family, 4), servicePort, 3)
		require.Equal(t, map[string]int{"pod0": 3}, r.Backends(), "%v", r)

		r = c.a.Probe(t.Context(), tr.probe, netip.AddrPortFrom(nft.FamilyOf(family).Loopback().Addr(), 30001), 2, patient)
		require.True(t, r.All(testenv.Refused), "loopback is left alone: %v", r)
	})
	out, err := c.a.Run(t.Context(), "nft", "list", "table", "ip", Table)
	require.NoError(t, err)
	number := c.programmed(serviceID("own", model.TCP, model.IPv4)).numbers[clusterRole]
	require.Contains(t, out, fmt.Sprintf(`10.96.0.2 . tcp . 80 comment "default/own:p/TCP/IPv4" : %#08x`, markTag|flagMasquerade|number), "for operators")
}

// TestMarkedByOthers asserts that a packet which another programmer has translated and marked is
// masqueraded, even if nothing else of the other programmer is left. Otherwise the pod would reply
// to the client without passing the node.
func TestMarkedByOthers(t *testing.T) {
	c := newCluster(t, Options{})
	require.NoError(t, c.Replace(t.Context(), c.state))
	for _, family := range families {
		name, to := "ip", c.pods[2].IPv4.String()
		if family == model.IPv6 {
			name, to = "ip6", "["+c.pods[2].IPv6.String()+"]"
		}
		_, err := c.a.Run(t.Context(), "nft", fmt.Sprintf(`table %s other {
			chain prerouting {
				type nat hook prerouting priority dstnat
				%s daddr %s tcp dport %d meta mark set meta mark or 0xca004000 dnat to %s:%d
			}
			chain postrouting {
				type filter hook postrouting priority srcnat + 1
				meta mark & 0x4000 != 0 drop
			}
		}`, name, name, ingress(family, 1), servicePort, to, tcpPort))
		require.NoError(t, err)
		r := c.client.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(ingress(family, 1), servicePort), 2, patient)
		require.Equal(t, []netip.Addr{c.a.Addr(family == model.IPv6)}, r.Clients("pod2"), "%v", r)
	}
}

// external returns a Service port with an external IP and a load balancer's address, which are the
// same.
func (c *cluster) external(family model.Family, tr transport, a netip.Addr, pods ...int) *view.ServicePort {
	to := view.Cluster
	if len(pods) == 0 {
		to = view.Reject
	}
	return &view.ServicePort{
		ID: serviceID("edge", tr.protocol, family),
		Frontends: []view.Frontend{
			clusterIP(vip(family, 1)), everywhere(view.Frontend{Kind: view.ExternalIP, Address: a, Port: servicePort}, to, true),
		},
		Cluster: c.backends(family, tr.port, pods...),
	}
}

// TestAddressesOfOthers asserts that an external address takes only the Service's ports from the
// machine that has the address: its other ports are reached from everywhere, and all of them once
// the Service is gone (kubernetes/kubernetes#104679). It also asserts that packets are accepted
// whatever the node checks about their sources, and that nothing remains after a cleanup.
func TestAddressesOfOthers(t *testing.T) {
	const other = 5353
	c := newCluster(t, Options{})
	machine := c.AddClient("machine")
	for _, proto := range []testenv.Proto{testenv.TCP, testenv.UDP} {
		machine.Serve(proto, servicePort, other)
	}
	c.client.RouteVia(c.a, netip.PrefixFrom(machine.IPv4, 32), netip.PrefixFrom(machine.IPv6, 128))
	machine.RouteVia(c.a, netip.PrefixFrom(c.client.IPv4, 32), netip.PrefixFrom(c.client.IPv6, 128))
	policy := func() string {
		var text string
		for _, family := range []string{"-4", "-6"} {
			for _, what := range []string{"rule", "route"} {
				out, err := c.a.Run(t.Context(), "ip", family, what, "show")
				require.NoError(t, err)
				text += out
			}
		}
		return text
	}
	before, test := policy(), t
	require.NoError(t, c.Replace(t.Context(), c.state))
	everyone := []*testenv.Host{c.client.Host, c.a.Host, c.pods[0].Host}
	each(t, func(t *testing.T, family model.Family, tr transport, probe func(*testenv.Host, netip.Addr, uint16, int) testenv.Result) {
		a := machine.Addr(family == model.IPv6)
		check := func(service map[string]int) {
			t.Helper()
			for _, from := range everyone {
				r := probe(from, a, other, 2)
				require.Equal(t, map[string]int{"machine": 2}, r.Backends(), "%s: %v", from.Name, r)
				r = probe(from, a, servicePort, 2)
				if service == nil {
					require.Equal(t, 2, r.Count(testenv.Refused)+r.Count(testenv.Denied), "%s: %v", from.Name, r)
				} else {
					require.Equal(t, service, r.Backends(), "%s: %v", from.Name, r)
				}
			}
		}
		check(map[string]int{"machine": 2})
		older, err := c.client.Dial(t.Context(), tr.probe, netip.AddrPortFrom(a, servicePort), patient)
		require.NoError(t, err)
		defer older.Close()
		reply, err := older.Echo(t.Context(), "before")
		require.NoError(t, err)
		require.Equal(t, "machine", reply.Name)
		p := c.external(family, tr, a, 2)
		c.apply(t, p.ID, p)
		if tr.probe == testenv.TCP {
			ctx, cancel := context.WithTimeout(t.Context(), patient.Timeout)
			defer cancel()
			_, err = older.Echo(ctx, "after")
			require.ErrorIs(t, err, unix.ECONNRESET)
		}
		for _, strict := range []string{"0", "2", "1"} {
			for _, marked := range []string{"0", "1"} {
				settings := "for d in all eth0 default; do echo " + strict + " >/proc/sys/net/ipv4/conf/$d/rp_filter; echo " + marked +
					" >/proc/sys/net/ipv4/conf/$d/src_valid_mark; done; echo " + marked + " >/proc/sys/net/ipv4/fwmark_reflect"
				_, err := c.a.Run(t.Context(), "sh", "-c", settings)
				require.NoError(t, err)
				check(map[string]int{"pod2": 2})
			}
		}
		c.apply(t, p.ID, c.external(family, tr, a))
		check(nil)
		_, err = c.a.Run(t.Context(), "ip", map[model.Family]string{model.IPv4: "-4", model.IPv6: "-6"}[family], "route", "flush", "table", fmt.Sprint(deliveryTable))
		require.NoError(t, err)
		c.deliver()
		c.apply(t, p.ID, c.external(family, tr, a, 0))
		check(map[string]int{"pod0": 2})
		c.inHost = newInHost(test, c.a.Host, Options{})
		require.NoError(t, c.Replace(t.Context(), c.state))
		check(map[string]int{"pod0": 2})
		c.apply(t, p.ID, nil)
		check(map[string]int{"machine": 2})
		c.apply(t, p.ID, p)
	})
	require.NoError(t, c.a.Do(func() error { return c.Cleanup(t.Context()) }))
	require.Equal(t, before, policy())
}

// TestPathMTU asserts that a backend hears of it if its answers from an external address are too
// big for the way to a client.
func TestPathMTU(t *testing.T) {
	c := newCluster(t, Options{})
	udp := transports[1]
	for _, family := range families {
		c.set(&view.ServicePort{
			ID: serviceID("edge", udp.protocol, family),
			Frontends: []view.Frontend{
				localPolicy(view.Frontend{Kind: view.LoadBalancer, Address: ingress(family, 1), Port: servicePort}, view.Local),
			},
			Cluster: c.backends(family, udp.port, 0), Local: c.backends(family, udp.port, 0),
		})
	}
	require.NoError(t, c.Replace(t.Context(), c.state))
	for _, family := range families {
		conn, err := c.client.Dial(t.Context(), testenv.UDP, netip.AddrPortFrom(ingress(family, 1), servicePort), patient)
		require.NoError(t, err)
		defer conn.Close()
		_, err = conn.Echo(t.Context(), "hello")
		require.NoError(t, err)
		to := conn.LocalAddr()
		require.NoError(t, c.client.Do(func() error { return sendTooBig(ingress(family, 1), to) }))
		require.Eventually(t, func() bool {
			out, err := c.pods[0].Run(t.Context(), "ip", "route", "get", to.Addr().String())
			return err == nil && strings.Contains(out, " mtu 1300 ")
		}, patient.Timeout, 10*time.Millisecond)
	}
}

// sendTooBig sends from the calling thread's network namespace an ICMP error about a packet of UDP
// that has come from an address and servicePort: it was too big for a link with an MTU of 1300.
func sendTooBig(from netip.Addr, to netip.AddrPort) error {
	const mtu, ttl = 1300, 64
	length := uint16(mtu + 100)
	ports := binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(nil, servicePort), to.Port())
	var domain, protocol int
	var b []byte
	var target unix.Sockaddr
	if from.Is4() {
		const unreachable, fragmentationNeeded, dontFragment = 3, 4, 0x40
		domain, protocol, target = unix.AF_INET, unix.IPPROTO_ICMP, &unix.SockaddrInet4{Addr: from.As4()}
		b = append(b, unreachable, fragmentationNeeded, 0, 0, 0, 0, byte(mtu>>8), byte(mtu&0xff))
		inner := []byte{0x45, 0, byte(length >> 8), byte(length), 0, 1, dontFragment, 0, ttl, unix.IPPROTO_UDP, 0, 0}
		inner = slices.Concat(inner, from.AsSlice(), to.Addr().AsSlice())
		binary.BigEndian.PutUint16(inner[10:], checksum(inner))
		b = append(b, inner...)
	} else {
		const tooBig, header = 2, 40
		domain, protocol, target = unix.AF_INET6, unix.IPPROTO_ICMPV6, &unix.SockaddrInet6{Addr: from.As16()}
		b = append(b, tooBig, 0, 0, 0, 0, 0, byte(mtu>>8), byte(mtu&0xff))
		b = append(b, 0x60, 0, 0, 0, byte((length-header)>>8), byte(length-header), unix.IPPROTO_UDP, ttl)
		b = slices.Concat(b, from.AsSlice(), to.Addr().AsSlice())
	}
	b = append(append(b, ports...), byte(length>>8), byte(length), 0, 0)
	if from.Is4() { // the kernel fills in that of ICMPv6
		binary.BigEndian.PutUint16(b[2:], checksum(b))
	}
	fd, err := unix.Socket(domain, unix.SOCK_RAW|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return err
	}
	return errors.Join(unix.Sendto(fd, b, 0, target), unix.Close(fd))
}

// checksum returns the Internet checksum of an even number of bytes.
func checksum(b []byte) uint16 {
	var sum uint32
	for ; len(b) > 1; b = b[2:] {
		sum += uint32(binary.BigEndian.Uint16(b))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

// healthy is what the agent's health checks ask about a node that is programmed.
type healthy struct{}

func (healthy) Families() []model.Family               { return families }
func (healthy) Pending(model.Family) (time.Time, bool) { return time.Time{}, false }
func (healthy) LastProgrammed(model.Family) time.Time  { return time.Now() }

// answerChecks answers health checks on node a as the agent does.
func (c *cluster) answerChecks(t *testing.T) *health.Server {
	s := health.New(health.Options{Node: func() *model.Node { return &model.Node{Name: "a"} }, Logger: slog.New(slog.DiscardHandler)})
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() {
		_ = c.a.Do(func() error {
			s.Run(ctx, healthy{})
			return nil
		})
	})
	t.Cleanup(func() {
		cancel()
		running.Wait()
	})
	return s
}

// TestAddressesThatAreNotTheServicesAlone asserts two things of a load balancer's addresses. The
// agent's answers to health checks are reached there (kubernetes/kubernetes#117621,
// projectcalico/calico#10748). And a load balancer may have the addresses of nodes
// (kubernetes/kubernetes#104679).
func TestAddressesThatAreNotTheServicesAlone(t *testing.T) {
	c := newCluster(t, Options{})
	const check, changed, other = 31801, 31802, 31803
	checks := c.answerChecks(t)
	c.a.Serve(testenv.TCP, other)
	c.b.Serve(testenv.TCP, other)
	for _, family := range families {
		six := family == model.IPv6
		to := func(from *testenv.Host, a netip.Addr, port uint16, answer testenv.Outcome) {
			t.Helper()
			r := from.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(a, port), 2, patient)
			require.True(t, r.All(answer), "%s to %v port %d: %v", from.Name, a, port, r)
		}
		id := serviceID("edge", model.TCP, family)
		balanced := func(checkPort uint16, addresses ...netip.Addr) *view.ServicePort {
			p := &view.ServicePort{
				ID: id, Frontends: []view.Frontend{clusterIP(vip(family, 1))},
				Cluster: c.backends(family, tcpPort, 0, 2), HealthCheckPort: checkPort,
			}
			for _, a := range addresses {
				p.Frontends = append(p.Frontends, everywhere(view.Frontend{Kind: view.LoadBalancer, Address: a, Port: servicePort}, view.Cluster, true))
			}
			checks.Sync(map[view.HealthCheckID]view.HealthCheck{
				{Service: id.Service, Family: family}: {Port: checkPort, LocalEndpoints: 1, Addresses: addresses},
			}, c.state.Node)
			return p
		}
		checked := func(from *testenv.Host, port uint16) {
			t.Helper()
			asked := &http.Client{Transport: &http.Transport{DialContext: from.DialContext, DisableKeepAlives: true}, Timeout: patient.Timeout}
			require.Eventually(t, func() bool {
				r, err := asked.Get("http://" + netip.AddrPortFrom(ingress(family, 1), port).String())
				if err != nil {
					return false
				}
				_ = r.Body.Close()
				return r.StatusCode == http.StatusOK
			}, patient.Timeout, 10*time.Millisecond)
		}
		c.set(balanced(check, ingress(family, 1)))
		require.NoError(t, c.Replace(t.Context(), c.state))
		for range 2 {
			for _, from := range []*testenv.Host{c.client.Host, c.pods[0].Host} {
				to(from, ingress(family, 1), servicePort, testenv.Answered)
				checked(from, check)
				to(from, vip(family, 1), check, testenv.Refused)
			}
			c.inHost = newInHost(t, c.a.Host, Options{})
			require.NoError(t, c.Replace(t.Context(), c.state))
		}
		// Only the port for health checks changes, so the frontends stay the same memory.
		balanced(changed, ingress(family, 1))
		next := *c.state.Ports[id]
		next.HealthCheckPort = changed
		c.apply(t, id, &next)
		checked(c.client.Host, changed)
		r := c.client.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(ingress(family, 1), check), 1, hasty)
		require.Zero(t, r.Count(testenv.Answered), "%v", r)

		c.apply(t, id, balanced(check, c.a.Addr(six), c.b.Addr(six)))
		for _, from := range []*testenv.Host{c.a.Host, c.pods[0].Host} {
			to(from, c.b.Addr(six), other, testenv.Answered)
		}
		to(c.a.Host, c.b.Addr(six), servicePort, testenv.Answered)
		to(c.client.Host, c.a.Addr(six), servicePort, testenv.Answered)
		c.apply(t, id, nil)
	}
}
