// These tests prove what kube-proxy's mode ipvs and Slicecast's programmer for IPVS are held to
// where they deviate from the view on purpose, without a kernel that has IPVS. The conformance
// cases prove it with packets in the virtual machine.
package verify

import (
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/trace"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

func TestModeIPVS(t *testing.T) {
	t.Parallel()
	var (
		reject, drop = view.Route{To: view.Reject}, view.Route{To: view.Drop}
		toLocalMasq  = view.Route{To: view.Local, Masquerade: true}
		vip          = address(model.IPv4, "97", 4)
		pod          = Source{"a pod", netip.MustParseAddr("10.180.0.9"), anyPodInterface}
		node         = Source{"the node", vip, ""}
		outside      = Source{"outside", netip.MustParseAddr("203.0.113.2"), "outside"}
		policyLocal  = frontend(view.LoadBalancer, vip, 80, toCluster, toClusterMasq, toLocal)
		noneLocal    = frontend(view.LoadBalancer, vip, 80, toCluster, toClusterMasq, drop)
		ranged       = policyLocal
		rangedReject = frontend(view.LoadBalancer, vip, 80, reject, reject, reject)
		beyond       = Source{"outside", netip.MustParseAddr("203.0.113.9"), "outside"}
	)
	ranged.Sources = []netip.Prefix{netip.MustParsePrefix("203.0.113.0/30"), netip.MustParsePrefix("10.180.0.0/16")}
	rangedReject.Sources = ranged.Sources
	type route struct {
		from Source
		to   view.Route
		d    deviation
	}
	for name, c := range map[string]struct {
		frontend    view.Frontend
		pods        view.PodDetector
		noCluster   bool
		masqueraded bool
		want        []route
	}{
		"policy Cluster": {frontend: clusterIP(model.IPv4, 1), want: []route{{pod, toCluster, asDecided}, {node, toClusterMasq, asDecided}, {outside, toClusterMasq, asDecided}}},
		"nothing to lead to": {
			frontend: frontend(view.NodePort, netip.Addr{}, 30001, reject, reject, reject),
			want:     []route{{pod, reject, asDecided}, {node, reject, asDecided}, {outside, reject, asDecided}},
		},
		"external policy Local":                 {frontend: policyLocal, want: []route{{pod, toLocal, localForAll}, {node, toLocal, localForAll}, {outside, toLocal, asDecided}}},
		"source ranges":                         {frontend: ranged, want: []route{{pod, toLocal, localForAll}, {node, drop, asDecided}, {outside, toLocal, asDecided}}},
		"source ranges, and nothing to lead to": {frontend: rangedReject, want: []route{{pod, reject, asDecided}, {node, reject, rejectsFirst}, {beyond, drop, asDecided}}},
		"external policy Local without local backends": {
			frontend: noneLocal, want: []route{{pod, toCluster, asDecided}, {node, toCluster, anyForLocal}, {outside, toCluster, anyForLocal}},
		},
		"internal policy Local": {
			frontend: frontend(view.ClusterIP, vip, 80, toLocal, toLocalMasq, toLocalMasq),
			want:     []route{{pod, toLocal, asDecided}, {node, toLocalMasq, asDecided}, {outside, toLocalMasq, asDecided}},
		},
		"internal policy Local without local backends": {
			frontend: frontend(view.ClusterIP, vip, 80, drop, drop, drop),
			want:     []route{{pod, toCluster, anyForLocal}, {node, toClusterMasq, anyForLocal}, {outside, toClusterMasq, anyForLocal}},
		},
		"internal policy Local without local backends, all masqueraded": {
			frontend: frontend(view.ClusterIP, vip, 80, drop, drop, drop), masqueraded: true, want: []route{{pod, toClusterMasq, anyForLocal}},
		},
		"internal policy Local of a Service that is reached in no other way": {
			frontend: frontend(view.ClusterIP, vip, 80, drop, drop, drop), noCluster: true, want: []route{{pod, reject, anyForLocal}},
		},
		"pods are not told": {
			frontend: frontend(view.ClusterIP, vip, 80, toCluster, toCluster, toCluster), pods: view.PodDetector{Prefixes: podCIDRs[1:]},
			want: []route{{pod, toCluster, asDecided}, {node, toClusterMasq, masquerades}, {outside, toCluster, asDecided}},
		},
	} {
		p := &view.ServicePort{ID: id("web", model.TCP, model.IPv4), Cluster: pods(model.IPv4, 1, 3), Local: pods(model.IPv4, 1, 1)}
		if c.noCluster {
			p.Cluster = view.Backends{}
		}
		p.Frontends = []view.Frontend{c.frontend}
		other := &view.ServicePort{ID: id("other", model.TCP, model.IPv4), Frontends: []view.Frontend{clusterIP(model.IPv4, 2)}}
		if c.masqueraded {
			other.Frontends[0].Pods.Masquerade = true
		}
		state := view.State{Node: view.Node{Pods: c.pods}, Ports: map[view.ServicePortID]*view.ServicePort{p.ID: p, other.ID: other}}
		if len(c.pods.Prefixes) == 0 {
			state.Node.Pods.Prefixes = podCIDRs
		}
		for _, r := range c.want {
			q := question{p, c.frontend, r.from, netip.AddrPortFrom(vip, 80)}
			got, d := newComparison(Options{State: state}, &trace.Rules{KubeProxyIPVS: true}, model.IPv4).wanted(q)
			require.Equal(t, r.to, got, "%s, %v", name, r.from)
			require.Equal(t, r.d, d, "%s, %v", name, r.from)
			_, d = newComparison(Options{State: state}, &trace.Rules{}, model.IPv4).wanted(q)
			require.Equal(t, asDecided, d, "%s with rules of Slicecast", name)
		}
	}
}

// TestSlicecastIPVS proves what Slicecast's programmer for IPVS is held to where it deviates from
// the view on purpose.
func TestSlicecastIPVS(t *testing.T) {
	t.Parallel()
	var (
		told        = view.PodDetector{Prefixes: podCIDRs}
		reject      = view.Route{To: view.Reject}
		vip         = address(model.IPv4, "97", 4)
		pod         = Source{"a pod", netip.MustParseAddr("10.180.0.9"), anyPodInterface}
		node        = Source{"the node", vip, ""}
		outside     = Source{"outside", netip.MustParseAddr("203.0.113.2"), "outside"}
		policyLocal = frontend(view.LoadBalancer, vip, 80, toCluster, toClusterMasq, toLocal)
	)
	type route struct {
		from Source
		to   view.Route
		d    deviation
	}
	for name, c := range map[string]struct {
		frontend view.Frontend
		pods     view.PodDetector
		affinity time.Duration
		want     []route
	}{
		"policy Local": {pods: told, frontend: policyLocal, want: []route{{pod, toCluster, asDecided}, {node, toClusterMasq, asDecided}, {outside, toLocal, asDecided}}},
		"policy Local, with affinity": {pods: told, frontend: policyLocal, affinity: time.Hour, want: []route{
			{pod, toLocal, affinityForAll}, {node, view.Route{To: view.Local, Masquerade: true}, affinityForAll}, {outside, toLocal, asDecided},
		}},
		"policy Local without local backends, with affinity": {
			pods: told, frontend: frontend(view.LoadBalancer, vip, 80, toCluster, toClusterMasq, reject), affinity: time.Hour,
			want: []route{{pod, toCluster, asDecided}, {node, toClusterMasq, asDecided}, {outside, reject, asDecided}},
		},
		"pods are not told": {
			frontend: frontend(view.ClusterIP, vip, 80, toCluster, toCluster, toCluster),
			want:     []route{{pod, toCluster, asDecided}, {node, toClusterMasq, ownSource}, {outside, toCluster, asDecided}},
		},
		"the node itself is refused": {frontend: frontend(view.ClusterIP, vip, 80, reject, reject, reject), want: []route{{node, reject, asDecided}}},
	} {
		p := &view.ServicePort{
			ID: id("web", model.TCP, model.IPv4), Cluster: pods(model.IPv4, 1, 3), Local: pods(model.IPv4, 1, 1), Affinity: c.affinity,
			Frontends: []view.Frontend{c.frontend},
		}
		for _, r := range c.want {
			q := question{p, c.frontend, r.from, netip.AddrPortFrom(vip, 80)}
			o := Options{State: view.State{Node: view.Node{Pods: c.pods}}, ServiceAddresses: []netip.Addr{vip}}
			got, d := newComparison(o, &trace.Rules{SlicecastIPVS: true}, model.IPv4).wanted(q)
			require.Equal(t, r.to, got, "%s, %v", name, r.from)
			require.Equal(t, r.d, d, "%s, %v", name, r.from)
			_, d = newComparison(o, &trace.Rules{}, model.IPv4).wanted(q)
			require.Equal(t, asDecided, d, "%s with rules of another programmer", name)
		}
	}
}

// TestAnotherAddressAsSource proves that kube-proxy's mode ipvs may drop what comes to a load
// balancer's address from another one of the Service, and nothing else that the view lets pass.
func TestAnotherAddressAsSource(t *testing.T) {
	t.Parallel()
	first, second := address(model.IPv4, "97", 4), address(model.IPv4, "97", 5)
	p := &view.ServicePort{ID: id("web", model.TCP, model.IPv4), Cluster: pods(model.IPv4, 1, 3)}
	for _, a := range []netip.Addr{first, second} {
		f := frontend(view.LoadBalancer, a, 80, toClusterMasq, toClusterMasq, toClusterMasq)
		f.Sources = []netip.Prefix{netip.PrefixFrom(first, 32), netip.PrefixFrom(second, 32), netip.MustParsePrefix("203.0.113.0/24")}
		p.Frontends = append(p.Frontends, f)
	}
	dropped, passed := []trace.Outcome{{Probability: 1, Verdict: trace.Drop}}, []trace.Outcome{{Probability: 0.5, Verdict: trace.Drop}, {Probability: 0.5}}
	question := func(from netip.Addr) question {
		return question{p, p.Frontends[0], Source{"outside", from, "outside"}, netip.AddrPortFrom(first, 80)}
	}
	ofIPVS := newComparison(Options{}, &trace.Rules{KubeProxyIPVS: true}, model.IPv4)
	require.True(t, ofIPVS.onlyOwnAddress(question(second), dropped))
	require.False(t, ofIPVS.onlyOwnAddress(question(second), passed))
	require.False(t, ofIPVS.onlyOwnAddress(question(first), dropped))
	require.False(t, ofIPVS.onlyOwnAddress(question(netip.MustParseAddr("203.0.113.2")), dropped))
	require.False(t, newComparison(Options{}, &trace.Rules{}, model.IPv4).onlyOwnAddress(question(second), dropped))
}

// TestNodesSource proves that what the node sends to an address on a device for Services has this
// address as its source, as the kernel chooses it.
func TestNodesSource(t *testing.T) {
	t.Parallel()
	f := clusterIP(model.IPv4, 1)
	o := Options{Addresses: []netip.Addr{netip.MustParseAddr("192.168.0.2")}}
	of := func() Source { return Sources(o, model.IPv4, f)[0] }
	require.Equal(t, "the node (192.168.0.2)", of().String())
	o.ServiceAddresses = []netip.Addr{f.Address}
	require.Equal(t, "the node (10.96.0.1)", of().String())

	f.Sources = []netip.Prefix{netip.MustParsePrefix("0.0.0.0/1"), netip.MustParsePrefix("128.0.0.0/1")}
	for _, s := range Sources(o, model.IPv4, f) {
		require.False(t, s.Address.IsLoopback(), "no such packet arrives from outside")
	}
}

// TestSameAffinity asserts that a timeout that the nftables programmer has rounded up is none of
// the differences, but that any other timeout is.
func TestSameAffinity(t *testing.T) {
	for _, c := range []struct {
		held, wanted time.Duration
		same         bool
	}{
		{0, 0, true}, {time.Hour, time.Hour, true}, {22 * time.Second, 21 * time.Second, true}, {11 * time.Hour, 10 * time.Hour, true},
		{0, time.Hour, false}, {time.Hour, 0, false}, {20 * time.Second, 21 * time.Second, false}, {24 * time.Second, 21 * time.Second, false},
	} {
		require.Equal(t, c.same, sameAffinity(c.held, c.wanted), "%v, %v", c.held, c.wanted)
	}
}
