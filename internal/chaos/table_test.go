// TestTable checks the table of several runs. TestPage holds docs/chaos.md to the reports that are
// kept in docs/chaos.
package chaos

import (
	"cmp"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "write docs/chaos.md instead of comparing it")

func TestTable(t *testing.T) {
	window := func(c Counts) Window { return Window{Counts: c} }
	a := &Report{Proxy: "slicecast", Programmer: "nftables", Seed: 7, Took: 61.4,
		Baseline: window(Counts{Requests: 10, Answered: 10}), Quiet: window(Counts{Requests: 10, Answered: 9, Failed: 1}), Calm: window(Counts{Requests: 5, Answered: 5}),
		Steps: []*StepResult{
			{Fault: "cut", At: 1, Window: window(Counts{Requests: 10, Answered: 7, Refused: 1, TimedOut: 2, Misrouted: 1}), Verified: 1.24},
			{Fault: "kill", At: 3, Window: window(Counts{Requests: 3, Answered: 3, Broken: 1}), Unconverged: "why"},
			{Fault: "cut", At: 4, Window: window(Counts{Requests: 2, Failed: 2}), Verified: 2.51},
		},
	}
	b := &Report{Proxy: "kube-proxy", Programmer: "nftables", Seed: 7, Took: 60, Steps: []*StepResult{
		{Fault: "drain", At: 2, Skipped: true},
		{Fault: "cut", At: 1, Window: window(Counts{Requests: 1, Answered: 1})},
	}}
	require.Equal(t, `|  | slicecast (nftables), seed 7 | kube-proxy (nftables), seed 7 |
| --- | --- | --- |
| no fault, no churn: at the end | 0 / 0 / 0 | 0 / 0 / 0 |
| no fault | 1 / 0 / 0 | 0 / 0 / 0 |
| `+"`cut`"+` | 5 / 1 / 0; 2.5 s | 0 / 0 / 0; 0.0 s |
| `+"`drain`"+` | - | - |
| `+"`kill`"+` | 0 / 0 / 1; **not converged** | - |
| **all** | 6 / 1 / 1 of 40 requests in 1m1s | 0 / 0 / 0 of 1 requests in 1m0s |
`, Table(a, b))
}

// TestPage requires that the table in docs/chaos.md is that of the reports in docs/chaos.
func TestPage(t *testing.T) {
	const page, begin, end = "../../docs/chaos.md", "<!-- begin results -->\n", "<!-- end results -->\n"
	var reports []*Report
	paths, err := filepath.Glob("../../docs/chaos/*.json")
	require.NoError(t, err)
	require.NotEmpty(t, paths)
	for _, path := range paths {
		r, err := LoadReport(path)
		require.NoError(t, err)
		reports = append(reports, r)
	}
	slices.SortFunc(reports, func(a, b *Report) int { // Slicecast first
		return cmp.Or(-cmp.Compare(a.Programmer, b.Programmer), -cmp.Compare(a.Proxy, b.Proxy))
	})
	text, err := os.ReadFile(page)
	require.NoError(t, err)
	before, rest, ok := strings.Cut(string(text), begin)
	require.True(t, ok)
	_, after, ok := strings.Cut(rest, end)
	require.True(t, ok)
	want := before + begin + Table(reports...) + end + after
	if *update {
		require.NoError(t, os.WriteFile(page, []byte(want), 0o644))
		return
	}
	require.Equal(t, want, string(text), "copy the reports of bin/chaos to docs/chaos, and run 'go test ./internal/chaos -update'")
}
