package estimate

import (
	"runtime"

	"k8s.io/client-go/kubernetes/scheme"

	"github.com/slicecast/slicecast/internal/store"
	"github.com/slicecast/slicecast/internal/wire"
)

// heapOf tells how much heap what is built takes. It is exact as far as nothing else is allocated or released meanwhile.
func heapOf[T any](build func() (T, error)) (int, error) {
	if _, err := build(); err != nil { // what is made once for all is there then
		return 0, err
	}
	before := heap()
	x, err := build()
	after := heap()
	runtime.KeepAlive(x)
	return int(max(0, after-before)), err
}

// heap is what is in use.
func heap() int64 {
	runtime.GC()
	runtime.GC() // pools give up what they hold the second time
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// decodeToday decodes objects as client-go does.
func decodeToday(raw [][]byte) (out []any, err error) {
	for _, r := range raw {
		o, _, err := scheme.Codecs.UniversalDeserializer().Decode(r, nil, nil)
		if err != nil {
			return nil, err
		}
		out = append(out, o)
	}
	return out, nil
}

// decodeSlicecast decodes all shards as an agent does.
func decodeSlicecast(s *store.Store) (out []any, err error) {
	for shard := range s.Shards() {
		snapshot := s.Snapshot(shard)
		if snapshot.Len() == 0 {
			continue
		}
		frames, err := wire.EncodeParts(snapshot.Since(0))
		if err != nil {
			return nil, err
		}
		for _, f := range frames {
			r, err := wire.Decode(f)
			if err != nil {
				return nil, err
			}
			out = append(out, r.Update)
		}
	}
	return out, nil
}
