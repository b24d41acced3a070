package fanout

import (
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/slicecast/slicecast/internal/model"
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

// lifeSign is a heartbeat without digests, for a client that waits for its state and has none to
// compare.
var lifeSign = mustEncode(&pb.StreamResponse{Message: &pb.StreamResponse_Heartbeat{Heartbeat: &pb.Heartbeat{}}})

// startup is a session while it brings its client in sync. A client that waits is sent heartbeats,
// as one that hears nothing connects to another server.
type startup struct {
	*Session
	beats *time.Ticker
}

// start sends the initial state, which is the difference to what the client holds.
func (s *Session) start(state clientState) error {
	up := &startup{Session: s, beats: time.NewTicker(s.hub.options.Heartbeat)}
	defer up.beats.Stop()
	if own := s.hub.store.Cluster(); own != 0 && state.cluster != 0 && own != state.cluster {
		state.versions = model.ResourceVersions{}
	}
	if err := s.sendWelcome(); err != nil {
		return err
	}
	if err := s.sendServers(); err != nil {
		return err
	}
	allNodes, nodeHeld, err := up.sendOrHoldNodes(state)
	if err != nil {
		return err
	}
	s.countStart(state)
	reached, ahead, err := up.awaitStore(state)
	if err != nil {
		return err
	}
	if !ahead {
		if err := up.sendState(state); err != nil {
			return err
		}
	}
	s.reports.join()
	if err := s.sendReached(reached); err != nil {
		return err
	}
	var held model.ResourceVersions // until the server has caught up, or gives up
	if ahead {
		held = state.content()
	}
	if nodeHeld {
		held.Nodes = state.versions.Nodes
	}
	if err := s.sendInSync(allNodes, s.hub.store.Seen().Max(held)); err != nil || held == (model.ResourceVersions{}) {
		return err
	}
	return up.followAhead(held)
}

// sendOrHoldNodes sends the Nodes that the client follows, unless it has seen newer ones. A server
// that is behind may have an older Node, or not have it yet.
//
// An agent's Node is then held until the server has caught up, as it must delay nothing else. A
// relay waits, because its InSync says that there are no other Nodes. all reports that.
func (up *startup) sendOrHoldNodes(state clientState) (all, held bool, err error) {
	_, reached := up.hub.ring.now()
	if state.versions.Nodes <= reached.Nodes {
		all, err = up.sendNodes(state)
		return all, false, err
	}
	if up.isRelay() {
		waitFor := model.ResourceVersions{Nodes: state.versions.Nodes}
		_, _, gaveUp, err := up.awaitVersions(waitFor, func(model.ResourceVersions) (bool, error) { return false, nil })
		if err == nil {
			all, err = up.sendNodes(state)
		}
		return all && !gaveUp, false, err
	}
	if up.node != "" {
		up.request(func() bool { up.requests.addNode(up.node); return true })
	}
	return false, up.node != "", nil
}

// sendNodes sends an agent or observer its own Node, if it has one, and a relay all Nodes, unless
// it holds them. all reports whether it has sent all Nodes.
func (s *Session) sendNodes(state clientState) (all bool, err error) {
	if !s.isRelay() {
		if s.node != "" {
			err = s.sendNode(s.node)
		}
		return false, err
	}
	nodes := s.hub.store.Nodes()
	if model.NodesDigest(nodes) == state.nodesDigest {
		return false, nil
	}
	for _, n := range nodes {
		if err := s.sendNode(n.Name); err != nil {
			return false, err
		}
	}
	return true, nil
}

func (s *Session) countStart(state clientState) {
	how := "resume"
	if state.empty() {
		how = "cold"
	}
	s.hub.metrics.starts.WithLabelValues(how).Inc()
}

func (s *Session) sendWelcome() error {
	h := s.hub
	w := &pb.Welcome{
		Epoch: h.store.Epoch(), ShardCount: h.store.Shards(),
		ServerName: h.options.ServerName, ServerVersion: h.options.ServerVersion,
		HeartbeatIntervalMs: uint32(h.options.Heartbeat.Milliseconds()), StaleMs: h.staleMs(), Cluster: h.store.Cluster(),
	}
	if h.upward != nil {
		w.Path, _ = h.upward.Path()
	}
	w.Path = append(w.Path[:len(w.Path):len(w.Path)], h.store.Epoch())
	return s.sendMessage(&pb.StreamResponse{Message: &pb.StreamResponse_Welcome{Welcome: w}})
}

// sendInSync sends an InSync, with the resource versions that the client has seen from now on.
func (s *Session) sendInSync(allNodes bool, seen model.ResourceVersions) error {
	s.synced.Store(true)
	return s.sendMessage(&pb.StreamResponse{Message: &pb.StreamResponse_InSync{InSync: &pb.InSync{
		Sequences: s.sequences, ResourceVersions: wire.ResourceVersionsToProto(seen), AllNodes: allNodes,
	}}})
}

// awaitStore waits until the store has reached the resource versions that the client has seen, for
// MaxBehindWait at most. It returns those that it has reached, and ahead early if the client holds
// the same content as the store. The client is then in sync, and the session's sequences are the
// store's. But until the store has reached those versions, its changes may lie in the client's
// past, such as a change that the client has already seen undone.
func (up *startup) awaitStore(state clientState) (reached model.ResourceVersions, ahead bool, err error) {
	reached, waited, gaveUp, err := up.awaitVersions(state.content(), func(model.ResourceVersions) (bool, error) {
		sequences, same := state.equals(up.hub.store)
		if ahead = same; ahead {
			up.sequences = sequences
		}
		return ahead, nil
	})
	switch {
	case err != nil:
	case gaveUp:
		up.countGivenUp(state.versions)
	case waited:
		up.hub.metrics.behindWaits.WithLabelValues("caught_up").Inc()
	}
	return reached, ahead, err
}

// followAhead sends a client that is ahead of the store what is certainly new to it, until the
// store has reached the versions that the client has seen, or for MaxBehindWait. Then it sends the
// rest.
func (up *startup) followAhead(seen model.ResourceVersions) error {
	_, _, gaveUp, err := up.awaitVersions(seen, func(reached model.ResourceVersions) (bool, error) {
		return false, up.sendNewer(seen, reached)
	})
	if err != nil {
		return err
	}
	if gaveUp && !up.atPresent() { // otherwise, nothing is held back
		up.countGivenUp(seen)
	}
	up.next, _ = up.hub.ring.now()
	if err := up.catchUp(); err != nil || !gaveUp {
		return err
	}
	up.request(func() bool {
		// The store may be behind for much longer than a client waits. An agent that is told that
		// its Node is gone asks load balancers to leave the node.
		maps.DeleteFunc(up.requests.nodes, func(name string, _ struct{}) bool { return up.hub.store.Node(name) == nil })
		up.requests.back = true
		return true
	})
	return nil
}

// awaitVersions waits until the store has reached the resource versions that the client has seen,
// for MaxBehindWait at most. Initially and after each publish, it calls progress with the versions
// that the store has reached, and returns early if progress returns true. It waits even for a
// client that has waited on an earlier stream, as that stream may have been cut off during the
// wait. It returns the versions that the snapshots include from now on, whether it has waited for a
// publish, and whether MaxBehindWait has passed.
//
// The versions are the ring's, because follow sends those that the ring reaches later, and a relay
// takes lower ones for a server that is behind.
func (up *startup) awaitVersions(
	seen model.ResourceVersions, progress func(reached model.ResourceVersions) (enough bool, err error),
) (reached model.ResourceVersions, waited, gaveUp bool, err error) {
	h := up.hub
	// The source has no versions.
	if h.store.Reached() == (model.ResourceVersions{}) {
		return reached, false, false, nil
	}
	timeout := time.NewTimer(h.options.MaxBehindWait)
	defer timeout.Stop()
	for ; ; waited = true {
		published := h.nextPublish()
		_, reached = h.ring.now()
		done := reached.Max(seen) == reached
		if !done {
			if done, err = progress(reached); err != nil {
				return reached, waited, false, err
			}
		}
		if done {
			return reached, waited, false, nil
		}
		if ok, err := up.wait(published, timeout.C); err != nil || !ok {
			return reached, waited, true, err
		}
	}
}

func (up *startup) countGivenUp(seen model.ResourceVersions) {
	h, reached := up.hub, up.hub.store.Reached()
	h.metrics.behindWaits.WithLabelValues("gave_up").Inc()
	h.logged.behind.Do(func() {
		h.log.Warn("Serving a client that has seen newer state than this server; check this server's watch of the API server",
			"node", up.node, "waited", h.options.MaxBehindWait,
			"client_services", seen.Services, "services", reached.Services,
			"client_slices", seen.Slices, "slices", reached.Slices)
	})
}

// sendNewer sends a client that has seen newer resource versions what is certainly new to it:
// Nodes, unless the store is behind in them, and shards without a change of a kind that the store
// is behind in. Objects of other kinds are at least as new in the store as what the client has
// seen.
//
// Kinds are told apart because the versions that a client has seen come from its servers' lists. A
// server that has just listed a quiet kind knows its newest version at once. A watch learns only
// once a minute how far a quiet kind has come. A client cannot claim less than the list's version:
// the last change before the list may have been a removal, which a list does not show.
func (up *startup) sendNewer(seen, reached model.ResourceVersions) error {
	if seen.Nodes <= reached.Nodes {
		up.mu.Lock()
		nodes := up.requests.nodes
		up.requests.nodes = nil
		up.mu.Unlock()
		if err := up.sendChangedNodes(nodes); err != nil {
			return err
		}
	}
	for shard := range up.hub.store.Shards() {
		snapshot, from := up.hub.store.Snapshot(shard), up.sequences[shard]
		if from == snapshot.Sequence() || mayBeOld(snapshot.Since(from), seen, reached) {
			continue
		}
		if err := up.bring(snapshot); err != nil {
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

func (up *startup) atPresent() bool {
	for shard, sequence := range up.sequences {
		if up.hub.store.Snapshot(uint32(shard)).Sequence() != sequence {
			return false
		}
	}
	return true
}

// sendState sends what the client lacks of all shards, in its turn.
func (up *startup) sendState(state clientState) error {
	if state.empty() {
		up.startEmpty()
	} else if err := up.resume(state); err != nil {
		return err
	}
	if err := up.settle(); err != nil || up.turn == nil {
		return err
	}
	if err := up.awaitTurn(); err != nil {
		return err
	}
	return up.settle()
}

// startEmpty starts a client that holds nothing. It is owed all shards with objects, whole.
func (up *startup) startEmpty() {
	for shard := range up.hub.store.Shards() {
		if snapshot := up.hub.store.Snapshot(shard); snapshot.Len() == 0 {
			up.sequences[shard] = snapshot.Sequence()
		} else {
			up.requests.owe(shard, &resync{whole: true})
		}
	}
}

// resume finds out what a client that holds something is owed. Sequences decide for shards whose
// position is of this epoch and known. For the others digests decide: first the digest of the
// state; if it differs, those of the shards; if these differ, those of the shard's buckets.
func (up *startup) resume(state clientState) error {
	h := up.hub
	var unknown []uint32
	for shard := range h.store.Shards() {
		snapshot := h.store.Snapshot(shard)
		at, ok := state.position(h.store, snapshot)
		if !ok {
			unknown = append(unknown, shard)
			continue
		}
		up.sequences[shard] = at
		if at < snapshot.Sequence() { // most shards have not changed while the client was away
			up.requests.owe(shard, &resync{})
		}
	}
	if len(unknown) == 0 {
		return nil
	}
	sequences, same := state.equals(h.store)
	if !same && up.buckets {
		return up.resumeByDigests(unknown)
	}
	for _, shard := range unknown {
		if same {
			up.sequences[shard] = sequences[shard]
		} else {
			up.requests.owe(shard, &resync{whole: true})
		}
	}
	return nil
}

// resumeByDigests asks for the client's digests in some shards, which decide what it is owed.
func (up *startup) resumeByDigests(shards []uint32) error {
	digests, err := up.askDigests()
	if err != nil {
		return err
	}
	var ask []uint32
	for _, shard := range shards {
		switch snapshot := up.hub.store.Snapshot(shard); digests[shard] {
		case snapshot.Digest():
			up.sequences[shard] = snapshot.Sequence()
		case model.Digest{}:
			up.requests.owe(shard, &resync{whole: true})
		default:
			ask = append(ask, shard)
		}
	}
	return up.askBuckets(ask)
}

// ask sends a query and waits until answered, which is called under mu, reports that the client has
// answered it.
func (up *startup) ask(name string, query *pb.StreamResponse, answered func() bool) error {
	if err := up.sendMessage(query); err != nil {
		return err
	}
	timeout := time.NewTimer(bucketTimeout)
	defer timeout.Stop()
	for {
		ok, err := up.wait(up.pokes, timeout.C)
		if err != nil {
			return err
		}
		if !ok {
			return status.Errorf(codes.DeadlineExceeded, "no answer to %s within %v", name, bucketTimeout)
		}
		up.mu.Lock()
		done := answered()
		up.mu.Unlock()
		if done {
			return nil
		}
	}
}

func (up *startup) askDigests() (digests []model.Digest, err error) {
	up.mu.Lock()
	up.queries.digests = true
	up.mu.Unlock()
	query := &pb.StreamResponse{Message: &pb.StreamResponse_DigestQuery{DigestQuery: &pb.DigestQuery{}}}
	err = up.ask("digest_query", query, func() bool {
		digests, up.queries.answer = up.queries.answer, nil
		return digests != nil
	})
	return digests, err
}

// askBuckets asks for the digests of the client's buckets in some shards. settle takes the answers.
func (up *startup) askBuckets(shards []uint32) error {
	if len(shards) == 0 {
		return nil
	}
	up.mu.Lock()
	up.queries.buckets = make(map[uint32]struct{}, len(shards))
	for _, shard := range shards {
		up.queries.buckets[shard] = struct{}{}
	}
	up.mu.Unlock()
	query := &pb.StreamResponse{Message: &pb.StreamResponse_BucketQuery{BucketQuery: &pb.BucketQuery{Shards: shards}}}
	return up.ask("bucket_query", query, func() bool {
		return !slices.ContainsFunc(shards, func(shard uint32) bool {
			r := up.requests.resyncs[shard] // the client may also ask for objects
			return r == nil || !r.whole && r.buckets == nil
		})
	})
}

// awaitTurn waits for the client's turn. A client that waits too long is asked to come back later.
func (up *startup) awaitTurn() error {
	h := up.hub
	timeout := time.NewTimer(admissionWait)
	defer timeout.Stop()
	begun, err := up.wait(up.turn.begun, timeout.C)
	if err != nil || begun {
		return err
	}
	h.metrics.starts.WithLabelValues("refused").Inc()
	h.logged.late.Do(func() {
		h.log.Warn("Refused a client that waited too long for whole shards; if this persists, increase "+
			"--max-cold-sync-bytes or add replicas; logged at most once per interval",
			"node", up.node, "peer", up.peer, "waited", admissionWait, "interval", logInterval)
	})
	return wire.RetryLater(status.Errorf(codes.ResourceExhausted,
		"too many clients need whole shards: this one has waited for %v", admissionWait),
		admissionWait/2+rand.N(admissionWait))
}

// wait waits for a channel, and sends heartbeats meanwhile. It returns false if the timeout comes
// first.
func (up *startup) wait(on <-chan struct{}, timeout <-chan time.Time) (bool, error) {
	ctx := up.transport.Context()
	for {
		select {
		case <-on:
			return true, nil
		case <-timeout:
			return false, nil
		case <-up.beats.C:
			if err := up.send(lifeSign); err != nil {
				return false, err
			}
		case err := <-up.ending:
			return false, err
		case <-up.hub.drainBegun.Done():
			return false, errDraining
		case <-ctx.Done():
			return false, up.gone()
		}
	}
}
