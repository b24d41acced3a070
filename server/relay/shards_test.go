// This test proves that a client resumes in time although most of very many shards differ, with a
// real server.
package relay_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/client"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/source"
	"github.com/slicecast/slicecast/internal/wire"
)

// numbered is a source of many Services, each with its own number.
type numbered uint16

func (numbered) shards() uint32 { return 256 }

func (n numbered) Run(ctx context.Context, sink source.Sink) error {
	for i := range 20_000 {
		sink.Upsert(model.NewService(model.Service{
			Namespace: "default", Name: fmt.Sprint("service-", i), Type: model.ClusterIP, ClientIPAffinitySeconds: uint32(n),
		}), 0)
	}
	sink.Synced()
	<-ctx.Done()
	return nil
}

// TestManyShards checks a client that comes back when most of very many shards differ. Its answers
// to the server must arrive within the server's time limit.
func TestManyShards(t *testing.T) {
	address := reserve(t)
	first := serve(t, address, numbered(1))
	cache := client.NewCache()
	a := follow(t, address, "", cache, wire.Decode)
	has := func(number uint32) {
		t.Helper()
		require.Eventually(t, func() bool {
			cache.Take()
			s, _ := cache.Service(model.ServiceKey{Namespace: "default", Name: "service-3"})
			return s != nil && s.ClientIPAffinitySeconds == number
		}, patience, time.Millisecond)
	}
	has(1)
	first.stop()
	serve(t, address, numbered(2))
	has(2)
	a.stop()
	require.Equal(t, map[string]float64{"resume": 256}, resyncs(t, a.registry))
}
