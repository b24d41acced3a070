package view_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// fight is a view in which Services want the same.
type fight struct {
	*view.View
	t *testing.T
}

func newFight(t *testing.T) *fight {
	v := view.New(options)
	v.SetNode(thisNode)
	v.Changes()
	return &fight{v, t}
}

// set sets a Service; edit may be nil for none.
func (f *fight) set(key model.ServiceKey, edit ...func(*model.Service)) {
	if len(edit) == 0 {
		f.Set(key, nil, nil)
		return
	}
	f.Set(key, service(key, edit...), nil)
}

// has tells which frontends a Service has, as "clusterIP 10.96.0.1:80".
func (f *fight) has(key model.ServiceKey) []string {
	out := []string{}
	for id, p := range f.State().Ports {
		for _, e := range p.Frontends {
			if id.Service != key {
				continue
			}
			if e.Kind == view.NodePort {
				out = append(out, fmt.Sprintf("nodePort %d/%s/%s", e.Port, id.Protocol, id.Family))
			} else {
				out = append(out, fmt.Sprintf("%s %s:%d/%s", e.Kind, e.Address, e.Port, id.Protocol))
			}
		}
	}
	slices.Sort(out)
	return out
}

// change takes the changes and tells which Services they are of.
func (f *fight) change() []string {
	changes, node := f.Changes()
	require.False(f.t, node)
	names := []string{}
	for _, c := range changes {
		names = append(names, c.ID().Service.Name)
	}
	slices.Sort(names)
	return names
}

func (f *fight) requireProblems(want map[string]string) {
	f.t.Helper()
	got := map[string]string{}
	for _, p := range f.Problems() {
		require.NotContains(f.t, got, p.Service.Name)
		got[p.Service.Name] = p.Reason
	}
	require.Equal(f.t, want, got)
}

func TestTheOldestHasAnAddress(t *testing.T) {
	f := newFight(t)
	old := model.ServiceKey{Namespace: "kube-system", Name: "old"}
	f.set(web, created(2), clusterIP("10.96.0.1"))
	require.Equal(t, []string{"web"}, f.change())

	// A younger one does not get it.
	f.set(api, created(3), clusterIP("10.96.0.2"), externalIP("10.96.0.1"))
	require.Equal(t, []string{"api"}, f.change())
	require.Equal(t, []string{"clusterIP 10.96.0.1:80/TCP"}, f.has(web))
	require.Equal(t, []string{"clusterIP 10.96.0.2:80/TCP"}, f.has(api))
	f.requireProblems(map[string]string{"api": "10.96.0.1 port 80/TCP is default/web's, which is older or comes first by name"})

	// An older one takes it; nothing else is left of web, and both hear of the new owner.
	f.set(old, created(1), clusterIP("10.96.0.3"), externalIP("10.96.0.1"))
	require.Equal(t, []string{"old", "web"}, f.change())
	require.Equal(t, []string{"clusterIP 10.96.0.3:80/TCP", "externalIP 10.96.0.1:80/TCP"}, f.has(old))
	require.Empty(t, f.has(web))
	problem := "10.96.0.1 port 80/TCP is kube-system/old's, which is older or comes first by name"
	f.requireProblems(map[string]string{"api": problem, "web": problem})

	// It goes to the next, whichever way the owner gives it up.
	f.set(old, created(1), clusterIP("10.96.0.3"))
	require.Equal(t, []string{"old", "web"}, f.change())
	require.Equal(t, []string{"clusterIP 10.96.0.1:80/TCP"}, f.has(web))
	f.set(web)
	require.Equal(t, []string{"api", "web"}, f.change())
	require.Equal(t, []string{"clusterIP 10.96.0.2:80/TCP", "externalIP 10.96.0.1:80/TCP"}, f.has(api))
	f.requireProblems(map[string]string{})

	// One that was made anew is young.
	f.set(web, created(4), clusterIP("10.96.0.1"))
	require.Empty(t, f.change())
	require.Empty(t, f.has(web))
	f.set(api, created(5), clusterIP("10.96.0.2"), externalIP("10.96.0.1"))
	require.Equal(t, []string{"api", "web"}, f.change())
	require.Equal(t, []string{"clusterIP 10.96.0.1:80/TCP"}, f.has(web))
}

func TestOfOneAgeTheFirstByNameHasIt(t *testing.T) {
	f := newFight(t)
	for _, key := range []model.ServiceKey{web, {Namespace: "default-2", Name: "a"}, api} {
		f.set(key, created(7))
		f.change()
	}
	require.Equal(t, []string{"clusterIP 10.96.0.1:80/TCP"}, f.has(api))
	f.set(api)
	f.change()
	require.Equal(t, []string{"clusterIP 10.96.0.1:80/TCP"}, f.has(web))
}

func TestNodePortsAreOnce(t *testing.T) {
	nodePort := func(s *model.Service) { loadBalancer()(s); s.ClusterIPs = addrs("10.96.0.2", "fd00:96::2") }
	f := newFight(t)
	f.set(web, loadBalancer(), created(1))
	f.set(api, nodePort, created(2))
	f.change()
	require.Equal(t, []string{"clusterIP 10.96.0.1:80/TCP", "nodePort 30080/TCP/IPv4"}, f.has(web))
	require.Equal(t, []string{"clusterIP 10.96.0.2:80/TCP", "clusterIP fd00:96::2:80/TCP", "nodePort 30080/TCP/IPv6"}, f.has(api),
		"families are apart")
	f.requireProblems(map[string]string{"api": "node port 30080/TCP over IPv4 is default/web's, which is older or comes first by name"})

	// Protocols are apart too.
	f.set(web, loadBalancer(), created(1), ports(model.ServicePort{Protocol: model.UDP, Port: 80, NodePort: 30080}))
	require.Equal(t, []string{"api", "web", "web"}, f.change())
	f.requireProblems(map[string]string{})
}

// TestOneServiceAgainstItself: what the API server does not take, and manifests may hold.
func TestOneServiceAgainstItself(t *testing.T) {
	f := newFight(t)
	f.set(web, loadBalancer("192.0.2.1", "10.96.0.1"), externalIP("192.0.2.1"), func(s *model.Service) {
		s.Ports = []model.ServicePort{
			{Name: "a", Protocol: model.TCP, Port: 80, NodePort: 30080}, {Name: "b", Protocol: model.TCP, Port: 80, NodePort: 30080},
			{Name: "b", Protocol: model.UDP, Port: 80, NodePort: 30080}, {Name: "b", Protocol: model.UDP, Port: 81},
		}
	})
	f.change()
	require.Equal(t, []string{
		"clusterIP 10.96.0.1:80/TCP", "clusterIP 10.96.0.1:80/UDP", "loadBalancer 192.0.2.1:80/TCP", "loadBalancer 192.0.2.1:80/UDP",
		"nodePort 30080/TCP/IPv4", "nodePort 30080/UDP/IPv4",
	}, f.has(web))
	f.requireProblems(map[string]string{"web": `10.96.0.1 port 80/TCP is the cluster IP and nothing else; ` +
		`10.96.0.1 port 80/TCP is both port "a"'s and port "b"'s: it is the first one's; ` +
		`192.0.2.1 port 80/TCP is both port "a"'s and port "b"'s: it is the first one's; ` +
		`node port 30080/TCP over IPv4 is both port "a"'s and port "b"'s: it is the first one's; ` +
		`10.96.0.1 port 80/UDP is the cluster IP and nothing else; and more`})
}

// TestSwaps: Services that exchange what they have in one batch are one change each, whatever the order.
func TestSwaps(t *testing.T) {
	for _, order := range [][]model.ServiceKey{{web, api}, {api, web}} {
		f := newFight(t)
		f.set(web, clusterIP("10.96.0.1"), created(1))
		f.set(api, clusterIP("10.96.0.2"), created(2))
		require.Equal(t, []string{"api", "web"}, f.change())
		now := map[model.ServiceKey]string{web: "10.96.0.2", api: "10.96.0.1"}
		for _, key := range order {
			f.set(key, clusterIP(now[key]), created(1))
		}
		require.Equal(t, []string{"api", "web"}, f.change())
		require.Equal(t, []string{"clusterIP 10.96.0.2:80/TCP"}, f.has(web))
		require.Equal(t, []string{"clusterIP 10.96.0.1:80/TCP"}, f.has(api))
		f.requireProblems(map[string]string{})

		// The address of one that goes is another's at once.
		f.set(order[0])
		f.set(order[1], clusterIP(now[order[0]]), created(3))
		require.Equal(t, []string{"api", "web"}, f.change())
		require.Equal(t, []string{fmt.Sprintf("clusterIP %s:80/TCP", now[order[0]])}, f.has(order[1]))
	}
}

// TestPortsOfOneServiceSwap: numbers exchanged between ports of one Service.
func TestPortsOfOneServiceSwap(t *testing.T) {
	f := newFight(t)
	port := func(name string, number uint16) model.ServicePort {
		return model.ServicePort{Name: name, Protocol: model.TCP, Port: number}
	}
	f.set(web, ports(port("a", 80), port("b", 81)))
	f.change()
	f.set(web, ports(port("a", 81), port("b", 80)))
	require.Equal(t, []string{"web", "web"}, f.change())
	for name, number := range map[string]uint16{"a": 81, "b": 80} {
		require.Equal(t, number, f.State().Ports[view.ServicePortID{Service: web, Port: name, Protocol: model.TCP, Family: model.IPv4}].Frontends[0].Port)
	}
}
