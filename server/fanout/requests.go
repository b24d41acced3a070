package fanout

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/store"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

const (
	// maxKeys bounds the objects that a Resync may name. A client that lacks more asks for buckets
	// or for the shard.
	maxKeys = 1024
	// maxWaiting bounds the memory, in bytes, of a session's unanswered Resyncs, in addition to one
	// Resync for each shard. It has room for one of maxKeys ordinary names.
	maxWaiting = 256 << 10
	// keyBytes is about the memory, in bytes, of a key without its names, in a list that grows.
	keyBytes = 2 * (40 + 2*16)
	// resyncBytes is about the size of a Resync of one shard with the digests of its buckets.
	resyncBytes = 2 * model.HashSize * model.Buckets
	// maxPositions bounds the positions in an Ack. Clients send fewer.
	maxPositions = 4096
	// maxBuckets is how many buckets of a shard are sent. If more differ, the whole shard is sent.
	maxBuckets = model.Buckets / 2
)

// requests is what a session's goroutine is to send in addition to the ring's entries. The
// session's mu guards it. Its invariants:
//
//  1. size is about the bytes of the Resyncs in resyncs and owed, and at most maxWaiting and
//     resyncBytes for each shard.
//  2. While the session waits for a turn, owed is what that turn is for. resyncs arrived later.
//  3. Only the session's goroutine uses owed, and without mu.
type requests struct {
	nodes         map[string]struct{} // names of Nodes that have changed
	resyncs, owed map[uint32]*resync  // by shard
	size          int
	compare       bool // whether the client asks for digests
	back          bool // whether the client is to be told what it has seen, which may be less now
}

func (r *requests) addNode(name string) {
	if r.nodes == nil {
		r.nodes = make(map[string]struct{})
	}
	r.nodes[name] = struct{}{}
}

// addResync merges a Resync into those of its shard. keys are those that it names. It returns false
// if there is no room for it.
func (r *requests) addResync(m *pb.Resync, keys []model.Key, shards uint32) bool {
	size := proto.Size(m) + keyBytes*len(keys) + resyncBytes/4
	if r.size+size > maxWaiting+int(shards)*resyncBytes {
		return false
	}
	if r.resyncs == nil {
		r.resyncs = make(map[uint32]*resync)
	}
	if r.resyncs[m.GetShard()] == nil {
		r.resyncs[m.GetShard()] = &resync{}
	}
	r.resyncs[m.GetShard()].add(m, keys)
	r.resyncs[m.GetShard()].size += size
	r.size += size
	return true
}

// owe adds what is to be sent of a shard to owed.
func (r *requests) owe(shard uint32, more *resync) {
	if r.owed == nil {
		r.owed = make(map[uint32]*resync)
	}
	if before := r.owed[shard]; before != nil {
		more.whole = more.whole || before.whole
		more.buckets = cmp.Or(more.buckets, before.buckets)
		more.keys = append(more.keys, before.keys...)
		more.size += before.size
	}
	r.owed[shard] = more
}

// resync is what a client is to be sent of a shard, in addition to what has changed since the
// client's position.
type resync struct {
	whole   bool       // the whole shard
	buckets *pb.Resync // the latest Resync with digests; nil if there is none
	keys    []model.Key
	size    int // what it counts for in the size of the requests
}

func (r *resync) add(m *pb.Resync, keys []model.Key) {
	switch {
	case len(keys) > 0:
		r.keys = append(r.keys, keys...)
	case len(m.GetBucketDigests()) > 0:
		r.buckets = m
	default:
		r.whole = true
	}
}

// named returns the objects that the client has named, each once.
func (r *resync) named(snapshot *store.Snapshot) *model.Update {
	slices.SortFunc(r.keys, model.Key.Compare)
	r.keys = slices.Compact(r.keys)
	return snapshot.Select(r.keys)
}

// differing returns the buckets of a snapshot whose digests differ from the client's, or whole if
// the client is to be sent the whole shard.
func (r *resync) differing(snapshot *store.Snapshot) (differ []uint32, whole bool, err error) {
	if r.whole || r.buckets == nil {
		return nil, r.whole, nil
	}
	digests, err := model.SplitDigests(r.buckets.GetBucketDigests())
	if err != nil {
		return nil, false, invalid("invalid Resync: %v", err)
	}
	for i, digest := range snapshot.Buckets() {
		if digest != digests[i] {
			differ = append(differ, uint32(i))
		}
	}
	return differ, len(differ) > maxBuckets, nil
}

// queries are the server's questions to a client, and the answer to one of them. The session's mu
// guards them. Each question is asked at most once, and has one answer.
type queries struct {
	digests bool                // whether a DigestQuery is open
	answer  []model.Digest      // the answer to the DigestQuery
	buckets map[uint32]struct{} // shards of the BucketQuery that are not answered
}

// closeDigests accepts the answer to the DigestQuery. It returns false if none is open.
func (q *queries) closeDigests(answer []model.Digest) bool {
	if !q.digests {
		return false
	}
	q.digests, q.answer = false, answer
	return true
}

// closeBuckets returns true if a Resync is the first answer to a BucketQuery for its shard. Later
// ones for the shard are requests of the client's own.
func (q *queries) closeBuckets(r *pb.Resync) bool {
	if _, open := q.buckets[r.GetShard()]; !open || len(r.GetKeys()) > 0 {
		return false
	}
	delete(q.buckets, r.GetShard())
	return true
}

// request calls what under mu, to leave a request for the session's goroutine, and wakes the
// goroutine. It returns the result of what.
func (s *Session) request(what func() bool) bool {
	s.mu.Lock()
	ok := what()
	s.mu.Unlock()
	notify(s.pokes)
	return ok
}

// receive processes a message from the client. It does not wait.
func (s *Session) receive(r *pb.StreamRequest) error {
	if !s.greeted {
		return s.receiveHello(r.GetHello())
	}
	if !s.admitted.Load() {
		return invalid("a message arrived before the client was admitted: wait for Welcome")
	}
	if !s.lent.messages.AllowN(time.Now(), 1+len(r.GetAck().GetPositions())/positionsPerMessage) {
		return status.Errorf(codes.ResourceExhausted, "more than %d messages per second: send fewer", messagesPerSecond)
	}
	switch m := r.GetMessage().(type) {
	case *pb.StreamRequest_Ack:
		return s.receiveAck(m.Ack)
	case *pb.StreamRequest_Nack:
		s.receiveNack(m.Nack)
	case *pb.StreamRequest_Resync:
		return s.receiveResync(m.Resync)
	case *pb.StreamRequest_Digests:
		return s.receiveDigests(m.Digests)
	case *pb.StreamRequest_DigestQuery:
		if !s.lent.resyncs.Allow() {
			return errTooManyResyncs
		}
		s.request(func() bool { s.requests.compare = true; return true })
	case *pb.StreamRequest_Hello:
		return invalid("a second Hello arrived: open a new stream instead")
	}
	return nil
}

func (s *Session) receiveHello(m *pb.Hello) error {
	if m == nil {
		return invalid("the first message must be Hello")
	}
	s.greeted = true
	hello, err := newGreeting(s.transport.Context(), m)
	if err != nil {
		return err
	}
	s.hello <- &hello
	return nil
}

func (s *Session) receiveDigests(m *pb.Digests) error {
	digests, err := model.SplitDigests(m.GetDigests())
	if shards := s.hub.store.Shards(); err != nil || uint32(len(digests)) != shards {
		return invalid("invalid Digests: %d bytes: send %d bytes for each of %d shards",
			len(m.GetDigests()), model.HashSize, shards)
	}
	if !s.request(func() bool { return s.queries.closeDigests(digests) }) {
		return invalid("unexpected Digests: send them only to answer a DigestQuery")
	}
	return nil
}

func (s *Session) receiveAck(a *pb.Ack) error {
	if n := len(a.GetPositions()); n > maxPositions {
		return invalid("invalid Ack: %d positions: send at most %d", n, maxPositions)
	}
	for _, p := range a.GetPositions() {
		if p.GetShard() >= s.hub.store.Shards() || p.GetSequence() > s.hub.store.Snapshot(p.GetShard()).Sequence() {
			return invalid("invalid Ack: shard %d at sequence %d was never sent",
				p.GetShard(), p.GetSequence())
		}
	}
	if a.GetNodes() > maxRelayNodes {
		return invalid("invalid Ack: %d nodes: a relay may have at most %d", a.GetNodes(), maxRelayNodes)
	}
	s.hub.metrics.acks.Inc()
	s.reports.ack(a)
	return nil
}

// receiveNack reports a Nack, and counts and logs it unless it is resolved.
func (s *Session) receiveNack(m *pb.Nack) {
	n := newOpenNack(&s.client, m)
	if m.GetResolved() {
		s.reports.resolve(n)
		return
	}
	s.reports.nack(n)
	if n.warning != 0 {
		s.lent.warningsLogged.Do(func() {
			s.hub.log.Warn("Something should be mended on a node", "node", n.key.Name, "warning", wire.WarningName(n.warning),
				"reason", n.Reason)
		})
		return
	}
	s.hub.metrics.nacks.Inc()
	s.lent.nacksLogged.Do(func() {
		s.hub.log.Warn("Node cannot program an object", "node", s.node, "object", n.Object, "reason", n.Reason,
			"behind", n.NodeName, "shard", m.GetShard(), "sequence", m.GetSequence())
	})
}

// receiveResync validates a Resync and leaves it for the session's goroutine.
func (s *Session) receiveResync(r *pb.Resync) error {
	shards := s.hub.store.Shards()
	switch n := len(r.GetBucketDigests()); {
	case r.GetShard() >= shards:
		return invalid("invalid Resync of shard %d: the server has %d shards", r.GetShard(), shards)
	case n != 0 && n != model.Buckets*model.HashSize:
		return invalid("invalid Resync: %d bytes of bucket_digests: send %d digests of %d bytes",
			n, model.Buckets, model.HashSize)
	case len(r.GetKeys()) > maxKeys:
		return invalid("invalid Resync: %d objects: name at most %d, or request the shard",
			len(r.GetKeys()), maxKeys)
	}
	keys, err := keysOf(r)
	if err != nil {
		return err
	}
	s.mu.Lock()
	asked := s.queries.closeBuckets(r)
	s.mu.Unlock()
	// An answer to a BucketQuery is neither counted nor limited, as it is no sign of trouble.
	if !asked {
		if err := s.countResync(r); err != nil {
			return err
		}
	}
	r.Reason = ""
	if !s.request(func() bool { return s.requests.addResync(r, keys, shards) }) {
		return status.Error(codes.ResourceExhausted, "too many resyncs are waiting: read the answers to earlier ones first")
	}
	return nil
}

// keysOf returns the keys that a Resync names.
func keysOf(r *pb.Resync) ([]model.Key, error) {
	keys := make([]model.Key, 0, len(r.GetKeys()))
	for _, k := range r.GetKeys() {
		key, err := wire.KeyFromProto(k)
		if err != nil {
			return nil, invalid("invalid Resync: %v", err)
		}
		keys = append(keys, key)
	}
	return keys, nil
}

// countResync counts and logs a Resync that answers no question. It returns an error if the client
// may not send it.
func (s *Session) countResync(r *pb.Resync) error {
	if len(r.GetKeys()) == 0 && !s.synced.Load() {
		return invalid("unexpected Resync of shard %d before InSync: answer a BucketQuery once "+
			"for each of its shards", r.GetShard())
	}
	if !s.lent.resyncs.Allow() {
		return errTooManyResyncs
	}
	s.hub.metrics.resyncs.Inc()
	s.lent.resyncsLogged.Do(func() {
		s.hub.log.Warn("Client requested a resync", "node", s.node, "shard", r.GetShard(),
			"keys", len(r.GetKeys()), "reason", clip(r.GetReason()))
	})
	return nil
}

func (s *Session) answer() error {
	s.mu.Lock()
	nodes, compare := s.requests.nodes, s.requests.compare
	s.requests.nodes, s.requests.compare = nil, false
	s.mu.Unlock()
	if err := s.sendChangedNodes(nodes); err != nil {
		return err
	}
	if err := s.settle(); err != nil {
		return err
	}
	if compare {
		return s.sendDigests()
	}
	return nil
}

// settle sends what the client is owed if it is the client's turn. Otherwise it asks for a turn,
// unless the session waits for one. It does not wait.
func (s *Session) settle() error {
	if s.turn == nil {
		s.mu.Lock()
		for shard, r := range s.requests.resyncs {
			s.requests.owe(shard, r)
		}
		s.requests.resyncs = nil
		s.mu.Unlock()
		if len(s.requests.owed) == 0 {
			return nil
		}
		bytes, err := s.owedBytes()
		if err != nil {
			return err
		}
		s.turn = s.hub.turns.ask(s.identity(), bytes)
	}
	select {
	case <-s.turn.begun:
	default:
		return nil
	}
	defer s.endTurn()
	defer s.turn.watch(s.transport.Taken, s.hub.metrics.stalledTurns.Inc)()
	return s.sendOwed()
}

// turnBegun returns the channel that is closed when it is the client's turn; nil if the session
// waits for none.
func (s *Session) turnBegun() <-chan struct{} {
	if s.turn == nil {
		return nil
	}
	return s.turn.begun
}

func (s *Session) endTurn() {
	if s.turn != nil {
		s.turn.end()
		s.turn = nil
	}
}

// owedBytes returns about how many bytes the client is owed. It encodes nothing that other streams
// do not share.
func (s *Session) owedBytes() (total int64, err error) {
	for shard, r := range s.requests.owed {
		snapshot := s.hub.store.Snapshot(shard)
		frames, _, err := s.framesOf(snapshot, r)
		if err != nil {
			return 0, err
		}
		total += int64(wire.Bytes(frames))
		if len(r.keys) > 0 {
			total += int64(r.named(snapshot).Memory())
		}
	}
	return total, nil
}

// sendOwed sends what the client is owed, as it is now.
func (s *Session) sendOwed() error {
	for _, shard := range slices.Sorted(maps.Keys(s.requests.owed)) {
		snapshot, r := s.hub.store.Snapshot(shard), s.requests.owed[shard]
		frames, whole, err := s.framesOf(snapshot, r)
		if err != nil {
			return err
		}
		if !whole && len(r.keys) > 0 {
			objects, err := wire.EncodeParts(s.hub.asSeen(r.named(snapshot)))
			if err != nil {
				return err
			}
			frames = slices.Concat(frames, objects)
		}
		s.sequences[shard] = snapshot.Sequence()
		if err := s.send(frames...); err != nil {
			return err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range s.requests.owed {
		s.requests.size -= r.size
	}
	s.requests.owed = nil
	return nil
}

// framesOf returns the frames that bring the client to a snapshot and answer a resync, except for
// the objects that it names. whole reports that they are of the whole shard, which includes those
// objects.
func (s *Session) framesOf(snapshot *store.Snapshot, r *resync) (frames []wire.Frame, whole bool, err error) {
	differ, whole, err := r.differing(snapshot)
	if err != nil {
		return nil, false, err
	}
	from := s.sequences[snapshot.Shard()]
	switch {
	case whole:
		from = 0
	case from == snapshot.Sequence(), from == 0 && r.buckets != nil:
		// A client without a position holds what its digests say.
		frames, err = s.hub.inBuckets(snapshot, differ, s.compressed)
		return frames, false, err
	}
	// The client's digests may be older than its position. If a change sent since then is undone in
	// the snapshot, the digests match although the client has the change.
	if frames, err = s.hub.catchUp(snapshot, from, s.compressed); err != nil || whole {
		return frames, whole, err
	}
	buckets, err := s.hub.inBuckets(snapshot, differ, s.compressed)
	return slices.Concat(frames, buckets), false, err
}

func (s *Session) sendChangedNodes(names map[string]struct{}) error {
	for name := range names {
		if err := s.sendNode(name); err != nil {
			return err
		}
	}
	return nil
}

// sendDigests sends the digests of all shards, after bringing the client to the positions that they
// describe.
func (s *Session) sendDigests() error {
	var digests []model.Digest
	for shard := range s.hub.store.Shards() {
		snapshot := s.hub.store.Snapshot(shard)
		if err := s.bring(snapshot); err != nil {
			return err
		}
		digests = append(digests, snapshot.Digest())
	}
	return s.sendMessage(&pb.StreamResponse{Message: &pb.StreamResponse_Digests{Digests: &pb.Digests{
		Sequences: s.sequences, Digests: model.JoinDigests(digests),
	}}})
}
