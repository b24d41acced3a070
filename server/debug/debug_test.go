// These tests prove what the debug service reports about agents, shards, Services, convergence and
// relays, for real streams of a real hub.
package debug

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
	"github.com/slicecast/slicecast/internal/store"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
	"github.com/slicecast/slicecast/server/fanout"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	patience = 30 * time.Second
	tick     = 2 * time.Millisecond
)

// fixture is a server with a hub that publishes, and a connection to it.
type fixture struct {
	pb.DebugServiceClient
	t     *testing.T
	hub   *fanout.Hub
	store *store.Store
	conn  *grpc.ClientConn
}

func start(t *testing.T, o fanout.Options) *fixture {
	t.Helper()
	s, err := store.New(store.Options{Shards: 4})
	require.NoError(t, err)
	o.Store, o.ServerName, o.ServerVersion, o.Logger = s, "server-1", "v1.2.3", slog.New(slog.DiscardHandler)
	o.DrainWindow = time.Millisecond
	o.Authorize = func(context.Context, pb.ClientKind, string) (string, time.Time, error) { return "", time.Time{}, nil }
	f := &fixture{t: t, store: s, hub: fanout.New(o)}
	server := grpc.NewServer(fanout.ServerOption())
	pb.RegisterDistributionServiceServer(server, f.hub)
	pb.RegisterDebugServiceServer(server, New(Options{Hub: f.hub, Store: s, Source: "kube"}))
	l := bufconn.Listen(1 << 16)
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	ctx, cancel := context.WithCancel(context.Background())
	ran := make(chan struct{})
	go func() {
		f.hub.Run(ctx)
		close(ran)
	}()
	f.conn, err = grpc.NewClient("passthrough:bufconn", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return l.DialContext(ctx) }))
	require.NoError(t, err)
	f.DebugServiceClient = pb.NewDebugServiceClient(f.conn)
	t.Cleanup(func() {
		require.NoError(t, f.conn.Close())
		server.Stop()
		require.NoError(t, <-served)
		cancel()
		<-ran
	})
	return f
}

// fill adds Services with a slice each to the store, with resource version 10 as kube would have
// set it.
func (f *fixture) fill(services int) {
	for i := range services {
		s := model.Service{Namespace: "default", Name: fmt.Sprint("service-", i), Type: model.ClusterIP}
		f.store.Upsert(model.NewService(s), 10)
		f.put(i, 3)
	}
	f.store.Synced()
	require.Eventually(f.t, func() bool { return f.store.Reached().Services == 10 }, patience, tick)
}

// put adds the slice of a Service to the store, with this many endpoints.
func (f *fixture) put(service, endpoints int) {
	slice := modeltest.WebSlice(endpoints)
	slice.Name, slice.Service = fmt.Sprint("slice-", service), fmt.Sprint("service-", service)
	f.store.Upsert(model.NewSlice(slice), 11)
}

// change adds the slice of a Service, waits until it is published, and returns its position.
func (f *fixture) change(service, endpoints int) *pb.ShardPosition {
	f.t.Helper()
	key := model.ServiceKey{Namespace: "default", Name: fmt.Sprint("service-", service)}
	shard := key.Shard(f.store.Shards())
	before := f.store.Snapshot(shard).Sequence()
	f.put(service, endpoints)
	require.Eventually(f.t, func() bool { return f.store.Snapshot(shard).Sequence() > before }, patience, tick)
	return &pb.ShardPosition{Shard: shard, Sequence: before + 1}
}

func (f *fixture) status() *pb.GetStatusResponse {
	f.t.Helper()
	s, err := f.GetStatus(f.t.Context(), &pb.GetStatusRequest{})
	require.NoError(f.t, err)
	return s
}

func (f *fixture) agents(r *pb.ListAgentsRequest) []*pb.AgentStatus {
	f.t.Helper()
	stream, err := f.ListAgents(f.t.Context(), r)
	require.NoError(f.t, err)
	var out []*pb.AgentStatus
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return out
		}
		require.NoError(f.t, err)
		out = append(out, m.GetAgent())
	}
}

// names lists clients by Node, or by kind if they have none.
func (f *fixture) names(r *pb.ListAgentsRequest) []string {
	f.t.Helper()
	out := []string{}
	for _, a := range f.agents(r) {
		if a.GetNodeName() == "" {
			out = append(out, a.GetKind().String())
			continue
		}
		out = append(out, a.GetNodeName())
	}
	return out
}

// watcher is the client's side of a stream.
type watcher struct {
	pb.DistributionService_StreamClient
	t      *testing.T
	inSync *pb.InSync
}

// connect opens a stream and reads it until it is in sync.
func (f *fixture) connect(kind pb.ClientKind, node string) *watcher {
	f.t.Helper()
	g, err := pb.NewDistributionServiceClient(f.conn).Stream(f.t.Context())
	require.NoError(f.t, err)
	c := &watcher{DistributionService_StreamClient: g, t: f.t}
	c.send(&pb.StreamRequest{Message: &pb.StreamRequest_Hello{Hello: &pb.Hello{
		Kind: kind, NodeName: node, ClientVersion: "v9", Programmer: "nftables",
	}}})
	for c.inSync == nil {
		m, err := g.Recv()
		require.NoError(f.t, err)
		c.inSync = m.GetInSync()
	}
	return c
}

func (c *watcher) send(r *pb.StreamRequest) {
	c.t.Helper()
	require.NoError(c.t, c.Send(r))
}

func (c *watcher) ack(positions ...*pb.ShardPosition) {
	c.t.Helper()
	c.send(&pb.StreamRequest{Message: &pb.StreamRequest_Ack{Ack: &pb.Ack{Positions: positions}}})
}

func (c *watcher) nack(resolved bool) {
	c.t.Helper()
	c.send(&pb.StreamRequest{Message: &pb.StreamRequest_Nack{Nack: &pb.Nack{
		Key:    &pb.ObjectKey{Kind: pb.ObjectKind_OBJECT_KIND_SERVICE, Namespace: "default", Name: "service-0"},
		Reason: "no such table", Resolved: resolved,
	}}})
}

// ackAll acknowledges the initial state.
func (c *watcher) ackAll() {
	c.t.Helper()
	var all []*pb.ShardPosition
	for i, sequence := range c.inSync.GetSequences() {
		all = append(all, &pb.ShardPosition{Shard: uint32(i), Sequence: sequence})
	}
	c.ack(all...)
}

const (
	agent    = pb.ClientKind_CLIENT_KIND_AGENT
	observer = pb.ClientKind_CLIENT_KIND_OBSERVER
	relay    = pb.ClientKind_CLIENT_KIND_RELAY
)

func TestStatus(t *testing.T) {
	f := start(t, fanout.Options{Servers: []*pb.Server{{Address: "10.0.0.1:8472"}, {Address: "10.0.0.2:8472"}}})
	s := f.status()
	require.Equal(t, "server-1", s.GetServerName())
	require.Equal(t, "v1.2.3", s.GetServerVersion())
	require.Equal(t, f.store.Epoch(), s.GetEpoch())
	require.Equal(t, "kube", s.GetSource().GetKind())
	require.False(t, s.GetSource().GetSynced())
	require.Nil(t, s.GetSource().GetResourceVersions())
	require.False(t, s.GetDraining())
	require.WithinRange(t, s.GetTime().AsTime(), s.GetStartTime().AsTime(), time.Now())
	require.Equal(t, []string{"10.0.0.1:8472", "10.0.0.2:8472"}, []string{s.GetServers()[0].GetAddress(), s.GetServers()[1].GetAddress()})
	require.Empty(t, s.GetStreams())
	require.Nil(t, s.GetUpstream())

	f.fill(10)
	f.connect(agent, "a")
	f.connect(agent, "b")
	f.connect(observer, "")
	s = f.status()
	require.True(t, s.GetSource().GetSynced())
	require.Equal(t, uint64(11), s.GetSource().GetResourceVersions().GetSlices())
	require.Equal(t, []uint32{4, 10, 10, 30},
		[]uint32{s.GetSize().GetShards(), s.GetSize().GetServices(), s.GetSize().GetSlices(), s.GetSize().GetEndpoints()})
	require.Len(t, s.GetStreams(), 2)
	require.Equal(t, agent, s.GetStreams()[0].GetKind())
	require.Equal(t, uint32(2), s.GetStreams()[0].GetCount())
	require.Equal(t, uint32(1), s.GetStreams()[1].GetCount())
	require.Equal(t, uint32(2), s.GetNodes())

	f.change(0, 5)
	require.Equal(t, uint32(32), f.status().GetSize().GetEndpoints())
	f.hub.Drain()
	require.True(t, f.status().GetDraining())
}

// TestStaleSource checks that a source that may have missed changes is in the status.
func TestStaleSource(t *testing.T) {
	f := start(t, fanout.Options{})
	since := time.Time{}
	s := New(Options{Hub: f.hub, Store: f.store, Stale: func() (time.Time, string) { return since, "Service: refused" }})
	got, err := s.GetStatus(t.Context(), nil)
	require.NoError(t, err)
	require.Nil(t, got.GetSource().GetStaleSince())
	require.Empty(t, got.GetSource().GetLastError())
	since = time.Now().Add(-time.Minute)
	got, err = s.GetStatus(t.Context(), nil)
	require.NoError(t, err)
	require.True(t, since.Equal(got.GetSource().GetStaleSince().AsTime()))
	require.Equal(t, "Service: refused", got.GetSource().GetLastError())
	require.Nil(t, got.GetSource().GetLastEventTime())
	last := time.Time{}
	s.LastEvent = func() time.Time { return last }
	got, err = s.GetStatus(t.Context(), nil)
	require.NoError(t, err)
	require.Nil(t, got.GetSource().GetLastEventTime(), "nothing has come yet")
	last = time.Now()
	got, err = s.GetStatus(t.Context(), nil)
	require.NoError(t, err)
	require.True(t, last.Equal(got.GetSource().GetLastEventTime().AsTime()))
}

func TestConvergences(t *testing.T) {
	f := start(t, fanout.Options{})
	f.fill(4)
	a, b := f.connect(agent, "a"), f.connect(agent, "b")
	a.ackAll()
	b.ackAll()
	first := f.change(0, 1)
	a.ack(first)
	half := func() *pb.Convergence { return f.status().GetOldestOpenConvergence() }
	// The publish before may still be open for a moment, if the nodes had joined when it was
	// counted.
	require.Eventually(t, func() bool {
		return half().GetSequence() == first.GetSequence() && half().GetLacking() == 1
	}, patience, tick)
	require.Equal(t, first.GetShard(), half().GetShard())
	require.Equal(t, uint32(2), half().GetNodes())
	require.Positive(t, half().GetTimeToHalf().AsDuration())
	require.Nil(t, half().GetTimeToMost())
	require.Nil(t, half().GetTimeToAll())
	require.Len(t, half().GetLast(), 2)
	require.Equal(t, "b", half().GetLast()[0].GetNodeName(), "it lacks it")
	require.Nil(t, half().GetLast()[0].GetTime())
	require.Equal(t, "a", half().GetLast()[1].GetNodeName())

	b.ack(first)
	require.Eventually(t, func() bool { return f.status().GetOpenConvergences() == 0 }, patience, tick)
	s := f.status()
	require.Len(t, s.GetConvergences(), 1)
	require.Nil(t, s.GetOldestOpenConvergence())
	done := s.GetConvergences()[0]
	require.Zero(t, done.GetLacking())
	require.Equal(t, "service-0", done.GetServices()[0].GetName())
	require.Len(t, done.GetServices(), 1)
	require.False(t, done.GetMoreServices())
	require.Equal(t, uint64(11), done.GetResourceVersions().GetSlices())
	require.Positive(t, done.GetTimeToAll().AsDuration())
	require.Len(t, done.GetLast(), 2)
	require.Equal(t, done.GetTimeToAll().AsDuration(), done.GetLast()[0].GetTime().AsDuration())

	for i := range maxConvergences + 3 {
		first = f.change(0, i)
		a.ack(first)
		if i == 0 {
			continue
		}
		b.ack(first)
	}
	require.Eventually(t, func() bool { return f.status().GetOpenConvergences() == 0 }, patience, tick)
	require.Len(t, f.status().GetConvergences(), maxConvergences)
	require.Equal(t, first.GetSequence(), f.status().GetConvergences()[0].GetSequence(), "newest first")
}

func TestAgents(t *testing.T) {
	f := start(t, fanout.Options{})
	f.fill(8)
	a, b := f.connect(agent, "a"), f.connect(agent, "b")
	f.connect(observer, "")
	require.Equal(t, []string{observer.String(), "a", "b"}, f.names(&pb.ListAgentsRequest{}))
	require.Equal(t, []string{"a", "b"}, f.names(&pb.ListAgentsRequest{OnlyBehind: true}), "they have not said that they have programmed anything")
	a.ackAll()
	b.ackAll()
	require.Eventually(t, func() bool { return len(f.names(&pb.ListAgentsRequest{OnlyBehind: true})) == 0 }, patience, tick)

	position := f.change(0, 4)
	a.ack(position)
	web := &pb.ListAgentsRequest{Lacks: &pb.ServiceName{Namespace: "default", Name: "service-0"}}
	require.Eventually(t, func() bool { return len(f.names(web)) == 1 }, patience, tick)
	require.Equal(t, []string{"b"}, f.names(web))
	require.Equal(t, []string{"b"}, f.names(&pb.ListAgentsRequest{OnlyBehind: true}))
	require.Empty(t, f.names(&pb.ListAgentsRequest{Lacks: web.GetLacks(), NodeName: "a"}))
	// A question about the Service filters nothing, and answers in the same listing.
	lacks := make(map[string]bool)
	for _, a := range f.agents(&pb.ListAgentsRequest{About: web.GetLacks()}) {
		require.NotNil(t, a.Lacks)
		lacks[a.GetNodeName()] = a.GetLacks()
	}
	require.Equal(t, map[string]bool{"": false, "a": false, "b": true}, lacks)
	require.Nil(t, f.agents(&pb.ListAgentsRequest{})[0].Lacks)
	both := &pb.ListAgentsRequest{About: web.GetLacks(), Lacks: web.GetLacks()}
	listing, err := f.ListAgents(t.Context(), both)
	require.NoError(t, err)
	_, err = listing.Recv()
	require.Equal(t, codes.InvalidArgument, status.Code(err))
	lacking := f.hub.AgentsLacking(position.GetShard(), position.GetSequence())
	require.Len(t, lacking, 1)
	require.Equal(t, "b", lacking[0].GetNodeName())
	b.nack(false)
	require.Eventually(t, func() bool { return len(f.names(&pb.ListAgentsRequest{OnlyWithErrors: true})) == 1 }, patience, tick)

	got := f.agents(&pb.ListAgentsRequest{NodeName: "b"})
	require.Len(t, got, 1)
	behind := got[0]
	require.Equal(t, agent, behind.GetKind())
	require.Equal(t, "bufconn", behind.GetAddress())
	require.Equal(t, "v9", behind.GetClientVersion())
	require.Equal(t, "nftables", behind.GetProgrammer())
	require.WithinRange(t, behind.GetSince().AsTime(), f.status().GetStartTime().AsTime(), time.Now())
	require.True(t, behind.GetSynced())
	require.True(t, behind.GetProgrammed())
	require.Equal(t, uint32(1), behind.GetNodes())
	require.Equal(t, uint64(1), behind.GetLagSequences())
	require.Positive(t, behind.GetLag().AsDuration())
	require.Positive(t, behind.GetSentBytes())
	require.Len(t, behind.GetErrors(), 1)
	require.Equal(t, "Service default/service-0", behind.GetErrors()[0].GetObject())
	require.Equal(t, "no such table", behind.GetErrors()[0].GetReason())

	b.nack(true)
	b.ack(position)
	require.Eventually(t, func() bool { return len(f.names(web)) == 0 }, patience, tick)
	behind = f.agents(&pb.ListAgentsRequest{NodeName: "b"})[0]
	require.Empty(t, behind.GetErrors())
	require.Equal(t, "no such table", behind.GetLastError().GetReason())
	require.Zero(t, behind.GetLagSequences())
	require.Nil(t, behind.GetLag())
	require.Nil(t, f.agents(&pb.ListAgentsRequest{NodeName: "a"})[0].GetLastError())
}

// TestAgentsThatAreNotInSync checks that a client lacks what it was not sent yet.
func TestAgentsThatAreNotInSync(t *testing.T) {
	f := start(t, fanout.Options{MaxBehindWait: patience})
	f.fill(1)
	g, err := pb.NewDistributionServiceClient(f.conn).Stream(t.Context())
	require.NoError(t, err)
	// The client has seen newer state than this server, which therefore lets it wait.
	require.NoError(t, g.Send(&pb.StreamRequest{Message: &pb.StreamRequest_Hello{Hello: &pb.Hello{
		Kind: agent, NodeName: "a", Sequences: []uint64{1}, Digest: modeltest.Digests(1), ResourceVersions: &pb.ResourceVersions{Slices: 1000},
	}}}))
	lacks := &pb.ListAgentsRequest{Lacks: &pb.ServiceName{Namespace: "default", Name: "service-0"}, OnlyBehind: true}
	require.Eventually(t, func() bool { return len(f.names(lacks)) == 1 }, patience, tick)
	require.False(t, f.agents(lacks)[0].GetSynced())
	require.Zero(t, f.agents(lacks)[0].GetNodes())
}

func TestManyAgents(t *testing.T) {
	f := start(t, fanout.Options{})
	f.fill(1)
	const count = 500
	for i := range count {
		f.connect(agent, fmt.Sprintf("node-%03d", i))
	}
	names := f.names(&pb.ListAgentsRequest{})
	require.Len(t, names, count)
	require.IsIncreasing(t, names)
	// A caller that does not read its answer delays no other.
	stream, err := f.ListAgents(t.Context(), &pb.ListAgentsRequest{})
	require.NoError(t, err)
	require.Len(t, f.names(&pb.ListAgentsRequest{}), count)
	_, err = stream.Recv()
	require.NoError(t, err)
}

func TestShards(t *testing.T) {
	f := start(t, fanout.Options{})
	f.fill(10)
	r, err := f.ListShards(t.Context(), &pb.ListShardsRequest{})
	require.NoError(t, err)
	require.Len(t, r.GetShards(), 4)
	objects := 0
	for i, s := range r.GetShards() {
		snapshot := f.store.Snapshot(uint32(i))
		require.Equal(t, uint32(i), s.GetShard())
		require.Equal(t, snapshot.Sequence(), s.GetSequence())
		digest := snapshot.Digest()
		require.Equal(t, digest[:], s.GetDigest())
		require.Equal(t, snapshot.ResourceVersions().Slices, s.GetResourceVersions().GetSlices())
		objects += int(s.GetObjects())
	}
	require.Equal(t, 20, objects)
}

func TestService(t *testing.T) {
	f := start(t, fanout.Options{})
	f.fill(10)
	position := f.change(3, 2)
	get := func(name string) (*pb.GetServiceResponse, error) {
		return f.GetService(t.Context(), &pb.GetServiceRequest{Service: &pb.ServiceName{Namespace: "default", Name: name}})
	}
	r, err := get("service-3")
	require.NoError(t, err)
	require.Equal(t, position.GetShard(), r.GetShard())
	require.Equal(t, position.GetSequence(), r.GetChangedSequence())
	require.Equal(t, position.GetSequence(), r.GetSequence())
	require.Equal(t, "service-3", r.GetService().GetName())
	require.Len(t, r.GetSlices(), 1)
	require.Len(t, r.GetSlices()[0].GetEndpoints(), 2)

	f.store.Remove(model.Key{Kind: model.KindService, Namespace: "default", Name: "service-3"}, 12)
	require.Eventually(t, func() bool {
		r, err := get("service-3")
		return err == nil && r.GetService() == nil && len(r.GetSlices()) == 1
	}, patience, tick)

	_, err = get("service-99")
	require.Equal(t, codes.NotFound, status.Code(err))
	for _, name := range []string{"", "a/b"} {
		_, err = get(name)
		require.Equal(t, codes.InvalidArgument, status.Code(err))
		stream, err := f.ListAgents(t.Context(), &pb.ListAgentsRequest{Lacks: &pb.ServiceName{Namespace: "default", Name: name}})
		require.NoError(t, err)
		_, err = stream.Recv()
		require.Equal(t, codes.InvalidArgument, status.Code(err))
	}
}

// upstream is the Upstream of a relay.
type upstream struct{}

func (u *upstream) Path() ([]uint64, context.Context)                    { return []uint64{7, 8}, context.Background() }
func (u *upstream) Mark(uint32) model.Position                           { return model.Position{} }
func (u *upstream) Programmed(uint32, model.Position, time.Time, string) {}
func (u *upstream) Nodes(int)                                            {}
func (u *upstream) Nack(*pb.Nack) bool                                   { return true }

func TestRelay(t *testing.T) {
	f := start(t, fanout.Options{Upstream: &upstream{}})
	f.fill(1)
	require.True(t, f.status().GetUpstream().GetConnected())
	require.Equal(t, []uint64{7, 8}, f.status().GetUpstream().GetPath())

	c := f.connect(relay, "")
	c.send(&pb.StreamRequest{Message: &pb.StreamRequest_Ack{Ack: &pb.Ack{Nodes: 70}}})
	require.Eventually(t, func() bool { return f.status().GetNodes() == 70 }, patience, tick)
	got := f.agents(&pb.ListAgentsRequest{})
	require.Len(t, got, 1)
	require.Equal(t, relay, got[0].GetKind())
	require.Equal(t, uint32(70), got[0].GetNodes())
	require.Equal(t, relay, f.status().GetStreams()[0].GetKind())
}
