// These tests prove that applying a diff yields the target, for random histories of slices, and
// that Apply refuses any other base or result. The fuzz target compares Apply with a naive
// implementation for deltas of any content.
package model_test

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
)

var sliceKey = model.Key{Kind: model.KindSlice, Namespace: "default", Name: "s1"}

func TestApplyOfDiffYieldsTarget(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		have := modeltest.Slice(t, sliceKey)
		// Several steps, because each delta must apply to the result of the one before.
		for range rapid.IntRange(1, 4).Draw(t, "steps") {
			want := modeltest.Changed(t, have)
			d := model.Diff(have, want)
			sameHeader := have.Service == want.Service && have.Family == want.Family && slices.Equal(have.Ports, want.Ports)
			if d == nil {
				require.True(t, !sameHeader || len(have.Endpoints) > 0 || len(want.Endpoints) > 0)
				have = want
				continue
			}
			require.True(t, sameHeader)
			before := clone(have)
			got, err := d.Apply(have)
			require.NoError(t, err)
			require.Empty(t, modeltest.Diff(want, got))
			require.Equal(t, before, clone(have), "Apply changed the base")
			have = got
		}
	})
}

// clone returns a copy of the exported fields of a slice.
func clone(s *model.Slice) model.Slice {
	return model.Slice{
		Namespace: s.Namespace, Name: s.Name, Service: s.Service, Family: s.Family, Ports: slices.Clone(s.Ports),
		Endpoints: slices.Clone(s.Endpoints), LastChangeTriggerTimeMS: s.LastChangeTriggerTimeMS,
	}
}

func TestDiff(t *testing.T) {
	change := func(f func(*model.Slice)) *model.Slice {
		s := modeltest.WebSlice(20)
		f(&s)
		return model.NewSlice(s)
	}
	base := change(func(*model.Slice) {})

	for name, other := range map[string]*model.Slice{
		"service": change(func(s *model.Slice) { s.Service = "other" }),
		"family":  change(func(s *model.Slice) { s.Family = model.IPv6 }),
		"ports":   change(func(s *model.Slice) { s.Ports[0].Port = 81 }),
		"every endpoint replaced": change(func(s *model.Slice) {
			for i := range s.Endpoints {
				s.Endpoints[i].NodeName = "elsewhere"
			}
		}),
		"most endpoints removed": change(func(s *model.Slice) { s.Endpoints = s.Endpoints[:2] }),
		"all endpoints removed":  change(func(s *model.Slice) { s.Endpoints = nil }),
	} {
		require.Nil(t, model.Diff(base, other), name)
	}

	d := model.Diff(base, change(func(s *model.Slice) { s.Endpoints[7].Conditions = model.Conditions{Terminating: true} }))
	require.Equal(t, []model.EndpointConditions{{7, model.Conditions{Terminating: true}}}, d.Conditions)
	require.Equal(t, 1, d.Len())

	d = model.Diff(base, change(func(s *model.Slice) { s.Endpoints[7] = modeltest.WebEndpoint(99) }))
	require.Equal(t, []model.Endpoint{modeltest.WebEndpoint(99)}, d.Endpoints)
	require.Equal(t, []netip.Addr{modeltest.WebEndpoint(7).Address}, d.Removed)
	require.Equal(t, 2, d.Len())

	d = model.Diff(base, change(func(s *model.Slice) {
		for i := range s.Endpoints {
			s.Endpoints[i].Conditions.Ready = false
		}
	}))
	require.Len(t, d.Conditions, 20, "conditions are smaller than the slice even if all of them change")

	d = model.Diff(base, change(func(s *model.Slice) { s.LastChangeTriggerTimeMS++ }))
	require.Zero(t, d.Len())
	got, err := d.Apply(base)
	require.NoError(t, err)
	require.Equal(t, base.LastChangeTriggerTimeMS+1, got.LastChangeTriggerTimeMS)
}

// TestWorse checks which changes take an endpoint out of use. Nodes receive these before the
// others.
func TestWorse(t *testing.T) {
	at := func(ready, serving bool) model.Endpoint {
		return model.Endpoint{Address: addr("10.0.0.2"), Conditions: model.Conditions{Ready: ready, Serving: serving}}
	}
	other := model.Endpoint{Address: addr("10.0.0.1"), Conditions: model.Conditions{Ready: true, Serving: true}}
	for name, c := range map[string]struct {
		before, after []model.Endpoint
		worse         bool
	}{
		"nothing changes":    {[]model.Endpoint{other, at(true, true)}, []model.Endpoint{other, at(true, true)}, false},
		"one joins":          {[]model.Endpoint{at(true, true)}, []model.Endpoint{other, at(true, true)}, false},
		"one leaves":         {[]model.Endpoint{other, at(true, true)}, []model.Endpoint{at(true, true)}, true},
		"one is replaced":    {[]model.Endpoint{at(true, true)}, []model.Endpoint{other}, true},
		"no longer ready":    {[]model.Endpoint{other, at(true, true)}, []model.Endpoint{other, at(false, true)}, true},
		"no longer serving":  {[]model.Endpoint{other, at(false, true)}, []model.Endpoint{other, at(false, false)}, true},
		"ready":              {[]model.Endpoint{at(false, true)}, []model.Endpoint{at(true, true)}, false},
		"serving":            {[]model.Endpoint{at(false, false)}, []model.Endpoint{at(false, true)}, false},
		"never in use":       {[]model.Endpoint{at(false, false)}, []model.Endpoint{at(false, false)}, false},
		"ready, not serving": {[]model.Endpoint{at(true, false)}, []model.Endpoint{at(true, false)}, false},
	} {
		slice := func(endpoints []model.Endpoint) *model.Slice {
			return model.NewSlice(model.Slice{Endpoints: endpoints})
		}
		require.Equal(t, c.worse, model.Worse(slice(c.before), slice(c.after)), name)
	}
}

// TestApplyToLargeSlices checks deltas that fill a slice up to the maximum of endpoints, and that
// add endpoints beyond those that the last leaf of the base holds.
func TestApplyToLargeSlices(t *testing.T) {
	for _, size := range [][2]int{{model.MaxEndpoints - 1, model.MaxEndpoints}, {20, 39}} {
		base, target := model.NewSlice(modeltest.WebSlice(size[0])), model.NewSlice(modeltest.WebSlice(size[1]))
		d := model.Diff(base, target)
		got, err := d.Apply(base)
		require.NoError(t, err)
		require.Empty(t, modeltest.Diff(target, got))
	}
}

// TestLenOfAnUpdate checks that each object that an update names counts, whichever list it is in.
// Servers send nothing if the number is 0.
func TestLenOfAnUpdate(t *testing.T) {
	require.Zero(t, (&model.Update{Full: true, Left: make([]model.Departure, 9)}).Len())
	u := &model.Update{
		Services: make([]*model.Service, 1), Slices: make([]*model.Slice, 2), Deltas: make([]*model.SliceDelta, 4), Removed: make([]model.Key, 8),
	}
	require.Equal(t, 15, u.Len())
}

// TestResourceVersions checks that the version of one kind never stands for that of another.
func TestResourceVersions(t *testing.T) {
	r := model.ResourceVersions{Services: 5, Slices: 7}
	require.Equal(t, model.ResourceVersions{Services: 9, Slices: 7}, r.With(model.KindService, 9))
	require.Equal(t, model.ResourceVersions{Services: 5, Slices: 9}, r.With(model.KindSlice, 9))
	require.Equal(t, model.ResourceVersions{Services: 5, Slices: 7, Nodes: 9}, r.With(model.KindNode, 9))
	require.Equal(t, r, r.With(model.KindServiceCIDR, 9))
	o := model.ResourceVersions{Services: 4, Slices: 8, Nodes: 1}
	require.Equal(t, model.ResourceVersions{Services: 5, Slices: 8, Nodes: 1}, r.Max(o))
	require.Equal(t, model.ResourceVersions{Services: 4, Slices: 7}, r.Min(o))
}

// TestApplyRefusesOtherBases checks that a delta either does not apply to a slice that it was not
// made from, or leads to another version than it promises.
func TestApplyRefusesOtherBases(t *testing.T) {
	base := model.NewSlice(modeltest.WebSlice(5))
	target := modeltest.WebSlice(5)
	target.Endpoints[2].Conditions.Ready = false
	good := model.Diff(base, model.NewSlice(target))

	other := modeltest.WebSlice(5)
	other.Name = "other"
	for name, try := range map[string]func(d *model.SliceDelta) *model.Slice{
		"another slice":   func(*model.SliceDelta) *model.Slice { return model.NewSlice(other) },
		"another version": func(*model.SliceDelta) *model.Slice { return model.NewSlice(modeltest.WebSlice(6)) },
		"a missing endpoint removed": func(d *model.SliceDelta) *model.Slice {
			d.Removed = append(d.Removed, modeltest.WebEndpoint(70).Address)
			return base
		},
		"conditions of a missing endpoint": func(d *model.SliceDelta) *model.Slice {
			d.Conditions = append(d.Conditions, model.EndpointConditions{Index: 70})
			return base
		},
		"another result": func(d *model.SliceDelta) *model.Slice {
			d.Conditions = nil
			return base
		},
		"a wrong result promised": func(d *model.SliceDelta) *model.Slice {
			d.Version[0]++
			return base
		},
	} {
		d := *good
		d.Conditions = slices.Clone(d.Conditions)
		to := try(&d)
		before := clone(to)
		if got, err := d.Apply(to); err == nil {
			require.NotEqual(t, d.Version, got.ContentVersion(), name)
			require.Empty(t, modeltest.Diff(model.NewSlice(clone(got)), got), name)
		} else {
			require.ErrorIs(t, err, model.ErrBase, name)
		}
		require.Equal(t, before, clone(to), name)
	}
	got, err := good.Apply(base)
	require.NoError(t, err)
	require.Equal(t, good.Version, got.ContentVersion())
}

// FuzzDelta applies deltas with any content. Apply must not panic. A result with the promised
// version must equal the result of a naive implementation, and the result of a canonical delta must
// be canonical, whatever version the delta promises.
func FuzzDelta(f *testing.F) {
	f.Add([]byte{1, 2, 3}, []byte{2}, []byte{3}, []byte{1}, false)
	f.Add([]byte{1, 2, 3}, []byte{0, 9}, []byte{}, []byte{}, false)
	f.Add([]byte{}, []byte{5, 5}, []byte{}, []byte{}, false)
	f.Add([]byte{1}, []byte{}, []byte{1, 1}, []byte{1, 1}, true)
	f.Add([]byte{9, 8, 7, 6}, []byte{8, 1}, []byte{7, 7}, []byte{8, 6, 9}, true)
	f.Fuzz(checkDelta)
}

func checkDelta(t *testing.T, base, endpoints, conditions, removed []byte, twice bool) {
	address := func(b byte) netip.Addr {
		switch b {
		case 200:
			return netip.MustParseAddr("fd00::1")
		case 201:
			return netip.MustParseAddr("127.0.0.1")
		}
		return netip.AddrFrom4([4]byte{10, 0, 0, b})
	}
	s := model.Slice{Namespace: "default", Name: "s", Service: "a", Family: model.IPv4}
	naive := map[netip.Addr]model.Endpoint{}
	for _, b := range base {
		e := model.Endpoint{Address: address(b), Conditions: model.Conditions{Ready: true}}
		s.Endpoints = append(s.Endpoints, e)
		naive[e.Address] = e
	}
	have := model.NewSlice(s)
	for _, list := range []*[]byte{&endpoints, &conditions, &removed} {
		slices.Sort(*list)
		if !twice { // as Diff makes them
			*list = slices.Compact(*list)
		}
	}
	d := &model.SliceDelta{Namespace: "default", Name: "s"}
	for _, b := range conditions {
		c := model.EndpointConditions{Index: uint32(b), Conditions: model.Conditions{Terminating: true}}
		d.Conditions = append(d.Conditions, c)
		if int(b) < len(have.Endpoints) {
			e := have.Endpoints[b]
			e.Conditions = c.Conditions
			naive[e.Address] = e
		}
	}
	for _, b := range removed {
		d.Removed = append(d.Removed, address(b))
		delete(naive, address(b))
	}
	for _, b := range endpoints {
		e := model.Endpoint{Address: address(b), NodeName: "new"}
		d.Endpoints = append(d.Endpoints, e)
		naive[e.Address] = e
	}
	want := model.Slice{Namespace: "default", Name: "s", Service: "a", Family: model.IPv4}
	for _, e := range naive {
		want.Endpoints = append(want.Endpoints, e)
	}
	result := model.NewSlice(want)
	d.Version = result.ContentVersion()
	got, err := d.Apply(have)
	if err != nil {
		require.ErrorIs(t, err, model.ErrBase)
		return
	}
	if have.Check() == nil && d.Check() == nil {
		require.NoError(t, got.Check())
	}
	if got.ContentVersion() == d.Version {
		require.Empty(t, modeltest.Diff(result, got))
	}
}
