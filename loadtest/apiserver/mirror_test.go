// This test proves which objects a mirror holds after the lists and events of an API server, and
// that it reports when it has synced.
package apiserver

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/model"
)

func TestMirror(t *testing.T) {
	m := &Mirror{objects: make(map[model.Key]model.Object), synced: make(chan struct{})}
	service := func(name string) *model.Service {
		return model.NewService(model.Service{Namespace: "default", Name: name, Type: model.ClusterIP})
	}
	slice := model.NewSlice(model.Slice{Namespace: "default", Name: "web-1", Service: "web"})
	one, other := service("web"), service("api")
	m.Replace(model.KindSlice, []model.Keyed{slice}, 1)
	m.Replace(model.KindService, []model.Keyed{service("gone")}, 1)
	m.Replace(model.KindNode, []model.Keyed{&model.Node{Name: "n"}}, 1)
	m.Synced()
	m.Replace(model.KindService, []model.Keyed{one}, 2)
	m.Upsert(other, 3)
	m.Progress(model.KindService, 4)
	require.ElementsMatch(t, []model.Object{slice, one, other}, m.Objects())
	m.Remove(one.Key(), 5)
	require.ElementsMatch(t, []model.Object{slice, other}, m.Objects())
	<-m.synced
}
