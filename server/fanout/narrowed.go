package fanout

import (
	"maps"
	"slices"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/store"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// maxSubscription bounds the names in a subscription; a client that wants more subscribes to
// everything. maxName bounds each name in bytes, as Kubernetes does.
const maxSubscription, maxName = 1024, 253

// wantedAtOnce is how large its Services may be in memory, in bytes, which a client with a
// subscription is sent without waiting for a turn.
const wantedAtOnce = 256 << 10

// subscription is the set of Services that a client subscribed to. A nil subscription has all.
type subscription struct {
	namespaces map[string]struct{}
	services   map[model.ServiceKey]struct{}
}

// newSubscription returns nil, which means everything, if p is nil or asks for everything.
func newSubscription(p *pb.Subscription) (*subscription, error) {
	if p == nil || p.GetEverything() {
		return nil, nil
	}
	if n := len(p.GetNamespaces()) + len(p.GetServices()); n > maxSubscription {
		return nil, invalid("invalid subscription: %d names: use at most %d, or subscribe to everything", n, maxSubscription)
	}
	s := &subscription{namespaces: make(map[string]struct{}), services: make(map[model.ServiceKey]struct{})}
	for _, n := range p.GetNamespaces() {
		if len(n) > maxName {
			return nil, errLongName
		}
		s.namespaces[n] = struct{}{}
	}
	for _, n := range p.GetServices() {
		if len(n.GetNamespace()) > maxName || len(n.GetName()) > maxName {
			return nil, errLongName
		}
		s.services[model.ServiceKey{Namespace: n.GetNamespace(), Name: n.GetName()}] = struct{}{}
	}
	return s, nil
}

func (s *subscription) wants(key model.ServiceKey) bool {
	if s == nil {
		return true
	}
	if _, ok := s.namespaces[key.Namespace]; ok {
		return true
	}
	_, ok := s.services[key]
	return ok
}

// shards returns the shards that may hold a Service of the subscription.
func (s *subscription) shards(count uint32) map[uint32]struct{} {
	out := make(map[uint32]struct{})
	if s == nil || len(s.namespaces) > 0 {
		for i := range count {
			out[i] = struct{}{}
		}
		return out
	}
	for key := range s.services {
		out[key.Shard(count)] = struct{}{}
	}
	return out
}

// narrowedPolicy sends the Services of a subscription, and the client's own Node. Its invariant:
// passed[shard] is at least the client's position in the shard. The Updates between the two concern
// no Service of the subscription, so they were not sent.
type narrowedPolicy struct {
	fullPolicy
	wanted *subscription
	passed []uint64
}

func (*narrowedPolicy) live() bool  { return false }
func (*narrowedPolicy) whole() bool { return false }

// start sends each shard whole, except for shards where the client is at the snapshot's position,
// and shards where neither side has anything.
func (p *narrowedPolicy) start(up *startup, state clientState) error {
	s := p.s
	count := s.hub.store.Shards()
	wanted := p.wanted.shards(count)
	sameEpoch := state.hasShardsOf(s.hub.store) && state.epoch == s.hub.store.Epoch()
	var shards []uint32
	for shard := range count {
		snapshot := s.hub.store.Snapshot(shard)
		_, may := wanted[shard]
		// Position 0 does not say what the client holds; see clientState.position.
		at := sameEpoch && state.sequences[shard] > 0 && state.sequences[shard] == snapshot.Sequence()
		if at || !may && state.empty() {
			s.sequences[shard], p.passed[shard] = snapshot.Sequence(), snapshot.Sequence()
			continue
		}
		shards = append(shards, shard)
	}
	return p.sendShards(up, shards)
}

// sendShards sends the Services of the subscription in some shards. If they are large, it waits for
// the client's turn, as a subscription may include nearly everything.
func (p *narrowedPolicy) sendShards(up *startup, shards []uint32) error {
	// Objects are smaller on the wire than in memory.
	size := func(snapshot *store.Snapshot) (int64, error) {
		return int64(snapshot.Where(p.wanted.wants).Memory()), nil
	}
	return up.sendShards(shards, size, wantedAtOnce, p.catchUp)
}

// catchUp sends the Services of the subscription in a shard, as a full update.
func (p *narrowedPolicy) catchUp(snapshot *store.Snapshot) error {
	frames, err := wire.EncodeParts(snapshot.Where(p.wanted.wants))
	if err != nil {
		return err
	}
	p.s.sequences[snapshot.Shard()], p.passed[snapshot.Shard()] = snapshot.Sequence(), snapshot.Sequence()
	return p.s.send(frames...)
}

func (p *narrowedPolicy) resync(snapshot *store.Snapshot, _ *resync) error {
	return p.catchUp(snapshot)
}

// forward sends the part of a batch that is in the subscription. The client's position does not
// move over updates that are not sent.
func (p *narrowedPolicy) forward(b batch) error {
	for _, u := range b.updates {
		if p.s.sequences[u.shard] < u.to {
			if err := p.forwardUpdate(u); err != nil {
				return err
			}
		}
	}
	if len(b.narrowed) > 0 {
		return p.s.send(b.narrowed...)
	}
	return nil
}

func (p *narrowedPolicy) forwardUpdate(u encodedUpdate) error {
	s := p.s
	p.passed[u.shard] = max(p.passed[u.shard], u.to)
	// The client holds nothing of the shard, so no update can lead on from there.
	if s.sequences[u.shard] == 0 {
		return p.catchUp(s.hub.store.Snapshot(u.shard))
	}
	parts, err := u.parts()
	if err != nil {
		return err
	}
	frames, err := parts.Cut(s.sequences[u.shard], p.wanted.wants)
	if err != nil || frames == nil {
		return err
	}
	s.sequences[u.shard] = u.to
	return s.send(frames...)
}

// resubscribe replaces the subscription. It sends each shard in which the subscriptions differ as a
// full update, which removes what is no longer subscribed to. It also sends shards with an update
// still to come: the update may remove an object that only the old subscription has, and would then
// not be sent to the client.
func (s *Session) resubscribe(m *pb.Subscription) error {
	wanted, err := newSubscription(m)
	if err != nil {
		return err
	}
	old, ok := s.policy.(*narrowedPolicy)
	if !ok {
		old = &narrowedPolicy{passed: slices.Clone(s.sequences)}
	}
	now := &narrowedPolicy{fullPolicy: fullPolicy{s}, wanted: wanted, passed: old.passed}
	if s.policy = now; wanted == nil {
		s.policy = now.fullPolicy
	}
	count := s.hub.store.Shards()
	touched := old.wanted.shards(count)
	maps.Copy(touched, wanted.shards(count))
	differs := func(key model.ServiceKey) bool { return old.wanted.wants(key) != wanted.wants(key) }
	var shards []uint32
	for shard := range touched {
		if snapshot := s.hub.store.Snapshot(shard); snapshot.Sequence() > now.passed[shard] || snapshot.Has(differs) {
			shards = append(shards, shard)
		}
	}
	// The client waits for its turn like a new one.
	up := s.newStartup()
	defer up.beats.Stop()
	if err := now.sendShards(up, shards); err != nil {
		return err
	}
	return s.sendInSync(false, s.hub.store.Seen())
}
