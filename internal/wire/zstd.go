package wire

import (
	"errors"

	"github.com/klauspost/compress/zstd"
)

// maxDecompressed bounds what a compressed frame may become: a shard with a Service of a million endpoints.
const maxDecompressed = 256 << 20

var errNested = errors.New("a compressed frame inside of a compressed one")

// zstdDecoder is shared: it decodes one frame at a time, so that many clients in a process cost no memory while they have
// nothing to decompress.
var zstdDecoder = newDecoder()

func newDecoder() *zstd.Decoder {
	d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true),
		zstd.WithDecoderMaxMemory(maxDecompressed))
	if err != nil {
		panic(err) // the options are wrong
	}
	return d
}

func decompress(b []byte) ([]byte, error) { return zstdDecoder.DecodeAll(b, nil) }
