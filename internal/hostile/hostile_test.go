// These tests prove that every attack of the table meets its bound in a real server, while honest
// nodes get updates and join as before, also while the server drains.
package hostile

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/server/app"
)

// phase is the state of a connection when the attack begins.
type phase string

const (
	beforeTLS    phase = "before TLS"
	beforeHello  phase = "before hello"
	beforeInSync phase = "before InSync"
	inSync       phase = "in sync"
	draining     phase = "draining"
	otherPorts   phase = "other ports"
)

// attack is what an attacker does to a server, and the required result.
type attack struct {
	phase phase
	name  string
	// on has the transports on which the attack is made.
	on []string
	// bounds names the constants whose bounds the attack reaches. docs/security.md lists all
	// bounds.
	bounds string
	// does makes the attack. It returns nil once the attacker has met the bound as it should: its
	// connection was closed, or its request was refused or ignored.
	does func(a *attacker) error
	// counted is the metric that the server must have increased by then.
	counted counter
	// slow means that the attack only meets its bound after some seconds. All slow attacks run at
	// once.
	slow bool
	// longer is how much longer a new node may take to be in sync during the attack, by design.
	longer time.Duration
}

// transports names the transports. Attacks that end before a transport is chosen use neither.
var transports = map[string]string{lean: "server-h2", grpcGo: "grpc-go", neither: "either"}

// run repeats the attack until enough is closed or an attack fails. It calls met after each attack.
// The caller must not close enough before the first call.
func (x attack) run(ctx context.Context, s *server, protocol string, enough <-chan struct{}, met func()) error {
	before := s.value(x.counted)
	for {
		a := newAttacker(ctx, s, protocol)
		err := x.does(a)
		if err == nil && x.counted.name != "" && !eventually(func() bool { return s.value(x.counted) > before }) {
			err = fmt.Errorf("the server has not counted it in %v", x.counted)
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

	for _, x := range attacks {
		for _, protocol := range x.on {
			if x.slow || x.phase == draining {
				continue
			}
			t.Run(fmt.Sprintf("%s/%s/%s", x.phase, x.name, transports[protocol]), func(t *testing.T) {
				h.t = t
				met, enough := make(chan struct{}), make(chan struct{})
				ended := make(chan error, 1)
				go func() { ended <- x.run(t.Context(), s, protocol, enough, sync.OnceFunc(func() { close(met) })) }()
				beside := h.measure(met)
				close(enough)
				require.NoError(t, <-ended)
				h.requireUnharmed(alone, beside, x.longer)
			})
		}
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
	for _, x := range attacks {
		for _, protocol := range x.on {
			if !x.slow || x.phase == draining {
				continue
			}
			e := make(chan error, 1)
			ended[fmt.Sprintf("%s/%s/%s", x.phase, x.name, transports[protocol])] = e
			all.Go(func() { e <- x.run(ctx, s, protocol, closed(), func() {}) })
		}
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

// TestHostileClientsWhileDraining makes attacks on a server that drains. The honest nodes that
// follow it move to another server.
func TestHostileClientsWhileDraining(t *testing.T) {
	c := newCluster()
	other := serve(t, c)
	// drain measures honest nodes while they leave a server that drains.
	drain := func(t *testing.T, begin func(*server) error) (h *honest, seen sample) {
		s := serve(t, c, func(c *app.Config) { c.DrainWindow, c.GracePeriod = 200*time.Millisecond, 500*time.Millisecond })
		h = newHonest(t, c, 4, s.address(), other.address())
		ended := make(chan error, 1)
		go func() { ended <- begin(s) }()
		seen = h.measure(s.ended)
		require.NoError(t, <-ended)
		return h, seen
	}
	var alone sample
	t.Run("alone", func(t *testing.T) {
		_, alone = drain(t, func(s *server) error {
			s.drain()
			return nil
		})
	})
	for _, x := range attacks {
		for _, protocol := range x.on {
			if x.phase != draining {
				continue
			}
			t.Run(fmt.Sprintf("%s/%s", x.name, transports[protocol]), func(t *testing.T) {
				h, beside := drain(t, func(s *server) error {
					defer s.drain() // the server must end even if the attack fails
					a := newAttacker(t.Context(), s, protocol)
					defer a.end()
					return x.does(a)
				})
				h.requireUnharmed(alone, beside, x.longer)
			})
		}
	}
}

func closed() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}
