// Command reportschema writes the JSON Schemas of the load tester's machine-readable output:
// reports, comparisons and estimates. It reads types from the Go structures and descriptions from
// their comments, so that the schemas match what is written. It runs in the root of the module.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"reflect"
	"strings"

	"github.com/google/jsonschema-go/jsonschema"

	"github.com/slicecast/slicecast/loadtest/estimate"
	"github.com/slicecast/slicecast/loadtest/report"
)

// module is the import path of the module. A package's directory is its import path without this
// prefix.
const module = "github.com/slicecast/slicecast/"

func main() {
	if err := run(os.Args); err != nil {
		fmt.Fprintln(os.Stderr, "reportschema:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) != 2 {
		return errors.New("usage: reportschema <directory>, which stands for the root of the module")
	}
	d := describer{packages: make(map[string]map[string]string)}
	return errors.Join(
		write[report.Report](d, args[1], "loadtest/report/schema.json", report.Schema),
		write[report.Comparison](d, args[1], "loadtest/report/comparison.schema.json", report.ComparisonSchema),
		write[estimate.Estimate](d, args[1], "loadtest/estimate/schema.json", estimate.Schema),
	)
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

// write writes the schema of a type. Objects of the type name the schema in their field "schema".
func write[T any](d describer, root, file, name string) error {
	s, err := jsonschema.For[T](&jsonschema.ForOptions{TypeSchemas: types})
	if err != nil {
		return err
	}
	if err := d.describe(reflect.TypeFor[T](), s); err != nil {
		return err
	}
	s.Schema = "https://json-schema.org/draft/2020-12/schema"
	s.Title = name
	s.Properties["schema"].Const = jsonschema.Ptr(any(name))
	out, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return err
	}
	path := filepath.Join(root, file)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, append(out, '\n'), 0o644)
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
