package discovery

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/slicecast/slicecast/internal/wire"
)

// End is how an attempt to use a server ended.
type End struct {
	// Err is never nil.
	Err error
	// Welcomed reports that the server sent a Welcome.
	Welcomed bool
	// Drained is the time within which a draining server wants the client to reconnect. 0 means
	// that the server did not drain.
	Drained time.Duration
	// To is the server that the client left the server for, to which it is connected. Zero means
	// that it did not leave for another server.
	To Server
	// Stale reports that the client left because the server is stale. Otherwise it prefers To.
	Stale bool
}

// Connector connects to the servers that a Choice chooses.
type Connector interface {
	// Stream runs one stream with a server until it ends.
	Stream(ctx context.Context, server Server) End
	// Failed records why there is no stream: the last one has ended, or no server can be found.
	Failed(err error)
}

// Run has to connect to one server after another until the context ends.
func (c *Choice) Run(ctx context.Context, to Connector) {
	times := &c.options.Times
	backoff := times.MinBackoff
	for {
		tried, useful := c.round(ctx, to)
		switch {
		case ctx.Err() != nil:
			return
		case useful:
			backoff = times.MinBackoff
			continue
		}
		pause := backoff/2 + rand.N(backoff/2)
		if rested := c.firstRested(); tried == 0 && rested > 0 {
			// Options.Find may return other servers by then.
			pause = min(rested, times.MaxBackoff)
		} else {
			backoff = min(2*backoff, times.MaxBackoff)
		}
		sleep(ctx, pause)
	}
}

// firstKnown is the number of servers known from streams that are tried before the given ones. A
// checkpoint may name servers that are long gone. Each of them may cost 20 s, which is how long
// gRPC tries to connect if packets are dropped.
const firstKnown = 2

// round tries servers until one stream was useful. It returns how many servers it tried. useful
// reports that the next round may follow at once.
//
// The server that the client has just moved to comes first. The first servers known from streams
// follow, then the given ones, then the others known from streams. A server may have invented a
// thousand of the others. They are therefore tried in random order and for a bounded time, so that
// the given ones soon have their turn again.
func (c *Choice) round(ctx context.Context, to Connector) (tried int, useful bool) {
	seen := make(map[string]bool)
	next := func(context.Context) (out []Server) {
		if c.next != (Server{}) {
			out, c.next = []Server{c.next}, Server{}
		}
		return out
	}
	first := func(context.Context) []Server {
		all := c.order(c.options.Cache.Servers())
		return all[:min(len(all), firstKnown)]
	}
	var end time.Time
	others := func(context.Context) []Server {
		end = time.Now().Add(c.options.Times.MaxBackoff)
		all := slices.Clone(c.options.Cache.Servers())
		rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
		return all
	}
	given := func(ctx context.Context) []Server { return c.order(c.find(ctx, to)) }
	for _, source := range []func(context.Context) []Server{next, first, given, others} {
		for _, server := range source(ctx) {
			if !end.IsZero() && time.Now().After(end) {
				break
			}
			if seen[server.Address] || c.rests(server.Address) > 0 {
				continue
			}
			seen[server.Address] = true
			if c.try(ctx, server, to) || ctx.Err() != nil {
				return len(seen), true
			}
		}
	}
	return len(seen), false
}

// try runs one stream with a server until it ends, and reports whether the stream was useful.
func (c *Choice) try(ctx context.Context, server Server, to Connector) bool {
	start := time.Now()
	end := to.Stream(ctx, server)
	if ctx.Err() != nil {
		return false
	}
	to.Failed(fmt.Errorf("%s: %w", server.Address, end.Err))
	c.metrics.disconnects.Inc()
	c.Heed(server, end.Err)
	log, times := c.options.Logger, &c.options.Times
	settled := end.Welcomed && time.Since(start) >= times.Settled
	switch {
	case end.To != (Server{}) && end.Stale:
		log.Warn("Leaving a server that may lack changes for one that does not", "from", server.Address, "to", end.To.Address)
		c.metrics.moves.WithLabelValues(moveStale).Inc()
		c.next, c.moved, c.lost = end.To, time.Now(), server.Address
		return true
	case end.To != (Server{}):
		log.Info("Moving to the preferred server", "from", server.Address, "to", end.To.Address)
		c.metrics.moves.WithLabelValues(movePreferred).Inc()
		c.next, c.moved, c.lost = end.To, time.Now(), ""
		return true
	case end.Drained > 0:
		log.Info("Server drained the stream", "server", server.Address, "err", end.Err)
		c.rest(server.Address, max(rand.N(end.Drained), times.MinBackoff))
		c.lost = ""
		return end.Welcomed
	case settled && status.Code(end.Err) == codes.Unauthenticated:
		log.Info("Credentials of the stream expired, reconnecting with the current ones", "server", server.Address)
		return true
	}
	c.logEnd(server.Address, end)
	if !settled {
		return false
	}
	c.lost = server.Address
	// After a server's death, all its nodes reconnect, so their attempts are spread.
	sleep(ctx, rand.N(2*times.MinBackoff))
	return true
}

func (c *Choice) logEnd(server string, end End) {
	log := c.options.Logger.With("server", server, "err", end.Err)
	switch code := status.Code(end.Err); {
	case code == codes.Unauthenticated || code == codes.PermissionDenied:
		log.Error("Server refuses this node, check its credentials; the rules in the kernel stay")
	case !end.Welcomed:
		log.Warn("Cannot reach the server, trying again; the rules in the kernel stay")
	default:
		log.Warn("Lost the connection to the server, reconnecting; the rules in the kernel stay")
	}
}

// retryDelay returns the time that a server asked the client to wait before it comes back, and
// whether the server asked for one.
func retryDelay(err error) (time.Duration, bool) {
	if code := status.Code(err); code != codes.ResourceExhausted && code != codes.Unavailable {
		return 0, false
	}
	delay := wire.RetryAfter(err)
	return min(delay, MaxRetryDelay), delay > 0
}

func sleep(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
