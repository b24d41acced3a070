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
		{[]string{base, api}, 0, "5.00 × more"}, // another peer is no regression
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

// TestCompareRuns has this program run itself, against a report and against a program that answers as an earlier release.
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
		"echo broken >&2\nexit 7": {exitFailed, "exit status 7; what it said is above"},
		"exit 0":                  {exitFailed, "has printed no report: name a slicecast-loadtest, or a report"},
	} {
		require.NoError(t, os.WriteFile(release, []byte("#!/bin/sh\n"+script+"\n"), 0o700))
		code, _, errOut := execute(t, append([]string{"compare", "--against", release, "--"}, flags...)...)
		require.Equal(t, want.code, code)
		require.Contains(t, errOut, want.message)
	}
	code, _, errOut := execute(t, "compare", "--against", base, "--", "--nodes=0")
	require.Equal(t, exitUsage, code)
	require.Contains(t, errOut, "nodes is 0")
}

// TestCompareReplays has a report's scenario played again, by its own name and from where its state was.
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
	r.Peer = report.KubeAPIServer // beside which Slicecast generates its state
	flags, remove, err = replay(r)
	require.NoError(t, err)
	require.NoError(t, remove())
	require.NotContains(t, flags, "--kube-apiserver=own")
	for source, message := range map[report.Source]string{
		"": "does not say where its state was from", report.Written: "state was written", report.Observed: "state was observed",
	} {
		r.Source = source
		code, _, errOut := execute(t, "compare", "--against", file(t, r))
		require.Equal(t, exitUsage, code)
		require.Contains(t, errOut, message)
	}
}

func TestCompareSaysWhatIsWrong(t *testing.T) {
	base := file(t, reporttest.Slicecast(1, 1))
	failed := reporttest.Slicecast(1, 1)
	failed.Repeats[0].Check.OK = false
	for arguments, want := range map[string]struct {
		code    int
		message string
	}{
		base:                                  {exitUsage, "there are 1 arguments"},
		base + " " + base + " --against=x":    {exitUsage, "leave out --against"},
		base + " " + base + " -- --nodes=1":   {exitUsage, "leave out --against"},
		"--tolerance=-1 " + base + " " + base: {exitUsage, "--tolerance is -1"},
		"--against=/no/such/file":             {exitFailed, "/no/such/file"},
		base + " /no/such/file":               {exitFailed, "no such file"},
		base + " " + file(t, failed):          {exitFailed, "failed its check"},
	} {
		code, _, errOut := execute(t, append([]string{"compare"}, strings.Fields(arguments)...)...)
		require.Equal(t, want.code, code, arguments)
		require.Contains(t, errOut, want.message, arguments)
	}
}
