// These tests prove which changes of a small package are made, that the ones which its tests do not
// notice are found, and what fails the command: a survivor without an explanation and an
// explanation without a survivor. The package is compiled and its tests run as for any other.
package main

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

const sample = "testdata/sample"

// TestTry tries all mutants of the sample.
func TestTry(t *testing.T) {
	t.Parallel()
	outcomes, err := try(t.Context(), sample, "")
	require.NoError(t, err)
	statuses := map[string]string{}
	for _, o := range outcomes {
		statuses[o.mutation.String()] = o.status
	}
	require.Equal(t, map[string]string{
		`: arithmetic: var doubled = limit [[*]] len(strings.Repeat("x", half(8)))`: killed,
		"half: arithmetic: func half(n int) int { return n [[/]] 2 }":               killed,
		"(*adder).add: boundary: if n [[>]] limit {":                                survived,
		"(*adder).add: negated: if n [[>]] limit {":                                 killed,
		"(*adder).add: removed: [[a.sum += n]]":                                     killed,
		"(*adder).add: removed: [[a.calls++]]":                                      survived,
		"flags: logical: return a [[||]] // a line break after an operator":         survived,
		`word: negated: case [[strings.HasPrefix(s, "a")]]:`:                        killed,
		"word: arithmetic: return s + \"!\", 1 [[<<]] bits":                         killed,
		`word: negated: case s [[!=]] "" && !strings.Contains(s, "b"):`:             killed,
		`word: logical: case s != "" [[&&]] !strings.Contains(s, "b"):`:             killed,
		`word: negated: case s != "" && [[!]]strings.Contains(s, "b"):`:             killed,
		`word: arithmetic: return "", uint64(bits[[&]]3) | 4`:                       killed,
		`word: arithmetic: return "", uint64(bits&3) [[|]] 4`:                       killed,
	}, statuses)
}

// TestRun checks what the command says about two of the mutants, and when it fails.
func TestRun(t *testing.T) {
	t.Parallel()
	const (
		boundary = `  - {func: (*adder).add, change: boundary, code: 'if n [[>]] limit {', why: nobody adds 7}` + "\n"
		negated  = `  - {func: (*adder).add, change: negated, code: 'if n [[>]] limit {', why: it is wrong}` + "\n"
	)
	for name, test := range map[string]struct {
		only, entries string
		report        []string
		err           string
	}{
		"a survivor":         {"limit {", "", []string{"survived: " + sample + "/sample.go:16: (*adder).add: boundary", "2 mutants: 1 killed by a test, 0 by a limit, 1 survived, of which 0 are explained"}, "1 findings"},
		"an explained one":   {"limit {", boundary, []string{"explained: " + sample + "/sample.go:16", "\tnobody adds 7", "1 survived, of which 1 are explained"}, ""},
		"with others killed": {"removed: [[a.sum", negated, []string{"1 mutants: 1 killed"}, ""},
		"one without reason": {"limit {", "  - {func: f, change: boundary, code: x}\n", nil, "say why no test can notice it"},
		"one twice":          {"limit {", boundary + boundary, nil, "is there twice"},
		"an unknown field":   {"limit {", "  - {line: 7, why: x}\n", nil, "field line not found"},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "explained.yaml")
			require.NoError(t, os.WriteFile(file, []byte(sample+"/sample.go:\n"+test.entries), 0o600))
			var w bytes.Buffer
			err := run(t.Context(), &w, test.only, file, []string{"./" + sample + "/"})
			if test.err == "" {
				require.NoError(t, err)
			} else {
				require.ErrorContains(t, err, test.err)
			}
			for _, text := range test.report {
				require.Contains(t, w.String(), text)
			}
		})
	}
}

// TestTermination checks that a run which is terminated says so once, and leaves no file behind.
func TestTermination(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := try(ctx, sample, "")
	require.ErrorIs(t, err, context.Canceled)
	left, err := os.ReadDir(os.TempDir())
	require.NoError(t, err)
	require.Empty(t, left)
	_, err = (&lab{folder: sample}).tryAll(ctx, []int{1, 2, 3})
	require.Equal(t, context.Canceled, err)
}

// TestReport checks that an explanation fails the command if its mutation does not survive, whether
// the mutant is killed or no longer exists.
func TestReport(t *testing.T) {
	t.Parallel()
	alive, dead := mutation{"f", boundary, "a [[<]] b"}, mutation{"f", negated, "a [[<]] b"}
	outcomes := []outcome{{mutant{alive, "p/f.go", 3}, survived}, {mutant{dead, "p/f.go", 3}, killed}}
	for name, test := range map[string]struct {
		known    explained
		all      bool
		findings int
		says     string
	}{
		"all explained":        {explained{"p/f.go": {alive: "why"}}, true, 0, "explained: p/f.go:3"},
		"killed":               {explained{"p/f.go": {alive: "why", dead: "why"}}, true, 1, "explained, but does not survive: p/f.go: f: negated"},
		"no longer there":      {explained{"p/f.go": {alive: "why"}, "p/g.go": {alive: "why"}}, true, 1, "explained, but does not survive: p/g.go"},
		"of another package":   {explained{"p/f.go": {alive: "why"}, "p/q/f.go": {alive: "why"}}, true, 0, "2 mutants"},
		"not tried":            {explained{"p/f.go": {alive: "why", dead: "why"}}, false, 0, "2 mutants"},
		"nothing is explained": {nil, true, 1, "survived: p/f.go:3: f: boundary"},
	} {
		var w bytes.Buffer
		require.Equal(t, test.findings, report(&w, "p", outcomes, test.known, test.all), name)
		require.Contains(t, w.String(), test.says, name)
	}
}

// TestSlowTests checks that tests which need much of the time are put off, but no subtest.
func TestSlowTests(t *testing.T) {
	t.Parallel()
	require.Empty(t, slowTests([]byte("=== RUN   TestA\n--- PASS: TestA (0.00s)\nPASS\n")))
	require.Equal(t, "^(FuzzC|TestB)$", slowTests([]byte(
		"--- PASS: TestA (0.10s)\n--- PASS: TestB (1.00s)\n    --- PASS: TestB/sub (1.00s)\n--- PASS: FuzzC (0.20s)\n    --- PASS: FuzzC/seed#0 (0.10s)\nPASS\n")))
}
