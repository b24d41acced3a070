package client

import (
	"fmt"
	"strings"
	"time"

	"golang.org/x/time/rate"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/wire"
)

// The constants below bound what a server can make a client keep or do. Package wire has the bounds
// of a single frame. A server that exceeds a bound breaks the protocol, and the client leaves it
// for another one.
const (
	// maxRetryDelay bounds two times that a server may ask for: the delay before the client returns
	// to it, and the interval between heartbeats.
	maxRetryDelay = 5 * time.Minute
	// maxUnfinished bounds, in bytes, the updates whose last part is still to come. A shard of the
	// largest objects takes 400 MiB.
	maxUnfinished = 1 << 30
	// objectMemory is the memory, in bytes, that an object in an unfinished update takes beyond its
	// encoded size.
	objectMemory = 256
	// maxUnfit bounds the number of objects that do not decode. It also bounds the number of slices
	// that are missing. Once a stream has made the client ask for maxUnfit objects, it may cause
	// askedPerSecond more each second.
	maxUnfit       = 1 << 16
	askedPerSecond = 100
	// maxNodes bounds the number of Nodes that a relay accepts before it is in sync.
	maxNodes = 1 << 17
	// maxPath bounds the length of Welcome.path, which is the number of relays in a row.
	maxPath = 64
	// maxText bounds the length, in bytes, of a server's name and version. maxAddress bounds the
	// length, in bytes, of a server's address.
	maxText    = 256
	maxAddress = 253 + len(":65535")
	// maxHeaders bounds the size, in bytes, of a server's headers and trailers. The trailers hold
	// the status that a stream ends with.
	maxHeaders = 16 << 10
)

// newAsked returns the limiter of the objects that one stream may make the client ask for.
func newAsked() *rate.Limiter { return rate.NewLimiter(askedPerSecond, maxUnfit) }

// clip returns the first maxText bytes of s, without keeping the memory of the rest.
func clip(s string) string {
	if len(s) <= maxText {
		return s
	}
	return strings.ToValidUTF8(strings.Clone(s[:maxText]), "")
}

// unfinishedCost returns the approximate memory, in bytes, that a part of an update takes.
func unfinishedCost(r *wire.Response) int {
	return r.Size + objectMemory*(r.Update.Len()+len(r.Update.Unreadable))
}

// checkUnfitLocked returns an error if an Update would make too many objects unreadable, or if too
// many slices are missing already.
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

// countMissingLocked recomputes missing.
func (c *Cache) countMissingLocked() {
	c.missing = 0
	for i := range c.shards {
		c.missing += len(c.shards[i].missing)
	}
}

// asking reports whether unprompted Resyncs are waiting to be sent.
func (o *outbox) asking() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.resyncs) > 0
}

// failures returns the number of open failures.
func (o *outbox) failures() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.failing)
}
