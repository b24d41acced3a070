// This file issues the certificates of servers and of clients of the API server, and writes them to
// files.
package e2e

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/client-go/rest"

	"github.com/slicecast/slicecast/internal/testca"
)

// writeServingCertificate writes the certificate and key of a server at address, and the CA that
// issued them, and returns their paths.
func writeServingCertificate(t *testing.T, dir, address string) (ca, cert, key string) {
	t.Helper()
	authority, err := testca.New()
	require.NoError(t, err)
	ca, err = authority.WriteCA(dir)
	require.NoError(t, err)
	serving, err := authority.Server(address)
	require.NoError(t, err)
	cert, key, err = testca.Write(dir, "server", serving)
	require.NoError(t, err)
	return ca, cert, key
}

// writeClientCertificate writes the certificate and key of a client of the API server, and returns
// their paths.
func writeClientCertificate(t *testing.T, dir, name string, config *rest.Config) (cert, key string) {
	t.Helper()
	return writeFile(t, dir, name+".crt", config.CertData), writeFile(t, dir, name+".key", config.KeyData)
}

func writeFile(t *testing.T, dir, name string, content []byte) string {
	t.Helper()
	path := filepath.Join(dir, name)
	require.NoError(t, os.WriteFile(path, content, 0o600))
	return path
}
