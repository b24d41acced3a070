// These tests prove that clients are told when the hub's source may have missed changes, and that a
// client can ask for that without a stream.
package fanout

import (
	"errors"
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"

	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// staleSource is a source that claims to be stale since a time.
type staleSource struct{ since time.Time }

func (s *staleSource) stale() (time.Time, string) {
	if s.since.IsZero() {
		return s.since, ""
	}
	return s.since, "nobody answers"
}

// TestStaleIsTold checks that every stream is told once that the source is stale, and once that it
// is no longer. A new stream is told in its Welcome.
func TestStaleIsTold(t *testing.T) {
	var source staleSource
	f := startWith(t, Options{Store: filled(t, 2), Stale: source.stale})
	observer, relay := f.hello(&pb.Hello{}), f.hello(&pb.Hello{Kind: pb.ClientKind_CLIENT_KIND_RELAY})
	all := []*call{observer, relay}
	w, _, _ := observer.inSync()
	require.Zero(t, w.GetStaleMs())
	for relay.recv().GetInSync() == nil {
		// It also gets Nodes and the resource versions reached.
	}

	source.since = time.Now().Add(-staleGrace / 2)
	f.watchStale()
	require.Zero(t, f.staleMs(), "the source may recover")
	source.since = time.Now().Add(-time.Minute)
	f.watchStale()
	f.watchStale()
	for _, c := range all {
		m := c.recv().GetHeartbeat()
		require.GreaterOrEqual(t, m.GetStaleMs(), uint64(time.Minute.Milliseconds()))
		require.Empty(t, m.GetDigest(), "there is nothing to compare")
	}
	late := f.hello(&pb.Hello{})
	w, _, _ = late.inSync()
	require.GreaterOrEqual(t, w.GetStaleMs(), uint64(time.Minute.Milliseconds()))

	f.beat()
	source.since = time.Time{}
	f.watchStale()
	for _, c := range append(all, late) {
		require.Nil(t, c.recv().GetHeartbeat().StaleMs, "an ordinary heartbeat does not say it")
		m := c.recv().GetHeartbeat()
		require.NotNil(t, m.StaleMs)
		require.Zero(t, m.GetStaleMs())
	}
}

// TestStaleIsToldToAClientThatWasLapped checks that a client that did not get the message learns it
// when it is caught up.
func TestStaleIsToldToAClientThatWasLapped(t *testing.T) {
	source := staleSource{since: time.Now().Add(-time.Minute)}
	f := startWith(t, Options{Store: filled(t, 2), Stale: source.stale})
	c := f.hello(&pb.Hello{})
	c.inSync()
	f.watchStale()
	require.NotNil(t, c.recv().GetHeartbeat().StaleMs)
	var last recorder
	s := &Session{hub: f.Hub, transport: &last}
	s.sequences = make([]uint64, f.store.Shards())
	require.NoError(t, s.catchUp())
	r, err := wire.Decode(last.frame)
	require.NoError(t, err)
	require.NotZero(t, r.Heartbeat.GetStaleMs())
}

// recorder is a transport that keeps the last frame.
type recorder struct {
	tally
	frame wire.Frame
}

// Send implements Transport.
func (r *recorder) Send(frames ...wire.Frame) error {
	r.frame = frames[len(frames)-1]
	return nil
}

// TestProbe checks that a probe is admitted like a stream, gets a Welcome, and is no client.
func TestProbe(t *testing.T) {
	source := staleSource{since: time.Now().Add(-time.Minute)}
	f := startWith(t, Options{Store: filled(t, 2), Stale: source.stale})
	agent := f.hello(&pb.Hello{NodeName: "a", Kind: pb.ClientKind_CLIENT_KIND_AGENT})
	agent.inSync()
	f.watchStale()
	for range 3 {
		c := f.hello(&pb.Hello{NodeName: "a", Kind: pb.ClientKind_CLIENT_KIND_AGENT, Probe: true})
		w := c.recv().GetWelcome()
		require.NotZero(t, w.GetEpoch())
		require.NotZero(t, w.GetStaleMs())
		_, err := c.Recv()
		require.True(t, errors.Is(err, io.EOF), err)
	}
	require.NotNil(t, agent.recv().GetHeartbeat().StaleMs, "the probes have not replaced the node's stream")
	require.Len(t, f.Status().GetStreams(), 1)
	require.Equal(t, codes.PermissionDenied, f.hello(&pb.Hello{NodeName: "stranger", Probe: true}).ends().Code())
	var last codes.Code
	for range 2 * 16 {
		c := f.hello(&pb.Hello{NodeName: "b", Kind: pb.ClientKind_CLIENT_KIND_AGENT, Probe: true})
		if _, err := c.Recv(); err != nil {
			last = codes.ResourceExhausted
			require.ErrorContains(t, err, last.String())
		}
	}
	require.Equal(t, codes.ResourceExhausted, last, "a node's probes have the rate of its streams")
}
