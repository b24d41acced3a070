// These tests prove that a command in a Pod cannot make this process hold any amount of output, and
// that the user's own credentials are known wherever they are configured.
package fleet

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd/api"
)

func TestOutputIsBounded(t *testing.T) {
	l := &limited{limit: 10}
	_, err := io.Copy(l, strings.NewReader("0123456789"))
	require.NoError(t, err)
	require.Equal(t, "0123456789", string(l.bytes()))
	// io.Copy does not write to a buffer that can read.
	_, err = io.Copy(l, strings.NewReader("more"))
	require.ErrorContains(t, err, "more than 10 bytes")
	require.Len(t, l.bytes(), 10)
	l = &limited{limit: 5}
	_, err = l.Write([]byte("0123456789"))
	require.Error(t, err)
	require.Equal(t, "01234", string(l.bytes()), "the beginning is kept")
}

// TestSecrets checks that credentials in files and for plugins are known.
func TestSecrets(t *testing.T) {
	dir := t.TempDir()
	for name, content := range map[string]string{"token": "token-in-a-file\n", "key": "key-in-a-file"} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600))
	}
	f, err := New(Options{Config: &rest.Config{BearerTokenFile: filepath.Join(dir, "token")}})
	require.NoError(t, err)
	defer f.Close()
	require.Contains(t, f.Secrets(), "token-in-a-file\n")
	f.options.Config = &rest.Config{
		Username: "u", Password: "password-itself",
		TLSClientConfig: rest.TLSClientConfig{KeyFile: filepath.Join(dir, "key")}, BearerTokenFile: filepath.Join(dir, "none"),
		ExecProvider: &api.ExecConfig{Env: []api.ExecEnvVar{{Name: "VENDOR_TOKEN", Value: "token-for-a-plugin"}, {Name: "PROFILE", Value: "default"}}},
		AuthProvider: &api.AuthProviderConfig{Config: map[string]string{"refresh-token": "refresh-token-itself", "client-id": "kubectl"}},
	}
	require.ElementsMatch(t, []string{"key-in-a-file", "token-for-a-plugin", "refresh-token-itself", "password-itself", "", ""}, f.Secrets())
}
