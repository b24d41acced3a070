// These tests prove that decoding returns what was encoded, that objects that make no sense are
// left out and named, and that content of newer servers is recognized. They bound the size of a
// delta. The fuzz target proves that what decodes can be encoded again.
package wire

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/klauspost/compress/zstd"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

func TestUpdateRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		u := &model.Update{
			Shard: rapid.Uint32Range(0, 4095).Draw(t, "shard"),
			From:  rapid.Uint64Range(1, 5).Draw(t, "from"), To: rapid.Uint64Range(1, 5).Draw(t, "to"), FullBuckets: rapid.SliceOfN(rapid.Uint32Range(0, 63), 0, 3).Draw(t, "full buckets"),
			ResourceVersions: model.ResourceVersions{
				Services: rapid.Uint64().Draw(t, "version of Services"), Slices: rapid.Uint64().Draw(t, "version of slices"),
			},
		}
		for range rapid.IntRange(0, 3).Draw(t, "services") {
			u.Services = append(u.Services, modeltest.Service(t, modeltest.ServiceKey(t)))
		}
		for range rapid.IntRange(0, 3).Draw(t, "slices") {
			s := modeltest.Slice(t, modeltest.SliceKey(t))
			u.Slices = append(u.Slices, s)
			u.Removed = append(u.Removed, modeltest.SliceKey(t))
			if d := model.Diff(s, modeltest.Changed(t, s)); d != nil {
				u.Deltas = append(u.Deltas, d)
			}
		}
		if rapid.Bool().Draw(t, "a Service is removed") {
			u.Removed = append(u.Removed, model.Key{Kind: model.KindService, Namespace: "default", Name: "a"})
		}
		f, err := EncodeUpdate(u)
		require.NoError(t, err)
		r, err := Decode(f)
		require.NoError(t, err)
		require.Empty(t, r.Problems)
		require.False(t, r.More)
		for _, d := range u.Deltas {
			d.Service, d.Before = "", nil // these fields are not sent
		}
		require.Empty(t, modeltest.Diff(u, r.Update))

		again, err := EncodeUpdate(r.Update)
		require.NoError(t, err)
		require.Equal(t, f, again, "the same state has the same bytes")
	})
}

func TestNodeRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := modeltest.Node(t, "node-1")
		f, err := EncodeNode("n", n, 0)
		require.NoError(t, err)
		r, err := Decode(f)
		require.NoError(t, err)
		require.True(t, n.Equal(r.Node.Node))
		require.Equal(t, "n", r.Node.Name)
	})
	f, err := EncodeNode("n", nil, 0)
	require.NoError(t, err)
	r, err := Decode(f)
	require.NoError(t, err)
	require.NotNil(t, r.Node)
	require.Nil(t, r.Node.Node)

	f, err = Encode(&pb.StreamResponse{Message: &pb.StreamResponse_NodeUpdate{NodeUpdate: &pb.NodeUpdate{
		Node: &pb.Node{Name: "n", Addresses: []string{"no address"}},
	}}})
	require.NoError(t, err)
	r, err = Decode(f)
	require.NoError(t, err)
	require.Equal(t, &NodeUpdate{Name: "n", Unreadable: true}, r.Node, "what was known of the Node stays")
	require.Len(t, r.Problems, 1)
	require.Equal(t, model.Key{Kind: model.KindNode, Name: "n"}, r.Problems[0].Key)
	require.ErrorContains(t, r.Problems[0].Err, `node "n": addresses`)
}

func TestMessagesWithoutModel(t *testing.T) {
	for _, m := range []*pb.StreamResponse{
		{Message: &pb.StreamResponse_Welcome{Welcome: &pb.Welcome{Epoch: 1}}},
		{Message: &pb.StreamResponse_InSync{InSync: &pb.InSync{Sequences: []uint64{1}}}},
		{Message: &pb.StreamResponse_Heartbeat{Heartbeat: &pb.Heartbeat{Digest: modeltest.Digests(1)}}},
		{Message: &pb.StreamResponse_Drain{Drain: &pb.Drain{ReconnectWithinMs: 1}}},
		{Message: &pb.StreamResponse_Servers{Servers: &pb.Servers{Servers: []*pb.Server{{Address: "a:1"}}}}},
		{Message: &pb.StreamResponse_BucketQuery{BucketQuery: &pb.BucketQuery{Shards: []uint32{1}}}},
		{Message: &pb.StreamResponse_Digests{Digests: &pb.Digests{Digests: modeltest.Digests(1, 2)}}},
		{Message: &pb.StreamResponse_DigestQuery{DigestQuery: &pb.DigestQuery{}}},
	} {
		f, err := Encode(m)
		require.NoError(t, err)
		r, err := Decode(f)
		require.NoError(t, err)
		sent := m.ProtoReflect()
		want := sent.Get(sent.WhichOneof(sent.Descriptor().Oneofs().Get(0))).Message().Interface()
		found := 0
		for _, got := range []proto.Message{r.Welcome, r.InSync, r.Heartbeat, r.Drain, r.Servers, r.BucketQuery, r.Digests, r.DigestQuery} {
			if got.ProtoReflect().IsValid() {
				require.True(t, proto.Equal(want, got))
				found++
			}
		}
		require.Equal(t, 1, found)
	}
}

func compressed(t testing.TB, b []byte) Frame {
	t.Helper()
	w, err := zstd.NewWriter(nil)
	require.NoError(t, err)
	defer func() { require.NoError(t, w.Close()) }()
	f, err := Encode(&pb.StreamResponse{Message: &pb.StreamResponse_Zstd{Zstd: w.EncodeAll(b, nil)}})
	require.NoError(t, err)
	return f
}

func TestCompressedFrames(t *testing.T) {
	plain, err := EncodeUpdate(&model.Update{To: 1, Full: true, Slices: []*model.Slice{model.NewSlice(modeltest.WebSlice(100))}})
	require.NoError(t, err)
	want, err := Decode(plain)
	require.NoError(t, err)
	f := compressed(t, plain)
	t.Logf("%d bytes, %d compressed", len(plain), len(f))
	require.Less(t, len(f), len(plain)/5)
	got, err := Decode(f)
	require.NoError(t, err)
	require.Empty(t, modeltest.Diff(want.Update, got.Update))

	for says, bad := range map[string]Frame{
		"inside of":                 compressed(t, f),
		"decode a frame":            compressed(t, []byte("\xff\xff")),
		"decompressed size exceeds": compressed(t, make([]byte, MaxFrame+1)),
	} {
		_, err := Decode(bad)
		require.ErrorContains(t, err, says)
	}
	f[len(f)-1] ^= 1 // the last byte of the checksum
	for _, bad := range []Frame{f, Frame("\x4a\x03abc")} {
		_, err = Decode(bad)
		require.ErrorContains(t, err, "decompress a frame")
	}
}

// TestMessageOfANewerServerIsIgnored checks that messages which this version does not know are
// ignored, however large they are, and beside a message that it knows.
func TestMessageOfANewerServerIsIgnored(t *testing.T) {
	number := protowire.AppendVarint(protowire.AppendTag(nil, 5, protowire.VarintType), 1)
	for _, f := range []Frame{within(1000, []byte("new")), within(lastResponse+1, nil), number, within(1000, make([]byte, 2*maxSeveral))} {
		r, err := Decode(f)
		require.NoError(t, err)
		require.Equal(t, &Response{}, r)
		if len(f) < maxSeveral {
			r, err = Decode(append(f, within(4, nil)...))
			require.NoError(t, err)
			require.NotNil(t, r.InSync)
		}
	}
}

// TestFieldsOfANewerServerAreIgnored checks that an update keeps its meaning when it has fields of
// any kind that this version does not know.
func TestFieldsOfANewerServerAreIgnored(t *testing.T) {
	u := &model.Update{Shard: 1, From: 2, To: 3, Services: []*model.Service{modeltest.Web()}}
	f, err := EncodeUpdate(u)
	require.NoError(t, err)
	_, message, err := messageOf(f)
	require.NoError(t, err)
	for kind, value := range map[protowire.Type][]byte{
		protowire.VarintType: {1}, protowire.BytesType: {2, 9, 9}, protowire.Fixed32Type: make([]byte, 4), protowire.Fixed64Type: make([]byte, 8),
		protowire.StartGroupType: protowire.AppendTag([]byte{1 << 3, 7}, 1000, protowire.EndGroupType),
	} {
		newer := append(protowire.AppendTag(nil, 1000, kind), value...)
		r, err := Decode(within(responseShardUpdate, append(newer, message...)))
		require.NoError(t, err, kind)
		require.Empty(t, r.Problems)
		require.Empty(t, modeltest.Diff(u, r.Update), kind)
	}
}

func TestStringsThatAreNoUTF8AreNotEncoded(t *testing.T) {
	_, err := EncodeUpdate(&model.Update{Removed: []model.Key{{Kind: model.KindSlice, Name: "\xff"}}})
	require.ErrorContains(t, err, "encode")
}

// decoded returns an update as a client decodes it.
func decoded(t *testing.T, p *pb.ShardUpdate) (*model.Update, []Problem) {
	t.Helper()
	f, err := Encode(&pb.StreamResponse{Message: &pb.StreamResponse_ShardUpdate{ShardUpdate: p}})
	require.NoError(t, err)
	r, err := Decode(f)
	require.NoError(t, err)
	return r.Update, r.Problems
}

// TestBadObjectsAreLeftOut checks that an object that makes no sense is left out and named, and
// that the others stay.
func TestBadObjectsAreLeftOut(t *testing.T) {
	goodService := func() *pb.Service {
		return &pb.Service{Namespace: "default", Name: "bad", Version: modeltest.Digests(1), Type: pb.ServiceType_SERVICE_TYPE_CLUSTER_IP}
	}
	goodSlice := func() *pb.Slice {
		return &pb.Slice{Namespace: "default", Name: "bad", Version: modeltest.Digests(1), Service: "a", AddressType: pb.AddressType_ADDRESS_TYPE_IPV4}
	}
	goodDelta := func() *pb.SliceDelta {
		return &pb.SliceDelta{Namespace: "default", Name: "bad", Version: modeltest.Digests(2)}
	}

	for name, c := range map[string]struct {
		change func(u *pb.ShardUpdate)
		err    string
	}{
		"no version": {func(u *pb.ShardUpdate) { u.Services[1].Version = nil }, "no version"},
		"no type":    {func(u *pb.ShardUpdate) { u.Services[1].Type = 0 }, "type: unknown value 0"},
		"a type that would be another one in a byte": {func(u *pb.ShardUpdate) { u.Services[1].Type = 257 }, "type: unknown value 257"},
		"a policy that would be none in a byte": {func(u *pb.ShardUpdate) { u.Services[1].InternalTrafficPolicy = 256 },
			"internal_traffic_policy: unknown value 256"},
		"new type":   {func(u *pb.ShardUpdate) { u.Services[1].Type = 9 }, "type: unknown value 9"},
		"new policy": {func(u *pb.ShardUpdate) { u.Services[1].ExternalTrafficPolicy = 7 }, "external_traffic_policy: unknown value 7"},
		"cluster IP": {func(u *pb.ShardUpdate) { u.Services[1].ClusterIps = []string{"None"} }, `cluster_ips: "None" is not an address`},
		"an address with a zone": {func(u *pb.ShardUpdate) { u.Services[1].ExternalIps = []string{"fe80::1%eth0"} },
			"external_ips: fe80::1%eth0 is not a plain"},
		"a mapped address": {func(u *pb.ShardUpdate) { u.Services[1].ExternalIps = []string{"::ffff:10.0.0.1"} },
			"external_ips: ::ffff:10.0.0.1 is not a plain"},
		"ingress": {func(u *pb.ShardUpdate) { u.Services[1].LoadBalancerIngress = []*pb.LoadBalancerIngress{{}} }, "load_balancer_ingress"},
		"source range": {func(u *pb.ShardUpdate) { u.Services[1].LoadBalancerSourceRanges = []string{"10.0.0.0/33"} },
			`load_balancer_source_ranges: "10.0.0.0/33" is not a range of addresses`},
		"a mapped source range": {func(u *pb.ShardUpdate) { u.Services[1].LoadBalancerSourceRanges = []string{"::ffff:10.0.0.0/104"} },
			"load_balancer_source_ranges: ::ffff:10.0.0.0/104 is not a canonical"},
		"a source range with host bits": {func(u *pb.ShardUpdate) { u.Services[1].LoadBalancerSourceRanges = []string{"10.0.0.1/8"} },
			"load_balancer_source_ranges: 10.0.0.1/8 is not a canonical"},
		"health check": {func(u *pb.ShardUpdate) { u.Services[1].HealthCheckNodePort = 65536 }, "health_check_node_port: 65536"},
		"service port": {func(u *pb.ShardUpdate) { u.Services[1].Ports = []*pb.ServicePort{{Protocol: 1, Port: 1 << 20}} }, "port: 1048576"},
		"protocol":     {func(u *pb.ShardUpdate) { u.Services[1].Ports = []*pb.ServicePort{{Port: 1}} }, "protocol: unknown value 0"},

		"slice without version": {func(u *pb.ShardUpdate) { u.Slices[1].Version = make([]byte, model.HashSize) }, "no version"},
		"FQDN slice":            {func(u *pb.ShardUpdate) { u.Slices[1].AddressType = 3 }, "address_type: unknown value 3"},
		"slice port":            {func(u *pb.ShardUpdate) { u.Slices[1].Ports = []*pb.SlicePort{{Protocol: 4}} }, "protocol: unknown value 4"},
		"endpoint":              {func(u *pb.ShardUpdate) { u.Slices[1].Endpoints = []*pb.Endpoint{{}} }, "address"},
		"two bad endpoints": {func(u *pb.ShardUpdate) { u.Slices[1].Endpoints = []*pb.Endpoint{{Address: "x"}, {Address: "y"}} },
			`address: "x" is not an address`},
		"endpoint of the other family": {func(u *pb.ShardUpdate) { u.Slices[1].Endpoints = []*pb.Endpoint{{Address: "fd00::1"}} },
			"fd00::1 in a slice of IPv4"},

		"delta without version": {func(u *pb.ShardUpdate) { u.SliceDeltas[1].Version = []byte{1} }, "a version of 1 bytes"},
		"delta of endpoints":    {func(u *pb.ShardUpdate) { u.SliceDeltas[1].Endpoints = []*pb.Endpoint{{Address: "x"}} }, "address"},
		"delta of removals":     {func(u *pb.ShardUpdate) { u.SliceDeltas[1].Removed = []string{"x"} }, "removed"},

		"kind of removed":      {func(u *pb.ShardUpdate) { u.Removed[1].Kind = 0 }, "unknown kind"},
		"namespace of removed": {func(u *pb.ShardUpdate) { u.Removed[1].Namespace = "" }, "namespace"},

		// model.TestCanonicalService and the tests beside it cover the other ways in which an
		// object is not canonical.
		"namespace of a Service": {func(u *pb.ShardUpdate) { u.Services[1].Namespace = "a/b" }, "namespace"},
		"an external IP twice":   {func(u *pb.ShardUpdate) { u.Services[1].ExternalIps = []string{"192.0.2.1", "192.0.2.1"} }, "external_ips"},
		"a NodePort of a ClusterIP": {func(u *pb.ShardUpdate) {
			u.Services[1].Ports = []*pb.ServicePort{{Protocol: 1, Port: 1, NodePort: 1}}
		}, "ports.node_port"},
		"a port twice": {func(u *pb.ShardUpdate) {
			u.Services[1].Ports = []*pb.ServicePort{{Protocol: 1, Port: 1}, {Protocol: 1, Port: 1}}
		}, "ports"},
		"affinity":           {func(u *pb.ShardUpdate) { u.Services[1].ClientIpAffinitySeconds = 86401 }, "client_ip_affinity_seconds"},
		"a slice of nothing": {func(u *pb.ShardUpdate) { u.Slices[1].Service = "" }, "service"},
		"an endpoint twice": {func(u *pb.ShardUpdate) {
			u.Slices[1].Endpoints = []*pb.Endpoint{{Address: "10.0.0.1"}, {Address: "10.0.0.1", Ready: true}}
		}, "endpoints"},
		"the metadata service": {func(u *pb.ShardUpdate) { u.Slices[1].Endpoints = []*pb.Endpoint{{Address: "169.254.169.254"}} },
			"address: 169.254.169.254"},
		"delta with an endpoint twice": {func(u *pb.ShardUpdate) {
			u.SliceDeltas[1].Endpoints = []*pb.Endpoint{{Address: "10.0.0.1"}, {Address: "10.0.0.1"}}
		}, "endpoints"},
		"delta with an index twice": {func(u *pb.ShardUpdate) {
			u.SliceDeltas[1].Conditions = []*pb.EndpointConditions{{Index: 3}, {Index: 3, Ready: true}}
		}, "conditions"},
		"delta with a removal twice": {func(u *pb.ShardUpdate) { u.SliceDeltas[1].Removed = []string{"10.0.0.1", "10.0.0.1"} }, "removed"},
		"delta out of order":         {func(u *pb.ShardUpdate) { u.SliceDeltas[1].Removed = []string{"10.0.0.2", "10.0.0.1"} }, "removed"},
	} {
		t.Run(name, func(t *testing.T) {
			u := &pb.ShardUpdate{
				Shard: 3, Sequence: 9, Full: true,
				Services:    []*pb.Service{goodService(), goodService(), goodService()},
				Slices:      []*pb.Slice{goodSlice(), goodSlice(), goodSlice()},
				SliceDeltas: []*pb.SliceDelta{goodDelta(), goodDelta(), goodDelta()},
				Removed: []*pb.ObjectKey{
					{Kind: 1, Namespace: "default", Name: "bad"}, {Kind: 2, Namespace: "default", Name: "bad"}, {Kind: 1, Namespace: "other", Name: "bad"},
				},
			}
			c.change(u)
			m, problems := decoded(t, u)
			require.Equal(t, 12-1, m.Len())
			require.Len(t, problems, 1)
			require.ErrorContains(t, problems[0].Err, c.err)
			require.Equal(t, "bad", problems[0].Key.Name)
			require.Len(t, m.Unreadable, 1)
			require.Equal(t, problems[0].Key, m.Unreadable[0].Key)
			require.Equal(t, strings.HasPrefix(name, "delta "), m.Unreadable[0].Delta)
			require.EqualValues(t, 3, m.Shard)
			require.True(t, m.Full)
		})
	}

	_, problems := decoded(t, &pb.ShardUpdate{
		Services: []*pb.Service{{Version: modeltest.Digests(1), Type: 1}}, Slices: []*pb.Slice{{Version: modeltest.Digests(1), AddressType: 1}},
		SliceDeltas: []*pb.SliceDelta{{Version: modeltest.Digests(1)}}, Removed: []*pb.ObjectKey{{Kind: 1}},
	})
	require.Len(t, problems, 4, "objects without a name")
}

// TestBadNodes checks that a Node that is not canonical is left out and named.
func TestBadNodes(t *testing.T) {
	for name, n := range map[string]*pb.Node{
		"address twice":  {Name: "n", Addresses: []string{"10.0.0.1", "10.0.0.1"}},
		"no address":     {Name: "n", Addresses: []string{"n"}},
		"pod CIDR":       {Name: "n", PodCidrs: []string{"10.0.0.1/8"}},
		"service CIDRs":  {Name: "n", ServiceCidrs: []string{"10.0.0.0/16", "10.0.0.0/16"}},
		"label":          {Name: "n", Labels: map[string]string{"a": "b c"}},
		"name":           {Name: "N"},
		"name and space": {Name: "n "},
	} {
		f, err := Encode(&pb.StreamResponse{Message: &pb.StreamResponse_NodeUpdate{NodeUpdate: &pb.NodeUpdate{Name: n.GetName(), Node: n}}})
		require.NoError(t, err)
		r, err := Decode(f)
		require.NoError(t, err)
		require.Len(t, r.Problems, 1, name)
		require.True(t, r.Node.Unreadable, name)
		require.Nil(t, r.Node.Node, name)
		require.Equal(t, n.GetName(), r.Node.Name)
	}
}

// TestSizeOfADelta checks that a change of one endpoint costs a node a frame of at most 200 bytes,
// however large the slice is.
func TestSizeOfADelta(t *testing.T) {
	for name, c := range map[string]struct {
		limit  int
		change func(s *model.Slice)
	}{
		"an endpoint's readiness flips": {200, func(s *model.Slice) { s.Endpoints[40].Conditions.Ready = false }},
		"an endpoint is replaced":       {200, func(s *model.Slice) { s.Endpoints[40] = modeltest.WebEndpoint(140) }},
	} {
		t.Run(name, func(t *testing.T) {
			before, after := modeltest.WebSlice(100), modeltest.WebSlice(100)
			c.change(&after)
			after.LastChangeTriggerTimeMS += 60_000
			now := model.NewSlice(after)
			d := model.Diff(model.NewSlice(before), now)
			// These are the numbers of a large cluster that has run for a long time.
			u := &model.Update{Shard: 63, From: 3_000_000, To: 3_000_001, ResourceVersions: model.ResourceVersions{Slices: 4_000_000_000}, Deltas: []*model.SliceDelta{d}}
			f, err := EncodeUpdate(u)
			require.NoError(t, err)
			whole, err := EncodeUpdate(&model.Update{Slices: []*model.Slice{now}})
			require.NoError(t, err)
			t.Logf("the delta has %d bytes, the slice %d", len(f), len(whole))
			require.LessOrEqual(t, len(f), c.limit)
		})
	}
}

// bothWays checks that decodeDeltas returns the same as the general decoder if it returns anything,
// and that it decodes what is only deltas without new endpoints. It reports whether it did.
func bothWays(t require.TestingT, message []byte) bool {
	general, err := decodeUpdate(message)
	fast := decodeDeltas(message)
	if err != nil {
		require.Nil(t, fast)
		return false
	}
	u := general.Update
	only := len(u.Deltas) > 0 && len(u.Deltas) == u.Len() && len(general.Problems) == 0 && !u.Full && !general.More && u.FullBuckets == nil
	for _, d := range u.Deltas {
		only = only && len(d.Endpoints) == 0
	}
	require.Equal(t, only, fast != nil)
	if only {
		require.Equal(t, general, fast)
	}
	return only
}

// TestDeltas checks that decodeDeltas returns the same as the general decoder. decodeDeltas must
// decode the frames it is meant for, and no frame that is cut off or holds anything else.
func TestDeltas(t *testing.T) {
	decoded := 0
	rapid.Check(t, func(t *rapid.T) {
		u := &model.Update{
			Shard: rapid.Uint32Max(63).Draw(t, "shard"), To: rapid.Uint64Range(1, 1<<40).Draw(t, "to"),
			ResourceVersions: model.ResourceVersions{Services: rapid.Uint64().Draw(t, "services"), Slices: rapid.Uint64().Draw(t, "slices")},
		}
		u.From = u.To - rapid.Uint64Range(1, min(u.To, 3)).Draw(t, "count")
		for range rapid.IntRange(1, 3).Draw(t, "deltas") {
			// Most deltas are canonical, so that many frames are those that decodeDeltas is for.
			d := &model.SliceDelta{Namespace: "default", Name: "a.b", Version: model.Version{1}, LastChangeTriggerTimeMS: rapid.Int64().Draw(t, "time")}
			index, address := rapid.Uint32Max(3), rapid.ByteMax(3)
			if rapid.IntRange(0, 7).Draw(t, "odd") == 0 {
				d.Namespace, d.Name = rapid.StringMatching("[ab]{0,2}").Draw(t, "namespace"), rapid.StringN(0, 4, -1).Draw(t, "name")
				d.Version = model.Version{rapid.ByteMax(2).Draw(t, "version")}
				index, address = rapid.Uint32(), rapid.Byte()
			}
			for range rapid.IntRange(0, 3).Draw(t, "conditions") {
				d.Conditions = append(d.Conditions, model.EndpointConditions{Index: index.Draw(t, "index"), Conditions: model.Conditions{
					Ready: rapid.Bool().Draw(t, "ready"), Serving: rapid.Bool().Draw(t, "serving"), Terminating: rapid.Bool().Draw(t, "terminating"),
				}})
			}
			for range rapid.IntRange(0, 2).Draw(t, "removed") {
				d.Removed = append(d.Removed, netip.AddrFrom4([4]byte{10, address.Draw(t, "address")}))
			}
			if rapid.IntRange(0, 7).Draw(t, "unsorted") > 0 {
				slices.SortFunc(d.Conditions, func(a, b model.EndpointConditions) int { return cmp.Compare(a.Index, b.Index) })
				d.Conditions = slices.CompactFunc(d.Conditions, func(a, b model.EndpointConditions) bool { return a.Index == b.Index })
				slices.SortFunc(d.Removed, netip.Addr.Compare)
				d.Removed = slices.Compact(d.Removed)
			}
			u.Deltas = append(u.Deltas, d)
		}
		f, err := EncodeUpdate(u)
		require.NoError(t, err)
		_, message, err := messageOf(f)
		require.NoError(t, err)
		if bothWays(t, message) {
			decoded++
		}
		for i := range message {
			bothWays(t, message[:i])
		}
		u.Removed = []model.Key{{Kind: model.KindSlice, Name: "gone"}}
		f, err = EncodeUpdate(u)
		require.NoError(t, err)
		_, message, err = messageOf(f)
		require.NoError(t, err)
		require.Nil(t, decodeDeltas(message))
	})
	require.Greater(t, decoded, 30, "hardly any frame was one that decodeDeltas is for")
}

// TestDeltasWithOtherContent checks that decodeDeltas leaves whatever it would decode wrongly to
// the general decoder.
func TestDeltasWithOtherContent(t *testing.T) {
	number := func(n protowire.Number) []byte {
		return protowire.AppendVarint(protowire.AppendTag(nil, n, protowire.VarintType), 1)
	}
	version := within(3, modeltest.Digests(1))
	named := slices.Concat(within(1, []byte("default")), within(2, []byte("web")))
	good := slices.Concat(named, version)
	large := within(updateDeltas, append(repeated(3, string(modeltest.Digests(1)), 2*MaxPart/3), named...))
	require.NotNil(t, decodeDeltas(within(updateDeltas, good)))
	require.NotNil(t, decodeDeltas(large))
	for name, message := range map[string][]byte{
		"nothing":                  nil,
		"no delta":                 number(1),
		"no version":               within(updateDeltas, named),
		"a version of one byte":    within(updateDeltas, append(within(3, []byte{1}), good...)),
		"no address":               within(updateDeltas, append(within(6, []byte("x")), good...)),
		"an endpoint":              within(updateDeltas, append(within(deltaEndpoints, within(1, []byte("10.0.0.1"))), good...)),
		"a newer field":            append(within(updateDeltas, good), number(1000)...),
		"a newer field of a delta": within(updateDeltas, append(number(1000), good...)),
		"a newer condition":        within(updateDeltas, append(within(5, number(1000)), good...)),
		"more to follow":           append(within(updateDeltas, good), number(10)...),
		"the whole shard":          append(within(updateDeltas, good), number(4)...),
		"a bad one before a good":  append(within(updateDeltas, named), within(updateDeltas, good)...),
		"two that are too large":   append(large, large...),
	} {
		require.Nil(t, decodeDeltas(message), name)
	}
}

// TestFromOfAnUpdate checks which sequence a client must be at for an update that names none.
func TestFromOfAnUpdate(t *testing.T) {
	delta := &pb.SliceDelta{Namespace: "default", Name: "web", Version: modeltest.Digests(1)}
	for _, c := range []struct {
		from, to, want uint64
		full           bool
	}{{0, 7, 6, false}, {3, 7, 3, false}, {0, 1, 0, false}, {0, 0, 0, false}, {0, 7, 0, true}} {
		for _, deltas := range [][]*pb.SliceDelta{nil, {delta}} {
			u, problems := decoded(t, &pb.ShardUpdate{FromSequence: c.from, Sequence: c.to, Full: c.full, SliceDeltas: deltas})
			require.Empty(t, problems)
			require.Equal(t, c.want, u.From, c)
		}
	}
}

// TestCommonStringsAreShared checks that objects of different frames share the strings that many
// objects have in common. A large cluster's state would otherwise take several times the memory.
func TestCommonStringsAreShared(t *testing.T) {
	shared := func() (out []*byte) {
		s, svc := modeltest.WebSlice(1), *modeltest.Web()
		s.Endpoints[0].NodeName, s.Endpoints[0].Zone = "a-node", "a-zone"
		s.Endpoints[0].NodeHints, s.Endpoints[0].ZoneHints = []string{"a-hinted-node"}, []string{"a-hinted-zone"}
		svc.TrafficDistribution = "PreferSameZone"
		f, err := EncodeUpdate(&model.Update{Services: []*model.Service{model.NewService(svc)}, Slices: []*model.Slice{model.NewSlice(s)}})
		require.NoError(t, err)
		r, err := Decode(f)
		require.NoError(t, err)
		require.Empty(t, r.Problems)
		got, e := r.Update.Services[0], r.Update.Slices[0].Endpoints[0]
		for _, text := range []string{
			got.Namespace, got.TrafficDistribution, got.Ports[0].Name, r.Update.Slices[0].Namespace, r.Update.Slices[0].Ports[0].Name,
			e.NodeName, e.Zone, e.NodeHints[0], e.ZoneHints[0],
		} {
			require.NotEmpty(t, text)
			out = append(out, unsafe.StringData(text))
		}
		return out
	}
	first, second := shared(), shared()
	for i := range first {
		require.Same(t, first[i], second[i], i)
	}
}

// FuzzDecode checks that Decode returns either an error or a Response that can be encoded again.
func FuzzDecode(f *testing.F) {
	s := model.NewSlice(modeltest.WebSlice(3))
	flipped := modeltest.WebSlice(3)
	flipped.Endpoints[1].Conditions.Ready = false
	for _, u := range []*model.Update{
		{Shard: 1, To: 2, Full: true, Services: []*model.Service{modeltest.Web()}, Slices: []*model.Slice{s}},
		{Shard: 1, From: 2, To: 3, Deltas: []*model.SliceDelta{model.Diff(s, model.NewSlice(flipped))}, Removed: []model.Key{s.Key()}},
		{Shard: 1, From: 2, To: 3, Deltas: []*model.SliceDelta{model.Diff(s, model.NewSlice(flipped))}, ResourceVersions: model.ResourceVersions{Slices: 7}},
	} {
		frame, err := EncodeUpdate(u)
		require.NoError(f, err)
		f.Add([]byte(frame))
		f.Add([]byte(frame[:len(frame)/2]))
	}
	node, err := EncodeNode("n", &model.Node{Name: "n", Labels: map[string]string{"a": "b"}}, 0)
	require.NoError(f, err)
	f.Add([]byte(node))
	f.Add([]byte(compressed(f, node)))
	f.Add([]byte{})
	f.Fuzz(checkDecode)
}

func checkDecode(t *testing.T, data []byte) {
	r, err := Decode(data)
	if err != nil {
		return
	}
	if _, message, err := messageOf(data); err == nil {
		if fast := decodeDeltas(message); fast != nil {
			general, err := decodeUpdate(message)
			require.NoError(t, err)
			require.Equal(t, general, fast)
		}
	}
	if r.Node != nil {
		if r.Node.Node != nil {
			require.NoError(t, r.Node.Node.Check())
		}
		_, err = EncodeNode("n", r.Node.Node, 0)
		require.NoError(t, err)
	}
	if r.Update == nil {
		return
	}
	checkCanonical(t, r.Update)
	require.Len(t, r.Update.Unreadable, len(r.Problems))
	frame, err := EncodeUpdate(r.Update)
	require.NoError(t, err)
	again, err := Decode(frame)
	require.NoError(t, err)
	require.Empty(t, again.Problems, "what was readable stays so")
	// An encoder sends what it knows, with the version of that.
	r.Update.Unreadable, r.Update.Unverified = nil, nil
	if r.Update.Full { // a full Update has no From
		again.Update.From = r.Update.From
	}
	require.Empty(t, modeltest.Diff(r.Update, again.Update))
}

// checkCanonical checks that all objects of an update are canonical, so that constructing them
// again changes nothing.
func checkCanonical(t *testing.T, u *model.Update) {
	for _, s := range u.Services {
		require.NoError(t, s.Check())
		require.Empty(t, modeltest.Diff(s, model.NewService(*s)))
	}
	for _, s := range u.Slices {
		require.NoError(t, s.Check())
		require.Len(t, model.NewSlice(*s).Endpoints, len(s.Endpoints))
	}
	for _, d := range u.Deltas {
		require.NoError(t, d.Check())
	}
	for _, k := range u.Removed {
		require.NoError(t, k.Check())
	}
}

func BenchmarkEncodeDelta(b *testing.B) {
	flipped := modeltest.WebSlice(100)
	flipped.Endpoints[40].Conditions.Ready = false
	d := model.Diff(model.NewSlice(modeltest.WebSlice(100)), model.NewSlice(flipped))
	u := &model.Update{Shard: 63, From: 3_000_000, To: 3_000_001, Deltas: []*model.SliceDelta{d}}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := EncodeUpdate(u); err != nil {
			b.Fatal(err)
		}
	}
}

// TestUnknownFieldsAreFound checks that fields of newer versions are found in messages of any
// shape.
func TestUnknownFieldsAreFound(t *testing.T) {
	unknown := protowire.AppendVarint(protowire.AppendTag(nil, 1000, protowire.VarintType), 1)
	node := &pb.NodeUpdate{Name: "n", Node: &pb.Node{Name: "n", Labels: map[string]string{"a": "b"}}}
	require.False(t, hasUnknown(node.ProtoReflect()))
	node.GetNode().ProtoReflect().SetUnknown(unknown)
	require.True(t, hasUnknown(node.ProtoReflect()))
	slice := &pb.Slice{Endpoints: []*pb.Endpoint{{}, {}}, Ports: []*pb.SlicePort{{}}}
	require.False(t, hasUnknown(slice.ProtoReflect()))
	slice.GetEndpoints()[0].ProtoReflect().SetUnknown(unknown)
	require.True(t, hasUnknown(slice.ProtoReflect()))
}

// TestUnverifiedObjects checks that the version of a decoded object is the hash of its content,
// whatever version was sent with it. Only an object with fields that this version does not know, at
// any depth, is reported with the version that it was sent with.
func TestUnverifiedObjects(t *testing.T) {
	unknown := protowire.AppendVarint(protowire.AppendTag(nil, 1000, protowire.VarintType), 1)
	service, slice := modeltest.Web(), model.NewSlice(modeltest.WebSlice(3))
	claimed := model.Version{7}
	both := []model.Unverified{{Key: service.Key(), Version: claimed}, {Key: slice.Key(), Version: claimed}}
	for name, c := range map[string]struct {
		change func(*pb.Service, *pb.Slice)
		claims bool
		want   []model.Unverified
	}{
		"their own versions":                     {func(*pb.Service, *pb.Slice) {}, false, nil},
		"other versions":                         {func(*pb.Service, *pb.Slice) {}, true, nil},
		"their own versions, and unknown fields": {addUnknown(unknown), false, nil},
		"other versions, and unknown fields":     {addUnknown(unknown), true, both},
		"other versions, and unknown fields of a part": {func(s *pb.Service, e *pb.Slice) {
			s.GetPorts()[0].ProtoReflect().SetUnknown(unknown)
			e.GetEndpoints()[2].ProtoReflect().SetUnknown(unknown)
		}, true, both},
	} {
		p := UpdateToProto(&model.Update{Services: []*model.Service{service}, Slices: []*model.Slice{slice}})
		c.change(p.GetServices()[0], p.GetSlices()[0])
		if c.claims {
			p.Services[0].Version, p.Slices[0].Version = claimed[:], claimed[:]
		}
		b, err := proto.Marshal(&pb.StreamResponse{Message: &pb.StreamResponse_ShardUpdate{ShardUpdate: p}})
		require.NoError(t, err)
		r, err := Decode(b)
		require.NoError(t, err)
		require.Empty(t, r.Problems)
		require.Equal(t, service.ContentVersion(), r.Update.Services[0].ContentVersion(), name)
		require.Equal(t, slice.ContentVersion(), r.Update.Slices[0].ContentVersion(), name)
		require.Equal(t, c.want, r.Update.Unverified, name)
	}
}

func addUnknown(unknown []byte) func(*pb.Service, *pb.Slice) {
	return func(s *pb.Service, e *pb.Slice) {
		s.ProtoReflect().SetUnknown(unknown)
		e.ProtoReflect().SetUnknown(unknown)
	}
}
