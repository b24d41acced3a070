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

// outcome is what became of new connections.
type outcome struct {
	to     view.Target // 0: it is as if there were no Service
	masked bool        // the source that backends see is not the client's
}

// addClusterPod adds a pod for cluster sets. It is on node a as the local set's: what is not masqueraded comes back by it.
func (c *cluster) addClusterPod() {
	pod := c.a.AddPod("pod4")
	pod.Serve(testenv.TCP, tcpPort)
	pod.Serve(testenv.UDP, udpPort)
	c.pods = append(c.pods, pod)
}

// sight is a probe of a Service port whose cluster set is pod 4 and whose local set is pod 0, and what it is to see.
type sight struct {
	what   string
	from   *testenv.Host
	source netip.Addr // may be zero
	tr     transport
	to     netip.AddrPort
	want   outcome
}

// see probes all at once, as silence takes its time.
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
			// Whether the node's own address is masqueraded cannot be told: it is the same.
			got[i].masked, s.want.masked = false, false
		}
		require.Equal(t, s.want, got[i], "%s: %s from %s to %v", s.what, s.tr.probe, s.from.Name, s.to)
	}
}

func (c *cluster) look(ctx context.Context, s sight) outcome {
	timeout := patient.Timeout
	if s.want.to == view.Drop {
		timeout = time.Second // which passes each time
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
		// UDP from the node itself. Where that is rejected the sender is told twice, in a system call and by ICMP, and of
		// the two this is the one that came first.
		if s.want.to == view.Reject || s.want.to == view.Drop {
			return outcome{to: s.want.to}
		}
	}
	return outcome{}
}

// expect gives what a Route makes of connections.
func expect(r view.Route) outcome {
	if !leads(r.To) {
		return outcome{to: r.To}
	}
	return outcome{r.To, r.Masquerade}
}

// TestRoutes holds each class of each kind of frontend to its Route, by the packets that come to backends, for each way
// in which pods can be told from others.
func TestRoutes(t *testing.T) {
	cluster, local := view.Route{To: view.Cluster}, view.Route{To: view.Local}
	masked := func(r view.Route) view.Route { return view.Route{To: r.To, Masquerade: true} }
	reject, drop := view.Route{To: view.Reject}, view.Route{To: view.Drop}
	cases := []struct{ pods, node, others view.Route }{
		{cluster, cluster, cluster},
		{local, masked(local), masked(local)},         // internalTrafficPolicy Local
		{masked(local), masked(local), masked(local)}, // and masquerade-all
		{cluster, masked(cluster), local},             // externalTrafficPolicy Local
		{cluster, masked(cluster), drop},              // and none is local
		{reject, drop, masked(local)},
		{masked(cluster), local, reject},
		{drop, reject, drop},
		{masked(local), cluster, masked(cluster)},
	}
	detectors := map[string]view.PodDetector{
		"prefix":    {Prefixes: []netip.Prefix{netip.MustParsePrefix("10.180.7.0/24"), podCIDRs[0], podCIDRs[1], netip.MustParsePrefix("fd00:10:180:7::/64")}},
		"interface": {Interface: "pod2"}, // where pods[1] is
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

// TestSources holds that who is not among a frontend's Sources is dropped, whatever becomes of the others.
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
			// One of the addresses is the node's, too.
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
						// The cluster IP is open.
						sight{what, c.pods[1].Host, netip.Addr{}, tr, netip.AddrPortFrom(vip(family, byte(100+i)), servicePort), outcome{to: view.Cluster}})
				}
			}
		}
		c.see(t, sights)
	})
}
