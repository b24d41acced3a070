// These tests prove how scenarios follow from files and flags, that errors name the line, and that
// docs/loadtest.md has all parameters.
package scenario

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/loadtest/generate"
)

func load(t *testing.T, content string, flags ...string) (*Scenario, error) {
	file := filepath.Join(t.TempDir(), "mine.yaml")
	require.NoError(t, os.WriteFile(file, []byte(content), 0o600))
	return Load(file, given(t, flags...))
}

func given(t *testing.T, flags ...string) *pflag.FlagSet {
	f := pflag.NewFlagSet("test", pflag.ContinueOnError)
	new(Scenario).AddFlags(f)
	f.Int("other", 0, "is not a parameter")
	require.NoError(t, f.Parse(flags))
	return f
}

func TestShippedScenarios(t *testing.T) {
	require.Equal(t, []string{
		"cold-start", "headline", "many-small", "node-drain", "reconnect-storm", "rolling-update", "scale-up", "server-failover",
		"slow-nodes", "steady",
	}, Names())
	for _, name := range Names() {
		s, err := Load(name, nil)
		require.NoError(t, err)
		require.Equal(t, name, s.Name)
		require.NotEmpty(t, s.Description)
	}
	s, err := Load("headline", nil)
	require.NoError(t, err)
	require.Equal(t, 3000, s.Nodes)
	require.Empty(t, s.Services)
	require.Equal(t, Groups{{Count: 1, Least: 5000, Most: 5000}}, s.Changing)
	require.Equal(t, generate.Roll, s.Change)
}

func TestFlagsOverrideFiles(t *testing.T) {
	s, err := load(t, "description: Mine.\nnodes: 7\nrate: 2.5\nservices: 3x1-9,1x50\nduration: 3s\nevent: reconnect\nat: 2s\n",
		"--nodes=9", "--changing=2x8", "--other=5", "--slow-percent=30")
	require.NoError(t, err)
	require.Equal(t, "mine", s.Name)
	require.Equal(t, "Mine. Here with --changing=2x8 --nodes=9 --slow-percent=30.", s.Description)
	require.Equal(t, 9, s.Nodes)
	require.InDelta(t, 2.5, s.Rate, 0)
	require.Equal(t, Groups{{Count: 3, Least: 1, Most: 9}, {Count: 1, Least: 50, Most: 50}}, s.Services)
	require.Equal(t, Groups{{Count: 2, Least: 8, Most: 8}}, s.Changing)
	require.Equal(t, 3*time.Second, s.Duration)
	require.Equal(t, 5*time.Second, s.WarmUp, "not set in the file or by a flag")
	require.Equal(t, Reconnect, s.Event)
	slow := 0
	for node := range 10 {
		if s.Slow(node) {
			slow++
		}
	}
	require.Equal(t, 3, slow)
}

// TestParameters checks that Parameters has the value of every flag, in a form that a file accepts.
func TestParameters(t *testing.T) {
	s, f := &Scenario{}, pflag.NewFlagSet("", pflag.ContinueOnError)
	s.AddFlags(f)
	all := s.Parameters()
	f.VisitAll(func(flag *pflag.Flag) { require.Contains(t, all, flag.Name) })
	for name, value := range all {
		require.NotNil(t, f.Lookup(name), name)
		require.EqualValues(t, f.Lookup(name).Value.String(), toString(value), name)
	}
}

func toString(v any) string {
	f := pflag.NewFlagSet("", pflag.ContinueOnError)
	switch v := v.(type) {
	case string:
		return v
	case int:
		f.Int("v", v, "")
	case uint64:
		f.Uint64("v", v, "")
	case float64:
		f.Float64("v", v, "")
	case bool:
		f.Bool("v", v, "")
	}
	return f.Lookup("v").Value.String()
}

func TestInvalidFiles(t *testing.T) {
	for content, message := range map[string]string{
		"nodes: 3\nnods: 4":         "mine.yaml: line 2: nods is not a parameter: use description or arrivals, at, batch, change",
		"nodes: three":              `line 1: nodes is "three": must be an integer`,
		"rate: 5\n\nservices: 1x":   `line 3: services is "1x": "1x" is not a group: use COUNTxENDPOINTS`,
		"services: 50":              "is not a group",
		"nodes: [1, 2]":             "line 1: nodes must have a single value",
		"nodes: 1\nnodes: 2":        "line 2: nodes is set twice",
		"- nodes":                   "must be a mapping",
		"":                          "must be a mapping",
		"a: b: c":                   "mapping values",
		"nodes: 0":                  "nodes is 0: use at least 1",
		"nodes: -1\nbatch: 0":       "batch is 0",
		"change: flop":              `change is "flop": use flip, roll, drain, scale or none`,
		"event: party":              `event is "party": use reconnect, restart, failover or none`,
		"event: failover":           "use at least 2",
		"rate: 0":                   "rate is 0",
		"rate: NaN":                 "rate is NaN",
		"arrivals: often":           `arrivals is "often": use even or poisson`,
		"grace: -1s":                "grace is -1s",
		"duration: 0s":              "duration is 0s",
		"duration: 5":               `duration is "5": must be a duration`,
		"warm-up: -1s":              "warm-up is -1s",
		"at: -1s":                   "at is -1s",
		"nodes: 1\n---\nnodes: 2":   "more than one document",
		"nodes: 1\n---\n- [":        "more than one document",
		"event: reconnect\nat: 61s": "at is 1m1s, but the changes end after 1m0s",
		"event: reconnect\nat: 101s\nchange: roll\nrate: 50":                                   "the changes end after 1m40s",
		"event: reconnect\nat: 3s\nchange: scale\nservices: 2x10-20\nrate: 20\nchanging: \"\"": "the changes end after 2s",
		"servers: 0":                    "servers is 0",
		"relays: -1":                    "relays is -1",
		"connecting: -1":                "connecting is -1",
		"slow-percent: 100":             "slow-percent is 100",
		"slow-delay: 0s":                "slow-delay is 0s",
		"floor: true\nrelays: 2":        "leave relays out",
		"services: 1x0":                 "use 0 to",
		`{services: "", changing: ""}`:  "0 services: use",
		"change: drain\nnodes: 1":       "use at least 2",
		"services: 1000x100000":         "use at most",
		"floor: perhaps":                `floor is "perhaps": must be true or false`,
		"services: 3x5-4":               "3 services with 5 to 4 endpoints",
		"services: 1x5,x":               `"x" is not a group`,
		"seed: -1":                      `seed is "-1": must be a non-negative integer`,
		"nodes: 1\ndescription: {a: b}": "line 2: description must have a single value",
	} {
		_, err := load(t, content)
		require.ErrorContains(t, err, message, content)
		require.ErrorContains(t, err, "mine.yaml", content)
	}
	_, err := Load("nonsense", nil)
	require.ErrorContains(t, err, `there is no scenario "nonsense": use one of cold-start, headline`)
	_, err = Load("nowhere.yaml", nil)
	require.ErrorIs(t, err, os.ErrNotExist)
	folder := filepath.Join(t.TempDir(), "folder.yaml")
	require.NoError(t, os.Mkdir(folder, 0o700))
	_, err = Load(folder, nil)
	require.ErrorContains(t, err, "is not a regular file")
}

// TestParametersAreDocumented compares the table of docs/loadtest.md with the flags.
func TestParametersAreDocumented(t *testing.T) {
	f := pflag.NewFlagSet("", pflag.ContinueOnError)
	new(Scenario).AddFlags(f)
	var want []string
	f.VisitAll(func(flag *pflag.Flag) {
		want = append(want, fmt.Sprintf("| `%s` | `%s` | %s |", flag.Name, flag.Value, flag.Usage))
	})
	page, err := os.ReadFile("../../docs/loadtest.md")
	require.NoError(t, err)
	require.Contains(t, string(page), strings.Join(want, "\n"))
}
