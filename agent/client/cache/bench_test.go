// This benchmark measures what a change costs a node.
package cache

import (
	"fmt"
	"testing"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/wire"
)

// BenchmarkApply measures applying a change of one endpoint to a cache of a large cluster.
func BenchmarkApply(b *testing.B) {
	const shards = 64
	c := &Writer{Cache: New()}
	if err := c.Welcome(1, shards); err != nil {
		b.Fatal(err)
	}
	key := web(func(*model.Slice) {}).ServiceKey()
	full := make([]*model.Update, shards)
	for i := range full {
		full[i] = &model.Update{Shard: uint32(i), To: 1, Full: true}
	}
	for i := range 5000 {
		s := named(fmt.Sprint("slice-", i), fmt.Sprint("service-", i), 10)
		u := full[s.ServiceKey().Shard(shards)]
		u.Slices = append(u.Slices, s)
	}
	states := [2]*model.Slice{web(func(*model.Slice) {}), web(unready(40))}
	shard := key.Shard(shards)
	full[shard].Slices = append(full[shard].Slices, states[0])
	for _, u := range full {
		if _, err := c.Apply(u); err != nil {
			b.Fatal(err)
		}
	}
	var frames [2]wire.Frame
	for i := range frames {
		var err error
		frames[i], err = wire.EncodeUpdate(&model.Update{Shard: shard, From: 1, To: 1, Deltas: []*model.SliceDelta{model.Diff(states[i], states[1-i])}})
		if err != nil {
			b.Fatal(err)
		}
	}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		r, err := wire.Decode(frames[i%2])
		if err != nil {
			b.Fatal(err)
		}
		if out, err := c.Apply(r.Update); err != nil || len(out.Missing) > 0 {
			b.Fatal(out.Missing, err)
		}
	}
}
