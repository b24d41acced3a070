// These tests prove what the health ports of the node and of its Services answer, on which
// addresses they listen, and that crowds of idle clients do not keep probes from being answered.
// The sockets and requests are real; what the kernel has programmed is set by the test.
package health

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/client"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/bounded"
	"github.com/slicecast/slicecast/internal/bounded/boundedtest"
	"github.com/slicecast/slicecast/internal/logtest"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/source"
	"github.com/slicecast/slicecast/internal/store"
	"github.com/slicecast/slicecast/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// kernel is a Programming whose answers the test sets.
type kernel struct {
	// mu guards the fields below.
	mu          sync.Mutex
	since, last time.Time // of IPv4
	// since6 and last6 are those of IPv6.
	since6, last6 time.Time
	node          *model.Node
}

func (k *kernel) Families() []model.Family { return []model.Family{model.IPv4, model.IPv6} }

func (k *kernel) Pending(family model.Family) (time.Time, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	since := k.since
	if family == model.IPv6 {
		since = k.since6
	}
	return since, !since.IsZero()
}

func (k *kernel) LastProgrammed(family model.Family) time.Time {
	k.mu.Lock()
	defer k.mu.Unlock()
	if family == model.IPv6 {
		return k.last6
	}
	return k.last
}

func (k *kernel) Node() *model.Node {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.node
}

func (k *kernel) set(since, last time.Time, node *model.Node) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.since, k.last, k.since6, k.last6, k.node = since, last, since, last, node
}

// setIPv6 sets the answers for IPv6 only.
func (k *kernel) setIPv6(since, last time.Time) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.since6, k.last6 = since, last
}

// start runs a Server until the test ends.
func start(t *testing.T, addresses ...string) (*Server, *kernel, *logtest.Buffer) {
	t.Helper()
	k, l := &kernel{last: time.Now(), last6: time.Now(), node: &model.Node{Name: "node1"}}, &logtest.Buffer{}
	s := New(Options{Node: k.Node, Addresses: addresses, Logger: slog.New(slog.NewTextHandler(l, nil))})
	s.retry = 100 * time.Millisecond
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { s.Run(ctx, k) })
	t.Cleanup(func() {
		cancel()
		running.Wait()
	})
	return s, k, l
}

// answered is the answer to a health check.
type answered struct {
	// status is the HTTP status. refused means that nobody listens, and 0 that there was no answer,
	// for example because the listener was just closed.
	status int
	header http.Header
	body   string
}

const refused = -1

func get(t *testing.T, url string) answered {
	t.Helper()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	r, err := client.Get(url)
	if errors.Is(err, unix.ECONNREFUSED) {
		return answered{status: refused}
	}
	if err != nil {
		return answered{}
	}
	defer func() { require.NoError(t, r.Body.Close()) }()
	body, err := io.ReadAll(r.Body)
	require.NoError(t, err)
	return answered{r.StatusCode, r.Header, string(body)}
}

// eventually waits until the answer has this status.
func eventually(t *testing.T, url string, status int) answered {
	t.Helper()
	var a answered
	require.Eventually(t, func() bool {
		a = get(t, url)
		return a.status == status
	}, 30*time.Second, 5*time.Millisecond, url)
	return a
}

// giveAddresses adds addresses to this network namespace.
func giveAddresses(t *testing.T, addresses ...string) {
	t.Helper()
	lo, err := netlink.LinkByName("lo")
	require.NoError(t, err)
	for _, a := range addresses {
		address, err := netlink.ParseAddr(a)
		require.NoError(t, err)
		address.Flags = unix.IFA_F_NODAD
		require.NoError(t, netlink.AddrReplace(lo, address))
		t.Cleanup(func() { require.NoError(t, netlink.AddrDel(lo, address)) })
	}
}

func prefixes(list ...string) []netip.Prefix {
	var out []netip.Prefix
	for _, s := range list {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

var (
	everywhere = view.Node{NodePorts: prefixes("0.0.0.0/0", "::/0")}
	web        = view.HealthCheckID{Service: model.ServiceKey{Namespace: "ns1", Name: "web"}, Family: model.IPv4}
	web6       = view.HealthCheckID{Service: web.Service, Family: model.IPv6}
	api        = view.HealthCheckID{Service: model.ServiceKey{Namespace: "ns1", Name: "api"}, Family: model.IPv4}
)

func TestNodeHealth(t *testing.T) {
	_, k, _ := start(t, "127.0.0.1:10256", "127.0.0.1:10257")
	good := &model.Node{Name: "node1"}
	late, fresh := time.Now().Add(-2*minPending), time.Now()
	last := time.Now().Add(-time.Hour).UTC()
	eventually(t, "http://127.0.0.1:10257/livez", http.StatusOK)
	for name, c := range map[string]struct {
		since, last            time.Time
		node                   *model.Node
		healthz, livez, readyz int
		eligible, healthy      bool
	}{
		"up to date":              {time.Time{}, last, good, 200, 200, 200, true, true},
		"a change waits":          {fresh, last, good, 200, 200, 200, true, true},
		"a change waits too long": {late, last, good, 503, 503, 200, true, false},
		"not programmed yet":      {fresh, time.Time{}, good, 200, 200, 503, true, true},
		"nothing to program yet":  {time.Time{}, time.Time{}, good, 200, 200, 503, true, true},
		"can't be programmed":     {late, time.Time{}, good, 503, 503, 503, true, false},
		"being deleted":           {time.Time{}, last, &model.Node{Deleting: true}, 503, 200, 200, false, true},
		"to be deleted":           {time.Time{}, last, &model.Node{TaintedForDeletion: true}, 503, 200, 200, false, true},
		"gone":                    {time.Time{}, last, nil, 503, 200, 200, false, true},
		"gone and late":           {late, last, nil, 503, 503, 200, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			k.set(c.since, c.last, c.node)
			for path, want := range map[string]int{"/healthz": c.healthz, "/livez": c.livez} {
				begin := time.Now()
				r := get(t, "http://127.0.0.1:10256"+path)
				require.Equal(t, want, r.status, path)
				require.Equal(t, "application/json", r.header.Get("Content-Type"))
				require.Equal(t, "nosniff", r.header.Get("X-Content-Type-Options"))
				var h nodeHealth
				d := json.NewDecoder(strings.NewReader(r.body))
				d.DisallowUnknownFields()
				require.NoError(t, d.Decode(&h))
				require.Equal(t, c.healthy, h.Healthy)
				require.WithinRange(t, h.CurrentTime, begin, time.Now())
				if want == http.StatusOK {
					require.Equal(t, h.CurrentTime, h.LastUpdated)
				} else {
					require.Equal(t, c.last, h.LastUpdated)
				}
				if path == "/livez" {
					require.NotContains(t, r.body, "nodeEligible")
				} else {
					require.Equal(t, c.eligible, *h.NodeEligible)
				}
				both := familyHealth{LastUpdated: c.last, Healthy: c.healthy}
				require.Equal(t, map[string]familyHealth{"IPv4": both, "IPv6": both}, h.Status)
			}
			r := get(t, "http://127.0.0.1:10256/readyz")
			require.Equal(t, c.readyz, r.status)
		})
	}
	r := get(t, "http://127.0.0.1:10256/else")
	require.Equal(t, http.StatusNotFound, r.status)
}

// idle is a source that does nothing: the test writes to the store instead.
type idle struct{}

func (idle) Run(ctx context.Context, _ source.Sink) error {
	<-ctx.Done()
	return nil
}

// TestDeletedNode asserts that load balancers leave a node whose Node is deleted, even if
// nobody has seen it being deleted, and come back when the Node is created again. The kubelet does
// not restart the agent.
func TestDeletedNode(t *testing.T) {
	st, err := store.New(store.Options{})
	require.NoError(t, err)
	local := &client.Local{Source: idle{}, Store: st, Cache: client.NewCache(), NodeName: "node1"}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- local.Run(ctx) }()
	defer func() {
		cancel()
		require.NoError(t, <-done)
	}()
	s, k, _ := start(t)
	answers := func(path string) int {
		w := httptest.NewRecorder()
		(handlers{s, k}).nodeHandler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
		return w.Code
	}
	becomes := func(status int) {
		t.Helper()
		require.Eventually(t, func() bool { return answers("/healthz") == status }, 30*time.Second, 5*time.Millisecond)
		require.Equal(t, http.StatusOK, answers("/livez"))
	}
	s.Node = local.Cache.Node
	becomes(http.StatusServiceUnavailable)
	node := &model.Node{Name: "node1"}
	st.Upsert(node, 0)
	st.Synced()
	becomes(http.StatusOK)
	st.Remove(node.Key(), 0)
	becomes(http.StatusServiceUnavailable)
	st.Upsert(node, 0)
	becomes(http.StatusOK)
}

// TestHealthOfEachFamily asserts that a node is healthy and ready only if both IP families are.
func TestHealthOfEachFamily(t *testing.T) {
	s, k, _ := start(t, "127.0.0.1:10256")
	s.Sync(map[view.HealthCheckID]view.HealthCheck{web: {Port: 31801, LocalEndpoints: 1}},
		view.Node{NodePorts: prefixes("127.0.0.0/8"), LocalhostNodePorts: true})
	late, last := time.Now().Add(-2*minPending), time.Now().Add(-time.Hour).UTC()
	eventually(t, "http://127.0.0.1:31801/", http.StatusOK)
	for name, c := range map[string]struct {
		since, last   time.Time // of IPv6
		livez, readyz int
	}{
		"both":                     {time.Time{}, last, 200, 200},
		"IPv6 waits too long":      {late, last, 503, 200},
		"IPv6 was never":           {time.Now(), time.Time{}, 200, 503},
		"IPv6 can't be":            {late, time.Time{}, 503, 503},
		"IPv6 was programmed last": {time.Time{}, last.Add(time.Minute), 200, 200},
	} {
		t.Run(name, func(t *testing.T) {
			k.set(time.Time{}, last, &model.Node{})
			k.setIPv6(c.since, c.last)
			for _, path := range []string{":10256/livez", ":10256/healthz", ":31801/"} {
				require.Equal(t, c.livez, get(t, "http://127.0.0.1"+path).status, path)
			}
			r := get(t, "http://127.0.0.1:10256/readyz")
			require.Equal(t, c.readyz, r.status)
			if c.readyz != http.StatusOK {
				require.Contains(t, r.body, "IPv6 is not programmed yet")
			}
			require.Equal(t, map[string]familyHealth{
				"IPv4": {LastUpdated: last, Healthy: true}, "IPv6": {LastUpdated: c.last, Healthy: c.livez == http.StatusOK},
			}, (handlers{s, k}).health().Status)
			require.Equal(t, slices.MaxFunc([]time.Time{last, c.last}, time.Time.Compare), (handlers{s, k}).health().LastUpdated)
		})
	}
}

func TestServiceHealth(t *testing.T) {
	giveAddresses(t, "192.168.0.2/32")
	s, k, _ := start(t)
	s.Sync(map[view.HealthCheckID]view.HealthCheck{web: {Port: 31801, LocalEndpoints: 2}, api: {Port: 31802}}, everywhere)
	r := eventually(t, "http://127.0.0.1:31801/any/path", http.StatusOK)
	require.Equal(t, []string{"application/json"}, r.header["Content-Type"])
	require.Equal(t, []string{"nosniff"}, r.header["X-Content-Type-Options"])
	require.Equal(t, []string{"2"}, r.header["X-Load-Balancing-Endpoint-Weight"])
	require.Equal(t, `{
	"service": {
		"namespace": "ns1",
		"name": "web"
	},
	"localEndpoints": 2,
	"serviceProxyHealthy": true
}`, r.body)
	r = eventually(t, "http://127.0.0.1:31802/", http.StatusServiceUnavailable)
	require.Equal(t, "0", r.header.Get("X-Load-Balancing-Endpoint-Weight"))
	require.Contains(t, r.body, `"localEndpoints": 0`)

	k.set(time.Now().Add(-2*minPending), time.Now(), k.Node())
	r = get(t, "http://127.0.0.1:31801/")
	require.Equal(t, http.StatusServiceUnavailable, r.status)
	require.Contains(t, r.body, `"serviceProxyHealthy": false`)
	require.Equal(t, "2", r.header.Get("X-Load-Balancing-Endpoint-Weight"))
	k.set(time.Time{}, time.Now(), nil)
	// A deleted Node does not matter for Services.
	eventually(t, "http://127.0.0.1:31801/", http.StatusOK)

	s.Sync(map[view.HealthCheckID]view.HealthCheck{web: {Port: 31801}, api: {Port: 31802, LocalEndpoints: 1}}, everywhere)
	eventually(t, "http://127.0.0.1:31801/", http.StatusServiceUnavailable)
	eventually(t, "http://127.0.0.1:31802/", http.StatusOK)
	// One Service is removed, and the other one gets its port.
	s.Sync(map[view.HealthCheckID]view.HealthCheck{api: {Port: 31801, LocalEndpoints: 1}}, everywhere)
	r = eventually(t, "http://127.0.0.1:31801/", http.StatusOK)
	require.Contains(t, r.body, `"name": "api"`)
	eventually(t, "http://127.0.0.1:31802/", refused)
	s.Sync(nil, everywhere)
	eventually(t, "http://127.0.0.1:31801/", refused)
}

// TestAddresses asserts that health checks of Services listen where NodePorts are.
func TestAddresses(t *testing.T) {
	giveAddresses(t, "192.168.0.2/32", "192.168.1.2/32", "2001:db8::1/128")
	all := []string{"127.0.0.1", "192.168.0.2", "192.168.1.2", "[::1]", "[2001:db8::1]"}
	s, _, _ := start(t)
	for _, c := range []struct {
		name string
		node view.Node
		on   []string
	}{
		{"everywhere", everywhere, all},
		{"primary", view.Node{NodePorts: prefixes("192.168.0.2/32", "2001:db8::1/128")}, []string{"192.168.0.2", "[2001:db8::1]"}},
		{"one family is not restricted", view.Node{NodePorts: prefixes("192.168.0.0/24", "::/0")}, []string{"192.168.0.2", "[::1]", "[2001:db8::1]"}},
		{"loopback", view.Node{NodePorts: prefixes("127.0.0.0/8"), LocalhostNodePorts: true}, []string{"127.0.0.1"}},
		{"nowhere", view.Node{}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			s.Sync(map[view.HealthCheckID]view.HealthCheck{web: {Port: 31801, LocalEndpoints: 1}, web6: {Port: 31801, LocalEndpoints: 1}}, c.node)
			for _, a := range all {
				want := refused
				for _, on := range c.on {
					if a == on {
						want = http.StatusOK
					}
				}
				eventually(t, "http://"+a+":31801/", want)
			}
		})
	}
	s.Sync(map[view.HealthCheckID]view.HealthCheck{web: {Port: 31801, LocalEndpoints: 1}, web6: {Port: 31801, LocalEndpoints: 1}}, view.Node{NodePorts: prefixes("192.168.5.0/24")})
	eventually(t, "http://192.168.0.2:31801/", refused)
	giveAddresses(t, "192.168.5.2/32")
	eventually(t, "http://192.168.5.2:31801/", http.StatusOK)
}

// TestLoadBalancersAddress asserts that health checks which a load balancer sends to its own
// address are answered as soon as the node has that address, be it by a route. That holds even if
// NodePorts are on other addresses (kubernetes/kubernetes#117621, projectcalico/calico#10748).
func TestLoadBalancersAddress(t *testing.T) {
	giveAddresses(t, "192.168.0.2/32", "2001:db8::1/128")
	s, _, log := start(t)
	vip, vip6 := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8:5::1")
	checks := map[view.HealthCheckID]view.HealthCheck{
		web:  {Port: 31801, LocalEndpoints: 1, Addresses: []netip.Addr{vip}},
		web6: {Port: 31801, LocalEndpoints: 1, Addresses: []netip.Addr{vip6}},
		api:  {Port: 31802, LocalEndpoints: 1},
	}
	s.Sync(maps.Clone(checks), view.Node{NodePorts: prefixes("192.168.0.2/32", "2001:db8::1/128")})
	eventually(t, "http://192.168.0.2:31801/", http.StatusOK)
	for _, a := range []netip.Addr{vip, vip6} {
		route := &netlink.Route{
			Dst: netlink.NewIPNet(a.AsSlice()), Type: unix.RTN_LOCAL, Table: unix.RT_TABLE_LOCAL, LinkIndex: 1, Scope: netlink.SCOPE_HOST,
		}
		require.NoError(t, netlink.RouteAdd(route))
		t.Cleanup(func() { require.NoError(t, netlink.RouteDel(route)) })
		eventually(t, "http://"+netip.AddrPortFrom(a, 31801).String()+"/", http.StatusOK)
		eventually(t, "http://"+netip.AddrPortFrom(a, 31802).String()+"/", refused)
	}
	require.Zero(t, log.Count("level=ERROR"))
	checks[web] = view.HealthCheck{Port: 31801, LocalEndpoints: 1}
	s.Sync(maps.Clone(checks), view.Node{NodePorts: prefixes("192.168.0.2/32", "2001:db8::1/128")})
	eventually(t, "http://192.0.2.1:31801/", refused)
	// With NodePorts on all addresses, there is one listener for all.
	s.Sync(checks, everywhere)
	eventually(t, "http://[2001:db8:5::1]:31801/", http.StatusOK)
}

// TestAddressesOfServices asserts that health checks do not listen on the addresses of Services
// that IPVS has on a device, even if NodePorts are on all addresses of a range that contains them.
func TestAddressesOfServices(t *testing.T) {
	giveAddresses(t, "10.0.0.2/32")
	for i, name := range []string{"slicecast-ipvs0", "kube-ipvs0"} {
		device := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: fmt.Sprint("peer", i)}
		require.NoError(t, netlink.LinkAdd(device))
		t.Cleanup(func() { require.NoError(t, netlink.LinkDel(device)) })
		require.NoError(t, netlink.AddrAdd(device, &netlink.Addr{IPNet: netlink.NewIPNet(net.IPv4(10, 96, 0, byte(1+i)))}))
		require.NoError(t, netlink.LinkSetUp(device))
	}
	s, _, _ := start(t)
	s.Sync(map[view.HealthCheckID]view.HealthCheck{web: {Port: 31801, LocalEndpoints: 1}}, view.Node{NodePorts: prefixes("10.0.0.0/8")})
	eventually(t, "http://10.0.0.2:31801/", http.StatusOK)
	eventually(t, "http://10.96.0.1:31801/", refused)
	eventually(t, "http://10.96.0.2:31801/", refused)
}

// TestFamilies asserts that each family of a Service is counted separately.
func TestFamilies(t *testing.T) {
	giveAddresses(t, "192.168.0.2/32", "2001:db8::1/128")
	s, _, _ := start(t)
	s.Sync(map[view.HealthCheckID]view.HealthCheck{web: {Port: 31801, LocalEndpoints: 2}, web6: {Port: 31801}, api: {Port: 31802, LocalEndpoints: 1}}, everywhere)
	r := eventually(t, "http://192.168.0.2:31801/", http.StatusOK)
	require.Equal(t, "2", r.header.Get("X-Load-Balancing-Endpoint-Weight"))
	r = eventually(t, "http://[2001:db8::1]:31801/", http.StatusServiceUnavailable)
	require.Equal(t, "0", r.header.Get("X-Load-Balancing-Endpoint-Weight"))
	eventually(t, "http://192.168.0.2:31802/", http.StatusOK)
	eventually(t, "http://[2001:db8::1]:31802/", refused)
}

// TestPortsAreBounded asserts that the node's port, and the ports of all Services together, keep
// only few connections of clients that ask for nothing. Probes are answered meanwhile, and a crowd
// at one of the two does not affect the other.
func TestPortsAreBounded(t *testing.T) {
	giveAddresses(t, "192.168.0.2/32")
	s, _, _ := start(t, "127.0.0.1:10256")
	s.Sync(map[view.HealthCheckID]view.HealthCheck{web: {Port: 30001, LocalEndpoints: 1}, api: {Port: 30002, LocalEndpoints: 1}}, everywhere)
	node, services := "http://127.0.0.1:10256/healthz", []string{"http://127.0.0.1:30001", "http://127.0.0.1:30002"}
	for _, url := range append(services, node) {
		eventually(t, url, http.StatusOK)
	}
	crowds := []*boundedtest.Crowd{boundedtest.NewCrowd(t, "127.0.0.1:30001"), boundedtest.NewCrowd(t, "127.0.0.1:30002")}
	from := netip.MustParseAddr("127.1.0.0")
	for i := range 3000 {
		from = from.Next()
		crowds[i%2].Join(from, "")
		if i%300 == 0 {
			require.Equal(t, http.StatusOK, get(t, services[0]).status)
			require.Equal(t, http.StatusOK, get(t, services[1]).status)
			require.LessOrEqual(t, crowds[0].Held()+crowds[1].Held(), bounded.ServiceHealth.Total)
		}
	}
	require.Zero(t, testutil.ToFloat64(s.Displaced.WithLabelValues("health")))
	require.NotZero(t, testutil.ToFloat64(s.Displaced.WithLabelValues("service_health")))

	crowd := boundedtest.NewCrowd(t, "127.0.0.1:10256")
	for i := range 3000 {
		crowd.Join(netip.MustParseAddr("127.0.0.1"), "")
		if i%300 == 0 {
			require.Equal(t, http.StatusOK, get(t, node).status)
			require.LessOrEqual(t, crowd.Held(), bounded.Health.PerAddress)
		}
	}
}

// TestPortsInUse asserts that a port in use is logged once and tried again.
func TestPortsInUse(t *testing.T) {
	other, err := net.Listen("tcp4", "127.0.0.1:10256")
	require.NoError(t, err)
	another, err := net.Listen("tcp4", "127.0.0.1:31801")
	require.NoError(t, err)
	s, _, log := start(t, "127.0.0.1:10256", "127.0.0.1:10257")
	node := view.Node{NodePorts: prefixes("127.0.0.0/8"), LocalhostNodePorts: true}
	s.Sync(map[view.HealthCheckID]view.HealthCheck{web: {Port: 31801, LocalEndpoints: 1}, api: {Port: 31802, LocalEndpoints: 1}}, node)
	eventually(t, "http://127.0.0.1:10257/livez", http.StatusOK)
	eventually(t, "http://127.0.0.1:31802/", http.StatusOK)
	s.Sync(map[view.HealthCheckID]view.HealthCheck{web: {Port: 31801, LocalEndpoints: 1}, api: {Port: 31802}}, node)
	require.Eventually(t, func() bool { return testutil.ToFloat64(s.failures) >= 4 }, 30*time.Second, time.Millisecond)
	require.Equal(t, 2, log.Count("level=ERROR"))
	require.Equal(t, 1, log.Count(`for=ns1/web address=127.0.0.1:31801`))
	require.Equal(t, 1, log.Count(`for="the node" address=127.0.0.1:10256`))
	require.NoError(t, errors.Join(other.Close(), another.Close()))
	eventually(t, "http://127.0.0.1:10256/livez", http.StatusOK)
	eventually(t, "http://127.0.0.1:31801/", http.StatusOK)
	require.Equal(t, 2, log.Count("level=INFO"))
}

// TestLinesAboutPortsInUse asserts that many Services with a port in use do not fill the log.
func TestLinesAboutPortsInUse(t *testing.T) {
	other, err := net.Listen("tcp4", "127.0.0.1:31801")
	require.NoError(t, err)
	s, _, log := start(t)
	checks := map[view.HealthCheckID]view.HealthCheck{}
	for i := range 2 * bounded.LinesOfNamespaceAtOnce {
		checks[view.HealthCheckID{Service: model.ServiceKey{Namespace: "ns1", Name: fmt.Sprint("web", i)}, Family: model.IPv4}] = view.HealthCheck{Port: 31801}
	}
	s.Sync(checks, view.Node{NodePorts: prefixes("127.0.0.0/8"), LocalhostNodePorts: true})
	require.Eventually(t, func() bool { return testutil.ToFloat64(s.failures) >= 2*bounded.LinesOfNamespaceAtOnce }, 30*time.Second, time.Millisecond)
	require.Equal(t, bounded.LinesOfNamespaceAtOnce, log.Count("level=ERROR"))
	require.NoError(t, other.Close())
}

// TestMinSyncPeriodRaisesTheLimit asserts that a node that collects changes for longer than a
// minute is healthy while it does.
func TestMinSyncPeriodRaisesTheLimit(t *testing.T) {
	for _, c := range []struct {
		minSync, waited time.Duration
		healthy         bool
	}{
		{0, 50 * time.Second, true},
		{0, 70 * time.Second, false},
		{20 * time.Second, 50 * time.Second, true},
		{time.Hour, 110 * time.Minute, true},
		{time.Hour, 130 * time.Minute, false},
	} {
		k := &kernel{last: time.Now(), last6: time.Now(), since: time.Now().Add(-c.waited)}
		s := handlers{New(Options{Node: k.Node, MinSyncPeriod: c.minSync}), k}
		require.Equal(t, c.healthy, s.health().Healthy, c)
	}
}
