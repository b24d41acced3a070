package cache

import (
	"fmt"
	"slices"

	"github.com/slicecast/slicecast/internal/model"
)

// MaxShards bounds the number of shards that a server may have.
const MaxShards = 4096

// Writer changes a Cache as servers say. A Cache has one Writer at a time.
type Writer struct {
	*Cache
	// ApplyDelta applies a delta to a slice, or returns an error if the delta does not fit. nil
	// means model.SliceDelta.Apply.
	ApplyDelta func(*model.SliceDelta, *model.Slice) (*model.Slice, error)
	// Relay makes Apply report what an Update did, as a relay needs to know.
	Relay bool
}

// Begin prepares the cache for another stream, and returns what its Hello says. The content stays.
// What rests on the word of the last server ends:
//
//   - Objects that were unreadable or unverified count with the hash of what the cache holds.
//     Otherwise, a server that claims a true version for content of its own would keep the client
//     from ever getting the true content.
//   - A shard with such objects, or with missing slices, has no position. So the next server
//     compares digests and sends what differs, whatever epoch it has. The epoch, too, is only a
//     server's claim.
func (w *Writer) Begin() Hello {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.missing, w.unreadable = 0, 0
	for i := range w.shards {
		if s := &w.shards[i]; s.unproved() {
			s.missing, s.unreadable, s.changed, s.unverified = nil, nil, nil, nil
			s.revision++
			w.forgetPositionLocked(uint32(i))
		}
	}
	sequences, digests := w.digestsLocked()
	return Hello{Epoch: w.epoch, Sequences: sequences, Digest: model.StateDigest(digests), ResourceVersions: w.seen, Cluster: w.clusterLocked()}
}

// Welcome prepares the cache for a server's epoch and number of shards. The content stays.
func (w *Writer) Welcome(epoch uint64, shards uint32) error {
	if err := CheckWelcome(epoch, shards); err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if uint32(len(w.shards)) != shards {
		w.reshardLocked(shards)
	}
	if w.epoch != epoch {
		w.epoch = epoch
		w.forgetPositionsLocked()
	}
	return nil
}

// FromCluster notes the cluster of a server, which 0 leaves unknown. It reports whether the content
// is restored from a checkpoint of another cluster. That content does not count then, or not any
// longer, and its Node is dropped. The content stays until the server brings the cache in sync.
func (w *Writer) FromCluster(cluster int64) (another bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	own := w.clusterLocked()
	if w.inSync || own == 0 || cluster == 0 || own == cluster {
		return false
	}
	w.foreign = true
	w.node, w.pending.node, w.restored = nil, w.stale, nil
	return true
}

// CheckWelcome returns ErrProtocol unless a server may have this epoch and number of shards.
func CheckWelcome(epoch uint64, shards uint32) error {
	if epoch == 0 || !ValidShards(int(shards)) {
		return fmt.Errorf("%w: welcome with epoch %d and %d shards", ErrProtocol, epoch, shards)
	}
	return nil
}

// ValidShards reports whether a server may have this number of shards.
func ValidShards(n int) bool { return n > 0 && n <= MaxShards && n&(n-1) == 0 }

func (w *Writer) forgetPositionsLocked() {
	for i := range w.shards {
		w.shards[i].sequence, w.shards[i].moved = 0, false
	}
	w.pending.shards = w.pending.shards[:0]
}

// forgetPositionLocked drops the position of one shard.
func (w *Writer) forgetPositionLocked(shard uint32) {
	s := &w.shards[shard]
	s.sequence = 0
	if s.moved {
		s.moved = false
		w.pending.shards = slices.DeleteFunc(w.pending.shards, func(o uint32) bool { return o == shard })
	}
}

// reshardLocked distributes the content over another number of shards. It drops the positions.
func (w *Writer) reshardLocked(shards uint32) {
	old := w.shards
	w.shards, w.pending.shards = newShards(int(shards)), w.pending.shards[:0]
	for i := range old {
		for key, held := range old[i].services {
			if held.service != nil {
				w.shardOf(key).setService(held.service)
			}
			for _, slice := range held.slices {
				// A slice that moves between Services may for a moment be in two shards.
				w.setSliceLocked(w.shardOf(key), slice)
			}
		}
	}
}

// InSync sets the positions and resource versions of an InSync and makes the content count.
func (w *Writer) InSync(sequences []uint64, seen model.ResourceVersions) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(sequences) != len(w.shards) {
		return fmt.Errorf("%w: in_sync for %d shards of %d", ErrProtocol, len(sequences), len(w.shards))
	}
	for i, sequence := range sequences {
		w.shards[i].sequence = sequence
		w.movedLocked(uint32(i))
	}
	// The highest versions ever seen would be wrong here. A server that names lower ones has already
	// let the client wait, and is still behind. A restored etcd may stay behind for hours, and an
	// untrusted server may have claimed any version.
	w.seen = seen
	w.inSync, w.stale = true, false
	w.signalLocked()
	return nil
}

// Saw notes that the cache reflects these resource versions, unless it reflects higher ones.
func (w *Writer) Saw(versions model.ResourceVersions) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.seen = w.seen.Max(versions)
}

// SetSeen sets the resource versions that the cache reflects, which may be lower than before.
func (w *Writer) SetSeen(seen model.ResourceVersions) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.seen = seen
}

// movedLocked makes the next Take return a shard's position.
func (w *Writer) movedLocked(shard uint32) {
	if s := &w.shards[shard]; !s.moved {
		s.moved = true
		w.pending.shards = append(w.pending.shards, shard)
	}
}

// SetServers sets the servers that the stream names.
func (w *Writer) SetServers(servers []Server) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.servers = servers
}

// SetNode sets the Node. It reports whether n is nil although the cache holds a Node.
//
// A deleted Node stays in the cache, and in the checkpoint, with Deleting set. The machine is still
// running, so the Node's zone, pod CIDRs and the cluster's ranges still hold. They hold until
// another Node replaces them. Deleting makes load balancers leave the node.
//
// A Node that is registered anew keeps the addresses and pod CIDRs of the previous one until it
// has its own. That is done here, so that the view needs no memory and the checkpoint includes the
// result.
func (w *Writer) SetNode(n *model.Node) (deleted bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case w.node == nil:
	case n == nil:
		kept := *w.node
		kept.Deleting = true
		n, deleted = &kept, true
	default:
		n = completed(n, w.node)
	}
	if !w.node.Equal(n) {
		w.node, w.pending.node = n, true
		w.signalLocked()
	}
	return deleted
}

// completed returns n with the addresses and pod CIDRs of before where n has none. Kubernetes
// never takes these away from a Node. A Node without them was deleted and registered again, and has
// not received them yet.
func completed(n, before *model.Node) *model.Node {
	out := *n
	if len(out.Addresses) == 0 {
		out.Addresses = before.Addresses
	}
	if len(out.PodCIDRs) == 0 {
		out.PodCIDRs = before.PodCIDRs
	}
	return &out
}
