// These benchmarks measure what it costs to apply a delta to a slice of 100 endpoints, and to
// construct such a slice.
package model_test

import (
	"testing"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
)

func BenchmarkApply(b *testing.B) {
	base := model.NewSlice(modeltest.WebSlice(100))
	target := modeltest.WebSlice(100)
	target.Endpoints[50].Conditions.Ready = false
	d := model.Diff(base, model.NewSlice(target))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := d.Apply(base); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkNewSlice(b *testing.B) {
	b.ReportAllocs()
	for b.Loop() {
		s := modeltest.WebSlice(100)
		model.NewSlice(s)
	}
}
