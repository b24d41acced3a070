package client

import (
	"slices"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// contents is the content of a cache at one moment.
type contents struct {
	// hello has the epoch, the positions, the subscription that they belong to, and the resource
	// versions.
	hello *pb.Hello
	// revisions holds the revision of each shard, which grows with every change.
	revisions []uint64
	node      *model.Node
	// servers are the servers that the last stream named. names are, in the same order, the names
	// that their certificates must have.
	servers, names *pb.Servers
	// shards holds the shards that the caller asked for, whole and without sequences.
	shards map[uint32]*model.Update
}

// contents returns the content of the cache, with the objects of the shards for which changed
// returns true. It returns nil until the cache has been in sync. Objects are immutable
// (invariant 4 of Cache), so it only copies lists of them under the lock.
func (c *Cache) contents(changed func(shard uint32, revision uint64) bool) *contents {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.inSync {
		return nil
	}
	out := &contents{
		hello:   &pb.Hello{Epoch: c.epoch, ResourceVersions: wire.ResourceVersionsToProto(c.seen), Subscription: c.subscription},
		node:    c.node,
		servers: &pb.Servers{},
		names:   &pb.Servers{},
		shards:  make(map[uint32]*model.Update),
	}
	for _, s := range c.servers {
		out.servers.Servers = append(out.servers.Servers, &pb.Server{Address: s.Address})
		out.names.Servers = append(out.names.Servers, &pb.Server{Address: s.Name})
	}
	for i := range c.shards {
		s, shard := &c.shards[i], uint32(i)
		sequence := s.sequence
		if len(s.missing) > 0 || len(s.unreadable) > 0 || c.resubscribing {
			sequence = 0 // the digest decides, as in a Hello
		}
		out.hello.Sequences = append(out.hello.Sequences, sequence)
		out.revisions = append(out.revisions, s.revision)
		if changed(shard, s.revision) {
			out.shards[shard] = s.whole(shard)
		}
	}
	return out
}

// whole returns a shard as an Update, in no particular order.
func (s *cacheShard) whole(shard uint32) *model.Update {
	u := &model.Update{Shard: shard, Full: true}
	for _, held := range s.services {
		if held.service != nil {
			u.Services = append(u.Services, held.service)
		}
		u.Slices = append(u.Slices, held.slices...)
	}
	return u
}

// restore moves the content of another cache to an unused one. Take returns nothing of it before
// the cache is in sync or useRestored is called.
func (c *Cache) restore(from *Cache) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.epoch, c.shards, c.seen, c.node, c.servers = from.epoch, from.shards, from.seen, from.node, from.servers
	c.subscription = from.subscription
	c.nodeMoved = c.node != nil
	for i := range c.shards {
		for key, held := range c.shards[i].services {
			c.touched[key] = struct{}{}
			if held.service != nil && slices.ContainsFunc(held.service.Ports, func(p model.ServicePort) bool { return p.Protocol == model.UDP }) {
				c.restored = append(c.restored, held.service)
			}
		}
	}
}

// useRestored makes the restored content count until a server confirms it. It does nothing and
// returns false if a server already has.
func (c *Cache) useRestored() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.inSync {
		return false
	}
	c.stale = true
	c.signalLocked()
	return true
}

// isStale reports whether content counts that no server has confirmed.
func (c *Cache) isStale() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.stale
}
