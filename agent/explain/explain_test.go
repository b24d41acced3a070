// These tests prove, on a real kernel, that an answer has the reason of each decision and agrees
// with the rules that the nftables programmer writes. It finds what is taken out of them, names a
// firewall that refuses packets, and marks flows of conntrack that lead to no backend.
package explain_test

import (
	"log/slog"
	"net/netip"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"
	vnetlink "github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/explain"
	"github.com/slicecast/slicecast/agent/programmer/nftables"
	"github.com/slicecast/slicecast/agent/verify"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

var web = model.ServiceKey{Namespace: "shop", Name: "web"}

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

// endpoint returns a ready endpoint.
func endpoint(address, node string, zoneHints ...string) model.Endpoint {
	return model.Endpoint{
		Address: addr(address), NodeName: node, ZoneHints: zoneHints, Conditions: model.Conditions{Ready: true, Serving: true},
	}
}

// see returns a view of web for node-1 in zone a.
func see(t *testing.T, edit func(*model.Service), endpoints ...model.Endpoint) *view.View {
	t.Helper()
	s := model.Service{
		Namespace: web.Namespace, Name: web.Name, Type: model.NodePort, ClusterIPs: []netip.Addr{addr("10.96.0.80")},
		Ports: []model.ServicePort{{Name: "http", Protocol: model.TCP, Port: 80, NodePort: 30080}},
	}
	edit(&s)
	o := &verify.Objects{}
	o.Upsert(model.NewService(s), 0)
	o.Upsert(model.NewSlice(model.Slice{
		Namespace: web.Namespace, Name: "web-1", Service: web.Name, Family: model.IPv4,
		Ports: []model.SlicePort{{Name: "http", Protocol: s.Ports[0].Protocol, Port: 8080}}, Endpoints: endpoints,
	}), 0)
	o.Upsert(&model.Node{Name: "node-1", Labels: map[string]string{"topology.kubernetes.io/zone": "a"}}, 0)
	v, err := o.View(view.Options{
		NodeName: "node-1", ClusterCIDRs: []netip.Prefix{netip.MustParsePrefix("10.180.0.0/16")},
		NodePortAddresses: []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0")},
	})
	require.NoError(t, err)
	return v
}

// program writes the rules of a view to a node's kernel.
func program(t *testing.T, node *testenv.Node, v *view.View) {
	t.Helper()
	require.NoError(t, node.Do(func() error {
		p, err := nftables.New(nftables.Options{Log: slog.New(slog.DiscardHandler)})
		if err != nil {
			return err
		}
		defer p.Close()
		return p.Replace(t.Context(), v.State())
	}))
}

// ask returns the answer for the only port that is asked for.
func ask(t *testing.T, node *testenv.Node, v *view.View, q explain.Question) (a *explain.Answer, port explain.Port) {
	t.Helper()
	q.Service = web
	require.NoError(t, node.Do(func() (err error) {
		a, err = explain.Kernel(t.Context(), v, q)
		return err
	}))
	require.Empty(t, a.Unjudged)
	require.Len(t, a.Ports, 1)
	return a, a.Ports[0]
}

// to returns the packet to a frontend from a source, both by the beginning of their names.
func to(t *testing.T, p explain.Port, frontend, source string) explain.Packet {
	t.Helper()
	for _, k := range p.Packets {
		if len(k.Frontend) >= len(frontend) && k.Frontend[:len(frontend)] == frontend && len(k.Source) >= len(source) && k.Source[:len(source)] == source {
			return k
		}
	}
	require.Fail(t, "no such packet", "%s from %s in %v", frontend, source, p.Packets)
	return explain.Packet{}
}

func nothing(*model.Service) {}

func TestKernel(t *testing.T) {
	node := testenv.NewNetwork(t).AddNode("a")
	v := see(t, nothing, endpoint("10.180.0.1", "node-1"), endpoint("10.180.1.1", "node-2"))
	a, p := ask(t, node, v, explain.Question{})
	require.True(t, a.Differs(), "nothing is programmed")
	require.Contains(t, to(t, p, "clusterIP", "a pod").Difference, "should lead to 2 backends of the cluster set, but is not translated")

	program(t, node, v)
	a, p = ask(t, node, v, explain.Question{})
	require.False(t, a.Differs())
	require.Equal(t, "all ready endpoints", p.Cluster)
	k := to(t, p, "clusterIP 10.96.0.80:80", "a pod")
	require.Equal(t, "reaches 2 backends", k.Found)
	require.Equal(t, string(view.KeepsPodSource), k.Why)
	require.Len(t, k.Outcomes, 2)
	require.InDelta(t, 0.5, k.Outcomes[0].Probability, 0.01)
	require.NotEmpty(t, k.Outcomes[0].Rules)
	k = to(t, p, "nodePort", "outside")
	require.Equal(t, "reaches 2 backends, masqueraded", k.Found)
	require.Equal(t, string(view.MasqueradesForward), k.Why)

	// The source that is asked for is the only one, and its kind is found.
	_, p = ask(t, node, v, explain.Question{From: addr("10.180.7.7"), Port: "80"})
	require.Len(t, p.Packets, 2)
	require.Equal(t, "a pod (10.180.7.7)", p.Packets[0].Source)
	_, p = ask(t, node, v, explain.Question{From: node.IPv4, Port: "http"})
	require.Equal(t, "the node ("+node.IPv4.String()+")", p.Packets[0].Source)
	_, p = ask(t, node, v, explain.Question{From: addr("192.0.2.7"), Port: "30080"})
	require.Equal(t, "outside (192.0.2.7)", p.Packets[0].Source)

	// A firewall, whose rules are no difference.
	firewalls := map[string]string{
		"nft 'table inet firewall { chain forward { type filter hook forward priority 10; tcp dport 8080 drop; }; }'":                      "is dropped by rule 1 of chain forward in table inet firewall",
		"nft 'table inet firewall { chain forward { type filter hook forward priority 10; policy drop; ct state established accept; }; }'": "is dropped by the policy of chain forward in table inet firewall",
		"iptables-nft -A FORWARD -p tcp --dport 8080 -j REJECT":                                                                            "is rejected by rule 1 of chain FORWARD in table filter of iptables-nft",
		"iptables-legacy -A FORWARD -d 10.180.1.1 -j DROP":                                                                                 "is dropped by rule 1 of chain FORWARD in table filter of iptables-legacy",
	}
	for command, rule := range firewalls {
		_, err := node.Run(t.Context(), "sh", "-c", command)
		require.NoError(t, err)
		a, p = ask(t, node, v, explain.Question{})
		require.False(t, a.Differs(), command)
		k = to(t, p, "clusterIP 10.96.0.80:80", "a pod")
		require.Equal(t, "reaches 2 backends", k.Found)
		require.Len(t, k.RefusedBy, 1, command)
		require.Contains(t, k.RefusedBy[0], rule)
		require.Empty(t, to(t, p, "clusterIP 10.96.0.80:80", "the node").RefusedBy, "what the node sends is not forwarded")
		_, err = node.Run(t.Context(), "sh", "-c", "nft 'table inet firewall; delete table inet firewall' && iptables-nft -F FORWARD && iptables-legacy -F FORWARD")
		require.NoError(t, err)
	}

	// A rule that cannot be judged comes before the one that refuses.
	_, err := node.Run(t.Context(), "sh", "-c", "iptables-nft -A FORWARD -o eth0 -j ACCEPT && iptables-nft -A FORWARD -p tcp -j DROP")
	require.NoError(t, err)
	require.NoError(t, node.Do(func() (err error) {
		a, err = explain.Kernel(t.Context(), v, explain.Question{Service: web, From: addr("10.180.7.7"), Port: "80"})
		return err
	}))
	require.Len(t, a.Unjudged, 2, "the cluster IP and the NodePort")
	require.Contains(t, a.Unjudged[0], "which cannot be judged")
	require.Empty(t, a.Ports[0].Packets[0].RefusedBy)
	_, err = node.Run(t.Context(), "iptables-nft", "-F", "FORWARD")
	require.NoError(t, err)

	// A rule is flushed from the kernel.
	require.NoError(t, node.Do(func() error {
		return exec.CommandContext(t.Context(), "nft", "flush", "chain", "ip", "slicecast", "services").Run()
	}))
	a, p = ask(t, node, v, explain.Question{})
	require.True(t, a.Differs())
	require.NotEmpty(t, to(t, p, "clusterIP", "a pod").Difference)
}

func TestDecisions(t *testing.T) {
	node := testenv.NewNetwork(t).AddNode("a")
	for name, c := range map[string]struct {
		edit               func(*model.Service)
		endpoints          []model.Endpoint
		frontend, source   string
		wanted, why, found string
	}{
		"no endpoint": {nothing, nil, "clusterIP", "a pod", "reject", string(view.NoEndpoint), "is rejected"},
		"no local endpoint": {
			func(s *model.Service) { s.ExternalTrafficPolicy = model.TrafficLocal },
			[]model.Endpoint{endpoint("10.180.1.1", "node-2")}, "nodePort", "outside",
			"drop", string(view.NoLocalEndpoint), "is dropped",
		},
		"hints": {
			nothing, []model.Endpoint{endpoint("10.180.0.1", "node-1", "a"), endpoint("10.180.1.1", "node-2", "b")},
			"clusterIP", "a pod", "cluster", string(view.InternalCluster), "reaches 1 backend",
		},
	} {
		t.Run(name, func(t *testing.T) {
			v := see(t, c.edit, c.endpoints...)
			program(t, node, v)
			a, p := ask(t, node, v, explain.Question{})
			require.False(t, a.Differs())
			k := to(t, p, c.frontend, c.source)
			require.Equal(t, c.wanted, k.Wanted)
			require.Equal(t, c.why, k.Because)
			require.Equal(t, c.found, k.Found)
			if name == "hints" {
				require.Equal(t, view.OtherZone, p.Endpoints[1].NotInCluster)
			}
		})
	}
}

func TestFlows(t *testing.T) {
	node := testenv.NewNetwork(t).AddNode("a")
	v := see(t, nothing, endpoint("10.180.0.1", "node-1"))
	program(t, node, v)
	client := uint16(40000)
	protocol := uint8(unix.IPPROTO_TCP)
	create := func(to, reply string) {
		client++
		a, b := netip.MustParseAddrPort(to), netip.MustParseAddrPort(reply)
		source := addr("10.180.9.9")
		var info vnetlink.ProtoInfo
		if protocol == unix.IPPROTO_TCP {
			info = &vnetlink.ProtoInfoTCP{State: 3}
		}
		require.NoError(t, node.Do(func() error {
			return vnetlink.ConntrackCreate(vnetlink.ConntrackTable, unix.AF_INET, &vnetlink.ConntrackFlow{
				FamilyType: unix.AF_INET, TimeOut: 3600, ProtoInfo: info,
				Forward: vnetlink.IPTuple{
					Protocol: protocol, SrcIP: source.AsSlice(), SrcPort: client,
					DstIP: a.Addr().AsSlice(), DstPort: a.Port(),
				},
				Reverse: vnetlink.IPTuple{
					Protocol: protocol, SrcIP: b.Addr().AsSlice(), SrcPort: b.Port(),
					DstIP: source.AsSlice(), DstPort: client,
				},
			})
		}))
	}
	create("10.96.0.80:80", "10.180.0.1:8080")
	create("10.96.0.80:80", "10.180.0.99:8080")
	create("10.96.0.80:80", "10.96.0.80:80")
	create("10.180.0.1:8080", "10.180.0.1:8080")
	create("10.96.0.81:80", "10.180.0.1:8080") // of another Service
	_, p := ask(t, node, v, explain.Question{})
	require.Equal(t, 3, p.Flows.Total)
	require.Equal(t, 1, p.Flows.Stale)
	require.Equal(t, 1, p.Flows.Direct)
	require.Empty(t, p.Flows.Error)
	stale := map[string]string{}
	for _, f := range p.Flows.LeadsTo {
		require.Equal(t, 1, f.Count)
		stale[f.Address] = f.Stale
	}
	require.Equal(t, map[string]string{
		"10.180.0.1:8080": "", "10.180.0.99:8080": "it is no endpoint that serves, and this connection goes on until it ends",
		"10.96.0.80:80": "it is not translated: it began while the kernel had no backend for it",
	}, stale)
	require.NotEmpty(t, p.Flows.Sample[0].Stale, "stale flows come first")

	_, p = ask(t, node, v, explain.Question{From: addr("10.180.9.8")})
	require.Zero(t, p.Flows.Total, "flows of other sources")

	// By UDP, a client would send to an endpoint that is gone for ever.
	protocol = unix.IPPROTO_UDP
	v = see(t, func(s *model.Service) { s.Ports[0].Protocol = model.UDP }, endpoint("10.180.0.1", "node-1"))
	program(t, node, v)
	create("10.96.0.80:80", "10.180.0.99:8080")
	_, p = ask(t, node, v, explain.Question{})
	require.Equal(t, 1, p.Flows.Stale)
	require.Equal(t, "it is no endpoint that serves", p.Flows.LeadsTo[0].Stale)

	protocol = unix.IPPROTO_SCTP
	v = see(t, func(s *model.Service) { s.Ports[0].Protocol = model.SCTP }, endpoint("10.180.0.1", "node-1"))
	program(t, node, v)
	create("10.96.0.80:80", "10.180.0.99:8080")
	_, p = ask(t, node, v, explain.Question{})
	require.Equal(t, 1, p.Flows.Total)
	require.Zero(t, p.Flows.Stale, "it goes on until it ends")
}
