// These tests prove which findings of govulncheck fail the check, and that an exception needs a
// reason and must still be needed. The output of govulncheck is recorded.
package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestRun replays govulncheck's output for a made-up database. The module calls the vulnerable
// function of GO-2099-0001, but not that of GO-2099-0002.
func TestRun(t *testing.T) {
	t.Parallel()
	const (
		recorded    = `cat testdata/govulncheck.json`
		unreachable = `echo 'fetching vulnerabilities: no such host' >&2; cat testdata/govulncheck.json; exit 1`
		calledFirst = "GO-2099-0001: nobody can reach it\n"
	)
	for name, test := range map[string]struct {
		govulncheck, exceptions string
		// texts that they contain; a nil err means that the check passes
		report, err []string
	}{
		"called": {
			recorded, "{}",
			[]string{
				"against https://vuln.example of 2026-11-01T00:00:00Z",
				"GO-2099-0001: CALLED: Digests are not what they seem",
				"github.com/cespare/xxhash/v2 v2.3.0, fixed in v2.9.0",
				"xxhash/v2.(*Digest).Write, from github.com/slicecast/slicecast/internal/model.(Key).Bucket",
				"GO-2099-0002: not called: Keys come back",
			},
			[]string{"GO-2099-0001): update"},
		},
		"accepted":      {recorded, calledFirst, []string{"GO-2099-0001: accepted: nobody can reach it"}, nil},
		"no exceptions": {`echo '{"config": {"db": "x"}}'`, "# none\n", []string{"checked against"}, nil},
		"not needed":    {recorded, calledFirst + "GO-2099-0002: old\n", nil, []string{"GO-2099-0002 is not needed"}},
		"unknown":       {recorded, calledFirst + "GO-2099-0003: old\n", nil, []string{"GO-2099-0003 is not needed"}},
		"no reason":     {recorded, "GO-2099-0001: ' '\n", nil, []string{"GO-2099-0001 has no reason"}},
		"twice":         {recorded, calledFirst + calledFirst, nil, []string{"already defined"}},
		"unknown field": {recorded, "GO-2099-0001: {reason: x, until: 2099}\n", nil, []string{"cannot unmarshal"}},
		"no database":   {unreachable, "{}", nil, []string{"nothing was checked", "no such host"}},
		"silent":        {"true", "{}", nil, []string{"nothing was checked", "no configuration"}},
		"cut off":       {recorded + " | head -c 300", "{}", nil, []string{"nothing was checked", "govulncheck's output"}},
		"nonsense":      {"echo nonsense", "{}", nil, []string{"nothing was checked", "govulncheck's output"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			file := filepath.Join(t.TempDir(), "exceptions.yaml")
			require.NoError(t, os.WriteFile(file, []byte(test.exceptions), 0o600))
			var report bytes.Buffer
			err := run(t.Context(), &report, "", "testdata/govulncheck", file, []string{test.govulncheck})
			for _, want := range test.report {
				require.Contains(t, report.String(), want)
			}
			if test.err == nil {
				require.NoError(t, err)
			}
			for _, want := range test.err {
				require.ErrorContains(t, err, want)
			}
		})
	}
}

// TestExceptions checks that the module's own list of exceptions is valid.
func TestExceptions(t *testing.T) {
	t.Parallel()
	_, err := loadExceptions("exceptions.yaml")
	require.NoError(t, err)
}
