// This test proves that the commands of a page are found, and that a name without them is an error.
package repository_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/testenv/repository"
)

func TestCommands(t *testing.T) {
	block, err := repository.Commands("deploy/README.md", "certificates")
	require.NoError(t, err)
	require.Regexp(t, `^openssl req -x509 (.|\n)*-out tls\.crt\n$`, block)
	for _, name := range []string{"certificate", "no-such-block"} {
		_, err = repository.Commands("deploy/README.md", name)
		require.ErrorContains(t, err, "deploy/README.md has no block of commands")
	}
}
