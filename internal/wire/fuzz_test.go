// The fuzz target proves that Cut returns exactly the wanted objects of any Update that can be
// sent, unchanged, and refuses frames of another Update.
package wire

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
)

// FuzzCut checks that Cut returns exactly the wanted objects, unchanged, for any Update that can be
// sent. Frames that do not belong to the Update must be refused.
func FuzzCut(f *testing.F) {
	web, s := modeltest.Web(), model.NewSlice(modeltest.WebSlice(3))
	flipped := modeltest.WebSlice(3)
	flipped.Endpoints[1].Conditions.Ready = false
	for _, u := range []*model.Update{
		{Shard: 1, To: 2, Full: true, Services: []*model.Service{web}, Slices: []*model.Slice{s}},
		{Shard: 1, From: 2, To: 3, Deltas: []*model.SliceDelta{model.Diff(s, model.NewSlice(flipped))}, Removed: []model.Key{web.Key()}},
		{Shard: 1, From: 2, To: 3, ResourceVersions: model.ResourceVersions{Slices: 7}},
	} {
		frame, err := EncodeUpdate(u)
		require.NoError(f, err)
		f.Add([]byte(frame), []byte(frame[1:]), "web")
		f.Add([]byte(frame), []byte(frame), "")
	}
	f.Fuzz(checkCut)
}

func checkCut(t *testing.T, data, other []byte, name string) {
	r, err := Decode(data)
	if err != nil || r.Update == nil || len(r.Problems) > 0 {
		return
	}
	u := r.Update
	frame, err := EncodeUpdate(u)
	require.NoError(t, err)
	if _, err := PartsOf(u, []Frame{other}); err == nil {
		require.NotEmpty(t, other)
	}
	parts, err := PartsOf(u, []Frame{frame})
	require.NoError(t, err)
	for _, wanted := range []func(model.ServiceKey) bool{
		func(model.ServiceKey) bool { return true },
		func(model.ServiceKey) bool { return false },
		func(k model.ServiceKey) bool { return k.Name == name },
	} {
		want := &model.Update{Shard: u.Shard, From: 42, To: u.To, Full: u.Full, ResourceVersions: u.ResourceVersions}
		for _, s := range u.Services {
			if wanted(s.ServiceKey()) {
				want.Services = append(want.Services, s)
			}
		}
		for _, s := range u.Slices {
			if wanted(s.ServiceKey()) {
				want.Slices = append(want.Slices, s)
			}
		}
		for _, d := range u.Deltas {
			if wanted(model.ServiceKey{Namespace: d.Namespace, Name: d.Service}) {
				want.Deltas = append(want.Deltas, d)
			}
		}
		got, err := parts.Cut(42, wanted)
		require.NoError(t, err)
		if got == nil {
			require.Zero(t, want.Len())
			require.False(t, u.Full)
			continue
		}
		require.Len(t, got, 1)
		r, err := Decode(got[0])
		require.NoError(t, err)
		require.Empty(t, r.Problems)
		require.Empty(t, modeltest.Diff(want, r.Update))
	}
}
