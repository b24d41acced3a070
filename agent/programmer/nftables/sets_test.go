package nftables

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestSetsKeepTheirForm holds each set's name to what it means: one that has another form under the same name has an agent that is updated make the
// table of the one before anew, and clients lose their affinity.
func TestSetsKeepTheirForm(t *testing.T) {
	var lines []string
	for _, family := range families {
		d := newDialect(family, DefaultMasqueradeMark)
		for s := range setCount {
			if s > sources { // all of them have one form
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
