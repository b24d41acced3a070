// These tests prove that a narrowed stream misses no removal while its subscription changes, and
// costs other streams nothing.
package fanout

import (
	"bytes"
	"slices"
	"testing"
	"unsafe"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

func only(name string) *pb.Subscription {
	return &pb.Subscription{Services: []*pb.ServiceName{{Namespace: "default", Name: name}}}
}

// TestResubscribeWhileAnUpdateIsOnItsWay checks an object of the old subscription that an update
// removes before the stream is sent that update. The client must be sent the removal.
func TestResubscribeWhileAnUpdateIsOnItsWay(t *testing.T) {
	for _, first := range []*pb.Subscription{nil, only("service-0")} {
		s := filled(t, 1)
		f := start(t, s)
		c := f.hello(&pb.Hello{Subscription: first})
		_, updates, _ := c.inSync()
		require.Len(t, updates, 1)
		// The store has the removal, but the ring does not.
		s.Remove(service(0).Key(), 3)
		s.Remove(slice(0, 3).Key(), 4)
		require.Len(t, s.Publish().Updates, 1)
		c.send(&pb.StreamRequest{Message: &pb.StreamRequest_Subscribe{Subscribe: only("other")}})
		u := c.update()
		require.True(t, u.GetFull())
		require.Equal(t, updates[0].GetShard(), u.GetShard())
		require.Empty(t, u.GetServices())
		require.NotNil(t, c.recv().GetInSync())
	}
}

// raw returns the frames sent since the last call.
func (p *pipe) raw() []wire.Frame {
	p.mu.Lock()
	defer p.mu.Unlock()
	frames := p.frames
	p.frames = nil
	return frames
}

// TestANarrowedStreamCostsTheOthersNothing checks that streams without a subscription are sent the
// same bytes from the same memory, by the fan-out, whether or not other streams are narrowed. For
// narrowed streams, nothing is encoded anew: their frames are cut out of the same bytes.
func TestANarrowedStreamCostsTheOthersNothing(t *testing.T) {
	const changes = 20
	type result struct {
		sent []wire.Frame // to each stream that wants everything
		// frames and bytes count what was sent in all, and shared the shared frames that were
		// built.
		frames, bytes, shared float64
	}
	// stamp marks encoded bytes, to tell bytes that are cut out of them from bytes encoded anew.
	stamp := func(f wire.Frame) wire.Frame {
		require.True(t, bytes.Contains(f, []byte("10.180.")))
		return bytes.ReplaceAll(f, []byte("10.180."), []byte("10.181."))
	}
	run := func(subscriptions ...*pb.Subscription) (r result, cut [][]wire.Frame) {
		s := filled(t, 4)
		h := start(t, s).Hub
		pipes := []*pipe{connect(t, h, &pb.Hello{}), connect(t, h, &pb.Hello{}), connect(t, h, &pb.Hello{})}
		everything := len(pipes)
		for _, wanted := range subscriptions {
			pipes = append(pipes, connect(t, h, &pb.Hello{Subscription: wanted}))
		}
		for _, p := range pipes {
			defer p.cancel()
			eventually(t, func() bool {
				return slices.ContainsFunc(p.read(t), func(r *wire.Response) bool { return r.InSync != nil })
			})
		}
		for _, p := range pipes[:everything] {
			eventually(t, func() bool {
				p.session.mu.Lock()
				defer p.session.mu.Unlock()
				return p.session.live
			})
		}
		r.frames, r.bytes = -testutil.ToFloat64(h.metrics.sentFrames), -testutil.ToFloat64(h.metrics.sentBytes)
		cut = make([][]wire.Frame, len(pipes)-everything)
		for n := range changes {
			s.Upsert(slice(1, 4+n), 0)
			s.Upsert(slice(2, 4+n), 0)
			e := entry{}
			for _, u := range s.Publish().Updates {
				f, err := wire.EncodeUpdate(u)
				require.NoError(t, err)
				e.add(u, []wire.Frame{stamp(f)})
			}
			h.add(e)
			for i, p := range pipes {
				var got []wire.Frame
				want := e.frames
				if i >= everything {
					want = want[:1] // only one of both Services
				}
				eventually(t, func() bool { got = append(got, p.raw()...); return len(got) == len(want) })
				if i >= everything {
					cut[i-everything] = append(cut[i-everything], got...)
					continue
				}
				for j, f := range got {
					require.Same(t, unsafe.SliceData(want[j]), unsafe.SliceData(f))
				}
			}
			r.sent = append(r.sent, e.frames...)
		}
		for _, p := range pipes[:everything] {
			require.Equal(t, changes, p.tried, "all by the fan-out")
		}
		r.shared = testutil.ToFloat64(h.metrics.catchUps)
		r.frames += testutil.ToFloat64(h.metrics.sentFrames)
		r.bytes += testutil.ToFloat64(h.metrics.sentBytes)
		return r, cut
	}
	alone, _ := run()
	beside, cut := run(only("service-1"), only("service-1"), only("service-2"))
	for _, frames := range cut {
		require.Len(t, frames, changes)
		for _, f := range frames {
			require.Contains(t, string(f), "10.181.", "cut out, not encoded")
			require.NotContains(t, string(f), "10.180.")
			beside.frames--
			beside.bytes -= float64(len(f))
		}
	}
	require.Equal(t, alone, beside)
}
