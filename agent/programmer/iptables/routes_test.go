// These tests prove that connections from pods, the node and others each take their route, and that
// source ranges admit nobody else, judged by real packets that reach backends.
package iptables

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

// outcome is what happened to new connections.
type outcome struct {
	to     view.Target // 0 means the same as without a Service
	masked bool        // backends see another source than the client's
}

// addClusterPod adds a pod for cluster sets. It is on node a like the local set's pod, so that
// replies that are not masqueraded come back through node a.
func (c *cluster) addClusterPod() {
	pod := c.a.AddPod("pod4")
	pod.Serve(testenv.TCP, tcpPort)
	pod.Serve(testenv.UDP, udpPort)
	c.pods = append(c.pods, pod)
}

// sight is a probe of a Service port whose cluster set is pod 4 and whose local set is pod 0, with
// the expected outcome.
type sight struct {
	what   string
	from   *testenv.Host
	source netip.Addr // may be zero
	tr     transport
	to     netip.AddrPort
	want   outcome
}

// see makes all probes at once, because waiting for silence takes time.
func (c *cluster) see(t *testing.T, sights []sight) {
	t.Helper()
	got := make([]outcome, len(sights))
	var wait sync.WaitGroup
	for i, s := range sights {
		wait.Go(func() { got[i] = c.look(t.Context(), s) })
	}
	wait.Wait()
	for i, s := range sights {
		if s.from == c.a.Host {
			// Whether the node's own address is masqueraded cannot be observed, because the source is the
			// same.
			got[i].masked, s.want.masked = false, false
		}
		require.Equal(t, s.want, got[i], "%s: %s from %s to %v", s.what, s.tr.probe, s.from.Name, s.to)
	}
}

func (c *cluster) look(ctx context.Context, s sight) outcome {
	timeout := patient.Timeout
	if s.want.to == view.Drop {
		timeout = time.Second // each such probe waits that long
	}
	r := s.from.Probe(ctx, s.tr.probe, s.to, 1, testenv.ProbeOptions{Timeout: timeout, Source: netip.AddrPortFrom(s.source, 0)})
	switch r.Attempts[0].Outcome {
	case testenv.Answered:
		for name := range r.Backends() {
			set := map[string]view.Target{"pod4": view.Cluster, "pod0": view.Local}[name]
			return outcome{set, !slices.Contains(r.Clients(name), s.from.Addr(s.to.Addr().Is6()))}
		}
	case testenv.Refused:
		return outcome{to: view.Reject}
	case testenv.TimedOut:
		return outcome{to: view.Drop}
	case testenv.Denied:
		// This is UDP from the node itself. If it is rejected, the sender receives two errors, one from a
		// system call and one by ICMP. This one came first.
		if s.want.to == view.Reject || s.want.to == view.Drop {
			return outcome{to: s.want.to}
		}
	}
	return outcome{}
}

// expect returns the outcome of connections with a Route.
func expect(r view.Route) outcome {
	if !r.To.Leads() {
		return outcome{to: r.To}
	}
	return outcome{r.To, r.Masquerade}
}

// TestRoutes asserts that each class of each kind of frontend takes its Route, judged by the
// packets that reach backends, for each way of recognizing pods.
func TestRoutes(t *testing.T) {
	cluster, local := view.Route{To: view.Cluster}, view.Route{To: view.Local}
	masked := func(r view.Route) view.Route { return view.Route{To: r.To, Masquerade: true} }
	reject, drop := view.Route{To: view.Reject}, view.Route{To: view.Drop}
	cases := []struct{ pods, node, others view.Route }{
		{cluster, cluster, cluster},
		{local, masked(local), masked(local)},         // internalTrafficPolicy Local
		{masked(local), masked(local), masked(local)}, // the same with masquerade-all
		{cluster, masked(cluster), local},             // externalTrafficPolicy Local
		{cluster, masked(cluster), drop},              // the same without local backends
		{reject, drop, masked(local)},
		{masked(cluster), local, reject},
		{drop, reject, drop},
		{masked(local), cluster, masked(cluster)},
	}
	detectors := map[string]view.PodDetector{
		"prefix":    {Prefixes: []netip.Prefix{netip.MustParsePrefix("10.180.7.0/24"), podCIDRs[0], podCIDRs[1], netip.MustParsePrefix("fd00:10:180:7::/64")}},
		"interface": {Interface: "pod2"}, // the interface of pods[1]
		"none":      {},
		"names":     {InterfacePrefix: "po"},
	}
	eachVariant(t, func(t *testing.T, variant Variant) {
		c := newCluster(t, Options{Variant: variant, MasqueradeMark: 1 << 20})
		c.addClusterPod()
		for detection, detector := range detectors {
			t.Run(detection, func(t *testing.T) {
				c.state.Node.Pods = detector
				for _, family := range families {
					for _, tr := range transports {
						for i, routes := range cases {
							last := byte(1 + i)
							vip := view.Frontend{Kind: view.ExternalIP, Address: vip(family, last), Port: servicePort, Pods: routes.pods, Node: routes.node, Others: routes.others}
							if detection == "none" {
								vip.Pods = vip.Others
							}
							np := vip
							np.Kind, np.Address, np.Port = view.NodePort, netip.Addr{}, 30000+uint16(last)
							p := &view.ServicePort{ID: serviceID(string('a'+rune(i)), tr.protocol, family), Frontends: []view.Frontend{vip, np}}
							for _, r := range []view.Route{vip.Pods, vip.Node, vip.Others} {
								if r.To == view.Cluster {
									p.Cluster = c.backends(family, tr.port, 4)
								} else if r.To == view.Local {
									p.Local = c.backends(family, tr.port, 0)
								}
							}
							c.set(p)
						}
					}
				}
				require.NoError(t, c.inHost.Replace(t.Context(), c.state))
				c.requireFresh(t)
				var sights []sight
				for _, family := range families {
					for _, tr := range transports {
						for i, routes := range cases {
							if detection == "none" {
								routes.pods = routes.others
							}
							for _, to := range []netip.AddrPort{
								netip.AddrPortFrom(vip(family, byte(1+i)), servicePort), netip.AddrPortFrom(c.a.Addr(family == model.IPv6), 30001+uint16(i)),
							} {
								what := fmt.Sprintf("case %d", i)
								sights = append(sights,
									sight{what, c.pods[1].Host, netip.Addr{}, tr, to, expect(routes.pods)},
									sight{what, c.client.Host, netip.Addr{}, tr, to, expect(routes.others)},
									sight{what, c.a.Host, netip.Addr{}, tr, to, expect(routes.node)})
							}
						}
					}
				}
				c.see(t, sights)
			})
		}
	})
}

// TestSources asserts that connections from outside a frontend's Sources are dropped, whatever
// happens to the others.
func TestSources(t *testing.T) {
	eachVariant(t, func(t *testing.T, variant Variant) {
		c := newCluster(t, Options{Variant: variant})
		c.addClusterPod()
		routes := []view.Frontend{
			everyone(view.Frontend{}, view.Route{To: view.Cluster, Masquerade: true}),
			localPolicy(view.Frontend{}),
			rejected(view.Frontend{}),
			{Pods: view.Route{To: view.Cluster}, Node: view.Route{To: view.Drop}, Others: view.Route{To: view.Reject}},
			everyone(view.Frontend{}, view.Route{To: view.Drop}),
		}
		for _, family := range families {
			in := c.client.Addr(family == model.IPv6)
			sources := []netip.Prefix{netip.PrefixFrom(in, in.BitLen()), netip.MustParsePrefix("198.51.100.0/24"), netip.MustParsePrefix("192.168.0.0/24")}
			if family == model.IPv6 {
				sources[1], sources[2] = netip.MustParsePrefix("2001:db8:5::/64"), netip.MustParsePrefix("2001:db8::/64")
			}
			for _, tr := range transports {
				for i, f := range routes {
					f.Kind, f.Address, f.Port, f.Sources = view.LoadBalancer, vip(family, byte(i)), servicePort, sources
					c.set(&view.ServicePort{
						ID:        serviceID(string('a'+rune(i)), tr.protocol, family),
						Frontends: []view.Frontend{f, clusterIP(vip(family, byte(100+i)))},
						Cluster:   c.backends(family, tr.port, 4), Local: c.backends(family, tr.port, 0),
					})
				}
			}
		}
		stranger := c.AddClient("stranger")
		stranger.RouteVia(c.a, testenv.ServiceCIDRs()...)
		require.NoError(t, c.inHost.Replace(t.Context(), c.state))
		c.requireFresh(t)
		var sights []sight
		for _, family := range families {
			// One of the addresses is also the node's.
			c.a.AddAddress(vip(family, 2))
			for _, tr := range transports {
				for i, f := range routes {
					what := fmt.Sprintf("routes %d", i)
					to := netip.AddrPortFrom(vip(family, byte(i)), servicePort)
					sights = append(sights,
						sight{what, c.client.Host, netip.Addr{}, tr, to, expect(f.Others)},
						sight{what, stranger.Host, netip.Addr{}, tr, to, outcome{to: view.Drop}},
						sight{what, c.pods[1].Host, netip.Addr{}, tr, to, outcome{to: view.Drop}},
						sight{what, c.a.Host, c.a.Addr(family == model.IPv6), tr, to, expect(f.Node)},
						// The cluster IP has no Sources.
						sight{what, c.pods[1].Host, netip.Addr{}, tr, netip.AddrPortFrom(vip(family, byte(100+i)), servicePort), outcome{to: view.Cluster}})
				}
			}
		}
		c.see(t, sights)
	})
}
