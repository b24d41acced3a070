//go:build !race

// This test checks what people read in this module: Markdown, and the comments in Go, Protocol
// Buffers, shell and YAML files and in Makefiles. CONTRIBUTING.md lists the rules. Under the race
// detector it would take half a minute; make lint runs it without.
package prose

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestTree checks all files of the module. Accept a finding in rules.yaml, with a reason, only if
// the text is best as it is.
func TestTree(t *testing.T) {
	t.Parallel()
	r, err := loadRules("rules.yaml")
	require.NoError(t, err)
	found, err := r.tree("../../..")
	require.NoError(t, err)
	for _, f := range found {
		t.Error(f)
	}
}
