package fanout

import (
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/store"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

const (
	// bucketTimeout is how long a client may take to answer a query for digests.
	bucketTimeout = 30 * time.Second
	// admissionWait is how long a client that needs whole shards waits for its turn. After that it
	// is asked to come back later.
	admissionWait = 30 * time.Second
)

// start sends the initial state, which is the difference to what the client holds. reached has the
// resource versions that the state includes at least.
func (s *stream) start(client held, reached model.ResourceVersions) error {
	h := s.hub
	s.beats = time.NewTicker(h.options.Heartbeat)
	defer s.beats.Stop()
	if err := s.welcome(); err != nil {
		return err
	}
	if err := s.sendServers(); err != nil {
		return err
	}
	allNodes, err := s.startNodes(client)
	if err != nil {
		return err
	}
	how, begin := "resume", s.resume
	switch {
	case s.wanted != nil:
		how, begin = "narrowed", s.startWanted
	case client.nothing():
		how, begin = "cold", s.startCold
	}
	h.metrics.starts.WithLabelValues(how).Inc()
	// ahead reports that the client holds the same content as the store and has seen newer resource
	// versions. The client is in sync. But until the store has reached those versions, its changes
	// may lie in the client's past, such as a change that the client has already seen undone.
	ahead := false
	if err := s.awaitVersions(client.versions, func(model.ResourceVersions) (bool, error) {
		ahead = s.wanted == nil && s.confirm(client)
		return ahead, nil
	}); err != nil {
		return err
	}
	if !ahead {
		if err := begin(client); err != nil {
			return err
		}
		if err := s.sendWhole(); err != nil {
			return err
		}
	}
	s.join()
	if err := s.sendReached(reached); err != nil {
		return err
	}
	if err := s.inSync(h.store.Seen(), allNodes); err != nil || !ahead {
		return err
	}
	if err := s.awaitVersions(client.versions, func(now model.ResourceVersions) (bool, error) {
		return false, s.sendNewer(client.versions, now)
	}); err != nil {
		return err
	}
	s.position, _ = h.ring.now()
	return s.overtaken()
}

func (s *stream) welcome() error {
	h := s.hub
	w := &pb.Welcome{
		Epoch: h.store.Epoch(), ShardCount: h.store.Shards(),
		ServerName: h.options.ServerName, ServerVersion: h.options.ServerVersion,
		HeartbeatIntervalMs: uint32(h.options.Heartbeat.Milliseconds()),
	}
	if h.options.Upstream != nil {
		w.Path, _ = h.options.Upstream.Path()
	}
	w.Path = append(w.Path[:len(w.Path):len(w.Path)], h.store.Epoch())
	f, err := wire.Encode(&pb.StreamResponse{Message: &pb.StreamResponse_Welcome{Welcome: w}})
	if err != nil {
		return status.Errorf(codes.Internal, "welcome: %v", err)
	}
	return s.send(f)
}

func (s *stream) inSync(seen model.ResourceVersions, allNodes bool) error {
	s.synced.Store(true)
	return s.send(mustEncode(&pb.StreamResponse{Message: &pb.StreamResponse_InSync{InSync: &pb.InSync{
		Sequences: s.sequences, ResourceVersions: wire.ResourceVersionsToProto(seen), AllNodes: allNodes,
	}}}))
}

// startNodes sends an agent its Node, and a relay all Nodes unless it holds the same ones.
func (s *stream) startNodes(client held) (all bool, err error) {
	if s.kind != pb.ClientKind_CLIENT_KIND_RELAY {
		if s.node == "" {
			return false, nil
		}
		return false, s.sendNode(s.node)
	}
	nodes := s.hub.store.Nodes()
	if model.NodesDigest(nodes) == client.nodes {
		return false, nil
	}
	for _, n := range nodes {
		f, err := wire.EncodeNode(n.Name, n)
		if err != nil {
			return false, status.Errorf(codes.Internal, "node %s: %v", n.Name, err)
		}
		if err := s.send(f); err != nil {
			return false, err
		}
	}
	return true, nil
}

// startCold marks all shards to be sent whole.
func (s *stream) startCold(held) error {
	for shard := range s.hub.store.Shards() {
		snapshot := s.hub.store.Snapshot(shard)
		if snapshot.Len() == 0 {
			s.sequences[shard] = snapshot.Sequence()
			continue
		}
		s.whole[shard] = struct{}{}
	}
	return nil
}

// sendWhole sends the shards that the client gets whole, in its turn.
func (s *stream) sendWhole() error {
	h := s.hub
	if len(s.whole) == 0 {
		return nil
	}
	var size int64
	for shard := range s.whole {
		frames, err := h.catchUp(h.store.Snapshot(shard), 0, s.compressed)
		if err != nil {
			return err
		}
		size += int64(wire.Bytes(frames))
	}
	return s.inTurn(size, func() error {
		for _, shard := range slices.Sorted(maps.Keys(s.whole)) {
			if err := s.sendUpTo(h.store.Snapshot(shard), 0); err != nil {
				return err
			}
		}
		clear(s.whole)
		return nil
	})
}

// inTurn calls send when it is the client's turn to be sent that many bytes. A client that waits
// too long is asked to come back later. A client that does not accept its bytes loses its turn, but
// send goes on.
func (s *stream) inTurn(size int64, send func() error) error {
	h := s.hub
	turn := h.cold.ask(s.identity(), size)
	defer turn.end()
	if err := s.awaitTurn(turn); err != nil {
		return err
	}
	defer turn.watch(s.transport.Taken, h.metrics.stalledTurns.Inc)()
	return send()
}

func (s *stream) awaitTurn(turn *turn) error {
	h := s.hub
	h.metrics.admissionWaiting.Inc()
	defer h.metrics.admissionWaiting.Dec()
	timeout := time.NewTimer(admissionWait)
	defer timeout.Stop()
	begun, err := s.wait(turn.begun, timeout.C)
	if err != nil || begun {
		return err
	}
	h.metrics.starts.WithLabelValues("refused").Inc()
	h.lateLogged.Do(func() {
		h.log.Warn("A client that needs whole shards did not get its turn and is asked to come back later; more are only counted for a "+
			"while; if this goes on, raise --max-cold-sync-bytes or add replicas", "node", s.node, "peer", s.peer, "waited", admissionWait)
	})
	return wire.RetryLater(status.Errorf(codes.ResourceExhausted,
		"too many nodes need all of the state, or of shards, at once: this one has waited for %v", admissionWait),
		admissionWait/2+rand.N(admissionWait))
}

// resume sends a client that holds something what it lacks. Sequences decide for shards whose
// position is of this epoch and known. For the others digests decide: first the digest of the
// state; if it differs, those of the shards; if these differ, those of the shard's buckets.
func (s *stream) resume(client held) error {
	h := s.hub
	var unknown []uint32
	for shard := range h.store.Shards() {
		snapshot := h.store.Snapshot(shard)
		at, ok := client.position(h.store, snapshot)
		switch {
		case !ok:
			unknown = append(unknown, shard)
		case at == snapshot.Sequence():
			s.sequences[shard] = at
		default:
			if err := s.sendUpTo(snapshot, at); err != nil {
				return err
			}
		}
	}
	if len(unknown) == 0 {
		return nil
	}
	if digest, sequences := h.store.Digest(); client.in(h.store) && digest == client.digest {
		for _, shard := range unknown {
			s.sequences[shard] = sequences[shard]
		}
		return nil
	}
	if !s.buckets {
		for _, shard := range unknown {
			s.whole[shard] = struct{}{}
		}
		return nil
	}
	digests, err := s.askDigests()
	if err != nil {
		return err
	}
	var ask []uint32
	for _, shard := range unknown {
		switch snapshot := h.store.Snapshot(shard); digests[shard] {
		case snapshot.Digest():
			s.sequences[shard] = snapshot.Sequence()
		case model.Digest{}:
			s.whole[shard] = struct{}{}
		default:
			ask = append(ask, shard)
		}
	}
	return s.askBuckets(ask)
}

// awaitVersions waits until the store has reached the resource versions that the client has seen,
// for MaxBehindWait at most. Initially and after each publish, it calls progress with the versions
// that the store has reached, and returns early if progress returns true. It waits even for a
// client that has waited on an earlier stream, as that stream may have been cut off during the
// wait.
func (s *stream) awaitVersions(seen model.ResourceVersions, progress func(reached model.ResourceVersions) (enough bool, err error)) error {
	h := s.hub
	// The source has no versions.
	if h.store.Reached() == (model.ResourceVersions{}) {
		return nil
	}
	timeout := time.NewTimer(h.options.MaxBehindWait)
	defer timeout.Stop()
	for waited := false; ; waited = true {
		h.mu.Lock()
		published := h.reached
		h.mu.Unlock()
		reached := h.store.Reached()
		done := reached.Max(seen) == reached
		if !done {
			var err error
			if done, err = progress(reached); err != nil {
				return err
			}
		}
		if done {
			if waited && !s.synced.Load() {
				h.metrics.behindWaits.WithLabelValues("caught_up").Inc()
			}
			return nil
		}
		ok, err := s.wait(published, timeout.C)
		if err != nil {
			return err
		}
		if !ok && s.synced.Load() && s.atPresent() {
			return nil // nothing is held back
		}
		if !ok {
			h.metrics.behindWaits.WithLabelValues("gave_up").Inc()
			h.behindLogged.Do(func() {
				h.log.Warn("A client has seen newer state than this server, which did not catch up in time: serving what there is; "+
					"check this server's watch of the API server", "node", s.node, "waited", h.options.MaxBehindWait,
					"client_services", seen.Services, "services", reached.Services, "client_slices", seen.Slices, "slices", reached.Slices)
			})
			return nil
		}
	}
}

// sendNewer sends a client that has seen newer resource versions what is certainly new to it:
// Nodes, and shards without a change of a kind that the store is behind in. Objects of other kinds
// are at least as new in the store as what the client has seen.
//
// Kinds are told apart because the versions that a client has seen come from its servers' lists. A
// server that has just listed a quiet kind knows its newest version at once. A watch learns only
// once a minute how far a quiet kind has come. A client cannot claim less than the list's version:
// the last change before the list may have been a removal, which a list does not show.
func (s *stream) sendNewer(seen, reached model.ResourceVersions) error {
	if err := s.sendNodes(); err != nil {
		return err
	}
	for shard := range s.hub.store.Shards() {
		snapshot, from := s.hub.store.Snapshot(shard), s.sequences[shard]
		if from == snapshot.Sequence() || mayBeOld(snapshot.Since(from), seen, reached) {
			continue
		}
		if err := s.bring(snapshot); err != nil {
			return err
		}
	}
	return nil
}

// mayBeOld reports whether an update changes an object of a kind that the store is behind in.
// reached has the store's resource versions, and seen those of the client.
func mayBeOld(u *model.Update, seen, reached model.ResourceVersions) bool {
	behind := map[model.Kind]bool{
		model.KindService: seen.Services > reached.Services,
		model.KindSlice:   seen.Slices > reached.Slices,
	}
	return u.Full || len(u.Services) > 0 && behind[model.KindService] || len(u.Slices) > 0 && behind[model.KindSlice] ||
		slices.ContainsFunc(u.Removed, func(key model.Key) bool { return behind[key.Kind] })
}

// confirm reports whether the client holds the same content as the store. If so, it sets the
// stream's sequences to the store's.
func (s *stream) confirm(client held) bool {
	digest, sequences := s.hub.store.Digest()
	if !client.in(s.hub.store) || client.digest != digest {
		return false
	}
	s.sequences = sequences
	return true
}

// atPresent reports whether the client has been sent everything.
func (s *stream) atPresent() bool {
	for shard, sequence := range s.sequences {
		if s.hub.store.Snapshot(uint32(shard)).Sequence() != sequence {
			return false
		}
	}
	return true
}

// askDigests asks the client for the digests of its shards and waits for them.
func (s *stream) askDigests() ([]model.Digest, error) {
	s.ask(func() { s.digestsAsked = true })
	if err := s.send(mustEncode(&pb.StreamResponse{Message: &pb.StreamResponse_DigestQuery{DigestQuery: &pb.DigestQuery{}}})); err != nil {
		return nil, err
	}
	timeout := time.NewTimer(bucketTimeout)
	defer timeout.Stop()
	for {
		ok, err := s.wait(s.pokes, timeout.C)
		if err != nil {
			return nil, err
		}
		if !ok {
			return nil, status.Errorf(codes.DeadlineExceeded, "no answer to digest_query within %v", bucketTimeout)
		}
		s.mu.Lock()
		digests := s.digests
		s.digests = nil
		s.mu.Unlock()
		if digests != nil {
			return digests, nil
		}
	}
}

// askBuckets asks for the digests of the client's buckets in some shards, and sends the buckets
// that differ.
func (s *stream) askBuckets(shards []uint32) error {
	if len(shards) == 0 {
		return nil
	}
	waiting := make(map[uint32]struct{}, len(shards))
	for _, shard := range shards {
		waiting[shard] = struct{}{}
	}
	s.mu.Lock()
	s.asked = maps.Clone(waiting)
	s.mu.Unlock()
	if err := s.send(mustEncode(&pb.StreamResponse{Message: &pb.StreamResponse_BucketQuery{
		BucketQuery: &pb.BucketQuery{Shards: shards},
	}})); err != nil {
		return err
	}
	timeout := time.NewTimer(bucketTimeout)
	defer timeout.Stop()
	for len(waiting) > 0 {
		ok, err := s.wait(s.pokes, timeout.C)
		if err != nil {
			return err
		}
		if !ok {
			return status.Errorf(codes.DeadlineExceeded, "no answer to bucket_query for %d shards within %v", len(waiting), bucketTimeout)
		}
		s.mu.Lock()
		answers := s.resyncs
		s.resyncs, s.waiting = nil, 0
		s.mu.Unlock()
		for shard, r := range answers {
			if r.whole || r.buckets != nil { // the client may ask for objects, too
				delete(waiting, shard)
			}
		}
		if err := s.resyncAll(answers); err != nil {
			return err
		}
	}
	return nil
}

func (s *stream) sendUpTo(snapshot *store.Snapshot, from uint64) error {
	frames, err := s.hub.catchUp(snapshot, from, s.compressed)
	if err != nil {
		return err
	}
	s.sequences[snapshot.Shard()] = snapshot.Sequence()
	return s.send(frames...)
}

// resyncAll answers requests. Each shard has one request, into which all of the client's are
// merged.
func (s *stream) resyncAll(requests map[uint32]*pending) error {
	for _, shard := range slices.Sorted(maps.Keys(requests)) {
		if err := s.resync(shard, requests[shard]); err != nil {
			return err
		}
	}
	return nil
}

// resync sends what the client asks for again, as of a snapshot: named objects, buckets that
// differ, or the whole shard.
func (s *stream) resync(shard uint32, r *pending) error {
	snapshot := s.hub.store.Snapshot(shard)
	switch {
	case s.wanted != nil:
		return s.sendWanted(snapshot)
	case r.whole && !s.synced.Load():
		s.whole[shard] = struct{}{}
		return nil
	case r.whole:
		return s.sendUpTo(snapshot, 0)
	}
	// If nothing of the shard has been sent yet, its initial state is still to come and includes
	// the objects.
	if len(r.keys) > 0 && (s.synced.Load() || s.sequences[shard] > 0) {
		frames, err := s.selected(snapshot, r.keys)
		if err != nil {
			return err
		}
		// The answer has the objects as of the snapshot, so the client must reach the snapshot
		// first.
		if err := s.bring(snapshot); err != nil {
			return err
		}
		if err := s.send(frames...); err != nil {
			return err
		}
	}
	if r.buckets != nil {
		digests, err := model.SplitDigests(r.buckets.GetBucketDigests())
		if err != nil {
			return status.Errorf(codes.InvalidArgument, "resync with %v", err)
		}
		return s.sendBuckets(snapshot, digests)
	}
	return nil
}

// sendBuckets sends the buckets of a snapshot whose digests differ from the client's.
func (s *stream) sendBuckets(snapshot *store.Snapshot, digests []model.Digest) error {
	var differ []uint32
	for i, digest := range snapshot.Buckets() {
		if digest != digests[i] {
			differ = append(differ, uint32(i))
		}
	}
	if len(differ) > model.Buckets/2 {
		if !s.synced.Load() {
			s.whole[snapshot.Shard()] = struct{}{}
			return nil
		}
		return s.sendUpTo(snapshot, 0)
	}
	// The client's digests may be older than its position. If a change sent since then is undone in
	// the snapshot, the digests match although the client has the change.
	if s.synced.Load() {
		if err := s.bring(snapshot); err != nil {
			return err
		}
	}
	s.sequences[snapshot.Shard()] = snapshot.Sequence()
	if len(differ) == 0 {
		return nil
	}
	frames, err := s.hub.inBuckets(snapshot, differ, s.compressed)
	if err != nil {
		return err
	}
	return s.send(frames...)
}

func (s *stream) selected(snapshot *store.Snapshot, named []*pb.ObjectKey) ([]wire.Frame, error) {
	keys := make([]model.Key, 0, len(named))
	for _, k := range named {
		key, err := wire.KeyFromProto(k)
		if err != nil {
			return nil, status.Errorf(codes.InvalidArgument, "resync: %v", err)
		}
		keys = append(keys, key)
	}
	slices.SortFunc(keys, model.Key.Compare)
	keys = slices.Compact(keys)
	return encodeParts(snapshot.Select(keys))
}
