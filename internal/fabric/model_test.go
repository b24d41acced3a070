// TestModel proves that every client holds exactly what the cluster holds, after random sequences
// of writes, cuts, moves, restarts, relays and checkpoints. Clients ask again for nothing unless
// the test has made their cache wrong.
package fabric

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
	"github.com/slicecast/slicecast/internal/proxytest"
	"github.com/slicecast/slicecast/server/app"
)

var steps = flag.Int("fabric.steps", 40, "steps of each history of TestModel; -rapid.checks is the number of histories")

// TestModel plays any sequence of events of the cluster, servers, streams and clients. After each
// quiet moment, every client must hold exactly what the cluster holds.
func TestModel(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(t)
		for range *steps {
			w.step()
		}
		w.quiet()
	})
}

// world is a cluster, the servers that watch it, and the clients that follow the servers.
type world struct {
	t        *rapid.T
	dir      string
	cluster  *cluster
	replicas []*replica
	clients  []*follower
	// history has the events for the reader of a failure.
	history []string
}

// rootShards is the number of shards of the first replica and the relays, which must agree. Other
// replicas may have other numbers.
const rootShards = 4

// replica is a server with its watch of the cluster. A relay has no watch, but a stream from
// another replica through a proxy.
type replica struct {
	*server
	watch *watch
	proxy *proxytest.Proxy
	// upstream is the index of the replica that the proxy leads to.
	upstream int
}

// follower is a client, and what the test has done to it.
type follower struct {
	*agent
	proxy *proxytest.Proxy
	// replica is the index of the replica that the proxy leads to.
	replica int
	stalled bool
	// saved has checkpoints of any age.
	saved [][]byte
	// tampered counts how often the cache was made wrong. It is bounded, as the repair of too many
	// errors would be delayed. Once it is not zero, checkpoints may be wrong, too.
	tampered int
}

func newWorld(t *rapid.T) *world {
	dir, err := os.MkdirTemp(identities.dir, "world-")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	w := &world{t: t, dir: dir, cluster: newCluster()}
	w.writes(15, 15)
	for range rapid.SampledFrom([]int{2, 3, 1}).Draw(t, "replicas") {
		w.replicas = append(w.replicas, &replica{})
		w.startReplica(len(w.replicas) - 1)
	}
	// Add relays of the first replica or of each other, for up to three levels in all.
	upstream := 0
	for range rapid.SampledFrom([]int{1, 2, 0}).Draw(t, "relays") {
		w.replicas = append(w.replicas, &replica{upstream: upstream, proxy: proxytest.New(t, w.replicas[upstream].address())})
		w.startReplica(len(w.replicas) - 1)
		if rapid.Bool().Draw(t, "deeper") {
			upstream = len(w.replicas) - 1
		}
	}
	for i, node := range nodes[:rapid.IntRange(2, 4).Draw(t, "clients")] {
		f := &follower{replica: i % len(w.replicas)}
		f.proxy = proxytest.New(t, w.replicas[f.replica].address())
		w.clients = append(w.clients, f)
		w.startClient(f, node)
	}
	return w
}

func (w *world) did(format string, args ...any) {
	w.history = append(w.history, fmt.Sprintf(format, args...))
}

func (w *world) startReplica(i int) {
	r := w.replicas[i]
	shards := uint32(rootShards)
	if i > 0 && r.proxy == nil {
		shards = rapid.SampledFrom([]uint32{rootShards, rootShards, 1, 16}).Draw(w.t, "shards")
	}
	tombstones := rapid.SampledFrom([]int{0, 1, 3}).Draw(w.t, "tombstones")
	wait := rapid.SampledFrom([]time.Duration{10 * time.Millisecond, 300 * time.Millisecond}).Draw(w.t, "behind wait")
	r.watch = &watch{cluster: w.cluster}
	r.server = serve(w.t, r.watch, func(c *app.Config) {
		c.Shards, c.Tombstones, c.MaxBehindWait = shards, tombstones, wait
		c.HeartbeatInterval = 300 * time.Millisecond
		if r.proxy != nil {
			upstreamOf(r.proxy.Address())(c)
		}
	})
	for _, p := range w.proxiesTo(i) {
		p.Lead(r.address())
	}
	w.did("replica %d starts: relay of %d: %v, %d shards, %d tombstones", i, r.upstream, r.proxy != nil, shards, tombstones)
}

// proxiesTo returns the proxies that lead to a replica.
func (w *world) proxiesTo(i int) (out []*proxytest.Proxy) {
	for _, f := range w.clients {
		if f.replica == i {
			out = append(out, f.proxy)
		}
	}
	for _, r := range w.replicas {
		if r.proxy != nil && r.upstream == i {
			out = append(out, r.proxy)
		}
	}
	return out
}

func (w *world) startClient(f *follower, node string) {
	f.agent = follow(w.t, agentOptions{node: node, servers: []string{f.proxy.Address()}, checkpoint: w.checkpointOf(node)})
}

// actions are the events. Each gets a random client and a random replica. rapid prefers the first
// ones.
var actions = []func(w *world, f *follower, i int){
	func(w *world, _ *follower, _ int) { w.writes(1, 6) },
	func(w *world, f *follower, _ int) { w.settle(f) },
	func(w *world, f *follower, i int) { w.move(f, i) },
	func(w *world, f *follower, _ int) { f.cutAfter(w, rapid.IntRange(0, 4000).Draw(w.t, "bytes")) },
	func(w *world, f *follower, i int) { w.moveBack(f, i) },
	func(w *world, _ *follower, _ int) { w.moment() },
	func(w *world, f *follower, _ int) { w.checkpoint(f) },
	func(w *world, f *follower, _ int) { f.toggleStalled(w) },
	func(w *world, f *follower, _ int) { w.tamper(f) },
	func(w *world, _ *follower, i int) { w.restart(i) },
	func(w *world, _ *follower, _ int) { w.relist() },
	func(w *world, _ *follower, i int) { w.cutRelay(i) },
	func(w *world, _ *follower, i int) { w.toggleHeld(i) },
	func(w *world, _ *follower, _ int) { w.quiet() },
	func(w *world, f *follower, _ int) { f.cutAfter(w, 0) },
}

func (w *world) step() {
	f := rapid.SampledFrom(w.clients).Draw(w.t, "client")
	i := rapid.IntRange(0, len(w.replicas)-1).Draw(w.t, "replica")
	actions[rapid.IntRange(0, len(actions)-1).Draw(w.t, "action")](w, f, i)
}

// moment waits for a moment, so that whatever is in progress advances.
func (w *world) moment() {
	<-time.After(time.Duration(rapid.IntRange(1, 20).Draw(w.t, "milliseconds")) * time.Millisecond)
}

// handshakeBytes is about the size of the server's part of a TLS handshake. Cuts come after it.
const handshakeBytes = 800

// move moves a client to another server. The client may be disconnected for a while, and its first
// connection may be cut.
func (w *world) move(f *follower, i int) {
	if i == f.replica {
		i = (i + 1) % len(w.replicas)
	}
	f.proxy.Lead(proxytest.Nowhere)
	f.proxy.Cut()
	w.did("%s leaves", f.node)
	w.writes(0, 4)
	if rapid.Bool().Draw(w.t, "it is cut off again") {
		f.cutAfter(w, handshakeBytes+rapid.IntRange(0, 1500).Draw(w.t, "bytes"))
	}
	w.did("%s comes to replica %d", f.node, i)
	f.replica = i
	f.proxy.Lead(w.replicas[i].address())
}

// moveBack moves a client to a server that is behind what the client has seen.
func (w *world) moveBack(f *follower, i int) {
	if w.root(i) == w.root(f.replica) {
		return
	}
	w.hold(i)
	w.writes(1, 3)
	w.settle(f)
	w.move(f, i)
	w.moment()
}

// root returns the replica that feeds a relay in the end. For other replicas, it returns the
// replica itself.
func (w *world) root(i int) *replica {
	r := w.replicas[i]
	for r.proxy != nil {
		r = w.replicas[r.upstream]
	}
	return r
}

func (w *world) hold(i int) {
	w.did("replica %d is held back", i)
	w.root(i).watch.hold()
}

func (w *world) toggleHeld(i int) {
	if !w.root(i).watch.isHeld() {
		w.hold(i)
		return
	}
	w.did("replica %d is let go", i)
	w.root(i).watch.release()
}

// cutAfter cuts a client's connection after n more bytes have arrived.
func (f *follower) cutAfter(w *world, n int) {
	w.did("%s is cut off after %d bytes", f.node, n)
	if n == 0 {
		f.proxy.Cut()
		return
	}
	f.proxy.CutAfter(n)
}

func (w *world) cutRelay(i int) {
	if p := w.replicas[i].proxy; p != nil {
		n := rapid.IntRange(0, 4000).Draw(w.t, "bytes")
		w.did("relay %d is cut off after %d bytes", i, n)
		p.CutAfter(n)
	}
}

func (w *world) writes(least, most int) {
	for range rapid.IntRange(least, most).Draw(w.t, "writes") {
		w.write()
	}
}

// restart replaces a server by one with another epoch, and maybe other numbers of shards and
// tombstones. Its clients see a drain, or their connections break.
func (w *world) restart(i int) {
	abrupt := rapid.Bool().Draw(w.t, "abrupt")
	w.did("replica %d ends, abruptly: %v", i, abrupt)
	if abrupt {
		for _, p := range w.proxiesTo(i) {
			p.Lead(proxytest.Nowhere)
			p.Cut()
		}
	}
	w.replicas[i].stop()
	w.writes(0, 5)
	w.startReplica(i)
}

// toggleStalled stops all data to a client, or lets it pass again.
func (f *follower) toggleStalled(w *world) {
	if f.stalled {
		w.did("%s gets what has come", f.node)
		f.proxy.Release()
	} else {
		w.did("%s gets nothing", f.node)
		f.proxy.Hold()
	}
	f.stalled = !f.stalled
}

// checkpoint saves a client's state, or restarts the client from any of its saved states.
func (w *world) checkpoint(f *follower) {
	path := w.checkpointOf(f.node)
	if len(f.saved) == 0 || rapid.Bool().Draw(w.t, "save") {
		f.save()
		content, err := os.ReadFile(path)
		if !errors.Is(err, os.ErrNotExist) { // without a file, it has not been in sync yet
			require.NoError(w.t, err)
			w.did("%s saves checkpoint %d", f.node, len(f.saved))
			f.saved = append(f.saved, content)
		}
		return
	}
	n := rapid.IntRange(0, len(f.saved)-1).Draw(w.t, "checkpoint")
	w.did("%s begins again with checkpoint %d", f.node, n)
	f.stop()
	require.NoError(w.t, os.WriteFile(path, f.saved[n], 0o600))
	w.startClient(f, f.node)
}

func (w *world) checkpointOf(node string) string { return filepath.Join(w.dir, node+".checkpoint") }

// tamper drops a part of the next update of a client. Its cache is then wrong until a heartbeat
// reveals it.
func (w *world) tamper(f *follower) {
	if f.tampered == 4 {
		return
	}
	f.tampered++
	w.did("%s loses something of an update", f.node)
	tamper := func(u *model.Update) bool {
		switch {
		// This is the answer to a detected difference. A loss in it would not be looked for again.
		case len(u.FullBuckets) > 0:
			return false
		case len(u.Deltas) > 0:
			u.Deltas = u.Deltas[1:]
		case len(u.Removed) > 0:
			u.Removed = u.Removed[1:]
		case len(u.Slices) > 0:
			wrong := *u.Slices[0]
			wrong.Endpoints = slices.Clone(wrong.Endpoints)
			wrong.Ports = append(slices.Clone(wrong.Ports), model.SlicePort{Name: "wrong", Protocol: model.TCP, Port: 1})
			u.Slices[0] = model.NewSlice(wrong)
		case len(u.Services) > 0:
			u.Services = u.Services[1:]
		default:
			return false
		}
		return true
	}
	f.agent.tamper.Store(&tamper)
}

// quiet waits until everything has settled, and compares all clients with the cluster.
func (w *world) quiet() {
	for _, r := range w.replicas {
		r.watch.release()
	}
	for _, f := range w.clients {
		f.agent.tamper.Store(nil)
		if f.stalled {
			f.toggleStalled(w)
		}
	}
	for _, f := range w.clients {
		w.equal(f)
	}
}

// settle waits until one client is up to date, if nothing holds it back.
func (w *world) settle(f *follower) {
	if !f.stalled && !w.root(f.replica).watch.isHeld() {
		f.agent.tamper.Store(nil)
		w.equal(f)
	}
}

// unasked checks that no client had to request anything again, except for clients whose caches were
// made wrong. Repairs by heartbeats would otherwise hide errors that they are not meant for.
func (w *world) unasked(f *follower) {
	for _, label := range []string{"digest", "base"} {
		asked, err := metric(f.registry, "slicecast_agent_resyncs_total", label)
		require.NoError(w.t, err)
		if f.tampered == 0 {
			require.Zero(w.t, asked, "%s, %s\n%s", f.node, label, strings.Join(w.history, "\n"))
		}
		for i, r := range w.replicas {
			require.Zero(w.t, r.metric(w.t, "slicecast_upstream_resyncs_total", label),
				"relay %d, %s\n%s", i, label, strings.Join(w.history, "\n"))
		}
	}
}

func (w *world) equal(f *follower) {
	want := w.cluster.state()
	begin := time.Now()
	var err error
	if !eventually(func() bool { err = f.differs(want); return err == nil }) {
		w.t.Fatalf("%s differs after %v: %v\n%s", f.node, time.Since(begin), errors.Join(err, f.contentDiffers(want)),
			strings.Join(w.history, "\n"))
	}
	w.unasked(f)
	w.did("%s is equal, after %v", f.node, time.Since(begin).Round(time.Millisecond))
}

// write makes one change of the cluster.
func (w *world) write() {
	t, c := w.t, w.cluster
	switch rapid.IntRange(0, 7).Draw(t, "change") { // rapid prefers the first ones, and the last
	case 0, 1:
		if slice, ok := c.state()[modeltest.SliceKey(t)].(*model.Slice); ok {
			w.upsert(modeltest.Changed(t, slice))
		}
	case 2:
		w.upsert(modeltest.Slice(t, modeltest.SliceKey(t)))
	case 3:
		w.remove(modeltest.SliceKey(t))
	case 4:
		node := rapid.SampledFrom(nodes).Draw(t, "node")
		if rapid.IntRange(0, 3).Draw(t, "node's fate") == 0 {
			w.remove(model.Key{Kind: model.KindNode, Name: node})
		} else {
			w.upsert(modeltest.Node(t, node))
		}
	case 5:
		key := modeltest.ServiceKey(t)
		w.remove(model.Key{Kind: model.KindService, Namespace: key.Namespace, Name: key.Name})
	case 6:
		w.removeWhole(modeltest.ServiceKey(t))
	case 7:
		w.upsert(modeltest.Service(t, modeltest.ServiceKey(t)))
	}
}

func (w *world) upsert(o model.Keyed) {
	w.did("upsert %v", o.Key())
	w.cluster.upsert(o)
}

func (w *world) remove(key model.Key) {
	w.did("remove %v", key)
	w.cluster.remove(key)
}

// removeWhole removes a Service and its slices.
func (w *world) removeWhole(service model.ServiceKey) {
	for key, o := range w.cluster.state() {
		if o, ok := o.(model.Object); ok && o.ServiceKey() == service {
			w.remove(key)
		}
	}
}

// relist replaces the objects of a kind by a new list, with some changes that the watches have not
// seen.
func (w *world) relist() {
	kind := rapid.SampledFrom([]model.Kind{model.KindService, model.KindSlice, model.KindNode}).Draw(w.t, "kind")
	w.did("relist of %v", kind)
	w.cluster.replace(kind, func(objects map[model.Key]model.Keyed) {
		switch kind {
		case model.KindService:
			o := modeltest.Service(w.t, modeltest.ServiceKey(w.t))
			objects[o.Key()] = o
			delete(objects, modeltest.Service(w.t, modeltest.ServiceKey(w.t)).Key())
		case model.KindSlice:
			o := modeltest.Slice(w.t, modeltest.SliceKey(w.t))
			objects[o.Key()] = o
			delete(objects, modeltest.SliceKey(w.t))
		case model.KindNode:
			delete(objects, model.Key{Kind: kind, Name: rapid.SampledFrom(nodes).Draw(w.t, "node")})
		}
	})
}
