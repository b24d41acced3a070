// These tests prove that the Cleaner retries with back-off when the kernel fails, joins changes
// into one pass, and does not remove a flow that became valid meanwhile. The table is in memory and
// the clock is a bubble's. The fuzz target proves that parsing a message never reads beyond it.
package conntrack

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/netlink"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// memory is a table of flows to one frontend, kept in memory, which fails on request.
type memory struct {
	// mu guards the fields below. It also orders the Cleaner's operations after what the test does
	// before it lets time pass.
	mu sync.Mutex
	// replies are the addresses that the flows lead to.
	replies map[netip.AddrPort]bool
	dumps   int
	// dumping, if not nil, is called in the middle of a dump.
	dumping func()
	// takes is how long a dump takes.
	takes time.Duration
	// dumpErrors and removeErrors are the errors of the next dumps and removals.
	dumpErrors, removeErrors []error
	log                      bytes.Buffer
}

var (
	clusterIP = netip.MustParseAddrPort("10.96.16.1:53")
	frontends = []view.Frontend{at(view.ClusterIP, clusterIP.String())}
)

func newMemory(replies ...string) *memory {
	m := &memory{replies: map[netip.AddrPort]bool{}}
	for _, r := range replies {
		m.replies[netip.MustParseAddrPort(r)] = true
	}
	return m
}

func next(errs *[]error) error {
	if len(*errs) == 0 {
		return nil
	}
	err := (*errs)[0]
	*errs = (*errs)[1:]
	return err
}

func (m *memory) Flows(_ model.Family, _ byte, each func(netlink.Flow)) error {
	m.mu.Lock()
	m.dumps++
	takes, dumping, replies := m.takes, m.dumping, slices.Collect(maps.Keys(m.replies))
	err := next(&m.dumpErrors)
	m.mu.Unlock()
	time.Sleep(takes) //nolint:forbidigo // the bubble's time
	for _, reply := range replies {
		each(netlink.Flow{
			Original:   netlink.Tuple{Destination: clusterIP, Protocol: unix.IPPROTO_UDP},
			Reply:      netlink.Tuple{Source: reply, Protocol: unix.IPPROTO_UDP},
			Attributes: []byte(reply.String()),
		})
	}
	if dumping != nil {
		dumping()
	}
	return err
}

func (m *memory) RemoveFlow(_ model.Family, attributes []byte) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := next(&m.removeErrors); err != nil {
		return err
	}
	delete(m.replies, netip.MustParseAddrPort(string(attributes)))
	return nil
}

func (m *memory) Close() {}

// Write appends to the Cleaner's log.
func (m *memory) Write(b []byte) (int, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.log.Write(b)
}

// pass lets time pass, and waits until nothing moves.
func (m *memory) pass(d time.Duration) {
	m.mu.Lock()
	m.mu.Unlock() //nolint:staticcheck // for the order only
	time.Sleep(d) //nolint:forbidigo // the bubble's time
	synctest.Wait()
}

func (m *memory) left() []string {
	var out []string
	for reply := range m.replies {
		out = append(out, reply.String())
	}
	slices.Sort(out)
	return out
}

// bubble runs a test in a synctest bubble, with a Cleaner that runs on the table.
func bubble(t *testing.T, m *memory, test func(c *Cleaner)) {
	synctest.Test(t, func(t *testing.T) {
		c := New(Options{Logger: slog.New(slog.NewTextHandler(m, nil))})
		c.open = func() (table, error) { return m, nil }
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { c.Run(ctx) })
		test(c)
		cancel()
		running.Wait()
	})
}

func TestFailuresAreTriedAgainWithBackoff(t *testing.T) {
	m := newMemory("10.180.0.5:53", "10.180.0.6:53", "10.180.0.4:53")
	m.dumpErrors = []error{unix.ENOBUFS, unix.EPERM, netlink.ErrInterrupted}
	m.removeErrors = []error{unix.EPERM, unix.ENOBUFS, nil, unix.EBUSY}
	bubble(t, m, func(c *Cleaner) {
		c.Changed([]view.Change{{After: port(dns4, frontends, "10.180.0.4:53")}})
		synctest.Wait()
		for i, pause := range []time.Duration{minRetry, 2 * minRetry, 4 * minRetry} {
			require.Equal(t, i+1, m.dumps)
			require.EqualValues(t, i+1, testutil.ToFloat64(c.failures))
			// Changes do not bring the retry forward.
			c.Changed([]view.Change{{After: port(dns4, frontends, "10.180.0.4:53")}})
			m.pass(pause - 1)
			require.Equal(t, i+1, m.dumps)
			m.pass(1)
		}
		require.Equal(t, []string{"10.180.0.4:53"}, m.left())
		require.EqualValues(t, 2, testutil.ToFloat64(c.removed))
		require.EqualValues(t, 3, testutil.ToFloat64(c.failures))
		require.Equal(t, 1, strings.Count(m.log.String(), "level=WARN"), m.log.String())
		require.Equal(t, 1, strings.Count(m.log.String(), "level=INFO"), m.log.String())
		m.pass(maxRetry)
		require.Equal(t, 4, m.dumps)
	})
}

func TestTheTableCantBeOpened(t *testing.T) {
	m := newMemory("10.180.0.5:53")
	bubble(t, m, func(c *Cleaner) {
		tries := []error{errors.ErrUnsupported}
		c.open = func() (table, error) { return m, next(&tries) }
		c.Changed([]view.Change{{After: port(dns4, frontends, "10.180.0.4:53")}})
		synctest.Wait()
		require.Contains(t, m.log.String(), "unsupported")
		m.pass(minRetry)
		require.Empty(t, m.left())
	})
}

// TestChangesDuringAPass asserts that flows stay if they agree with what the kernel holds by the
// time of their removal.
func TestChangesDuringAPass(t *testing.T) {
	m := newMemory("10.180.0.5:53", "10.180.0.6:53")
	bubble(t, m, func(c *Cleaner) {
		m.dumping = sync.OnceFunc(func() {
			c.Changed([]view.Change{{After: port(dns4, frontends, "10.180.0.4:53", "10.180.0.5:53")}})
		})
		c.Changed([]view.Change{{After: port(dns4, frontends, "10.180.0.4:53")}})
		synctest.Wait()
		require.Equal(t, []string{"10.180.0.5:53"}, m.left())
		m.pass(time.Second)
		require.Equal(t, 2, m.dumps)
	})
}

// TestChangesComeTogether asserts that changes during a pass, and in the pause after it, are
// handled in one pass.
func TestChangesComeTogether(t *testing.T) {
	m := newMemory()
	m.takes = time.Second
	bubble(t, m, func(c *Cleaner) {
		for range 20 { // during the next two seconds
			c.Changed([]view.Change{{After: port(dns4, frontends, "10.180.0.4:53")}})
			m.pass(100 * time.Millisecond)
		}
		m.pass(time.Minute)
		require.Equal(t, 2, m.dumps)
	})
}

// TestManyStaleFlows asserts that stale flows are removed in batches.
func TestManyStaleFlows(t *testing.T) {
	m := newMemory()
	for i := range 3*batch + 1 {
		m.replies[netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 181, byte(i >> 8), byte(i)}), 53)] = true
	}
	c := New(Options{})
	c.open = func() (table, error) { return m, nil }
	c.Changed([]view.Change{{After: port(dns4, frontends, "10.180.0.4:53")}})
	require.NoError(t, c.pass(model.IPv4))
	require.Empty(t, m.left())
}
