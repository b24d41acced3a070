package estimate

import (
	"runtime"

	"k8s.io/client-go/kubernetes/scheme"

	"github.com/slicecast/slicecast/internal/store"
	"github.com/slicecast/slicecast/internal/wire"
)

// heapOf returns the heap size of the value that build returns. It is exact if no other goroutine
// allocates or frees memory meanwhile.
func heapOf[T any](build func() (T, error)) (int, error) {
	if _, err := build(); err != nil { // the first call also allocates what later calls share
		return 0, err
	}
	before := heap()
	x, err := build()
	after := heap()
	runtime.KeepAlive(x)
	return int(max(0, after-before)), err
}

// heap returns the heap size in use.
func heap() int64 {
	runtime.GC()
	runtime.GC() // pools release their contents in the second collection
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
	err = encodeShards(s, func(frames []wire.Frame) error {
		for _, f := range frames {
			r, err := wire.Decode(f)
			if err != nil {
				return err
			}
			out = append(out, r.Update)
		}
		return nil
	})
	return out, err
}
