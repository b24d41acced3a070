// These tests prove that a client that comes back receives what differs and little more, counted in
// bytes on the wire: on the same server, on another replica, through relays and from a checkpoint.
// A deleted Node stays in force meanwhile.
package fabric

import (
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/proxytest"
	"github.com/slicecast/slicecast/internal/store"
	"github.com/slicecast/slicecast/server/app"
)

const (
	// resumeCost bounds the bytes of a resume if nothing differs. It counts both directions below
	// TLS, with HTTP/2 and the records of TLS, from the end of the handshake until the server has
	// the acknowledgement.
	resumeCost = 2 << 10
	// shardCost bounds the bytes for each shard in which something differs, in addition to its
	// objects: the client's digests of the shard's buckets, and the framing of these and of the
	// answer.
	shardCost = model.Buckets*model.HashSize + 256
)

// quietServer turns heartbeats off, so that only the cost of a resume is counted.
func quietServer(c *app.Config) { c.HeartbeatInterval = time.Hour }

// resumer is an agent that moves between servers, and what it has received.
type resumer struct {
	*agent
	t       *testing.T
	cluster *cluster
	proxy   *proxytest.Proxy
	// held is the state of the cluster when the agent was last in sync.
	held map[model.Key]model.Keyed
	path string
}

func newResumer(t *testing.T, c *cluster, address string) *resumer {
	t.Helper()
	r := &resumer{t: t, cluster: c, proxy: proxytest.New(t, address), path: filepath.Join(t.TempDir(), "checkpoint")}
	r.start()
	r.waitEquals(t, c)
	r.held = c.state()
	t.Logf("cold: %d bytes", r.traffic.bytes())
	return r
}

func (r *resumer) start() {
	r.agent = follow(r.t, agentOptions{node: nodes[0], servers: []string{r.proxy.Address()}, checkpoint: r.path})
}

// leave disconnects the agent from all servers.
func (r *resumer) leave() {
	r.proxy.Lead(proxytest.Nowhere)
	r.proxy.Cut()
}

// back leads the agent to a server, and checks that it receives what differs and no more. byBuckets
// means that differences are found by digests of buckets, so the other objects in these buckets are
// sent, too.
func (r *resumer) back(what string, address string, acks func() int, byBuckets bool) {
	r.t.Helper()
	now := r.cluster.state()
	differs := difference(r.held, now)
	sent := differs
	limit := int64(resumeCost)
	if byBuckets {
		sent = inPlaces(now, differs)
		shards := make(map[uint32]struct{})
		for _, o := range differs {
			shards[placeOf(o).shard] = struct{}{}
		}
		limit += int64(len(shards)) * shardCost
	}
	limit += size(r.t, sent)

	before := acks()
	r.traffic.reset()
	r.proxy.Lead(address)
	r.waitEquals(r.t, r.cluster)
	require.Eventually(r.t, func() bool { return acks() > before }, patience, tick)
	got := r.traffic.bytes()
	r.t.Logf("%s: %d objects differ: %d bytes (at most %d)", what, len(differs), got, limit)
	require.LessOrEqual(r.t, got, limit, what)
	r.held = now
}

func (r *resumer) backTo(what string, s *server, byBuckets bool) {
	r.t.Helper()
	r.back(what, s.address(), s.acks(r.t), byBuckets)
}

// acks returns a function that counts the acknowledgements that a server has received.
func (s *server) acks(t *testing.T) func() int {
	return func() int { return int(s.metric(t, "slicecast_server_acks_total")) }
}

// ready waits until a server serves the cluster's present state.
func ready(t *testing.T, c *cluster, address string, acks func() int) {
	t.Helper()
	before := acks()
	a := follow(t, agentOptions{node: nodes[1], servers: []string{address}})
	a.waitEquals(t, c)
	require.Eventually(t, func() bool { return acks() > before }, patience, tick)
	a.stop()
}

// some returns the keys of n slices.
func (c *cluster) some(n int) []model.Key {
	var out []model.Key
	for _, key := range slices.SortedFunc(maps.Keys(c.state()), model.Key.Compare) {
		if key.Kind == model.KindSlice && len(out) < n {
			out = append(out, key)
		}
	}
	return out
}

func TestResumeOnTheSameServer(t *testing.T) {
	c := newLargeCluster(t)
	s := serve(t, &watch{cluster: c}, quietServer, func(c *app.Config) { c.Tombstones = 4 })
	r := newResumer(t, c, s.address())

	r.leave()
	r.backTo("nothing has changed", s, false)

	r.leave()
	keys := c.some(20)
	c.flip(keys[:5])
	c.remove(keys[5])
	r.backTo("a few changes later", s, false)

	// More objects are removed than the server remembers.
	r.leave()
	shard := c.state()[keys[0]].(model.Object).ServiceKey().Shard(store.DefaultShards)
	gone := 0
	for key, o := range c.state() {
		if o, ok := o.(*model.Slice); ok && gone < 6 && o.ServiceKey().Shard(store.DefaultShards) == shard {
			c.remove(key)
			gone++
		}
	}
	require.Equal(t, 6, gone)
	r.backTo("far behind in one shard", s, true)
}

func TestResumeOnAnotherReplica(t *testing.T) {
	c := newLargeCluster(t)
	replicas := []*server{serve(t, &watch{cluster: c}, quietServer), serve(t, &watch{cluster: c}, quietServer)}
	r := newResumer(t, c, replicas[0].address())
	ready(t, c, replicas[1].address(), replicas[1].acks(t))
	r.leave()
	r.backTo("the same state", replicas[1], false)
	r.leave()
	c.flip(c.some(5))
	r.backTo("a few differences", replicas[0], true)
}

func TestResumeFromACheckpoint(t *testing.T) {
	c := newLargeCluster(t)
	s := serve(t, &watch{cluster: c}, quietServer)
	r := newResumer(t, c, s.address())
	restart := func() {
		r.save()
		r.leave()
		r.stop()
		r.start()
	}
	restart()
	r.backTo("nothing has changed", s, false)
	restart()
	c.flip(c.some(5))
	r.backTo("a few changes later", s, false)
	restart()
	c.flip(c.some(5))
	another := serve(t, &watch{cluster: c}, quietServer)
	ready(t, c, another.address(), another.acks(t))
	r.backTo("a few changes later, on another server", another, true)
}

// TestDeletedNodeOverARestart checks an agent that starts from a checkpoint after its Node was
// deleted. The last state of the Node must stay in force, whether the agent resumes, starts again,
// or moves to another server. If the Node has been registered again without addresses and pod
// CIDRs, these stay in force, too.
func TestDeletedNodeOverARestart(t *testing.T) {
	n := &model.Node{
		Name: nodes[0], Labels: map[string]string{"topology.kubernetes.io/zone": "a"},
		Addresses: []netip.Addr{netip.MustParseAddr("10.0.0.1")}, PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.1.0.0/24")},
	}
	deleted := *n
	deleted.Deleting = true
	c := newCluster(n)
	s := serve(t, &watch{cluster: c}, quietServer)
	r := newResumer(t, c, s.address())
	// restart also changes the cluster, so that the agent's state is wrong until a server has sent
	// it its Node.
	restarts := 0
	restart := func(to *server, want *model.Node) {
		t.Helper()
		r.save()
		r.leave()
		r.stop()
		restarts++
		c.upsert(model.NewService(model.Service{
			Namespace: "default", Name: "web", Type: model.ClusterIP, CreationTimeSeconds: int64(restarts),
			InternalTrafficPolicy: model.TrafficCluster, ExternalTrafficPolicy: model.TrafficCluster,
		}))
		ready(t, c, to.address(), to.acks(t))
		r.start()
		r.proxy.Lead(to.address())
		r.waitEquals(t, c)
		require.True(t, r.cache.Node().Equal(want), "%+v", r.cache.Node())
	}
	restart(s, n)
	c.remove(n.Key())
	restart(s, &deleted)
	restart(s, &deleted)
	restart(serve(t, &watch{cluster: c}, quietServer), &deleted)
	c.upsert(&model.Node{Name: nodes[0]})
	again := &model.Node{Name: nodes[0], Addresses: n.Addresses, PodCIDRs: n.PodCIDRs}
	restart(s, again)
	restart(s, again)
}

func TestResumeThroughARelay(t *testing.T) {
	c := newLargeCluster(t)
	root := serve(t, &watch{cluster: c}, quietServer)
	outer := serve(t, nil, quietServer, upstreamOf(root.address()))
	inner := serve(t, nil, quietServer, upstreamOf(outer.address()))
	r := newResumer(t, c, root.address())
	for i, s := range []*server{outer, inner} {
		name := []string{"a relay", "a relay's relay"}[i]
		ready(t, c, s.address(), s.acks(t))
		r.leave()
		r.backTo("the same state, on "+name, s, false)
		r.leave()
		r.backTo("the same state, on the root again", root, false)
		r.leave()
		c.flip(c.some(5))
		ready(t, c, s.address(), s.acks(t))
		r.backTo("a few differences, on "+name, s, true)
	}
}
