// TestConformancePage holds docs/conformance.md to the outcomes of upstream's tests that are kept
// in internal/testenv/upstream/results.
package conformancedoc

import (
	"flag"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/testenv/upstream"
)

var update = flag.Bool("update", false, "write docs/conformance.md instead of comparing it")

// TestConformancePage requires that docs/conformance.md is current.
func TestConformancePage(t *testing.T) {
	const path = "../../../docs/conformance.md"
	want, err := upstream.Page()
	require.NoError(t, err)
	if *update {
		require.NoError(t, os.WriteFile(path, []byte(want), 0o644))
	}
	have, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, want, string(have), "docs/conformance.md is not current: run 'make generate'")
}
