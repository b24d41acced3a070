package fanout

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync/atomic"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	grpcproto "google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// Transport carries one stream to its client. All methods but Taken and End are called by one goroutine at a time.
type Transport interface {
	// Context ends with the stream, and says who the client is.
	Context() context.Context
	// Send sends the frames in their order. It waits as long as the client, or the network, takes no more.
	Send(frames ...wire.Frame) error
	// Taken returns how many bytes of frames the client, or the network, has taken so far. It may be called by any goroutine.
	Taken() uint64
	// End ends the stream with a status, whatever it waits for. It may be called by any goroutine, more than once.
	End(err error)
	// TrySend sends all of the frames without waiting, or none and gives false.
	TrySend(frames ...wire.Frame) (bool, error)
}

// Session is a stream as its transport drives it.
type Session struct{ s *stream }

// Open begins a stream. Serve must be called; Message may be before.
func (h *Hub) Open(t Transport) *Session { return &Session{h.newStream(t)} }

// Serve runs the stream until the client leaves, breaks the protocol or the server drains; the error is its status.
func (s *Session) Serve() error { return s.s.serve() }

// Message takes an encoded StreamRequest. It does not wait, nor keep b. An error is the stream's status: it must end.
func (s *Session) Message(b []byte) error {
	var r pb.StreamRequest
	if err := proto.Unmarshal(b, &r); err != nil {
		return status.Errorf(codes.InvalidArgument, "a message that is no StreamRequest: %v", err)
	}
	return s.s.take(&r)
}

// CloseSend tells that the client says no more. It may go on listening.
func (s *Session) CloseSend() { s.s.closeSend() }

// Stream implements the wire API over gRPC.
func (h *Hub) Stream(g pb.DistributionService_StreamServer) error {
	// This handler may return while SendMsg is called. If the headers had not been sent by then, grpc-go would at times leave them
	// out, and the client would not take the messages that its status comes after.
	if err := g.SendHeader(nil); err != nil {
		return err
	}
	ended := make(chan error, 1)
	s := h.newStream(&grpcTransport{DistributionService_StreamServer: g, ended: ended})
	go func() { // ends with the stream
		for {
			r, err := g.Recv()
			if errors.Is(err, io.EOF) {
				s.closeSend()
				return
			}
			if err == nil {
				err = s.take(r)
			}
			if err != nil {
				s.end(err)
				return
			}
		}
	}()
	go func() { s.transport.End(s.serve()) }()
	// A call that waits in SendMsg ends only when this handler does.
	return <-ended
}

// grpcTransport is for those whom no leaner transport serves: a frame costs it some goroutine switches.
type grpcTransport struct {
	pb.DistributionService_StreamServer
	ended chan<- error // takes the first one
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

// Taken implements Transport. gRPC waits with a frame until it has sent those before it, but for a few KiB.
func (t *grpcTransport) Taken() uint64 { return t.taken.Load() }

// TrySend implements Transport: gRPC has no way to send without waiting.
func (*grpcTransport) TrySend(...wire.Frame) (bool, error) { return false, nil }

// codec sends frames as they are, and everything else as gRPC's own codec does.
type codec struct{ encoding.CodecV2 }

// ServerOption makes a gRPC server able to send frames; a Hub needs it.
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
