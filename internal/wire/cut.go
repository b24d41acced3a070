package wire

import (
	"fmt"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/slicecast/slicecast/internal/model"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// Numbers of fields in the wire API, for what is taken apart and put together without decoding.
const (
	responseShardUpdate protowire.Number = 2
	responseZstd        protowire.Number = 9

	updateServices protowire.Number = 5
	updateSlices   protowire.Number = 6
	updateDeltas   protowire.Number = 7
)

// Parts are the encoded objects of an Update's frame, as they stand in it: what a stream that wants some of them is sent is
// put together from them, not encoded again.
type Parts struct {
	update                   *model.Update
	services, slices, deltas [][]byte // as in update, each with its tag
}

// PartsOf takes the frame of an Update apart; the parts share its memory.
func PartsOf(u *model.Update, f Frame) (*Parts, error) {
	p := &Parts{update: u}
	number, _, n := protowire.ConsumeTag(f)
	if n < 0 || number != responseShardUpdate {
		return nil, fmt.Errorf("take apart a frame of %d bytes: it holds no update", len(f))
	}
	b, n := protowire.ConsumeBytes(f[n:])
	for n >= 0 && len(b) > 0 {
		var number protowire.Number
		if number, _, n = protowire.ConsumeField(b); n < 0 {
			break
		}
		switch number {
		case updateServices:
			p.services = append(p.services, b[:n])
		case updateSlices:
			p.slices = append(p.slices, b[:n])
		case updateDeltas:
			p.deltas = append(p.deltas, b[:n])
		}
		b = b[n:]
	}
	if n < 0 || len(p.services) != len(u.Services) || len(p.slices) != len(u.Slices) || len(p.deltas) != len(u.Deltas) {
		return nil, fmt.Errorf("take apart a frame of %d bytes: it does not hold what the update does: %w", len(f), protowire.ParseError(n))
	}
	return p, nil
}

// Cut gives the frame of that part of the Update which is of the wanted Services, leading from a sequence on; nil: there is
// nothing of them in it. A full Update gives a full one, however little is wanted.
//
// A partial Update can't lead from sequence 0, which is that of a client with nothing: from is above it.
func (p *Parts) Cut(from uint64, wanted func(model.ServiceKey) bool) (Frame, error) {
	u := p.update
	header := &pb.ShardUpdate{
		Shard: u.Shard, FromSequence: fromToProto(from, u.To), Sequence: u.To, Full: u.Full, ResourceVersions: ResourceVersionsToProto(u.ResourceVersions),
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
			header.Removed = append(header.Removed, KeyToProto(d.Key))
		}
	}
	if !u.Full && len(body) == 0 && len(header.GetRemoved()) == 0 {
		return nil, nil
	}
	return assemble(header, body)
}

// holds tells whether an object that has left a Service is in the Update with another one that is wanted.
func (p *Parts) holds(key model.Key, wanted func(model.ServiceKey) bool) bool {
	for _, s := range p.update.Slices {
		if s.Key() == key {
			return wanted(s.ServiceKey())
		}
	}
	return false
}

// assemble makes a frame of an update's header and encoded objects.
func assemble(header *pb.ShardUpdate, body [][]byte) (Frame, error) {
	head, err := marshal(header)
	if err != nil {
		return nil, err
	}
	size := len(head)
	for _, b := range body {
		size += len(b)
	}
	f := make(Frame, 0, size+10)
	f = protowire.AppendTag(f, responseShardUpdate, protowire.BytesType)
	f = protowire.AppendVarint(f, uint64(size))
	f = append(f, head...)
	for _, b := range body {
		f = append(f, b...)
	}
	return f, nil
}
