// BenchmarkDecode measures the cost of decoding each kind of frame that a node receives often, or
// that is large.
package wire

import (
	"fmt"
	"testing"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
)

// BenchmarkDecode decodes the most frequent frame, a whole slice of 100 endpoints, a compressed
// part of a snapshot, and the largest slice.
func BenchmarkDecode(b *testing.B) {
	whole := model.NewSlice(modeltest.WebSlice(100))
	flipped := modeltest.WebSlice(100)
	flipped.Endpoints[40].Conditions.Ready = false
	part := &model.Update{Shard: 63, To: 3_000_001, Full: true}
	for i := range 100 {
		s := modeltest.WebSlice(100)
		s.Name = fmt.Sprint("slice-", i)
		part.Slices = append(part.Slices, model.NewSlice(s))
	}
	for name, u := range map[string]*model.Update{
		"flip":  {Shard: 63, From: 3_000_000, To: 3_000_001, Deltas: []*model.SliceDelta{model.Diff(whole, model.NewSlice(flipped))}},
		"slice": {Shard: 63, From: 3_000_000, To: 3_000_001, Slices: []*model.Slice{whole}},
		"part":  part,
		"large": largest(0, 1, 1_500_000),
	} {
		frame, err := EncodeUpdate(u)
		if err != nil {
			b.Fatal(err)
		}
		if name == "part" {
			if frame, err = Compress(frame); err != nil {
				b.Fatal(err)
			}
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
