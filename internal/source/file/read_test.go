// These tests prove that Read reads objects in each form in which API servers and kubectl print
// them, and says what it cannot read.
package file

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/model"
)

// kept is a sink that keeps the names of Services.
type kept []string

func (k *kept) Upsert(model.Keyed, uint64) {}

func (k *kept) Remove(model.Key, uint64) {}

func (k *kept) Replace(kind model.Kind, objects []model.Keyed, _ uint64) {
	for _, o := range objects {
		if kind == model.KindService {
			*k = append(*k, o.Key().Name)
		}
	}
}

func (k *kept) Progress(model.Kind, uint64) {}

func (k *kept) Synced() {}

func TestRead(t *testing.T) {
	const typed = `"apiVersion": "v1", "kind": "Service", `
	service := func(types, name string) string {
		return fmt.Sprintf(`{%s"metadata": {"name": %q}, "spec": {"clusterIP": "10.96.0.1", "ports": [{"port": 80}]}}`, types, name)
	}
	a, b, untyped := service(typed, "a"), service(typed, "b"), service("", "a")
	pod := `{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}}`
	for name, x := range map[string]struct{ text, want, problem string }{
		"nothing":              {"", "[]", ""},
		"values":               {a + "\n" + b, "[a b]", ""},
		"kubectl's list":       {`{"apiVersion": "v1", "items": [` + a + "," + pod + "," + b + `], "kind": "List", "metadata": {"resourceVersion": ""}}`, "[a b]", ""},
		"an API server's list": {`{"kind": "ServiceList", "apiVersion": "v1", "metadata": {}, "items": [` + untyped + "]}" + b, "[a b]", ""},
		"an unused list":       {`{"kind": "PodList", "apiVersion": "v1", "items": [{"metadata": {"name": "p"}}]}` + a, "[a]", ""},
		"an empty list":        {`{"kind": "ServiceList", "apiVersion": "v1", "items": []}` + a, "[a]", ""},
		"a list of null":       {`{"kind": "ServiceList", "apiVersion": "v1", "items": null}` + a, "[a]", ""},
		"YAML":                 {"apiVersion: v1\nkind: Service\nmetadata: {name: a}\nspec: {clusterIP: 10.96.0.1, ports: [{port: 80}]}\n", "[a]", ""},
		"the type comes late":  {`{"items": [` + untyped + `], "kind": "ServiceList", "apiVersion": "v1"}`, "", "not a Kubernetes object"},
		"no list":              {`{"kind": "List", "apiVersion": "v1", "items": {}}`, "", "no array"},
		"it ends early":        {a + `{"kind": "List", "apiVersion": "v1", "items": [` + b, "", "unexpected EOF"},
		"an object ends early": {a + b[:len(b)-1], "", "EOF"},
		"it goes on":           {a + "x", "", "invalid character"},
		"not an object":        {a + "[]", "", "not a Kubernetes object"},
		"a broken object":      {a[:10] + b, "", "expected colon"},
	} {
		t.Run(name, func(t *testing.T) {
			var names kept
			err := Read(strings.NewReader(x.text), "objects", Options{}, &names)
			if x.problem != "" {
				require.ErrorContains(t, err, x.problem)
				require.ErrorContains(t, err, "objects")
				return
			}
			require.NoError(t, err)
			require.ElementsMatch(t, strings.Fields(strings.Trim(x.want, "[]")), []string(names))
		})
	}
}
