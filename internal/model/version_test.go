// These tests prove that versions and digests depend on all content that nodes use, and on neither
// order nor duplicates. They hold the values that are part of the wire API, which no release may
// change.
package model_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/cespare/xxhash/v2"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
)

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

func shuffled[T any](t *rapid.T, list []T) []T {
	out := slices.Clone(list)
	r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "order"), 0))
	r.Shuffle(len(out), func(i, j int) { out[i], out[j] = out[j], out[i] })
	return out
}

func TestServiceVersionIgnoresOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := modeltest.Service(t, model.ServiceKey{Namespace: "default", Name: "a"})
		o := *s
		o.ClusterIPs, o.ExternalIPs = shuffled(t, s.ClusterIPs), shuffled(t, s.ExternalIPs)
		o.LoadBalancerIngress = shuffled(t, s.LoadBalancerIngress)
		o.LoadBalancerSourceRanges = shuffled(t, s.LoadBalancerSourceRanges)
		o.Ports = shuffled(t, s.Ports)
		require.Equal(t, s, model.NewService(o))
	})
}

func TestSliceVersionIgnoresOrderAndDuplicates(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := modeltest.Slice(t, model.Key{Kind: model.KindSlice, Namespace: "default", Name: "s1"})
		o := *s
		o.Ports = shuffled(t, s.Ports)
		o.Endpoints = slices.Clone(s.Endpoints)
		for i := range o.Endpoints {
			o.Endpoints[i].ZoneHints = shuffled(t, s.Endpoints[i].ZoneHints)
			o.Endpoints[i].NodeHints = shuffled(t, s.Endpoints[i].NodeHints)
			if rapid.Bool().Draw(t, "again") {
				o.Endpoints = append(o.Endpoints, s.Endpoints[i])
			}
		}
		o.Endpoints = shuffled(t, o.Endpoints)
		n := model.NewSlice(o)
		require.Equal(t, s.Endpoints, n.Endpoints)
		require.Equal(t, s.ContentVersion(), n.ContentVersion())
	})
}

func TestNewSliceKeepsBestEndpointOfAnAddress(t *testing.T) {
	conditions := func(ready, terminating, serving bool) model.Conditions {
		return model.Conditions{Ready: ready, Terminating: terminating, Serving: serving}
	}
	// The best conditions come first.
	order := []model.Conditions{
		conditions(true, false, true), conditions(false, false, true), conditions(false, false, false),
		conditions(true, true, true), conditions(false, true, true), conditions(false, true, false),
	}
	for i, better := range order {
		for _, worse := range order[i:] {
			s := model.NewSlice(model.Slice{Name: "s", Service: "a", Family: model.IPv4, Endpoints: []model.Endpoint{
				{Address: addr("10.0.0.1"), Conditions: worse}, {Address: addr("10.0.0.1"), Conditions: better},
			}})
			require.Equal(t, []model.Endpoint{{Address: addr("10.0.0.1"), Conditions: better}}, s.Endpoints)
		}
	}
}

// TestVersionCoversEveryField checks that the version covers every field that a node uses.
// Otherwise a change of that field would never be sent.
func TestVersionCoversEveryField(t *testing.T) {
	service := func(change func(*model.Service)) model.Version {
		s := model.Service{
			Namespace: "default", Name: "a", Type: model.ClusterIP, ClusterIPs: []netip.Addr{addr("10.96.0.1")},
			Ports: []model.ServicePort{{Name: "http", Protocol: model.TCP, Port: 80}},
		}
		change(&s)
		return model.NewService(s).ContentVersion()
	}
	services := map[string]model.Version{}
	for name, change := range map[string]func(s *model.Service){
		"as it is":        func(*model.Service) {},
		"namespace":       func(s *model.Service) { s.Namespace = "other" },
		"name":            func(s *model.Service) { s.Name = "b" },
		"type":            func(s *model.Service) { s.Type = model.LoadBalancer },
		"cluster IP":      func(s *model.Service) { s.ClusterIPs = append(s.ClusterIPs, addr("fd00::1")) },
		"external IP":     func(s *model.Service) { s.ExternalIPs = append(s.ExternalIPs, addr("fd00::1")) },
		"ingress":         func(s *model.Service) { s.LoadBalancerIngress = []model.LoadBalancerIngress{{IP: addr("fd00::1")}} },
		"ingress mode":    func(s *model.Service) { s.LoadBalancerIngress = []model.LoadBalancerIngress{{addr("fd00::1"), true}} },
		"port name":       func(s *model.Service) { s.Ports[0].Name = "" },
		"port protocol":   func(s *model.Service) { s.Ports[0].Protocol = model.UDP },
		"port":            func(s *model.Service) { s.Ports[0].Port = 81 },
		"node port":       func(s *model.Service) { s.Ports[0].NodePort = 30080 },
		"more ports":      func(s *model.Service) { s.Ports = append(s.Ports, model.ServicePort{Protocol: model.TCP, Port: 80}) },
		"internal policy": func(s *model.Service) { s.InternalTrafficPolicy = model.TrafficLocal },
		"external policy": func(s *model.Service) { s.ExternalTrafficPolicy = model.TrafficLocal },
		"affinity":        func(s *model.Service) { s.ClientIPAffinitySeconds = 1 },
		"source range": func(s *model.Service) {
			s.LoadBalancerSourceRanges = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}
		},
		"its length": func(s *model.Service) {
			s.LoadBalancerSourceRanges = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/9")}
		},
		"everybody": func(s *model.Service) {
			s.LoadBalancerSourceRanges = []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0")}
		},
		"health check":     func(s *model.Service) { s.HealthCheckNodePort = 1 },
		"distribution":     func(s *model.Service) { s.TrafficDistribution = "PreferClose" },
		"time of creation": func(s *model.Service) { s.CreationTimeSeconds = 1 },
		"scheduler":        func(s *model.Service) { s.IPVSScheduler = "lc" },
	} {
		v := service(change)
		for other, o := range services {
			require.NotEqual(t, o, v, "%s and %s", name, other)
		}
		services[name] = v
	}
	require.Equal(t, services["as it is"], service(func(s *model.Service) { s.InternalTrafficPolicy = model.TrafficCluster }),
		"no policy means Cluster")

	slice := func(change func(*model.Slice)) model.Version {
		s := model.Slice{
			Namespace: "default", Name: "s", Service: "a", Family: model.IPv4,
			Ports:     []model.SlicePort{{Name: "http", Protocol: model.TCP, Port: 80}},
			Endpoints: []model.Endpoint{{Address: addr("10.0.0.1")}},
		}
		change(&s)
		return model.NewSlice(s).ContentVersion()
	}
	versions := map[string]model.Version{}
	for name, change := range map[string]func(s *model.Slice){
		"as it is":      func(*model.Slice) {},
		"namespace":     func(s *model.Slice) { s.Namespace = "other" },
		"name":          func(s *model.Slice) { s.Name = "t" },
		"service":       func(s *model.Slice) { s.Service = "b" },
		"family":        func(s *model.Slice) { s.Family = model.IPv6 },
		"port name":     func(s *model.Slice) { s.Ports[0].Name = "" },
		"port protocol": func(s *model.Slice) { s.Ports[0].Protocol = model.UDP },
		"port":          func(s *model.Slice) { s.Ports[0].Port = 81 },
		"address":       func(s *model.Slice) { s.Endpoints[0].Address = addr("10.0.0.2") },
		"ready":         func(s *model.Slice) { s.Endpoints[0].Conditions.Ready = true },
		"serving":       func(s *model.Slice) { s.Endpoints[0].Conditions.Serving = true },
		"terminating":   func(s *model.Slice) { s.Endpoints[0].Conditions.Terminating = true },
		"node":          func(s *model.Slice) { s.Endpoints[0].NodeName = "x" },
		"zone":          func(s *model.Slice) { s.Endpoints[0].Zone = "x" },
		"zone hint":     func(s *model.Slice) { s.Endpoints[0].ZoneHints = []string{"x"} },
		"node hint":     func(s *model.Slice) { s.Endpoints[0].NodeHints = []string{"x"} },
		"no endpoint":   func(s *model.Slice) { s.Endpoints = nil },
		"two endpoints": func(s *model.Slice) { s.Endpoints = append(s.Endpoints, model.Endpoint{Address: addr("10.0.0.2")}) },
	} {
		v := slice(change)
		for other, o := range versions {
			require.NotEqual(t, o, v, "%s and %s", name, other)
		}
		versions[name] = v
	}
	require.Equal(t, versions["as it is"], slice(func(s *model.Slice) { s.LastChangeTriggerTimeMS = 1 }), "the version covers the time")
}

// TestVersionsOfAllReleases compares versions with fixed values. Servers and nodes of different
// releases compare versions. The encoding that a version is a hash of is therefore part of the wire
// API, and these values must never change.
func TestVersionsOfAllReleases(t *testing.T) {
	service := modeltest.Web()
	require.Equal(t, "2c6f1d82c77f088ba40782cdee125ce266e142c4ad96895f0e", service.ContentVersion().String())
	slice := model.NewSlice(modeltest.WebSlice(3))
	require.Equal(t, "e448a3a20c04bd49dce85327fd7a583e2ddcf7ca60b0fe8224", slice.ContentVersion().String())
	require.EqualValues(t, 0x5a7, service.ServiceKey().Shard(4096))
	// Hashes treat keys of 32 bytes or more differently.
	require.EqualValues(t, 0xbc4, model.ServiceKey{Namespace: "kube-system", Name: "metrics-server-of-the-cluster"}.Shard(4096))

	// These have a value in every field.
	full := model.NewService(model.Service{
		Namespace: "default", Name: "full", Type: model.LoadBalancer, ClusterIPs: addrs("10.96.0.1", "fd00::1"), ExternalIPs: addrs("192.0.2.1"),
		LoadBalancerIngress:   []model.LoadBalancerIngress{{IP: addr("192.0.2.2")}, {IP: addr("2001:db8::2"), ProxyMode: true}},
		Ports:                 []model.ServicePort{{Name: "dns", Protocol: model.UDP, Port: 53, NodePort: 30053}, {Name: "sig", Protocol: model.SCTP, Port: 9}},
		InternalTrafficPolicy: model.TrafficLocal, ExternalTrafficPolicy: model.TrafficLocal, ClientIPAffinitySeconds: 10800,
		LoadBalancerSourceRanges: []netip.Prefix{prefix("0.0.0.0/0"), prefix("10.0.0.0/8"), prefix("2001:db8::/32")}, HealthCheckNodePort: 30099,
		TrafficDistribution: "PreferSameZone", CreationTimeSeconds: 1_754_000_000, IPVSScheduler: "lc",
	})
	require.Equal(t, "283ed38e620d999dd11910677c2d43721be9b8df650e535273", full.ContentVersion().String())
	many := modeltest.WebSlice(40)
	many.Endpoints[20].Conditions.Terminating, many.Endpoints[20].ZoneHints, many.Endpoints[20].NodeHints = true, []string{"a", "b"}, []string{"n"}
	require.Equal(t, "19e3d1f1f9fa0dfabc8c58ac6870bc3fba043856f4ddc43d3b", model.NewSlice(many).ContentVersion().String())
	node := &model.Node{
		Name: "node-1", Labels: map[string]string{"zone": "a", "arch": "arm64"}, Addresses: addrs("10.0.0.1"), Deleting: true, TaintedForDeletion: true,
		PodCIDRs: []netip.Prefix{prefix("10.180.0.0/24")}, ServiceCIDRs: []netip.Prefix{prefix("10.96.0.0/16"), prefix("fd00::/108")},
	}
	require.Equal(t, "da42b936f608e91421a7c2717ea5f99ae711b6d43384928980", node.ContentVersion().String())

	shard := modeltest.ShardDigest(full, slice)
	require.Equal(t, "c55e4b85dab500c415023fb0126ca011e480fdce42daf91d19", shard.String())
	require.Equal(t, "7736402681e6c15bc624ee918f4cb257bee2aa72dc6db4d128", model.StateDigest([]model.Digest{shard, {}}).String())
	require.Equal(t, "105d8f307d45cd4ec927402b687b50e4e0fd82f3b7ece6da2e", model.NodesDigest([]*model.Node{node}).String())
}

// TestListsHaveNoDuplicates checks that an object that names something twice is the same as one
// that names it once.
func TestListsHaveNoDuplicates(t *testing.T) {
	service := func(times int) *model.Service {
		return model.NewService(model.Service{
			Namespace: "default", Name: "a", Type: model.LoadBalancer, ClusterIPs: slices.Repeat(addrs("10.96.0.1"), times),
			ExternalIPs: slices.Repeat(addrs("192.0.2.1"), times), LoadBalancerIngress: slices.Repeat(ingress(addr("192.0.2.2")), times),
			LoadBalancerSourceRanges: slices.Repeat(ranges(1), times), Ports: slices.Repeat([]model.ServicePort{{Protocol: model.TCP, Port: 80}}, times),
		})
	}
	require.Equal(t, service(1), service(2))
	slice := func(times int) *model.Slice {
		s := modeltest.WebSlice(1)
		s.Ports = slices.Repeat(s.Ports, times)
		s.Endpoints[0].ZoneHints, s.Endpoints[0].NodeHints = slices.Repeat([]string{"a"}, times), slices.Repeat([]string{"n"}, times)
		return model.NewSlice(s)
	}
	require.Equal(t, slice(1), slice(2))
}

// TestDigestsDistinguishStates checks that digests reflect which slice an endpoint is in, but not
// the order of objects.
func TestDigestsDistinguishStates(t *testing.T) {
	slice := func(name string, endpoints ...string) *model.Slice {
		s := model.Slice{Namespace: "default", Name: name, Service: "a", Family: model.IPv4}
		for _, e := range endpoints {
			s.Endpoints = append(s.Endpoints, model.Endpoint{Address: addr(e)})
		}
		return model.NewSlice(s)
	}
	shard := modeltest.ShardDigest
	states := [][]model.Object{
		{},
		{slice("s1")},
		{slice("s1"), slice("s2")},
		{slice("s1", "10.0.0.1", "10.0.0.2"), slice("s2", "10.0.0.3")},
		{slice("s1", "10.0.0.1"), slice("s2", "10.0.0.2", "10.0.0.3")},
		{slice("s1", "10.0.0.1"), slice("s2")},
		{slice("s1"), slice("s2", "10.0.0.1")},
		{modeltest.Web(), slice("s1")},
	}
	require.Zero(t, shard())
	for i, a := range states {
		for j, b := range states {
			if i != j {
				require.NotEqual(t, shard(a...), shard(b...), "%d and %d", i, j)
			}
		}
		b := slices.Clone(a)
		slices.Reverse(b)
		require.Equal(t, shard(a...), shard(b...), "%d", i)
	}
	// So many slices that several share each bucket.
	var many []model.Object
	for i := range 4 * model.Buckets {
		many = append(many, slice(fmt.Sprint("many-", i)))
	}
	before := shard(many...)
	slices.Reverse(many)
	require.Equal(t, before, shard(many...))
	require.NotEqual(t, before, shard(many[1:]...))

	d := shard(states[3]...)
	require.NotEqual(t, model.StateDigest([]model.Digest{d, {}}), model.StateDigest([]model.Digest{{}, d}))
	require.NotEqual(t, d, model.ShardDigest([]model.Digest{d}))
	require.NotEqual(t, model.StateDigest([]model.Digest{d}), model.ShardDigest([]model.Digest{d}), "a shard's digest is no state's")
	require.Zero(t, model.StateDigest(make([]model.Digest, 64)))
}

// TestShardDigests checks that the digests of all shards of a state are those that each shard has
// by itself.
func TestShardDigests(t *testing.T) {
	const count = 4
	var shards [count][]model.Object
	versions := make(map[model.Object]model.Version)
	for i := range 40 {
		s := modeltest.NamedSlice(fmt.Sprint("slice-", i), fmt.Sprint("service-", i%10), 1)
		shards[s.ServiceKey().Shard(count)] = append(shards[s.ServiceKey().Shard(count)], s)
		versions[s] = s.ContentVersion()
	}
	got := model.ShardDigests(count, maps.All(versions))
	require.Len(t, got, count)
	for i, objects := range shards {
		require.NotEmpty(t, objects)
		require.Equal(t, modeltest.ShardDigest(objects...), got[i])
	}
}

// TestBytesOnTheWire checks that versions and digests come back from their bytes, and that bytes of
// any other length are refused.
func TestBytesOnTheWire(t *testing.T) {
	v := modeltest.Web().ContentVersion()
	got, err := model.ParseVersion(v[:])
	require.NoError(t, err)
	require.Equal(t, v, got)
	for _, b := range [][]byte{nil, v[1:], append(v[:], 0)} {
		_, err := model.ParseVersion(b)
		require.ErrorContains(t, err, "want 25")
	}

	digests := []model.Digest{{1}, {}, {3}}
	b := model.JoinDigests(digests)
	again, err := model.SplitDigests(b)
	require.NoError(t, err)
	require.Equal(t, digests, again)
	_, err = model.SplitDigests(b[1:])
	require.ErrorContains(t, err, "want a multiple of 25")
}

// TestNodesDigest checks that the digest of Nodes depends on all that agents need of each Node, and
// not on the order of the Nodes. Relays compare these digests.
func TestNodesDigest(t *testing.T) {
	node := func(change func(*model.Node)) *model.Node {
		n := &model.Node{
			Name: "n", Labels: map[string]string{"zone": "a"}, Addresses: addrs("10.0.0.1"),
			PodCIDRs: []netip.Prefix{prefix("10.180.0.0/24")}, ServiceCIDRs: []netip.Prefix{prefix("10.96.0.0/16")},
		}
		change(n)
		return n
	}
	digests := map[model.Digest]string{}
	var all []*model.Node
	for name, change := range map[string]func(n *model.Node){
		"as it is":               func(*model.Node) {},
		"name":                   func(n *model.Node) { n.Name = "o" },
		"label":                  func(n *model.Node) { n.Labels = map[string]string{"arch": "a"} },
		"value of a label":       func(n *model.Node) { n.Labels = map[string]string{"zone": "b"} },
		"no label":               func(n *model.Node) { n.Labels = nil },
		"address":                func(n *model.Node) { n.Addresses = addrs("10.0.0.2") },
		"pod CIDR":               func(n *model.Node) { n.PodCIDRs = []netip.Prefix{prefix("10.181.0.0/24")} },
		"length of pod CIDR":     func(n *model.Node) { n.PodCIDRs = []netip.Prefix{prefix("10.180.0.0/23")} },
		"service CIDR":           func(n *model.Node) { n.ServiceCIDRs = []netip.Prefix{prefix("10.97.0.0/16")} },
		"length of service CIDR": func(n *model.Node) { n.ServiceCIDRs = []netip.Prefix{prefix("10.96.0.0/15")} },
		"deleting":               func(n *model.Node) { n.Deleting = true },
		"tainted":                func(n *model.Node) { n.TaintedForDeletion = true },
	} {
		n := node(change)
		all = append(all, n)
		d := model.NodesDigest([]*model.Node{n})
		require.Empty(t, digests[d], name)
		digests[d] = name
	}
	before := model.NodesDigest(all)
	slices.Reverse(all)
	require.Equal(t, before, model.NodesDigest(all))
	require.NotEqual(t, before, model.NodesDigest(all[1:]))
	require.Zero(t, model.NodesDigest(nil))
}

func TestNodeEqual(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := modeltest.Node(t, "n")
		o := *n
		require.True(t, n.Equal(&o))
		o.Labels = map[string]string{"only": "here"}
		require.False(t, n.Equal(&o))
	})
	var none *model.Node
	require.True(t, none.Equal(nil))
	require.False(t, none.Equal(&model.Node{}))
	require.False(t, (&model.Node{}).Equal(nil))
	for _, o := range []model.Node{
		{Name: "x"}, {Deleting: true}, {TaintedForDeletion: true}, {Addresses: []netip.Addr{addr("10.0.0.1")}},
		{PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/24")}}, {ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/24")}},
	} {
		require.False(t, (&model.Node{}).Equal(&o), "%+v", o)
		require.NotEqual(t, (&model.Node{}).ContentVersion(), o.ContentVersion(), "%+v", o)
	}
}

func TestShardsKeepAServiceTogether(t *testing.T) {
	counts := make([]int, 8)
	for i := range 8000 {
		key := model.ServiceKey{Namespace: "default", Name: string(rune('a'+i%26)) + string(rune('a'+i/26%26)) + string(rune('a'+i/676))}
		counts[key.Shard(8)]++
		require.Zero(t, key.Shard(1))
	}
	for shard, n := range counts {
		require.Greater(t, n, 800, "shard %d of 8 has too few Services", shard)
	}
	require.NotEqual(t, model.ServiceKey{Namespace: "a", Name: "b"}.Shard(4096), model.ServiceKey{Namespace: "b", Name: "a"}.Shard(4096))
}

// TestBuckets checks the buckets of some keys. The wire API fixes the buckets, because agents and
// servers of all releases must agree on them.
func TestBuckets(t *testing.T) {
	for _, c := range []struct {
		key model.Key
		of  string
	}{
		{model.Key{Kind: model.KindService, Namespace: "default", Name: "web"}, "1/default/web"},
		{model.Key{Kind: model.KindSlice, Namespace: "default", Name: "web"}, "2/default/web"},
		{model.Key{Kind: model.KindSlice, Namespace: "kube-system", Name: "kube-dns-7x9f2"}, "2/kube-system/kube-dns-7x9f2"},
		{model.Key{Kind: model.KindSlice, Namespace: "kube-system", Name: "metrics-server-of-the-cluster-7x9f2"}, "2/kube-system/metrics-server-of-the-cluster-7x9f2"},
	} {
		require.EqualValues(t, xxhash.Sum64String(c.of)%64, c.key.Bucket(), "%v", c.key)
	}
	require.EqualValues(t, 0x35, model.Key{Kind: model.KindService, Namespace: "default", Name: "web"}.Bucket())
	require.EqualValues(t, 0x0d, model.Key{Kind: model.KindSlice, Namespace: "default", Name: "web"}.Bucket())
}
