// The fuzz target proves that any message after the Hello is accepted or refused with a status, and
// that an ended stream leaves nothing behind.
package fanout

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// sink is a transport that accepts everything, and signals when it is sent InSync.
type sink struct {
	ctx    context.Context
	synced chan struct{}
}

func (s *sink) Context() context.Context { return s.ctx }

func (s *sink) Send(frames ...wire.Frame) error {
	for _, f := range frames {
		var r pb.StreamResponse
		if err := proto.Unmarshal(f, &r); err != nil {
			return err
		}
		if r.GetInSync() != nil {
			notify(s.synced)
		}
	}
	return status.FromContextError(s.ctx.Err()).Err()
}

func (s *sink) Taken() uint64 { return 0 }

func (s *sink) TrySend(frames ...wire.Frame) (bool, error) { return true, s.Send(frames...) }

func request(m *pb.StreamRequest) []byte {
	b, err := proto.Marshal(m)
	if err != nil {
		panic(err)
	}
	return b
}

var names atomic.Uint64

// anotherName returns a name that it has not returned before. Each stream of the fuzzer needs an
// identity of its own, because an identity that starts more than about a stream a second waits.
func anotherName() string { return fmt.Sprintf("fuzzed-%d", names.Add(1)) }

// FuzzMessages checks that each message after the Hello is accepted or refused with a status, and
// that nothing of the stream is left after its end.
func FuzzMessages(f *testing.F) {
	key := &pb.ObjectKey{Kind: pb.ObjectKind_OBJECT_KIND_SERVICE, Namespace: "default", Name: "service-1"}
	var all []byte
	for _, m := range []*pb.StreamRequest{
		{Message: &pb.StreamRequest_Ack{Ack: &pb.Ack{Positions: []*pb.ShardPosition{{Shard: 1, Sequence: 1, AgeMs: 3}}, Nodes: 7}}},
		{Message: &pb.StreamRequest_Nack{Nack: &pb.Nack{Key: key, Reason: "no", NodeName: "n"}}},
		{Message: &pb.StreamRequest_Resync{Resync: &pb.Resync{Shard: 1, Keys: []*pb.ObjectKey{key}}}},
		{Message: &pb.StreamRequest_Resync{Resync: &pb.Resync{Shard: 1, BucketDigests: make([]byte, model.Buckets*model.HashSize)}}},
		{Message: &pb.StreamRequest_Hello{Hello: &pb.Hello{}}},
	} {
		b := request(m)
		all = protowire.AppendBytes(all, b)
		for kind := range uint8(3) {
			f.Add(kind, protowire.AppendBytes(nil, b))
		}
	}
	f.Add(uint8(0), all)

	h := New(Options{
		Store: filled(f, 10), Logger: slog.New(slog.DiscardHandler),
		Authorize: func(context.Context, pb.ClientKind, string) (string, time.Time, error) {
			return anotherName(), time.Time{}, nil
		},
	})
	f.Fuzz(func(t *testing.T, kind uint8, data []byte) { checkMessages(t, h, kind, data) })
}

// checkMessages sends the messages in data, each of which has its length before it.
func checkMessages(t *testing.T, h *Hub, kind uint8, data []byte) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	transport := &sink{ctx: ctx, synced: make(chan struct{}, 1)}
	session := h.Open(transport)
	ended := make(chan error, 1)
	go func() { ended <- session.Serve() }()
	hello := &pb.Hello{Kind: pb.ClientKind(1 + kind%3)}
	if hello.GetKind() == pb.ClientKind_CLIENT_KIND_AGENT {
		hello.NodeName = anotherName()
	}
	require.NoError(t, session.Message(request(&pb.StreamRequest{Message: &pb.StreamRequest_Hello{Hello: hello}})))
	select {
	case <-transport.synced:
	case <-ctx.Done():
		require.Fail(t, "not in sync")
	}
	for len(data) > 0 {
		m, n := protowire.ConsumeBytes(data)
		if n < 0 {
			m, n = data, len(data)
		}
		data = data[n:]
		if err := session.Message(m); err != nil {
			require.NotEqual(t, codes.Unknown, status.Code(err), "%v", err)
			break
		}
	}
	session.CloseSend()
	// The stream goes on for a client that has closed its sending side. It ends if a message breaks
	// the protocol in a way that only its answer shows.
	select {
	case err := <-ended:
		require.Contains(t, []codes.Code{codes.InvalidArgument, codes.ResourceExhausted}, status.Code(err), "%v", err)
	case <-time.After(time.Millisecond / 10):
		cancel()
		require.Contains(t, []codes.Code{codes.Canceled, codes.InvalidArgument, codes.ResourceExhausted}, status.Code(<-ended))
	}
	require.Empty(t, h.sessions.list())
	require.Zero(t, h.servedNodes.Load())
	for i := range h.convergence.shards {
		s := &h.convergence.shards[i]
		require.Zero(t, s.nodes)
		require.Empty(t, s.open)
	}
}

// End implements Transport.
func (s *sink) End(error) {}
