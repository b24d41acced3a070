// This test proves that a client that waits for its state is sent heartbeats meanwhile.
package fanout

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/model/modeltest"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// hears waits for a number of heartbeats, and for a message that other accepts. No state may arrive
// meanwhile.
func (p *pipe) hears(t require.TestingT, beats int, other func(*wire.Response) bool) {
	found := other == nil
	eventually(t, func() bool {
		for _, r := range p.read(t) {
			require.Nil(t, r.InSync)
			require.Nil(t, r.Update)
			if r.Heartbeat != nil {
				beats--
			} else if other != nil && other(r) {
				found = true
			}
		}
		return beats <= 0 && found
	})
}

// TestWhoWaitsHearsSignsOfLife checks that a client that waits for its state is sent heartbeats.
// Without them it would connect to another server, and wait there.
func TestWhoWaitsHearsSignsOfLife(t *testing.T) {
	options := func(n int) Options {
		return Options{Store: filled(t, n), Heartbeat: time.Millisecond, MaxBehindWait: time.Hour, ColdBytes: 1}
	}
	t.Run("until the server is not behind", func(t *testing.T) {
		o := options(1)
		p := connect(t, running(t, o), &pb.Hello{
			Sequences: []uint64{1, 1}, Digest: modeltest.Digests(5), ResourceVersions: &pb.ResourceVersions{Services: 9},
		})
		defer p.cancel()
		// Publishes during the wait must not delay the heartbeats.
		for n := range 3 {
			o.Store.Upsert(slice(0, 4+n), 0)
			p.hears(t, 2, nil)
		}
	})
	t.Run("until it is its turn", func(t *testing.T) {
		h := running(t, options(1))
		h.turns.small = 0
		other := h.turns.ask(identity{user: "another"}, 1)
		<-other.begun
		p := connect(t, h, &pb.Hello{})
		defer p.cancel()
		p.hears(t, 3, nil)
		other.end()
		eventually(t, p.session.synced.Load)
	})
	t.Run("until it has answered", func(t *testing.T) {
		p := connect(t, running(t, options(1)), &pb.Hello{
			Sequences: []uint64{0, 0}, Digest: modeltest.Digests(5), Capabilities: []pb.Capability{pb.Capability_CAPABILITY_BUCKETS},
		})
		defer p.cancel()
		p.hears(t, 3, func(r *wire.Response) bool { return r.DigestQuery != nil })
	})
}
