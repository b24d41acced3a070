package cache

import (
	"fmt"
	"slices"

	"github.com/slicecast/slicecast/internal/model"
)

// Contents is the content of a cache at one moment, which a checkpoint keeps.
type Contents struct {
	// Epoch, Sequences and ResourceVersions are as in a Hello.
	Epoch            uint64
	Sequences        []uint64
	ResourceVersions model.ResourceVersions
	Node             *model.Node
	// Servers are the servers that the last stream named.
	Servers []Server
	// Revisions holds the revision of each shard, which grows with every change. Restore ignores
	// it.
	Revisions []uint64
	// Shards holds whole shards, by number and without sequences. The objects of an Update are in
	// no particular order. nil means that Contents was not asked for the shard.
	Shards []*model.Update
}

// Contents returns the content of the cache, with the objects of the shards for which changed
// returns true. It returns nil until the cache has been in sync. Objects are immutable
// (invariant 4), so it only copies lists of them under the lock.
func (c *Cache) Contents(changed func(shard int, revision uint64) bool) *Contents {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.inSync {
		return nil
	}
	out := &Contents{
		Epoch: c.epoch, ResourceVersions: c.seen, Node: c.node, Servers: c.servers,
		Shards: make([]*model.Update, len(c.shards)),
	}
	for i := range c.shards {
		s := &c.shards[i]
		sequence := s.sequence
		if s.unproved() {
			sequence = 0 // the digest decides, as in a Hello
		}
		out.Sequences = append(out.Sequences, sequence)
		out.Revisions = append(out.Revisions, s.revision)
		if changed(i, s.revision) {
			out.Shards[i] = s.whole(uint32(i))
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

// Restore fills an unused cache with the content of a checkpoint, which must hold all shards. Their
// number must be valid. If Restore returns an error, the cache is still unused. Take returns
// nothing of the content before the cache is in sync or UseRestored is called.
func (c *Cache) Restore(from *Contents) error {
	shards := newShards(len(from.Shards))
	for i, u := range from.Shards {
		if err := shards[i].fill(u, uint32(len(shards))); err != nil {
			return fmt.Errorf("shard %d: %w", i, err)
		}
		// If the writer was newer software, the digest decides.
		if len(u.Unverified) == 0 {
			shards[i].sequence = from.Sequences[i]
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.epoch, c.shards, c.seen, c.node = from.Epoch, shards, from.ResourceVersions, from.Node
	c.servers = from.Servers
	c.pending.node = c.node != nil
	for i := range c.shards {
		for key, held := range c.shards[i].services {
			c.pending.services[key] = struct{}{}
			if held.service != nil && slices.ContainsFunc(held.service.Ports, isUDP) {
				c.restored = append(c.restored, held.service)
			}
		}
	}
	return nil
}

func isUDP(p model.ServicePort) bool { return p.Protocol == model.UDP }

// fill adds the objects of a whole shard to an empty one.
func (s *cacheShard) fill(u *model.Update, shards uint32) error {
	if err := checkShards(u, shards); err != nil {
		return err
	}
	for _, service := range u.Services {
		s.setService(service)
	}
	for _, slice := range u.Slices {
		s.setSlice(slice)
	}
	if n := u.Len() - s.len(); n > 0 {
		return fmt.Errorf("%d objects are named more than once", n)
	}
	return nil
}

// UseRestored makes the restored content count until a server confirms it. It does nothing and
// returns false if a server already has, or if a server of another cluster has answered.
func (c *Cache) UseRestored() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.inSync || c.foreign {
		return false
	}
	c.stale = true
	c.signalLocked()
	return true
}

// Stale reports whether content counts that no server has confirmed.
func (c *Cache) Stale() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.stale
}
