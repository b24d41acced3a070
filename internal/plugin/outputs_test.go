// These tests prove that each command of the tree has the output formats and flags that it and the
// documentation name, and a clear error for others.
package plugin

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

// commands returns all commands below a root that do something.
func commands(root *cobra.Command) (all []*cobra.Command) {
	for _, c := range root.Commands() {
		if c.Runnable() && c.Name() != "help" && c.Name() != "completion" {
			all = append(all, c)
		}
		all = append(all, commands(c)...)
	}
	return all
}

// answersOfAgents answers what the commands run in the Pod of an agent.
func answersOfAgents(command []string) (string, error) {
	switch line := strings.Join(command[1:], " "); {
	case strings.HasPrefix(line, "status") && strings.Contains(line, "json"):
		return `{"status": {"nodeName": "node-0", "programmer": "nftables", "programmingTime": "2026-01-01T00:00:00Z", "server": {"name": "server-1"}}}`, nil
	case line == "status":
		return "Agent  of node node-0\n", nil
	case line == "status --shards":
		return "Agent  of node node-0\n\nShards\nSHARD  SEQUENCE\n3      17\n", nil
	case strings.HasPrefix(line, "verify"):
		return `{"node": "node-0", "frontends": 7, "packets": 20, "total": 0, "differences": [], "unjudged": []}`, nil
	case strings.HasPrefix(line, "explain"):
		return "", errors.New("no rules can be read here")
	}
	return "", fmt.Errorf("no such command: %q", command)
}

func TestOutputFormats(t *testing.T) {
	e := newEnvironment(t)
	pod := e.pod(agentNamespace, "agent-0", "slicecast-agent", "agent", "node-0", nil, corev1.PodRunning)
	e.connect(pod, e.server("server-1"), "slicecast", e.caFile(agentNamespace, "slicecast-ca"), "slicecast-server."+serverNamespace+".svc")
	e.kubelet.Exec(agentNamespace, "agent-0", answersOfAgents)
	e.service("web")
	e.eventually(fine, nil, "nodes", "node-0")
	// What each command needs beside its flags, and what only -o wide shows.
	arguments := map[string]struct{ words, wide string }{
		"status": {"", "EPOCH"}, "nodes": {"", "ADDRESS"}, "changes": {"", "SHARD"}, "lacks": {"default/web", ""}, "agent": {"node-0", "SHARD  SEQUENCE"},
		"check": {"", "token issuer"}, "verify": {"node-0", ""}, "explain": {"node-0 default/web", ""}, "connectivity": {"--cleanup", ""},
	}
	admin := plane.Kubeconfig(t, plane.AdminConfig())
	for _, c := range commands(NewCommand()) {
		run := func(output string) result {
			words := append([]string{c.Name()}, strings.Fields(arguments[c.Name()].words)...)
			return runAs(t.Context(), admin, append(words, "-o", output)...)
		}
		if c.Name() == "page" || c.Name() == "bugreport" {
			for _, output := range []string{"json", "wide"} {
				r := run(output)
				require.Equal(t, incomplete, r.code)
				require.Contains(t, r.errors, "unknown shorthand flag: 'o' in -o; see slicecast "+c.Name()+" --help")
			}
			continue
		}
		t.Run(c.Name(), func(t *testing.T) {
			require.Contains(t, arguments, c.Name(), "a new command needs arguments here")
			table := run("table")
			require.NotEmpty(t, table.out, table.errors)
			wide := run("wide")
			require.Equal(t, table.code, wide.code, wide.errors)
			if only := arguments[c.Name()].wide; only != "" {
				require.Contains(t, wide.out, only)
				require.NotContains(t, table.out, only)
			}
			var inJSON, inYAML map[string]any
			text := run("json")
			require.Equal(t, table.code, text.code, text.errors)
			require.NoError(t, json.Unmarshal([]byte(text.out), &inJSON), text.out)
			text = run("yaml")
			require.Equal(t, table.code, text.code, text.errors)
			require.NoError(t, yaml.Unmarshal([]byte(text.out), &inYAML), text.out)
			require.NotEmpty(t, inJSON)
			for name := range inJSON {
				require.Contains(t, inYAML, name)
			}
			other := run("xml")
			require.Equal(t, incomplete, other.code)
			require.Contains(t, other.errors, `--output is "xml": use table, wide, json or yaml`)
		})
	}
}

// TestVerbosity checks the forms in which people write klog's flag, and what the log says. It must
// not have the user's credentials.
func TestVerbosity(t *testing.T) {
	e := newEnvironment(t)
	e.server("server-1")
	for words, says := range map[string][]string{
		"": {}, "-v=0": {}, "-v=2": {"Asked a server"}, "-v 2": {"Asked a server"}, "--v=4": {"Asked a server"},
		"-v=8": {"Asked a server", "Asked the API server", "/api/v1/namespaces/slicecast-system/pods?labelSelector="},
	} {
		r := e.run(append([]string{"status"}, strings.Fields(words)...)...)
		require.Equal(t, fine, r.code, r.errors)
		require.Contains(t, r.out, "serving")
		require.Equal(t, len(says) == 0, r.errors == "", r.errors)
		for _, text := range says {
			require.Contains(t, r.errors, text, words)
		}
		require.Equal(t, slices.Contains(says, "Asked the API server"), strings.Contains(r.errors, "Asked the API server"), words)
		require.NotContains(t, r.errors, "Bearer")
	}
	require.Contains(t, e.run("status", "-v=much").errors, `invalid argument "much" for "-v, --v" flag`)
}

// TestDocumentedCommands checks that each command line of kubectl slicecast in the documentation is
// understood, and that each command in docs/kubectl.md's table exists, and the other way round.
func TestDocumentedCommands(t *testing.T) {
	files, err := filepath.Glob("../../docs/*.md")
	require.NoError(t, err)
	deeper, err := filepath.Glob("../../docs/*/*.md")
	require.NoError(t, err)
	lines := 0
	for _, file := range append(append(files, deeper...), "../../README.md") {
		content, err := os.ReadFile(file)
		require.NoError(t, err)
		for _, m := range regexp.MustCompile("(?m)(?:^|`|\\$ )kubectl slicecast( [^`\n]*)").FindAllStringSubmatch(string(content), -1) {
			line, _, _ := strings.Cut(m[1], " #")
			line, _, _ = strings.Cut(line, " | ")
			words := strings.Fields(strings.NewReplacer("'", "", `"`, "", "[", "", "]", "", "...", "").Replace(line))
			if len(words) == 0 {
				continue
			}
			lines++
			root := NewCommand()
			c, rest, err := root.Find(words)
			require.NoError(t, err, "%s: %s", file, m[0])
			require.NotEqual(t, root, c, "%s: %s", file, m[0])
			require.NoError(t, c.ParseFlags(rest), "%s: %s", file, m[0])
			if o := c.Flag("output"); o != nil && c.Name() != "bugreport" {
				require.Contains(t, []string{"table", "wide", "json", "yaml"}, o.Value.String(), "%s: %s", file, m[0])
			}
		}
	}
	require.Greater(t, lines, 20)
	content, err := os.ReadFile("../../docs/kubectl.md")
	require.NoError(t, err)
	table, _, _ := strings.Cut(string(content), "The flags of kubectl choose the")
	var documented, existing []string
	for _, m := range regexp.MustCompile("(?m)^\\| `([a-z]+)[^`]*` \\|").FindAllStringSubmatch(table, -1) {
		documented = append(documented, m[1])
	}
	for _, c := range commands(NewCommand()) {
		existing = append(existing, c.Name())
		c.Flags().VisitAll(func(f *pflag.Flag) {
			require.Regexp(t, `^[A-Z][^\n]*\.$`, f.Usage, "--%s of %s", f.Name, c.Name())
		})
	}
	require.ElementsMatch(t, existing, documented)
}
