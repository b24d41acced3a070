package client

import (
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// contents is what a cache holds at one moment.
type contents struct {
	// hello has the positions and digests, the subscription that they are of, the epoch and the resource versions.
	hello *pb.Hello
	node  *model.Node
	// servers are those that the last stream told of.
	servers *pb.Servers
	// shards are those that were asked for, whole and without sequences.
	shards map[uint32]*model.Update
}

// contents gives what the cache holds, and the objects of the shards whose digest changed wants; nil as long as the cache has
// not been in sync. The objects are immutable, so that only their lists are copied under the lock.
func (c *Cache) contents(changed func(shard uint32, digest uint64) bool) *contents {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.inSync {
		return nil
	}
	out := &contents{
		hello:   &pb.Hello{Epoch: c.epoch, ResourceVersions: wire.ResourceVersionsToProto(c.seen), Subscription: c.subscription},
		node:    c.node,
		servers: &pb.Servers{},
		shards:  make(map[uint32]*model.Update),
	}
	for _, s := range c.servers {
		out.servers.Servers = append(out.servers.Servers, &pb.Server{Address: s.Address, ServerName: s.Name})
	}
	for i := range c.shards {
		s, shard := &c.shards[i], uint32(i)
		sequence, digest := s.sequence, s.digest
		if len(s.missing) > 0 || len(s.unreadable) > 0 {
			sequence, digest = 0, s.wholeDigest() // the digest decides, as in a Hello
		}
		if c.resubscribing {
			sequence = 0
		}
		out.hello.Sequences = append(out.hello.Sequences, sequence)
		out.hello.Digests = append(out.hello.Digests, digest)
		if changed(shard, digest) || s.rewritten {
			out.shards[shard], s.rewritten = s.whole(shard), false
		}
	}
	return out
}

// whole gives a shard as an Update, in no order.
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

// wholeDigest is the digest of what whole gives: objects that did not decode are not in it.
func (s *cacheShard) wholeDigest() (digest uint64) {
	for _, held := range s.services {
		if held.service != nil {
			digest += uint64(held.service.ContentVersion())
		}
		for _, slice := range held.slices {
			digest += uint64(slice.ContentVersion())
		}
	}
	return digest
}

// restore makes an unused cache hold what another one held, which becomes its own. Nothing of it is given out before the
// cache is in sync or useRestored is called.
func (c *Cache) restore(from *Cache) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.epoch, c.shards, c.seen, c.node, c.servers = from.epoch, from.shards, from.seen, from.node, from.servers
	c.subscription = from.subscription
	c.nodeMoved = c.node != nil
	for i := range c.shards {
		for key := range c.shards[i].services {
			c.touched[key] = struct{}{}
		}
	}
}

// useRestored makes the restored content count although no server has confirmed it, until one does; false if one has already.
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

// isStale tells whether content counts that no server has confirmed.
func (c *Cache) isStale() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.stale
}
