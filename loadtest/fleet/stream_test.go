// These tests prove that the check of all nodes compares positions per server, follows a truth that
// still moves, and knows which nodes are away. Real clients follow a scripted server.
package fleet

import (
	"context"
	"log/slog"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/wire"
	"github.com/slicecast/slicecast/loadtest/generate"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

const patience = time.Minute

// oneShard is a server with one shard that serves one Service, with the given epoch and sequence.
type oneShard struct {
	pb.UnimplementedDistributionServiceServer
	epoch, sequence uint64

	mu   sync.Mutex
	away chan struct{} // once closed, streams end and new ones are refused; guarded by mu
}

func (o *oneShard) Stream(g pb.DistributionService_StreamServer) error {
	o.mu.Lock()
	away := o.away
	o.mu.Unlock()
	select {
	case <-away:
		return status.Error(codes.Unavailable, "away")
	default:
	}
	if _, err := g.Recv(); err != nil {
		return err
	}
	for _, m := range []*pb.StreamResponse{
		{Message: &pb.StreamResponse_Welcome{Welcome: &pb.Welcome{Epoch: o.epoch, ShardCount: 1}}},
		{Message: &pb.StreamResponse_ShardUpdate{ShardUpdate: wire.UpdateToProto(&model.Update{
			To: o.sequence, Full: true, Services: []*model.Service{web(80)},
		})}},
		{Message: &pb.StreamResponse_InSync{InSync: &pb.InSync{Sequences: []uint64{o.sequence}}}},
	} {
		if err := g.Send(m); err != nil {
			return err
		}
	}
	select {
	case <-away:
	case <-g.Context().Done():
	}
	return status.Error(codes.Unavailable, "away")
}

// setAway makes the server go away or come back.
func (o *oneShard) setAway(away bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if away {
		close(o.away)
	} else {
		o.away = make(chan struct{})
	}
}

func web(port uint16) *model.Service {
	return model.NewService(model.Service{
		Namespace: "default", Name: "web", Type: model.ClusterIP, Ports: []model.ServicePort{{Protocol: model.TCP, Port: port}},
	})
}

// serve starts the server and returns its address.
func (o *oneShard) serve(t *testing.T) string {
	o.setAway(false)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s := grpc.NewServer()
	pb.RegisterDistributionServiceServer(s, o)
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	t.Cleanup(func() {
		s.Stop()
		require.NoError(t, <-served)
	})
	return l.Addr().String()
}

// connected returns a fleet of nodes that are in sync.
func connected(t *testing.T, nodes int, servers ...string) *Fleet {
	members := make([]*Member, nodes)
	for i := range members {
		members[i] = &Member{Index: i, Name: generate.NodeName(i)}
	}
	f, err := New(Options{
		Servers: servers, Members: members, Logger: slog.New(slog.DiscardHandler),
		Credentials: func(string) (credentials.TransportCredentials, error) { return insecure.NewCredentials(), nil },
	})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		f.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-ended
	})
	require.Eventually(t, func() bool { return f.Sync().left.Load() == 0 }, patience, time.Millisecond)
	return f
}

// TestCheckWithSeveralServers compares nodes of two servers with one reference. The positions of
// the two servers are not comparable.
func TestCheckWithSeveralServers(t *testing.T) {
	first, second := (&oneShard{epoch: 1, sequence: 1}).serve(t), (&oneShard{epoch: 2, sequence: 9}).serve(t)
	f := connected(t, 40, first, second) // all on the same server has a probability of 2⁻³⁹
	var on [2]int
	for _, m := range f.Members {
		for i, server := range []string{first, second} {
			if f.On(m, server) {
				on[i]++
			}
		}
	}
	require.Positive(t, on[0])
	require.Positive(t, on[1])
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var running sync.WaitGroup
	reference, err := f.StartReference(ctx, &running)
	require.NoError(t, err)
	require.NoError(t, f.Check(ctx, reference))
	cancel()
	running.Wait()
}

// TestCheckWhileTheStateMoves uses truths that change until they match the nodes, or never match.
func TestCheckWhileTheStateMoves(t *testing.T) {
	f := connected(t, 2, (&oneShard{epoch: 1, sequence: 3}).serve(t))
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	right, wrong := TruthOf([]model.Object{web(80)}, 1), TruthOf([]model.Object{web(81)}, 1)
	right.Moving, wrong.Moving = true, true
	asked := 0
	require.NoError(t, f.Check(ctx, func() Truth {
		if asked++; asked == 1 {
			return wrong
		}
		return right
	}))
	require.Greater(t, asked, 1)

	// A difference at the same position is an error at once. If the positions are unknown, it is an
	// error at the end.
	known := wrong
	known.Epoch, known.Sequences = 1, []uint64{3}
	err := f.Check(ctx, func() Truth { return known })
	require.ErrorIs(t, err, ErrDiverged)
	require.ErrorContains(t, err, "shard 0 at sequence 3")
	require.NoError(t, ctx.Err())
	short, end := context.WithTimeout(ctx, 2*retryCheck)
	defer end()
	err = f.Check(short, func() Truth { return wrong })
	require.ErrorIs(t, err, ErrDiverged)
	require.ErrorContains(t, err, "Service default/web is")
	still := wrong
	still.Moving = false
	require.ErrorIs(t, f.Check(ctx, func() Truth { return still }), ErrDiverged)
}

// TestHolding uses a truth that matches the nodes only on the second call.
func TestHolding(t *testing.T) {
	f := connected(t, 2, (&oneShard{epoch: 1, sequence: 3}).serve(t))
	truth := TruthOf([]model.Object{web(81)}, 1)
	holding := f.Holding(func() Truth { return truth })
	require.Empty(t, holding(f.Members))
	truth = TruthOf([]model.Object{web(80)}, 1)
	require.Equal(t, f.Members, holding(f.Members))
	truth = TruthOf([]model.Object{web(82)}, 1)
	require.Equal(t, f.Members, holding(f.Members), "one match is enough")
	require.Empty(t, f.Holding(func() Truth { return truth })(f.Members))
}

func TestNodesThatAreAway(t *testing.T) {
	server := &oneShard{epoch: 1, sequence: 1}
	address := server.serve(t)
	f := connected(t, 3, address)
	up := func() (n int) {
		for _, m := range f.Members {
			if f.Up(m) {
				n++
			}
		}
		return n
	}
	require.Equal(t, 3, up())
	require.NoError(t, f.Stay(t.Context(), f.Up))
	require.Zero(t, f.Reconnects())

	server.setAway(true)
	require.Eventually(t, func() bool { return up() == 0 }, patience, time.Millisecond)
	ctx, cancel := context.WithTimeout(t.Context(), 2*retryCheck)
	defer cancel()
	err := f.Stay(ctx, f.Up)
	require.ErrorIs(t, err, ErrDiverged)
	require.ErrorContains(t, err, "3 nodes, one of them node-00000, are not connected any more")

	server.setAway(false)
	ctx, cancel = context.WithTimeout(t.Context(), patience)
	defer cancel()
	require.NoError(t, f.Stay(ctx, f.Up))
	require.EqualValues(t, 3, f.Reconnects())

	// A node in sync that connects moves to another server. It has not lost its stream.
	n := f.nodes[0]
	conn, err := n.dial(t.Context(), address)
	require.NoError(t, err)
	require.NoError(t, conn.Close())
	n.Streams.Add(1)
	require.EqualValues(t, 3, f.Reconnects())
}
