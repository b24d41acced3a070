package wire

import (
	"fmt"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/slicecast/slicecast/internal/model"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

const (
	// MaxPart bounds the objects in one frame, in bytes before compression. A larger object has a
	// frame to itself. An Update with more objects is sent in several frames.
	MaxPart = 1 << 20
	// MaxFrame bounds a frame in bytes, compressed or not. It is many times the size of the largest
	// object: an API server accepts objects of up to 1.5 MiB, and sources trim objects from
	// elsewhere.
	MaxFrame = 16 << 20
)

// Field numbers of the wire API, for code that splits and joins messages without decoding them.
const (
	responseShardUpdate protowire.Number = 2
	responseNodeUpdate  protowire.Number = 3
	responseZstd        protowire.Number = 9
	lastResponse        protowire.Number = 11

	updateServices protowire.Number = 5
	updateSlices   protowire.Number = 6
	updateDeltas   protowire.Number = 7
	updateRemoved  protowire.Number = 8
)

// EncodeParts returns the frames of an Update, which are one or more. A client applies all of them
// at once.
func EncodeParts(u *model.Update) ([]Frame, error) { return encodeParts(u, false) }

// EncodeBeginning returns the frames of the first part of an Update. The caller sends more frames
// of the same shard and sequences, and the client applies all of them at once.
func EncodeBeginning(u *model.Update) ([]Frame, error) { return encodeParts(u, true) }

func encodeParts(u *model.Update, more bool) ([]Frame, error) {
	p := UpdateToProto(u)
	p.More = more
	whole := &pb.StreamResponse{Message: &pb.StreamResponse_ShardUpdate{ShardUpdate: p}}
	if proto.Size(whole) <= MaxPart {
		f, err := proto.MarshalOptions{Deterministic: true, UseCachedSize: true}.Marshal(whole)
		if err != nil {
			return nil, fmt.Errorf("encode an update of shard %d: %w", u.Shard, err)
		}
		return []Frame{f}, nil
	}
	b, err := marshal(p)
	if err != nil {
		return nil, fmt.Errorf("shard %d: %w", u.Shard, err)
	}
	var objects [][]byte
	for len(b) > 0 {
		number, _, n := protowire.ConsumeField(b)
		if number >= updateServices && number <= updateRemoved {
			objects = append(objects, b[:n])
		}
		b = b[n:]
	}
	p.Services, p.Slices, p.SliceDeltas, p.Removed = nil, nil, nil, nil
	return assembleParts(p, objects)
}

// CompressParts returns the frames compressed.
func CompressParts(frames []Frame) ([]Frame, error) {
	out := make([]Frame, 0, len(frames))
	for _, f := range frames {
		c, err := Compress(f)
		if err != nil {
			return nil, err
		}
		out = append(out, c)
	}
	return out, nil
}

// Bytes returns the total size of frames in bytes.
func Bytes(frames []Frame) (size int) {
	for _, f := range frames {
		size += len(f)
	}
	return size
}

// assembleParts returns the frames with an update's header and encoded objects. Each frame holds at
// most MaxPart bytes of objects, or a single larger object. Only the first frame has FullBuckets,
// because a receiver adds up the buckets of all parts. header.More applies to the last frame.
func assembleParts(header *pb.ShardUpdate, body [][]byte) (frames []Frame, err error) {
	for more := header.GetMore(); ; header.FullBuckets = nil {
		size, n := 0, 0
		for n < len(body) && (n == 0 || size+len(body[n]) <= MaxPart) {
			size += len(body[n])
			n++
		}
		header.More = more || n < len(body)
		f, err := assemble(header, body[:n], size)
		if err != nil {
			return nil, err
		}
		frames, body = append(frames, f), body[n:]
		if len(body) == 0 {
			return frames, nil
		}
	}
}

// assemble returns one frame with an update's header and encoded objects. size is the number of
// bytes of the objects.
func assemble(header *pb.ShardUpdate, body [][]byte, size int) (Frame, error) {
	head, err := marshal(header)
	if err != nil {
		return nil, err
	}
	size += len(head)
	f := make(Frame, 0, size+10)
	f = protowire.AppendTag(f, responseShardUpdate, protowire.BytesType)
	f = protowire.AppendVarint(f, uint64(size))
	f = append(f, head...)
	for _, b := range body {
		f = append(f, b...)
	}
	return f, nil
}
