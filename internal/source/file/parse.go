package file

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"regexp"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/source"
)

// object is one object of a file.
type object struct {
	id    objectID
	file  string      // the name of the file
	line  int         // the line in the file at which it begins, from 1
	key   model.Key   // zero for Endpoints
	model model.Keyed // nil for Endpoints, and for objects that nodes do not use
	skips []source.Skip
	// hasSelector reports whether the object is a Service with a selector.
	hasSelector bool
	endpoints   *endpoints // nil for other kinds
}

type objectID struct {
	kind, namespace, name string
}

func (i objectID) String() string {
	if i.namespace == "" {
		return i.kind + " " + i.name
	}
	return i.kind + " " + i.namespace + "/" + i.name
}

// problem is a part of a file that cannot be used as it is.
type problem struct {
	file   string
	line   int // 0 means the whole file
	detail string
}

func (p problem) String() string {
	if p.line == 0 {
		return p.file + ": " + p.detail
	}
	return fmt.Sprintf("%s:%d: %s", p.file, p.line, p.detail)
}

type parser struct {
	converter *source.Converter
	log       *slog.Logger
	// accepted means that an API server has accepted the objects. What it accepts and nodes cannot
	// use is left out, as a source that follows the API server does.
	accepted bool
}

// parse parses a file's documents. If one of them is bad, objects of the file's earlier state that
// are missing in the good documents are kept, as the bad document may contain them.
func (p parser) parse(name string, raw []byte, before *file) *file {
	f := &fileParser{parser: p, name: name, file: &file{raw: raw}}
	text := bytes.TrimPrefix(raw, []byte("\ufeff"))
	if strings.HasSuffix(name, ".json") {
		f.jsonStream(text)
	} else {
		f.yamlStream(text)
	}
	if f.lost && before != nil {
		for _, o := range before.objects {
			if !slices.ContainsFunc(f.file.objects, func(n *object) bool { return n.id == o.id }) {
				f.file.objects = append(f.file.objects, o)
			}
		}
	}
	return f.file
}

type fileParser struct {
	parser
	name string
	file *file
	lost bool // set if an object could not be read
}

const noObject = "not a Kubernetes object: apiVersion and kind are required"

func (f *fileParser) problem(line int, format string, args ...any) {
	f.file.problems = append(f.file.problems, problem{f.name, line, fmt.Sprintf(format, args...)})
}

func (f *fileParser) bad(line int, format string, args ...any) {
	f.problem(line, format, args...)
	if !f.lost {
		f.lost, f.file.unread = true, f.file.problems[len(f.file.problems)-1].String()
	}
}

// jsonStream parses consecutive JSON values.
func (f *fileParser) jsonStream(text []byte) {
	lineAt := func(offset int) int { return 1 + bytes.Count(text[:min(offset, len(text))], []byte("\n")) }
	decoder := json.NewDecoder(bytes.NewReader(text))
	for {
		var raw json.RawMessage
		err := decoder.Decode(&raw)
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			at := int(decoder.InputOffset())
			if syntax, ok := errors.AsType[*json.SyntaxError](err); ok {
				at = int(syntax.Offset)
			} else if errors.Is(err, io.ErrUnexpectedEOF) {
				at = len(text)
			}
			f.bad(lineAt(at), "%v: correct the JSON", err)
			return
		}
		d := &document{text: raw, line: lineAt(int(decoder.InputOffset()) - len(raw))}
		f.item(value{raw: raw, document: d}, metav1.TypeMeta{})
	}
}

// yamlStream parses YAML documents one by one, so that a bad document does not hide those after it.
func (f *fileParser) yamlStream(text []byte) {
	for _, d := range splitYAML(text) {
		if d.first() == 0 {
			continue
		}
		raw, err := yaml.YAMLToJSONStrict(d.padded())
		if err != nil {
			line, detail := yamlError(err, d.first())
			line = min(line, d.last()) // the parser may report a line after the document
			f.bad(line, "%s: correct the YAML", detail)
			continue
		}
		f.item(value{raw: raw, document: d}, metav1.TypeMeta{})
	}
}

var yamlLine = regexp.MustCompile(`line (\d+): `)

// yamlError separates the line from the parser's message.
func yamlError(err error, fallback int) (int, string) {
	detail := strings.Join(strings.Fields(err.Error()), " ")
	detail = strings.TrimPrefix(detail, "error converting YAML to JSON: ")
	detail = strings.TrimPrefix(detail, "yaml: ")
	detail = strings.TrimPrefix(detail, "unmarshal errors: ")
	m := yamlLine.FindStringSubmatch(detail)
	if m == nil {
		return fallback, detail
	}
	line, _ := strconv.Atoi(m[1]) // a number that is too large is larger than the fallback
	return max(line, fallback), strings.Replace(detail, m[0], "", 1)
}

// value is a JSON value at a path in a document. The path is empty for the whole document.
type value struct {
	*document
	raw  []byte
	path string
}

// lineOf returns the line in the file of a field of the value; see document.lineOf.
func (v value) lineOf(field string) int { return v.document.lineOf(join(v.path, field)) }

// item adds the object in a value. implied is the object's type if it names none itself.
func (f *fileParser) item(v value, implied metav1.TypeMeta) {
	line := v.lineOf("")
	switch v.raw = bytes.TrimSpace(v.raw); {
	case string(v.raw) == "null":
		return
	case v.raw[0] != '{':
		f.bad(line, noObject)
		return
	}
	var head struct {
		metav1.TypeMeta
		Items []json.RawMessage `json:"items"`
	}
	if !f.decode(v, &head) {
		return
	}
	if head.APIVersion == "" && head.Kind == "" {
		head.TypeMeta = implied
	}
	if of, ok := listed(head.TypeMeta); ok {
		for i, item := range head.Items {
			f.item(value{v.document, item, join(v.path, fmt.Sprintf("items[%d]", i))}, of)
		}
		return
	}
	if want, ok := used[head.Kind]; !ok || head.APIVersion != want.String() {
		if !f.wrongType(line, head.TypeMeta) {
			f.log.Debug("Ignored a manifest of a kind that is not used",
				"file", f.name, "line", line, "apiVersion", head.APIVersion, "kind", head.Kind)
		}
	} else if o := f.object(v, want.WithKind(head.Kind)); o != nil {
		f.file.objects = append(f.file.objects, o)
	}
}

// used are the types that are read. scheme has all types of an API server in the same groups and
// versions.
var (
	used = map[string]schema.GroupVersion{
		"List": corev1.SchemeGroupVersion, "Service": corev1.SchemeGroupVersion, "Node": corev1.SchemeGroupVersion, "Endpoints": corev1.SchemeGroupVersion,
		"EndpointSlice": discoveryv1.SchemeGroupVersion, "ServiceCIDR": networkingv1.SchemeGroupVersion,
	}
	scheme = func() *runtime.Scheme {
		s := runtime.NewScheme()
		for _, add := range []func(*runtime.Scheme) error{corev1.AddToScheme, discoveryv1.AddToScheme, networkingv1.AddToScheme} {
			utilruntime.Must(add(s))
		}
		return s
	}()
)

// listed reports whether a type is a list. For a list of a type that is read, as API servers return
// it, of is that type. For a List of any types, as kubectl writes it, of is empty, and the items
// name their own types.
func listed(t metav1.TypeMeta) (of metav1.TypeMeta, ok bool) {
	kind, isList := strings.CutSuffix(t.Kind, "List")
	switch {
	case !isList:
		return of, false
	case kind == "":
		return of, t.APIVersion == used["List"].String()
	}
	version, isUsed := used[kind]
	return metav1.TypeMeta{APIVersion: t.APIVersion, Kind: kind}, isUsed && t.APIVersion == version.String()
}

// wrongType reports a problem with the type of an object that is not used. It returns false if
// there is none: the directory may well contain a manifest of a Deployment, or of another project's
// Service.
func (f *fileParser) wrongType(line int, t metav1.TypeMeta) bool {
	if t.APIVersion == "" || t.Kind == "" {
		f.bad(line, noObject)
		return true
	}
	v, err := schema.ParseGroupVersion(t.APIVersion)
	if err != nil {
		f.bad(line, "apiVersion: %v: correct it", err)
		return true
	}
	want, isUsed := used[t.Kind]
	switch {
	// The groups of custom resources have a dot.
	case isUsed && v != want && (v.Group == want.Group || !strings.Contains(v.Group, ".")):
		f.bad(line, "apiVersion %s of %s is not supported: use %s", t.APIVersion, t.Kind, want)
	case scheme.IsVersionRegistered(v) && !scheme.Recognizes(v.WithKind(t.Kind)):
		// The kind may be of a newer Kubernetes, and the object is not needed then.
		f.problem(line, "apiVersion %s has no kind %s: is it misspelled? It has no effect", t.APIVersion, t.Kind)
	default:
		return false
	}
	return true
}

// object decodes and converts an object of a type that is used. It returns nil if the object is not
// valid, and reports why.
func (f *fileParser) object(v value, kind schema.GroupVersionKind) *object {
	into, err := scheme.New(kind)
	if err != nil {
		panic(err) // all types that are used are in the scheme
	}
	meta := into.(metav1.Object)
	if !f.decode(v, meta) {
		return nil
	}
	if meta.GetName() == "" {
		f.bad(v.lineOf("metadata.name"), "metadata.name is missing: name the object")
		return nil
	}
	o := &object{file: f.name, line: v.lineOf(""), id: objectID{kind.Kind, meta.GetNamespace(), meta.GetName()}}
	if kind.Kind == "Node" || kind.Kind == "ServiceCIDR" {
		o.id.namespace = ""
	} else {
		o.id.namespace = cmp.Or(o.id.namespace, metav1.NamespaceDefault)
	}
	meta.SetNamespace(o.id.namespace)
	good := true
	invalid := func(field, detail string) {
		good = false
		f.bad(v.lineOf(field), "%s: %s: %s", o.id, field, detail)
	}
	if e, ok := into.(*corev1.Endpoints); ok {
		o.endpoints, o.skips = newEndpoints(e)
	} else {
		o.key, o.model, o.skips = f.converter.Convert(meta)
	}
	for _, s := range o.skips {
		if s.Reason == source.NoClusterIP {
			s.Detail += ": no API server allocates it here: set an address, or None for a headless Service"
		}
		if s.Invalid() && !f.accepted {
			invalid(s.Field, s.Detail)
		}
	}
	if s, ok := into.(*corev1.Service); ok && good && !f.accepted {
		o.hasSelector = len(s.Spec.Selector) > 0
		for i, p := range s.Spec.Ports {
			if s.Spec.Type == corev1.ServiceTypeNodePort && p.NodePort == 0 {
				invalid(fmt.Sprintf("spec.ports[%d].nodePort", i), "is missing: no API server allocates it here: set a port")
			}
		}
	}
	if !good {
		return nil
	}
	return o
}

// decode decodes a value as the API server does. Unknown and repeated fields are reported, and
// otherwise ignored.
func (f *fileParser) decode(v value, into any) bool {
	strict, err := kjson.UnmarshalStrict(v.raw, into)
	if wrongType, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		field := pathAt(v.raw, wrongType.Offset)
		f.bad(v.lineOf(field), "%s: have %s, want %s", field, wrongType.Value, wrongType.Type)
		return false
	}
	if err != nil {
		f.bad(v.lineOf(""), "%v", err)
		return false
	}
	if _, whole := into.(metav1.Object); !whole {
		return true // only apiVersion and kind were decoded; all other fields are unknown
	}
	for _, s := range strict {
		var field string
		if at, ok := errors.AsType[kjson.FieldError](s); ok {
			field = at.FieldPath()
		}
		f.problem(v.lineOf(field), "%v: is it misspelled? It has no effect", s)
	}
	return true
}

func join(path, field string) string {
	if path == "" || field == "" {
		return path + field
	}
	return path + "." + field
}
