// This test proves that docs/security.md names only tests and constants that exist, and covers each
// bound that internal/hostile tests.
package deptest

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const root = "../.."

// named matches the name of a test or declaration in docs/security.md: `TestX`, `FuzzX` or
// `package.name`.
var named = regexp.MustCompile("`((?:Test|Fuzz)[A-Z]\\w*|[a-z]\\w*\\.\\w+)`")

// TestSecurityPage requires that all tests and constants named in docs/security.md exist, that each
// row of its tables of bounds names both, and that it covers each bound that internal/hostile
// tests.
func TestSecurityPage(t *testing.T) {
	content, err := os.ReadFile(filepath.Join(root, "docs/security.md"))
	require.NoError(t, err)
	page := string(content)
	declared := declarations(t)
	names := named.FindAllStringSubmatch(page, -1)
	require.NotEmpty(t, names)
	for _, name := range names {
		_, ok := declared[name[1]]
		assert.True(t, ok, "docs/security.md names %s, which does not exist", name[1])
	}

	bounds := false
	for line := range strings.Lines(page) {
		switch line = strings.TrimSpace(line); {
		case !strings.HasPrefix(line, "|"):
			bounds = false
		case line == "| bound | number | constant | test |":
			bounds = true
		case bounds && !strings.HasPrefix(line, "| ---"):
			cells := strings.Split(strings.Trim(line, "|"), "|")
			require.Len(t, cells, 4, line)
			require.Regexp(t, "^ (—|`[a-z]\\w*\\.\\w+`(, `[a-z]\\w*\\.\\w+`)*) $", cells[2], line)
			require.Regexp(t, "^ `(Test|Fuzz)", cells[3], line)
		}
	}

	table, err := os.ReadFile(filepath.Join(root, "internal/hostile/attacks_test.go"))
	require.NoError(t, err)
	for _, driven := range regexp.MustCompile(`bounds: "([^"]+)"`).FindAllStringSubmatch(string(table), -1) {
		for bound := range strings.FieldsSeq(driven[1]) {
			require.True(t, strings.Contains(page, "`"+bound+"`") || strings.Contains(page, "."+bound+"`"),
				"docs/security.md lacks the bound %s, which internal/hostile tests", bound)
		}
	}
}

// declarations returns the names of all tests, and of all package-level declarations outside of
// tests in the form package.name.
func declarations(t *testing.T) map[string]struct{} {
	t.Helper()
	out := make(map[string]struct{})
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (d.Name() == "testdata" || strings.HasPrefix(d.Name(), ".") && path != root):
			return filepath.SkipDir
		case !strings.HasSuffix(path, ".go"):
			return nil
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		test := strings.HasSuffix(path, "_test.go")
		for _, declaration := range file.Decls {
			switch d := declaration.(type) {
			case *ast.FuncDecl:
				if test && d.Recv == nil {
					out[d.Name.Name] = struct{}{}
				}
			case *ast.GenDecl:
				for _, spec := range d.Specs {
					for _, name := range declares(spec) {
						if !test {
							out[file.Name.Name+"."+name.Name] = struct{}{}
						}
					}
				}
			}
		}
		return nil
	})
	require.NoError(t, err)
	return out
}

// declares returns the names that a declaration of constants, variables or types introduces,
// including fields.
func declares(spec ast.Spec) (names []*ast.Ident) {
	switch s := spec.(type) {
	case *ast.ValueSpec:
		return s.Names
	case *ast.TypeSpec:
		names = append(names, s.Name)
		if fields, ok := s.Type.(*ast.StructType); ok {
			for _, f := range fields.Fields.List {
				names = append(names, f.Names...)
			}
		}
	}
	return names
}
