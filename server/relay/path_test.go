// This test proves that a relay refuses a server that it cannot follow, and says why.
package relay

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/client"
	"github.com/slicecast/slicecast/internal/store"
)

// TestServersThatARelayCannotFollow checks that a relay refuses a server which it feeds itself, or
// which has another number of shards, and says what to do.
func TestServersThatARelayCannotFollow(t *testing.T) {
	s, err := store.New(store.Options{})
	require.NoError(t, err)
	u := New(client.Options{}, s)
	require.ErrorContains(t, u.check([]uint64{s.Epoch() + 1, s.Epoch(), s.Epoch() + 2}, s.Shards()), "fed by this relay")
	require.ErrorContains(t, u.check([]uint64{s.Epoch() + 1}, 2*s.Shards()), "start the relay with --shards=128")
	require.NoError(t, u.check([]uint64{s.Epoch() + 1}, s.Shards()))
}
