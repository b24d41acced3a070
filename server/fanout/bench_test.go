// These benchmarks measure what the fan-out and the acks cost for each session, without a
// transport.
package fanout

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// tally is a transport that accepts everything at once and counts what the fan-out sends.
type tally struct {
	ctx  context.Context
	sent *atomic.Int64
}

func (t tally) Context() context.Context            { return t.ctx }
func (t tally) Send(...wire.Frame) error            { return t.ctx.Err() }
func (t tally) TrySend(...wire.Frame) (bool, error) { t.sent.Add(1); return true, nil }
func (t tally) Taken() uint64                       { return 0 }
func (t tally) End(error)                           {}

// BenchmarkPass measures what the fan-out spends on a change for each session that keeps up, in
// addition to its transport.
func BenchmarkPass(b *testing.B) {
	const sessions = 1000
	s := filled(b, 100)
	h := New(Options{Store: s, Authorize: anybody})
	ctx, cancel := context.WithCancel(context.Background())
	var serving sync.WaitGroup
	defer serving.Wait()
	defer cancel()
	var sent atomic.Int64
	for i := range sessions {
		session := h.Open(tally{ctx, &sent})
		serving.Go(func() { _ = session.Serve() })
		require.NoError(b, session.Message(request(&pb.StreamRequest{Message: &pb.StreamRequest_Hello{Hello: &pb.Hello{
			NodeName: fmt.Sprint("node-", i), Kind: pb.ClientKind_CLIENT_KIND_AGENT,
		}}})))
	}
	n := 0
	pass := func() {
		n++
		s.Upsert(slice(1, 4+n%20), 0)
		h.publish()
		sent.Store(0)
		h.pass()
	}
	eventually(b, func() bool { pass(); return sent.Load() == sessions })
	b.ReportAllocs()
	for b.Loop() {
		pass()
	}
	require.EqualValues(b, sessions, sent.Load())
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/sessions, "ns/session")
}
