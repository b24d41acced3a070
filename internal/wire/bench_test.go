package wire

import (
	"testing"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
)

// BenchmarkDecode decodes what a node hears of most, and a whole slice of 100 endpoints.
func BenchmarkDecode(b *testing.B) {
	whole := model.NewSlice(modeltest.WebSlice(100))
	flipped := modeltest.WebSlice(100)
	flipped.Endpoints[40].Conditions.Ready = false
	for name, u := range map[string]*model.Update{
		"flip":  {Shard: 63, From: 3_000_000, To: 3_000_001, Deltas: []*model.SliceDelta{model.Diff(whole, model.NewSlice(flipped))}},
		"slice": {Shard: 63, From: 3_000_000, To: 3_000_001, Slices: []*model.Slice{whole}},
	} {
		frame, err := EncodeUpdate(u)
		if err != nil {
			b.Fatal(err)
		}
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := Decode(frame); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
