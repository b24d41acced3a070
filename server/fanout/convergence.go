package fanout

import (
	"cmp"
	"iter"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/slicecast/slicecast/internal/model"
)

// shares are the shares of nodes whose times are measured, in percent, and their values of the
// metric's label.
var shares = [...]struct {
	label   string
	percent int
}{{"0.5", 50}, {"0.99", 99}, {"1", 100}}

// shareOf returns how many of the given number of nodes make up a share, rounded up.
func shareOf(percent, nodes int) int { return (percent*nodes + 99) / 100 }

// These constants bound what is kept of Updates.
const (
	// maxOpen bounds the open Updates of a shard, and maxAllOpen those of all shards together. An
	// older Update is closed without its times.
	maxOpen, maxAllOpen = 256, 8192
	// keptResults is how many Updates that all nodes have are remembered.
	keptResults = 64
	// keptNodes is how many of an Update's last nodes are named, and keptServices how many of the
	// Services that it changes.
	keptNodes, keptServices = 3, 3
)

// lateAcks is how long after a publish an ack may still arrive from one of the first nodes. Agents
// and relays hold an ack back for 4 s at most.
const lateAcks = 10 * time.Second

// convergence measures how long nodes' kernels take to hold each published Update.
//
// Acks are coalesced, and do not arrive in the order of the times that they carry. So each Update
// keeps a sketch of its nodes' own times. The time of a share is an order statistic of the sketch,
// whatever the order of the acks was.
//
// Invariants:
//
//  1. A time is never less than the true one, and exceeds it by at most the error of sketch. Until
//     all nodes have reported it is an upper bound, which later reports can only lower.
//  2. Within an Update, and within its samples in the histograms, the time of a larger share is not
//     less than that of a smaller one.
//  3. The nodes of an Update are those that were connected when it was published, without those
//     that left before they had it. For each shard, Nodes less Programmed is the sum of the weights
//     of the members that have not acknowledged the Update.
//  4. The nodes of a relay have an Update when the last of them has it. The relay's weight in an
//     Update is the lowest number of nodes that it has had from the publish until its ack.
type convergence struct {
	metrics *metrics
	// done is called when all nodes have the Updates of a shard up to a sequence.
	done   func(shard uint32, c completed)
	shards []shardConvergence
	most   int // bounds the open Updates of a shard

	mu      sync.Mutex // guards results and members; a shard's mu is locked before it
	results []result   // the latest closed Updates, oldest first
	// members are the members with at least one node.
	members map[*member]struct{}
}

// completed identifies the latest of the Updates that all nodes have.
type completed struct {
	sequence uint64
	// at is when the last node had the Update, and last is that node's name.
	at   time.Time
	last string
}

// Convergence describes how long nodes took to have an Update programmed.
type Convergence struct {
	Shard     uint32
	Sequence  uint64
	Published time.Time
	Changed   Changed
	// Nodes is the number of nodes that were connected when the Update was published, without those
	// that left before they had it. Programmed is how many of them have it.
	Nodes, Programmed int
	// Times are how long it took until 50 %, 99 % and all of the nodes had it; 0 means not yet.
	Times [len(shares)]time.Duration
	// Last names nodes that lack the Update, by name, and then the slowest of those that have it,
	// slowest first. It has keptNodes entries at most. A relay whose nodes lack the Update is one
	// entry.
	Last []NodeTime
}

// result is a closed Update with the times of all of its nodes. It does not change.
type result struct {
	Convergence

	times sketch
}

// Step is a point of an Update's curve: how many nodes had it within a time.
type Step struct {
	Time  time.Duration
	Nodes int
}

// NodeTime is how long a node took to have an Update programmed; 0 means that it lacks the Update.
type NodeTime struct {
	Node string
	Time time.Duration
}

// Changed says what an Update changes.
type Changed struct {
	// Services has keptServices entries at most. More means that the Update changes further ones.
	Services []model.ServiceKey
	More     bool
	// ResourceVersions are those of the Update.
	ResourceVersions model.ResourceVersions
}

// changedBy returns what an Update changes. Its cost does not depend on the size of the Update.
func changedBy(u *model.Update) Changed {
	c := Changed{ResourceVersions: u.ResourceVersions}
	for key := range changedServices(u) {
		switch {
		case slices.Contains(c.Services, key):
		case len(c.Services) == keptServices:
			c.More = true
			return c
		default:
			c.Services = append(c.Services, key)
		}
	}
	return c
}

// changedServices returns the Service of each object that an Update names.
func changedServices(u *model.Update) iter.Seq[model.ServiceKey] {
	return func(yield func(model.ServiceKey) bool) {
		for _, s := range u.Services {
			if !yield(model.ServiceKey{Namespace: s.Namespace, Name: s.Name}) {
				return
			}
		}
		for _, s := range u.Slices {
			if !yield(model.ServiceKey{Namespace: s.Namespace, Name: s.Service}) {
				return
			}
		}
		for _, d := range u.Deltas {
			if !yield(model.ServiceKey{Namespace: d.Namespace, Name: d.Service}) {
				return
			}
		}
		for _, d := range u.Left {
			if !yield(d.Service) {
				return
			}
		}
	}
}

type shardConvergence struct {
	mu    sync.Mutex // guards the fields below and the members' entries for the shard
	nodes int        // connected nodes
	last  uint64     // sequence of the latest Update
	// open are the Updates that some node lacks, oldest first.
	open []*openUpdate
}

type openUpdate struct {
	sequence          uint64
	published         time.Time
	changed           Changed
	nodes, programmed int
	times             sketch
	slowest           []NodeTime // nodes that have the Update, slowest first
	// observed is how many of the shares are in the histograms, and longest is the longest time
	// among these.
	observed int
	longest  time.Duration
}

// member is the part of one client in the convergence. A relay's member stands for all nodes of the
// relay. The shard's lock guards the entries of each slice.
type member struct {
	name     string
	nodes    int
	acked    []uint64 // by shard; Updates from before the client joined count as acked
	reported []uint64 // by shard; the sequence of the client's own latest ack
	// weights are those of a relay, by shard, and nil for an agent. An agent's weight is 1.
	weights [][]weight
}

// weight is the number of a relay's nodes in the Updates after a sequence; see invariant 4 of
// convergence. The weights of a shard ascend in both fields.
type weight struct {
	after uint64
	nodes int
}

// newConvergence returns the convergence of a server without clients. done may be nil.
func newConvergence(shards uint32, m *metrics, done func(shard uint32, c completed)) *convergence {
	if done == nil {
		done = func(uint32, completed) {}
	}
	return &convergence{
		metrics: m, shards: make([]shardConvergence, shards), done: done,
		most: max(1, min(maxOpen, maxAllOpen/int(shards))), members: make(map[*member]struct{}),
	}
}

// published adds an Update. It must be called before any client can have the Update.
func (c *convergence) published(shard uint32, sequence uint64, at time.Time, changed Changed) {
	s := &c.shards[shard]
	s.mu.Lock()
	s.last = sequence
	nobody := s.nodes == 0
	if !nobody {
		s.open = append(s.open, &openUpdate{sequence: sequence, published: at, changed: changed, nodes: s.nodes})
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

// openUpdates returns the number of open Updates of all shards.
func (c *convergence) openUpdates() (n int) {
	for i := range c.shards {
		s := &c.shards[i]
		s.mu.Lock()
		n += len(s.open)
		s.mu.Unlock()
	}
	return n
}

// joinAgent adds a node, which counts for Updates that are published from now on.
func (c *convergence) joinAgent(name string) *member {
	return c.join(&member{name: name, nodes: 1})
}

// joinRelay adds a relay. It has no nodes until resize sets their number.
func (c *convergence) joinRelay(name string) *member {
	return c.join(&member{name: name, weights: make([][]weight, len(c.shards))})
}

func (c *convergence) join(m *member) *member {
	m.acked, m.reported = make([]uint64, len(c.shards)), make([]uint64, len(c.shards))
	c.each(func(i int, s *shardConvergence) {
		m.acked[i] = s.last
		s.nodes += m.nodes
	})
	c.list(m)
	return m
}

// each calls f for each shard, under the shard's lock.
func (c *convergence) each(f func(i int, s *shardConvergence)) {
	for i := range c.shards {
		s := &c.shards[i]
		s.mu.Lock()
		f(i, s)
		s.mu.Unlock()
	}
}

// list adds the member to members if it has nodes, and removes it otherwise.
func (c *convergence) list(m *member) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if m.nodes > 0 {
		c.members[m] = struct{}{}
	} else {
		delete(c.members, m)
	}
}

// resize sets the number of nodes that a client stands for. When its stream ends it is set to 0, so
// that no Update waits for these nodes any more.
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

// weight returns how many of the member's nodes count in an Update that it has not acknowledged.
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

// reweigh sets a relay's number of nodes, which keeps invariant 4 of convergence. A higher number
// only counts in later Updates. A lower number also counts in open ones.
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

// forgetWeights drops the weights that only closed Updates used. At most one weight for each open
// Update remains, and one for later Updates.
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

// ack records that a client's nodes have had a shard programmed up to a sequence since at. last may
// name the last node of a relay.
func (c *convergence) ack(m *member, shard uint32, sequence uint64, at time.Time, last string) {
	s := &c.shards[shard]
	s.mu.Lock()
	m.reported[shard] = max(m.reported[shard], sequence)
	if sequence <= m.acked[shard] {
		s.mu.Unlock()
		return
	}
	// A stuck node keeps many Updates open. The acks of the other nodes only visit few of them.
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
	i, _ := slices.BinarySearchFunc(s.open, sequence+1, func(p *openUpdate, sequence uint64) int {
		return cmp.Compare(p.sequence, sequence)
	})
	return i
}

// took records that this many nodes have had the Update since at. One name stands for all of them.
func (p *openUpdate) took(at time.Time, nodes int, name string) {
	t := max(at.Sub(p.published), 1) // 0 would mean not yet
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

// time returns how long a share of the nodes took, as far as they have reported; 0 means not yet.
func (p *openUpdate) time(share int) time.Duration {
	if n := shareOf(shares[share].percent, p.nodes); n > 0 && p.programmed >= n {
		return p.times.rank(n)
	}
	return 0
}

func (p *openUpdate) result(shard uint32) Convergence {
	r := Convergence{
		Shard: shard, Sequence: p.sequence, Published: p.published, Changed: p.changed,
		Nodes: p.nodes, Programmed: p.programmed, Last: p.slowest,
	}
	for i := range r.Times {
		r.Times[i] = p.time(i)
	}
	return r
}

// observe adds the known times to the histograms, each of them once.
func (c *convergence) observe(p *openUpdate) {
	for ; p.observed < len(shares); p.observed++ {
		t := p.time(p.observed)
		if t == 0 {
			return
		}
		// Some nodes may have left since a smaller share was observed; see invariant 2.
		p.longest = max(p.longest, t)
		c.metrics.convergence[p.observed].Observe(p.longest.Seconds())
	}
}

// observeOld observes open Updates whose acks from fast nodes must have arrived. So a stuck node
// does not keep the times of the others out of the histograms.
func (c *convergence) observeOld(now time.Time) {
	c.each(func(_ int, s *shardConvergence) {
		for _, p := range s.open {
			if now.Sub(p.published) < lateAcks {
				break
			}
			c.observe(p)
		}
	})
}

// settle closes the Updates of s.open[from:to] that all of their nodes have, and returns the latest
// of them. If an Update has no nodes left, it is complete at now.
func (c *convergence) settle(s *shardConvergence, from, to int, shard uint32, now time.Time) (done completed) {
	left := slices.DeleteFunc(s.open[from:to], func(p *openUpdate) bool {
		if p.programmed < p.nodes {
			return false
		}
		at, last := now, ""
		if p.nodes > 0 {
			c.observe(p)
			c.remember(result{p.result(shard), p.times})
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

func (c *convergence) remember(p result) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.results) == keptResults {
		c.results = slices.Delete(c.results, 0, 1)
	}
	c.results = append(c.results, p)
}

// latest returns the open Updates and those that were closed last, newest first.
func (c *convergence) latest() []Convergence {
	c.mu.Lock()
	out := make([]Convergence, len(c.results))
	for i, r := range c.results {
		out[i] = r.Convergence
	}
	members := slices.Collect(maps.Keys(c.members))
	c.mu.Unlock()
	slices.SortFunc(members, func(a, b *member) int { return cmp.Compare(a.name, b.name) })
	c.each(func(i int, s *shardConvergence) {
		lacking := s.lacking(i, members)
		for n, p := range s.open {
			r := p.result(uint32(i))
			r.Last = slices.Concat(lacking[n], p.slowest[:min(len(p.slowest), keptNodes-len(lacking[n]))])
			out = append(out, r)
		}
	})
	slices.SortStableFunc(out, func(a, b Convergence) int { return b.Published.Compare(a.Published) })
	return out
}

// steps returns the curve of an Update, by time. It is empty if no node has the Update, and if the
// Update is not known any more.
func (c *convergence) steps(shard uint32, sequence uint64) []Step {
	s := &c.shards[shard]
	s.mu.Lock()
	defer s.mu.Unlock()
	if i := s.after(sequence - 1); i < len(s.open) && s.open[i].sequence == sequence {
		return s.open[i].times.steps()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range c.results {
		if r.Shard == shard && r.Sequence == sequence {
			return r.times.steps()
		}
	}
	return nil
}

// lacking returns, for each open Update, the first keptNodes members that lack it.
func (s *shardConvergence) lacking(shard int, members []*member) [][]NodeTime {
	out := make([][]NodeTime, len(s.open))
	// The Updates from index full on have keptNodes entries already. A node that lacks one Update
	// lacks all later ones, so full only decreases.
	full := len(s.open)
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

// lag returns how many sequences a client's nodes are behind, summed over all shards, and for how
// long the oldest Update that they lack has been published.
func (c *convergence) lag(m *member, now time.Time) (sequences uint64, behind time.Duration) {
	c.each(func(i int, s *shardConvergence) {
		sequences += s.last - min(s.last, m.acked[i])
		if first := s.after(m.acked[i]); first < len(s.open) {
			behind = max(behind, now.Sub(s.open[first].published))
		}
	})
	return sequences, behind
}

// has reports whether a client's nodes have acknowledged a shard up to a sequence.
func (c *convergence) has(m *member, shard uint32, sequence uint64) bool {
	s := &c.shards[shard]
	s.mu.Lock()
	defer s.mu.Unlock()
	return m.reported[shard] >= sequence
}

// caughtUp reports whether a client's nodes have acknowledged everything that was published before
// the client joined.
func (c *convergence) caughtUp(m *member) bool {
	behind := false
	c.each(func(i int, _ *shardConvergence) { behind = behind || m.reported[i] < m.acked[i] })
	return !behind
}
