// These tests prove what the printer writes for each state and change, and that it returns the
// errors of its writer.
package printer

import (
	"bytes"
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

func servicePort(name string, backends ...string) *view.ServicePort {
	cluster, masqueraded := view.Route{To: view.Cluster}, view.Route{To: view.Cluster, Masquerade: true}
	p := &view.ServicePort{
		ID: view.ServicePortID{Service: model.ServiceKey{Namespace: "default", Name: name}, Port: "http", Protocol: model.TCP, Family: model.IPv4},
		Frontends: []view.Frontend{
			{
				Kind: view.ClusterIP, Address: netip.MustParseAddr("10.96.0.1"), Port: 80,
				Pods: cluster, Node: masqueraded, Others: masqueraded,
			},
			{Kind: view.NodePort, Port: 30080, Pods: masqueraded, Node: masqueraded, Others: masqueraded},
		},
	}
	for i, b := range backends {
		p.Cluster = view.NewBackends(append(p.Cluster.List(), view.Backend{Address: netip.MustParseAddrPort(b), Local: i == 0})...)
	}
	return p
}

func TestReplace(t *testing.T) {
	var out bytes.Buffer
	p := New(&out)
	local := servicePort("local", "10.180.0.1:8080")
	local.Affinity, local.HealthCheckPort = 3*time.Hour, 31000
	local.Local = local.Cluster
	local.Serving = view.NewBackends(append(local.Cluster.List(), view.Backend{Address: netip.MustParseAddrPort("10.180.0.9:8080")})...)
	local.Frontends = []view.Frontend{
		{
			Kind: view.ExternalIP, Address: netip.MustParseAddr("192.0.2.1"), Port: 80,
			Pods: view.Route{To: view.Local}, Node: view.Route{To: view.Cluster, Masquerade: true}, Others: view.Route{To: view.Local},
		},
		{
			Kind: view.LoadBalancer, Address: netip.MustParseAddr("192.0.2.2"), Port: 80,
			Sources: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("198.51.100.0/24")},
			Pods:    view.Route{To: view.Cluster}, Node: view.Route{To: view.Cluster, Masquerade: true}, Others: view.Route{To: view.Drop},
		},
	}
	empty := servicePort("empty")
	empty.Frontends[0].Pods, empty.Frontends[0].Node, empty.Frontends[0].Others = view.Route{To: view.Reject}, view.Route{To: view.Reject}, view.Route{To: view.Reject}
	state := view.State{Ports: map[view.ServicePortID]*view.ServicePort{}, Node: view.Node{
		Pods:      view.PodDetector{Prefixes: []netip.Prefix{netip.MustParsePrefix("10.180.0.0/16"), netip.MustParsePrefix("fd00::/64")}},
		NodePorts: []netip.Prefix{netip.MustParsePrefix("192.168.0.2/32"), netip.MustParsePrefix("::/0")},
	}}
	for _, port := range []*view.ServicePort{servicePort("web", "10.180.0.1:8080", "10.180.1.1:8080"), local, empty} {
		state.Ports[port.ID] = port
	}
	require.NoError(t, p.Replace(t.Context(), state))
	require.NoError(t, p.Cleanup(t.Context()))
	require.Equal(t, `replace: 3 service ports, 4 backends; pods are 10.180.0.0/16, fd00::/64; node ports are on 192.168.0.2/32, ::/0
default/empty:http/TCP/IPv4:
    clusterIP 10.96.0.1 port 80 → reject
    nodePort 30080 → cluster masqueraded
default/local:http/TCP/IPv4:
    externalIP 192.0.2.1 port 80: this node → cluster masqueraded, others → local
    loadBalancer 192.0.2.2 port 80: pods → cluster, this node → cluster masqueraded, others → drop; only from 192.0.2.0/24, 198.51.100.0/24
    affinity of clients for 3h0m0s
    health checks at port 31000
    cluster → 10.180.0.1:8080 on this node
    local → 10.180.0.1:8080 on this node
    flows to 10.180.0.9:8080 stay
default/web:http/TCP/IPv4:
    clusterIP 10.96.0.1 port 80: pods → cluster, others → cluster masqueraded
    nodePort 30080 → cluster masqueraded
    cluster → 10.180.0.1:8080 on this node
    cluster → 10.180.1.1:8080
cleanup: nothing was programmed
`, out.String())
}

func TestNode(t *testing.T) {
	all := []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")}
	for want, node := range map[string]view.Node{
		"pods are not recognized; node ports are on 0.0.0.0/0, ::/0 and localhost\n": {NodePorts: all, LocalhostNodePorts: true},
		"pods are not recognized; node ports are on no address\n":                    {},
		"pods are behind cni0; node ports are on 0.0.0.0/0, ::/0\n":                  {NodePorts: all, Pods: view.PodDetector{Interface: "cni0"}},
		"pods are behind veth*; node ports are on 0.0.0.0/0, ::/0\n":                 {NodePorts: all, Pods: view.PodDetector{InterfacePrefix: "veth"}},
		"pods are not recognized; node ports are on 0.0.0.0/0, ::/0; cluster IPs are in 10.96.0.0/16, fd00:10:96::/112\n": {
			NodePorts: all, ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd00:10:96::/112")},
		},
	} {
		var out bytes.Buffer
		require.NoError(t, New(&out).Replace(t.Context(), view.State{Node: node}))
		require.Equal(t, "replace: 0 service ports, 0 backends; "+want, out.String())
	}
}

func TestApply(t *testing.T) {
	var out bytes.Buffer
	moved := servicePort("web", "10.180.0.1:8080", "10.180.1.2:8080", "10.180.1.3:8080")
	moved.Frontends = moved.Frontends[:1]
	require.NoError(t, New(&out).Apply(t.Context(), []view.Change{
		{Before: servicePort("web", "10.180.0.1:8080", "10.180.1.1:8080"), After: moved},
		{Before: servicePort("old")},
		{After: servicePort("new", "10.180.0.1:8080")},
	}))
	require.Equal(t, `apply: 3 service ports
+ default/new:http/TCP/IPv4:
    clusterIP 10.96.0.1 port 80: pods → cluster, others → cluster masqueraded
    nodePort 30080 → cluster masqueraded
    cluster → 10.180.0.1:8080 on this node
- default/old:http/TCP/IPv4
  default/web:http/TCP/IPv4:
  - nodePort 30080 → cluster masqueraded
  - cluster → 10.180.1.1:8080
  + cluster → 10.180.1.2:8080
  + cluster → 10.180.1.3:8080
`, out.String())
}

type brokenWriter struct{}

func (brokenWriter) Write([]byte) (int, error) { return 0, errors.New("pipe closed") }

func TestWriterFails(t *testing.T) {
	p := New(brokenWriter{})
	require.ErrorContains(t, p.Replace(t.Context(), view.State{}), "pipe closed")
	require.ErrorContains(t, p.Apply(t.Context(), nil), "pipe closed")
	require.ErrorContains(t, p.Cleanup(t.Context()), "pipe closed")
}
