// The fuzz target proves that no file is accepted by accident; the benchmark measures a large
// checkpoint.
package checkpoint

import (
	"encoding/binary"
	"fmt"
	"io"
	"net/netip"
	"path/filepath"
	"testing"
	"time"

	"github.com/cespare/xxhash/v2"
	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/client/cache"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// FuzzCheckpoint decodes files as they are, files with a correct checksum, and files whose sections
// have the fuzzer's content. A file that is accepted must be accepted again after it was rewritten.
func FuzzCheckpoint(f *testing.F) {
	service := modeltest.Web()
	node, err := wire.EncodeNode("node-1", &model.Node{Name: "node-1"}, 0)
	require.NoError(f, err)
	hello := marshal(f, &pb.Hello{
		NodeName: "node-1", Epoch: 1, Sequences: []uint64{5},
	})
	servers := marshal(f, &pb.Servers{Servers: []*pb.Server{{Address: "10.0.0.1:8472"}}})
	f.Add(encoded(f, everything(f, small(f).Cache)), hello, servers, []byte(node), frame(f, &model.Update{Full: true, Services: []*model.Service{service}}))
	f.Fuzz(func(t *testing.T, file, hello, servers, node, shard []byte) {
		for _, file := range [][]byte{
			file, binary.BigEndian.AppendUint64(file, xxhash.Sum64(file)), seal(hello, servers, servers, node, shard),
		} {
			contents, _, err := decode(file, "node-1")
			if err != nil {
				continue
			}
			c := cache.New()
			if c.Restore(contents) != nil {
				continue
			}
			requireSame(t, everything(t, c), everything(t, restart(t, c).Cache))
		}
	})
}

// large returns a cache with 55,000 endpoints, each with its own address. It has 1000 Services with
// 50 endpoints each, and one with 5000 in slices of 100.
func large(b *testing.B) *cache.Writer {
	var objects []model.Object
	n := uint32(0)
	add := func(service string, slices, endpoints int) {
		objects = append(objects, model.NewService(model.Service{
			Namespace: "default", Name: service, Type: model.ClusterIP, ClusterIPs: []netip.Addr{address(10<<24 | 96<<16 | n)},
			Ports: []model.ServicePort{{Name: "http", Protocol: model.TCP, Port: 80}}, CreationTimeSeconds: 1_754_000_000 + int64(n),
		}))
		for i := range slices {
			s := modeltest.WebSlice(0)
			s.Name, s.Service = fmt.Sprintf("%s-%05x", service, n*7919+uint32(i)), service
			s.LastChangeTriggerTimeMS += int64(n) * 1000
			for range endpoints {
				e := modeltest.WebEndpoint(int(n*7919) % 1000)
				e.Address = address(10<<24 | 128<<16 + n*7919%(1<<22))
				s.Endpoints = append(s.Endpoints, e)
				n++
			}
			objects = append(objects, model.NewSlice(s))
		}
	}
	for i := range 1000 {
		add(fmt.Sprint("service-", i), 1, 50)
	}
	add("large", 50, 100)
	return inSyncWith(b, 7, 64, &model.Node{Name: "node-1"}, objects...)
}

func address(n uint32) netip.Addr {
	return netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, n)))
}

// BenchmarkCheckpoint measures a checkpoint of 55,000 endpoints: writing all of it, writing it
// after a change of one endpoint, and reading it.
func BenchmarkCheckpoint(b *testing.B) {
	c := large(b)
	b.Run("encode all", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			e := newEncoder()
			sections, err := e.encode("node-1", c.Contents(e.lacks))
			require.NoError(b, err)
			size, err := writeFile(io.Discard, time.Now(), sections)
			require.NoError(b, err)
			b.ReportMetric(float64(size), "bytes/file")
		}
	})
	b.Run("save one changed shard", func(b *testing.B) {
		k := open(b, filepath.Join(b.TempDir(), "checkpoint"), c.Cache)
		k.save()
		shard := named("more", "service-7", 0).ServiceKey().Shard(64)
		b.ReportAllocs()
		for i := 0; b.Loop(); i++ {
			sequence := c.Sequence(shard)
			_, err := c.Apply(&model.Update{
				Shard: shard, From: sequence, To: sequence + 1, Slices: []*model.Slice{named("more", "service-7", 50-i%2)},
			})
			require.NoError(b, err)
			k.save()
		}
		require.Zero(b, k.metric(b, "slicecast_agent_checkpoint_errors_total"))
	})
	b.Run("copy lists under the lock", func(b *testing.B) {
		for b.Loop() {
			c.Contents(func(int, uint64) bool { return true })
		}
	})
	b.Run("read", func(b *testing.B) {
		file := encoded(b, everything(b, c.Cache))
		b.ReportAllocs()
		for b.Loop() {
			contents, _, err := decode(file, "node-1")
			require.NoError(b, err)
			require.NoError(b, cache.New().Restore(contents))
		}
	})
}
