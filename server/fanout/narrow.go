package fanout

import (
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/store"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// maxSubscription bounds the names in a subscription; a client that wants more subscribes to
// everything. maxName bounds each name in bytes, as Kubernetes does.
const maxSubscription, maxName = 1024, 253

// wantedAtOnce is how many bytes a narrowed stream may be sent without waiting for a turn.
const wantedAtOnce = 64 << 10

// subscription is the set of Services that a narrowed stream gets. A nil subscription has all.
type subscription struct {
	namespaces map[string]struct{}
	services   map[model.ServiceKey]struct{}
}

var errLongName = status.Errorf(codes.InvalidArgument, "a subscription with a name of more than %d bytes, which Kubernetes does not allow", maxName)

// newSubscription returns nil, which means everything, if p is nil or asks for everything.
func newSubscription(p *pb.Subscription) (*subscription, error) {
	if p == nil || p.GetEverything() {
		return nil, nil
	}
	if n := len(p.GetNamespaces()) + len(p.GetServices()); n > maxSubscription {
		return nil, status.Errorf(codes.InvalidArgument, "a subscription with %d names: use at most %d, or none to get everything",
			n, maxSubscription)
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

// wants reports whether a Service is in the subscription.
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

// startWanted sends a narrowed stream's initial state. Each shard is sent whole, except for shards
// where the client is at the snapshot's position, and shards where neither side has anything.
func (s *stream) startWanted(client held) error {
	h := s.hub
	count := h.store.Shards()
	wanted := s.wanted.shards(count)
	same := client.in(h.store)
	s.passed = make([]uint64, count)
	var shards []uint32
	for shard := range count {
		snapshot := h.store.Snapshot(shard)
		_, may := wanted[shard]
		holds := !client.nothing()
		// Position 0 does not say what the client holds; see held.position.
		at := same && client.epoch == h.store.Epoch() && client.sequences[shard] > 0 &&
			client.sequences[shard] == snapshot.Sequence()
		if at || !may && !holds {
			s.sequences[shard], s.passed[shard] = snapshot.Sequence(), snapshot.Sequence()
			continue
		}
		shards = append(shards, shard)
	}
	return s.sendAllWanted(shards)
}

// sendAllWanted sends the Services of the subscription in some shards. If they are large, it waits
// for the client's turn, as a subscription may include nearly everything.
func (s *stream) sendAllWanted(shards []uint32) error {
	send := func() error {
		for _, shard := range shards {
			if err := s.sendWanted(s.hub.store.Snapshot(shard)); err != nil {
				return err
			}
		}
		return nil
	}
	var size int64
	for _, shard := range shards {
		size += roughBytes(s.hub.store.Snapshot(shard).Where(s.wanted.wants))
	}
	if size <= wantedAtOnce {
		return send()
	}
	return s.inTurn(size, send)
}

// roughBytes returns the approximate size of an Update of whole objects on the wire.
func roughBytes(u *model.Update) (size int64) {
	for _, s := range u.Services {
		size += objectBytes + addressBytes*int64(len(s.ExternalIPs)+len(s.LoadBalancerIngress)+len(s.LoadBalancerSourceRanges)+len(s.Ports))
	}
	for _, s := range u.Slices {
		size += objectBytes + addressBytes*int64(len(s.Ports)) + endpointBytes*int64(len(s.Endpoints))
	}
	return size
}

// objectBytes is about the size of an object without its lists, and addressBytes that of a list
// entry with an address or a port.
const objectBytes, addressBytes = 128, 24

// sendWanted sends the Services of the subscription in a shard, as a full update.
func (s *stream) sendWanted(snapshot *store.Snapshot) error {
	frames, err := encodeParts(snapshot.Where(s.wanted.wants))
	if err != nil {
		return err
	}
	s.sequences[snapshot.Shard()] = snapshot.Sequence()
	s.passed[snapshot.Shard()] = snapshot.Sequence()
	return s.send(frames...)
}

// forwardWanted sends the part of a batch that is in the subscription. The stream's sequences are
// those of the updates it was sent. Updates that are not sent do not leave the client behind; only
// passed advances over them.
func (s *stream) forwardWanted(b batch) error {
	for _, u := range b.updates {
		if s.sequences[u.shard] >= u.to {
			continue
		}
		s.passed[u.shard] = max(s.passed[u.shard], u.to)
		// The client holds nothing of the shard, so no update can lead on from there.
		if s.sequences[u.shard] == 0 {
			if err := s.sendWanted(s.hub.store.Snapshot(u.shard)); err != nil {
				return err
			}
			continue
		}
		parts, err := u.parts()
		if err != nil {
			return status.Errorf(codes.Internal, "shard %d: %v", u.shard, err)
		}
		frames, err := parts.Cut(s.sequences[u.shard], s.wanted.wants)
		if err != nil {
			return status.Errorf(codes.Internal, "shard %d: %v", u.shard, err)
		}
		if frames == nil {
			continue
		}
		s.sequences[u.shard] = u.to
		if err := s.send(frames...); err != nil {
			return err
		}
	}
	if len(b.narrowed) > 0 {
		return s.send(b.narrowed...)
	}
	return nil
}

// lifeSign is the heartbeat of a narrowed stream, which has no digests to compare.
var lifeSign = mustEncode(&pb.StreamResponse{Message: &pb.StreamResponse_Heartbeat{Heartbeat: &pb.Heartbeat{}}})

// resubscribe replaces the subscription. It sends each shard in which the subscriptions differ as a
// full update, which removes what is no longer subscribed to. It also sends shards with an update
// still to come: the update may remove an object that only the old subscription has, and would then
// not be sent to the client.
func (s *stream) resubscribe(p *pb.Subscription) error {
	now, err := newSubscription(p)
	if err != nil {
		return err
	}
	old := s.wanted
	s.wanted = now
	if old == nil {
		s.passed = slices.Clone(s.sequences)
	}
	count := s.hub.store.Shards()
	touched := old.shards(count)
	for shard := range now.shards(count) {
		touched[shard] = struct{}{}
	}
	var shards []uint32
	for shard := range touched {
		snapshot := s.hub.store.Snapshot(shard)
		if snapshot.Sequence() > s.passed[shard] || snapshot.Has(func(key model.ServiceKey) bool { return old.wants(key) != now.wants(key) }) {
			shards = append(shards, shard)
		}
	}
	// The stream waits for its turn like a new one.
	s.beats = time.NewTicker(s.hub.options.Heartbeat)
	defer s.beats.Stop()
	if err := s.sendAllWanted(shards); err != nil {
		return err
	}
	return s.inSync(s.hub.store.Seen(), false)
}
