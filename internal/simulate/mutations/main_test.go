// This test proves that each mutation still fits the tree, so that the list does not decay.
package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestMutationsFit(t *testing.T) {
	require.GreaterOrEqual(t, len(mutations), 30)
	names := make(map[string]bool)
	for _, m := range mutations {
		require.False(t, names[m.name], "%s is listed twice", m.name)
		names[m.name] = true
		b, err := os.ReadFile(filepath.Join("..", "..", "..", m.file))
		require.NoError(t, err, m.name)
		changed, err := m.apply(string(b))
		require.NoError(t, err, m.name)
		require.NotEqual(t, string(b), changed, m.name)
		require.NotEmpty(t, m.tests, m.name)
	}
}
