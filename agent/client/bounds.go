package client

import (
	"fmt"
	"strings"
	"time"

	"golang.org/x/time/rate"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/wire"
)

// Bounds of what a server can make a client keep or do. Package wire has those of a single frame. A
// server that goes beyond one breaks the protocol: the client goes to another one.
const (
	// maxRetryDelay bounds what a server may ask for: the time until the client comes back to it,
	// and the time between heartbeats.
	maxRetryDelay = 5 * time.Minute
	// maxUnfinished bounds the updates whose last parts are still to come, in bytes. A shard of the
	// largest objects has 400 MiB.
	maxUnfinished = 1 << 30
	// objectMemory is what an object takes in an unfinished update beside its bytes.
	objectMemory = 256
	// maxUnfit bounds the objects that do not decode, and likewise those that are missing and asked
	// for. askedPerSecond is how many more a stream may make the client ask for.
	maxUnfit       = 1 << 16
	askedPerSecond = 100
	// maxNodes bounds the Nodes that a relay is told of until it is in sync.
	maxNodes = 1 << 17
	// maxPath bounds Welcome.path: how many relays are in a row.
	maxPath = 64
	// maxText bounds what a server says of itself, and maxAddress the address of a server, in
	// bytes.
	maxText    = 256
	maxAddress = 253 + len(":65535")
	// maxHeaders bounds the headers and trailers of a server, which hold the status that a stream
	// ends with, in bytes.
	maxHeaders = 16 << 10
)

// newAsked returns the limiter of the objects that a stream may make the client ask for.
func newAsked() *rate.Limiter { return rate.NewLimiter(askedPerSecond, maxUnfit) }

// clip returns the beginning of a text, without the memory of the rest.
func clip(s string) string {
	if len(s) <= maxText {
		return s
	}
	return strings.ToValidUTF8(strings.Clone(s[:maxText]), "")
}

// unfinishedCost returns the memory that a part of an update takes, roughly.
func unfinishedCost(r *wire.Response) int {
	return r.Size + objectMemory*(r.Update.Len()+len(r.Update.Unreadable))
}

// checkUnfitLocked checks that an Update does not make too many objects unreadable, and that not
// too many are missing already.
func (c *Cache) checkUnfitLocked(u *model.Update) error {
	if c.missing > maxUnfit {
		return fmt.Errorf("%w: deltas of %d slices that this client does not hold", errProtocol, c.missing)
	}
	if len(u.Unreadable) == 0 {
		return nil
	}
	n := 0
	for i := range c.shards {
		n += len(c.shards[i].unreadable)
	}
	for _, o := range u.Unreadable {
		if _, known := c.shards[u.Shard].unreadable[o.Key]; !known {
			n++
		}
	}
	if n > maxUnfit {
		return fmt.Errorf("%w: %d objects that do not decode", errProtocol, n)
	}
	return nil
}

// countMissingLocked counts the missing slices.
func (c *Cache) countMissingLocked() {
	c.missing = 0
	for i := range c.shards {
		c.missing += len(c.shards[i].missing)
	}
}

// asking reports whether Resyncs wait for their turn.
func (o *outbox) asking() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.resyncs) > 0
}

// failures returns how much is failing.
func (o *outbox) failures() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.failing)
}
