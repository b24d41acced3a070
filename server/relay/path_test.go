// This test proves that a relay refuses a stream that has come through itself, and says why.
package relay

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/client"
	"github.com/slicecast/slicecast/internal/store"
)

// TestAPathThroughThisRelay checks that a relay refuses a stream that has come through itself, and
// says why.
func TestAPathThroughThisRelay(t *testing.T) {
	s, err := store.New(store.Options{})
	require.NoError(t, err)
	u := New(client.Options{}, s)
	require.ErrorContains(t, u.begin([]uint64{s.Epoch() + 1, s.Epoch(), s.Epoch() + 2}), "fed by this relay")
	require.NotContains(t, u.begin([]uint64{s.Epoch() + 1}).Error(), "fed by this relay", "only the shards are wrong here")
}
