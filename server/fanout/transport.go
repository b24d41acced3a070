package fanout

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync/atomic"

	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	grpcproto "google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"

	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// Transport carries one stream to its client. All methods except Taken and End are called by one
// goroutine at a time.
type Transport interface {
	// Context returns a context that ends with the stream and carries the client's credentials.
	Context() context.Context
	// Send sends the frames in order. It blocks while the client or the network accepts no more.
	Send(frames ...wire.Frame) error
	// Taken returns how many bytes of frames the client or the network has accepted so far. Any
	// goroutine may call it.
	Taken() uint64
	// End ends the stream with a status, whatever it waits for. Any goroutine may call it, more
	// than once.
	End(err error)
	// TrySend sends all of the frames without waiting and returns true, or sends none and returns
	// false.
	TrySend(frames ...wire.Frame) (bool, error)
}

// Stream implements the wire API over gRPC.
func (h *Hub) Stream(g pb.DistributionService_StreamServer) error {
	// This handler may return during a call of SendMsg. Without headers sent before, grpc-go would
	// at times omit them, and the client would then ignore the messages before its status.
	if err := g.SendHeader(nil); err != nil {
		return err
	}
	ended := make(chan error, 1)
	s := h.Open(&grpcTransport{DistributionService_StreamServer: g, ended: ended})
	go func() { // ends with the stream
		for {
			r, err := g.Recv()
			if errors.Is(err, io.EOF) {
				s.CloseSend()
				return
			}
			if err == nil {
				err = s.receive(r)
			}
			if err != nil {
				s.end(err)
				return
			}
		}
	}()
	go func() { s.transport.End(s.Serve()) }()
	// A call that blocks in SendMsg only ends when this handler returns.
	return <-ended
}

// grpcTransport is the transport of clients that do not use server/h2. Each frame costs it some
// switches between goroutines.
type grpcTransport struct {
	pb.DistributionService_StreamServer
	ended chan<- error // receives the first status
	taken atomic.Uint64
}

// End implements Transport.
func (t *grpcTransport) End(err error) {
	select {
	case t.ended <- err:
	default:
	}
}

// Send implements Transport.
func (t *grpcTransport) Send(frames ...wire.Frame) error {
	for _, f := range frames {
		if err := t.SendMsg(f); err != nil {
			return err
		}
		t.taken.Add(uint64(len(f)))
	}
	return nil
}

// Taken implements Transport. grpc-go buffers only a few KiB: it accepts a frame once it has sent
// most of the frames before it.
func (t *grpcTransport) Taken() uint64 { return t.taken.Load() }

// TrySend implements Transport. It never sends, as gRPC cannot send without waiting.
func (*grpcTransport) TrySend(...wire.Frame) (bool, error) { return false, nil }

// codec encodes frames unchanged, and all other messages with gRPC's own codec.
type codec struct{ encoding.CodecV2 }

// ServerOption returns the option that lets a gRPC server send frames. A server with a Hub needs
// it.
func ServerOption() grpc.ServerOption {
	return grpc.ForceServerCodecV2(codec{encoding.GetCodecV2(grpcproto.Name)})
}

// Marshal implements encoding.CodecV2.
func (c codec) Marshal(v any) (mem.BufferSlice, error) {
	if f, ok := v.(wire.Frame); ok {
		return mem.BufferSlice{mem.SliceBuffer(f)}, nil
	}
	b, err := c.CodecV2.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("marshal %T: %w", v, err)
	}
	return b, nil
}
