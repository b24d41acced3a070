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
	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/source"
)

// object is one object of a file.
type object struct {
	id    objectID
	line  int         // the line in the file at which it begins, from 1
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

func (i objectID) key() model.Key {
	for _, kind := range kinds {
		if kind.String() == i.kind {
			return model.Key{Kind: kind, Namespace: i.namespace, Name: i.name}
		}
	}
	panic("no kind of the model: " + i.kind)
}

func compareIDs(a, b objectID) int {
	return cmp.Or(cmp.Compare(a.kind, b.kind), cmp.Compare(a.namespace, b.namespace), cmp.Compare(a.name, b.name))
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

const noObject = "no Kubernetes object: apiVersion and kind are required"

func (f *fileParser) problem(line int, format string, args ...any) {
	f.file.problems = append(f.file.problems, problem{f.name, line, fmt.Sprintf(format, args...)})
}

func (f *fileParser) bad(line int, format string, args ...any) {
	f.lost = true
	f.problem(line, format, args...)
}

// jsonStream parses consecutive JSON values.
func (f *fileParser) jsonStream(text []byte) {
	decoder := json.NewDecoder(bytes.NewReader(text))
	for {
		var value json.RawMessage
		err := decoder.Decode(&value)
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			at := int(decoder.InputOffset())
			var syntax *json.SyntaxError
			if errors.As(err, &syntax) {
				at = int(syntax.Offset)
			} else if errors.Is(err, io.ErrUnexpectedEOF) {
				at = len(text)
			}
			f.bad(1+bytes.Count(text[:min(at, len(text))], []byte("\n")), "%v: correct the JSON", err)
			return
		}
		line := 1 + bytes.Count(text[:int(decoder.InputOffset())-len(value)], []byte("\n"))
		f.item(value, &document{text: value, line: line}, "", metav1.TypeMeta{})
	}
}

// yamlStream parses YAML documents one by one, so that a bad document does not hide those after it.
func (f *fileParser) yamlStream(text []byte) {
	for _, d := range splitYAML(text) {
		if d.first() == 0 {
			continue
		}
		value, err := yaml.YAMLToJSONStrict(d.padded())
		if err != nil {
			line, detail := yamlError(err, d.first())
			line = min(line, d.last()) // the parser may report a line after the document
			f.bad(line, "%s: correct the YAML", detail)
			continue
		}
		f.item(value, d, "", metav1.TypeMeta{})
	}
}

var yamlLine = regexp.MustCompile(`line (\d+): `)

// yamlError separates the line from the parser's message.
func yamlError(err error, fallback int) (int, string) {
	detail := strings.Join(strings.Fields(err.Error()), " ")
	detail = strings.TrimPrefix(detail, "error converting YAML to JSON: ")
	detail = strings.TrimPrefix(detail, "yaml: ")
	detail = strings.TrimPrefix(detail, "unmarshal errors: ")
	m := yamlLine.FindStringSubmatchIndex(detail)
	if m == nil {
		return fallback, detail
	}
	line, err := strconv.Atoi(detail[m[2]:m[3]])
	if err != nil {
		return fallback, detail
	}
	return max(line, fallback), detail[:m[0]] + detail[m[1]:]
}

// item adds the object at a path in the document, or the whole document if path is empty. implied
// is the object's type if it names none itself.
func (f *fileParser) item(value []byte, d *document, path string, implied metav1.TypeMeta) {
	line := d.lineOf(path)
	switch value = bytes.TrimSpace(value); {
	case string(value) == "null":
		return
	case value[0] != '{':
		f.bad(line, noObject)
		return
	}
	var head struct {
		metav1.TypeMeta
		Items []json.RawMessage `json:"items"`
	}
	if !f.decode(value, &head, d, path) {
		return
	}
	if head.APIVersion == "" && head.Kind == "" {
		head.TypeMeta = implied
	}
	if of, ok := listed(head.TypeMeta); ok {
		for i, item := range head.Items {
			f.item(item, d, join(path, fmt.Sprintf("items[%d]", i)), of)
		}
		return
	}
	if o := f.typed(head.TypeMeta, value, d, path); o != nil {
		f.file.objects = append(f.file.objects, o)
	}
}

// typed returns the object of a type at a path in the document. It returns nil if nodes do not use
// that type, or if there is a problem, which it reports.
func (f *fileParser) typed(t metav1.TypeMeta, value []byte, d *document, path string) *object {
	o := &object{line: d.lineOf(path)}
	switch t.APIVersion + " " + t.Kind {
	case "v1 Service":
		var s corev1.Service
		if !f.object(value, &s, o, d, path) || !f.allocated(&s, o, d, path) {
			return nil
		}
		o.hasSelector = len(s.Spec.Selector) > 0
	case "discovery.k8s.io/v1 EndpointSlice":
		if !f.object(value, &discoveryv1.EndpointSlice{}, o, d, path) {
			return nil
		}
	case "v1 Node":
		if !f.object(value, &corev1.Node{}, o, d, path) {
			return nil
		}
	case "networking.k8s.io/v1 ServiceCIDR":
		if !f.object(value, &networkingv1.ServiceCIDR{}, o, d, path) {
			return nil
		}
	case "v1 Endpoints":
		var e corev1.Endpoints
		if !f.object(value, &e, o, d, path) {
			return nil
		}
		var field, detail string
		if o.endpoints, field, detail = newEndpoints(&e); o.endpoints == nil {
			f.bad(d.lineOf(join(path, field)), "%s: %s: %s", o.id, field, detail)
			return nil
		}
	default:
		if !f.wrongType(o.line, t) {
			f.log.Debug("ignoring a manifest of a kind that is not used",
				"file", f.name, "line", o.line, "apiVersion", t.APIVersion, "kind", t.Kind)
		}
		return nil
	}
	return o
}

// used are the types that are read. others knows all types of an API server in the same groups and
// versions.
var (
	used = map[string]schema.GroupVersion{
		"List": corev1.SchemeGroupVersion, "Service": corev1.SchemeGroupVersion, "Node": corev1.SchemeGroupVersion, "Endpoints": corev1.SchemeGroupVersion,
		"EndpointSlice": discoveryv1.SchemeGroupVersion, "ServiceCIDR": networkingv1.SchemeGroupVersion,
	}
	others = func() *runtime.Scheme {
		s := runtime.NewScheme()
		for _, add := range []func(*runtime.Scheme) error{corev1.AddToScheme, discoveryv1.AddToScheme, networkingv1.AddToScheme} {
			if err := add(s); err != nil {
				panic(err)
			}
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
	case others.IsVersionRegistered(v) && !others.Recognizes(v.WithKind(t.Kind)):
		// The kind may be of a newer Kubernetes, and the object is not needed then.
		f.problem(line, "apiVersion %s has no kind %s: is it misspelled? It has no effect", t.APIVersion, t.Kind)
	default:
		return false
	}
	return true
}

// object decodes a value into an object of the API and converts it. It reports whether the object
// is valid.
func (f *fileParser) object(value []byte, into metav1.Object, o *object, d *document, path string) bool {
	if !f.decode(value, into, d, path) {
		return false
	}
	if into.GetName() == "" {
		f.bad(d.lineOf(join(path, "metadata.name")), "metadata.name is missing: name the object")
		return false
	}
	o.id = objectID{kindOf(into), into.GetNamespace(), into.GetName()}
	switch {
	case o.id.kind == "Node" || o.id.kind == "ServiceCIDR":
		o.id.namespace = ""
	case o.id.namespace == "":
		o.id.namespace = metav1.NamespaceDefault
	}
	into.SetNamespace(o.id.namespace)
	if o.id.kind == "Endpoints" {
		return true
	}
	_, o.model, o.skips = f.converter.Convert(into)
	good := true
	for _, s := range o.skips {
		if !s.Invalid() {
			continue
		}
		good = false
		detail := s.Detail
		if s.Reason == source.NoClusterIP {
			detail += ": there is no API server here to allocate it: give an address, or None for a headless Service"
		}
		f.bad(d.lineOf(join(path, s.Field)), "%s: %s: %s", o.id, s.Field, detail)
	}
	return good
}

// allocated reports whether a Service of type NodePort has the ports that an API server would have
// allocated.
func (f *fileParser) allocated(s *corev1.Service, o *object, d *document, path string) bool {
	good := true
	for i, p := range s.Spec.Ports {
		if s.Spec.Type == corev1.ServiceTypeNodePort && p.NodePort == 0 {
			good = false
			field := fmt.Sprintf("spec.ports[%d].nodePort", i)
			f.bad(d.lineOf(join(path, field)), "%s: %s: is missing: there is no API server here to allocate it: give a port", o.id, field)
		}
	}
	return good
}

// decode decodes a value as the API server does. Unknown and repeated fields are reported, and
// otherwise ignored.
func (f *fileParser) decode(value []byte, into any, d *document, path string) bool {
	strict, err := kjson.UnmarshalStrict(value, into)
	if err != nil {
		var wrongType *json.UnmarshalTypeError
		if errors.As(err, &wrongType) {
			field := pathAt(value, wrongType.Offset)
			f.bad(d.lineOf(join(path, field)), "%s: have %s, want %s", field, wrongType.Value, wrongType.Type)
		} else {
			f.bad(d.lineOf(path), "%v", err)
		}
		return false
	}
	if _, isHead := into.(metav1.Object); !isHead {
		return true // only apiVersion and kind were decoded; all other fields are unknown
	}
	for _, s := range strict {
		line := d.lineOf(path)
		if at, ok := errors.AsType[kjson.FieldError](s); ok {
			line = d.lineOf(join(path, at.FieldPath()))
		}
		f.problem(line, "%v: is it misspelled? It has no effect", s)
	}
	return true
}

func kindOf(o metav1.Object) string {
	switch o.(type) {
	case *corev1.Service:
		return model.KindService.String()
	case *discoveryv1.EndpointSlice:
		return model.KindSlice.String()
	case *corev1.Node:
		return model.KindNode.String()
	case *networkingv1.ServiceCIDR:
		return model.KindServiceCIDR.String()
	}
	return "Endpoints"
}

func join(path, field string) string {
	if path == "" || field == "" {
		return path + field
	}
	return path + "." + field
}
