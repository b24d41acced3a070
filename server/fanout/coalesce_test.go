// This test proves how long changes wait for the publish before them, and that changes that take
// traffic from an endpoint do not. The clock is a bubble's.
package fanout

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/store"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// sluggish is a pipe whose TrySend takes time.
type sluggish struct {
	*pipe
	takes time.Duration
}

func (s *sluggish) TrySend(frames ...wire.Frame) (bool, error) {
	<-time.After(s.takes)
	return s.pipe.TrySend(frames...)
}

// TestChangesWaitForThoseBefore checks that changes wait while the previous publish is sent, and as
// long again. Changes that take traffic from an endpoint do not wait.
func TestChangesWaitForThoseBefore(t *testing.T) {
	for _, c := range []struct {
		name string
		// takes is how long a send takes. The change is made at after and published at at, all in
		// milliseconds since the previous publish.
		takes, after time.Duration
		urgent       bool
		at           time.Duration
	}{
		{"nothing under way", 20, 100, false, 100},
		{"while it is sent", 20, 5, false, 40},
		{"shortly after", 20, 30, false, 40},
		{"not for long", 200, 5, false, 55},
		{"an endpoint goes", 20, 5, true, 5},
		{"an endpoint goes shortly after", 20, 30, true, 30},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s, err := store.New(store.Options{Shards: 1})
				require.NoError(t, err)
				s.Upsert(service(1), 0)
				s.Upsert(slice(1, 5), 0)
				s.Upsert(slice(2, 5), 0)
				s.Synced()
				h, stop := run(t, Options{Store: s, Heartbeat: time.Hour})
				defer stop()
				synctest.Wait()
				p := &sluggish{&pipe{open: true, done: make(chan error, 1)}, c.takes * time.Millisecond}
				p.begin(t, h, p, &pb.Hello{})
				defer p.cancel()
				synctest.Wait()

				begin := time.Now()
				published := func(change func()) time.Duration {
					head := h.ring.head.Load()
					change()
					for h.ring.head.Load() == head {
						<-time.After(time.Millisecond / 2)
					}
					return time.Since(begin)
				}
				require.Less(t, published(func() { s.Upsert(slice(1, 6), 0) }), time.Millisecond, "at once")
				<-time.After(time.Until(begin.Add(c.after * time.Millisecond)))
				at := published(func() {
					if c.urgent {
						s.Remove(model.Key{Kind: model.KindSlice, Namespace: "default", Name: "slice-2"}, 0)
					} else {
						s.Upsert(slice(2, 6), 0)
					}
				})
				require.InDelta(t, c.at*time.Millisecond, at, float64(time.Millisecond))
			})
		})
	}
}
