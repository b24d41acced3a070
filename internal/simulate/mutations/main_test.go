// These tests prove that each mutation still fits the tree and leaves it Go, so that the list does
// not decay, and that the table of results keeps what was not tried again. Whether a mutation
// compiles is seen when it is tried. A terminated command leaves no process behind.
package main

import (
	"context"
	"go/parser"
	"go/token"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

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
		_, err = parser.ParseFile(token.NewFileSet(), m.file, changed, parser.SkipObjectResolution)
		require.NoError(t, err, m.name)
		require.NotEmpty(t, m.tests, m.name)
	}
}

// TestTermination checks that the processes which a command has started end with it. The command
// waits for them otherwise, because they share its output.
func TestTermination(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	c := command(ctx, t.TempDir(), "sh", "-c", "sleep 3600; true")
	out, err := c.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, c.Start())
	cancel()
	b, err := io.ReadAll(out)
	require.NoError(t, err)
	require.Empty(t, b)
	require.Error(t, c.Wait())
}

func TestTable(t *testing.T) {
	path := filepath.Join(t.TempDir(), "page.md")
	first, second := mutations[0].name, mutations[1].name
	require.NoError(t, os.WriteFile(path, []byte("before\n"+header+"\n| --- |\n| 7 | "+second+
		" | old | 5 | 6 |\n| 8 | no longer listed | old | 5 | 6 |\n\nafter\n"), 0o600))
	require.NoError(t, writeTable(path, map[string]result{first: {by: "a test", took: 3 * time.Second}}))
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Contains(t, string(b), "before\n"+header+"\n| --- | --- | --- | --- | --- |\n| 1 | "+first+" | a test |  | 3 |\n| 2 | "+
		second+" | old | 5 | 6 |\n| 3 | "+mutations[2].name+" | not tried | | |\n")
	require.NotContains(t, string(b), "no longer listed")
	require.Contains(t, string(b), " |\n\nafter\n")
	require.Error(t, writeTable(filepath.Join("..", "..", "..", "go.mod"), nil))
}

func TestViolationIsFound(t *testing.T) {
	found := violation.FindStringSubmatch("--- FAIL: TestSimulate (1.00s)\n    simulate_test.go:12: seed 34: node-1: it is lost\n        more\n")
	require.Equal(t, []string{"34", "node-1: it is lost"}, found[1:])
}
