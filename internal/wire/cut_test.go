// These tests prove what a narrowed stream hears of objects that leave its Services, and that
// frames are only cut for the Update that they hold.
package wire

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
)

// TestCutOfDepartures checks that a stream hears that an object left a Service it follows, unless
// the object went to another Service that it follows: it has it from there.
func TestCutOfDepartures(t *testing.T) {
	moved, other := modeltest.NamedSlice("moved", "to", 1), modeltest.NamedSlice("other", "to", 1)
	gone := model.Key{Kind: model.KindSlice, Namespace: "default", Name: "gone"}
	from := model.ServiceKey{Namespace: "default", Name: "from"}
	u := &model.Update{
		Shard: 1, From: 6, To: 7, Slices: []*model.Slice{moved, other}, Removed: []model.Key{gone},
		Left: []model.Departure{{Key: gone, Service: from}, {Key: moved.Key(), Service: from}},
	}
	frames, err := EncodeParts(u)
	require.NoError(t, err)
	parts, err := PartsOf(u, frames)
	require.NoError(t, err)
	for name, c := range map[string]struct {
		services        []string
		slices, removed []string
	}{
		"from":     {[]string{"from"}, nil, []string{"gone", "moved"}},
		"to":       {[]string{"to"}, []string{"moved", "other"}, nil},
		"from, to": {[]string{"from", "to"}, []string{"moved", "other"}, []string{"gone"}},
		"neither":  {[]string{"web"}, nil, nil},
	} {
		cut, err := parts.Cut(6, func(k model.ServiceKey) bool {
			for _, s := range c.services {
				if k == (model.ServiceKey{Namespace: "default", Name: s}) {
					return true
				}
			}
			return false
		})
		require.NoError(t, err, name)
		if c.slices == nil && c.removed == nil {
			require.Empty(t, cut, name)
			continue
		}
		got := together(t, cut)
		var slices, removed []string
		for _, s := range got.Slices {
			slices = append(slices, s.Name)
		}
		for _, k := range got.Removed {
			removed = append(removed, k.Name)
		}
		require.Equal(t, c.slices, slices, name)
		require.Equal(t, c.removed, removed, name)
		require.Equal(t, [2]uint64{6, 7}, [2]uint64{got.From, got.To}, name)
	}
}

// TestPartsOfOtherFrames checks that frames which do not hold the Update are refused, whatever of
// it they lack, as a stream would get wrong objects from them.
func TestPartsOfOtherFrames(t *testing.T) {
	s, changed := modeltest.NamedSlice("s", "web", 5), modeltest.WebSlice(4)
	changed.Name, changed.Service = "s", "web"
	services, slices := []*model.Service{modeltest.Web()}, []*model.Slice{s}
	deltas := []*model.SliceDelta{model.Diff(s, model.NewSlice(changed))}
	u := &model.Update{To: 1, Services: services, Slices: slices, Deltas: deltas}
	whole, err := EncodeUpdate(u)
	require.NoError(t, err)
	_, err = PartsOf(u, []Frame{whole})
	require.NoError(t, err)
	for name, other := range map[string]*model.Update{
		"no Service": {To: 1, Slices: slices, Deltas: deltas},
		"no slice":   {To: 1, Services: services, Deltas: deltas},
		"no delta":   {To: 1, Services: services, Slices: slices},
	} {
		f, err := EncodeUpdate(other)
		require.NoError(t, err)
		_, err = PartsOf(u, []Frame{f})
		require.ErrorContains(t, err, "do not hold what the update does", name)
	}
	for cut := range whole {
		_, err := PartsOf(u, []Frame{whole[:cut]})
		require.Error(t, err, cut)
	}
	node, err := EncodeNode("n", nil, 0)
	require.NoError(t, err)
	_, err = PartsOf(&model.Update{}, []Frame{node})
	require.ErrorContains(t, err, "holds no update")
	// The length of the update is right, but its last field is cut off.
	_, err = PartsOf(u, []Frame{within(responseShardUpdate, whole[3:len(whole)-1])})
	require.Error(t, err)
}

// TestEncodeBeginning checks that a client waits for more after the frames of the first part,
// however many these are.
func TestEncodeBeginning(t *testing.T) {
	for _, u := range []*model.Update{{To: 1, Full: true}, largest(0, 3, MaxPart/2)} {
		frames, err := EncodeBeginning(u)
		require.NoError(t, err)
		for _, f := range frames {
			r, err := Decode(f)
			require.NoError(t, err)
			require.True(t, r.More)
		}
	}
}
