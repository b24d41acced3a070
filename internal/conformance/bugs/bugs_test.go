// These tests prove that outcomes that were printed are written as they were, and that the table
// shows what was run and nothing else.
package bugs

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestPrintedOutcomes(t *testing.T) {
	list, err := Load()
	require.NoError(t, err)
	names := CaseNames(list, ipvs)
	require.Equal(t, []string{"etp-local", "hairpin"}, names)
	outcomes := []Outcome{{"etp-local", "0123", `flow "a"`, true}, {"hairpin", "4567", `step "b": flow "c"`, false}}
	var out strings.Builder
	out.WriteString("=== RUN   TestKubeProxy\n")
	require.NoError(t, Print(&out, "1.37.2", ipvs, outcomes))
	out.WriteString("PASS\n")
	dir := t.TempDir()
	require.NoError(t, WritePrinted(dir, ipvs, out.String()))
	text, err := os.ReadFile(filepath.Join(dir, FileName("1.37.2", ipvs)))
	require.NoError(t, err)
	have, err := parse(text)
	require.NoError(t, err)
	require.Equal(t, outcomes, have)
	require.ErrorContains(t, WritePrinted(dir, "nftables", out.String()), "no outcomes")
}

func TestDescribe(t *testing.T) {
	outcome := func(passed bool) []Outcome { return []Outcome{{"a", "", "flow", passed}} }
	results := Results{
		FileName("1", "nftables"): outcome(false), FileName("1", "iptables-nft"): outcome(true),
		FileName("1", "iptables-legacy"): outcome(true), FileName("1", ipvs): outcome(true),
	}
	cases := []Case{{Name: "a"}}
	note := map[string]string{"1": "and more"}
	for _, test := range []struct {
		bug  Bug
		want string
	}{
		{Bug{}, "not run"},
		{Bug{Cases: cases}, "**fails** in nftables"},
		{Bug{Cases: cases, Notes: note}, "**fails** in nftables, and more"},
		{Bug{Cases: cases, Only: []string{"nftables"}}, "**fails**"},
		{Bug{Cases: cases, Only: []string{"nftables", ipvs}}, "**fails**; not run in ipvs"},
		{Bug{Cases: cases, Only: []string{"iptables"}}, "passes"},
		{Bug{Cases: cases, Only: []string{ipvs}}, "passes"},
	} {
		have, err := results.describe(&test.bug, "1")
		require.NoError(t, err)
		require.Equal(t, test.want, have)
	}
	_, err := results.describe(&Bug{Cases: cases, Notes: note, Only: []string{ipvs}}, "1")
	require.ErrorContains(t, err, "passes, but has a note")
	_, err = results.describe(&Bug{Cases: []Case{{Name: "b"}}}, "1")
	require.ErrorContains(t, err, "has no outcome of case b")
}
