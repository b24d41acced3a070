// These tests prove the exit codes and outputs of the commands that read reports, and that the
// commands in docs/performance.md are valid.
package app

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/loadtest/performance"
	"github.com/slicecast/slicecast/loadtest/report"
	"github.com/slicecast/slicecast/loadtest/report/reporttest"
)

// execute runs the command with arguments.
func execute(t *testing.T, arguments ...string) (code int, out, errOut string) {
	t.Helper()
	var o, e bytes.Buffer
	code = Execute(t.Context(), arguments, strings.NewReader(""), &o, &e)
	return code, o.String(), e.String()
}

// file writes a report to a file and returns its path.
func file(t *testing.T, r *report.Report) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "report.json")
	f, err := os.Create(name)
	require.NoError(t, err)
	require.NoError(t, report.WriteJSON(f, r))
	require.NoError(t, f.Close())
	return name
}

func TestExitCodes(t *testing.T) {
	good := file(t, reporttest.Slicecast(2, 1))
	r := reporttest.Slicecast(2, 1)
	r.Repeats[1].Check.OK, r.Repeats[1].Check.Error = false, "interrupt signal received"
	failed := file(t, r)
	old := filepath.Join(t.TempDir(), "old.json")
	require.NoError(t, os.WriteFile(old, []byte(`{"schema": "slicecast-loadtest/v1"}`), 0o600))
	for _, c := range []struct {
		arguments string
		code      int
		message   string
	}{
		{"show " + good, 0, ""},
		{"show --require p99<1s --require changes-time<=20s " + good, 0, "objective p99<1s: kept, 79.7 ms in the worst of 2 repeats"},
		{"show --require p99<1ms " + good, exitMissed, "objective p99<1ms: missed"},
		{"show " + failed, exitFailed, "is the report of a failed run"},
		{"show --require p99<1s " + failed, exitFailed, "is the report of a failed run"},
		{"show --require p99<1ms " + good + " " + failed, exitFailed, "is the report of a failed run"},
		{"show --require p97<1ms " + good, exitUsage, `there is no metric "p97"`},
		{"show --output=yaml " + good, exitUsage, `--output is "yaml"`},
		{"show --html=/no/such/directory/x.html " + good, exitUsage, "its directory does not exist"},
		{"show --nonsense " + good, exitUsage, "unknown flag: --nonsense"},
		{"show", exitUsage, "requires at least 1 arg"},
		{"nonsense", exitUsage, `unknown command "nonsense"`},
		{"show " + old, exitFailed, `schema is "slicecast-loadtest/v1"`},
		{"show /no/such/file", exitFailed, "no such file"},
		{"run --nodes=0 --require p97<1ms", exitUsage, "nodes is 0"},
		{"run --require p97<1ms", exitUsage, `there is no metric "p97"`},
	} {
		code, _, errOut := execute(t, strings.Fields(c.arguments)...)
		require.Equal(t, c.code, code, "%s\n%s", c.arguments, errOut)
		require.Contains(t, errOut, c.message, c.arguments)
	}
	_, out, _ := execute(t, "run", "--help")
	require.Contains(t, out, "3 the run succeeded, but an objective (--require) was missed")
}

func TestShow(t *testing.T) {
	a, b := file(t, reporttest.APIServer(4)), file(t, reporttest.Slicecast(4, 1))
	html := filepath.Join(t.TempDir(), "page.html")
	code, out, errOut := execute(t, "show", "--html", html, a, b)
	require.Zero(t, code, errOut)
	require.Equal(t, 2, strings.Count(out, "slicecast-loadtest v1.0.0"))
	page, err := os.ReadFile(html)
	require.NoError(t, err)
	require.Contains(t, string(page), "5.00 × less")

	code, out, errOut = execute(t, "show", "-o", "json", b)
	require.Zero(t, code, errOut)
	want, err := os.ReadFile(b)
	require.NoError(t, err)
	require.Equal(t, string(want), out)
}

// TestBenchCommands checks that the flags of the commands in docs/performance/method.md, which make
// performance runs, are valid.
func TestBenchCommands(t *testing.T) {
	for _, c := range performance.Commands() {
		if c.Bench() {
			continue
		}
		words := strings.Fields(c.Command)
		require.Equal(t, "slicecast-loadtest", words[0])
		peer := map[string]report.Peer{"run": report.Slicecast, "apiserver": report.KubeAPIServer}[words[1]]
		require.NotEmpty(t, peer, c.Command)
		o := options(t, peer, words[2:]...)
		_, err := o.Options.Validate()
		require.NoError(t, err, c.Name)
	}
}
