//go:build !race

// This test proves that sending a small message over TLS allocates no memory. It does not run under
// the race detector, where pools drop their content.
package h2

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/wire"
)

// TestSendingDoesNotAllocate checks that sending small messages allocates no memory. Under the race
// detector, pools drop their content, so the test does not run there.
func TestSendingDoesNotAllocate(t *testing.T) {
	streams := make(chan *Stream, 1)
	f := start(t, func(s *session) error { streams <- s.Stream; return until(s) })
	f.clients(f.address, Protocol, 1)
	s := <-streams
	frame := make(wire.Frame, 100)
	require.NoError(t, s.Send(frame))
	require.Zero(t, testing.AllocsPerRun(1000, func() {
		if _, err := s.TrySend(frame, frame); err != nil {
			panic(err)
		}
	}))
	require.Zero(t, testing.AllocsPerRun(1000, func() {
		if err := s.Send(frame, frame); err != nil {
			panic(err)
		}
	}))
}
