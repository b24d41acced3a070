// These tests prove that no message of a rogue server costs an agent more than is bounded, or keeps
// it from the next server.
package client

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"math"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/slicecast/slicecast/agent/client/cache"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
	"github.com/slicecast/slicecast/server/fanout"
)

func drain(ms uint32) *pb.StreamResponse {
	return &pb.StreamResponse{Message: &pb.StreamResponse_Drain{Drain: &pb.Drain{ReconnectWithinMs: ms}}}
}

func bucketQuery(shards ...uint32) *pb.StreamResponse {
	return &pb.StreamResponse{Message: &pb.StreamResponse_BucketQuery{BucketQuery: &pb.BucketQuery{Shards: shards}}}
}

// zipped returns the compressed frame of a message, which is as small as a server can make it.
func zipped(t *testing.T, m *pb.StreamResponse) wire.Frame {
	t.Helper()
	f, err := wire.Encode(m)
	require.NoError(t, err)
	f, err = wire.Compress(f)
	require.NoError(t, err)
	return f
}

// repeat returns a list with a message n times.
func repeat(n int, m any) (out []any) {
	for range n {
		out = append(out, m)
	}
	return out
}

// unreadableServices returns updates with Services that do not decode. All Services have different
// names.
func unreadableServices(t *testing.T, frames, each int) (out []any) {
	t.Helper()
	for i := range frames {
		u := &pb.ShardUpdate{Sequence: uint64(2 + i), FromSequence: uint64(1 + i)}
		for j := range each {
			u.Services = append(u.Services, &pb.Service{Namespace: "a", Name: fmt.Sprint("s-", i, "-", j), Version: modeltest.Digests(1)})
		}
		out = append(out, zipped(t, update(u)))
	}
	return out
}

// baseless returns updates with deltas of slices that no client holds.
func baseless(t *testing.T, frames, each int) (out []any) {
	t.Helper()
	for i := range frames {
		u := &pb.ShardUpdate{Sequence: uint64(2 + i), FromSequence: uint64(1 + i)}
		for j := range each {
			u.SliceDeltas = append(u.SliceDeltas, &pb.SliceDelta{Namespace: "a", Name: fmt.Sprint("s-", i, "-", j), Version: modeltest.Digests(1),
				Removed: []string{"10.0.0.1"}})
		}
		out = append(out, zipped(t, update(u)))
	}
	return out
}

// extremes returns messages in which a number, duration, list or text is as large as a server can
// make it, for every field of every message. They name other Services and slices than the honest
// server.
func extremes(t *testing.T, epoch uint64, shards uint32) map[string][]any {
	t.Helper()
	const most32, most64, long = math.MaxUint32, math.MaxUint64, 1 << 20
	text := strings.Repeat("x", long)
	beginning := func(change func(*pb.Welcome)) []any {
		w := &pb.Welcome{Epoch: epoch, ShardCount: shards}
		change(w)
		return []any{welcome(w)}
	}
	all := func(sequence uint64) []uint64 {
		out := make([]uint64, shards)
		for i := range out {
			out[i] = sequence
		}
		return out
	}
	digests := func(d *pb.Digests) any { return &pb.StreamResponse{Message: &pb.StreamResponse_Digests{Digests: d}} }
	beat := func(h *pb.Heartbeat) any {
		return &pb.StreamResponse{Message: &pb.StreamResponse_Heartbeat{Heartbeat: h}}
	}
	query := &pb.StreamResponse{Message: &pb.StreamResponse_DigestQuery{DigestQuery: &pb.DigestQuery{}}}
	service := func(change func(*pb.Service)) []any {
		s := &pb.Service{Namespace: "rogue", Name: "a", Version: modeltest.Digests(1), Type: pb.ServiceType_SERVICE_TYPE_CLUSTER_IP}
		change(s)
		shard := model.ServiceKey{Namespace: s.GetNamespace(), Name: s.GetName()}.Shard(shards)
		return []any{update(&pb.ShardUpdate{Shard: shard, Full: true, Sequence: 1, Services: []*pb.Service{s}})}
	}
	slice := func(change func(*pb.Slice)) []any {
		s := &pb.Slice{Namespace: "rogue", Name: "a", Service: "a", Version: modeltest.Digests(1), AddressType: pb.AddressType_ADDRESS_TYPE_IPV4}
		change(s)
		shard := model.ServiceKey{Namespace: "rogue", Name: "a"}.Shard(shards)
		return []any{update(&pb.ShardUpdate{Shard: shard, Full: true, Sequence: 1, Slices: []*pb.Slice{s}})}
	}
	node := func(change func(*pb.NodeUpdate)) []any {
		u := &pb.NodeUpdate{Name: "node-1", Node: &pb.Node{Name: "node-1"}}
		change(u)
		return []any{zipped(t, &pb.StreamResponse{Message: &pb.StreamResponse_NodeUpdate{NodeUpdate: u}})}
	}
	var servers, labels = &pb.Servers{}, map[string]string{}
	for i := range 30_000 {
		servers.Servers = append(servers.Servers, &pb.Server{Address: fmt.Sprint("127.0.0.1:", 1+i%1000)})
		labels[fmt.Sprint("l", i)] = "x"
	}
	manyAddresses := make([]string, 100_000)
	for i := range manyAddresses {
		manyAddresses[i] = fmt.Sprintf("10.%d.%d.%d", i>>16, i>>8&255, i&255)
	}
	return map[string][]any{
		"welcome: epoch":         beginning(func(w *pb.Welcome) { w.Epoch = most64 }),
		"welcome: shards":        beginning(func(w *pb.Welcome) { w.ShardCount = most32 }),
		"welcome: 2^31 shards":   beginning(func(w *pb.Welcome) { w.ShardCount = 1 << 31 }),
		"welcome: 4096 shards":   beginning(func(w *pb.Welcome) { w.ShardCount = cache.MaxShards }),
		"welcome: name":          beginning(func(w *pb.Welcome) { w.ServerName = text }),
		"welcome: version":       beginning(func(w *pb.Welcome) { w.ServerVersion = text }),
		"welcome: heartbeats":    beginning(func(w *pb.Welcome) { w.HeartbeatIntervalMs = most32 }),
		"welcome: path":          beginning(func(w *pb.Welcome) { w.Path = make([]uint64, long/8) }),
		"drain":                  {drain(most32)},
		"drain, many times":      repeat(10_000, drain(most32)),
		"servers":                {zipped(t, &pb.StreamResponse{Message: &pb.StreamResponse_Servers{Servers: servers}})},
		"servers: address":       {tells(text + ":1")},
		"servers: port":          {tells("127.0.0.1:" + text)},
		"bucket_query: repeats":  {zipped(t, bucketQuery(make([]uint32, long)...))},
		"bucket_query: shard":    {bucketQuery(most32)},
		"bucket_query, again":    repeat(1000, bucketQuery(0)),
		"digest_query, again":    repeat(20_000, query),
		"digests: sequences":     {digests(&pb.Digests{Sequences: make([]uint64, long)})},
		"digests: bytes":         {digests(&pb.Digests{Sequences: all(most64), Digests: make([]byte, long)})},
		"in_sync: sequences":     {inSync(all(most64)...)},
		"in_sync: too many":      {inSync(make([]uint64, long)...)},
		"in_sync: versions":      {&pb.StreamResponse{Message: &pb.StreamResponse_InSync{InSync: &pb.InSync{Sequences: all(most64), AllNodes: true, ResourceVersions: &pb.ResourceVersions{Services: most64, Slices: most64}}}}},
		"heartbeat":              {beat(&pb.Heartbeat{SequenceSum: most64, Digest: make([]byte, long), ResourceVersions: &pb.ResourceVersions{Services: most64, Slices: most64}})},
		"heartbeats":             repeat(10_000, beat(&pb.Heartbeat{SequenceSum: most64, Digest: modeltest.Digests(1)})),
		"update: shard":          {update(&pb.ShardUpdate{Shard: most32, Full: true})},
		"update: sequence":       {update(&pb.ShardUpdate{Full: true, Sequence: most64})},
		"update: from":           {update(&pb.ShardUpdate{FromSequence: most64, Sequence: most64})},
		"update: versions":       {update(&pb.ShardUpdate{Full: true, Sequence: 1, ServicesResourceVersion: most64, SlicesResourceVersion: most64})},
		"update: buckets":        {update(&pb.ShardUpdate{Sequence: 1, FullBuckets: make([]uint32, long)})},
		"update: bucket":         {update(&pb.ShardUpdate{Sequence: 1, FullBuckets: []uint32{most32}})},
		"update: buckets, parts": repeat(10_000, update(&pb.ShardUpdate{Sequence: 1, FullBuckets: []uint32{1}, More: true})),
		"update: more":           repeat(10_000, update(&pb.ShardUpdate{Sequence: 1, Full: true, More: true})),
		"update: removed":        {update(&pb.ShardUpdate{Sequence: 1, Full: true, Removed: make([]*pb.ObjectKey, 100_000)})},
		"update: unreadable":     unreadableServices(t, 10, 10_000),
		"update: missing":        baseless(t, 10, 10_000),
		"service: namespace":     service(func(s *pb.Service) { s.Namespace = text }),
		"service: name":          service(func(s *pb.Service) { s.Name = text }),
		"service: no name":       service(func(s *pb.Service) { s.Name, s.Type = "", 99 }),
		"service: version":       service(func(s *pb.Service) { s.Version = []byte(text) }),
		"service: enums":         service(func(s *pb.Service) { s.Type, s.InternalTrafficPolicy = math.MaxInt32, math.MinInt32 }),
		"service: cluster IPs":   service(func(s *pb.Service) { s.ClusterIps = manyAddresses }),
		"service: external IPs":  service(func(s *pb.Service) { s.ExternalIps = manyAddresses }),
		"service: an address":    service(func(s *pb.Service) { s.ExternalIps = []string{text} }),
		"service: ingress":       service(func(s *pb.Service) { s.LoadBalancerIngress = make([]*pb.LoadBalancerIngress, 100_000) }),
		"service: ports":         service(func(s *pb.Service) { s.Ports = make([]*pb.ServicePort, 100_000) }),
		"service: a port": service(func(s *pb.Service) {
			s.Ports = []*pb.ServicePort{{Name: text, Protocol: 1, Port: most32, NodePort: most32}}
		}),
		"service: affinity":     service(func(s *pb.Service) { s.ClientIpAffinitySeconds = most32 }),
		"service: ranges":       service(func(s *pb.Service) { s.LoadBalancerSourceRanges = manyAddresses }),
		"service: health check": service(func(s *pb.Service) { s.HealthCheckNodePort = most32 }),
		"service: distribution": service(func(s *pb.Service) { s.TrafficDistribution = text }),
		"service: created":      service(func(s *pb.Service) { s.CreationTimeSeconds = math.MinInt64 }),
		"service: scheduler":    service(func(s *pb.Service) { s.IpvsScheduler = text }),
		"slice: service":        slice(func(s *pb.Slice) { s.Service = text }),
		"slice: ports":          slice(func(s *pb.Slice) { s.Ports = make([]*pb.SlicePort, 100_000) }),
		"slice: endpoints":      slice(func(s *pb.Slice) { s.Endpoints = make([]*pb.Endpoint, 100_000) }),
		"slice: time":           slice(func(s *pb.Slice) { s.LastChangeTriggerTimeMs = math.MinInt64 }),
		"slice: an endpoint": slice(func(s *pb.Slice) {
			s.Endpoints = []*pb.Endpoint{{Address: "10.0.0.1", NodeName: text, Zone: text, ZoneHints: make([]string, 100_000), NodeHints: []string{text}}}
		}),
		"delta": {update(&pb.ShardUpdate{FromSequence: 1, Sequence: 1, SliceDeltas: []*pb.SliceDelta{{
			Namespace: "rogue", Name: "a", Version: modeltest.Digests(1), LastChangeTriggerTimeMs: math.MaxInt64,
			Conditions: []*pb.EndpointConditions{{Index: most32}}, Removed: manyAddresses,
		}}})},
		"node: name":          node(func(u *pb.NodeUpdate) { u.Name = text }),
		"node: its name":      node(func(u *pb.NodeUpdate) { u.Node.Name = text }),
		"node: labels":        node(func(u *pb.NodeUpdate) { u.Node.Labels = labels }),
		"node: a label":       node(func(u *pb.NodeUpdate) { u.Node.Labels = map[string]string{text: text[1:]} }),
		"node: addresses":     node(func(u *pb.NodeUpdate) { u.Node.Addresses = manyAddresses }),
		"node: pod CIDRs":     node(func(u *pb.NodeUpdate) { u.Node.PodCidrs = manyAddresses }),
		"node: service CIDRs": node(func(u *pb.NodeUpdate) { u.Node.ServiceCidrs = manyAddresses }),
		"node: gone":          repeat(10_000, nodeUpdate("node-1", nil)),
		"zstd: a bomb":        {zipped(t, &pb.StreamResponse{Message: &pb.StreamResponse_Zstd{Zstd: make([]byte, wire.MaxFrame-64)}})},
		"zstd: objects": {zipped(t, update(&pb.ShardUpdate{Full: true, Sequence: 1, Slices: []*pb.Slice{
			{Namespace: "rogue", Name: "a", Service: "a", Endpoints: make([]*pb.Endpoint, 4<<20)}}}))},
		"a message that nobody knows": repeat(1000, wire.Frame(append([]byte{0xa2, 0x06, 100}, bytes.Repeat([]byte("x"), 100)...))),
		"status: message":             {status.Error(codes.Unavailable, text[:100_000])},
		"status: retry":               {hint(codes.Unavailable, math.MaxInt64)},
	}
}

// phases returns the messages that a server sends before an extreme, by the phase that the stream
// is then in.
func phases(epoch uint64, shards uint32) map[string][]any {
	begin := welcome(&pb.Welcome{Epoch: epoch, ShardCount: shards})
	other := welcome(&pb.Welcome{Epoch: epoch + 1, ShardCount: shards})
	sequences := make([]uint64, shards)
	for i := range sequences {
		sequences[i] = 1
	}
	return map[string][]any{
		"before welcome": nil,
		"before InSync":  {other},
		"in sync":        {other, inSync(sequences...)},
		"draining":       {begin, inSync(sequences...), drain(1)},
	}
}

// TestExtremesOfServers checks that an agent recovers from any message of a rogue server, in any
// phase of the stream. Within seconds, the agent must be in sync with the next server and hold that
// server's state. Its memory must stay bounded meanwhile.
func TestExtremesOfServers(t *testing.T) {
	id := newIdentity(t)
	s := filled(t, 20)
	for name, messages := range extremes(t, s.Epoch(), s.Shards()) {
		for phase, before := range phases(s.Epoch(), s.Shards()) {
			if testing.Short() && phase != "in sync" {
				continue
			}
			t.Run(name+", "+phase, func(t *testing.T) {
				// A client may arrive with positions that a rogue server has invented. Heartbeats
				// detect that. Each client has a server of its own, because a shared server would
				// limit how often its node starts.
				good := serveStore(t, id, s, 200*time.Millisecond)
				checkExtreme(t, id, good, func(c *Cache) bool { return holds(c, s) }, append(append([]any(nil), before...), messages...))
			})
		}
	}
}

// checkExtreme connects a client to a server that plays a script, and then to a good one.
func checkExtreme(t *testing.T, id identity, good *instance, holds func(*Cache) bool, script []any) {
	t.Helper()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	before := m.HeapAlloc
	var ended atomic.Bool
	rogue := &scripted{}
	rogue.play = func(g pb.DistributionService_StreamServer) error {
		defer ended.Store(true)
		if err := says(script...)(g); err != nil {
			return err
		}
		return status.Error(codes.Unavailable, "gone")
	}
	bad := serve(t, id, rogue, fanout.ServerOption())
	held := NewCache()
	c, stop := run(t, held, Options{
		NodeName: "node-1", DialOptions: id.client, Logger: slog.New(slog.DiscardHandler),
		Servers: func(context.Context) ([]Server, error) {
			if ended.Load() {
				return asServers(good.address), nil
			}
			return asServers(bad.address), nil
		},
	})
	most := patience
	begin := time.Now()
	peak := before
	for !c.InSync() || c.Connection().Server.Address != good.address || !holds(held) {
		runtime.ReadMemStats(&m)
		peak = max(peak, m.HeapAlloc)
		require.Less(t, time.Since(begin), most, "%v", c.Connection())
		<-time.After(10 * time.Millisecond)
	}
	// The measured heap includes the messages that this test's server keeps.
	require.Less(t, peak, before+400<<20)
	require.LessOrEqual(t, len(c.Connection().ServerName)+len(c.Connection().ServerVersion), 2*256)
	stop()
	bad.stop()
}

// TestDrainForWeeks checks that a client does not come back at once to a server that asked it to
// come back in seven weeks, even if it knows no other server. TestDrainsAreBounded and
// TestServersRestForMinutes check that it comes back within minutes.
func TestDrainForWeeks(t *testing.T) {
	id := newIdentity(t)
	server := &scripted{play: oneShard(1, drain(math.MaxUint32), status.Error(codes.Unavailable, "draining"))}
	c, stop := run(t, NewCache(), quiet(id, Options{Servers: Static(serve(t, id, server, fanout.ServerOption()).address)}))
	server.waitStreams(t, 1)
	require.Eventually(t, func() bool { return c.Connection().LastError != nil }, patience, tick)
	stop()
	require.Equal(t, 1, server.streams())
}
