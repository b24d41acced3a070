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
