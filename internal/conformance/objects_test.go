// This file reads the Kubernetes objects of a case.
package conformance

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"go.yaml.in/yaml/v3"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// Objects are Kubernetes objects. A file has them as a string of YAML documents.
type Objects []*unstructured.Unstructured

// resources maps the kinds that cases may use to their resources in the API.
var resources = map[string]struct {
	apiVersion, path string
	namespaced       bool
}{
	"Namespace":     {"v1", "/api/v1/namespaces", false},
	"Node":          {"v1", "/api/v1/nodes", false},
	"ServiceCIDR":   {"networking.k8s.io/v1", "/apis/networking.k8s.io/v1/servicecidrs", false},
	"Service":       {"v1", "/api/v1/namespaces/%s/services", true},
	"EndpointSlice": {"discovery.k8s.io/v1", "/apis/discovery.k8s.io/v1/namespaces/%s/endpointslices", true},
}

// UnmarshalYAML implements [yaml.Unmarshaler].
func (o *Objects) UnmarshalYAML(node *yaml.Node) error {
	return parse(node, parseObjects, o)
}

func parseObjects(text string) (Objects, error) {
	var objects Objects
	decoder := yaml.NewDecoder(strings.NewReader(text))
	for number := 1; ; number++ {
		var content map[string]any
		if err := decoder.Decode(&content); err != nil {
			if errors.Is(err, io.EOF) {
				return objects, nil
			}
			return nil, fmt.Errorf("document %d: %w", number, err)
		}
		// Convert through JSON, which yields the types that Kubernetes' own code expects.
		data, err := json.Marshal(content)
		if err != nil {
			return nil, fmt.Errorf("document %d: %w", number, err)
		}
		object := &unstructured.Unstructured{}
		if err := object.UnmarshalJSON(data); err != nil {
			return nil, fmt.Errorf("document %d: %w", number, err)
		}
		r := Reference{object.GetKind(), object.GetNamespace(), object.GetName()}
		if err := r.validate(); err != nil {
			return nil, fmt.Errorf("document %d: %w", number, err)
		}
		if want := resources[r.Kind].apiVersion; object.GetAPIVersion() != want {
			return nil, fmt.Errorf("document %d: apiVersion is %q, want %s", number, object.GetAPIVersion(), want)
		}
		objects = append(objects, object)
	}
}

// path returns the path of the object in the API.
func (r Reference) path() string {
	resource := resources[r.Kind]
	if resource.namespaced {
		return fmt.Sprintf(resource.path, r.Namespace) + "/" + r.Name
	}
	return resource.path + "/" + r.Name
}

func (r Reference) String() string { return r.Kind + " " + r.Namespace + "/" + r.Name }

func (r Reference) validate() error {
	resource, ok := resources[r.Kind]
	switch {
	case !ok:
		return fmt.Errorf("kind %q is not allowed in a case", r.Kind)
	case r.Name == "":
		return errors.New("name is missing")
	case resource.namespaced != (r.Namespace != ""):
		return fmt.Errorf("%s: namespace is missing, or set for a kind without one", r)
	}
	return nil
}
