// This test proves which texts ParseServiceKey accepts.
package model

import (
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
