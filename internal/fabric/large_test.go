// This file generates the state of a large cluster, changes it, and computes which objects and
// bytes differ between two states.
package fabric

import (
	"net/netip"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/store"
	"github.com/slicecast/slicecast/internal/wire"
	"github.com/slicecast/slicecast/loadtest/generate"
)

// large is the state of a large cluster: 1000 Services with 50 endpoints each, and one with 5000.
var large = sync.OnceValues(func() ([]model.Keyed, error) {
	var out []model.Keyed
	for name, config := range map[string]generate.Config{
		"":      {Nodes: 200, Services: []generate.Group{{Count: 1000, Least: 50, Most: 50}}, Change: generate.Flip},
		"huge-": {Nodes: 200, Services: []generate.Group{{Count: 1, Least: 5000, Most: 5000}}, Change: generate.Flip},
	} {
		g, err := generate.New(config)
		if err != nil {
			return nil, err
		}
		for _, o := range g.Objects() {
			switch o := o.(type) {
			case *model.Service:
				n := *o
				n.Name = name + n.Name
				out = append(out, model.NewService(n))
			case *model.Slice:
				n := *o
				n.Name, n.Service = name+n.Name, name+n.Service
				out = append(out, model.NewSlice(n))
			}
		}
	}
	for i, name := range nodes {
		out = append(out, &model.Node{
			Name: name, Addresses: []netip.Addr{netip.AddrFrom4([4]byte{10, 0, 0, byte(i)})},
			Labels: map[string]string{
				"kubernetes.io/arch": "amd64", "kubernetes.io/hostname": name, "kubernetes.io/os": "linux",
				"topology.kubernetes.io/region": "region-1", "topology.kubernetes.io/zone": "zone-a",
			},
		})
	}
	return out, nil
})

func newLargeCluster(t *testing.T) *cluster {
	t.Helper()
	objects, err := large()
	require.NoError(t, err)
	return newCluster(objects...)
}

// flip changes the readiness of one endpoint in each slice.
func (c *cluster) flip(slices []model.Key) {
	for _, key := range slices {
		n := *c.state()[key].(*model.Slice)
		n.Endpoints = append([]model.Endpoint(nil), n.Endpoints...)
		n.Endpoints[0].Conditions.Ready = !n.Endpoints[0].Conditions.Ready
		c.upsert(model.NewSlice(n))
	}
}

// place is a bucket of a shard.
type place struct{ shard, bucket uint32 }

func placeOf(o model.Object) place {
	return place{o.ServiceKey().Shard(store.DefaultShards), o.Key().Bucket()}
}

// difference returns the objects that differ between two states. For removed objects, it returns
// their earlier state.
func difference(before, after map[model.Key]model.Keyed) (out []model.Object) {
	for key, o := range after {
		now, ok := o.(model.Object)
		if !ok {
			continue
		}
		if then, ok := before[key].(model.Object); !ok || then.ContentVersion() != now.ContentVersion() {
			out = append(out, now)
		}
	}
	for key, o := range before {
		if then, ok := o.(model.Object); ok && after[key] == nil {
			out = append(out, then)
		}
	}
	return out
}

// size returns the size of objects on the wire, uncompressed, in bytes.
func size(t *testing.T, objects []model.Object) (bytes int64) {
	t.Helper()
	if len(objects) == 0 {
		return 0
	}
	u := &model.Update{}
	for _, o := range objects {
		switch o := o.(type) {
		case *model.Service:
			u.Services = append(u.Services, o)
		case *model.Slice:
			u.Slices = append(u.Slices, o)
		}
	}
	f, err := wire.EncodeUpdate(u)
	require.NoError(t, err)
	return int64(len(f))
}

// inPlaces returns the objects of a state that are in the same buckets as others.
func inPlaces(state map[model.Key]model.Keyed, others []model.Object) (out []model.Object) {
	places := make(map[place]struct{})
	for _, o := range others {
		places[placeOf(o)] = struct{}{}
	}
	for _, o := range state {
		if o, ok := o.(model.Object); ok {
			if _, ok := places[placeOf(o)]; ok {
				out = append(out, o)
			}
		}
	}
	return out
}
