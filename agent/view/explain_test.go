// These tests prove that Explain names the reason of each decision: why endpoints are in a set or
// not, why frontends lead where they do, and why they are masqueraded. They also prove that what it
// explains is what was decided.
package view_test

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// explained returns the explanation of the only port of web.
func explained(t *testing.T, o view.Options, s *model.Service, endpointSlices ...*model.Slice) view.PortExplanation {
	t.Helper()
	v := view.New(o)
	v.SetNode(thisNode)
	v.Set(web, s, endpointSlices)
	v.Update()
	ports, problems := v.Explain(web)
	require.Empty(t, problems)
	require.Len(t, ports, 1)
	p := ports[0]
	require.Same(t, v.State().Ports[p.ID], p.ServicePort)
	for _, e := range p.Endpoints {
		if p.ServicePort.Cluster.Len() > 0 {
			require.Equal(t, e.Cluster == "", p.ServicePort.Cluster.Contains(e.Address), e.Address)
		}
		if p.ServicePort.Local.Len() > 0 {
			require.Equal(t, e.OfLocal == "", p.ServicePort.Local.Contains(e.Address), e.Address)
		}
	}
	return p
}

func TestExplainEndpoints(t *testing.T) {
	for name, c := range map[string]struct {
		endpoints  []model.Endpoint
		cluster    string
		exclusions []view.Exclusion
	}{
		"ready": {
			[]model.Endpoint{endpoint("10.180.0.1"), endpoint("10.180.0.2", unready), endpoint("10.180.0.3", terminating)},
			"all ready endpoints", []view.Exclusion{"", view.NotReady, view.NotReady},
		},
		"terminating": {
			[]model.Endpoint{endpoint("10.180.0.1", unready), endpoint("10.180.0.2", terminating), endpoint("10.180.0.3", dead)},
			"the terminating endpoints that still serve, because none is ready",
			[]view.Exclusion{view.NotServing, "", view.NotServing},
		},
		"none": {
			[]model.Endpoint{endpoint("10.180.0.1", unready)},
			"none: no endpoint is ready, and none terminates while still serving", []view.Exclusion{view.NotServing},
		},
		"zone": {
			[]model.Endpoint{endpoint("10.180.0.1", zones("zone-a")), endpoint("10.180.0.2", zones("zone-x"))},
			`the ready endpoints that are hinted for this node's zone "zone-a"`, []view.Exclusion{"", view.OtherZone},
		},
		"node": {
			[]model.Endpoint{endpoint("10.180.0.1", nodes(here)), endpoint("10.180.0.2", nodes(elsewhere))},
			"the ready endpoints that are hinted for this node", []view.Exclusion{"", view.OtherNode},
		},
		"one without hints": {
			[]model.Endpoint{endpoint("10.180.0.1", zones("zone-a")), endpoint("10.180.0.2")},
			"all ready endpoints; hints for zones do not count, because only 1 of 2 have one", []view.Exclusion{"", ""},
		},
		"another zone": {
			[]model.Endpoint{endpoint("10.180.0.1", zones("zone-x"))},
			`all ready endpoints; hints for zones do not count, because none names this node's zone "zone-a"`,
			[]view.Exclusion{""},
		},
		"another node": {
			[]model.Endpoint{endpoint("10.180.0.1", nodes(elsewhere))},
			"all ready endpoints; hints for nodes do not count, because none names this node", []view.Exclusion{""},
		},
		"nodes without hints": {
			[]model.Endpoint{endpoint("10.180.0.1", nodes(here)), endpoint("10.180.0.2")},
			"all ready endpoints; hints for nodes do not count, because only 1 of 2 have one", []view.Exclusion{"", ""},
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := explained(t, view.Options{NodeName: here}, service(web), slice("web-1", c.endpoints...))
			require.Equal(t, c.cluster, p.Cluster)
			require.Empty(t, p.Local)
			var exclusions []view.Exclusion
			for _, e := range p.Endpoints {
				exclusions = append(exclusions, e.Cluster)
			}
			require.Equal(t, c.exclusions, exclusions)
		})
	}
}

func TestExplainRoutes(t *testing.T) {
	pods := view.Options{NodeName: here, ClusterCIDRs: prefixes("10.180.0.0/16")}
	remote, onNode := endpoint("10.180.1.1"), endpoint("10.180.0.1", local)

	p := explained(t, pods, service(web, internalLocal), slice("web-1", remote))
	require.Equal(t, "none: no endpoint on this node is ready, and none terminates while still serving", p.Local)
	require.Equal(t, view.NotLocal, p.Endpoints[0].OfLocal)
	require.Equal(t, view.RouteExplanation{Target: view.NoLocalEndpoint}, p.Frontends[0].Pods)

	p = explained(t, pods, service(web, internalLocal), slice("web-1", remote, endpoint("10.180.0.1", local, terminating)))
	require.Equal(t, "the terminating endpoints on this node that still serve, because none there is ready", p.Local)

	// Neither an endpoint here that does not serve nor one elsewhere that does is one to use.
	p = explained(t, pods, service(web, internalLocal), slice("web-1", endpoint("10.180.0.1", local, unready), endpoint("10.180.1.1", terminating)))
	require.Equal(t, "none: no endpoint on this node is ready, and none terminates while still serving", p.Local)

	p = explained(t, pods, service(web), slice("web-1", endpoint("10.180.1.1", unready)))
	require.Equal(t, view.RouteExplanation{Target: view.NoEndpoint}, p.Frontends[0].Others)

	p = explained(t, pods, service(web, loadBalancer("203.0.113.1"), externalLocal), slice("web-1", remote, onNode))
	require.Equal(t, view.FrontendExplanation{
		Pods:   view.RouteExplanation{Target: view.InternalCluster, Masquerade: view.KeepsPodSource},
		Node:   view.RouteExplanation{Target: view.InternalCluster, Masquerade: view.MasqueradesOthers},
		Others: view.RouteExplanation{Target: view.InternalCluster, Masquerade: view.MasqueradesOthers},
	}, p.Frontends[0])
	require.Equal(t, view.FrontendExplanation{
		Pods:   view.RouteExplanation{Target: view.ExternalLocalInner, Masquerade: view.KeepsPodSource},
		Node:   view.RouteExplanation{Target: view.ExternalLocalInner, Masquerade: view.MasqueradesNode},
		Others: view.RouteExplanation{Target: view.ExternalLocal, Masquerade: view.KeepsClientSource},
	}, p.Frontends[1])
	require.Equal(t, "the ready endpoints on this node", p.Local)

	p = explained(t, view.Options{NodeName: here}, service(web, loadBalancer("203.0.113.1")), slice("web-1", remote))
	require.Equal(t, view.RouteExplanation{Target: view.InternalCluster, Masquerade: view.KeepsUnknownSource}, p.Frontends[0].Node)
	require.Equal(t, view.RouteExplanation{Target: view.ExternalCluster, Masquerade: view.MasqueradesForward}, p.Frontends[1].Pods)

	pods.MasqueradeAll = true
	p = explained(t, pods, service(web), slice("web-1", remote))
	require.Equal(t, view.RouteExplanation{Target: view.InternalCluster, Masquerade: view.MasqueradesAll}, p.Frontends[0].Pods)
}

func TestExplainNothing(t *testing.T) {
	ports, problems := view.New(view.Options{}).Explain(web)
	require.Empty(t, ports)
	require.Empty(t, problems)
}

func TestPodDetectorRecognizes(t *testing.T) {
	pod, other := netip.MustParseAddr("10.180.0.1"), netip.MustParseAddr("192.0.2.1")
	for name, d := range map[string]view.PodDetector{
		"prefixes": {Prefixes: prefixes("10.180.0.0/16")}, "bridge": {Interface: "cbr0"}, "prefix": {InterfacePrefix: "cbr"},
	} {
		require.True(t, d.Recognizes(pod, "cbr0"), name)
		require.False(t, d.Recognizes(other, "eth0"), name)
		require.False(t, d.Recognizes(other, ""), name)
	}
}
