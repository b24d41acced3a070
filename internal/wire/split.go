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
			return nil, fmt.Errorf("encode an update: %w", err)
		}
		return []Frame{f}, nil
	}
	parts := split(p)
	parts[len(parts)-1].More = more
	var frames []Frame
	for _, part := range parts {
		f, err := encodePart(part)
		if err != nil {
			return nil, err
		}
		frames = append(frames, f)
	}
	return frames, nil
}

func encodePart(p *pb.ShardUpdate) (Frame, error) {
	return Encode(&pb.StreamResponse{Message: &pb.StreamResponse_ShardUpdate{ShardUpdate: p}})
}

// split divides an update into parts that share its objects. Each part repeats the header of the
// update. Only the first part has FullBuckets, because a receiver adds up the buckets of all parts.
func split(p *pb.ShardUpdate) []*pb.ShardUpdate {
	d := &divider{part: &pb.ShardUpdate{
		Shard: p.GetShard(), FromSequence: p.GetFromSequence(), Sequence: p.GetSequence(), Full: p.GetFull(),
		ServicesResourceVersion: p.GetServicesResourceVersion(), SlicesResourceVersion: p.GetSlicesResourceVersion(), FullBuckets: p.GetFullBuckets(),
	}}
	d.parts = append(d.parts, d.part)
	for _, s := range p.GetServices() {
		part := d.room(s)
		part.Services = append(part.Services, s)
	}
	for _, s := range p.GetSlices() {
		part := d.room(s)
		part.Slices = append(part.Slices, s)
	}
	for _, s := range p.GetSliceDeltas() {
		part := d.room(s)
		part.SliceDeltas = append(part.SliceDeltas, s)
	}
	for _, k := range p.GetRemoved() {
		part := d.room(k)
		part.Removed = append(part.Removed, k)
	}
	return d.parts
}

// divider distributes objects over parts, which it fills one after the other.
type divider struct {
	parts []*pb.ShardUpdate
	part  *pb.ShardUpdate // the last of parts
	bytes int             // size of the objects in part
}

// room returns the part to which the object must be added. It starts a new part if the object does
// not fit in the last one.
func (d *divider) room(object proto.Message) *pb.ShardUpdate {
	size := fieldSize(proto.Size(object))
	if d.bytes > 0 && d.bytes+size > MaxPart {
		d.part.More = true
		d.part = &pb.ShardUpdate{
			Shard: d.part.GetShard(), FromSequence: d.part.GetFromSequence(), Sequence: d.part.GetSequence(), Full: d.part.GetFull(),
			ServicesResourceVersion: d.part.GetServicesResourceVersion(), SlicesResourceVersion: d.part.GetSlicesResourceVersion(),
		}
		d.parts, d.bytes = append(d.parts, d.part), 0
	}
	d.bytes += size
	return d.part
}

// fieldSize returns the size, in bytes, of a field that holds a message of this size. The tags of
// all fields with objects take one byte.
func fieldSize(message int) int { return 1 + protowire.SizeBytes(message) }

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
