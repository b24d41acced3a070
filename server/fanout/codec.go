package fanout

import (
	"fmt"

	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"

	"github.com/slicecast/slicecast/internal/wire"
)

// codec sends frames as they are, and everything else as gRPC's own codec does.
type codec struct{ encoding.CodecV2 }

// ServerOption makes a gRPC server able to send frames; a Hub needs it.
func ServerOption() grpc.ServerOption {
	return grpc.ForceServerCodecV2(codec{encoding.GetCodecV2(proto.Name)})
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
