// This test proves that the reported convergence times are those of the nodes' own times, by
// comparing them with a plain computation for random orders of acks, in a tree of relays.
package fanout

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/slicecast/slicecast/internal/model"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// fleetModel has a root and its relays with their convergence, and nodes that program and
// acknowledge in their own time. It also has a plain computation of what the root should report.
type fleetModel struct {
	registry *prometheus.Registry
	root     *convergence
	relays   []*relayModel
	direct   []*nodeModel
	joined   int // all nodes that ever joined
	all      []*publishModel
}

// publishModel is a publish of the root, and the plain computation of its nodes' state.
type publishModel struct {
	sequence uint64
	at       time.Time
	// of has its members: the direct nodes and the relays.
	of map[*member]*partModel
}

// partModel is how many nodes of a member count. If they have the publish, time is how long the
// last of them took.
type partModel struct {
	nodes int
	has   bool
	time  time.Duration
}

// nodeModel is an agent.
type nodeModel struct {
	member *member
	// programmed has the sequences that its kernel has, with their times. sent is how many of them
	// it has acknowledged.
	programmed []positionModel
	sent       int
	begun      uint64 // the last sequence published before it joined
}

type positionModel struct {
	sequence uint64
	at       time.Time
	last     string
}

// relayModel is a relay, and the messages to the root that have not arrived yet.
type relayModel struct {
	member   *member
	own      *convergence
	marks    *upward
	mark     uint64   // the root's sequence that its store has
	sequence uint64   // its own sequence
	reached  []uint64 // the root's sequence for each of its own, from 0 on
	nodes    []*nodeModel
	queue    []any // int is its number of nodes; positionModel is an ack
	// early lists reports whose time is before one of the relay's nodes had the position.
	early []string
}

func (r *relayModel) Path() ([]uint64, context.Context) { return nil, context.Background() }
func (r *relayModel) Mark(uint32) model.Position        { return model.Position{Epoch: 1, Sequence: r.mark} }
func (r *relayModel) Nack(*pb.Nack) bool                { return true }
func (r *relayModel) Nodes(count int)                   { r.queue = append(r.queue, count) }
func (r *relayModel) Programmed(_ uint32, p model.Position, at time.Time, last string) {
	r.queue = append(r.queue, positionModel{p.Sequence, at, last})
	for _, n := range r.nodes {
		if r.reached[n.begun] >= p.Sequence {
			continue // it joined with that
		}
		i := slices.IndexFunc(n.programmed, func(own positionModel) bool { return r.reached[own.sequence] >= p.Sequence })
		if i < 0 || n.programmed[i].at.After(at) {
			r.early = append(r.early, fmt.Sprintf("publish %d at %v: %s has %v", p.Sequence, at, n.member.name, n.programmed))
		}
	}
}

func (f *fleetModel) publish() {
	p := &publishModel{sequence: uint64(len(f.all) + 1), at: time.Now(), of: map[*member]*partModel{}}
	for _, n := range f.direct {
		p.of[n.member] = &partModel{nodes: 1}
	}
	for _, r := range f.relays {
		if r.member.nodes > 0 {
			p.of[r.member] = &partModel{nodes: r.member.nodes}
		}
	}
	f.all = append(f.all, p)
	f.root.published(0, p.sequence, p.at, Changed{})
}

// program lets a node's kernel catch up to a sequence.
func (n *nodeModel) program(to uint64) {
	from := n.begun
	if len(n.programmed) > 0 {
		from = n.programmed[len(n.programmed)-1].sequence
	}
	if to > from {
		n.programmed = append(n.programmed, positionModel{sequence: to, at: time.Now()})
	}
}

// ack acknowledges the next count of the positions that the node has programmed.
func (n *nodeModel) ack(c *convergence, count int) (acked []positionModel) {
	acked = n.programmed[n.sent:min(n.sent+count, len(n.programmed))]
	n.sent += len(acked)
	for _, p := range acked {
		c.ack(n.member, 0, p.sequence, p.at, "")
	}
	return acked
}

// acked records an ack in the plain computation.
func (f *fleetModel) acked(m *member, upTo positionModel) {
	for _, p := range f.all[:upTo.sequence] {
		if part := p.of[m]; part != nil && !part.has {
			part.has, part.time = true, max(upTo.at.Sub(p.at), 1)
		}
	}
}

// shrunk records in the plain computation that a member has at most this many nodes.
func (f *fleetModel) shrunk(m *member, nodes int) {
	for _, p := range f.all {
		if part := p.of[m]; part != nil && !part.has {
			if part.nodes = min(part.nodes, nodes); part.nodes == 0 {
				delete(p.of, m)
			}
		}
	}
}

// arrive delivers the next count of a relay's messages to the root.
func (f *fleetModel) arrive(r *relayModel, count int) {
	for range min(count, len(r.queue)) {
		next := r.queue[0]
		r.queue = r.queue[1:]
		switch next := next.(type) {
		case int:
			f.root.resize(r.member, next)
			f.shrunk(r.member, next)
		case positionModel:
			f.root.ack(r.member, 0, next.sequence, next.at, next.last)
			f.acked(r.member, next)
		}
	}
}

// feed lets a relay publish the root's publishes up to a sequence, as one Update of its own. If
// nothing changes, it has no Update.
func (r *relayModel) feed(to uint64, changes bool) {
	if to <= r.mark {
		return
	}
	r.mark = to
	positions := r.marks.before()
	if changes {
		r.sequence++
		r.reached = append(r.reached, to)
		r.marks.updated(0, r.sequence, positions[0])
		r.own.published(0, r.sequence, time.Now(), Changed{})
	} else {
		r.reached[r.sequence] = to
	}
	r.marks.after(positions)
}

func (r *relayModel) tellNodes() { r.Nodes(len(r.nodes)) }

// check compares what the root reports with the plain computation.
func (f *fleetModel) check(t *rapid.T) {
	for _, r := range f.relays {
		require.Empty(t, r.early)
	}
	known := map[uint64]Convergence{}
	for _, c := range f.root.latest() {
		known[c.Sequence] = c
	}
	for _, p := range f.all {
		var times []time.Duration
		nodes := 0
		for _, part := range p.of {
			nodes += part.nodes
			if part.has {
				times = append(times, slices.Repeat([]time.Duration{part.time}, part.nodes)...)
			}
		}
		slices.Sort(times)
		c, ok := known[p.sequence]
		require.Equal(t, nodes > 0, ok, "publish %d", p.sequence)
		if !ok {
			continue
		}
		require.Equal(t, nodes, c.Nodes, "publish %d", p.sequence)
		require.Len(t, times, c.Programmed, "publish %d", p.sequence)
		longest := time.Duration(0)
		for i, percent := range []int{50, 99, 100} {
			count := (nodes*percent + 99) / 100
			if len(times) < count {
				require.Zero(t, c.Times[i])
				continue
			}
			requireClose(t, times[count-1], c.Times[i], "%d %% of publish %d: %v", percent, p.sequence, times)
			require.GreaterOrEqual(t, c.Times[i], longest, "%d %% of publish %d", percent, p.sequence)
			longest = c.Times[i]
		}
		if len(times) == nodes {
			require.Equal(t, times[nodes-1], c.Times[2], "exactly")
			require.Equal(t, times[nodes-1], c.Last[0].Time)
		} else {
			require.Zero(t, c.Last[0].Time)
		}
		require.LessOrEqual(t, len(c.Last), keptNodes)
	}
}

// TestConvergenceIsThatOfTheNodesOwnTimes plays acks in any order of the times that they carry,
// while nodes join and leave, those of relays too.
func TestConvergenceIsThatOfTheNodesOwnTimes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		// This hides T.Deadline, which must not be called in the bubble.
		rapid.Check(struct{ testing.TB }{t}, playConvergence)
	})
}

func playConvergence(t *rapid.T) {
	f := &fleetModel{registry: prometheus.NewRegistry()}
	f.root = newConvergence(1, newMetrics(f.registry), nil)
	for i := range rapid.IntRange(0, 2).Draw(t, "relays") {
		r := &relayModel{reached: []uint64{0}}
		r.member = f.root.joinRelay(fmt.Sprint("relay-", i))
		r.marks = newUpward(r, 1)
		r.own = newConvergence(1, newMetrics(nil), r.marks.programmed)
		f.relays = append(f.relays, r)
	}
	join := func(c *convergence) *nodeModel {
		f.joined++
		return &nodeModel{member: c.joinAgent(fmt.Sprint("node-", f.joined)), begun: c.shards[0].last}
	}
	for _, r := range f.relays {
		for range rapid.IntRange(0, 4).Draw(t, "nodes of a relay") {
			r.nodes = append(r.nodes, join(r.own))
		}
		r.tellNodes()
		f.arrive(r, 1)
	}
	pick := func(nodes []*nodeModel) int { return rapid.IntRange(0, len(nodes)-1).Draw(t, "node") }
	for range rapid.IntRange(0, 8).Draw(t, "nodes") {
		f.direct = append(f.direct, join(f.root))
	}
	wait := func() { <-time.After(time.Duration(rapid.IntRange(0, 2_000_000).Draw(t, "pause")) * time.Microsecond) }
	few := func() int { return rapid.IntRange(1, 4).Draw(t, "count") }
	for range rapid.IntRange(1, 100).Draw(t, "steps") {
		wait()
		relay := -1
		if len(f.relays) > 0 {
			relay = rapid.IntRange(-1, len(f.relays)-1).Draw(t, "relay")
		}
		step := rapid.IntRange(0, 9).Draw(t, "step")
		switch {
		case step == 0 && len(f.all) < keptResults:
			f.publish()
		case step == 1 && relay < 0:
			f.direct = append(f.direct, join(f.root))
		case step == 1:
			r := f.relays[relay]
			r.nodes = append(r.nodes, join(r.own))
			r.tellNodes()
		case step == 2 && relay < 0 && len(f.direct) > 0:
			i := pick(f.direct)
			n := f.direct[i]
			f.direct = slices.Delete(f.direct, i, i+1)
			f.root.resize(n.member, 0)
			f.shrunk(n.member, 0)
		case step == 2 && relay >= 0 && len(f.relays[relay].nodes) > 0:
			r := f.relays[relay]
			i := pick(r.nodes)
			n := r.nodes[i]
			r.nodes = slices.Delete(r.nodes, i, i+1)
			r.tellNodes()
			r.own.resize(n.member, 0)
		case step == 3 && relay >= 0:
			r := f.relays[relay]
			behind := uint64(len(f.all)) - r.mark
			r.feed(r.mark+min(uint64(few()), behind), rapid.Bool().Draw(t, "changes"))
		case step == 4 && relay >= 0:
			f.arrive(f.relays[relay], few())
		case step == 5:
			f.root.observeOld(time.Now())
		case step >= 6 && relay < 0 && len(f.direct) > 0:
			n := f.direct[pick(f.direct)]
			if step < 8 {
				n.program(min(n.latest()+uint64(few()), uint64(len(f.all))))
				break
			}
			for _, p := range n.ack(f.root, few()) {
				f.acked(n.member, p)
			}
		case step >= 6 && relay >= 0 && len(f.relays[relay].nodes) > 0:
			r := f.relays[relay]
			n := r.nodes[pick(r.nodes)]
			if step < 8 {
				n.program(min(n.latest()+uint64(few()), r.sequence))
			} else {
				n.ack(r.own, few())
			}
		}
		f.check(t)
	}
	f.settle()
	f.check(t)
	f.checkHistograms(t)
}

// latest returns the last sequence that a node's kernel has.
func (n *nodeModel) latest() uint64 {
	if i := len(n.programmed); i > 0 {
		return n.programmed[i-1].sequence
	}
	return n.begun
}

// settle lets all nodes program and acknowledge everything, each in its own order.
func (f *fleetModel) settle() {
	for _, r := range f.relays {
		r.feed(uint64(len(f.all)), true)
	}
	catchUp := func(nodes []*nodeModel, to uint64) {
		for _, n := range nodes {
			<-time.After(time.Millisecond)
			n.program(to)
		}
	}
	for _, r := range f.relays {
		catchUp(r.nodes, r.sequence)
	}
	catchUp(f.direct, uint64(len(f.all)))
	for _, n := range slices.Backward(f.direct) {
		for _, p := range n.ack(f.root, len(n.programmed)) {
			f.acked(n.member, p)
		}
	}
	for _, r := range f.relays {
		for _, n := range slices.Backward(r.nodes) {
			n.ack(r.own, len(n.programmed))
		}
		f.arrive(r, len(r.queue))
	}
}

// checkHistograms checks that each publish with nodes is in each histogram, and that the times of a
// share are not below those of a smaller share.
func (f *fleetModel) checkHistograms(t *rapid.T) {
	publishes := uint64(0)
	for _, p := range f.all {
		if len(p.of) > 0 {
			publishes++
		}
	}
	families, err := f.registry.Gather()
	require.NoError(t, err)
	var smaller []uint64
	for _, family := range families {
		if family.GetName() != "slicecast_server_convergence_duration_seconds" {
			continue
		}
		require.Len(t, family.GetMetric(), len(shares))
		for _, m := range family.GetMetric() { // by label
			require.Equal(t, publishes, m.GetHistogram().GetSampleCount(), m)
			var within []uint64
			for i, b := range m.GetHistogram().GetBucket() {
				within = append(within, b.GetCumulativeCount())
				if smaller != nil {
					require.LessOrEqual(t, within[i], smaller[i], "within %v", b.GetUpperBound())
				}
			}
			smaller = within
		}
	}
	require.NotNil(t, smaller)
}
