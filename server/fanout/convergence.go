package fanout

import (
	"cmp"
	"math"
	"slices"
	"sync"
	"time"
)

// Shares of the nodes whose time is taken, as they are labelled.
var shares = [...]struct {
	label string
	share float64
}{{"0.5", 0.5}, {"0.99", 0.99}, {"1", 1}}

// What is kept of publishes.
const (
	// maxOpen is how many publishes of a shard may wait for nodes to have them programmed; of older ones no time is taken.
	maxOpen = 256
	// keptResults is how many publishes that all nodes have are remembered.
	keptResults = 64
)

// convergence knows how far the nodes' kernels have come with what was published.
type convergence struct {
	metrics *metrics
	// done is told when all nodes have a shard's Updates up to a sequence.
	done   func(shard uint32, sequence uint64)
	shards []shardConvergence

	mu      sync.Mutex
	results []Convergence // of the latest publishes, oldest first
}

// Convergence is how long it took until nodes had an Update programmed.
type Convergence struct {
	Shard     uint32
	Sequence  uint64
	Published time.Time
	// Nodes that were connected when it was published and still are, and how many of them have it.
	Nodes, Programmed int
	// Times until half, 99 % and all of them had it; 0: not yet.
	Times [len(shares)]time.Duration
}

type shardConvergence struct {
	mu    sync.Mutex
	nodes int    // that are connected
	last  uint64 // sequence of the latest Update
	// open are the Updates that some node does not have, oldest first.
	open []*Convergence
}

// member is a stream's part in it. A relay stands for all of its nodes.
type member struct {
	nodes int
	acked []uint64 // by shard; what was published before the stream joined counts as acked
	told  []uint64 // by shard; what the stream has acknowledged itself
	// joined is acked as it was at first: in what was published before, its nodes have no part.
	joined []uint64
}

func newConvergence(shards uint32, m *metrics) *convergence {
	return &convergence{metrics: m, shards: make([]shardConvergence, shards), done: func(uint32, uint64) {}}
}

// published tells of an Update, before any client can have it.
func (c *convergence) published(shard uint32, sequence uint64, at time.Time) {
	s := &c.shards[shard]
	s.mu.Lock()
	s.last = sequence
	nobody := s.nodes == 0
	if !nobody {
		s.open = append(s.open, &Convergence{Shard: shard, Sequence: sequence, Published: at, Nodes: s.nodes})
		if len(s.open) > maxOpen {
			s.open = slices.Delete(s.open, 0, 1)
			c.metrics.unconverged.Inc()
		}
	}
	s.mu.Unlock()
	if nobody {
		c.done(shard, sequence)
	}
}

// join makes a stream's nodes count for what is published from now on.
func (c *convergence) join(nodes int) *member {
	m := &member{nodes: nodes, acked: make([]uint64, len(c.shards)), told: make([]uint64, len(c.shards))}
	for i := range c.shards {
		s := &c.shards[i]
		s.mu.Lock()
		m.acked[i] = s.last
		s.nodes += nodes
		s.mu.Unlock()
	}
	m.joined = slices.Clone(m.acked)
	return m
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
		for _, p := range s.open[s.after(m.joined[i]):] {
			p.Nodes += by
			if p.Sequence <= m.acked[i] {
				p.Programmed += by
			}
		}
		done := c.settle(s, 0, len(s.open), now)
		s.mu.Unlock()
		if done > 0 {
			c.done(uint32(i), done)
		}
	}
	m.nodes = nodes
}

// ack tells that a stream's nodes had a shard programmed up to a sequence at a time.
func (c *convergence) ack(m *member, shard uint32, sequence uint64, at time.Time) {
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
		p.Programmed += m.nodes
	}
	m.acked[shard] = sequence
	done := c.settle(s, from, to, at)
	s.mu.Unlock()
	if done > 0 {
		c.done(shard, done)
	}
}

// after gives the index of the first open Update that is later than a sequence.
func (s *shardConvergence) after(sequence uint64) int {
	i, _ := slices.BinarySearchFunc(s.open, sequence+1, func(p *Convergence, sequence uint64) int { return cmp.Compare(p.Sequence, sequence) })
	return i
}

// settle looks at some of the open Updates: it takes the times that can be taken, and closes what all nodes have. It gives the
// highest sequence closed.
func (c *convergence) settle(s *shardConvergence, from, to int, at time.Time) (done uint64) {
	left := slices.DeleteFunc(s.open[from:to], func(p *Convergence) bool {
		for i := range shares {
			if p.Times[i] == 0 && p.Programmed >= int(math.Ceil(shares[i].share*float64(p.Nodes))) && p.Nodes > 0 {
				p.Times[i] = max(at.Sub(p.Published), 1)
				c.metrics.convergence[i].Observe(p.Times[i].Seconds())
			}
		}
		if p.Programmed < p.Nodes {
			return false
		}
		done = max(done, p.Sequence)
		if p.Nodes > 0 {
			c.remember(*p)
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

// latest gives the publishes that wait for nodes and those that were closed last, newest first.
func (c *convergence) latest() []Convergence {
	var out []Convergence
	for i := range c.shards {
		s := &c.shards[i]
		s.mu.Lock()
		for _, p := range s.open {
			out = append(out, *p)
		}
		s.mu.Unlock()
	}
	c.mu.Lock()
	out = append(out, c.results...)
	c.mu.Unlock()
	slices.SortFunc(out, func(a, b Convergence) int { return b.Published.Compare(a.Published) })
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
				if p.Sequence > m.acked[i] {
					behind = max(behind, now.Sub(p.Published))
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
