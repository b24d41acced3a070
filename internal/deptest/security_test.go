// These tests prove that docs/security.md names only tests and constants that exist, and covers
// each bound that internal/hostile tests, and that no share is as large as its budget.
package deptest

import (
	"go/ast"
	"go/constant"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
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
	declared, values := declarations(t), constants(t)
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
			requireNumbers(t, cells[0]+cells[1], cells[2], values)
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

// number matches a number with its unit, or with the one at the end of a range.
var number = regexp.MustCompile(`(\d[\d,.]*)(?:[ /]?(?:to \d+ )?(KiB|MiB|GiB|ms|s|min|day|bits)\b)?`)

// units has what a unit may stand for in a constant: bytes, a time.Duration, seconds, or a rate.
var units = map[string][]float64{
	"": {1}, "KiB": {1 << 10}, "MiB": {1 << 20}, "GiB": {1 << 30}, "bits": {1, 1.0 / 8},
	"ms": {1e6}, "s": {1e9, 1}, "min": {60e9, 1.0 / 60}, "day": {86400},
}

// requireNumbers requires that the text about a bound has the values of its constants, as far as
// these are known.
func requireNumbers(t *testing.T, text, names string, values map[string]constant.Value) {
	t.Helper()
	var said []float64
	for _, match := range number.FindAllStringSubmatch(text, -1) {
		n, err := strconv.ParseFloat(strings.ReplaceAll(match[1], ",", ""), 64)
		require.NoError(t, err, text)
		for _, unit := range units[match[2]] {
			said = append(said, n*unit, 1/n)
		}
	}
	for _, name := range named.FindAllStringSubmatch(names, -1) {
		if value, ok := values[name[1]]; ok {
			v, _ := constant.Float64Val(constant.ToFloat(value))
			assert.Contains(t, said, v, "%s is %v, and docs/security.md says%s", name[1], value, text)
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

// alone are limits that nobody shares, with the reason. All other constants for a number at once
// are in the table of shares and budgets.
var alone = map[string]string{
	"fanout.messagesBurst": "each client has its own", "fanout.resyncsBurst": "each client has its own",
	"fanout.startsBurst": "each identity has its own", "fanout.othersStartsBurst": "each identity has its own",
	"connection.resyncsAtOnce": "of the agent itself", "connection.nacksAtOnce": "of the agent itself",
	"connection.repairBurst": "of the agent itself", "kube.queriesBurst": "of the program itself",
	"reconcile.repairsAtOnce": "of the agent itself", "probe.maxAtOnce": "of the tester itself",
	"bounded.LinesAtOnce": "of a log; the status, servers or a metric have all of it",
	"page.lookupBurst":    "only observers and operators ask, and answers are short",
}

// TestSharesAreBelowTheirBudgets requires that each share in docs/security.md is at most half of
// its budget, and that each limit with a number at once is in that table or alone. It also requires
// that a port never gives one address more than half of its places.
func TestSharesAreBelowTheirBudgets(t *testing.T) {
	values := constants(t)
	content, err := os.ReadFile(filepath.Join(root, "docs/security.md"))
	require.NoError(t, err)
	_, table, ok := strings.Cut(string(content), "| share | budget |\n| --- | --- |\n")
	require.True(t, ok)
	inTable := make(map[string]bool)
	for line := range strings.Lines(table) {
		if !strings.HasPrefix(line, "|") {
			break
		}
		cells := strings.Split(line, "|")
		shares, budgets := named.FindAllStringSubmatch(cells[1], -1), named.FindAllStringSubmatch(cells[2], -1)
		require.NotEmpty(t, shares, line)
		require.Len(t, budgets, len(shares), line)
		for i := range shares {
			share, budget := shares[i][1], budgets[i][1]
			inTable[share], inTable[budget] = true, true
			require.Contains(t, values, share)
			require.Contains(t, values, budget)
			twice := constant.BinaryOp(constant.ToFloat(values[share]), token.MUL, constant.MakeInt64(2))
			assert.True(t, constant.Compare(twice, token.LEQ, constant.ToFloat(values[budget])), "%s is %s, and %s is %s",
				share, values[share], budget, values[budget])
		}
	}
	for name := range values {
		if strings.HasSuffix(name, "Burst") || strings.HasSuffix(name, "AtOnce") {
			assert.True(t, inTable[name] || alone[name] != "", "%s is neither in the table of shares nor alone", name)
		}
	}
	for name := range alone {
		assert.Contains(t, values, name)
	}
}

// constants returns the values of the package-level constants of programs, by package.name, and
// checks the shares of ports. Constants that need other packages than time are left out.
func constants(t *testing.T) map[string]constant.Value {
	t.Helper()
	fset := token.NewFileSet()
	packages := make(map[string][]*ast.File)
	require.NoError(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (d.Name() == "testdata" || d.Name() == "loadtest" || strings.HasPrefix(d.Name(), ".") && path != root):
			return filepath.SkipDir
		case !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go"):
			return nil
		}
		file, err := parser.ParseFile(fset, path, nil, parser.SkipObjectResolution)
		packages[filepath.Dir(path)] = append(packages[filepath.Dir(path)], file)
		return err
	}))
	known := map[string]*types.Package{}
	var err error
	known["time"], err = importer.ForCompiler(fset, "source", nil).Import("time")
	require.NoError(t, err)
	out := make(map[string]constant.Value)
	for dir, files := range packages {
		info := &types.Info{Types: make(map[ast.Expr]types.TypeAndValue)}
		config := types.Config{Importer: only(known), IgnoreFuncBodies: true, Error: func(error) {}}
		checked, _ := config.Check(dir, fset, files, info) // the imports are missing
		for _, name := range checked.Scope().Names() {
			if c, ok := checked.Scope().Lookup(name).(*types.Const); ok && c.Val().Kind() != constant.Unknown {
				out[checked.Name()+"."+name] = c.Val()
			}
		}
		for _, file := range files {
			ast.Inspect(file, func(n ast.Node) bool {
				if literal, ok := n.(*ast.CompositeLit); ok {
					requirePlaces(t, fset, literal, info)
				}
				return true
			})
		}
	}
	return out
}

// requirePlaces requires that a literal with the fields Total and PerAddress gives one address at
// most half of all places.
func requirePlaces(t *testing.T, fset *token.FileSet, literal *ast.CompositeLit, info *types.Info) {
	t.Helper()
	fields := make(map[string]constant.Value)
	for _, element := range literal.Elts {
		if field, ok := element.(*ast.KeyValueExpr); ok {
			if name, ok := field.Key.(*ast.Ident); ok {
				fields[name.Name] = info.Types[field.Value].Value
			}
		}
	}
	share, ok := fields["PerAddress"]
	if !ok {
		return
	}
	where := fset.Position(literal.Pos())
	require.NotNil(t, share, where)
	require.NotNil(t, fields["Total"], where)
	twice := constant.BinaryOp(share, token.MUL, constant.MakeInt64(2))
	assert.True(t, constant.Compare(twice, token.LEQ, fields["Total"]), "%s: PerAddress is more than half of Total", where)
}

// only imports the packages that it has.
type only map[string]*types.Package

// Import implements types.Importer.
func (o only) Import(path string) (*types.Package, error) {
	if p, ok := o[path]; ok {
		return p, nil
	}
	return nil, os.ErrNotExist
}
