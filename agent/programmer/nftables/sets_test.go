// This test proves that no set has changed its definition under the same name, because an updated
// agent would then have to create the table again.
package nftables

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/programmer"
)

// TestSetsKeepTheirForm asserts that each set's name keeps its definition. If a set had another
// definition under the same name, an updated agent would create the table again, and clients would
// lose their affinity.
func TestSetsKeepTheirForm(t *testing.T) {
	var lines []string
	for _, family := range families {
		d := newDialect(family, programmer.DefaultMasqueradeMark)
		for s := range setCount {
			if s > sources { // all sets of sources have one definition
				break
			}
			definition := d.define(s)
			lines = append(lines, fmt.Sprintf("%v %v: %v", family, s, definition))
		}
	}
	slices.Sort(lines)
	have := strings.Join(slices.Compact(lines), "\n") + "\n"
	const file = "testdata/sets.txt"
	if os.Getenv("UPDATE") != "" {
		require.NoError(t, os.WriteFile(file, []byte(have), 0o600))
	}
	want, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, string(want), have, "give a set of another form another name; a new one is added with UPDATE=1 go test -run TestSetsKeepTheirForm ./agent/programmer/nftables")
}
