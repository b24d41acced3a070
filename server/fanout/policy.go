package fanout

import (
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/store"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// policy decides what of the state a session sends. Only the session's goroutine uses it, and never
// while the fan-out sends to the session.
type policy interface {
	// live reports whether the fan-out may send to the session, because the client gets the ring's
	// frames and nothing in addition.
	live() bool
	// whole reports whether the client holds the whole state, so that its digests compare with the
	// store's.
	whole() bool
	// sendNodes sends the Nodes that the client follows, unless it holds them. all reports whether it
	// has sent all Nodes.
	sendNodes(state clientState) (all bool, err error)
	// start sends what the client lacks of all shards.
	start(up *startup, state clientState) error
	// forward sends a batch of the ring.
	forward(b batch) error
	// catchUp sends what leads the client from its position in a shard to a snapshot.
	catchUp(snapshot *store.Snapshot) error
	// resync answers a client's request for a shard, as of a snapshot.
	resync(snapshot *store.Snapshot, r *resync) error
	// sendReached is called with the resource versions that everything sent so far includes.
	sendReached(reached model.ResourceVersions) error
}

// newPolicy returns the policy for a client and its subscription; nil means everything.
func newPolicy(s *Session, wanted *subscription) policy {
	switch {
	case s.isRelay():
		return &relayPolicy{fullPolicy: fullPolicy{s}}
	case wanted != nil:
		return &narrowedPolicy{fullPolicy{s}, wanted, make([]uint64, s.hub.store.Shards())}
	default:
		return fullPolicy{s}
	}
}

// fullPolicy sends everything, and of the Nodes the client's own.
type fullPolicy struct{ s *Session }

func (fullPolicy) live() bool                               { return true }
func (fullPolicy) whole() bool                              { return true }
func (fullPolicy) sendReached(model.ResourceVersions) error { return nil }

func (p fullPolicy) sendNodes(clientState) (all bool, err error) {
	if p.s.node != "" {
		err = p.s.sendNode(p.s.node)
	}
	return false, err
}

func (p fullPolicy) start(up *startup, state clientState) error {
	if state.empty() {
		up.startEmpty()
	} else if err := up.resume(state); err != nil {
		return err
	}
	return up.sendWhole()
}

// forward sends a batch. If a shard has several updates in the batch, or the batch does not follow
// the client's sequence in the shard, forward sends their combined effect from the snapshot. It
// skips updates that the client already has.
func (p fullPolicy) forward(b batch) error {
	s := p.s
	repeats := b.repeats()
	if len(repeats) == len(b.updates) && s.advance(b.updates) {
		return s.send(b.frames...)
	}
	for _, u := range b.updates {
		have := s.sequences[u.shard]
		var err error
		switch {
		case have >= u.to:
		case have != u.from || repeats[u.shard]:
			err = s.bring(s.hub.store.Snapshot(u.shard))
		default:
			s.sequences[u.shard] = u.to
			err = s.send(u.frames...)
		}
		if err != nil {
			return err
		}
	}
	return s.send(b.narrowed...) // these are not updates
}

func (p fullPolicy) catchUp(snapshot *store.Snapshot) error {
	return p.s.sendFrom(p.s.sequences[snapshot.Shard()], snapshot)
}

// resync sends the whole shard, or named objects and buckets that differ.
func (p fullPolicy) resync(snapshot *store.Snapshot, r *resync) error {
	s := p.s
	differ, whole, err := r.differing(snapshot)
	switch {
	case err != nil:
		return err
	case whole:
		return s.sendFrom(0, snapshot)
	case len(r.keys) > 0:
		if err := s.sendObjects(snapshot, r.keys); err != nil {
			return err
		}
	}
	if r.buckets == nil {
		return nil
	}
	// The client's digests may be older than its position. If a change sent since then is undone in
	// the snapshot, the digests match although the client has the change.
	if err := s.bring(snapshot); err != nil {
		return err
	}
	return s.sendBuckets(snapshot, differ)
}

// relayPolicy also sends all Nodes, and the resource versions that everything sent so far includes.
// A relay cannot derive the versions: an update describes one shard and says nothing about the
// others.
type relayPolicy struct {
	fullPolicy
	reached model.ResourceVersions // sent last
}

func (*relayPolicy) live() bool { return false }

func (p *relayPolicy) sendNodes(state clientState) (all bool, err error) {
	nodes := p.s.hub.store.Nodes()
	if model.NodesDigest(nodes) == state.nodesDigest {
		return false, nil
	}
	for _, n := range nodes {
		if err := p.s.sendNode(n.Name); err != nil {
			return false, err
		}
	}
	return true, nil
}

func (p *relayPolicy) sendReached(reached model.ResourceVersions) error {
	if reached == p.reached {
		return nil
	}
	p.reached = reached
	return p.s.sendMessage(&pb.StreamResponse{Message: &pb.StreamResponse_Heartbeat{Heartbeat: &pb.Heartbeat{
		ResourceVersions: wire.ResourceVersionsToProto(reached),
	}}})
}
