package fanout

import (
	"math/rand/v2"
	"sync"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/slicecast/slicecast/internal/wire"
)

// These are the limits on a client's messages after its Hello, as the rate per second and the
// burst. They are far above what acks, nacks and the answers to a query for all shards' buckets
// need. Requests for state that are not such answers cost more and have limits of their own. An Ack
// counts as one message, and one more for each positionsPerMessage positions.
const (
	messagesPerSecond, messagesBurst = 200, 8192
	resyncsPerSecond, resyncsBurst   = 10, 256
	positionsPerMessage              = 64
)

// These are the limits on starts of streams by one identity: the rate per second, and the burst. A
// start costs more than a message, as it may send a relay all Nodes, or send catch-ups. A node
// needs a start each time its agent restarts or its network fails. All observers or relays that
// share an identity may start at once, and once more shortly after.
const (
	startsPerSecond, startsBurst             = 1, 16
	othersStartsPerSecond, othersStartsBurst = 16, 2 * maxOthers
	// startWait is about how long a client that starts too often is asked to stay away.
	startWait = 4 * time.Second
)

// identity is what a share of the server's capacity is assigned to. An agent's identity is its
// node, as all agents of a cluster may be the same user, and one agent may have several
// credentials. Any other client's identity is its user.
type identity struct{ user, node string }

// maxIdentities bounds the identities whose allowances or turns are remembered.
const maxIdentities = 16 << 10

// allowance is what an identity may do on all of its streams, concurrent or consecutive.
//
// Its invariant, under mu: an agent's streams all use the limiters in free, since a new one ends
// the previous one. Otherwise, clients may share the identity and must not use up each other's
// limits, so each open stream has limiters of its own, and free has those that no stream uses.
type allowance struct {
	starts *rate.Limiter
	// What the identity's clients report is logged a few times a minute at most. Metrics count all
	// reports.
	nacksLogged, resyncsLogged, warningsLogged rate.Sometimes
	ofAgent                                    bool

	mu   sync.Mutex
	free []limiters
}

// limiters bound the messages and the resyncs of a stream, and of the streams that reuse them after
// it.
type limiters struct{ messages, resyncs *rate.Limiter }

// lent is a session's share of its identity's allowance.
type lent struct {
	*allowance
	limiters
}

func newAllowance(of identity) *allowance {
	logged := func() rate.Sometimes { return rate.Sometimes{First: 5, Interval: logInterval} }
	a := &allowance{
		starts:  rate.NewLimiter(othersStartsPerSecond, othersStartsBurst),
		ofAgent: of.node != "", nacksLogged: logged(), resyncsLogged: logged(), warningsLogged: logged(),
	}
	if a.ofAgent {
		a.starts = rate.NewLimiter(startsPerSecond, startsBurst)
	}
	return a
}

// lend lends a session the limiters of a stream that has ended, if there are any, and new ones
// otherwise. A client therefore does not reset its limits with a new stream.
func (a *allowance) lend() lent {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.free) == 0 {
		a.free = append(a.free, limiters{
			messages: rate.NewLimiter(messagesPerSecond, messagesBurst),
			resyncs:  rate.NewLimiter(resyncsPerSecond, resyncsBurst),
		})
	}
	last := len(a.free) - 1
	l := a.free[last]
	if !a.ofAgent {
		a.free = a.free[:last]
	}
	return lent{a, l}
}

// giveBack leaves the limiters of a stream that has ended to the next one.
func (l lent) giveBack() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.ofAgent {
		l.free = append(l.free, l.limiters)
	}
}

// start counts a start. It returns nil if the start is within the limit, and the status of the
// stream otherwise.
func (a *allowance) start() error {
	if a.starts.Allow() {
		return nil
	}
	return wire.RetryLater(status.Errorf(codes.ResourceExhausted,
		"this node, observer or relay opens more than %v streams per second", a.starts.Limit()),
		startWait/2+rand.N(startWait))
}

// allowance returns the allowance of an identity, which outlives the identity's streams.
func (h *Hub) allowance(of identity) *allowance {
	if a, ok := h.allowances.Get(of); ok {
		return a
	}
	a := newAllowance(of)
	if before, ok, _ := h.allowances.PeekOrAdd(of, a); ok {
		return before
	}
	return a
}
