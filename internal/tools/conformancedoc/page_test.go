// TestConformancePage holds docs/conformance.md to the outcomes of upstream's tests that are kept
// in internal/testenv/upstream/results, and to those of known bugs in internal/conformance/bugs.
// TestKnownBugs proves that what the table of known bugs names exists, and that the outcomes are
// those of the cases as they are.
package conformancedoc

import (
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/conformance/bugs"
	"github.com/slicecast/slicecast/internal/testenv/upstream"
)

var update = flag.Bool("update", false, "write docs/conformance.md instead of comparing it")

const root = "../../.."

// TestConformancePage requires that docs/conformance.md is current.
func TestConformancePage(t *testing.T) {
	const path = root + "/docs/conformance.md"
	section, err := bugs.Section()
	require.NoError(t, err)
	want, err := upstream.Page(section)
	require.NoError(t, err)
	if *update {
		require.NoError(t, os.WriteFile(path, []byte(want), 0o644))
	}
	have, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, want, string(have), "docs/conformance.md is not current: run 'make generate'")
}

// TestKnownBugs requires that each test and case of a bug exists, and that each kube-proxy was run
// with the cases as they are now.
func TestKnownBugs(t *testing.T) {
	list, err := bugs.Load()
	require.NoError(t, err)
	results, err := bugs.LoadResults()
	require.NoError(t, err)
	digests := map[string]string{}
	for i := range list {
		for _, test := range list[i].Tests {
			pkg, name, _ := strings.Cut(test, " ")
			assert.True(t, hasFunction(t, filepath.Join(root, pkg), name), "%s has no function %s", pkg, name)
		}
		for _, c := range list[i].Cases {
			if digests[c.Name] == "" {
				digests[c.Name], err = bugs.Digest(filepath.Join(root, "internal/conformance/testdata/scenarios", c.Name+".yaml"))
				assert.NoError(t, err)
			}
		}
		for _, only := range list[i].Only {
			assert.Contains(t, []string{"nftables", "iptables", "ipvs"}, only)
		}
	}
	for _, variant := range bugs.Variants {
		names := bugs.CaseNames(list, variant)
		for _, version := range bugs.Versions {
			file := bugs.FileName(version, variant)
			for _, o := range results[file] {
				assert.Contains(t, names, o.Case, "%s: the case is no bug's: run 'make conformance-record'", file)
				assert.Equal(t, digests[o.Case], o.Digest, "%s: case %s has changed: run 'make conformance-record'", file, o.Case)
			}
		}
	}
}

// hasFunction reports whether a test file of a package declares a function.
func hasFunction(t *testing.T, dir, name string) bool {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*_test.go"))
	require.NoError(t, err)
	declaration := regexp.MustCompile(`(?m)^func ` + regexp.QuoteMeta(name) + `\(`)
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		if declaration.Match(text) {
			return true
		}
	}
	return false
}
