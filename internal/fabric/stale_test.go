// These tests prove that a server which cannot reach the API server loses its agents and relays to
// one that can, that nobody travels back in time meanwhile, and that nobody moves if there is no
// such server.
package fabric

import (
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/slicecast/slicecast/agent/client"
	"github.com/slicecast/slicecast/agent/client/cache"
	"github.com/slicecast/slicecast/agent/client/discovery"
	"github.com/slicecast/slicecast/internal/logtest"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
	"github.com/slicecast/slicecast/internal/proxytest"
	"github.com/slicecast/slicecast/internal/source/kube"
	"github.com/slicecast/slicecast/internal/testenv/controlplane"
	"github.com/slicecast/slicecast/server/app"
)

// hurry shortens the delays of clients that the test starts from now on.
func hurry(t *testing.T, returnAfter time.Duration) {
	before := discovery.DefaultTimes
	t.Cleanup(func() { discovery.DefaultTimes = before })
	times := &discovery.DefaultTimes
	times.StaleAfter, times.MinSearchPause, times.MaxSearchPause = 50*time.Millisecond, 100*time.Millisecond, 200*time.Millisecond
	times.ReturnAfter = returnAfter
}

// nodesOf returns how many nodes a server serves.
func (s *server) nodesOf(t require.TestingT) int { return int(s.metric(t, "slicecast_server_nodes")) }

// forward checks, on each update, that an agent's endpoints of Web only become more.
type forward struct {
	*agent
	most int
}

func (f *forward) check(t require.TestingT) {
	n := f.endpoints()
	require.GreaterOrEqual(t, n, f.most, "the agent went back in time")
	f.most = n
}

// TestStaleServerIsLeft checks that all nodes of a server that is cut off from the API server have
// changes that only the other server sees, and return when the first one has caught up.
func TestStaleServerIsLeft(t *testing.T) {
	hurry(t, time.Second)
	c := newCluster(modeltest.Web(), web(1))
	watches, servers, addresses := []*watch{{cluster: c}, {cluster: c}}, []*server{}, []string{}
	for _, w := range watches {
		s := serve(t, w, func(c *app.Config) { c.MaxBehindWait = patience })
		servers, addresses = append(servers, s), append(addresses, s.address())
	}
	var agents []*forward
	var logged logtest.Buffer
	const settled = 4 // the nodes that prefer each of the servers, whose ports are random
	for _, s := range servers {
		for n, i := 0, 0; n < settled; i++ {
			node := fmt.Sprint("node-", i)
			if preferred(node, servers[0], servers[1]) != s.address() {
				continue
			}
			a := follow(t, agentOptions{node: node, servers: addresses, logs: &logged})
			a.waitEquals(t, c)
			agents, n = append(agents, &forward{agent: a}), n+1
		}
	}
	// A node that has found only one server ready returns to the one that it prefers.
	for _, s := range servers {
		require.True(t, eventually(func() bool { return s.nodesOf(t) == settled }))
	}

	watches[0].cutOff()
	for n := 2; n < 5; n++ {
		c.upsert(web(n))
		for _, a := range agents {
			a.waitEquals(t, c)
			a.check(t)
		}
	}
	require.True(t, eventually(func() bool { return servers[0].nodesOf(t) == 0 }))
	require.Equal(t, settled, logged.Count("level=WARN", "Leaving a server that may lack changes"), &logged)

	watches[0].recover()
	require.True(t, eventually(func() bool {
		for _, a := range agents {
			a.check(t)
		}
		return servers[0].nodesOf(t) == settled
	}))
	c.upsert(web(5))
	for _, a := range agents {
		a.waitEquals(t, c)
		a.check(t)
	}
	for _, s := range servers {
		require.Zero(t, s.metric(t, "slicecast_server_behind_waits_total", "gave_up"))
	}
}

// TestAllServersAreStale checks that an outage of the API server ends no stream.
func TestAllServersAreStale(t *testing.T) {
	hurry(t, time.Second)
	c := newCluster(modeltest.Web(), web(1))
	watches, servers, addresses := []*watch{{cluster: c}, {cluster: c}}, []*server{}, []string{}
	for _, w := range watches {
		s := serve(t, w)
		servers, addresses = append(servers, s), append(addresses, s.address())
	}
	var agents []*agent
	for _, node := range nodes {
		a := follow(t, agentOptions{node: node, servers: addresses})
		a.waitEquals(t, c)
		agents = append(agents, a)
	}
	starts := servers[0].metric(t, "slicecast_server_stream_starts_total", "cold") +
		servers[1].metric(t, "slicecast_server_stream_starts_total", "cold")
	require.EqualValues(t, len(agents), starts)
	for _, w := range watches {
		w.cutOff()
	}
	count := func(a *agent, name string, labels ...string) float64 {
		n, err := metric(a.registry, name, labels...)
		require.NoError(t, err)
		return n
	}
	staleProbes := func(a *agent) float64 { return count(a, "slicecast_agent_probes_total", "stale") }
	for _, a := range agents {
		// One server may be stale before the other one, and is left then. After some probes, both are.
		require.True(t, eventually(func() bool { return staleProbes(a) >= 3 }))
		ended, probes := count(a, "slicecast_agent_disconnects_total"), staleProbes(a)
		require.True(t, eventually(func() bool { return staleProbes(a) >= probes+5 }))
		require.False(t, a.client.Connection().StaleSince.IsZero())
		require.Equal(t, ended, count(a, "slicecast_agent_disconnects_total"))
	}
	// From here on, a client may leave a server for the one that recovers first.
	for _, w := range watches {
		w.recover()
	}
	c.upsert(web(2))
	for _, a := range agents {
		a.waitEquals(t, c)
		require.True(t, eventually(func() bool { return a.client.Connection().StaleSince.IsZero() }))
	}
}

// TestStaleRelays checks a chain of relays: each passes on that the server above it is stale, and
// says itself that it is stale when it follows no server. A relay that knows another server leaves
// the stale one, and its agents stay with it.
func TestStaleRelays(t *testing.T) {
	hurry(t, time.Hour)
	c := newCluster(modeltest.Web(), web(1))
	watches := []*watch{{cluster: c}, {cluster: c}}
	stale, fresh := serve(t, watches[0]), serve(t, watches[1])
	clever := serve(t, nil, upstreamOf(stale.address()), func(o *app.Config) {
		o.Upstream.Servers = client.Static(stale.address(), fresh.address())
	})
	behind := follow(t, agentOptions{node: nodes[0], servers: []string{clever.address()}})
	behind.waitEquals(t, c)
	if clever.upstream(t) == fresh.address() {
		stale, fresh, watches[0] = fresh, stale, watches[1]
	}
	first := serve(t, nil, upstreamOf(stale.address()))
	second := serve(t, nil, upstreamOf(first.address()))
	// Once another agent is in sync, the relay is ready.
	follow(t, agentOptions{node: nodes[1], servers: []string{second.address()}}).waitEquals(t, c)
	leaver := follow(t, agentOptions{node: prefers(second, fresh), servers: []string{second.address(), fresh.address()}})
	leaver.waitEquals(t, c)
	leaver.waitFollows(t, second)

	disconnects := func() float64 {
		n, err := metric(behind.registry, "slicecast_agent_disconnects_total")
		require.NoError(t, err)
		return n
	}
	before := disconnects() // attempts while the relay was not in sync
	watches[0].cutOff()
	c.upsert(web(2))
	leaver.waitEquals(t, c)
	behind.waitEquals(t, c)
	leaver.waitFollows(t, fresh)
	require.True(t, eventually(func() bool { return clever.upstream(t) == fresh.address() }))
	require.Equal(t, 1, clever.logs.Count("level=WARN", "Leaving a server that may lack changes", "to="+fresh.address()), clever.logs)
	require.Equal(t, before, disconnects())

	watches[0].recover()
	require.True(t, eventually(func() bool { return first.logs.Count("The source answers again") == 1 }), first.logs)
	orphan := follow(t, agentOptions{node: prefers(first, fresh), servers: []string{first.address(), fresh.address()}})
	orphan.waitEquals(t, c)
	orphan.waitFollows(t, first)
	stale.stop()
	c.upsert(web(3))
	orphan.waitEquals(t, c)
	orphan.waitFollows(t, fresh)
	require.Equal(t, 1, first.logs.Count("level=WARN", "The source may have missed changes", "this relay follows no server"), first.logs)
}

// upstream returns the address of the server that a relay follows.
func (s *server) upstream(t *testing.T) string {
	t.Helper()
	families, err := s.registry.Gather()
	require.NoError(t, err)
	for _, f := range families {
		if f.GetName() == "slicecast_upstream_server_info" {
			return f.GetMetric()[0].GetLabel()[0].GetValue()
		}
	}
	return ""
}

// prefers returns the name of a node that prefers one server to another.
func prefers(one, other *server) string {
	for i := 0; ; i++ {
		if node := fmt.Sprint("node-", i); preferred(node, one, other) == one.address() {
			return node
		}
	}
}

// preferred returns the address of the server that a node prefers to the other one.
func preferred(node string, one, other *server) string {
	w := &cache.Writer{Cache: client.NewCache()}
	w.SetServers([]client.Server{{Address: one.address()}, {Address: other.address()}})
	choice := discovery.New(discovery.Options{NodeName: node, Cache: w.Cache})
	if first, ok := choice.Preferred(client.Server{Address: other.address()}); ok {
		return first.Address
	}
	return other.address()
}

// TestAPIServerOutOfReach checks two servers that watch a real API server, each by a proxy of its
// own. When one proxy refuses connections, the nodes of its server get the changes from the other.
func TestAPIServerOutOfReach(t *testing.T) {
	hurry(t, time.Hour)
	cp := controlplane.Start(t, controlplane.Options{})
	namespace := cp.Namespace(t)
	create := func(endpoints int) {
		t.Helper()
		s := &discoveryv1.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Name: fmt.Sprint("web-", endpoints), Labels: map[string]string{discoveryv1.LabelServiceName: "web"}},
			AddressType: discoveryv1.AddressTypeIPv4,
		}
		for i := range endpoints {
			s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{fmt.Sprintf("10.0.%d.%d", endpoints, i+1)}})
		}
		_, err := cp.Client().DiscoveryV1().EndpointSlices(namespace).Create(t.Context(), s, metav1.CreateOptions{})
		require.NoError(t, err)
	}
	create(1)
	var proxies []*proxytest.Proxy
	var servers []*server
	for range 2 {
		p := proxytest.New(t, strings.TrimPrefix(cp.URL(), "https://"))
		config := rest.CopyConfig(cp.AdminConfig())
		config.Host = "https://" + p.Address()
		source, err := kube.New(kube.Options{Config: config, Log: slog.New(slog.DiscardHandler), Metrics: prometheus.NewRegistry()})
		require.NoError(t, err)
		proxies, servers = append(proxies, p), append(servers, serve(t, source))
	}
	key := model.ServiceKey{Namespace: namespace, Name: "web"}
	waitSlices := func(a *agent, want int) {
		t.Helper()
		require.True(t, eventually(func() bool { _, held := a.cache.Service(key); return len(held) == want }))
	}
	a := follow(t, agentOptions{node: nodes[0], servers: []string{servers[0].address(), servers[1].address()}})
	waitSlices(a, 1)
	require.True(t, eventually(a.client.InSync))
	// It is the server that was ready first, and need not be the preferred one.
	cut, other := 0, 1
	if a.client.Connection().Server.Address == servers[1].address() {
		cut, other = 1, 0
	}
	proxies[cut].Lead(proxytest.Nowhere)
	proxies[cut].Cut()
	create(2)
	waitSlices(a, 2)
	a.waitFollows(t, servers[other])
}
