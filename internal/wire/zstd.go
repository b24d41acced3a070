package wire

import (
	"fmt"
	"sync"

	"github.com/klauspost/compress/zstd"
	"google.golang.org/protobuf/encoding/protowire"
)

// zstdDecoder is shared and decodes one frame at a time. Many clients in one process therefore cost
// no memory while they have nothing to decompress.
var zstdDecoder = newDecoder()

func newDecoder() *zstd.Decoder {
	d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true),
		zstd.WithDecoderMaxMemory(MaxFrame))
	if err != nil {
		panic(err) // the options contradict each other
	}
	return d
}

func decompress(b []byte) ([]byte, error) { return zstdDecoder.DecodeAll(b, nil) }

// compressAbove is the minimum size, in bytes, of a frame that is worth compressing.
const compressAbove = 1 << 10

var encoder = sync.OnceValues(func() (*zstd.Encoder, error) {
	// Each frame is compressed once and sent to many streams, so compression may take its time. The
	// window fits a large shard.
	return zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedBetterCompression), zstd.WithEncoderConcurrency(1),
		zstd.WithWindowSize(1<<20), zstd.WithEncoderCRC(false))
})

// Compress returns a frame that holds f compressed. It returns f itself if compression does not
// make f smaller.
func Compress(f Frame) (Frame, error) {
	if len(f) < compressAbove {
		return f, nil
	}
	e, err := encoder()
	if err != nil {
		return nil, fmt.Errorf("zstd: %w", err)
	}
	b := e.EncodeAll(f, nil)
	out := make(Frame, 0, len(b)+10)
	out = protowire.AppendTag(out, responseZstd, protowire.BytesType)
	if out = protowire.AppendBytes(out, b); len(out) >= len(f) {
		return f, nil
	}
	return out, nil
}
