// These tests prove what compare prints and returns for reports, for programs that it runs, and for
// scenarios that it replays, and what it refuses before it runs anything. A script stands for an
// earlier release.
package app

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/loadtest/report"
	"github.com/slicecast/slicecast/loadtest/report/reporttest"
)

func TestCompareReports(t *testing.T) {
	base, same, slower := file(t, reporttest.Slicecast(5, 1)), file(t, reporttest.Slicecast(5, 1.01)), file(t, reporttest.Slicecast(5, 1.5))
	api := file(t, reporttest.APIServer(5))
	html := filepath.Join(t.TempDir(), "page.html")
	for _, c := range []struct {
		arguments []string
		code      int
		out       string
	}{
		{[]string{base, same}, 0, "no difference seen"},
		{[]string{base, slower}, exitMissed, "worse (p=0.008)"},
		{[]string{"--tolerance=1", base, slower}, 0, "no difference seen (p=0.008)"},
		{[]string{slower, base}, 0, "better (p=0.008)"},
		{[]string{"--html", html, api, base}, 0, "5.00 × less"},
		// A different peer is not a regression.
		{[]string{base, api}, 0, "5.00 × more"},
		// A bound judges the second side.
		{[]string{"--require=bytes-per-update<=120B", api, base}, 0, "5.00 × less"},
		{[]string{"--require=bytes-per-update<=120B", base, api}, exitMissed, "5.00 × more"},
	} {
		code, out, errOut := execute(t, append([]string{"compare"}, c.arguments...)...)
		require.Equal(t, c.code, code, errOut)
		require.Contains(t, out, c.out)
	}
	require.FileExists(t, html)

	code, out, _ := execute(t, "compare", "-o", "json", base, slower)
	require.Equal(t, exitMissed, code)
	var parsed struct {
		Schema   string
		From, To struct{ Schema string }
		Changes  []struct{ Metric, Verdict string }
	}
	require.NoError(t, json.Unmarshal([]byte(out), &parsed))
	require.Equal(t, report.ComparisonSchema, parsed.Schema)
	require.NoError(t, reporttest.ValidateAs(report.ComparisonJSONSchema, []byte(out)))
	require.Equal(t, "slicecast-loadtest/v2", parsed.To.Schema)
	require.Equal(t, "p50", parsed.Changes[0].Metric)
	require.Equal(t, "worse", parsed.Changes[0].Verdict)

	once := file(t, reporttest.Slicecast(1, 1))
	code, out, errOut := execute(t, "compare", "-o", "json", once, once)
	require.Zero(t, code, errOut)
	require.Contains(t, out, "too few repeats to tell")
}

// TestCompareRuns compares this program with a report, and with a script that acts as an earlier
// release.
func TestCompareRuns(t *testing.T) {
	dir := t.TempDir()
	base := file(t, reporttest.Slicecast(1, 1))
	release := filepath.Join(dir, "slicecast-loadtest-v1")
	require.NoError(t, os.WriteFile(release, []byte("#!/bin/sh\necho \"$*\" >"+dir+"/arguments\ncat "+base+"\n"), 0o700))
	flags := []string{"--nodes=3", "--services=2x4", "--changing=", "--rate=20", "--duration=500ms", "--warm-up=0s"}
	for _, against := range []string{base, release} {
		code, out, errOut := execute(t, append([]string{"compare", "--against", against, "--"}, flags...)...)
		require.Zero(t, code, errOut)
		require.Contains(t, out, "too few repeats to tell")
		require.Contains(t, out, "the numbers of nodes differ: 1000 and 3")
	}
	arguments, err := os.ReadFile(filepath.Join(dir, "arguments"))
	require.NoError(t, err)
	require.Equal(t, "run --output=json "+strings.Join(flags, " ")+"\n", string(arguments))

	for script, want := range map[string]struct {
		code    int
		message string
	}{
		"echo broken >&2\nexit 7":  {exitFailed, "exit status 7; its output is above"},
		"exit 0":                   {exitFailed, "printed no report: use a slicecast-loadtest or a report"},
		"cat " + base + "; exit 3": {exitFailed, "run: exit status 3; its output is above"},
	} {
		require.NoError(t, os.WriteFile(release, []byte("#!/bin/sh\n"+script+"\n"), 0o700))
		code, _, errOut := execute(t, append([]string{"compare", "--against", release, "--"}, flags...)...)
		require.Equal(t, want.code, code)
		require.Contains(t, errOut, want.message)
	}
	code, _, errOut := execute(t, "compare", "--against", base, "--", "--nodes=0")
	require.Equal(t, exitUsage, code)
	require.Contains(t, errOut, "nodes is 0")

	code, _, errOut = execute(t, append([]string{"compare", "--against", base, "--require=reconnects<0", "--"}, flags...)...)
	require.Equal(t, exitMissed, code)
	require.Contains(t, errOut, "objective reconnects<0: missed")
	require.NoError(t, os.WriteFile(release, []byte("#!/bin/sh\ncat "+base+"; exit 1\n"), 0o700))
	code, out, errOut := execute(t, append([]string{"compare", "--against", release, "--require=reconnects<0", "--"}, flags...)...)
	require.Equal(t, exitFailed, code, "a failed run takes precedence over objectives")
	require.Contains(t, out, "too few repeats to tell", "the reports are compared all the same")
	require.Contains(t, errOut, "objective reconnects<0: missed")
}

// TestCompareRefusesBeforeItRuns uses flags after -- that are invalid or would make the output of
// the runs unreadable.
func TestCompareRefusesBeforeItRuns(t *testing.T) {
	dir := t.TempDir()
	release := filepath.Join(dir, "slicecast-loadtest-v1")
	require.NoError(t, os.WriteFile(release, []byte("#!/bin/sh\ntouch "+dir+"/ran\n"), 0o700))
	for flag, message := range map[string]string{
		"-otext": "--output is after --", "--output=json": "--output is after --", "--html=x": "--html is after --", "--require=p99<1s": "--require is after --",
		"--nonsense": "unknown flag: --nonsense", "nonsense": `"nonsense" is after --`, "--rate=-1": "rate is -1",
	} {
		for _, arguments := range [][]string{{"--against", release}, {}} {
			code, out, errOut := execute(t, append(append([]string{"compare"}, arguments...), "--", "--services=1x1", flag)...)
			require.Equal(t, exitUsage, code, flag)
			require.Empty(t, out)
			require.Contains(t, errOut, message)
		}
	}
	code, _, errOut := execute(t, "compare", "--require=p98<1s", "--against", release)
	require.Equal(t, exitUsage, code)
	require.Contains(t, errOut, `no metric "p98"`)
	code, _, errOut = execute(t, "compare", "--nodes=3")
	require.Equal(t, exitUsage, code)
	require.Contains(t, errOut, "unknown flag: --nodes; flags of the runs go after --")
	require.NoFileExists(t, filepath.Join(dir, "ran"))
}

// TestCompareReplays plays a report's scenario again, under its name and with the same source of
// state.
func TestCompareReplays(t *testing.T) {
	r := reporttest.Slicecast(1, 1)
	require.NoError(t, json.Unmarshal([]byte(`{"nodes": 3, "services": "2x4", "changing": "", "rate": 20, "duration": "500ms", "warm-up": "0s"}`),
		&r.Scenario.Parameters))
	delete(r.Scenario.Parameters, "changesPerSecond")
	r.Scenario.Parameters["seed"], r.Scenario.Name, r.Nodes = 7, "mine", 3
	code, out, errOut := execute(t, "compare", "--against", file(t, r), "-o", "json")
	require.Zero(t, code, errOut)
	var parsed struct {
		To    report.Report
		Notes []string
	}
	require.NoError(t, json.Unmarshal([]byte(out), &parsed))
	require.Equal(t, "mine", parsed.To.Scenario.Name)
	require.Equal(t, "Endpoints flip at a rate.", parsed.To.Scenario.Description)
	require.Equal(t, report.Generated, parsed.To.Source)
	for _, note := range parsed.Notes {
		require.NotRegexp(t, `parameter (nodes|services|changing|rate|duration|warm-up|seed) differs|scenarios differ|numbers of nodes`, note)
	}

	r.Source = report.OwnAPIServer
	flags, remove, err := replay(r)
	require.NoError(t, err)
	require.NoError(t, remove())
	require.Contains(t, flags, "--kube-apiserver=own")
	r.Peer = report.KubeAPIServer // Slicecast then generates its state
	flags, remove, err = replay(r)
	require.NoError(t, err)
	require.NoError(t, remove())
	require.NotContains(t, flags, "--kube-apiserver=own")
	for source, message := range map[report.Source]string{
		"": "does not say where its state came from", report.Written: "state was written", report.Observed: "state was observed",
	} {
		r.Source = source
		code, _, errOut := execute(t, "compare", "--against", file(t, r))
		require.Equal(t, exitUsage, code)
		require.Contains(t, errOut, message)
	}
}

func TestCompareErrors(t *testing.T) {
	base := file(t, reporttest.Slicecast(1, 1))
	failed := reporttest.Slicecast(1, 1)
	failed.Repeats[0].Check.OK = false
	notes, otherMachine := filepath.Join(t.TempDir(), "notes"), filepath.Join(t.TempDir(), "other-machine")
	require.NoError(t, os.WriteFile(notes, []byte("no report"), 0o600))
	require.NoError(t, os.WriteFile(otherMachine, []byte("no program of this machine"), 0o700))
	for arguments, want := range map[string]struct {
		code    int
		message string
	}{
		base:                                  {exitUsage, "there are 1 arguments"},
		base + " " + base + " --against=x":    {exitUsage, "leave out --against"},
		base + " " + base + " -- --nodes=1":   {exitUsage, "leave out --against"},
		"--tolerance=-1 " + base + " " + base: {exitUsage, "--tolerance is -1"},
		"--against=/no/such/file":             {exitUsage, "--against=/no/such/file is neither a report nor a program (stat /no/such/file: no such file"},
		"--against=missing.json":              {exitUsage, "--against=missing.json is neither a report nor a program (executable file not found in $PATH)"},
		"--against=" + notes:                  {exitUsage, "neither a report nor a program (permission denied): use the file of a report (JSON)"},
		"--against=" + otherMachine:           {exitFailed, otherMachine + ": exec format error\n"},
		base + " /no/such/file":               {exitFailed, "no such file"},
		base + " " + file(t, failed):          {exitFailed, "a check of a run failed"},
	} {
		code, _, errOut := execute(t, append([]string{"compare"}, strings.Fields(arguments)...)...)
		require.Equal(t, want.code, code, arguments)
		require.Contains(t, errOut, want.message, arguments)
	}
}
