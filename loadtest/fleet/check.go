package fleet

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/slicecast/slicecast/agent/client"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/wire"
)

// ErrDiverged is wrapped by errors about nodes that do not hold the true state.
var ErrDiverged = errors.New("nodes do not hold the true state")

const (
	// maxNamed bounds the shards and maxObjects the objects for each shard that an error lists.
	maxNamed   = 10
	maxObjects = 3
	// retryCheck is the pause before another look at shards that move.
	retryCheck = 50 * time.Millisecond
)

// Truth is the state that nodes have to hold.
type Truth struct {
	// Moving means that the state may change, so a node that differs from it may be ahead or
	// behind.
	Moving bool
	// Epoch and Sequences are the positions of the shards, by number, of a state that moves. A node
	// in the same epoch and at the same sequence has to hold the same content. Nodes of another
	// server are in another epoch. Sequences is nil if the positions are unknown.
	Epoch     uint64
	Sequences []uint64
	// Digests are the digests of the shards, by number.
	Digests []model.Digest
	// Objects are the objects of the state, for errors that name differences.
	Objects []model.Object
}

// TruthOf returns the truth for a state that does not change.
func TruthOf(objects []model.Object, shards int) Truth {
	return Truth{Objects: objects, Digests: digestsOf(slices.Values(objects), shards, model.Object.ContentVersion)}
}

// digestsOf returns the digests of all shards of a state whose objects have the given versions.
func digestsOf(objects iter.Seq[model.Object], shards int, version func(model.Object) model.Version) []model.Digest {
	return model.ShardDigests(uint32(shards), func(yield func(model.Object, model.Version) bool) {
		for o := range objects {
			if !yield(o, version(o)) {
				return
			}
		}
	})
}

// Shards returns the number of shards of the server. At least the first node must have its state.
func (f *Fleet) Shards() int {
	sequences, _ := f.nodes[0].cache.Digests()
	return len(sequences)
}

// Holding returns a function that returns those of the given nodes that hold the truth. The
// function asks for the truth on each call. As in Check, each shard has to be equal once. Unlike
// Check, the function trusts the digests of the nodes.
func (f *Fleet) Holding(truth func() Truth) func([]*Member) []*Member {
	found := make(map[*Member][]bool)
	return func(members []*Member) (out []*Member) {
		t := truth()
		for _, m := range members {
			_, digests := f.nodes[m.Index].cache.Digests()
			if len(digests) != len(t.Digests) {
				continue
			}
			equal := found[m]
			if equal == nil {
				equal = make([]bool, len(digests))
				found[m] = equal
			}
			for shard, digest := range digests {
				equal[shard] = equal[shard] || digest == t.Digests[shard]
			}
			if !slices.Contains(equal, false) {
				out = append(out, m)
			}
		}
		return out
	}
}

// Check compares every shard of every node with the truth. As long as shards move, it repeats this
// with a new truth until each shard of each node was equal once, or the context ends. It does not
// trust the versions that nodes received. It computes them again from the content, once for each
// object that nodes share. Errors wrap ErrDiverged.
func (f *Fleet) Check(ctx context.Context, truth func() Truth) error {
	c := &checker{versions: make(map[model.Object]model.Version)}
	pending := f.nodes
	verified := make([][]bool, len(f.nodes))
	for {
		t, asked := truth(), time.Now()
		c.last = ctx.Err() != nil
		var moving []*node
		for _, n := range pending {
			// With thousands of nodes, the truth may have moved.
			if t.Moving && time.Since(asked) > retryCheck {
				t, asked = truth(), time.Now()
			}
			if verified[n.Index] == nil {
				verified[n.Index] = make([]bool, len(t.Digests))
			}
			if !c.check(n, t, verified[n.Index]) {
				moving = append(moving, n)
			}
		}
		if c.wrong > 0 {
			return fmt.Errorf("%w: %d shards of nodes are wrong:\n%s", ErrDiverged, c.wrong, strings.Join(c.named, "\n"))
		}
		if len(moving) == 0 {
			return nil
		}
		if pending = moving; c.last {
			return fmt.Errorf("%w: %d nodes, one of them %s, have not come to the server's position: %w",
				ErrDiverged, len(pending), pending[0].Name, ctx.Err())
		}
		select {
		case <-ctx.Done():
		case <-time.After(retryCheck):
		}
	}
}

// checker remembers what it has computed and found.
type checker struct {
	// last means that this is the last attempt, so shards that differ now are wrong.
	last     bool
	versions map[model.Object]model.Version
	wrong    int
	named    []string
}

// check checks the shards of a node that are not verified yet. It returns false if some of them
// have to be checked again.
func (c *checker) check(n *node, t Truth, verified []bool) bool {
	before := n.cache.Status()
	sequences, digests := before.Sequences, before.Digests
	known := t.Sequences != nil && t.Epoch == before.Epoch // whether the sequences are comparable
	if len(digests) != len(t.Digests) {
		c.report(fmt.Sprintf("  node %s: has %d shards, the server has %d", n.Name, len(digests), len(t.Digests)))
		return true
	}
	content := digestsOf(objects(n.cache), len(digests), c.version)
	after, _ := n.cache.Digests()
	complete := true
	for shard := range digests {
		switch {
		case verified[shard]:
		case after[shard] != sequences[shard], known && t.Sequences[shard] != sequences[shard]:
			complete = false
		case digests[shard] != t.Digests[shard] && t.Moving && !known && !c.last:
			complete = false
		case digests[shard] != t.Digests[shard] || content[shard] != digests[shard]:
			c.report(fmt.Sprintf("  node %s, shard %d at sequence %d: digest %v, of its content %v, should be %v%s", n.Name,
				shard, sequences[shard], digests[shard], content[shard], t.Digests[shard], c.explain(n, shard, t)))
			verified[shard] = true // reported once
		default:
			verified[shard] = true
		}
	}
	return complete
}

func (c *checker) report(s string) {
	c.wrong++
	if len(c.named) < maxNamed {
		c.named = append(c.named, s)
	}
}

func (c *checker) explain(n *node, shard int, t Truth) string {
	if len(c.named) >= maxNamed {
		return ""
	}
	want := make(map[model.Key]model.Version)
	for _, o := range t.Objects {
		if int(o.ServiceKey().Shard(uint32(len(t.Digests)))) == shard {
			want[o.Key()] = c.version(o)
		}
	}
	var out []string
	for o := range objects(n.cache) {
		if int(o.ServiceKey().Shard(uint32(len(t.Digests)))) != shard {
			continue
		}
		version, wanted := want[o.Key()]
		delete(want, o.Key())
		switch have := c.version(o); {
		case !wanted:
			out = append(out, fmt.Sprintf("%v should not be there", o.Key()))
		case have != version:
			out = append(out, fmt.Sprintf("%v is %v, should be %v", o.Key(), have, version))
		}
	}
	for key := range want {
		out = append(out, fmt.Sprintf("%v is missing", key))
	}
	slices.Sort(out)
	if len(out) > maxObjects {
		out = append(out[:maxObjects], fmt.Sprintf("and %d more", len(out)-maxObjects))
	}
	if len(out) == 0 {
		return ""
	}
	return " (" + strings.Join(out, "; ") + ")"
}

// version returns an object's version, computed from its content.
func (c *checker) version(o model.Object) model.Version {
	if v, ok := c.versions[o]; ok {
		return v
	}
	v := contentVersion(o)
	c.versions[o] = v
	return v
}

func contentVersion(o model.Object) model.Version {
	switch o := o.(type) {
	case *model.Service:
		s := *o // the constructor sorts the lists in place, so it gets copies
		s.ClusterIPs, s.ExternalIPs, s.Ports = slices.Clone(s.ClusterIPs), slices.Clone(s.ExternalIPs), slices.Clone(s.Ports)
		s.LoadBalancerIngress = slices.Clone(s.LoadBalancerIngress)
		s.LoadBalancerSourceRanges = slices.Clone(s.LoadBalancerSourceRanges)
		return model.NewService(s).ContentVersion()
	case *model.Slice:
		s := *o
		s.Ports, s.Endpoints = slices.Clone(s.Ports), slices.Clone(s.Endpoints)
		for i := range s.Endpoints {
			e := &s.Endpoints[i]
			e.ZoneHints, e.NodeHints = slices.Clone(e.ZoneHints), slices.Clone(e.NodeHints)
		}
		return model.NewSlice(s).ContentVersion()
	}
	return model.Version{} // there are no other kinds
}

func objects(cache *client.Cache) iter.Seq[model.Object] {
	return func(yield func(model.Object) bool) {
		for _, key := range cache.Services() {
			service, endpointSlices := cache.Service(key)
			if service != nil && !yield(service) {
				return
			}
			for _, s := range endpointSlices {
				if !yield(s) {
					return
				}
			}
		}
	}
}

// referenceName is the suffix of the reference's node name. The name must not be that of a node,
// because a second stream of a node ends the first.
const referenceName = "-reference"

// StartReference connects a reference: one more stream, which decodes all frames itself and holds
// the current state of the server. The stream is kept until the context ends, in goroutines of
// running. StartReference waits until the reference has the server's state, and returns a function
// for that state.
func (f *Fleet) StartReference(ctx context.Context, running *sync.WaitGroup) (func() Truth, error) {
	synced := make(chan struct{})
	member := &Member{Index: -1, Name: f.Members[0].Name + referenceName}
	n, err := f.newNode(member, wire.Decode, sync.OnceFunc(func() { close(synced) }))
	if err != nil {
		return nil, err
	}
	n.start(ctx, running)
	select {
	case <-synced:
	case <-ctx.Done():
		return nil, fmt.Errorf("get the server's state for comparison: %w", ctx.Err())
	}
	return func() Truth {
		s := n.cache.Status()
		return Truth{
			Moving: true, Epoch: s.Epoch, Sequences: s.Sequences, Digests: s.Digests, Objects: slices.Collect(objects(n.cache)),
		}
	}, nil
}
