// This file has a server whose clients and changes a test chooses, and a viewer of its page, who
// reads the event stream as browsers do.
package page

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/slicecast/slicecast/internal/bounded"
	"github.com/slicecast/slicecast/internal/model"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
	"github.com/slicecast/slicecast/server/fanout"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds waits. It is far more than anything takes.
const patience = 30 * time.Second

// began is when everything in a fake server began.
var began = time.Date(2026, 11, 1, 12, 0, 0, 0, time.UTC)

// fake is a server.
type fake struct {
	mu sync.Mutex // guards the fields below
	// asked counts the calls of Agents for all clients.
	asked   int
	agents  []*pb.AgentStatus
	changes []fanout.Convergence
	steps   []fanout.Step
	// lacking are the nodes that lack every Service and change.
	lacking map[string]bool
	service *pb.GetServiceResponse
	// hold, if it is not nil, is where each lookup waits after it has sent to held.
	hold, held chan struct{}
	// open is the number of changes that some node lacks.
	open uint32
}

// client returns an agent that has everything.
func client(node string) *pb.AgentStatus {
	return &pb.AgentStatus{
		NodeName: node, Kind: pb.ClientKind_CLIENT_KIND_AGENT, Address: "192.0.2.1:1234", ClientVersion: "v1.2.3",
		Programmer: "nftables", Since: timestamppb.New(began), Synced: true, Programmed: true, Nodes: 1, SentBytes: 1234,
	}
}

// behind makes an agent lack a change for a time.
func behind(a *pb.AgentStatus, lag time.Duration) *pb.AgentStatus {
	a.LagSequences, a.Lag = 3, durationpb.New(lag)
	return a
}

// newFake returns a server with nodes that have everything.
func newFake(nodes int) *fake {
	f := &fake{}
	for i := range nodes {
		f.agents = append(f.agents, client(fmt.Sprintf("node-%05d", i)))
	}
	return f
}

// set changes the server.
func (f *fake) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

// GetStatus implements Server.
func (f *fake) GetStatus(context.Context, *pb.GetStatusRequest) (*pb.GetStatusResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return &pb.GetStatusResponse{
		ServerName: "slicecast-server-0", ServerVersion: "v1.2.3", StartTime: timestamppb.New(began), Nodes: uint32(len(f.agents)),
		Source:           &pb.SourceStatus{Kind: "kube", Synced: true},
		Size:             &pb.StateSize{Shards: 64, Services: 10000, Slices: 12000, Endpoints: 250000},
		OpenConvergences: f.open,
		Warnings:         []*pb.WarningCount{{Warning: pb.NodeWarning_NODE_WARNING_KUBE_PROXY, Nodes: 2}},
	}, nil
}

// GetService implements Server.
func (f *fake) GetService(_ context.Context, r *pb.GetServiceRequest) (*pb.GetServiceResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.service == nil || f.service.GetService().GetName() != r.GetService().GetName() {
		return nil, status.Errorf(codes.NotFound, "this server has no Service %s/%s", r.GetService().GetNamespace(), r.GetService().GetName())
	}
	return f.service, nil
}

// Agents implements Server.
func (f *fake) Agents(about *model.ServiceKey) (out []*pb.AgentStatus) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if about == nil {
		f.asked++
		return slices.Clone(f.agents)
	}
	for _, a := range f.agents {
		a = proto.CloneOf(a)
		a.Lacks = proto.Bool(f.lacking[a.GetNodeName()])
		out = append(out, a)
	}
	return out
}

// AgentsLacking implements Server.
func (f *fake) AgentsLacking(uint32, uint64) []*pb.AgentStatus {
	if f.hold != nil {
		f.held <- struct{}{}
		<-f.hold
	}
	return slices.DeleteFunc(f.Agents(&model.ServiceKey{}), func(a *pb.AgentStatus) bool { return !a.GetLacks() })
}

// Convergences implements Server.
func (f *fake) Convergences() []fanout.Convergence {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.changes
}

// Steps implements Server.
func (f *fake) Steps(uint32, uint64) []fanout.Step {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.steps
}

// site is the page of a fake server, on a port as that of metrics.
type site struct {
	*Page
	t        *testing.T
	url      string
	draining chan struct{}
	registry *prometheus.Registry
}

// serve serves the page of a server. adapt may change the page before.
func serve(t *testing.T, server Server, guard func(http.Handler) http.Handler, adapt func(*Page)) *site {
	t.Helper()
	return serveWithin(t, bounded.Metrics, server, guard, adapt)
}

// serveWithin serves the page at a port with limits.
func serveWithin(
	t *testing.T, limits bounded.Limits, server Server, guard func(http.Handler) http.Handler, adapt func(*Page),
) *site {
	t.Helper()
	s := &site{t: t, draining: make(chan struct{}), registry: prometheus.NewRegistry()}
	log := slog.New(slog.DiscardHandler)
	s.Page = New(Options{Server: server, Draining: s.draining, Logger: log, Registerer: s.registry})
	s.interval = 5 * time.Millisecond
	if adapt != nil {
		adapt(s.Page)
	}
	mux := http.NewServeMux()
	if guard == nil {
		guard = func(h http.Handler) http.Handler { return h }
	}
	s.Handle(mux, guard)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s.url = "http://" + l.Addr().String()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	port := bounded.NewPort("metrics", limits, log, bounded.NewDisplaced(s.registry, "server"))
	go func() { ended <- port.Serve(ctx, l, nil, mux) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-ended)
	})
	return s
}

// received is an answer. Its body is open until the test ends.
type received struct {
	StatusCode int
	Header     http.Header
	Body       io.ReadCloser
}

// request makes a request on a connection of its own.
func (s *site) request(method, path string, header http.Header) received {
	s.t.Helper()
	r, err := http.NewRequestWithContext(s.t.Context(), method, s.url+path, nil)
	require.NoError(s.t, err)
	for name, values := range header {
		r.Header[name] = values
	}
	response, err := (&http.Transport{DisableKeepAlives: true}).RoundTrip(r)
	require.NoError(s.t, err)
	s.t.Cleanup(func() { _ = response.Body.Close() })
	return received{response.StatusCode, response.Header, response.Body}
}

// get returns the status and the body of a page.
func (s *site) get(path string) (int, string) {
	s.t.Helper()
	r := s.request(http.MethodGet, path, nil)
	body, err := io.ReadAll(r.Body)
	require.NoError(s.t, err)
	return r.StatusCode, string(body)
}

// ask decodes the answer to a question.
func ask[T any](s *site, path string) (out T) {
	s.t.Helper()
	code, body := s.get(path)
	require.Equal(s.t, http.StatusOK, code, body)
	require.NoError(s.t, json.Unmarshal([]byte(body), &out))
	return out
}

// metric returns the value of a metric, of which a label may have a value.
func (s *site) metric(name, label string) float64 {
	s.t.Helper()
	families, err := s.registry.Gather()
	require.NoError(s.t, err)
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == name && (label == "" || m.GetLabel()[0].GetValue() == label) {
				return m.GetGauge().GetValue() + m.GetCounter().GetValue()
			}
		}
	}
	require.Fail(s.t, "there is no such metric", name)
	return 0
}

// viewer reads an event stream.
type viewer struct {
	t    *testing.T
	body io.ReadCloser
	text *bufio.Reader
	// rows are the rows by id.
	rows map[float64][]any
	// events are the names of the events of the latest sample, and server and changes their data.
	events          []string
	server, changes string
}

func (s *site) look() *viewer {
	s.t.Helper()
	r := s.request(http.MethodGet, Path+"events", nil)
	require.Equal(s.t, http.StatusOK, r.StatusCode)
	require.Equal(s.t, "text/event-stream", r.Header.Get("Content-Type"))
	return &viewer{t: s.t, body: r.Body, text: bufio.NewReaderSize(r.Body, 1<<20), rows: make(map[float64][]any)}
}

// next reads the messages of one sample. It returns false if the stream has ended.
func (v *viewer) next() bool {
	v.t.Helper()
	v.events = nil
	for {
		event, err := v.text.ReadString('\n')
		if err != nil {
			return false
		}
		data, err := v.text.ReadString('\n')
		require.NoError(v.t, err)
		end, err := v.text.ReadString('\n')
		require.NoError(v.t, err)
		require.Equal(v.t, "\n", end)
		event = strings.TrimSuffix(strings.TrimPrefix(event, "event: "), "\n")
		data = strings.TrimSuffix(strings.TrimPrefix(data, "data: "), "\n")
		v.events = append(v.events, event)
		require.LessOrEqual(v.t, len(data), rowsPerMessage*400)
		switch event {
		case "reset":
			clear(v.rows)
		case "nodes":
			var rows [][]any
			require.NoError(v.t, json.Unmarshal([]byte(data), &rows))
			for _, r := range rows {
				v.rows[r[0].(float64)] = r
			}
		case "gone":
			var ids []float64
			require.NoError(v.t, json.Unmarshal([]byte(data), &ids))
			for _, id := range ids {
				require.Contains(v.t, v.rows, id)
				delete(v.rows, id)
			}
		case "server":
			v.server = data
		case "changes":
			v.changes = data
		case "complete":
			return true
		default:
			require.Fail(v.t, "unknown event", event)
		}
	}
}

// until reads until something holds after a sample.
func (v *viewer) until(holds func() bool) {
	v.t.Helper()
	for deadline := time.Now().Add(patience); !holds(); {
		require.True(v.t, time.Now().Before(deadline) && v.next(), "it does not come to hold: %v", v.rows)
	}
}

// row returns the row of a node without its id.
func (v *viewer) row(node string) []any {
	for _, r := range v.rows {
		if r[1] == node {
			return r[1:]
		}
	}
	return nil
}
