// This test proves that renewed tokens are used.
package client

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestTokenIsReadEachTime(t *testing.T) {
	path := filepath.Join(t.TempDir(), "token")
	f := TokenFile(path)
	_, err := f.GetRequestMetadata(t.Context())
	require.ErrorContains(t, err, "no such file")
	for _, token := range []string{"first", "second"} {
		require.NoError(t, os.WriteFile(path, []byte(token+"\n"), 0o600))
		m, err := f.GetRequestMetadata(t.Context())
		require.NoError(t, err)
		require.Equal(t, map[string]string{"authorization": "Bearer " + token}, m)
	}
	require.NoError(t, os.WriteFile(path, nil, 0o600))
	_, err = f.GetRequestMetadata(t.Context())
	require.ErrorContains(t, err, "empty")
	require.True(t, f.RequireTransportSecurity())
}
