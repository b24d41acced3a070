// Package deptest tests dependencies between packages. Each package imports only packages of lower
// layers. Pure packages, which tests can treat as functions of their input, import neither the
// network, nor Kubernetes clients, nor the kernel, not even indirectly. The programs do not depend
// on packages that would make them large.
package deptest

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const module = "github.com/slicecast/slicecast/"

// folder is a folder in the table of layers. Layer 0 is the lowest one.
type folder struct {
	name  string
	layer int
	// whole is set if the folder is named with /..., which includes the folders below it.
	whole bool
}

// TestLayers holds the module to the table of layers in docs/design.md. Each package belongs to the
// longest folder of the table that includes it. It imports only packages of lower layers and of its
// own folder, test files aside.
func TestLayers(t *testing.T) {
	folders := layers(t)
	of := func(path string) (in folder, ok bool) {
		for _, f := range folders {
			if (path == f.name || f.whole && strings.HasPrefix(path, f.name+"/")) && len(f.name) >= len(in.name) {
				in, ok = f, true
			}
		}
		return in, ok
	}
	format := `{{.ImportPath}}{{range .Imports}} {{.}}{{end}}`
	for line := range strings.Lines(goList(t, "-f", format, module+"...")) {
		imports := strings.Fields(line)
		name := strings.TrimPrefix(imports[0], module)
		own, ok := of(name)
		if !assert.True(t, ok, "%s has no layer: add it to the table in docs/design.md", name) {
			continue
		}
		for _, imported := range imports[1:] {
			if imported, ok := strings.CutPrefix(imported, module); ok {
				other, _ := of(imported)
				assert.True(t, other.layer < own.layer || other == own,
					"%s is not of a lower layer than %s, which imports it", imported, name)
			}
		}
	}
}

// layers returns the folders in the table of layers in docs/design.md.
func layers(t *testing.T) (folders []folder) {
	content, err := os.ReadFile(filepath.Join(root, "docs/design.md"))
	require.NoError(t, err)
	_, table, ok := strings.Cut(string(content), "\n| layer | packages |\n| --- | --- |\n")
	require.True(t, ok, "docs/design.md has no table of layers")
	table, _, _ = strings.Cut(table, "\n\n")
	for layer, row := range strings.Split(table, "\n") {
		_, packages, _ := strings.Cut(strings.Trim(row, "|"), "|")
		for _, named := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(packages, -1) {
			name, whole := strings.CutSuffix(named[1], "/...")
			folders = append(folders, folder{name: name, layer: layer, whole: whole})
		}
	}
	return folders
}

// pure lists the packages that must not depend on any of forbidden.
var pure = []string{"internal/model", "internal/store", "agent/view", "agent/client/cache"}

var forbidden = []string{
	"google.golang.org/grpc",
	"k8s.io/client-go",
	"github.com/vishvananda/netlink",
	"github.com/vishvananda/netns",
	"github.com/coreos/go-iptables",
	"github.com/fsnotify/fsnotify",
	"net/http",
	"os/exec",
}

func TestPurePackages(t *testing.T) {
	for _, room := range pure {
		t.Run(room, func(t *testing.T) { requireFree(t, room, forbidden...) })
	}
}

// clientParts lists, for each part of the client, the other parts that it may import.
var clientParts = map[string][]string{
	"agent/client/cache":      nil,
	"agent/client/checkpoint": {"cache"},
	"agent/client/discovery":  {"cache"},
	"agent/client/connection": {"cache", "discovery"},
	"agent/client":            {"cache", "discovery", "connection"},
}

// TestLayersOfTheClient requires that the parts of the client depend on each other in one
// direction only, and that the cache reaches neither a clock, nor a goroutine's context, nor the
// network, nor files.
func TestLayersOfTheClient(t *testing.T) {
	for layer, allowed := range clientParts {
		t.Run(layer, func(t *testing.T) {
			for _, imported := range imports(t, layer) {
				part, ok := strings.CutPrefix(imported, module+"agent/client/")
				require.False(t, ok && !slices.Contains(allowed, part), "%s must not import %s", layer, imported)
				require.NotEqual(t, module+"agent/client", imported)
			}
		})
	}
	direct := imports(t, "agent/client/cache")
	for _, outside := range []string{"context", "math/rand/v2", "net", "os", "time"} {
		require.NotContains(t, direct, outside, "the cache must not import it")
	}
}

// imports returns what a package imports itself.
func imports(t *testing.T, of string) []string {
	t.Helper()
	return strings.Fields(goList(t, "-f", `{{join .Imports " "}}`, module+of))
}

// TestSmallPrograms requires the programs not to depend on client-go's clientset. It includes all
// kinds of objects of Kubernetes, which would take memory on every node.
func TestSmallPrograms(t *testing.T) {
	for _, program := range []string{"agent", "server"} {
		t.Run(program, func(t *testing.T) { requireFree(t, program, "k8s.io/client-go/kubernetes", "k8s.io/api/apps") })
	}
}

// TestPlugin requires that what the plugin has of this module imports nothing that Windows lacks,
// for which it is released. Building it for Windows would take a minute.
func TestPlugin(t *testing.T) {
	t.Setenv("GOOS", "windows")
	t.Setenv("CGO_ENABLED", "0")
	format := `{{.ImportPath}}{{range .Imports}} {{.}}{{end}}`
	own := 0
	for line := range strings.Lines(goList(t, "-deps", "-f", format, module+"deploy/kubectl-slicecast")) {
		imports := strings.Fields(line)
		if !strings.HasPrefix(imports[0], module) {
			continue
		}
		own++
		for _, of := range []string{"golang.org/x/sys/unix", "github.com/vishvananda/netlink", "github.com/google/nftables"} {
			require.NotContains(t, imports[1:], of, "%s is in the plugin, which has to be built for Windows", imports[0])
		}
	}
	require.Greater(t, own, 3)
}

func requireFree(t *testing.T, of string, forbidden ...string) {
	for _, dependency := range strings.Fields(goList(t, "-deps", module+of)) {
		for _, prefix := range forbidden {
			require.False(t, dependency == prefix || strings.HasPrefix(dependency, prefix+"/"),
				"%s must not depend on %s; 'go list -deps' shows the path", of, dependency)
		}
	}
}

func goList(t *testing.T, args ...string) string {
	out, err := exec.CommandContext(t.Context(), "go", append([]string{"list"}, args...)...).CombinedOutput()
	require.NoError(t, err, "%s", out)
	return string(out)
}

// ownTLS are folders that may have configurations of TLS of their own. All others take those of
// internal/tlsfiles, whose handshakes are bounded and whose peers' certificates are verified.
var ownTLS = []string{"internal/tlsfiles/", "internal/auth/authtest/", "loadtest/", "examples/"}

// TestTLSIsBounded requires that no other package configures TLS itself.
func TestTLSIsBounded(t *testing.T) {
	own := regexp.MustCompile(`tls\.Config\{|\btls\.Request\w+|\btls\.Require\w+|InsecureSkipVerify`)
	files := strings.Fields(goList(t, "-f", `{{$d := .Dir}}{{range .GoFiles}}{{$d}}/{{.}} {{end}}`, module+"..."))
	require.NotEmpty(t, files)
	top, err := filepath.Abs(root)
	require.NoError(t, err)
	for _, file := range files {
		name, err := filepath.Rel(top, file)
		require.NoError(t, err)
		if slices.ContainsFunc(ownTLS, func(folder string) bool { return strings.HasPrefix(name, folder) }) {
			continue
		}
		content, err := os.ReadFile(file)
		require.NoError(t, err)
		assert.Empty(t, own.FindAllString(string(content), -1), "%s configures TLS: use internal/tlsfiles", name)
	}
}
