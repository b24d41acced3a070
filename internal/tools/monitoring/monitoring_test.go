// These tests prove that the rules and dashboards in the chart are current, that expressions use
// metrics that exist, and that no two panels of a dashboard overlap. They also prove that
// docs/runbook.md has a complete entry for each alert and none for others, and names only commands
// that exist. internal/e2e evaluates all expressions.
package main

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/plugin"
)

const root = "../../.."

func TestFilesAreCurrent(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, run([]string{dir}))
	have := files(t, filepath.Join(root, "deploy/helm/slicecast/monitoring"))
	require.Equal(t, files(t, dir), have, "run 'make generate', and remove files that are not generated")
	require.Error(t, run(nil))
}

// files returns the content of all files in a folder by their paths.
func files(t *testing.T, dir string) map[string]string {
	t.Helper()
	all := make(map[string]string)
	require.NoError(t, filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := os.ReadFile(path)
		name, _ := filepath.Rel(dir, path)
		all[name] = string(text)
		return err
	}))
	return all
}

func TestRunbook(t *testing.T) {
	page, err := os.ReadFile(filepath.Join(root, "docs/runbook.md"))
	require.NoError(t, err)
	entries := make(map[string]string)
	for _, section := range strings.Split(string(page), "\n### ")[1:] {
		name, text, _ := strings.Cut(section, "\n")
		entries[name], _, _ = strings.Cut(text, "\n## ")
	}
	for _, group := range ruleGroups() {
		for _, r := range group.Rules {
			if r.Alert == "" {
				continue
			}
			entry, ok := entries[r.Alert]
			require.True(t, ok, "docs/runbook.md has no entry for %s", r.Alert)
			require.Equal(t, runbook+strings.ToLower(r.Alert), r.Annotations["runbook_url"])
			for _, part := range []string{"**Meaning.**", "**Causes", "**Do.**"} {
				if part == "**Do.**" && strings.Contains(entry, "what to do** are those of") {
					continue
				}
				require.Contains(t, entry, "\n"+part, r.Alert)
			}
			require.Regexp(t, `\*\*Look at\*\*\n\n`+"```sh\n"+`|what to look at.*\*\* are those of`, entry, r.Alert)
			delete(entries, r.Alert)
		}
	}
	require.Empty(t, entries, "entries without an alert")
}

// TestCommandsOfTheRunbook proves that kubectl slicecast has the commands and flags that the
// runbook names.
func TestCommandsOfTheRunbook(t *testing.T) {
	page, err := os.ReadFile(filepath.Join(root, "docs/runbook.md"))
	require.NoError(t, err)
	lines := regexp.MustCompile("kubectl slicecast ([^`|#\n]+)").FindAllStringSubmatch(string(page), -1)
	require.NotEmpty(t, lines)
	for _, line := range lines {
		command, args, err := plugin.NewCommand().Find(strings.Fields(line[1]))
		require.NoError(t, err, line[0])
		require.True(t, command.Runnable(), line[0])
		require.NoError(t, command.ParseFlags(args), line[0])
		require.NoError(t, command.ValidateArgs(command.Flags().Args()), line[0])
	}
}

// TestMetricsExist compares the metrics in expressions with docs/metrics.md, which is generated
// from the code.
func TestMetricsExist(t *testing.T) {
	page, err := os.ReadFile(filepath.Join(root, "docs/metrics.md"))
	require.NoError(t, err)
	var expressions []string
	for _, g := range ruleGroups() {
		for _, r := range g.Rules {
			expressions = append(expressions, r.Expr)
		}
	}
	for _, d := range dashboards() {
		for _, p := range d.Panels {
			require.NotEmpty(t, p.Description, p.Title)
			for _, target := range p.Targets {
				expressions = append(expressions, target.Expr)
			}
		}
	}
	name := regexp.MustCompile(`\b(slicecast|kubeproxy)_\w+`)
	suffix := regexp.MustCompile(`_(bucket|count|sum)$`)
	for _, e := range expressions {
		for _, metric := range name.FindAllString(e, -1) {
			metric = suffix.ReplaceAllString(metric, "")
			require.Contains(t, string(page), "| `"+metric+"` |", e)
		}
	}
}

func TestPanelsDoNotOverlap(t *testing.T) {
	for _, d := range dashboards() {
		taken := make(map[[2]int]string)
		var ids []int
		for _, p := range d.Panels {
			ids = append(ids, p.ID)
			require.LessOrEqual(t, p.GridPos.X+p.GridPos.W, width, p.Title)
			for x := range p.GridPos.W {
				for y := range p.GridPos.H {
					at := [2]int{p.GridPos.X + x, p.GridPos.Y + y}
					require.Empty(t, taken[at], "%s: %s overlaps", d.Title, p.Title)
					taken[at] = p.Title
				}
			}
		}
		require.Len(t, slices.Compact(ids), len(d.Panels))
	}
}
