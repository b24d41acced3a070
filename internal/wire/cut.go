package wire

import (
	"fmt"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/slicecast/slicecast/internal/model"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
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

// Parts are the encoded objects in the frames of an Update. A narrowed stream's frames are
// assembled from them without encoding the objects again.
type Parts struct {
	update                   *model.Update
	services, slices, deltas [][]byte // in the order of update's lists, each with its tag
}

// PartsOf splits the frames of an Update into Parts. The Parts share the memory of the frames.
func PartsOf(u *model.Update, frames []Frame) (*Parts, error) {
	p := &Parts{update: u}
	for _, f := range frames {
		if err := p.takeApart(f); err != nil {
			return nil, err
		}
	}
	if len(p.services) != len(u.Services) || len(p.slices) != len(u.Slices) || len(p.deltas) != len(u.Deltas) {
		return nil, fmt.Errorf("take apart %d frames: they do not hold what the update does", len(frames))
	}
	return p, nil
}

func (p *Parts) takeApart(f Frame) error {
	number, message, err := messageOf(f)
	if err == nil && number != responseShardUpdate {
		err = errNoUpdate
	}
	if err == nil {
		err = fields(message, func(field wireField, v wireValue) error {
			switch field {
			case serviceField:
				p.services = append(p.services, v.whole)
			case sliceField:
				p.slices = append(p.slices, v.whole)
			case deltasField:
				p.deltas = append(p.deltas, v.whole)
			}
			return nil
		})
	}
	if err != nil {
		return fmt.Errorf("take apart a frame of %d bytes: %w", len(f), err)
	}
	return nil
}

// Cut returns frames with the objects of the wanted Services, for a client at the sequence from. It
// returns nil if a partial Update holds nothing that is wanted. A full Update always results in a
// full one.
//
// from must be above 0 for a partial Update, because 0 is the sequence of a client that holds
// nothing.
func (p *Parts) Cut(from uint64, wanted func(model.ServiceKey) bool) ([]Frame, error) {
	u := p.update
	header := &pb.ShardUpdate{
		Shard: u.Shard, FromSequence: fromToProto(from, u.To), Sequence: u.To, Full: u.Full,
		ServicesResourceVersion: u.ResourceVersions.Services, SlicesResourceVersion: u.ResourceVersions.Slices,
	}
	var body [][]byte
	for i, s := range u.Services {
		if wanted(s.ServiceKey()) {
			body = append(body, p.services[i])
		}
	}
	for i, s := range u.Slices {
		if wanted(s.ServiceKey()) {
			body = append(body, p.slices[i])
		}
	}
	for i, d := range u.Deltas {
		if wanted(model.ServiceKey{Namespace: d.Namespace, Name: d.Service}) {
			body = append(body, p.deltas[i])
		}
	}
	for _, d := range u.Left {
		if wanted(d.Service) && !p.holds(d.Key, wanted) {
			key, err := marshal(KeyToProto(d.Key))
			if err != nil {
				return nil, err
			}
			body = append(body, protowire.AppendBytes(protowire.AppendTag(nil, updateRemoved, protowire.BytesType), key))
		}
	}
	if !u.Full && len(body) == 0 {
		return nil, nil
	}
	return assembleParts(header, body)
}

// holds reports whether the Update also has the slice for another Service that is wanted. Such a
// slice has only moved between Services.
func (p *Parts) holds(key model.Key, wanted func(model.ServiceKey) bool) bool {
	for _, s := range p.update.Slices {
		if s.Key() == key {
			return wanted(s.ServiceKey())
		}
	}
	return false
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
