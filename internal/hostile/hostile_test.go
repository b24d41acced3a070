// These tests prove that every attack of the table meets its bound in a real server, while honest
// nodes get updates and join as before, also while the server drains.
package hostile

import (
	"context"
	"fmt"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/bounded"
	"github.com/slicecast/slicecast/server/app"
)

// phase is the state of a connection when the attack is made.
type phase string

const (
	beforeTLS    phase = "before TLS"
	handshake    phase = "in the handshake"
	beforeHello  phase = "before hello"  // nobody knows who it is, or what it may do
	beforeInSync phase = "before InSync" // a stream is open
	inSync       phase = "in sync"
	draining     phase = "draining" // the server drains once the attack has begun
)

// port is one of a server's ports that strangers reach.
type port struct {
	name    string
	address func(*server) net.Addr
	// perAddress and total bound the connections of strangers from one address and from all.
	perAddress, total int
	// displaced counts connections of strangers that were closed for others. The gRPC port has a
	// metric with the reasons instead.
	displaced counter
}

var (
	distribution = port{name: "gRPC", address: func(s *server) net.Addr { return s.Addresses().GRPC }, perAddress: 256, total: 4096}
	metrics      = port{
		name: "metrics", address: func(s *server) net.Addr { return s.Addresses().Metrics },
		perAddress: bounded.Metrics.PerAddress, total: bounded.Metrics.Total, displaced: ofPorts("metrics"),
	}
	healthChecks = port{
		name: "health", address: func(s *server) net.Addr { return s.Addresses().Healthz },
		perAddress: bounded.Health.PerAddress, total: bounded.Health.Total, displaced: ofPorts("health"),
	}
)

// attack is what an attacker does to a server, and the required result.
type attack struct {
	name string
	// in has the phases in which the attack is made.
	in []phase
	// on has the transports on which the attack is made on the gRPC port.
	on []string
	// also has the other ports on which it is made.
	also []port
	// bounds names the constants whose bounds the attack reaches. docs/security.md lists all
	// bounds.
	bounds string
	// does makes the attack. It returns nil once the attacker has met the bound as it should: its
	// connection was closed, or its request was refused or ignored.
	does func(a *attacker) error
	// counted is the metric that a server that does not drain must have increased by then, unless
	// the attack is made on another port.
	counted counter
	// slow means that the attack only meets its bound after some seconds. All slow attacks run at
	// once.
	slow bool
	// longer is how much longer a new node may take to be in sync during the attack, by design.
	longer time.Duration
}

// transports names the transports. Attacks that end before a transport is chosen use neither.
var transports = map[string]string{lean: "server-h2", grpcGo: "grpc-go", neither: "either"}

// way is one of the ways in which an attack is made.
type way struct {
	attack
	phase    phase
	protocol string
	port     port
}

func (w way) String() string {
	return fmt.Sprintf("%s/%s/%s/%s", w.phase, w.name, w.port.name, transports[w.protocol])
}

// ways returns all ways in which attacks are made, in order.
func ways(chosen func(way) bool) (all []way) {
	for _, x := range attacks {
		for _, in := range x.in {
			of := make([]way, 0, len(x.on)+len(x.also))
			for _, protocol := range x.on {
				of = append(of, way{x, in, protocol, distribution})
			}
			for _, port := range x.also {
				of = append(of, way{x, in, neither, port})
			}
			all = append(all, of...)
		}
	}
	return slices.DeleteFunc(all, func(w way) bool { return !chosen(w) })
}

// run repeats the attack until enough is closed or an attack fails. It calls met after each attack.
// The caller must not close enough before the first call.
func (w way) run(ctx context.Context, s *server, enough <-chan struct{}, met func()) error {
	counts := w.counted.name != "" && w.port.name == distribution.name
	before := s.value(w.counted)
	for {
		a := newAttacker(ctx, s, w)
		err := w.does(a)
		if err == nil && counts && !eventually(func() bool { return s.value(w.counted) > before }) {
			err = fmt.Errorf("the server has not counted it in %v", w.counted)
		}
		met()
		select {
		case <-enough:
		case <-ctx.Done():
		default:
			if err == nil {
				a.end()
				continue
			}
		}
		a.end()
		return err
	}
}

func eventually(holds func() bool) bool {
	for late := time.After(patience); !holds(); {
		select {
		case <-late:
			return false
		case <-time.After(tick):
		}
	}
	return true
}

// TestHostileClients makes all attacks on a server that honest nodes follow, while new ones join.
func TestHostileClients(t *testing.T) {
	t.Parallel()
	c := newCluster()
	s := serve(t, c, func(c *app.Config) { c.MaxColdSyncBytes = coldBytes })
	h := newHonest(t, c, 4, s.address())
	alone := h.measure(closed())
	t.Logf("alone: 50 %% of updates within %v, 99 %% within %v; new nodes in sync within %v", part(alone.updates, 50),
		part(alone.updates, 99), part(alone.syncs, 100))

	for _, w := range ways(func(w way) bool { return !w.slow && w.phase != draining }) {
		t.Run(w.String(), func(t *testing.T) {
			h.t = t
			met, enough := make(chan struct{}), make(chan struct{})
			ended := make(chan error, 1)
			go func() { ended <- w.run(t.Context(), s, enough, sync.OnceFunc(func() { close(met) })) }()
			beside := h.measure(met)
			close(enough)
			require.NoError(t, <-ended)
			h.requireUnharmed(alone, beside, w.longer)
		})
	}
}

// TestSlowHostileClients makes all attacks at once that only meet their bound after some seconds.
func TestSlowHostileClients(t *testing.T) {
	t.Parallel()
	c := newCluster()
	s := serve(t, c)
	h := newHonest(t, c, 4, s.address())
	alone := h.measure(closed())
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	ended := make(map[string]chan error)
	for _, w := range ways(func(w way) bool { return w.slow && w.phase != draining }) {
		e := make(chan error, 1)
		ended[w.String()] = e
		all.Go(func() { e <- w.run(ctx, s, closed(), func() {}) })
	}
	done := make(chan struct{})
	go func() {
		all.Wait()
		close(done)
	}()
	beside := h.measure(done)
	cancel()
	for name, e := range ended {
		t.Run(name, func(t *testing.T) { require.NoError(t, <-e) })
	}
	h.requireUnharmed(alone, beside, 0)
}

// TestHostileClientsWhileDraining makes attacks at once on a server that drains. The honest nodes
// that follow it move to another server.
func TestHostileClientsWhileDraining(t *testing.T) {
	t.Parallel()
	c := newCluster()
	other := serve(t, c)
	// drain measures honest nodes while they leave a server that drains beside attackers.
	drain := func(attackers []way) (*honest, sample) {
		s := serve(t, c, func(c *app.Config) { c.DrainWindow, c.GracePeriod = 200*time.Millisecond, 500*time.Millisecond })
		h := newHonest(t, c, 4, s.address(), other.address())
		begun := make(chan struct{})
		var arrivals, all sync.WaitGroup
		ended := make([]error, len(attackers))
		for i, w := range attackers {
			arrivals.Add(1)
			all.Go(func() {
				a := newAttacker(t.Context(), s, w)
				defer a.end()
				arrived := sync.OnceFunc(arrivals.Done)
				defer arrived() // the server must end even if the attack fails
				a.begun = func() {
					arrived()
					<-begun
				}
				ended[i] = w.does(a)
			})
		}
		var drained time.Time
		go func() {
			arrivals.Wait()
			drained = time.Now()
			s.drain()
			close(begun)
		}()
		seen := h.measure(s.ended)
		// No attacker holds it up until it would be closed for its silence.
		require.Less(t, time.Since(drained), 10*time.Second, "the server must have ended")
		all.Wait()
		for i, w := range attackers {
			require.NoError(t, ended[i], w)
		}
		return h, seen
	}
	_, alone := drain(nil)
	h, beside := drain(ways(func(w way) bool { return w.phase == draining }))
	h.requireUnharmed(alone, beside, 0)
}

func closed() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}
