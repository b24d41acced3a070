// The fuzz target proves that any content of a file, after any earlier content, leads to the same
// canonical objects and problems with lines each time it is read.
package file

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/model"
)

// FuzzParse checks any content of a file after any earlier content. The results are objects with
// names and problems with lines, the same ones each time. The objects are canonical.
func FuzzParse(f *testing.F) {
	examples, err := filepath.Glob("../../../examples/*.yaml")
	require.NoError(f, err)
	for _, path := range examples {
		text, err := os.ReadFile(path)
		require.NoError(f, err)
		if len(text) < 4<<10 {
			f.Add(false, []byte(good), text)
		}
	}
	f.Add(true, []byte(`{"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n"}}`),
		[]byte(`{"apiVersion": "v1", "kind": "List", "items": [{"apiVersion": "v1", "kind": "Endpoints", "metadata": {"name": "e"},
			"subsets": [{"addresses": [{"ip": "10.0.0.1"}], "ports": [{"port": 80}]}]}, null, 3]} {"kind": "x"`))
	f.Add(false, []byte(good), []byte("a: &a [*a]\n--- # x\n"+good+"...\n%YAML 1.1\n---\n- b: {c: d\n"))
	f.Add(false, []byte(good), []byte("\ufeffapiVersion: v1\nkind: Service\nmetadata: {name: x}\nspec:\n  ports:\n  - port: 80\n    prot: TCP\n"))
	f.Fuzz(checkParse)
}

func checkParse(t *testing.T, isJSON bool, before, now []byte) {
	name := "x.yaml"
	if isJSON {
		name = "x.json"
	}
	first := newParser().parse(name, before, nil)
	got := newParser().parse(name, now, first)
	for _, f := range []struct {
		*file
		text []byte
	}{{first, before}, {got, now}} {
		lines := 1
		// YAML also ends lines with these.
		for _, end := range []string{"\n", "\r", "\u0085", "\u2028", "\u2029"} {
			lines += bytes.Count(f.text, []byte(end))
		}
		for _, p := range f.problems {
			require.Equal(t, name, p.file)
			require.NotEmpty(t, p.detail)
			require.LessOrEqual(t, p.line, lines, p.detail)
		}
	}
	for _, o := range got.objects {
		require.NotEmpty(t, o.id.name)
		if o.model != nil {
			require.Equal(t, o.key, o.model.Key())
		}
	}
	again := newParser().parse(name, now, first)
	require.Equal(t, got.problems, again.problems)
	require.Len(t, again.objects, len(got.objects))

	// Assemble both files, with mirrored Endpoints.
	s := Source{files: files{known: map[string]*file{"a.yaml": first, name: got}}, mirrors: mirrors{}}
	for key, o := range s.assemble().objects {
		require.Equal(t, key, o.Key())
		if c, ok := o.(interface{ Check() error }); ok { // a ServiceCIDR is not sent to nodes
			require.NoError(t, c.Check())
		}
		require.Implements(t, (*model.Keyed)(nil), o)
	}
}
