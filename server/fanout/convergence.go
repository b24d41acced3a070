package fanout

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"time"
)

// shares are the shares of the nodes whose time is known, in percent, as they are labelled.
var shares = [...]struct {
	label   string
	percent int
}{{"0.5", 50}, {"0.99", 99}, {"1", 100}}

// shareOf returns how many nodes are a share of so many.
func shareOf(percent, nodes int) int { return (percent*nodes + 99) / 100 }

// Bounds on what is kept of publishes.
const (
	// maxOpen is how many publishes of a shard may wait for nodes to have them programmed, and maxAllOpen how many of all
	// shards together; of older ones no time is taken.
	maxOpen, maxAllOpen = 256, 8192
	// keptResults is how many publishes that all nodes have are remembered.
	keptResults = 64
	// keptNodes is how many of the nodes that were last are named.
	keptNodes = 3
)

// lateAcks is how long after a publish an ack may still come of a node that was among the first: agents and relays keep an ack
// back for 4 s at most.
const lateAcks = 10 * time.Second

// convergence knows how far the nodes' kernels have come with what was published.
//
// Acks are coalesced, and come in any order of the times that they carry. So an Update keeps a sketch of its nodes' own times,
// and the time of a share is an order statistic of these, whichever ack was the last.
//
// What holds:
//
//  1. A time is never less than the true one, and more by no more than the error of sketch. As long as nodes have not
//     reported, it is an upper bound: what they report can only make it less.
//  2. The times of the shares do not fall from one share to the next, in an Update and among its samples in the histograms.
//  3. The nodes of an Update are those that were connected when it was published, without those that left before they had it.
//     For each shard, Nodes less Programmed is the sum of the weights of those members that have not acknowledged it.
//  4. The nodes of a relay count as having an Update when the last of them has it. Of its nodes as many take part as it has
//     had at the least from the publish until its ack.
type convergence struct {
	metrics *metrics
	// done is told when all nodes have a shard's Updates up to one.
	done   func(shard uint32, c completed)
	shards []shardConvergence
	most   int // how many Updates of a shard may be open

	mu      sync.Mutex
	results []Convergence // of the latest publishes, oldest first; guarded by mu
	// members are those with nodes; guarded by mu.
	members map[*member]struct{}
}

// completed is an Update that all nodes have.
type completed struct {
	sequence uint64
	// at is when the last node had it, last that node's name.
	at   time.Time
	last string
}

// Convergence is how long it took until nodes had an Update programmed.
type Convergence struct {
	Shard     uint32
	Sequence  uint64
	Published time.Time
	// Nodes that were connected when it was published, but for those that left without it, and how many of them have it.
	Nodes, Programmed int
	// Times until half, 99 % and all of them had it; 0 means not yet.
	Times [len(shares)]time.Duration
	// Last are nodes that lack it, by name, and then those that took longest, slowest first; keptNodes at most. A relay of
	// which nodes lack it counts as one.
	Last []NodeTime
}

// NodeTime is how long a node took; 0 means that it does not have the Update yet.
type NodeTime struct {
	Node string
	Time time.Duration
}

type shardConvergence struct {
	mu    sync.Mutex
	nodes int    // that are connected
	last  uint64 // sequence of the latest Update
	// open are the Updates that some node does not have, oldest first.
	open []*openUpdate
}

// openUpdate is an Update that some node does not have.
type openUpdate struct {
	sequence          uint64
	published         time.Time
	nodes, programmed int
	times             sketch
	slowest           []NodeTime // of those that have it, slowest first
	// observed is how many of the shares are in the histograms, and longest the longest time there.
	observed int
	longest  time.Duration
}

// member is a stream's part in it. A relay stands for all of its nodes.
type member struct {
	name  string
	nodes int
	acked []uint64 // by shard; what was published before the stream joined counts as acked
	told  []uint64 // by shard; what the stream has acknowledged itself
	// weights are a relay's, by shard; nil means that the member is one node. Guarded by the shard's lock.
	weights [][]weight
}

// weight is how many nodes of a relay take part in the Updates after a sequence: no more than it has had since. The weights of a
// shard ascend in both.
type weight struct {
	after uint64
	nodes int
}

func newConvergence(shards uint32, m *metrics) *convergence {
	return &convergence{
		metrics: m, shards: make([]shardConvergence, shards), done: func(uint32, completed) {},
		most: max(1, min(maxOpen, maxAllOpen/int(shards))), members: make(map[*member]struct{}),
	}
}

// published notes an Update, before any client can have it.
func (c *convergence) published(shard uint32, sequence uint64, at time.Time) {
	s := &c.shards[shard]
	s.mu.Lock()
	s.last = sequence
	nobody := s.nodes == 0
	if !nobody {
		s.open = append(s.open, &openUpdate{sequence: sequence, published: at, nodes: s.nodes})
		if len(s.open) > c.most {
			c.observe(s.open[0])
			s.open = slices.Delete(s.open, 0, 1)
			c.metrics.unconverged.Inc()
		}
	}
	s.mu.Unlock()
	if nobody {
		c.done(shard, completed{sequence: sequence, at: at})
	}
}

// joinAgent makes a node count for what is published from now on.
func (c *convergence) joinAgent(name string) *member {
	return c.join(&member{name: name, nodes: 1})
}

// joinRelay does the same for a relay, which has no nodes before it is resized.
func (c *convergence) joinRelay(name string) *member {
	return c.join(&member{name: name, weights: make([][]weight, len(c.shards))})
}

func (c *convergence) join(m *member) *member {
	m.acked, m.told = make([]uint64, len(c.shards)), make([]uint64, len(c.shards))
	for i := range c.shards {
		s := &c.shards[i]
		s.mu.Lock()
		m.acked[i] = s.last
		s.nodes += m.nodes
		s.mu.Unlock()
	}
	c.list(m)
	return m
}

// list keeps the members that have nodes.
func (c *convergence) list(m *member) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if m.nodes > 0 {
		c.members[m] = struct{}{}
	} else {
		delete(c.members, m)
	}
}

// resize changes the number of nodes that a stream stands for; to 0 when it ends, so that nobody waits for them any more.
func (c *convergence) resize(m *member, nodes int) {
	by := nodes - m.nodes
	if by == 0 {
		return
	}
	now := time.Now()
	for i := range c.shards {
		s := &c.shards[i]
		s.mu.Lock()
		s.nodes += by
		from := s.after(m.acked[i])
		for _, p := range s.open[from:] {
			p.nodes -= max(0, m.weight(i, p.sequence)-nodes)
		}
		m.reweigh(i, nodes, s)
		done := c.settle(s, from, len(s.open), uint32(i), now)
		s.mu.Unlock()
		if done.sequence > 0 {
			c.done(uint32(i), done)
		}
	}
	m.nodes = nodes
	c.list(m)
}

// weight returns how many of the member's nodes take part in an Update that it has not acknowledged.
func (m *member) weight(shard int, sequence uint64) int {
	if m.weights == nil {
		return 1
	}
	nodes := 0
	for _, w := range m.weights[shard] {
		if w.after >= sequence {
			break
		}
		nodes = w.nodes
	}
	return nodes
}

// reweigh notes a relay's number of nodes: more of them take part in what comes, fewer also in what is open.
func (m *member) reweigh(shard, nodes int, s *shardConvergence) {
	if m.weights == nil {
		return
	}
	all := m.weights[shard]
	next := weight{after: s.last, nodes: nodes}
	if i := slices.IndexFunc(all, func(w weight) bool { return w.nodes >= nodes }); i >= 0 {
		next.after = all[i].after
		all = all[:i]
	} else if n := len(all); n > 0 && all[n-1].after == s.last {
		all = all[:n-1]
	}
	m.weights[shard] = append(all, next)
	m.forgetWeights(shard, s)
}

// forgetWeights forgets the weights of Updates that are not open any more, so that there is at most one for each that is, and
// one for what comes.
func (m *member) forgetWeights(shard int, s *shardConvergence) {
	if m.weights == nil {
		return
	}
	closed := m.acked[shard]
	if len(s.open) > 0 {
		closed = max(closed, s.open[0].sequence-1)
	} else {
		closed = s.last
	}
	for all := m.weights[shard]; len(all) > 1 && all[1].after <= closed; all = m.weights[shard] {
		m.weights[shard] = slices.Delete(all, 0, 1)
	}
}

// ack notes that a stream's nodes have had a shard programmed up to a sequence since a time. A relay's last node may be named.
func (c *convergence) ack(m *member, shard uint32, sequence uint64, at time.Time, last string) {
	s := &c.shards[shard]
	s.mu.Lock()
	m.told[shard] = max(m.told[shard], sequence)
	if sequence <= m.acked[shard] {
		s.mu.Unlock()
		return
	}
	// A node that is stuck keeps many open, of which the acks of all others touch few.
	from, to := s.after(m.acked[shard]), s.after(sequence)
	for _, p := range s.open[from:to] {
		if nodes := m.weight(int(shard), p.sequence); nodes > 0 {
			p.programmed += nodes
			p.took(at, nodes, cmp.Or(last, m.name))
		}
	}
	m.acked[shard] = sequence
	done := c.settle(s, from, to, shard, at)
	m.forgetWeights(int(shard), s)
	s.mu.Unlock()
	if done.sequence > 0 {
		c.done(shard, done)
	}
}

// after returns the index of the first open Update that is later than a sequence.
func (s *shardConvergence) after(sequence uint64) int {
	i, _ := slices.BinarySearchFunc(s.open, sequence+1, func(p *openUpdate, sequence uint64) int { return cmp.Compare(p.sequence, sequence) })
	return i
}

// took notes nodes that have the Update since a time. One that is named stands for all of them.
func (p *openUpdate) took(at time.Time, nodes int, name string) {
	t := max(at.Sub(p.published), 1) // 0 means not yet
	p.times.add(t, nodes)
	i := len(p.slowest)
	for i > 0 && p.slowest[i-1].Time < t {
		i--
	}
	if i == keptNodes {
		return
	}
	if p.slowest == nil {
		p.slowest = make([]NodeTime, 0, keptNodes)
	}
	p.slowest = slices.Insert(p.slowest[:min(len(p.slowest), keptNodes-1)], i, NodeTime{Node: name, Time: t})
}

// time returns when a share of the nodes had the Update, as far as they have reported; 0 means not yet.
func (p *openUpdate) time(share int) time.Duration {
	if n := shareOf(shares[share].percent, p.nodes); n > 0 && p.programmed >= n {
		return p.times.rank(n)
	}
	return 0
}

// result returns what is known of the Update.
func (p *openUpdate) result(shard uint32) Convergence {
	r := Convergence{Shard: shard, Sequence: p.sequence, Published: p.published, Nodes: p.nodes, Programmed: p.programmed, Last: p.slowest}
	for i := range r.Times {
		r.Times[i] = p.time(i)
	}
	return r
}

// observe puts the times that are known into the histograms, each once.
func (c *convergence) observe(p *openUpdate) {
	for ; p.observed < len(shares); p.observed++ {
		t := p.time(p.observed)
		if t == 0 {
			return
		}
		p.longest = max(p.longest, t) // some nodes may have left since a smaller share was observed
		c.metrics.convergence[p.observed].Observe(p.longest.Seconds())
	}
}

// observeOld does so for Updates that some node does not have, once acks of those that were faster have come: a node that is stuck
// does not keep the others out of the histograms.
func (c *convergence) observeOld(now time.Time) {
	for i := range c.shards {
		s := &c.shards[i]
		s.mu.Lock()
		for _, p := range s.open {
			if now.Sub(p.published) < lateAcks {
				break
			}
			c.observe(p)
		}
		s.mu.Unlock()
	}
}

// settle closes those of some open Updates that all nodes have, and returns the latest of them. If no nodes are left, they have it
// now.
func (c *convergence) settle(s *shardConvergence, from, to int, shard uint32, now time.Time) (done completed) {
	left := slices.DeleteFunc(s.open[from:to], func(p *openUpdate) bool {
		if p.programmed < p.nodes {
			return false
		}
		at, last := now, ""
		if p.nodes > 0 {
			c.observe(p)
			c.remember(p.result(shard))
			at, last = p.published.Add(p.times.max), p.slowest[0].Node
		}
		done.sequence = p.sequence
		if at.After(done.at) {
			done.at, done.last = at, last
		}
		return true
	})
	s.open = slices.Delete(s.open, from+len(left), to)
	return done
}

func (c *convergence) remember(p Convergence) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.results) == keptResults {
		c.results = slices.Delete(c.results, 0, 1)
	}
	c.results = append(c.results, p)
}

// latest returns the publishes that wait for nodes and those that were closed last, newest first.
func (c *convergence) latest() []Convergence {
	c.mu.Lock()
	out := slices.Clone(c.results)
	members := slices.Collect(maps.Keys(c.members))
	c.mu.Unlock()
	slices.SortFunc(members, func(a, b *member) int { return cmp.Compare(a.name, b.name) })
	for i := range c.shards {
		s := &c.shards[i]
		s.mu.Lock()
		lacking := s.lacking(i, members)
		for n, p := range s.open {
			r := p.result(uint32(i))
			r.Last = slices.Concat(lacking[n], p.slowest[:min(len(p.slowest), keptNodes-len(lacking[n]))])
			out = append(out, r)
		}
		s.mu.Unlock()
	}
	slices.SortStableFunc(out, func(a, b Convergence) int { return b.Published.Compare(a.Published) })
	return out
}

// lacking returns, for each open Update, the first keptNodes members that lack it.
func (s *shardConvergence) lacking(shard int, members []*member) [][]NodeTime {
	out := make([][]NodeTime, len(s.open))
	full := len(s.open) // the Updates from here on have as many as are kept: a node that lacks one lacks all later ones
	for _, m := range members {
		for i := s.after(m.acked[shard]); i < full; i++ {
			if m.weight(shard, s.open[i].sequence) > 0 {
				out[i] = append(out[i], NodeTime{Node: m.name})
			}
		}
		for full > 0 && len(out[full-1]) == keptNodes {
			full--
		}
		if full == 0 {
			break
		}
	}
	return out
}

// lag gives how far a stream's nodes are behind: in sequences, over all shards, and since when.
func (c *convergence) lag(m *member, now time.Time) (sequences uint64, behind time.Duration) {
	for i := range c.shards {
		s := &c.shards[i]
		s.mu.Lock()
		if s.last > m.acked[i] {
			sequences += s.last - m.acked[i]
			for _, p := range s.open {
				if p.sequence > m.acked[i] {
					behind = max(behind, now.Sub(p.published))
					break
				}
			}
		}
		s.mu.Unlock()
	}
	return sequences, behind
}

// has tells whether a stream's nodes have a shard programmed up to a sequence, as far as they have said.
func (c *convergence) has(m *member, shard uint32, sequence uint64) bool {
	s := &c.shards[shard]
	s.mu.Lock()
	defer s.mu.Unlock()
	return m.told[shard] >= sequence
}

// caughtUp tells whether a stream's nodes have said that they have what was published before the stream joined.
func (c *convergence) caughtUp(m *member) bool {
	for i := range c.shards {
		s := &c.shards[i]
		s.mu.Lock()
		behind := m.told[i] < m.acked[i]
		s.mu.Unlock()
		if behind {
			return false
		}
	}
	return true
}
