// These tests prove which Service gets an address or port that several Services want: the rank of
// the kind of address decides, then age, then the name. Whoever loses one is reported with the
// name of the one that comes before it, and gets it in its turn.
package view_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// fight is a view whose Services compete for addresses and ports.
type fight struct {
	*view.View
	t      *testing.T
	health map[view.HealthCheckID]view.HealthCheck
}

func newFight(t *testing.T) *fight {
	v := view.New(options)
	v.SetNode(thisNode)
	v.Update()
	return &fight{View: v, t: t}
}

// set sets a Service with these edits. Without any, it removes the Service.
func (f *fight) set(key model.ServiceKey, edit ...func(*model.Service)) {
	if len(edit) == 0 {
		f.Set(key, nil, nil)
		return
	}
	f.Set(key, service(key, edit...), nil)
}

// has returns the frontends of a Service, sorted, in the form "clusterIP 10.96.0.1:80/TCP".
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

// change calls Update and returns the names of the Services that changed, sorted. A name appears
// once for each Change.
func (f *fight) change() []string {
	changes, node := f.Update()
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

func TestOldestServiceOwnsAnAddress(t *testing.T) {
	f := newFight(t)
	old := model.ServiceKey{Namespace: "kube-system", Name: "old"}
	f.set(web, created(2), externalIP("203.0.113.1"))
	require.Equal(t, []string{"web"}, f.change())

	// A younger Service does not get the address.
	f.set(api, created(3), clusterIP("10.96.0.2"), externalIP("203.0.113.1"))
	require.Equal(t, []string{"api"}, f.change())
	require.Equal(t, []string{"clusterIP 10.96.0.1:80/TCP", "externalIP 203.0.113.1:80/TCP"}, f.has(web))
	require.Equal(t, []string{"clusterIP 10.96.0.2:80/TCP"}, f.has(api))
	f.requireProblems(map[string]string{"api": "203.0.113.1 port 80/TCP goes first to Service default/web, which is older or comes first by name"})

	// An older Service gets the address. The problem of each other Service names the one directly
	// before it, so a change costs the same however many there are.
	f.set(old, created(1), clusterIP("10.96.0.3"), externalIP("203.0.113.1"))
	require.Equal(t, []string{"old", "web"}, f.change())
	require.Equal(t, []string{"clusterIP 10.96.0.3:80/TCP", "externalIP 203.0.113.1:80/TCP"}, f.has(old))
	require.Equal(t, []string{"clusterIP 10.96.0.1:80/TCP"}, f.has(web))
	f.requireProblems(map[string]string{
		"web": "203.0.113.1 port 80/TCP goes first to Service kube-system/old, which is older or comes first by name",
		"api": "203.0.113.1 port 80/TCP goes first to Service default/web, which is older or comes first by name",
	})

	// Whether the owner drops the address or is deleted, the address passes to the next Service.
	f.set(old, created(1), clusterIP("10.96.0.3"))
	require.Equal(t, []string{"old", "web"}, f.change())
	require.Equal(t, []string{"clusterIP 10.96.0.1:80/TCP", "externalIP 203.0.113.1:80/TCP"}, f.has(web))
	f.set(web)
	require.Equal(t, []string{"api", "web"}, f.change())
	require.Equal(t, []string{"clusterIP 10.96.0.2:80/TCP", "externalIP 203.0.113.1:80/TCP"}, f.has(api))
	f.requireProblems(map[string]string{})

	// A Service that is deleted and created again counts as young. A Service that loses everything has
	// no ports left.
	f.set(web, created(4), clusterIP("10.96.0.2"))
	require.Empty(t, f.change())
	require.Empty(t, f.has(web))
	f.set(api, created(5), clusterIP("10.96.0.2"), externalIP("203.0.113.1"))
	require.Equal(t, []string{"api", "web"}, f.change())
	require.Equal(t, []string{"clusterIP 10.96.0.2:80/TCP"}, f.has(web))
}

// TestKindsOfAddressesAreRanked asserts that an external IP, which anybody may write, takes no
// address from another Service, however old its Service is.
func TestKindsOfAddressesAreRanked(t *testing.T) {
	f := newFight(t)
	old, balanced := model.ServiceKey{Namespace: "default", Name: "old"}, model.ServiceKey{Namespace: "default", Name: "balanced"}
	f.set(old, created(1), clusterIP("10.96.0.3"), externalIP("10.96.0.1"))
	require.Equal(t, []string{"old"}, f.change())
	require.Equal(t, []string{"clusterIP 10.96.0.3:80/TCP", "externalIP 10.96.0.1:80/TCP"}, f.has(old))

	f.set(balanced, created(2), clusterIP("10.96.0.2"), loadBalancer("10.96.0.1"), ports(http))
	require.Equal(t, []string{"balanced", "old"}, f.change())
	require.Equal(t, []string{"clusterIP 10.96.0.2:80/TCP", "loadBalancer 10.96.0.1:80/TCP"}, f.has(balanced))
	require.Equal(t, []string{"clusterIP 10.96.0.3:80/TCP"}, f.has(old))
	f.requireProblems(map[string]string{"old": "10.96.0.1 port 80/TCP goes first to Service default/balanced as its loadBalancer, which comes before externalIP"})

	f.set(web, created(3))
	require.Equal(t, []string{"balanced", "web"}, f.change())
	require.Equal(t, []string{"clusterIP 10.96.0.1:80/TCP"}, f.has(web))
	f.requireProblems(map[string]string{
		"old":      "10.96.0.1 port 80/TCP goes first to Service default/balanced as its loadBalancer, which comes before externalIP",
		"balanced": "10.96.0.1 port 80/TCP goes first to Service default/web as its clusterIP, which comes before loadBalancer",
	})

	// A Service that wants the address as another kind than before competes with the rank of the new
	// kind.
	f.set(web, created(3), clusterIP("10.96.0.4"), externalIP("10.96.0.1"))
	require.Equal(t, []string{"balanced", "web"}, f.change())
	require.Equal(t, []string{"clusterIP 10.96.0.2:80/TCP", "loadBalancer 10.96.0.1:80/TCP"}, f.has(balanced))
	f.set(balanced, created(2), clusterIP("10.96.0.2"), externalIP("10.96.0.1"))
	require.Equal(t, []string{"balanced", "old"}, f.change())
	require.Equal(t, []string{"clusterIP 10.96.0.3:80/TCP", "externalIP 10.96.0.1:80/TCP"}, f.has(old))
}

func TestFirstByNameOwnsAnAddressAtEqualAge(t *testing.T) {
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

func TestNodePortsHaveOneOwner(t *testing.T) {
	nodePort := func(s *model.Service) { loadBalancer()(s); s.ClusterIPs = addrs("10.96.0.2", "fd00:96::2") }
	f := newFight(t)
	f.set(web, loadBalancer(), created(1))
	f.set(api, nodePort, created(2))
	f.change()
	require.Equal(t, []string{"clusterIP 10.96.0.1:80/TCP", "nodePort 30080/TCP/IPv4"}, f.has(web))
	require.Equal(t, []string{"clusterIP 10.96.0.2:80/TCP", "clusterIP fd00:96::2:80/TCP", "nodePort 30080/TCP/IPv6"}, f.has(api),
		"families are apart")
	f.requireProblems(map[string]string{"api": "node port 30080/TCP over IPv4 goes first to Service default/web, which is older or comes first by name"})

	// The same port number of two protocols is no conflict either.
	f.set(web, loadBalancer(), created(1), ports(model.ServicePort{Protocol: model.UDP, Port: 80, NodePort: 30080}))
	require.Equal(t, []string{"api", "web", "web"}, f.change())
	f.requireProblems(map[string]string{})
}

// TestNodePortsPrecedeExternalAddressesOnTheNode asserts that a Service cannot take another's
// NodePort by asking for an address of the node, whether as an external IP or as a load balancer's
// address.
func TestNodePortsPrecedeExternalAddressesOnTheNode(t *testing.T) {
	f := newFight(t)
	at30080 := ports(model.ServicePort{Name: "http", Protocol: model.TCP, Port: 30080})
	f.set(api, created(1), clusterIP("10.96.0.2"), at30080, externalIP("192.168.0.2", "192.168.0.3"), loadBalancer("2001:db8::2"),
		dualStack, at30080)
	f.change()
	has := []string{
		"clusterIP 10.96.0.1:30080/TCP", "clusterIP fd00:96::1:30080/TCP", "externalIP 192.168.0.2:30080/TCP", "externalIP 192.168.0.3:30080/TCP",
		"loadBalancer 2001:db8::2:30080/TCP",
	}
	require.Equal(t, has, f.has(api))

	f.set(web, created(2), loadBalancer(), clusterIP("10.96.0.3", "fd00:96::3"))
	require.Equal(t, []string{"api", "api", "web", "web"}, f.change())
	require.Equal(t, []string{"clusterIP 10.96.0.1:30080/TCP", "clusterIP fd00:96::1:30080/TCP", "externalIP 192.168.0.3:30080/TCP"}, f.has(api))
	require.Contains(t, f.has(web), "nodePort 30080/TCP/IPv4")
	f.requireProblems(map[string]string{"api": "192.168.0.2 port 30080/TCP is on an address of the node, where it is the node port of Service default/web; " +
		"2001:db8::2 port 30080/TCP is on an address of the node, where it is the node port of Service default/web"})

	// The NodePort comes first only on the addresses on which NodePorts are open.
	moved := *thisNode
	moved.Addresses = addrs("192.168.0.3", "192.168.0.2", "2001:db8::3")
	f.SetNode(&moved)
	f.Update()
	require.Contains(t, f.has(api), "externalIP 192.168.0.2:30080/TCP")
	require.NotContains(t, f.has(api), "externalIP 192.168.0.3:30080/TCP")
	f.SetNode(thisNode)
	f.Update()

	f.set(web)
	f.change()
	require.Equal(t, has, f.has(api))
	f.requireProblems(map[string]string{})

	// A Service's own NodePort does not compete with its external addresses.
	f.set(api, loadBalancer("192.168.0.2"), ports(model.ServicePort{Name: "http", Protocol: model.TCP, Port: 30080, NodePort: 30080}))
	f.change()
	require.Equal(t, []string{"clusterIP 10.96.0.1:30080/TCP", "loadBalancer 192.168.0.2:30080/TCP", "nodePort 30080/TCP/IPv4"}, f.has(api))
}

// TestHealthCheckOfADisplacedService asserts that a Service which has lost all of its external
// addresses and NodePorts to others attracts no traffic to them, until it has one again. A Service
// that has none yet is no such Service, because its load balancer may reach its pods directly.
func TestHealthCheckOfADisplacedService(t *testing.T) {
	f := newFight(t)
	endpoints := func(key model.ServiceKey) int {
		return f.health[view.HealthCheckID{Service: key, Family: model.IPv4}].LocalEndpoints
	}
	set := func(key model.ServiceKey, edit ...func(*model.Service)) {
		edit = append(edit, externalLocal, func(s *model.Service) { s.HealthCheckNodePort = 31000 })
		e := slice("s-"+key.Name, endpoint("10.180.0.1", local))
		f.Set(key, service(key, edit...), []*model.Slice{e})
		f.change()
		if checks, changed := f.TakeHealthChecks(); changed {
			f.health = checks
		}
	}
	set(web, created(1), loadBalancer("192.0.2.1"))
	set(api, created(2), clusterIP("10.96.0.2"), loadBalancer("192.0.2.1"))
	require.Equal(t, 1, endpoints(web))
	require.Zero(t, endpoints(api), "the address and the NodePort are web's")
	set(api, created(2), clusterIP("10.96.0.2"), loadBalancer("192.0.2.1", "192.0.2.2"))
	require.Equal(t, 1, endpoints(api))
	set(api, created(2), clusterIP("10.96.0.2"), loadBalancer("192.0.2.1"))
	require.Zero(t, endpoints(api))
	set(web, created(1), loadBalancer("192.0.2.9"))
	require.Equal(t, 1, endpoints(api), "it has got the address")
	set(api, created(2), clusterIP("10.96.0.2"), func(s *model.Service) { s.Type = model.LoadBalancer })
	require.Equal(t, 1, endpoints(api))
}

// TestOneServiceAgainstItself covers conflicts within one Service. The API server rejects such
// Services, but manifests may contain them.
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
	f.requireProblems(map[string]string{"web": `10.96.0.1 is the Service's cluster IP: it is not served as another address; ` +
		`ports "a" and "b" both have the number 80/TCP: only the first is served; ` +
		`ports "a" and "b" both have the node port 30080/TCP: it leads to the first; ` +
		`several ports have the same name and protocol: only the first of them is served`})

	var many []model.ServicePort
	for i := range 20 {
		many = append(many, model.ServicePort{Name: string(rune('a' + i)), Protocol: model.TCP, Port: 80})
	}
	f.set(web, ports(many...))
	f.change()
	require.Len(t, f.Problems(), 1)
	require.Equal(t, 5, strings.Count(f.Problems()[0].Reason, "only the first is served; "))
	require.Contains(t, f.Problems()[0].Reason, "; and more")
}

// TestSwaps asserts that two Services that swap addresses in one batch have one Change each, in
// either order.
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

		// If a Service is deleted, another one gets its address in the same batch.
		f.set(order[0])
		f.set(order[1], clusterIP(now[order[0]]), created(3))
		require.Equal(t, []string{"api", "web"}, f.change())
		require.Equal(t, []string{fmt.Sprintf("clusterIP %s:80/TCP", now[order[0]])}, f.has(order[1]))
	}
}

// TestPortsOfOneServiceSwap covers ports of one Service that swap their numbers.
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
