// This test proves that a memo computes a result once while it keeps it, and that the results that
// were used longest ago make room for new ones.
package memo

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestEachResultIsComputedOnce(t *testing.T) {
	m := New[string, int](10)
	calls := 0
	get := func(key string, cost int) int {
		v, err := m.Get(key, cost, func() (int, error) { calls++; return calls, nil })
		require.NoError(t, err)
		return v
	}
	require.Equal(t, 1, get("a", 4))
	require.Equal(t, 1, get("a", 4))
	require.Equal(t, 2, get("b", 4))
	require.Equal(t, 3, get("c", 4), "c evicts a")
	require.Equal(t, 2, get("b", 4))
	require.Equal(t, 4, get("a", 4), "a has to be computed again")
	require.Equal(t, 5, get("large", 100), "a result beyond the limit evicts all others")
	require.Equal(t, 5, get("large", 100))
	require.Equal(t, 1, m.lru.Len())

	failed := errors.New("failed")
	for range 2 {
		_, err := m.Get("error", 1, func() (int, error) { return 0, failed })
		require.ErrorIs(t, err, failed)
	}
}
