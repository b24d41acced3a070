package fleet

import (
	"github.com/cespare/xxhash/v2"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/wire"
	"github.com/slicecast/slicecast/loadtest/memo"
)

const (
	// maxFrameBytes bounds the frames whose decoded form is kept: the state of a large cluster as it is sent to new nodes.
	maxFrameBytes = 64 << 20
	// maxApplied bounds the results of deltas that are kept. Nodes apply the same delta within a moment.
	maxApplied = 4096
)

// shared makes what all nodes of the process hold one set of objects, as the nodes of a real cluster cannot: it
// decodes a frame once, and applies a delta to a slice once, for all who come with the very same. It never decides that
// two things are equal by what they say of themselves, so a node that holds something else still does.
type shared struct {
	frames  *memo.Memo[frameKey, *wire.Response]
	applied *memo.Memo[applyKey, *model.Slice]
}

type frameKey struct {
	length int
	hash   uint64
}

// applyKey holds the arguments themselves: pointers to immutable objects.
type applyKey struct {
	delta *model.SliceDelta
	slice *model.Slice
}

func newShared() *shared {
	return &shared{frames: memo.New[frameKey, *wire.Response](maxFrameBytes), applied: memo.New[applyKey, *model.Slice](maxApplied)}
}

func (s *shared) decode(f wire.Frame) (*wire.Response, error) {
	return s.frames.Get(frameKey{len(f), xxhash.Sum64(f)}, max(1, len(f)), func() (*wire.Response, error) { return wire.Decode(f) })
}

func (s *shared) apply(d *model.SliceDelta, to *model.Slice) (*model.Slice, error) {
	return s.applied.Get(applyKey{d, to}, 1, func() (*model.Slice, error) { return d.Apply(to) })
}
