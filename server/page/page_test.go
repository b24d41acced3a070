// These tests prove what the page's paths answer, that each is guarded and bounded, and that the
// event stream sends the state and then what has changed.
package page

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/time/rate"

	"github.com/slicecast/slicecast/internal/bounded"
	"github.com/slicecast/slicecast/internal/model"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
	"github.com/slicecast/slicecast/server/fanout"
)

func TestEventsHaveWhatChanges(t *testing.T) {
	f := newFake(1200)
	f.agents = append(f.agents, &pb.AgentStatus{Kind: pb.ClientKind_CLIENT_KIND_OBSERVER, Synced: true})
	relay := client("")
	relay.Kind, relay.Nodes = pb.ClientKind_CLIENT_KIND_RELAY, 70
	f.agents = append(f.agents, relay)
	s := serve(t, f, nil, nil)
	v := s.look()
	require.True(t, v.next())
	require.Equal(t, []string{"reset", "nodes", "nodes", "nodes", "server", "changes", "complete"}, v.events)
	require.Len(t, v.rows, 1201, "an observer is no row")
	require.Equal(t, []any{"node-00007", "agent", "programmed", 0.0, 0.0, 0.0, 1.0}, v.row("node-00007"))
	require.Equal(t, []any{"relay 192.0.2.1:1234", "relay", "programmed", 0.0, 0.0, 0.0, 70.0}, v.row("relay 192.0.2.1:1234"))
	require.Contains(t, v.server, `"name":"slicecast-server-0","version":"v1.2.3"`)
	require.Contains(t, v.server, `"clients":1201,"shown":1201,"warnings":["kube_proxy on 2 nodes"]`)
	require.Equal(t, "[]", v.changes)
	require.True(t, v.next())
	require.Equal(t, []string{"complete"}, v.events, "nothing has changed")

	f.set(func() { f.agents[3] = behind(client("node-00003"), graceLag-time.Millisecond) })
	require.True(t, v.next())
	require.True(t, v.next())
	require.Equal(t, []string{"complete"}, v.events, "the ack may be on its way")
	f.set(func() { f.agents[3] = behind(client("node-00003"), time.Minute) })
	v.until(func() bool { return v.row("node-00003")[2] == "behind" })
	require.Equal(t, []string{"nodes", "complete"}, v.events)
	require.InDelta(t, time.Now().Add(-time.Minute).UnixMilli(), v.row("node-00003")[3], float64(patience.Milliseconds()))

	f.set(func() { // a new stream of node 3, and node 5 has gone
		again := client("node-00003")
		again.Address = "192.0.2.1:999"
		again.Errors = []*pb.AgentError{{Object: "Service default/web"}}
		f.agents = append(f.agents[:5:5], f.agents[6:]...)
		f.agents[3] = again
	})
	v.until(func() bool { return len(v.rows) == 1200 })
	require.Equal(t, []string{"nodes", "gone", "server", "complete"}, v.events)
	require.Equal(t, []any{"node-00003", "agent", "programmed", 0.0, 1.0, 0.0, 1.0}, v.row("node-00003"))
	require.Nil(t, v.row("node-00005"))

	second := s.look()
	require.True(t, second.next())
	require.Equal(t, v.rows, second.rows, "ids are the same for everybody")
}

// TestChanges checks what the page has of changes, and that the oldest open one is among them.
func TestChanges(t *testing.T) {
	f := newFake(4)
	for i := range 20 {
		c := fanout.Convergence{
			Shard: 3, Sequence: uint64(100 - i), Published: began, Nodes: 4, Programmed: 4,
			Times: [3]time.Duration{time.Millisecond, 2 * time.Millisecond, 2500 * time.Microsecond},
		}
		c.Changed.Services = []model.ServiceKey{{Namespace: "default", Name: "web"}}
		f.changes = append(f.changes, c)
	}
	open := &f.changes[18]
	open.Programmed, open.Times[2], open.Last = 3, 0, []fanout.NodeTime{{Node: "node-00001"}, {Node: "node-00002", Time: time.Second}}
	f.steps = []fanout.Step{{Time: time.Millisecond, Nodes: 2}, {Time: 2 * time.Millisecond, Nodes: 3}}
	s := serve(t, f, nil, nil)
	v := s.look()
	require.True(t, v.next())
	var changes []changeState
	require.NoError(t, json.Unmarshal([]byte(v.changes), &changes))
	require.Len(t, changes, maxChanges+1)
	require.Equal(t, uint64(100), changes[0].Sequence)
	require.Equal(t, []string{"default/web"}, changes[0].Services)
	require.InEpsilon(t, 2.5, *changes[0].Times[2], 1e-9)
	require.Equal(t, [][2]float64{{1, 2}, {2, 3}}, changes[0].Curve)
	oldest := changes[maxChanges]
	require.Equal(t, uint64(82), oldest.Sequence)
	require.Equal(t, 1, oldest.Lacking)
	require.Nil(t, oldest.Times[2])
	require.Equal(t, "node-00001", oldest.Last[0].Node)
	require.Nil(t, oldest.Last[0].Time)
	require.InEpsilon(t, 1000, *oldest.Last[1].Time, 1e-9)
}

func TestLookups(t *testing.T) {
	f := newFake(3)
	f.agents[1].Errors = []*pb.AgentError{{Object: "Service default/web", Reason: "no such table"}}
	f.agents[1].LastError = f.agents[1].GetErrors()[0]
	f.agents[1].Warnings = []*pb.AgentWarning{{Warning: pb.NodeWarning_NODE_WARNING_KUBE_PROXY, Reason: "a kube-proxy runs"}}
	f.lacking = map[string]bool{"node-00001": true}
	f.changes = []fanout.Convergence{{Shard: 5, Sequence: 9, Nodes: 3, Programmed: 2}}
	f.service = &pb.GetServiceResponse{
		Shard: 5, ChangedSequence: 9,
		Service: &pb.Service{
			Namespace: "default", Name: "web", ClusterIps: []string{"10.1.2.3"}, Type: pb.ServiceType_SERVICE_TYPE_CLUSTER_IP,
			Ports: []*pb.ServicePort{{Name: "http", Port: 80, Protocol: pb.Protocol_PROTOCOL_TCP}},
		},
		Slices: []*pb.Slice{{Endpoints: []*pb.Endpoint{{Ready: true}, {}}}},
	}
	s := serve(t, f, nil, nil)
	code, _ := s.get(Path + "node?id=1")
	require.Equal(t, http.StatusNotFound, code, "nobody has an id before somebody looks")
	v := s.look()
	require.True(t, v.next())
	id := uint64(0)
	for n, r := range v.rows {
		if r[1] == "node-00001" {
			id = uint64(n)
		}
	}
	node := ask[nodeState](s, fmt.Sprint(Path, "node?id=", id))
	require.Equal(t, "node-00001", node.Name)
	require.Equal(t, "nftables", node.Programmer)
	require.Equal(t, "1.23 KB", node.Sent)
	require.Equal(t, "no such table", node.Errors[0].Reason)
	require.Equal(t, node.Errors[0], *node.LastError)
	require.Equal(t, "kube_proxy", node.Warnings[0].About)
	require.False(t, node.More)

	for _, path := range []string{"service?namespace=default&name=web", "change?shard=5&sequence=9"} {
		way := ask[wayState](s, Path+path)
		require.Equal(t, uint32(5), way.Shard)
		require.Equal(t, uint64(9), way.Sequence)
		require.Equal(t, 1, way.Change.Lacking)
		require.Equal(t, uint32(3), way.Nodes)
		require.Equal(t, uint32(1), way.Lacking)
		require.Equal(t, []uint64{id}, way.Lacks)
		if strings.HasPrefix(path, "service") {
			require.Equal(t, serviceState{
				Name: "default/web", Exists: true, Type: "CLUSTER_IP", Addresses: []string{"10.1.2.3"}, Ports: []string{"http 80/TCP"},
				Slices: 1, Endpoints: 2, Ready: 1,
			}, *way.Service)
		}
	}
	require.Nil(t, ask[wayState](s, Path+"change?shard=5&sequence=1").Change, "it is not remembered")
	for path, want := range map[string]int{
		"node?id=99": http.StatusNotFound, "node?id=x": http.StatusBadRequest, "change?shard=5&sequence=x": http.StatusBadRequest,
		"service?namespace=default&name=other": http.StatusNotFound, "other": http.StatusNotFound,
	} {
		code, body := s.get(Path + path)
		require.Equal(t, want, code, body)
	}
}

// TestLookupsAreBounded checks that further questions wait.
func TestLookupsAreBounded(t *testing.T) {
	f := newFake(1)
	f.hold, f.held = make(chan struct{}), make(chan struct{})
	s := serve(t, f, nil, nil)
	answers := make(chan int)
	for range maxLookups + 1 {
		go func() {
			code, _ := s.get(Path + "change?shard=1&sequence=1")
			answers <- code
		}()
	}
	for range maxLookups {
		<-f.held
	}
	code, _ := s.get(Path)
	require.Equal(t, http.StatusOK, code, "the rest of the page does not wait")
	select {
	case <-f.held:
		require.Fail(t, "there are more lookups")
	default:
	}
	f.hold <- struct{}{}
	<-f.held
	close(f.hold)
	for range maxLookups + 1 {
		require.Equal(t, http.StatusOK, <-answers)
	}
}

// unread is an answer that is not read.
type unread struct {
	httptest.ResponseRecorder

	writing, read chan struct{}
}

// Write implements http.ResponseWriter.
func (u *unread) Write(b []byte) (int, error) {
	u.writing <- struct{}{}
	<-u.read
	return len(b), nil
}

// TestUnreadAnswersHoldNoPlace checks that viewers who do not read answers keep nobody from asking.
func TestUnreadAnswersHoldNoPlace(t *testing.T) {
	s := serve(t, newFake(1), nil, nil)
	ask := s.lookup(s.change)
	request := httptest.NewRequest(http.MethodGet, Path+"change?shard=1&sequence=1", nil)
	u := &unread{ResponseRecorder: *httptest.NewRecorder(), writing: make(chan struct{}), read: make(chan struct{})}
	var slow sync.WaitGroup
	for range maxLookups {
		slow.Go(func() { ask(u, request) })
		<-u.writing
	}
	code, body := s.get(Path + "change?shard=1&sequence=1")
	require.Equal(t, http.StatusOK, code, body)
	close(u.read)
	slow.Wait()
}

// TestRateOfLookups checks that questions are refused beyond a rate, and answered again later.
func TestRateOfLookups(t *testing.T) {
	s := serve(t, newFake(1), nil, func(p *Page) { p.rate = rate.NewLimiter(rate.Every(time.Hour), 2) })
	for range 2 {
		code, _ := s.get(Path + "change?shard=1&sequence=1")
		require.Equal(t, http.StatusOK, code)
	}
	r := s.request(http.MethodGet, Path+"change?shard=1&sequence=1", nil)
	require.Equal(t, http.StatusTooManyRequests, r.StatusCode)
	require.Equal(t, "1", r.Header.Get("Retry-After"))
	require.InDelta(t, 1, s.metric("slicecast_server_page_refusals_total", reasonLookups), 0)
	s.rate.SetBurst(1)
	s.rate.SetLimit(rate.Inf)
	code, _ := s.get(Path + "change?shard=1&sequence=1")
	require.Equal(t, http.StatusOK, code)
}

// TestIdsStay checks that nodes keep their ids while the only viewer connects again, that they can
// be asked about meanwhile, and that nothing is kept for longer.
func TestIdsStay(t *testing.T) {
	f := newFake(3)
	s := serve(t, f, nil, func(p *Page) { p.keepSample = patience })
	v := s.look()
	require.True(t, v.next())
	require.NoError(t, v.body.Close())
	nobody := func() bool { return s.metric("slicecast_server_page_viewers", "") == 0 }
	require.Eventually(t, nobody, patience, time.Millisecond)
	for id := range v.rows {
		code, body := s.get(fmt.Sprintf("%snode?id=%v", Path, id))
		require.Equal(t, http.StatusOK, code, body)
	}
	again := s.look()
	require.True(t, again.next())
	require.Equal(t, v.rows, again.rows)
	s.mu.Lock()
	s.keepSample = time.Millisecond
	s.mu.Unlock()
	require.NoError(t, again.body.Close())
	require.Eventually(t, func() bool { return s.rows() == nil }, patience, time.Millisecond)
}

// TestSilentStreamsStayAlive checks that a viewer is sent comments while there is nothing else.
func TestSilentStreamsStayAlive(t *testing.T) {
	s := serve(t, newFake(1), nil, func(p *Page) { p.keepAlive = time.Millisecond })
	first, err := s.sample()
	require.NoError(t, err)
	first.cost = time.Hour // no other sample is taken
	v := s.look()
	require.True(t, v.next())
	for range 3 {
		line, err := v.text.ReadString('\n')
		require.NoError(t, err)
		require.Equal(t, ": keep-alive\n", line)
		line, err = v.text.ReadString('\n')
		require.NoError(t, err)
		require.Equal(t, "\n", line)
	}
}

// TestReadingTheStateIsBounded checks that a sample is reused for longer if taking one took long.
func TestReadingTheStateIsBounded(t *testing.T) {
	s := serve(t, newFake(1), nil, func(p *Page) { p.interval = 0 })
	first, err := s.sample()
	require.NoError(t, err)
	first.cost = time.Hour
	again, err := s.sample()
	require.NoError(t, err)
	require.Same(t, first, again)
	first.cost, first.taken = time.Second, time.Now().Add(-effort*time.Second)
	again, err = s.sample()
	require.NoError(t, err)
	require.NotSame(t, first, again)
}

// TestHostileTexts checks that texts of clients reach the page as data, without characters that
// would rearrange what is around them.
func TestHostileTexts(t *testing.T) {
	f := newFake(1)
	f.agents[0].NodeName = "</script>\r\n\u2028\u202eevent: gone" + strings.Repeat("x", 1000)
	s := serve(t, f, nil, nil)
	v := s.look()
	require.True(t, v.next())
	require.Equal(t, []string{"reset", "nodes", "server", "changes", "complete"}, v.events)
	name := v.rows[1][1].(string)
	require.Equal(t, "</script>    event: gonexxx", strings.TrimRight(name, "x…")+"xxx")
	require.LessOrEqual(t, len(name), maxText+len("…"))
}

// TestEveryPathIsGuarded checks that the guard is asked about each path that exists, and about no
// other, and that nothing but GET is answered.
func TestEveryPathIsGuarded(t *testing.T) {
	var asked []string
	s := serve(t, newFake(1), func(http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			asked = append(asked, r.URL.Path)
			http.Error(w, "no", http.StatusForbidden)
		})
	}, nil)
	paths := []string{Path, Path + "events", Path + "node", Path + "service", Path + "change"}
	files, err := assets.ReadDir("assets")
	require.NoError(t, err)
	for _, f := range files {
		if f.Name() != "index.html" {
			paths = append(paths, Path+f.Name())
		}
	}
	for _, path := range paths {
		code, _ := s.get(path)
		require.Equal(t, http.StatusForbidden, code, path)
		for _, method := range []string{http.MethodPost, http.MethodHead, http.MethodOptions, http.MethodDelete} {
			require.Equal(t, http.StatusMethodNotAllowed, s.request(method, path, nil).StatusCode)
		}
	}
	require.Equal(t, paths, asked)
	for _, path := range []string{Path + "index.html", Path + "other", "/", Path + "events/"} {
		code, _ := s.get(path)
		require.Equal(t, http.StatusNotFound, code, path)
	}
	r := s.request(http.MethodGet, "/page", nil)
	require.Equal(t, http.StatusMovedPermanently, r.StatusCode)
	require.Equal(t, "page/", r.Header.Get("Location"))
	require.Equal(t, paths, asked)
}

func TestHeaders(t *testing.T) {
	s := serve(t, newFake(1), nil, nil)
	files, err := assets.ReadDir("assets")
	require.NoError(t, err)
	for _, f := range files {
		r := s.request(http.MethodGet, Path+strings.TrimSuffix(f.Name(), "index.html"), nil)
		require.Equal(t, http.StatusOK, r.StatusCode)
		require.NotEmpty(t, r.Header.Get("Content-Type"), f.Name())
		require.Equal(t, policy, r.Header.Get("Content-Security-Policy"))
		require.NotContains(t, policy, "unsafe")
		require.Equal(t, "nosniff", r.Header.Get("X-Content-Type-Options"))
		require.Equal(t, "no-store", r.Header.Get("Cache-Control"))
		require.Empty(t, r.Header.Get("Set-Cookie"))
		require.Empty(t, r.Header.Get("Access-Control-Allow-Origin"))
	}
	// A page of another site may link to this one, and nothing else.
	cross := http.Header{"Sec-Fetch-Site": {"cross-site"}}
	require.Equal(t, http.StatusOK, s.request(http.MethodGet, Path, cross).StatusCode)
	for _, path := range []string{"events", "node?id=1", "service?namespace=a&name=b", "change?shard=1&sequence=1"} {
		require.Equal(t, http.StatusForbidden, s.request(http.MethodGet, Path+path, cross).StatusCode)
	}
	require.InDelta(t, 4, s.metric("slicecast_server_page_refusals_total", reasonCrossSite), 0)
}

func TestViewersAreBounded(t *testing.T) {
	f := newFake(10)
	s := serve(t, f, nil, func(p *Page) { p.interval, p.keepSample = time.Hour, time.Millisecond })
	var viewers []*viewer
	for range maxViewers {
		viewers = append(viewers, s.look())
		require.True(t, viewers[len(viewers)-1].next())
	}
	require.Equal(t, 1, f.asked, "all viewers share a sample")
	code, body := s.get(Path + "events")
	require.Equal(t, http.StatusTooManyRequests, code)
	require.Contains(t, body, "too many people look")
	require.InDelta(t, 1, s.metric("slicecast_server_page_refusals_total", reasonViewers), 0)
	require.InDelta(t, maxViewers, s.metric("slicecast_server_page_viewers", ""), 0)
	for _, v := range viewers {
		require.NoError(t, v.body.Close())
	}
	require.Eventually(t, func() bool { return s.metric("slicecast_server_page_viewers", "") == 0 }, patience, time.Millisecond)
	require.Eventually(t, func() bool { return s.rows() == nil }, patience, time.Millisecond, "nothing is kept while nobody looks")
	require.True(t, s.look().next())
	require.Equal(t, 2, f.asked)
}

// TestSlowViewersAreCutOff checks that a viewer who reads nothing is cut off, and holds up nobody.
func TestSlowViewersAreCutOff(t *testing.T) {
	f := newFake(16000)
	for _, a := range f.agents { // so that the kernel's buffers do not hold all of it
		a.NodeName += strings.Repeat("x", 480)
	}
	s := serve(t, f, nil, func(p *Page) { p.writeTimeout = 50 * time.Millisecond })
	slow, err := net.Dial("tcp", strings.TrimPrefix(s.url, "http://"))
	require.NoError(t, err)
	defer slow.Close()
	require.NoError(t, slow.(*net.TCPConn).SetReadBuffer(4096))
	_, err = fmt.Fprintf(slow, "GET %sevents HTTP/1.1\r\nHost: slow\r\n\r\n", Path)
	require.NoError(t, err)
	require.Eventually(t, func() bool { return s.metric("slicecast_server_page_refusals_total", reasonSlow) == 1 }, patience, time.Millisecond)
	require.Eventually(t, func() bool { return s.metric("slicecast_server_page_viewers", "") == 0 }, patience, time.Millisecond)
}

// TestRowsAreBounded checks that clients in trouble come first if there are too many.
func TestRowsAreBounded(t *testing.T) {
	f := newFake(maxRows + 100)
	f.agents[maxRows+50] = behind(client("last"), time.Minute)
	s := serve(t, f, nil, nil)
	v := s.look()
	require.True(t, v.next())
	require.Len(t, v.rows, maxRows)
	require.NotNil(t, v.row("last"))
	require.Contains(t, v.server, fmt.Sprintf(`"clients":%d,"shown":%d`, maxRows+100, maxRows))
}

// TestStreamsEnd checks that a stream ends after its life, so that the viewer has to authenticate
// again, and as soon as the server drains. None is begun then.
func TestStreamsEnd(t *testing.T) {
	s := serve(t, newFake(1), nil, func(p *Page) { p.streamLife = 100 * time.Millisecond })
	v := s.look()
	for v.next() {
	}
	s = serve(t, newFake(1), nil, func(p *Page) { p.interval = time.Hour })
	v = s.look()
	require.True(t, v.next())
	close(s.draining)
	require.False(t, v.next())
	code, body := s.get(Path + "events")
	require.Equal(t, http.StatusServiceUnavailable, code)
	require.Contains(t, body, "look at another one")
}

// TestStreamsOutliveThePortsDeadlines checks that the timeouts for short answers do not end a
// stream.
func TestStreamsOutliveThePortsDeadlines(t *testing.T) {
	limits := bounded.Metrics
	limits.Read, limits.Write = time.Second, time.Second
	s := serveWithin(t, limits, newFake(1), nil, nil)
	v := s.look()
	for begin := time.Now(); time.Since(begin) < 2*limits.Write; {
		require.True(t, v.next())
	}
}
