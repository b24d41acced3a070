package main

import (
	"cmp"
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// mutation identifies a change of the code, independently of the lines around it.
type mutation struct {
	// Func is the function with its receiver, such as (*Slice).Check; empty for a package's variable.
	Func string `yaml:"func"`
	// Change is the name of a kind of change, such as boundary.
	Change string `yaml:"change"`
	// Code is the line of source, without indentation, with what changes in doubled brackets.
	Code string `yaml:"code"`
}

func (m mutation) String() string { return fmt.Sprintf("%s: %s: %s", m.Func, m.Change, m.Code) }

// mutant is a mutation at its place.
type mutant struct {
	mutation
	file string // path from the root of the module
	line int
}

func (m mutant) String() string { return fmt.Sprintf("%s:%d: %s", m.file, m.line, m.mutation) }

// The kinds of changes.
const (
	negated    = "negated"    // a condition or comparison has the opposite result
	boundary   = "boundary"   // < becomes <=, > becomes >=, and the reverse
	logical    = "logical"    // && becomes ||, and the reverse
	arithmetic = "arithmetic" // an operator is replaced by another, as helpers lists
	removed    = "removed"    // the statement does nothing
)

// comparisons and operators are the functions of helpers that evaluate an operator.
var (
	comparisons = map[token.Token]string{token.LSS: "mutantLess", token.LEQ: "mutantAtMost", token.GTR: "mutantGreater", token.GEQ: "mutantAtLeast"}
	operators   = map[token.Token]string{
		token.ADD: "mutantAdd", token.SUB: "mutantSub", token.MUL: "mutantMul", token.QUO: "mutantQuo", token.REM: "mutantRem",
		token.AND: "mutantAnd", token.OR: "mutantOr", token.XOR: "mutantXor", token.AND_NOT: "mutantAndNot",
		token.SHL: "mutantShl", token.SHR: "mutantShr",
	}
)

// helpers is a file that is added to the package. Instrumented code calls these functions with the
// number of the mutant. One that has the number mutantActive evaluates as the mutant does.
const helpers = `

import (
	"cmp"
	"os"
	"strconv"
)

// Nothing that runs before the tests may depend on the order in which variables are initialized.
var mutantActive = func() int { n, _ := strconv.Atoi(os.Getenv("` + activeVariable + `")); return n }()

type mutantInteger interface {
	~int | ~int8 | ~int16 | ~int32 | ~int64 | ~uint | ~uint8 | ~uint16 | ~uint32 | ~uint64 | ~uintptr
}
type mutantNumber interface { mutantInteger | ~float32 | ~float64 }

func mutantIs(n int) bool { return n == mutantActive }
func mutantNot(n int, v bool) bool { return v != mutantIs(n) }
func mutantAll(n int, a bool, b func() bool) bool { if mutantIs(n) { return a || b() }; return a && b() }
func mutantAny(n int, a bool, b func() bool) bool { if mutantIs(n) { return a && b() }; return a || b() }

// For comparisons, n is the number of the mutant with another boundary, and n+1 of the negated one.
func mutantLess[T cmp.Ordered](n int, a, b T) bool { if mutantIs(n) { return a <= b }; return mutantNot(n+1, a < b) }
func mutantAtMost[T cmp.Ordered](n int, a, b T) bool { if mutantIs(n) { return a < b }; return mutantNot(n+1, a <= b) }
func mutantGreater[T cmp.Ordered](n int, a, b T) bool { if mutantIs(n) { return a >= b }; return mutantNot(n+1, a > b) }
func mutantAtLeast[T cmp.Ordered](n int, a, b T) bool { if mutantIs(n) { return a > b }; return mutantNot(n+1, a >= b) }

func mutantAdd[T mutantNumber](n int, a, b T) T { if mutantIs(n) { return a - b }; return a + b }
func mutantSub[T mutantNumber](n int, a, b T) T { if mutantIs(n) { return a + b }; return a - b }
func mutantMul[T mutantNumber](n int, a, b T) T { if mutantIs(n) { return a / b }; return a * b }
func mutantQuo[T mutantNumber](n int, a, b T) T { if mutantIs(n) { return a * b }; return a / b }
func mutantRem[T mutantInteger](n int, a, b T) T { if mutantIs(n) { return a * b }; return a % b }
func mutantAnd[T mutantInteger](n int, a, b T) T { if mutantIs(n) { return a | b }; return a & b }
func mutantOr[T mutantInteger](n int, a, b T) T { if mutantIs(n) { return a & b }; return a | b }
func mutantXor[T mutantInteger](n int, a, b T) T { if mutantIs(n) { return a & b }; return a ^ b }
func mutantAndNot[T mutantInteger](n int, a, b T) T { if mutantIs(n) { return a & b }; return a &^ b }
func mutantShl[T, U mutantInteger](n int, a T, b U) T { if mutantIs(n) { return a >> b }; return a << b }
func mutantShr[T, U mutantInteger](n int, a T, b U) T { if mutantIs(n) { return a << b }; return a >> b }
`

// instrumented is a package with all its mutants.
type instrumented struct {
	name    string
	files   map[string]string // content by absolute path
	mutants []mutant          // mutant i has the number i+1
}

// instrument reads the package in a folder, and returns it with all mutants.
func instrument(folder string) (*instrumented, error) {
	list := exec.Command("go", "list", "-f", "{{range .GoFiles}}{{.}}\n{{end}}", "./"+folder)
	list.Stderr = os.Stderr
	names, err := list.Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w", err)
	}
	fset := token.NewFileSet()
	var files []*ast.File
	var texts []string
	for _, name := range strings.Fields(string(names)) {
		path := folder + "/" + name
		text, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		file, err := parser.ParseFile(fset, path, text, parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		files, texts = append(files, file), append(texts, string(text))
	}
	exports, err := exportsOf(folder)
	if err != nil {
		return nil, err
	}
	info := &types.Info{Types: make(map[ast.Expr]types.TypeAndValue)}
	config := types.Config{Importer: importer.ForCompiler(fset, "gc", exports)}
	if _, err := config.Check(folder, fset, files, info); err != nil {
		return nil, err
	}
	p := &instrumented{name: files[0].Name.Name, files: make(map[string]string)}
	for i, file := range files {
		f := &editor{info: info, text: texts[i], file: fset.File(file.FileStart), out: p}
		f.declarations(file)
		path, err := filepath.Abs(f.file.Name())
		if err != nil {
			return nil, err
		}
		p.files[path] = f.apply()
	}
	path, err := filepath.Abs(folder + "/zz_mutants.go")
	p.files[path] = "package " + p.name + helpers
	return p, err
}

// exportsOf returns how to read the export data of what the package imports.
func exportsOf(folder string) (func(path string) (io.ReadCloser, error), error) {
	list := exec.Command("go", "list", "-export", "-deps", "-f", "{{.ImportPath}}={{.Export}}", "./"+folder)
	list.Stderr = os.Stderr
	out, err := list.Output()
	if err != nil {
		return nil, fmt.Errorf("go list -export: %w", err)
	}
	exports := make(map[string]string)
	for line := range strings.Lines(string(out)) {
		path, file, _ := strings.Cut(strings.TrimSpace(line), "=")
		exports[path] = file
	}
	return func(path string) (io.ReadCloser, error) { return os.Open(exports[path]) }, nil
}

// editor collects the mutants of a file and the edits that make them.
type editor struct {
	info  *types.Info
	text  string
	file  *token.File
	out   *instrumented
	in    string // the function that is being read
	edits []edit
}

// edit replaces the bytes of a file from at to end.
type edit struct {
	at, end int
	text    string
	order   int // the order of edits at the same place
}

func (e *editor) declarations(file *ast.File) {
	for _, d := range file.Decls {
		e.in = ""
		switch d := d.(type) {
		case *ast.GenDecl:
			if d.Tok != token.VAR {
				continue
			}
		case *ast.FuncDecl:
			if e.in = d.Name.Name; d.Recv != nil {
				e.in = "(" + types.ExprString(d.Recv.List[0].Type) + ")." + e.in
			}
		}
		ast.Inspect(d, e.visit)
	}
}

// visit makes the mutants of a node. It is called for outer nodes first.
func (e *editor) visit(node ast.Node) bool {
	switch n := node.(type) {
	case *ast.BlockStmt:
		e.statements(n.List)
	case *ast.CommClause:
		e.statements(n.Body)
	case *ast.CaseClause:
		e.statements(n.Body)
	case *ast.SwitchStmt:
		if n.Tag == nil {
			for _, clause := range n.Body.List {
				for _, condition := range clause.(*ast.CaseClause).List {
					e.condition(condition)
				}
			}
		}
	case *ast.IfStmt:
		e.condition(n.Cond)
	case *ast.ForStmt:
		if n.Cond != nil {
			e.condition(n.Cond)
		}
	case *ast.UnaryExpr:
		if n.Op == token.NOT {
			e.wrap(n, fmt.Sprintf("mutantNot(%d, ", e.add(negated, n.Pos(), n.Pos()+1)), ")")
		}
	case *ast.BinaryExpr:
		if e.info.Types[n].Value != nil {
			return false // a constant
		}
		e.binary(n)
	}
	return true
}

// condition makes the mutant of a condition that has no operator.
func (e *editor) condition(x ast.Expr) {
	switch n := ast.Unparen(x).(type) {
	case *ast.BinaryExpr:
		return
	case *ast.UnaryExpr:
		if n.Op == token.NOT {
			return
		}
	}
	if e.info.Types[x].Value == nil {
		e.wrap(x, fmt.Sprintf("mutantNot(%d, ", e.add(negated, x.Pos(), x.End())), ")")
	}
}

// binary makes the mutants of an operator.
func (e *editor) binary(x *ast.BinaryExpr) {
	end := x.OpPos + token.Pos(len(x.Op.String()))
	call := func(function string, n int) {
		e.wrap(x, fmt.Sprintf("%s(%d, ", function, n), ")")
		e.replace(x.OpPos, end, ",")
	}
	switch x.Op {
	case token.EQL, token.NEQ:
		e.wrap(x, fmt.Sprintf("mutantNot(%d, ", e.add(negated, x.OpPos, end)), ")")
	case token.LAND, token.LOR:
		function := map[token.Token]string{token.LAND: "mutantAll", token.LOR: "mutantAny"}[x.Op]
		e.wrap(x, fmt.Sprintf("%s(%d, ", function, e.add(logical, x.OpPos, end)), ") })")
		e.replace(x.OpPos, end, ", func() bool { return (")
	case token.LSS, token.LEQ, token.GTR, token.GEQ:
		call(comparisons[x.Op], e.add(boundary, x.OpPos, end))
		e.add(negated, x.OpPos, end)
	default:
		basic, ok := e.info.TypeOf(x).(*types.Basic)
		if named := e.info.TypeOf(x).Underlying(); !ok {
			basic, ok = named.(*types.Basic)
		}
		if !ok || basic.Info()&types.IsNumeric == 0 {
			return
		}
		call(operators[x.Op], e.add(arithmetic, x.OpPos, end))
		if e.info.Types[x.X].Value != nil {
			// The type of a constant that is shifted cannot be inferred.
			e.wrap(x.X, basic.Name()+"(", ")")
		}
	}
}

// statements makes the mutants that remove one statement of a list.
func (e *editor) statements(list []ast.Stmt) {
	for _, s := range list {
		switch s := s.(type) {
		case *ast.ExprStmt:
			if call, ok := s.X.(*ast.CallExpr); ok {
				// A mutant that does not lock is for the race detector. One without a panic may not compile.
				switch name := types.ExprString(call.Fun); name[strings.LastIndexByte(name, '.')+1:] {
				case "panic", "Lock", "RLock", "Unlock", "RUnlock":
					continue
				}
			}
		case *ast.AssignStmt:
			if s.Tok == token.DEFINE {
				continue
			}
		case *ast.IncDecStmt, *ast.SendStmt, *ast.BranchStmt:
		default:
			continue
		}
		e.wrap(s, fmt.Sprintf("if !mutantIs(%d) { ", e.add(removed, s.Pos(), s.End())), " }")
	}
}

// add adds a mutant that changes the code between two positions, and returns its number.
func (e *editor) add(change string, from, to token.Pos) int {
	at, end := e.file.Offset(from), e.file.Offset(to)
	begin := strings.LastIndexByte(e.text[:at], '\n') + 1
	line, _, _ := strings.Cut(e.text[begin:], "\n")
	end = min(end-begin, len(line))
	at -= begin
	code := strings.TrimSpace(line[:at] + "[[" + line[at:end] + "]]" + line[end:])
	e.out.mutants = append(e.out.mutants, mutant{mutation{e.in, change, code}, e.file.Name(), e.file.Line(from)})
	return len(e.out.mutants)
}

// wrap inserts text before and behind a node.
func (e *editor) wrap(n ast.Node, before, behind string) {
	at, end := e.file.Offset(n.Pos()), e.file.Offset(n.End())
	// Of two nodes that begin or end at one place, the outer one is wrapped first.
	order := len(e.edits) + 1
	e.edits = append(e.edits, edit{at, at, before, order}, edit{end, end, behind, -order})
}

func (e *editor) replace(from, to token.Pos, text string) {
	e.edits = append(e.edits, edit{e.file.Offset(from), e.file.Offset(to), text, 0})
}

// apply returns the text of the file with all edits.
func (e *editor) apply() string {
	slices.SortFunc(e.edits, func(a, b edit) int { return cmp.Or(a.at-b.at, a.order-b.order) })
	var out strings.Builder
	at := 0
	for _, edit := range e.edits {
		out.WriteString(e.text[at:edit.at])
		out.WriteString(edit.text)
		at = edit.end
	}
	out.WriteString(e.text[at:])
	return out.String()
}
