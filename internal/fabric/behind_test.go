// These tests prove that an agent does not travel back in time when it moves to a server whose
// watch is behind: the server sends it nothing until it has caught up, or until a bounded wait is
// over.
package fabric

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
	"github.com/slicecast/slicecast/internal/proxytest"
	"github.com/slicecast/slicecast/server/app"
)

// endpoints returns how many endpoints of Web an agent holds.
func (a *agent) endpoints() int {
	_, slices := a.cache.Service(modeltest.Web().ServiceKey())
	n := 0
	for _, s := range slices {
		n += len(s.Endpoints)
	}
	return n
}

func web(endpoints int) *model.Slice { return model.NewSlice(modeltest.WebSlice(endpoints)) }

// TestNoTimeTravel checks that an agent that moves from a server that is ahead gets nothing from
// one whose watch is held back, until that server has caught up.
func TestNoTimeTravel(t *testing.T) {
	c := newCluster(modeltest.Web(), web(1))
	behind, caughtUp := &watch{cluster: c}, "slicecast_server_behind_waits_total"
	ahead := serve(t, &watch{cluster: c})
	replica := serve(t, behind, func(c *app.Config) { c.MaxBehindWait = patience })
	p := proxytest.New(t, ahead.address())
	a := follow(t, agentOptions{node: nodes[0], servers: []string{p.Address()}, count: true})
	a.waitEquals(t, c)
	// A client that holds nothing gets what the replica has.
	fresh := follow(t, agentOptions{node: nodes[1], servers: []string{replica.address()}})
	fresh.waitEquals(t, c)

	behind.hold()
	c.upsert(web(2))
	a.waitEquals(t, c)
	streams := replica.metric(t, "slicecast_server_stream_starts_total", "resume")
	inSyncs, updates := a.inSyncs.Load(), a.came()
	p.Lead(replica.address())
	p.Cut()
	require.Eventually(t, func() bool {
		return replica.metric(t, "slicecast_server_stream_starts_total", "resume") > streams
	}, patience, tick)
	// The agent waits while others are served.
	require.Equal(t, 1, fresh.endpoints())
	follow(t, agentOptions{node: nodes[2], servers: []string{replica.address()}, count: true}).waitEndpoints(t, 1)
	require.Equal(t, inSyncs, a.inSyncs.Load())
	require.Equal(t, updates, a.came())
	require.Equal(t, 2, a.endpoints())

	behind.release()
	require.Eventually(t, func() bool { return a.inSyncs.Load() > inSyncs }, patience, tick)
	a.waitEquals(t, c)
	require.Equal(t, updates, a.came(), "it had all of it")
	require.EqualValues(t, 1, replica.metric(t, caughtUp, "caught_up"))
	require.Zero(t, replica.metric(t, caughtUp, "gave_up"))
}

// TestNoTimeTravelByWayOfTheSameState checks an agent that holds the same state as a server that is
// behind. The server must not send the history up to the agent's versions: a change, and the one
// that undid it. That holds for the agent's next streams, too, if it is cut off meanwhile.
func TestNoTimeTravelByWayOfTheSameState(t *testing.T) {
	for name, cuts := range map[string]int{"one stream": 0, "cut off": 3} {
		t.Run(name, func(t *testing.T) {
			c := newCluster(modeltest.Web(), web(1))
			behind := &watch{cluster: c}
			ahead := serve(t, &watch{cluster: c})
			replica := serve(t, behind, func(c *app.Config) { c.MaxBehindWait = patience })
			p := proxytest.New(t, ahead.address())
			a := follow(t, agentOptions{node: nodes[0], servers: []string{p.Address()}, count: true})
			fresh := follow(t, agentOptions{node: nodes[1], servers: []string{replica.address()}})
			a.waitEquals(t, c)
			fresh.waitEquals(t, c)

			behind.hold()
			for _, endpoints := range []int{2, 1} {
				c.upsert(web(endpoints))
				a.waitEquals(t, c)
			}
			inSyncs, updates := a.inSyncs.Load(), a.came()
			p.Lead(replica.address())
			p.Cut()
			require.Eventually(t, func() bool { return a.inSyncs.Load() > inSyncs }, patience, tick)
			behind.next()
			fresh.waitEndpoints(t, 2)
			for n := range cuts {
				p.Cut()
				require.Eventually(t, func() bool {
					return replica.metric(t, "slicecast_server_stream_starts_total", "resume") > float64(n+1)
				}, patience, tick)
			}
			require.Equal(t, 1, a.endpoints())
			behind.release()
			fresh.waitEndpoints(t, 1)
			a.waitEquals(t, c)
			// The agent follows again, and got nothing but the state that it had.
			require.LessOrEqual(t, a.came(), updates+1)
			c.upsert(web(3))
			a.waitEquals(t, c)
			require.LessOrEqual(t, a.came(), updates+2)
			require.Zero(t, replica.metric(t, "slicecast_server_behind_waits_total", "gave_up"))
		})
	}
}

// TestNoTimeTravelAfterACut checks that a client that was cut off while it waited still waits on
// its next stream.
func TestNoTimeTravelAfterACut(t *testing.T) {
	c := newCluster(modeltest.Web(), web(1))
	behind := &watch{cluster: c}
	ahead := serve(t, &watch{cluster: c})
	replica := serve(t, behind, func(c *app.Config) { c.MaxBehindWait = patience })
	p := proxytest.New(t, ahead.address())
	a := follow(t, agentOptions{node: nodes[0], servers: []string{p.Address()}, count: true})
	a.waitEquals(t, c)
	follow(t, agentOptions{node: nodes[1], servers: []string{replica.address()}}).waitEquals(t, c)
	behind.hold()
	c.upsert(web(2))
	a.waitEquals(t, c)
	updates := a.came()
	p.Lead(replica.address())
	for n := range 3 {
		p.Cut()
		require.Eventually(t, func() bool {
			return replica.metric(t, "slicecast_server_stream_starts_total", "resume") > float64(n)
		}, patience, tick)
	}
	behind.release()
	require.Eventually(t, func() bool { return replica.metric(t, "slicecast_server_behind_waits_total", "caught_up") == 1 }, patience, tick)
	a.waitEquals(t, c)
	require.Equal(t, updates, a.came())
}

// TestTimeTravelAfterAWait checks that the wait is bounded, as an old state is better than one that
// never changes.
func TestTimeTravelAfterAWait(t *testing.T) {
	c := newCluster(modeltest.Web(), web(1))
	behind := &watch{cluster: c}
	ahead := serve(t, &watch{cluster: c})
	const wait = 200 * time.Millisecond
	replica := serve(t, behind, func(c *app.Config) { c.MaxBehindWait = wait })
	follow(t, agentOptions{node: nodes[1], servers: []string{replica.address()}}).waitEquals(t, c)
	p := proxytest.New(t, ahead.address())
	a := follow(t, agentOptions{node: nodes[0], servers: []string{p.Address()}})
	a.waitEquals(t, c)
	behind.hold()
	c.upsert(web(2))
	a.waitEquals(t, c)
	begin := time.Now()
	p.Lead(replica.address())
	p.Cut()
	a.waitEndpoints(t, 1)
	require.Greater(t, time.Since(begin), wait)
	require.EqualValues(t, 1, replica.metric(t, "slicecast_server_behind_waits_total", "gave_up"))
	require.Equal(t, 1, replica.logs.Count("level=WARN", "has seen newer state than this server", nodes[0]), replica.logs)
	behind.release()
	a.waitEquals(t, c)
}

// came returns how many objects were received.
func (a *agent) came() (n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, times := range a.updates {
		n += times
	}
	return n
}

func (a *agent) waitEndpoints(t *testing.T, n int) {
	t.Helper()
	require.Eventually(t, func() bool { return a.endpoints() == n }, patience, tick)
}
