package fleet

import (
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/wire"
	"github.com/slicecast/slicecast/loadtest/memo"
)

const (
	// maxFrameBytes bounds the total size of the frames whose decoded forms are kept. It has room
	// for the state of a large cluster, as it is sent to new nodes.
	maxFrameBytes = 64 << 20
	// maxApplied bounds the number of results of deltas that are kept. All nodes apply the same
	// delta at almost the same time.
	maxApplied = 4096
)

// shared makes all nodes of the process share objects, so that thousands of nodes fit into one
// process. It decodes equal frames once and applies the same delta to the same slice once. It
// compares frames by a hash of all bytes and objects by identity, never by the versions that they
// claim. So a node that holds a different object keeps it.
type shared struct {
	frames  *memo.Memo[memo.Bytes, *wire.Response]
	applied *memo.Memo[applyKey, *model.Slice]
}

// applyKey contains the arguments themselves, which are pointers to immutable objects.
type applyKey struct {
	delta *model.SliceDelta
	slice *model.Slice
}

func newShared() *shared {
	return &shared{frames: memo.New[memo.Bytes, *wire.Response](maxFrameBytes), applied: memo.New[applyKey, *model.Slice](maxApplied)}
}

func (s *shared) decode(f wire.Frame) (*wire.Response, error) {
	return s.frames.Get(memo.KeyOf(f), max(1, len(f)), func() (*wire.Response, error) { return wire.Decode(f) })
}

func (s *shared) apply(d *model.SliceDelta, to *model.Slice) (*model.Slice, error) {
	return s.applied.Get(applyKey{d, to}, 1, func() (*model.Slice, error) { return d.Apply(to) })
}
