// These tests prove that an agent's status names its server, its position, and what the kernel
// refuses. A real client follows a real hub, which goes away and is replaced by another; the kernel
// is a fake.
package status

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/slicecast/slicecast/agent/client"
	"github.com/slicecast/slicecast/agent/client/checkpoint"
	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/reconcile"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
	"github.com/slicecast/slicecast/internal/store"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
	"github.com/slicecast/slicecast/server/fanout"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	patience = 30 * time.Second
	tick     = 5 * time.Millisecond
)

// kernel is a programmer that fails on request.
type kernel struct {
	// mu guards the fields below.
	mu     sync.Mutex
	whole  error  // if not nil, nothing can be programmed
	broken string // name of a Service that cannot be programmed
}

func (k *kernel) set(whole error, broken string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.whole, k.broken = whole, broken
}

func (k *kernel) Families() []model.Family { return []model.Family{model.IPv4, model.IPv6} }

func (k *kernel) Replace(_ context.Context, state view.State) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	errs := []error{k.whole}
	for id := range state.Ports {
		if id.Service.Name == k.broken {
			errs = append(errs, &programmer.PortError{ID: id, Err: errors.New("no such set")})
		}
	}
	return errors.Join(errs...)
}

// Apply always fails, so that the reconciler calls Replace, which decides what fails.
func (k *kernel) Apply(context.Context, []view.Change) error { return errors.New("not now") }

func (k *kernel) Cleanup(context.Context) error { return nil }

// node is an agent with its status service.
type node struct {
	pb.AgentDebugServiceClient
	t      *testing.T
	kernel *kernel
}

func startNode(t *testing.T, server string, path string) *node {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	n := &node{t: t, kernel: &kernel{}}
	cache := client.NewCache()
	o := Options{NodeName: "node-1", Version: "v1.2.3", Programmer: "fake", Cache: cache}
	if path != "" {
		o.Checkpoint = checkpoint.Open(checkpoint.Options{Path: path, NodeName: "node-1", Cache: cache, Logger: log})
	}
	o.Client = client.New(client.Options{
		Servers: client.Static(server), NodeName: "node-1", Cache: cache, Logger: log,
		DialOptions: []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())},
	})
	o.Reconciler = reconcile.New(reconcile.Options{
		Cache: cache, View: view.New(view.Options{NodeName: "node-1"}), Programmer: n.kernel, Reporter: o.Client, Logger: log,
	})
	socket := filepath.Join(t.TempDir(), "agent.sock")
	l, err := daemon.ListenSocket(socket)
	require.NoError(t, err)
	s := New(o)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	served := make(chan error, 1)
	running.Go(func() { served <- s.Serve(ctx, l) })
	running.Go(func() { _ = o.Client.Run(ctx) }) // it ends with the context, which is no error
	running.Go(func() { o.Reconciler.Run(ctx) })
	if o.Checkpoint != nil {
		running.Go(func() { o.Checkpoint.Run(ctx) })
	}
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	n.AgentDebugServiceClient = pb.NewAgentDebugServiceClient(conn)
	t.Cleanup(func() {
		require.NoError(t, conn.Close())
		cancel()
		running.Wait()
		require.NoError(t, <-served)
		require.NoFileExists(t, socket)
	})
	return n
}

func (n *node) status() *pb.AgentDebugServiceGetStatusResponse {
	n.t.Helper()
	s, err := n.GetStatus(n.t.Context(), &pb.AgentDebugServiceGetStatusRequest{})
	require.NoError(n.t, err)
	return s
}

// await waits until is returns true for the status, and returns that status.
func (n *node) await(is func(*pb.AgentDebugServiceGetStatusResponse) bool) (s *pb.AgentDebugServiceGetStatusResponse) {
	n.t.Helper()
	require.Eventually(n.t, func() bool {
		s = n.status()
		return is(s)
	}, patience, tick, "%v", s)
	return s
}

// serve serves a store on an address, whose port may be 0, until stop is called. It returns the
// address that it listens on.
func serve(t *testing.T, s *store.Store, address string) (at string, stop func()) {
	t.Helper()
	hub := fanout.New(fanout.Options{
		Store: s, ServerName: "server-1", ServerVersion: "v7", Servers: []*pb.Server{{Address: "127.0.0.1:1"}},
		Authorize: func(context.Context, pb.ClientKind, string) (string, time.Time, error) { return "", time.Time{}, nil }, Logger: slog.New(slog.DiscardHandler),
	})
	l, err := net.Listen("tcp", address)
	require.NoError(t, err)
	server := grpc.NewServer(fanout.ServerOption())
	pb.RegisterDistributionServiceServer(server, hub)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	served := make(chan error, 1)
	running.Go(func() { served <- server.Serve(l) })
	running.Go(func() { hub.Run(ctx) })
	stop = sync.OnceFunc(func() {
		server.Stop()
		cancel()
		running.Wait()
		require.NoError(t, <-served)
	})
	t.Cleanup(stop)
	return l.Addr().String(), stop
}

func filled(t *testing.T) *store.Store {
	t.Helper()
	s, err := store.New(store.Options{Shards: 4})
	require.NoError(t, err)
	s.Upsert(modeltest.Web(), 5)
	s.Upsert(model.NewSlice(modeltest.WebSlice(3)), 6)
	s.Synced()
	return s
}

func TestStatus(t *testing.T) {
	s := filled(t)
	address, stop := serve(t, s, "127.0.0.1:0")
	begin := time.Now()
	n := startNode(t, address, "")
	got := n.await(func(s *pb.AgentDebugServiceGetStatusResponse) bool {
		return s.GetProgrammingTime() != nil && s.GetLagSequences() == 0
	})
	require.Equal(t, "node-1", got.GetNodeName())
	require.Equal(t, "v1.2.3", got.GetVersion())
	require.Equal(t, "fake", got.GetProgrammer())
	require.Empty(t, got.GetSource())
	require.WithinRange(t, got.GetStartTime().AsTime(), begin, time.Now())
	require.Equal(t, "server-1", got.GetServer().GetName())
	require.Equal(t, "v7", got.GetServer().GetVersion())
	require.Equal(t, address, got.GetServer().GetAddress())
	require.WithinRange(t, got.GetServer().GetSince().AsTime(), begin, time.Now())
	require.Nil(t, got.GetStaleSince())
	require.Empty(t, got.GetLastError())
	require.Equal(t, []string{"127.0.0.1:1"}, addresses(got)[:1], "as the server says")
	require.Equal(t, s.Epoch(), got.GetEpoch())
	require.Equal(t, uint64(6), got.GetResourceVersions().GetSlices())
	require.Equal(t, []uint32{4, 1, 1, 3},
		[]uint32{got.GetSize().GetShards(), got.GetSize().GetServices(), got.GetSize().GetSlices(), got.GetSize().GetEndpoints()})
	require.Equal(t, uint32(1), got.GetServicePorts())
	require.Len(t, got.GetShards(), 4)
	for i, shard := range got.GetShards() {
		snapshot := s.Snapshot(uint32(i))
		require.Equal(t, uint32(i), shard.GetShard())
		require.Equal(t, snapshot.Sequence(), shard.GetSequence())
		require.Equal(t, snapshot.Sequence(), shard.GetProgrammedSequence())
		digest := snapshot.Digest()
		require.Equal(t, digest[:], shard.GetDigest())
	}
	require.WithinRange(t, got.GetProgrammingTime().AsTime(), begin, time.Now())
	require.Positive(t, got.GetProgrammingDuration().AsDuration())
	require.Nil(t, got.GetCheckpointTime())

	// One Service fails, while the rest goes on.
	n.kernel.set(nil, "web")
	s.Upsert(model.NewSlice(modeltest.WebSlice(2)), 7)
	got = n.await(func(s *pb.AgentDebugServiceGetStatusResponse) bool { return len(s.GetFailures()) == 1 })
	require.Equal(t, "web", got.GetFailures()[0].GetService().GetName())
	require.Contains(t, got.GetFailures()[0].GetReason(), "no such set")
	require.WithinRange(t, got.GetFailures()[0].GetSince().AsTime(), begin, time.Now())
	require.Empty(t, got.GetProgrammingError())
	n.kernel.set(nil, "")
	n.await(func(s *pb.AgentDebugServiceGetStatusResponse) bool { return len(s.GetFailures()) == 0 })

	// The kernel refuses everything.
	n.kernel.set(errors.New("out of memory"), "")
	s.Upsert(model.NewSlice(modeltest.WebSlice(1)), 8)
	got = n.await(func(s *pb.AgentDebugServiceGetStatusResponse) bool { return s.GetProgrammingError() != "" })
	require.Contains(t, got.GetProgrammingError(), "out of memory")
	require.Equal(t, uint64(1), got.GetLagSequences())
	n.kernel.set(nil, "")
	n.await(func(s *pb.AgentDebugServiceGetStatusResponse) bool {
		return s.GetProgrammingError() == "" && s.GetLagSequences() == 0
	})

	// The server goes away. The agent keeps what it has.
	lost := time.Now()
	stop()
	got = n.await(func(s *pb.AgentDebugServiceGetStatusResponse) bool { return s.GetServer() == nil })
	require.WithinRange(t, got.GetStaleSince().AsTime(), lost, time.Now())
	require.NotEmpty(t, got.GetLastError())
	require.Equal(t, uint32(1), got.GetSize().GetEndpoints())
	require.Equal(t, uint32(1), got.GetServicePorts())
	require.Zero(t, got.GetLagSequences())

	// Another server, which has another epoch, takes its place.
	serve(t, filled(t), address)
	got = n.await(func(s *pb.AgentDebugServiceGetStatusResponse) bool {
		return s.GetServer() != nil && s.GetLagSequences() == 0
	})
	require.NotEqual(t, s.Epoch(), got.GetEpoch())
	require.Nil(t, got.GetStaleSince())
	require.Equal(t, uint32(3), got.GetSize().GetEndpoints())
}

func addresses(s *pb.AgentDebugServiceGetStatusResponse) (out []string) {
	for _, x := range s.GetServers() {
		out = append(out, x.GetAddress())
	}
	return out
}

func TestWithoutServers(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	nowhere := l.Addr().String()
	require.NoError(t, l.Close())
	n := startNode(t, nowhere, filepath.Join(t.TempDir(), "checkpoint"))
	got := n.await(func(s *pb.AgentDebugServiceGetStatusResponse) bool { return s.GetLastError() != "" })
	require.Contains(t, got.GetLastError(), nowhere)
	require.Nil(t, got.GetServer())
	require.Equal(t, []string{nowhere}, addresses(got))
	require.NotNil(t, got.GetStaleSince())
	require.Zero(t, got.GetEpoch())
	require.Empty(t, got.GetShards())
	require.Nil(t, got.GetProgrammingTime())
	require.Nil(t, got.GetCheckpointTime())
	require.False(t, got.GetByCheckpoint())
}
