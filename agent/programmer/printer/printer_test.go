package printer

import (
	"bytes"
	"errors"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

func servicePort(name string, backends ...string) *view.ServicePort {
	p := &view.ServicePort{
		ID: view.ServicePortID{Service: model.ServiceKey{Namespace: "default", Name: name}, Port: "http", Protocol: model.TCP, Family: model.IPv4},
		Frontends: []view.Frontend{
			{Kind: view.ClusterIP, Address: netip.MustParseAddr("10.96.0.1"), Port: 80, Masquerade: view.MasqueradeNonLocal},
			{Kind: view.NodePort, Port: 30080, Masquerade: view.MasqueradeAlways},
		},
	}
	for i, b := range backends {
		p.Backends = append(p.Backends, view.Backend{Address: netip.MustParseAddrPort(b), Local: i == 0})
	}
	return p
}

func TestReplace(t *testing.T) {
	var out bytes.Buffer
	p := New(&out)
	state := view.State{Ports: map[view.ServicePortID]*view.ServicePort{}}
	state.Node.LocalPods = []netip.Prefix{netip.MustParsePrefix("10.180.0.0/16"), netip.MustParsePrefix("fd00::/64")}
	for _, port := range []*view.ServicePort{servicePort("web", "10.180.0.1:8080", "10.180.1.1:8080"), servicePort("api")} {
		state.Ports[port.ID] = port
	}
	require.NoError(t, p.Replace(t.Context(), state))
	require.NoError(t, p.Replace(t.Context(), view.State{}))
	require.NoError(t, p.Cleanup(t.Context()))
	require.Equal(t, `replace: 2 service ports, 2 backends; pods are 10.180.0.0/16, fd00::/64
default/api:http/TCP/IPv4: 0 backends
    clusterIP 10.96.0.1 port 80, masquerade unless from a pod
    nodePort 30080, masquerade
    → rejected, as there is no backend
default/web:http/TCP/IPv4: 2 backends
    clusterIP 10.96.0.1 port 80, masquerade unless from a pod
    nodePort 30080, masquerade
    → 10.180.0.1:8080 on this node
    → 10.180.1.1:8080
replace: 0 service ports, 0 backends; pods are not told apart
cleanup: nothing was programmed
`, out.String())
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
+ default/new:http/TCP/IPv4: 1 backends
    clusterIP 10.96.0.1 port 80, masquerade unless from a pod
    nodePort 30080, masquerade
    → 10.180.0.1:8080 on this node
- default/old:http/TCP/IPv4
  default/web:http/TCP/IPv4: 2 → 3 backends
  - nodePort 30080, masquerade
  - → 10.180.1.1:8080
  + → 10.180.1.2:8080
  + → 10.180.1.3:8080
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
