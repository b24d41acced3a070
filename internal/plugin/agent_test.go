// These tests prove that what an agent says is wrong with itself is in the exit code.
package plugin

import (
	"errors"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestProblemsOfAgents(t *testing.T) {
	const good = `"programmingTime": "2026-01-01T00:00:00Z", "server": {"name": "server-1"}, "ofALaterVersion": 1`
	for status, problem := range map[string]string{
		good: "",
		`"time": "2026-01-01T00:01:00Z", "programmingTime": "2026-01-01T00:00:00Z", "server": {"name": "server-1", "staleSince": "2026-01-01T00:00:00Z"}`: "it follows server-1, which may lack changes of the last 1m0s; kubectl slicecast status says why",
		`"programmingTime": "2026-01-01T00:00:00Z", "source": "kube"`:                                                                                     "",
		`"server": {"name": "server-1"}`:                                                                       "it has not programmed anything since it was started",
		`"programmingTime": "2026-01-01T00:00:00Z", "lastError": "connection refused"`:                         "it follows no server: connection refused",
		`"programmingTime": "2026-01-01T00:00:00Z"`:                                                            "it follows no server",
		good + `, "programmingError": "out of memory"`:                                                         "it cannot program its kernel: out of memory",
		good + `, "failures": [{"service": {"namespace": "default", "name": "web"}, "reason": "no such set"}]`: "it cannot program default/web: no such set",
		good + `, "warnings": [{"warning": "NODE_WARNING_KUBE_PROXY", "reason": "a kube-proxy runs"}]`:         "kube_proxy: a kube-proxy runs",
	} {
		for _, output := range []string{"table", "wide", "json"} {
			r := &agentReport{agents: make([]agentStatus, 1)}
			a := &r.agents[0]
			require.NoError(t, a.ask(output, func(command ...string) ([]byte, error) {
				if line := strings.Join(command, " "); output == "table" && line == "slicecast-agent status" || output == "wide" && line == "slicecast-agent status --shards" {
					return []byte("Agent  of node"), nil
				}
				require.Equal(t, []string{"slicecast-agent", "status", "--output=json"}, command)
				return []byte(`{"status": {` + status + `}}`), nil
			}))
			require.Equal(t, output != "json", a.text != "")
			require.Equal(t, output == "json", a.Answer != nil)
			if problem == "" {
				require.Empty(t, a.Problems)
				require.Equal(t, fine, r.code())
				continue
			}
			require.Equal(t, []string{problem}, a.Problems)
			require.Equal(t, wrong, r.code())
		}
	}
	for answer, says := range map[string]string{
		"usage": "has not printed its status", "{}": "has not printed its status", `{"status": {"server": 1}}`: "another version",
	} {
		err := new(agentStatus).ask("table", func(...string) ([]byte, error) { return []byte(answer), nil })
		require.ErrorContains(t, err, says)
	}
	away := errors.New("away")
	require.ErrorIs(t, new(agentStatus).ask("json", func(...string) ([]byte, error) { return nil, away }), away)
	r := &agentReport{agents: []agentStatus{{Problems: []string{"x"}}, {Error: "away"}}}
	require.Equal(t, incomplete, r.code())
}
