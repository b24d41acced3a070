package fanout

import (
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/store"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// maxShards is the largest number of shards of any server.
const maxShards = 4096

// held is what a client holds when its stream begins, as its Hello says.
type held struct {
	epoch uint64
	// sequences are the positions in the client's shards, by number; 0 means none.
	sequences []uint64
	digest    model.Digest // of all of it
	versions  model.ResourceVersions
	nodes     model.Digest // a relay's
}

func heldBy(hello *pb.Hello) (held, error) {
	h := held{
		epoch: hello.GetEpoch(), sequences: hello.GetSequences(), versions: wire.ResourceVersionsFromProto(hello.GetResourceVersions()),
	}
	if n := len(h.sequences); n > maxShards {
		return h, status.Errorf(codes.InvalidArgument, "hello has %d sequences: there are %d shards at most", n, maxShards)
	}
	for _, d := range []struct {
		field string
		from  []byte
		to    *model.Digest
	}{{"digest", hello.GetDigest(), &h.digest}, {"nodes_digest", hello.GetNodesDigest(), &h.nodes}} {
		switch len(d.from) {
		case 0:
		case model.HashSize:
			*d.to = model.Digest(d.from)
		default:
			return h, status.Errorf(codes.InvalidArgument, "hello with a %s of %d bytes: it has %d", d.field, len(d.from), model.HashSize)
		}
	}
	return h, nil
}

// nothing reports whether the client holds no object.
func (h held) nothing() bool { return h.digest == model.Digest{} }

// in reports whether the client holds as many shards as a store has.
func (h held) in(s *store.Store) bool { return uint32(len(h.sequences)) == s.Shards() }

// position returns the client's position in a shard, if it is in the store's history, so that the changes since are known.
// Position 0 is that of a client which was cut off before this epoch's state came: it may hold anything.
func (h held) position(s *store.Store, snapshot *store.Snapshot) (at uint64, ok bool) {
	if !h.in(s) || h.epoch != s.Epoch() {
		return 0, false
	}
	at = h.sequences[snapshot.Shard()]
	return at, snapshot.Knows(at)
}
