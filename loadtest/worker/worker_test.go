// This test proves when a state counts as written: it has every object that the writer wrote in its
// last version, and none that the writer removed, whatever other namespaces have.
package worker

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/loadtest/generate"
)

func TestWritten(t *testing.T) {
	const namespace = "loadtest"
	cluster, err := generate.New(generate.Config{
		Nodes: 2, Services: []generate.Group{{Count: 3, Least: 4, Most: 4}}, Change: generate.Flip, Namespace: namespace,
	})
	require.NoError(t, err)
	before := cluster.Objects()
	for range cluster.Play(generate.Plan{Kind: generate.Flip, Schedule: generate.Schedule{Start: time.Now(), Count: 1, Rate: 1}}) {
	}
	left := cluster.Objects()
	theirs := model.NewSlice(model.Slice{Namespace: "default", Name: "web-1", Service: "web"})
	removed := model.NewSlice(model.Slice{Namespace: namespace, Name: "removed-1", Service: "removed"})
	for name, c := range map[string]struct {
		state []model.Object
		want  bool
	}{
		"all":                        {left, true},
		"all, with other namespaces": {append(slices.Clone(left), theirs), true},
		"before the change":          {before, false},
		"one object missing":         {left[1:], false},
		"before a removal":           {append(slices.Clone(left), removed), false},
	} {
		require.Equal(t, c.want, written(c.state, left, namespace), name)
	}
}
