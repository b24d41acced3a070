package fanout

import (
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/store"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// maxShards is the largest number of shards that any server has.
const maxShards = 4096

// held is what a client holds when its stream begins, according to its Hello.
type held struct {
	epoch uint64
	// sequences has the client's position in each shard, by shard number; 0 means none.
	sequences []uint64
	digest    model.Digest // of the whole state
	versions  model.ResourceVersions
	nodes     model.Digest // the Nodes that a relay holds
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

// in reports whether the client has as many shards as the store.
func (h held) in(s *store.Store) bool { return uint32(len(h.sequences)) == s.Shards() }

// position returns the client's position in a shard. ok reports whether the changes since then are
// known. Position 0 means that the client was cut off before it received the shard in this epoch,
// so it may hold any state.
func (h held) position(s *store.Store, snapshot *store.Snapshot) (at uint64, ok bool) {
	if !h.in(s) || h.epoch != s.Epoch() {
		return 0, false
	}
	at = h.sequences[snapshot.Shard()]
	return at, snapshot.Knows(at)
}
