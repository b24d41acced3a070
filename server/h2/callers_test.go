// This test proves the bounds on the connections and calls of one caller, and that ended ones do
// not count.
package h2

import (
	"context"
	"log/slog"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// TestCallersAreBounded checks the bounds on a caller's connections and calls, and that ended ones
// do not count.
func TestCallersAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fixture{server: &Server{options: Options{Logger: slog.New(slog.DiscardHandler)}}}
		o := f.muxOptions(nil, time.Minute)
		all := newConnections(&o)
		connect := func() (c *Connection, there net.Conn) {
			here, there := net.Pipe()
			return all.enter(here), there
		}
		refused := func(reason string, err error) {
			t.Helper()
			require.Equal(t, codes.ResourceExhausted, status.Code(err), err)
			require.ErrorContains(t, err, reason[1:]+" has ")
			require.Equal(t, 1.0, testutil.ToFloat64(all.refused.Counts.WithLabelValues(map[byte]string{'+': reasonConnections, '#': reasonCalls}[reason[0]])))
		}
		node := Caller{Name: "node a", MaxConnections: 2, Displace: true, MaxCalls: 3}
		user := Caller{Name: "user u", MaxConnections: 2, MaxCalls: 3}
		anybody := Caller{}
		stream := node
		stream.MaxCalls = 0
		ctx, cancel := context.WithCancel(t.Context())

		// For a node, the oldest connection is closed.
		first, there := connect()
		require.NoError(t, first.Enter(ctx, as(node)))
		second, _ := connect()
		require.NoError(t, second.Enter(ctx, as(node)))
		require.NoError(t, second.Enter(ctx, as(node)))
		closed := make(chan error, 1)
		go func() {
			_, err := there.Read(make([]byte, 1))
			closed <- err
		}()
		third, _ := connect()
		refused("#node a", third.Enter(ctx, as(node)))
		synctest.Wait()
		require.Empty(t, closed, "what is refused displaces nothing")
		require.NoError(t, third.Enter(ctx, as(stream)), "the agent's stream")
		require.Error(t, <-closed)
		require.Equal(t, 1.0, testutil.ToFloat64(all.closed.Counts.WithLabelValues(reasonCaller)))
		require.Equal(t, codes.Unavailable, status.Code(first.Enter(ctx, as(node))))

		// For a user, connections stay, and calls on a further one are refused.
		var users [3]*Connection
		for i := range users {
			users[i], _ = connect()
		}
		ctx2, cancel2 := context.WithCancel(t.Context())
		require.NoError(t, users[0].Enter(ctx, as(user)))
		require.NoError(t, users[1].Enter(ctx2, as(user)))
		refused("+user u", users[2].Enter(ctx, as(user)))
		require.NoError(t, users[2].Enter(ctx, as(anybody)), "who is not bounded")
		users[0].end()
		users[0].end()
		require.NoError(t, users[2].Enter(ctx, as(user)))
		refused("#user u", func() error {
			all.refused.Counts.Reset()
			return users[2].Enter(ctx, as(user))
		}())
		cancel2()
		synctest.Wait()
		require.NoError(t, users[2].Enter(ctx, as(user)), "a call has ended")

		cancel()
		synctest.Wait()
		for _, c := range append(users[:], first, second, third) {
			c.end()
		}
		require.Empty(t, all.callers)
		require.Empty(t, all.sources)
	})
}
