// These tests prove that what ginkgo prints and the JUnit report of upstream's tests are
// understood. The texts are shortened copies of real ones.
package upstream

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestProgress(t *testing.T) {
	var lines []string
	p := &progress{logf: func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }}
	for _, piece := range []string{
		"Will run 3 of 3206 specs\nRunning in parallel\n\n• [6.5", "64 seconds]\n[sig-network] DNS should work [Slow] [sig-network, Slow]\n",
		"k8s.io/kubernetes/test/e2e/network/dns.go:55\n\n  • [not] a case\n",
		"• [FAILED] [62.4 seconds]\n[sig-network] Services [It] should fail [sig-network]\n",
		"S [SKIPPED] [0.1 seconds]\n[sig-network] Services [It] should be skipped [sig-network]\n",
	} {
		n, err := p.Write([]byte(piece))
		require.NoError(t, err)
		require.Equal(t, len(piece), n)
	}
	require.Equal(t, []string{
		"1 of 3: passed: [sig-network] DNS should work [Slow]",
		"2 of 3: failed: [sig-network] Services should fail",
		"3 of 3: skipped: [sig-network] Services should be skipped",
	}, lines)
}

func TestReadReport(t *testing.T) {
	const report = `<testsuites><testsuite>
<testcase name="[SynchronizedBeforeSuite]" status="passed"></testcase>
<testcase name="[It] [sig-network] passes" status="passed"></testcase>
<testcase name="[It] [sig-network] fails" status="failed"><failure type="failed">[FAILED] no answer</failure></testcase>
<testcase name="[It] [sig-network] panics" status="panicked"><error type="panicked">index out of range</error></testcase>
<testcase name="[It] [sig-network] skips itself" status="skipped"><skipped message="skipped - needs IPv6"></skipped></testcase>
<testcase name="[It] [sig-node] is not chosen" status="skipped"><skipped message="skipped"></skipped></testcase>
<testcase name="[SynchronizedAfterSuite]" status="failed"><failure type="failed">leak</failure></testcase>
</testsuite></testsuites>`
	path := filepath.Join(t.TempDir(), reportName)
	require.NoError(t, os.WriteFile(path, []byte(report), 0o600))
	results, err := readReport(path)
	require.NoError(t, err)
	require.Equal(t, []Result{
		{Name: "[sig-network] passes", Outcome: passed},
		{Name: "[sig-network] fails", Outcome: failed, Message: "[FAILED] no answer"},
		{Name: "[sig-network] panics", Outcome: failed, Message: "index out of range"},
		{Name: "[sig-network] skips itself", Outcome: skipped, Message: "needs IPv6"},
		{Name: "[SynchronizedAfterSuite]", Outcome: failed, Message: "leak"},
	}, results)
	require.Equal(t, "1 passed, 3 failed, 1 skipped themselves\n  failed: [sig-network] fails\n"+
		"  failed: [sig-network] panics\n  failed: [SynchronizedAfterSuite]", Summary(results))
}

func TestOutcomes(t *testing.T) {
	all := outcomes{}
	all.add([]Result{
		{Name: "[sig-network] a", Outcome: passed}, {Name: "[sig-network] b", Outcome: failed},
		{Name: "[sig-network] c", Outcome: skipped, Message: "needs six nodes"}, {Name: "[SynchronizedAfterSuite]", Outcome: failed},
	})
	all.add([]Result{
		{Name: "[sig-network] a", Outcome: skipped}, {Name: "[sig-network] b", Outcome: passed}, {Name: "[sig-network] c", Outcome: passed},
	})
	all.add([]Result{{Name: "[sig-network] c", Outcome: failed}})
	require.Equal(t, outcomes{
		"[sig-network] a": {Name: "[sig-network] a", Outcome: passed},
		"[sig-network] b": {Name: "[sig-network] b", Outcome: passed},
		"[sig-network] c": {Name: "[sig-network] c", Outcome: failed},
	}, all)
}

// TestExplained requires a reason for each outcome in the folder results that is not passed, and an
// outcome for each reason.
func TestExplained(t *testing.T) {
	used := map[string]bool{}
	for _, combination := range combinations {
		results, err := readResults(filepath.Join("results", combination+resultsSuffix))
		require.NoError(t, err)
		for name, result := range results {
			i := slices.IndexFunc(cases.Explained, func(r rule) bool { return regexp.MustCompile(r.Match).MatchString(name) })
			if result.Outcome != passed && i < 0 {
				t.Errorf("%s: %s: %s %s; cases.yaml does not explain it", combination, name, result.Outcome, result.Message)
			}
			if result.Outcome != passed && i >= 0 {
				used[cases.Explained[i].Match] = true
			}
		}
	}
	for _, r := range cases.Explained {
		require.True(t, used[r.Match], "%s passes everywhere: remove it from cases.yaml", r.Match)
	}
	for _, r := range cases.CannotRun {
		require.NotPanics(t, func() { regexp.MustCompile(r.Match) })
	}
}
