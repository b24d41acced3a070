// This file runs a hub behind grpc-go on loopback and opens streams as a raw client, which sends
// and receives single messages.
package fanout

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
	"github.com/slicecast/slicecast/internal/store"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds waits for events that take milliseconds on an idle machine; tick is a poll
// interval.
const (
	patience = 30 * time.Second
	tick     = 2 * time.Millisecond
)

// fixture is a hub behind a gRPC server, and a connection to it. Only the fan-out of the hub runs:
// tests call publish and beat themselves.
type fixture struct {
	*Hub
	t      *testing.T
	conn   *grpc.ClientConn
	server *grpc.Server
}

// start serves a store. The hub does not authorize the node "stranger".
func start(t *testing.T, s *store.Store) *fixture { return startWith(t, Options{Store: s}) }

// startWith serves with the test's own options.
func startWith(t *testing.T, o Options) *fixture {
	t.Helper()
	h := New(Options{
		Store: o.Store, Upstream: o.Upstream, Servers: o.Servers, MaxBehindWait: o.MaxBehindWait, ColdBytes: o.ColdBytes,
		Stale:      o.Stale,
		ServerName: "server-1", ServerVersion: "v1", Heartbeat: time.Second, DrainWindow: 10 * time.Millisecond,
		Logger: slog.New(slog.DiscardHandler),
		Authorize: func(_ context.Context, _ pb.ClientKind, node string) (string, time.Time, error) {
			if node == "stranger" {
				return "", time.Time{}, status.Error(codes.PermissionDenied, "who are you?")
			}
			return "", time.Time{}, nil
		},
	})
	server := grpc.NewServer(ServerOption())
	pb.RegisterDistributionServiceServer(server, h)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	ctx, cancel := context.WithCancel(context.Background())
	var fanning sync.WaitGroup
	fanning.Go(func() { h.fan(ctx) })
	conn, err := grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithInitialWindowSize(1<<16), grpc.WithInitialConnWindowSize(1<<16))
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, conn.Close())
		server.Stop()
		require.NoError(t, <-served)
		cancel()
		fanning.Wait()
	})
	return &fixture{h, t, conn, server}
}

// filled returns a synced store of two shards, with n Services of one slice each.
func filled(t testing.TB, n int) *store.Store {
	t.Helper()
	s, err := store.New(store.Options{Shards: 2})
	require.NoError(t, err)
	for i := range n {
		s.Upsert(service(i), 1)
		s.Upsert(slice(i, 3), 2)
	}
	s.Synced()
	s.Publish()
	return s
}

func service(i int) *model.Service {
	return model.NewService(model.Service{Namespace: "default", Name: fmt.Sprint("service-", i), Type: model.ClusterIP})
}

func slice(i, endpoints int) *model.Slice {
	s := modeltest.WebSlice(endpoints)
	s.Name, s.Service = fmt.Sprint("slice-", i), fmt.Sprint("service-", i)
	return model.NewSlice(s)
}

// call is the client's side of one stream.
type call struct {
	pb.DistributionService_StreamClient
	t *testing.T
	// digests answers the server's DigestQuery, and buckets each BucketQuery.
	digests []model.Digest
	buckets func(shard uint32) []model.Digest
}

func (f *fixture) open() *call {
	f.t.Helper()
	// It bounds all that a test does with the stream, not only a wait.
	ctx, cancel := context.WithTimeout(context.Background(), 4*patience)
	f.t.Cleanup(cancel)
	g, err := pb.NewDistributionServiceClient(f.conn).Stream(ctx)
	require.NoError(f.t, err)
	return &call{DistributionService_StreamClient: g, t: f.t}
}

// hello opens a stream and sends a Hello.
func (f *fixture) hello(h *pb.Hello) *call {
	f.t.Helper()
	c := f.open()
	c.send(&pb.StreamRequest{Message: &pb.StreamRequest_Hello{Hello: h}})
	return c
}

// send sends a message. If the server has ended the stream already, the next receive returns its
// status.
func (c *call) send(r *pb.StreamRequest) {
	c.t.Helper()
	if err := c.Send(r); !errors.Is(err, io.EOF) {
		require.NoError(c.t, err)
	}
}

func (c *call) recv() *pb.StreamResponse {
	c.t.Helper()
	r, err := c.Recv()
	require.NoError(c.t, err)
	return r
}

// update receives the next message, which must be a ShardUpdate.
func (c *call) update() *pb.ShardUpdate {
	c.t.Helper()
	r := c.recv()
	require.NotNil(c.t, r.GetShardUpdate(), "got %v", r)
	return r.GetShardUpdate()
}

// inSync receives the initial state: the Welcome, the messages after it, and the InSync.
func (c *call) inSync() (welcome *pb.Welcome, updates []*pb.ShardUpdate, inSync *pb.InSync) {
	c.t.Helper()
	welcome = c.recv().GetWelcome()
	require.NotNil(c.t, welcome)
	for {
		switch m := c.recv().GetMessage().(type) {
		case *pb.StreamResponse_ShardUpdate:
			updates = append(updates, m.ShardUpdate)
		case *pb.StreamResponse_NodeUpdate, *pb.StreamResponse_Servers:
		case *pb.StreamResponse_DigestQuery:
			c.send(&pb.StreamRequest{Message: &pb.StreamRequest_Digests{Digests: &pb.Digests{Digests: model.JoinDigests(c.digests)}}})
		case *pb.StreamResponse_BucketQuery:
			for _, shard := range m.BucketQuery.GetShards() {
				c.send(&pb.StreamRequest{Message: &pb.StreamRequest_Resync{Resync: &pb.Resync{
					Shard: shard, BucketDigests: model.JoinDigests(c.buckets(shard)),
				}}})
			}
		case *pb.StreamResponse_InSync:
			return welcome, updates, m.InSync
		default:
			require.Fail(c.t, "unexpected", "%T", m)
		}
	}
}

// ends receives until the stream ends, and returns its status.
func (c *call) ends() *status.Status {
	c.t.Helper()
	for {
		if _, err := c.Recv(); err != nil {
			return status.Convert(err)
		}
	}
}

// holding returns the Hello of a client that holds the same state as a store.
func holding(s *store.Store) *pb.Hello {
	digest, sequences := s.Digest()
	return &pb.Hello{Epoch: s.Epoch(), Sequences: sequences, Digest: digest[:]}
}

// digestsOf returns the digests of all shards of a store.
func digestsOf(s *store.Store) (digests []model.Digest) {
	for i := range s.Shards() {
		digests = append(digests, s.Snapshot(i).Digest())
	}
	return digests
}
