// These tests prove which texts ParseServiceKey accepts, how logs name objects, and which parts of
// a slice's hash a delta reuses.
package model

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestParseServiceKey(t *testing.T) {
	key, ok := ParseServiceKey("default/web")
	require.True(t, ok)
	require.Equal(t, ServiceKey{"default", "web"}, key)
	require.Equal(t, "default/web", key.String())
	for _, s := range []string{"", "web", "/", "/web", "default/", "default/web/", "default/web/x"} {
		_, ok := ParseServiceKey(s)
		require.False(t, ok, "%q", s)
	}
}

func TestKeysInLogs(t *testing.T) {
	require.Equal(t, "EndpointSlice default/web-1", Key{KindSlice, "default", "web-1"}.String())
	require.Equal(t, "Node node-1", Key{Kind: KindNode, Name: "node-1"}.String())
}

// TestLeavesAreReused checks that a slice recognizes its own leaves, which need not be hashed
// again, and no others. The last leaf is not full.
func TestLeavesAreReused(t *testing.T) {
	var s Slice
	for i := range 2*leafEndpoints + 4 {
		s.Endpoints = append(s.Endpoints, Endpoint{Address: netip.AddrFrom4([4]byte{10, 0, 0, byte(i)})})
	}
	have := NewSlice(s)
	leaves := slices.Collect(slices.Chunk(have.Endpoints, leafEndpoints))
	require.Len(t, have.leaves, len(leaves))
	for i := range len(leaves) + 2 {
		for j, leaf := range leaves {
			require.Equal(t, i == j, have.hasLeaf(i, leaf), "%d and %d", i, j)
		}
	}
}
