package connection

import (
	"fmt"

	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"

	"github.com/slicecast/slicecast/internal/wire"
)

// frameCodec leaves received messages as bytes. The caller decodes them and knows their size.
type frameCodec struct{}

// Name implements encoding.CodecV2.
func (frameCodec) Name() string { return proto.Name }

// Marshal implements encoding.CodecV2.
func (frameCodec) Marshal(v any) (mem.BufferSlice, error) {
	b, err := encoding.GetCodecV2(proto.Name).Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("marshal %T: %w", v, err)
	}
	return b, nil
}

// Unmarshal implements encoding.CodecV2. It reuses the memory of the frame that v points to.
func (frameCodec) Unmarshal(data mem.BufferSlice, v any) error {
	f, ok := v.(*wire.Frame)
	if !ok {
		return fmt.Errorf("unmarshal into %T: only frames are received", v)
	}
	if size := data.Len(); cap(*f) < size {
		*f = make(wire.Frame, size)
	} else {
		*f = (*f)[:size]
	}
	data.CopyTo(*f)
	return nil
}
