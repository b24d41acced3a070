// TestSchemas holds the JSON Schemas of the load tester's machine-readable output, which are those
// of reports, comparisons and estimates, to the code: the types of the Go structures, and the
// comments that describe them.
package reportschema

import (
	"encoding/json"
	"flag"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/google/jsonschema-go/jsonschema"
	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/loadtest/estimate"
	"github.com/slicecast/slicecast/loadtest/report"
)

// module is the import path of the module. A package's directory is its import path without this
// prefix.
const module = "github.com/slicecast/slicecast/"

var update = flag.Bool("update", false, "write the schemas instead of comparing them")

// TestSchemas requires that the schemas are current.
func TestSchemas(t *testing.T) {
	t.Chdir("../../..")
	d := describer{packages: make(map[string]map[string]string)}
	check[report.Report](t, d, "loadtest/report/schema.json", report.Schema)
	check[report.Comparison](t, d, "loadtest/report/comparison.schema.json", report.ComparisonSchema)
	check[estimate.Estimate](t, d, "loadtest/estimate/schema.json", estimate.Schema)
}

// types are the schemas of types that have their own form in JSON.
var types = map[reflect.Type]*jsonschema.Schema{
	reflect.TypeFor[report.Peer]():      {Type: "string", Enum: []any{report.Slicecast, report.KubeAPIServer}},
	reflect.TypeFor[report.Source]():    {Type: "string", Enum: []any{report.Generated, report.OwnAPIServer, report.Written, report.Observed}},
	reflect.TypeFor[report.PhaseKind](): {Type: "string", Enum: []any{report.ColdSync, report.WarmUp, report.Changes, report.Resync}},
	reflect.TypeFor[report.Unit]():      {Type: "string", Enum: []any{report.Seconds, report.Millis, report.Micros, report.Bytes, report.Number}},
	reflect.TypeFor[report.Verdict]():   {Type: "string", Enum: []any{report.Better, report.Worse, report.Same, report.Unknown}},
	reflect.TypeFor[report.Metric]():    {Type: "string"},
}

// check requires that a file has the schema of a type. Objects of the type name the schema in their
// field "schema".
func check[T any](t *testing.T, d describer, file, name string) {
	s, err := jsonschema.For[T](&jsonschema.ForOptions{TypeSchemas: types})
	require.NoError(t, err)
	require.NoError(t, d.describe(reflect.TypeFor[T](), s))
	s.Schema = "https://json-schema.org/draft/2020-12/schema"
	s.Title = name
	s.Properties["schema"].Const = jsonschema.Ptr(any(name))
	want, err := json.MarshalIndent(s, "", "  ")
	require.NoError(t, err)
	want = append(want, '\n')
	if *update {
		require.NoError(t, os.WriteFile(file, want, 0o644))
	}
	have, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, string(want), string(have), "%s is not current: run 'make generate'", file)
}

// describer reads descriptions from source code.
type describer struct {
	// packages holds, by import path, the comments of types by their names, and those of fields by
	// "Type.Field".
	packages map[string]map[string]string
}

// describe adds descriptions to a type's schema. It also allows additional properties, because
// later versions may add some.
func (d describer) describe(t reflect.Type, s *jsonschema.Schema) error {
	if _, own := types[t]; own {
		return nil
	}
	switch t.Kind() {
	case reflect.Pointer:
		return d.describe(t.Elem(), s)
	case reflect.Slice:
		return d.describe(t.Elem(), s.Items)
	case reflect.Map:
		if t.Elem().Kind() == reflect.Struct {
			return d.describe(t.Elem(), s.AdditionalProperties)
		}
		return nil
	case reflect.Struct:
	default:
		return nil
	}
	if !strings.HasPrefix(t.PkgPath(), module) {
		return nil
	}
	comments, err := d.comments(t.PkgPath())
	if err != nil {
		return err
	}
	s.AdditionalProperties = nil
	s.Description = comments[t.Name()]
	for i := range t.NumField() {
		f := t.Field(i)
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		p := s.Properties[name]
		if err := d.describe(f.Type, p); err != nil {
			return err
		}
		if c := comments[t.Name()+"."+f.Name]; c != "" {
			p.Description = c
		}
	}
	return nil
}

func (d describer) comments(pkg string) (map[string]string, error) {
	if c, ok := d.packages[pkg]; ok {
		return c, nil
	}
	files, err := filepath.Glob(filepath.Join(strings.TrimPrefix(pkg, module), "*.go"))
	if err != nil {
		return nil, err
	}
	out := make(map[string]string)
	for _, name := range files {
		f, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ParseComments)
		if err != nil {
			return nil, err
		}
		for _, declaration := range f.Decls {
			g, ok := declaration.(*ast.GenDecl)
			if !ok || g.Tok != token.TYPE {
				continue
			}
			for _, spec := range g.Specs {
				t := spec.(*ast.TypeSpec)
				out[t.Name.Name] = line(g.Doc)
				fields, ok := t.Type.(*ast.StructType)
				if !ok {
					continue
				}
				for _, field := range fields.Fields.List {
					for _, n := range field.Names {
						out[t.Name.Name+"."+n.Name] = line(field.Doc)
					}
				}
			}
		}
	}
	d.packages[pkg] = out
	return out, nil
}

func line(c *ast.CommentGroup) string { return strings.Join(strings.Fields(c.Text()), " ") }
