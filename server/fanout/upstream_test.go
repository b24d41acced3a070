// These tests prove what a relay's hub reports upstream of its nodes: each nack once, acks that all
// nodes have, and the time of the last node. Upstream is recorded.
package fanout

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// told is an Upstream that records its calls.
type told struct {
	mu    sync.Mutex
	nacks []string
	full  bool
	nodes int
}

func (*told) Path() ([]uint64, context.Context)                    { return []uint64{1}, context.Background() }
func (*told) Mark(uint32) (p model.Position)                       { return p }
func (*told) Programmed(uint32, model.Position, time.Time, string) {}

func (u *told) Nodes(count int) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.nodes = count
}

func (u *told) Nack(n *pb.Nack) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	if n.GetResolved() {
		n.Reason = "resolved"
	}
	if u.full && !n.GetResolved() {
		return false
	}
	text := n.GetNodeName() + ": " + n.GetKey().GetName() + ": " + n.GetReason()
	if n.GetWarning() != 0 {
		text = "warning of " + text
	}
	u.nacks = append(u.nacks, text)
	return true
}

// take waits for n nacks and returns them.
func (u *told) take(t *testing.T, n int) (nacks []string) {
	t.Helper()
	eventually(t, func() bool {
		u.mu.Lock()
		defer u.mu.Unlock()
		if len(u.nacks) < n {
			return false
		}
		nacks, u.nacks = u.nacks, nil
		return true
	})
	return nacks
}

// TestNacksArePassedOn checks that upstream hears of each open nack once. It also hears when the
// nack is resolved, because the object was programmed or because the node has left.
func TestNacksArePassedOn(t *testing.T) {
	up := &told{}
	h := running(t, Options{Store: filled(t, 2), Upstream: up})
	nack := func(p *pipe, node, reason string) {
		t.Helper()
		require.NoError(t, p.say(&pb.StreamRequest{Message: &pb.StreamRequest_Nack{Nack: &pb.Nack{
			Key: wire.KeyToProto(service(1).Key()), NodeName: node, Reason: reason, Resolved: reason == "",
		}}}))
	}
	open := func(hello *pb.Hello) *pipe {
		p := connect(t, h, hello)
		eventually(t, p.session.synced.Load)
		return p
	}
	agent := &pb.Hello{NodeName: "a", Kind: pb.ClientKind_CLIENT_KIND_AGENT}
	a, relay := open(agent), open(&pb.Hello{Kind: pb.ClientKind_CLIENT_KIND_RELAY})
	observer := open(&pb.Hello{NodeName: "a"})
	nack(observer, "", "it has no kernel")
	for _, reason := range []string{"", "no room", "no room", "no luck", "", "", "no room"} {
		nack(a, "somebody-else", reason)
	}
	nack(relay, "b", "no room")
	require.Equal(t, []string{
		"a: service-1: no room", "a: service-1: no luck", "a: service-1: resolved", "a: service-1: no room", "b: service-1: no room",
	}, up.take(t, 5))

	_ = relay.close()
	require.Equal(t, []string{"b: service-1: resolved"}, up.take(t, 1))
	again := open(agent)
	require.Equal(t, []string{"a: service-1: resolved"}, up.take(t, 1), "before the new stream says anything")
	nack(a, "", "from the past")
	nack(again, "", "no room")
	_ = observer.close()
	_ = again.close()
	require.Equal(t, []string{"a: service-1: no room", "a: service-1: resolved"}, up.take(t, 2))
}

// TestNackOfANode checks that a nack of kind Node concerns the client's own node, whatever its name
// is. The node may then lack any Service.
func TestNackOfANode(t *testing.T) {
	up := &told{}
	h := running(t, Options{Store: filled(t, 2), Upstream: up})
	nack := func(p *pipe, name, node, reason string) {
		t.Helper()
		require.NoError(t, p.say(&pb.StreamRequest{Message: &pb.StreamRequest_Nack{Nack: &pb.Nack{
			Key: wire.KeyToProto(model.Key{Kind: model.KindNode, Name: name}), NodeName: node, Reason: reason, Resolved: reason == "",
		}}}))
	}
	open := func(hello *pb.Hello) *pipe {
		p := connect(t, h, hello)
		eventually(t, p.session.synced.Load)
		return p
	}
	key := service(1).ServiceKey()
	agent := open(&pb.Hello{NodeName: "a", Kind: pb.ClientKind_CLIENT_KIND_AGENT})
	ack := &pb.Ack{}
	for i := range h.store.Shards() {
		ack.Positions = append(ack.Positions, &pb.ShardPosition{Shard: i, Sequence: h.store.Snapshot(i).Sequence()})
	}
	require.NoError(t, agent.say(&pb.StreamRequest{Message: &pb.StreamRequest_Ack{Ack: ack}}))
	require.Empty(t, lacking(h, &key))
	nack(agent, "victim", "", "nothing of IPv4 is programmed")
	require.Equal(t, []string{"a: a: nothing of IPv4 is programmed"}, up.take(t, 1))
	at := lacking(h, &key)[0]
	require.Equal(t, "Node a", at.GetErrors()[0].GetObject())
	nack(agent, "", "", "")
	require.Equal(t, []string{"a: a: resolved"}, up.take(t, 1))
	require.Empty(t, lacking(h, &key))

	relay := open(&pb.Hello{Kind: pb.ClientKind_CLIENT_KIND_RELAY})
	nack(relay, "victim", "b", "nothing of IPv6 is programmed")
	nack(relay, "c", "c", "nothing of IPv6 is programmed")
	require.Equal(t, []string{"b: b: nothing of IPv6 is programmed", "c: c: nothing of IPv6 is programmed"}, up.take(t, 2))
	_ = relay.close()
	require.ElementsMatch(t, []string{"b: b: resolved", "c: c: resolved"}, up.take(t, 2))
	_ = agent.close()
}

// TestWarnings checks that a warning of a node counts as long as the node is connected, and is
// passed on once for each reason. The node lacks nothing because of it. What an observer warns of,
// or an agent for another node, does not count.
func TestWarnings(t *testing.T) {
	up := &told{}
	var mu sync.Mutex
	var warned []string
	warn := func(node string, w pb.NodeWarning, reason string) {
		mu.Lock()
		defer mu.Unlock()
		warned = append(warned, fmt.Sprint(node, " ", w.Number(), " ", reason))
	}
	h := running(t, Options{Store: filled(t, 2), Upstream: up, Warn: warn})
	open := func(hello *pb.Hello) *pipe {
		p := connect(t, h, hello)
		eventually(t, p.session.synced.Load)
		return p
	}
	say := func(p *pipe, node string, w pb.NodeWarning, reason string) {
		t.Helper()
		require.NoError(t, p.say(&pb.StreamRequest{Message: &pb.StreamRequest_Nack{Nack: &pb.Nack{
			Key:      wire.KeyToProto(model.Key{Kind: model.KindNode, Name: "victim"}),
			NodeName: node, Warning: w, Reason: reason, Resolved: reason == "",
		}}}))
	}
	count := func() string {
		out := ""
		for _, c := range h.Status().GetWarnings() {
			out += fmt.Sprintf("%s: %d. ", wire.WarningName(c.GetWarning()), c.GetNodes())
		}
		return out
	}
	agent := open(&pb.Hello{NodeName: "a", Kind: pb.ClientKind_CLIENT_KIND_AGENT})
	relay, observer := open(&pb.Hello{Kind: pb.ClientKind_CLIENT_KIND_RELAY}), open(&pb.Hello{NodeName: "a"})
	ack := &pb.Ack{}
	for i := range h.store.Shards() {
		ack.Positions = append(ack.Positions, &pb.ShardPosition{Shard: i, Sequence: h.store.Snapshot(i).Sequence()})
	}
	require.NoError(t, agent.say(&pb.StreamRequest{Message: &pb.StreamRequest_Ack{Ack: ack}}))
	const proxy, unknown = pb.NodeWarning_NODE_WARNING_KUBE_PROXY, pb.NodeWarning(77)
	say(observer, "", proxy, "not my business")
	say(agent, "victim", proxy, "it runs")
	say(agent, "", proxy, "it runs")
	say(agent, "", pb.NodeWarning_NODE_WARNING_POD_RANGE_IPV6, "outside")
	say(agent, "", pb.NodeWarning_NODE_WARNING_POD_RANGE_IPV6, "")
	say(relay, "b", proxy, "it runs, too")
	say(relay, "b", unknown, "of a newer agent")
	require.Equal(t, []string{
		"warning of a: a: it runs", "warning of a: a: outside", "warning of a: a: resolved", "warning of b: b: it runs, too",
		"warning of b: b: of a newer agent",
	}, up.take(t, 5))
	mu.Lock()
	require.Equal(t, []string{"a 3 it runs", "a 2 outside", "b 3 it runs, too", "b 77 of a newer agent"}, warned)
	mu.Unlock()
	require.Equal(t, "kube_proxy: 2. other: 1. ", count())
	key := service(1).ServiceKey()
	for _, at := range lacking(h, &key) {
		require.NotEqual(t, "a", at.GetNodeName())
	}
	for _, at := range h.Agents(nil) {
		require.Empty(t, at.GetErrors())
		require.Nil(t, at.GetLastError())
		if at.GetKind() == pb.ClientKind_CLIENT_KIND_AGENT {
			require.Len(t, at.GetWarnings(), 1)
			require.Equal(t, "it runs", at.GetWarnings()[0].GetReason())
		}
	}
	require.Zero(t, testutil.ToFloat64(h.metrics.nacks))

	_ = relay.close()
	require.ElementsMatch(t, []string{"warning of b: b: resolved", "warning of b: b: resolved"}, up.take(t, 2))
	eventually(t, func() bool { return count() == "kube_proxy: 1. " })
	_ = agent.close()
	require.Equal(t, []string{"warning of a: a: resolved"}, up.take(t, 1))
	eventually(t, func() bool { return count() == "" })
	_ = observer.close()
}

// TestARelaysNodeCountsWhenItHasCaughtUp checks that a relay's acks do not include a new node until
// it has what the others have.
func TestARelaysNodeCountsWhenItHasCaughtUp(t *testing.T) {
	up := &told{}
	s := filled(t, 4)
	h := startWith(t, Options{Store: s, Upstream: up}).Hub
	nodes := func() int {
		up.mu.Lock()
		defer up.mu.Unlock()
		return up.nodes
	}
	ack := func(p *pipe, nodes uint32, positions ...*pb.ShardPosition) {
		t.Helper()
		require.NoError(t, p.say(&pb.StreamRequest{Message: &pb.StreamRequest_Ack{Ack: &pb.Ack{Nodes: nodes, Positions: positions}}}))
	}
	// It changes both shards.
	change := func(endpoints int) {
		for i := range 4 {
			s.Upsert(slice(i, endpoints), 3)
		}
		h.publish()
	}
	change(5)
	agent := connect(t, h, &pb.Hello{NodeName: "a", Kind: pb.ClientKind_CLIENT_KIND_AGENT})
	relay := connect(t, h, &pb.Hello{Kind: pb.ClientKind_CLIENT_KIND_RELAY})
	eventually(t, func() bool { return agent.session.synced.Load() && relay.session.synced.Load() })
	require.EqualValues(t, 1, h.servedNodes.Load(), "it is served")
	ack(relay, 5)
	require.Equal(t, 5, nodes())
	ack(agent, 0, &pb.ShardPosition{Shard: 0, Sequence: 2})
	require.Equal(t, 5, nodes(), "it lacks the other shard")
	ack(agent, 0, &pb.ShardPosition{Shard: 1, Sequence: 2})
	require.Equal(t, 6, nodes())
	change(7)
	require.Equal(t, 6, nodes(), "what comes later is waited for")
	_ = agent.close()
	require.Equal(t, 5, nodes())
	_ = relay.close()
	require.Zero(t, nodes())
}

// TestNacksThatUpstreamHadNoRoomFor checks that upstream hears of such nacks once it has room, if
// they are still open.
func TestNacksThatUpstreamHadNoRoomFor(t *testing.T) {
	up := &told{full: true}
	h := running(t, Options{Store: filled(t, 3), Upstream: up})
	p := connect(t, h, &pb.Hello{NodeName: "a", Kind: pb.ClientKind_CLIENT_KIND_AGENT})
	eventually(t, p.session.synced.Load)
	for _, i := range []int{0, 1, 2, -1} {
		require.NoError(t, p.say(&pb.StreamRequest{Message: &pb.StreamRequest_Nack{Nack: &pb.Nack{
			Key: wire.KeyToProto(service(max(i, 0)).Key()), Reason: "no room", Resolved: i < 0,
		}}}))
	}
	require.Equal(t, []string{"a: service-0: resolved"}, up.take(t, 1))
	h.tellNacksAgain()
	up.mu.Lock()
	require.Empty(t, up.nacks)
	up.full = false
	up.mu.Unlock()
	for range 2 {
		h.tellNacksAgain()
	}
	require.ElementsMatch(t, []string{"a: service-1: no room", "a: service-2: no room"}, up.take(t, 2))
	_ = p.close()
	require.ElementsMatch(t, []string{"a: service-1: resolved", "a: service-2: resolved"}, up.take(t, 2))
}

// TestNacksOfARelayAreRemembered checks that as many nacks of a relay are remembered as a relay
// passes on. Further ones are counted, and the relay's nodes may then lack any Service.
func TestNacksOfARelayAreRemembered(t *testing.T) {
	h := running(t, Options{Store: filled(t, 1)})
	p := connect(t, h, &pb.Hello{Kind: pb.ClientKind_CLIENT_KIND_RELAY})
	defer p.cancel()
	eventually(t, p.session.synced.Load)
	require.NoError(t, p.say(&pb.StreamRequest{Message: &pb.StreamRequest_Ack{Ack: &pb.Ack{
		Positions: []*pb.ShardPosition{{Shard: service(0).ServiceKey().Shard(2), Sequence: 1}},
	}}}))
	key := service(0).ServiceKey()
	for n := range wire.MaxRelayedNacks + 1 {
		if n == wire.MaxRelayedNacks {
			require.Zero(t, testutil.ToFloat64(h.metrics.droppedNacks))
			require.Empty(t, lacking(h, &key))
		}
		require.NoError(t, p.say(&pb.StreamRequest{Message: &pb.StreamRequest_Nack{Nack: &pb.Nack{
			Key: wire.KeyToProto(service(1).Key()), NodeName: fmt.Sprint("node-", n), Reason: "no room",
		}}}))
	}
	require.EqualValues(t, 1, testutil.ToFloat64(h.metrics.droppedNacks))
	at := lacking(h, &key)[0]
	require.Len(t, at.GetErrors(), wire.MaxRelayedNacks)
}

// TestARelayHearsWhatIsReached checks that a relay is sent the resource versions after the updates
// that they include, and that other clients are not.
func TestARelayHearsWhatIsReached(t *testing.T) {
	s := filled(t, 4)
	h := start(t, s).Hub
	relay, other := connect(t, h, &pb.Hello{Kind: pb.ClientKind_CLIENT_KIND_RELAY}), connect(t, h, &pb.Hello{})
	defer relay.cancel()
	defer other.cancel()
	slices := func(version uint64) model.ResourceVersions {
		return model.ResourceVersions{Services: 1, Slices: version}
	}
	// next reads until the given resource versions arrive, and returns how many updates came
	// before.
	var came []*wire.Response
	next := func(reached model.ResourceVersions) (updates int) {
		t.Helper()
		var at int
		eventually(t, func() bool {
			came = append(came, relay.read(t)...)
			for i, r := range came {
				if r.Heartbeat != nil {
					at = i
					return true
				}
			}
			return false
		})
		require.Equal(t, reached, wire.ResourceVersionsFromProto(came[at].Heartbeat.GetResourceVersions()))
		require.Empty(t, came[at].Heartbeat.GetDigest())
		for _, r := range came[:at] {
			if r.Update != nil {
				updates++
			}
		}
		came = came[at+1:]
		return updates
	}
	require.Equal(t, 2, next(slices(2)))
	eventually(t, func() bool { came = append(came, relay.read(t)...); return len(came) == 1 && came[0].InSync != nil })

	for i := range 4 { // of both shards
		s.Upsert(slice(i, 7), uint64(10+i))
	}
	h.publish()
	require.Equal(t, 2, next(slices(13)))
	s.Progress(model.KindSlice, 20) // nothing has changed
	h.publish()
	require.Zero(t, next(slices(20)))

	relay.set(false)
	s.Upsert(slice(0, 8), 30)
	h.publish()
	eventually(t, relay.waiting)
	for i := range 4 {
		s.Upsert(slice(i, 9), uint64(31+i))
		h.publish()
	}
	relay.set(true)
	require.Positive(t, next(slices(34)), "not before it has all of it")
	eventually(t, func() bool {
		var to uint64
		for _, r := range other.read(t) {
			require.Nil(t, r.Heartbeat)
			if r.Update != nil {
				to = max(to, r.Update.ResourceVersions.Slices)
			}
		}
		return to == 34
	})
}

// TestARelayReportsTheTimeOfItsLastNode checks that a relay reports a position with the time and
// the name of the last node to have it, whichever ack comes last. The time is not before the
// position arrived.
func TestARelayReportsTheTimeOfItsLastNode(t *testing.T) {
	now := time.Now()
	at := func(ms int) time.Time { return now.Add(time.Duration(ms) * time.Millisecond) }
	u := &relayModel{}
	m := newUpward(u, 1)
	c := newConvergence(1, newMetrics(nil), m.programmed)
	a, b, stuck := c.joinAgent("a"), c.joinAgent("b"), c.joinAgent("stuck")
	publish := func(sequence, upstream uint64) {
		m.updated(0, sequence, model.Position{Epoch: 1, Sequence: upstream})
		c.published(0, sequence, at(0), Changed{})
	}
	publish(1, 10)
	publish(2, 20)
	publish(3, 30)
	c.ack(stuck, 0, 1, at(1), "")
	c.ack(a, 0, 1, at(30), "")
	c.ack(b, 0, 1, at(20), "")
	require.Equal(t, []any{positionModel{10, at(30), "a"}}, u.queue)
	u.queue = nil
	c.ack(a, 0, 3, at(70), "")
	c.ack(b, 0, 3, at(80), "")
	c.resize(stuck, 0)
	require.Equal(t, []any{positionModel{30, at(80), "b"}}, u.queue, "of those that are left")
	u.queue = nil
	publish(4, 40)
	before := time.Now()
	// This is a publish of upstream that has changed nothing here.
	m.after([]model.Position{{Epoch: 1, Sequence: 50}})
	c.ack(b, 0, 4, at(0), "")
	c.ack(a, 0, 4, at(0), "")
	require.Len(t, u.queue, 1)
	require.EqualValues(t, 50, u.queue[0].(positionModel).sequence)
	require.False(t, u.queue[0].(positionModel).at.Before(before), "nobody can have had it before it came")
}

// lacking returns the clients that lack a Service.
func lacking(h *Hub, service *model.ServiceKey) []*pb.AgentStatus {
	return slices.DeleteFunc(h.Agents(service), func(a *pb.AgentStatus) bool { return !a.GetLacks() })
}
