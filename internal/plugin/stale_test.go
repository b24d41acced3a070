// These tests prove that servers that may lack changes are not taken for servers whose nodes have
// everything: those that lost their API server, those whose watch hangs, and relays behind them.
package plugin

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/slicecast/slicecast/internal/plugin/fleet"
	"github.com/slicecast/slicecast/internal/show"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// answerOf returns the answer of a server with a status, which it completes.
func answerOf(name string, s *pb.GetStatusResponse, clients ...*pb.AgentStatus) fleet.Answer[agents] {
	now := time.Now()
	s.Time, s.StartTime = timestamppb.New(now), timestamppb.New(now.Add(-time.Hour))
	if s.Source == nil {
		s.Source = &pb.SourceStatus{}
	}
	s.Source.Synced = true
	server := &fleet.Server{NamespacedName: types.NamespacedName{Namespace: "servers", Name: name}, Relay: s.Upstream != nil}
	return fleet.Answer[agents]{Server: server, Value: agents{status: s, clients: clients}}
}

// publishedAt returns a change that all of two nodes had at once.
func publishedAt(age time.Duration, slices uint64) *pb.Convergence {
	return &pb.Convergence{
		Shard: 3, Sequence: slices, PublishTime: timestamppb.New(time.Now().Add(-age)), Nodes: 2,
		TimeToHalf: durationpb.New(time.Millisecond), TimeToMost: durationpb.New(time.Millisecond), TimeToAll: durationpb.New(time.Millisecond),
		Services: []*pb.ServiceName{{Namespace: "default", Name: "web"}}, ResourceVersions: &pb.ResourceVersions{Slices: slices},
	}
}

func reached(slices uint64) *pb.SourceStatus {
	return &pb.SourceStatus{Kind: "kube", ResourceVersions: &pb.ResourceVersions{Services: 10, Slices: slices}}
}

// printed returns what a report prints for people.
func printed(t *testing.T, r show.Report) string {
	t.Helper()
	text, err := (&show.Options{Output: "table"}).Render(t.Context(), func(context.Context) (show.Report, error) { return r, nil })
	require.NoError(t, err)
	return string(text)
}

// TestUnseenChanges checks that the nodes of a server that has not seen a change are unknown, and
// that the change is complete otherwise.
func TestUnseenChanges(t *testing.T) {
	fresh := answerOf("fresh", &pb.GetStatusResponse{
		Epoch: 1, Nodes: 2, Source: reached(100), Convergences: []*pb.Convergence{publishedAt(time.Minute, 100), publishedAt(2*time.Minute, 90)},
	})
	idle := answerOf("idle", &pb.GetStatusResponse{Epoch: 2, Nodes: 3, Source: reached(100)})
	report := func(answers ...fleet.Answer[agents]) *changesReport {
		all := statuses(answers)
		r := &changesReport{changes: mergeChanges(all)}
		for _, a := range all {
			r.servers = append(r.servers, server{Namespace: a.Server.Namespace, Name: a.Server.Name})
		}
		return r
	}
	r := report(fresh, idle)
	require.Equal(t, fine, r.code())
	require.Zero(t, r.changes[0].Unknown)
	require.NotNil(t, r.changes[0].AllSeconds)
	require.NotContains(t, printed(t, r), "not seen")

	hangs := answerOf("hangs", &pb.GetStatusResponse{Epoch: 3, Nodes: 7, Source: reached(95)})
	r = report(fresh, idle, hangs)
	require.Equal(t, wrong, r.code())
	require.Equal(t, []string{"servers/hangs"}, r.changes[0].UnseenBy)
	require.EqualValues(t, 7, r.changes[0].Unknown)
	require.EqualValues(t, 2, r.changes[0].Nodes)
	require.Nil(t, r.changes[0].HalfSeconds, "nobody knows how long the seven nodes take")
	require.Nil(t, r.changes[0].AllSeconds)
	require.Empty(t, r.changes[1].UnseenBy, "it has seen the earlier change")
	require.NotNil(t, r.changes[1].AllSeconds)
	require.Regexp(t, `default/web +2 +0 +7 +- +- +- `, printed(t, r))
	require.Regexp(t, `whose nodes may lack them: 1\nSERVER +NODES +OLDEST CHANGE\nservers/hangs +7 +1m0s`, printed(t, r))

	// The state went back in time after the change: no server has what it published.
	restored := answerOf("restored", &pb.GetStatusResponse{Epoch: 4, Source: reached(50), Convergences: []*pb.Convergence{publishedAt(time.Minute, 100)}})
	r = report(restored, answerOf("too", &pb.GetStatusResponse{Epoch: 5, Nodes: 1, Source: reached(50)}))
	require.Zero(t, r.changes[0].Unknown)
	// A relay's nodes are those of the server that feeds it.
	relay := answerOf("relay", &pb.GetStatusResponse{Epoch: 6, Nodes: 1, Source: reached(95), Upstream: &pb.UpstreamStatus{Connected: true, Path: []uint64{1}}})
	require.Zero(t, report(fresh, relay).changes[0].Unknown)
	// A file has no resource versions.
	require.Zero(t, report(fresh, answerOf("file", &pb.GetStatusResponse{Epoch: 7, Nodes: 1})).changes[0].Unknown)
}

func TestStaleServers(t *testing.T) {
	programmed := func(node string) *pb.AgentStatus {
		return &pb.AgentStatus{NodeName: node, Kind: pb.ClientKind_CLIENT_KIND_AGENT, Synced: true, Programmed: true}
	}
	lost := reached(100)
	lost.StaleSince, lost.LastError = timestamppb.New(time.Now().Add(-30*time.Second)), "Service: connection refused"
	answers := []fleet.Answer[agents]{
		answerOf("fresh", &pb.GetStatusResponse{Epoch: 1, Source: reached(100), Convergences: []*pb.Convergence{publishedAt(time.Minute, 100)}}, programmed("a")),
		answerOf("lost", &pb.GetStatusResponse{Epoch: 2, Source: lost}, programmed("b")),
		answerOf("hangs", &pb.GetStatusResponse{Epoch: 3, Source: reached(99)}, programmed("c")),
		answerOf("relay", &pb.GetStatusResponse{Epoch: 4, Source: reached(100), Upstream: &pb.UpstreamStatus{
			Connected: true, Path: []uint64{2}, Server: &pb.ServerConnection{Name: "lost", StaleSince: lost.GetStaleSince()},
		}}, programmed("d")),
		answerOf("far", &pb.GetStatusResponse{Epoch: 5, Source: reached(100), Upstream: &pb.UpstreamStatus{
			Connected: true, Path: []uint64{77}, Server: &pb.ServerConnection{Name: "elsewhere", StaleSince: lost.GetStaleSince()},
		}}, programmed("e")),
	}
	r := statusOf(answers, make(servers, len(answers)))
	require.Equal(t, wrong, r.code())
	states := make(map[string]string)
	for i, row := range r.rows {
		states[answers[i].Server.Name] = row.State
	}
	require.Equal(t, map[string]string{"fresh": "serving", "lost": "stale", "hangs": "stale", "relay": "stale", "far": "stale"}, states)
	require.Len(t, r.problems, 3, "the first relay's problem is that of its server")
	require.Equal(t, problem{"servers/lost", "it may lack changes of the last 30s, because its API server does not answer: Service: connection refused"}, r.problems[0])
	require.Equal(t, problem{"servers/hangs", "it has not seen a change that servers/fresh published 1m0s ago: its watch may hang"}, r.problems[1])
	require.Equal(t, problem{"servers/far", "it may lack changes of the last 30s, because the server that it follows says the same of itself: elsewhere"}, r.problems[2])
	got := make(map[string]string)
	for _, n := range merge(answers, nil).nodes {
		got[n.Node] = n.State
	}
	require.Equal(t, map[string]string{"a": "programmed", "b": stale, "c": stale, "d": stale, "e": stale}, got)

	// For a moment, a server may be behind another one.
	answers[0].Value.status.Convergences = []*pb.Convergence{publishedAt(slowChange/2, 100)}
	require.Equal(t, "serving", statusOf(answers, make(servers, len(answers))).rows[2].State)
}

// TestStatusNamesRelays checks that status names relays that are clients of a server and cannot be
// asked, as those outside of the cluster.
func TestStatusNamesRelays(t *testing.T) {
	relay := &pb.AgentStatus{Kind: pb.ClientKind_CLIENT_KIND_RELAY, Address: "192.0.2.7:3456", Nodes: 40, Synced: true, Programmed: true}
	r := statusOf([]fleet.Answer[agents]{answerOf("server-1", &pb.GetStatusResponse{Epoch: 1}, relay)}, make(servers, 1))
	require.Equal(t, incomplete, r.code())
	require.Regexp(t, `Relays that were not asked, and whose nodes are not shown: 1.*\n.*\n192.0.2.7:3456 +40 +programmed`, printed(t, r))
}

// gate is an API server whose watches hang, or are refused, on request.
type gate struct {
	url string

	mu sync.Mutex // guards answers
	// answers are given instead of those of the API server, by path.
	answers map[string]func(http.ResponseWriter)
	// hanging is closed when watches bring nothing from then on, and refusing when they end.
	hanging, refusing chan struct{}
}

func newGate(t *testing.T) *gate {
	t.Helper()
	g := &gate{answers: make(map[string]func(http.ResponseWriter)), hanging: make(chan struct{}), refusing: make(chan struct{})}
	admin := plane.AdminConfig()
	transport, err := rest.TransportFor(admin)
	require.NoError(t, err)
	target, err := url.Parse(admin.Host)
	require.NoError(t, err)
	proxy := &httputil.ReverseProxy{
		Transport: transport, FlushInterval: -1, Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(target) },
		ModifyResponse: func(r *http.Response) error {
			if r.Request.URL.Query().Get("watch") == "true" {
				r.Body = &gated{ReadCloser: r.Body, gate: g}
			}
			return nil
		},
	}
	front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		g.mu.Lock()
		answer := g.answers[r.URL.Path]
		g.mu.Unlock()
		if answer != nil {
			answer(w)
			return
		}
		select {
		case <-g.refusing:
			if r.URL.Query().Get("watch") == "true" {
				http.Error(w, "no watches", http.StatusServiceUnavailable)
				return
			}
		default:
		}
		proxy.ServeHTTP(w, r)
	}))
	t.Cleanup(front.Close)
	g.url = front.URL
	return g
}

// answer answers requests for a path from now on.
func (g *gate) answer(path string, with func(http.ResponseWriter)) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.answers[path] = with
}

// gated is the body of a watch.
type gated struct {
	io.ReadCloser
	gate *gate
}

// Read implements io.Reader.
func (b *gated) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	select {
	case <-b.gate.hanging:
		<-b.gate.refusing
		return 0, io.EOF
	default:
		return n, err
	}
}

// TestHangingWatch checks a server whose watch hangs, beside one that sees the changes, and then
// the same server without a watch.
func TestHangingWatch(t *testing.T) {
	e := newEnvironment(t)
	g := newGate(t)
	first := e.server("server-1")
	second := e.serverWith("server-2", plane.Kubeconfig(t, &rest.Config{Host: g.url}), serverArgs()...)
	e.agent("node-a", first)
	e.agent("node-b", second)
	e.eventually(fine, nil, "nodes", "node-a", "node-b")
	close(g.hanging)
	e.service("unseen")
	r := e.eventually(fine, []string{"default/unseen", "whose nodes may lack them: 1"}, "changes")
	require.Regexp(t, `default/unseen +1 +0 +1 `, r.out)
	require.Regexp(t, `\A[^\n]*Servers that have not seen all of the changes below`, r.out)
	require.Regexp(t, `\nslicecast-system/server-2 +1 +`, r.out)
	close(g.refusing)
	r = e.eventually(wrong, []string{"because its API server does not answer"}, "status")
	require.Regexp(t, `slicecast-system/server-1 +server +serving`, r.out)
	require.Regexp(t, `slicecast-system/server-2 +server +stale`, r.out)
	e.eventually(wrong, []string{"node-b  stale", "2 nodes"}, "nodes", "node-a", "node-b")
}
