// This test proves that cleanup, verify, explain and inspect take no other command for the agent.
package app

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestIsAgent checks each command of the program, so that one that is added later is not taken for
// an agent either.
func TestIsAgent(t *testing.T) {
	process := t.TempDir() // of a process that sees other files than this one
	for path, programmer := range map[string]string{"root/shadow.yaml": "shadow", "cwd/printer.yaml": "printer", "root/ipvs.yaml": "ipvs"} {
		path = filepath.Join(process, path)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte("fieldOfAnotherVersion: x\nprogrammer: "+programmer+"\n"), 0o600))
	}
	for _, c := range NewCommand().Commands() {
		require.False(t, isAgent(process, []string{c.Name()}, false), c.Name())
		require.False(t, isAgent(process, []string{"--v=2", c.Name(), "ns/name", "--objects=-", "--", "--node-name=n"}, false), c.Name())
	}
	for line, want := range map[string]struct{ agent, programs bool }{
		"":                                        {true, true},
		"--node-name=verify --servers=a:1":        {true, true},
		"--node-name status --servers a:1":        {true, true},
		"--config=/etc/slicecast/agent.yaml":      {true, true},
		"--flag-of-another-version=x":             {true, true},
		"--init-only --config=agent.yaml":         {false, false},
		"--migrate-config=kube-proxy.yaml":        {false, false},
		"--programmer=shadow":                     {true, false},
		"--programmer printer":                    {true, false},
		"--programmer=iptables":                   {true, true},
		"--config=/shadow.yaml":                   {true, false},
		"--config printer.yaml --v=2":             {true, false},
		"--config=/ipvs.yaml":                     {true, true},
		"--config=/shadow.yaml --programmer=ipvs": {true, true},
		"--config=/ipvs.yaml --programmer=shadow": {true, false},
		"probe wait":                              {false, false},
		"--help":                                  {false, false},
	} {
		require.Equal(t, want.agent, isAgent(process, strings.Fields(line), false), line)
		require.Equal(t, want.programs, isAgent(process, strings.Fields(line), true), line)
	}
}
