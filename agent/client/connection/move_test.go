// This test proves that a stream which moves keeps the connection that it has prepared.
package connection

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/slicecast/slicecast/agent/client/cache"
	"github.com/slicecast/slicecast/agent/client/discovery"
)

// TestReachingWhileMoving has both timers of a stream fire in the moment in which the stream moves.
// What was prepared for the move must stay, because Stream reports where it leads. The client once
// panicked there.
func TestReachingWhileMoving(t *testing.T) {
	for name, reach := range map[string]func(*stream, context.Context){
		"reachFresh": (*stream).reachFresh, "reachPreferred": (*stream).reachPreferred,
	} {
		for _, cause := range []error{errMove, errStale} {
			t.Run(name+"/"+cause.Error(), func(t *testing.T) {
				w := &cache.Writer{Cache: cache.New()}
				w.SetServers([]discovery.Server{{Address: "127.0.0.1:1"}, {Address: "127.0.0.1:2"}})
				c := testConnection(w.Cache, nil)
				c.options.DialOptions = []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())}
				ctx, cancel := context.WithCancelCause(t.Context())
				s := newStream(c, discovery.Server{Address: "127.0.0.1:3"}, cancel)
				stale := time.Now()
				s.stale.Store(&stale)
				s.move.target.Store(&discovery.Server{Address: "127.0.0.1:1"})
				to := discovery.Server{Address: "127.0.0.1:2"}
				conn, err := s.dial(to)
				require.NoError(t, err)
				c.prepared = &prepared{to, conn}
				t.Cleanup(c.Close)

				s.cancel(cause)
				reach(s, ctx)
				require.ErrorIs(t, context.Cause(ctx), cause)
				require.Nil(t, s.move.failed.Load(), "nothing has failed")
				require.NotNil(t, c.prepared)
				require.Equal(t, to, c.prepared.server)
				opened, err := c.open(to)
				require.NoError(t, err)
				require.Same(t, conn, opened)
				require.NoError(t, opened.Close(), "it was open")
			})
		}
	}
}
