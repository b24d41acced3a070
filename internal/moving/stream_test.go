// This file makes new connections without a pause, and keeps others open, while a node moves. Any
// connection that fails is reported.
package moving

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/testenv"
)

// way is a source, a protocol and an address for connections to a Service.
type way struct {
	from  *testenv.Host
	proto testenv.Proto
	to    netip.AddrPort
}

// String returns a description such as "client to 10.96.0.1:80 over tcp".
func (w way) String() string { return fmt.Sprintf("%s to %s over %s", w.from.Name, w.to, w.proto) }

// patient has a timeout longer than the retransmission of a lost packet takes on a slow machine.
var patient = testenv.ProbeOptions{Timeout: 20 * time.Second}

// datagramTimeout is the time after which a datagram is sent again.
const datagramTimeout = 5 * time.Second

// ports are source ports that are used in turn.
type ports struct {
	first, count uint32
	used         atomic.Uint32
}

func (p *ports) next() netip.AddrPort {
	return netip.AddrPortFrom(netip.Addr{}, uint16(p.first+p.used.Add(1)%p.count))
}

// Ranges of source ports. Each TCP connection has a port that no other one has; UDP sockets have
// that anyway. IPVS matches the answers of a pod to a client by the client's port alone, whichever
// Service the connection was to. No program listens on these ports.
var (
	newPorts  = ports{first: 11000, count: 19000}
	openPorts = ports{first: 10300, count: 700}
)

func (w way) try(ctx context.Context) testenv.Result {
	options := patient
	if w.proto == testenv.UDP {
		options.Timeout = datagramTimeout
	} else {
		options.Source = newPorts.next()
	}
	return w.from.Probe(ctx, w.proto, w.to, 1, options)
}

// stream makes new connections on several ways all the time.
type stream struct {
	t      *testing.T
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu       sync.Mutex // guards counts and failures
	counts   map[way]int
	failures []string
}

// pause is the interval between two attempts on one way.
const pause = 10 * time.Millisecond

// startStream makes connections until RequireNoFailure is called or the test ends.
func startStream(t *testing.T, ways []way) *stream {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	s := &stream{t: t, cancel: cancel, counts: map[way]int{}}
	for _, w := range ways {
		s.counts[w] = 0
	}
	for _, w := range ways {
		s.wg.Go(func() { s.run(ctx, w) })
	}
	t.Cleanup(s.stop)
	s.RequireSome()
	return s
}

func (s *stream) run(ctx context.Context, w way) {
	ticker := time.NewTicker(pause)
	defer ticker.Stop()
	for ctx.Err() == nil {
		result := w.try(ctx)
		if w.proto == testenv.UDP && !result.All(testenv.Answered) {
			result = w.try(ctx) // a datagram may be lost
		}
		s.mu.Lock()
		s.counts[w]++
		// The result of an attempt that was interrupted by the end says nothing.
		if !result.All(testenv.Answered) && ctx.Err() == nil {
			s.failures = append(s.failures, fmt.Sprintf("%s %s: %s", time.Now().Format(time.StampMilli), w, result))
		}
		s.mu.Unlock()
		select {
		case <-ctx.Done():
		case <-ticker.C:
		}
	}
}

func (s *stream) stop() {
	s.cancel()
	s.wg.Wait()
}

// RequireSome waits until a new connection was made on each way, and requires that none has failed
// so far.
func (s *stream) RequireSome() {
	s.t.Helper()
	testenv.AwaitGrowth(s.t, settleTimeout, func() map[way]int {
		s.mu.Lock()
		defer s.mu.Unlock()
		return maps.Clone(s.counts)
	})
	s.mu.Lock()
	defer s.mu.Unlock()
	require.Empty(s.t, s.failures)
}

// RequireNoFailure ends the stream and requires that every connection was answered.
func (s *stream) RequireNoFailure() {
	s.t.Helper()
	s.stop()
	require.Empty(s.t, s.failures)
	all := 0
	for _, n := range s.counts {
		all += n
	}
	s.t.Logf("%d new connections on %d ways, none failed", all, len(s.counts))
}

// open is a set of connections that stay open, on several ways.
type open struct {
	ways  []way
	conns []*testenv.Conn
}

// openAll closes the open connections and opens one on each way.
func (o *open) openAll(t *testing.T, ways []way) {
	t.Helper()
	o.close()
	for _, w := range ways {
		options := patient
		if w.proto == testenv.TCP {
			options.Source = openPorts.next()
		}
		conn, err := w.from.Dial(t.Context(), w.proto, w.to, options)
		require.NoError(t, err, "%s", w)
		o.ways, o.conns = append(o.ways, w), append(o.conns, conn)
	}
}

func (o *open) close() {
	for _, c := range o.conns {
		c.Close()
	}
	*o = open{}
}

// requireAlive requires an answer on each connection of a protocol. It sends a lost datagram again.
func (o *open) requireAlive(t *testing.T, proto testenv.Proto) {
	t.Helper()
	for i, conn := range o.conns {
		if o.ways[i].proto != proto {
			continue
		}
		limit := patient.Timeout
		if proto == testenv.UDP {
			limit = datagramTimeout
		}
		var err error
		for range 10 {
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			_, err = conn.Echo(ctx, "alive?")
			cancel()
			if err == nil || proto == testenv.TCP {
				break
			}
		}
		require.NoError(t, err, "open connection from %s", o.ways[i])
	}
}

// forget closes the connections on those ways for which the function returns true.
func (o *open) forget(which func(way) bool) {
	var kept open
	for i, w := range o.ways {
		if which(w) {
			o.conns[i].Close()
		} else {
			kept.ways, kept.conns = append(kept.ways, w), append(kept.conns, o.conns[i])
		}
	}
	*o = kept
}

// requireSettled requires that no TCP connection hangs. When its client sends something, the
// connection is either reset, or reaches the same pod by chance after it was assigned again.
func (o *open) requireSettled(t *testing.T) {
	t.Helper()
	for i, conn := range o.conns {
		if o.ways[i].proto == testenv.TCP {
			ctx, cancel := context.WithTimeout(t.Context(), patient.Timeout)
			_, err := conn.Echo(ctx, "alive?")
			cancel()
			if err != nil {
				require.ErrorIs(t, err, syscall.ECONNRESET, "open connection from %s", o.ways[i])
			}
		}
	}
}
