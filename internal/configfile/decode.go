// Package configfile reads the configuration files of servers and agents. A file has a versioned
// kind, and each of its fields sets one of the program's flags. The flag defines what the field
// means, and its default. A flag on the command line overrides the file.
//
// The fields of a file are those of a struct. Each is a pointer or a slice, so that nil means that
// the file does not have it. Its struct tag "flag" names its flag. A field without this tag is a
// pointer to a struct with further fields.
package configfile

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"

	yamlv3 "go.yaml.in/yaml/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"
)

// APIVersion is the version that all files have. Group is its API group. Within v1beta1, fields are
// only added; see docs/compatibility.md.
const (
	Group      = "slicecast.io"
	APIVersion = Group + "/v1beta1"
)

// maxFile bounds the size of a file, in bytes. It is a thousand times what all fields need.
const maxFile = 4 << 20

// Parse parses a file's content into a struct of fields. An unknown or repeated field is an error
// that names the field.
func Parse(content []byte, kind string, into any) error {
	strict, err := Decode(content, into, APIVersion, kind)
	return errors.Join(append(strict, err)...)
}

// Decode decodes a YAML document of the given kind. strict contains an error for each field that is
// unknown or repeated.
func Decode(content []byte, out any, apiVersion, kind string) (strict []error, err error) {
	if len(content) > maxFile {
		return nil, fmt.Errorf("the file has %d bytes, more than the maximum of %d: check that it is the right file",
			len(content), maxFile)
	}
	if err := single(content); err != nil {
		return nil, err
	}
	document, err := yaml.YAMLToJSON(content)
	if err != nil {
		return nil, err
	}
	if bytes.Equal(document, []byte("null")) {
		document = []byte("{}")
	}
	var head metav1.TypeMeta
	if err := kjson.UnmarshalCaseSensitivePreserveInts(document, &head); err != nil {
		return nil, readable(err)
	}
	if head.APIVersion != apiVersion || head.Kind != kind {
		return nil, fmt.Errorf("apiVersion is %q and kind is %q: use apiVersion: %s and kind: %s",
			head.APIVersion, head.Kind, apiVersion, kind)
	}
	if _, err := yaml.YAMLToJSONStrict(content); err != nil {
		strict = append(strict, err)
	}
	more, err := kjson.UnmarshalStrict(document, out)
	return append(strict, more...), readable(err)
}

// readable rewrites an error about a value's type in the terms of the file.
func readable(err error) error {
	wrong, ok := errors.AsType[*json.UnmarshalTypeError](err)
	if !ok {
		return err
	}
	if wrong.Field == "" {
		return fmt.Errorf("the document is of type %s: use an object with apiVersion and kind", wrong.Value)
	}
	hint := ""
	if wrong.Type.Kind() == reflect.String {
		hint = ": use quotes, and for a duration a unit, such as 30s"
	}
	return fmt.Errorf("%s: have %s, want %s%s", wrong.Field, wrong.Value, wrong.Type, hint)
}

// single returns an error if there is more than one YAML document. The decoder would read the first
// and silently ignore the others.
func single(content []byte) error {
	d := yamlv3.NewDecoder(bytes.NewReader(content))
	for count := 0; ; {
		var document yamlv3.Node
		if err := d.Decode(&document); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		if len(document.Content) == 1 && document.Content[0].Tag == "!!null" {
			continue // nothing, or only comments, beside a separator
		}
		if count++; count > 1 {
			return errors.New("the file has more than one YAML document: put all fields into one document, without ---")
		}
	}
}
