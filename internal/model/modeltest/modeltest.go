// Package modeltest draws objects of the model for property tests, from pools so small that names, addresses and whole
// objects meet again, and makes the realistic ones that sizes and speeds are measured with.
package modeltest

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"

	"github.com/slicecast/slicecast/internal/model"
)

// The pools. Each slice name may come with each Service name.
var (
	Namespaces = []string{"default", "kube-system"}
	Services   = []string{"a", "b", "c", "d"}
	Slices     = []string{"s1", "s2", "s3", "s4", "s5"}
	zones      = []string{"", "zone-a", "zone-b"}
	nodes      = []string{"", "node-1", "node-2", "node-3"}
	ports      = []string{"", "http", "dns"}
)

// Diff tells how objects, or what is made of them, differ in content or version; empty: they do not. A list without elements
// is as good as none.
func Diff(want, got any) string {
	return cmp.Diff(want, got, cmpopts.EquateEmpty(), cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{}, netip.AddrPort{}),
		cmp.AllowUnexported(model.Service{}, model.Slice{}))
}

// SliceKey draws the key of a Slice.
func SliceKey(t *rapid.T) model.Key {
	return model.Key{
		Kind: model.KindSlice, Namespace: rapid.SampledFrom(Namespaces).Draw(t, "namespace"),
		Name: rapid.SampledFrom(Slices).Draw(t, "slice"),
	}
}

// ServiceKey draws the name of a Service.
func ServiceKey(t *rapid.T) model.ServiceKey {
	return model.ServiceKey{
		Namespace: rapid.SampledFrom(Namespaces).Draw(t, "namespace"), Name: rapid.SampledFrom(Services).Draw(t, "service"),
	}
}

// Address draws one of few addresses of a family.
func Address(t *rapid.T, family model.Family) netip.Addr {
	n := byte(rapid.IntRange(1, 12).Draw(t, "address"))
	if family == model.IPv4 {
		return netip.AddrFrom4([4]byte{10, 180, 0, n})
	}
	return netip.AddrFrom16([16]byte{0: 0xfd, 15: n})
}

func conditions(t *rapid.T) model.Conditions {
	return model.Conditions{
		Ready: rapid.Bool().Draw(t, "ready"), Serving: rapid.Bool().Draw(t, "serving"), Terminating: rapid.Bool().Draw(t, "terminating"),
	}
}

// Endpoint draws an endpoint.
func Endpoint(t *rapid.T, family model.Family) model.Endpoint {
	return model.Endpoint{
		Address: Address(t, family), Conditions: conditions(t),
		NodeName: rapid.SampledFrom(nodes).Draw(t, "node"), Zone: rapid.SampledFrom(zones).Draw(t, "zone"),
		ZoneHints: rapid.SliceOfN(rapid.SampledFrom(zones[1:]), 0, 2).Draw(t, "zone hints"),
		NodeHints: rapid.SliceOfN(rapid.SampledFrom(nodes[1:]), 0, 2).Draw(t, "node hints"),
	}
}

func protocol(t *rapid.T) model.Protocol {
	return rapid.SampledFrom([]model.Protocol{model.TCP, model.UDP, model.SCTP}).Draw(t, "protocol")
}

func portNumber(t *rapid.T) uint16 { return uint16(rapid.IntRange(0, 65535).Draw(t, "port")) }

// Slice draws a Slice with a key.
func Slice(t *rapid.T, key model.Key) *model.Slice {
	s := model.Slice{
		Namespace: key.Namespace, Name: key.Name, Service: rapid.SampledFrom(Services).Draw(t, "service"),
		Family:                  rapid.SampledFrom([]model.Family{model.IPv4, model.IPv6}).Draw(t, "family"),
		LastChangeTriggerTimeMS: rapid.Int64Range(0, 2e12).Draw(t, "time"),
	}
	for range rapid.IntRange(0, 3).Draw(t, "ports") {
		s.Ports = append(s.Ports, model.SlicePort{
			Name: rapid.SampledFrom(ports).Draw(t, "port name"), Protocol: protocol(t), Port: portNumber(t),
		})
	}
	for range rapid.IntRange(0, 10).Draw(t, "endpoints") {
		s.Endpoints = append(s.Endpoints, Endpoint(t, s.Family))
	}
	return model.NewSlice(s)
}

// Changed draws a later state of a Slice: some endpoints come, go or change, and now and then something else does.
func Changed(t *rapid.T, s *model.Slice) *model.Slice {
	n := *s
	n.Ports, n.Endpoints = slices.Clone(s.Ports), nil
	n.LastChangeTriggerTimeMS = rapid.Int64Range(0, 2e12).Draw(t, "time")
	for _, e := range s.Endpoints {
		switch rapid.IntRange(0, 5).Draw(t, "fate") {
		case 0: // goes
			continue
		case 1:
			e.Conditions = conditions(t)
		case 2:
			e.Zone = rapid.SampledFrom(zones).Draw(t, "zone")
		}
		e.ZoneHints, e.NodeHints = slices.Clone(e.ZoneHints), slices.Clone(e.NodeHints)
		n.Endpoints = append(n.Endpoints, e)
	}
	for range rapid.IntRange(0, 2).Draw(t, "more endpoints") {
		n.Endpoints = append(n.Endpoints, Endpoint(t, n.Family))
	}
	switch rapid.IntRange(0, 9).Draw(t, "header") {
	case 0:
		n.Service = rapid.SampledFrom(Services).Draw(t, "service")
	case 1:
		n.Ports = append(n.Ports, model.SlicePort{Name: "more", Protocol: protocol(t), Port: portNumber(t)})
	}
	return model.NewSlice(n)
}

// Service draws a Service with a key.
func Service(t *rapid.T, key model.ServiceKey) *model.Service {
	family := rapid.SampledFrom([]model.Family{model.IPv4, model.IPv6})
	policy := rapid.SampledFrom([]model.TrafficPolicy{0, model.TrafficCluster, model.TrafficLocal})
	s := model.Service{
		Namespace: key.Namespace, Name: key.Name,
		Type:                    rapid.SampledFrom([]model.ServiceType{model.ClusterIP, model.NodePort, model.LoadBalancer}).Draw(t, "type"),
		InternalTrafficPolicy:   policy.Draw(t, "internal"),
		ExternalTrafficPolicy:   policy.Draw(t, "external"),
		ClientIPAffinitySeconds: rapid.SampledFrom([]uint32{0, 10800}).Draw(t, "affinity"),
		HealthCheckNodePort:     rapid.SampledFrom([]uint16{0, 30080}).Draw(t, "health check"),
		TrafficDistribution:     rapid.SampledFrom([]string{"", "PreferClose"}).Draw(t, "distribution"),
		CreationTimeSeconds:     rapid.Int64Range(0, 2e9).Draw(t, "created"),
		IPVSScheduler:           rapid.SampledFrom([]string{"", "lc"}).Draw(t, "scheduler"),
	}
	for _, f := range rapid.SliceOfNDistinct(family, 0, 2, rapid.ID).Draw(t, "families") {
		s.ClusterIPs = append(s.ClusterIPs, Address(t, f))
	}
	for _, f := range rapid.SliceOfN(family, 0, 2).Draw(t, "external IPs") {
		s.ExternalIPs = append(s.ExternalIPs, Address(t, f))
	}
	for _, f := range rapid.SliceOfN(family, 0, 2).Draw(t, "ingress") {
		s.LoadBalancerIngress = append(s.LoadBalancerIngress, model.LoadBalancerIngress{
			IP: Address(t, f), ProxyMode: rapid.Bool().Draw(t, "proxy mode"),
		})
	}
	for _, f := range rapid.SliceOfN(family, 0, 2).Draw(t, "source ranges") {
		p, err := Address(t, f).Prefix(rapid.IntRange(0, 32).Draw(t, "bits"))
		if err != nil {
			t.Fatal(err)
		}
		s.LoadBalancerSourceRanges = append(s.LoadBalancerSourceRanges, p)
	}
	for range rapid.IntRange(0, 3).Draw(t, "ports") {
		s.Ports = append(s.Ports, model.ServicePort{
			Name: rapid.SampledFrom(ports).Draw(t, "port name"), Protocol: protocol(t), Port: portNumber(t), NodePort: portNumber(t),
		})
	}
	return model.NewService(s)
}

// Node draws a Node.
func Node(t *rapid.T, name string) *model.Node {
	n := &model.Node{
		Name:     name,
		Labels:   rapid.MapOfN(rapid.SampledFrom([]string{"zone", "arch", "pool"}), rapid.StringMatching("[a-z]{0,3}"), 0, 3).Draw(t, "labels"),
		Deleting: rapid.Bool().Draw(t, "deleting"), TaintedForDeletion: rapid.Bool().Draw(t, "tainted"),
	}
	for range rapid.IntRange(0, 2).Draw(t, "addresses") {
		a := Address(t, model.IPv4)
		n.InternalIPs = append(n.InternalIPs, a)
		n.PodCIDRs = append(n.PodCIDRs, netip.PrefixFrom(a, 32))
	}
	for range rapid.IntRange(0, 2).Draw(t, "service CIDRs") {
		n.ServiceCIDRs = append(n.ServiceCIDRs, netip.PrefixFrom(Address(t, model.IPv4), 24).Masked())
	}
	return n
}

// Web is the Service of WebSlice.
func Web() *model.Service {
	return model.NewService(model.Service{
		Namespace: "default", Name: "web", Type: model.ClusterIP, ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.11.42")},
		Ports:               []model.ServicePort{{Name: "http", Protocol: model.TCP, Port: 80}},
		CreationTimeSeconds: 1_754_000_000,
	})
}

// WebSlice is a slice of ready pods as a cluster in a cloud has it: names, addresses, nodes and zones of the usual lengths.
func WebSlice(endpoints int) model.Slice {
	s := model.Slice{
		Namespace: "default", Name: "web-7d9c5b6f8-x2k4z", Service: "web", Family: model.IPv4,
		Ports:                   []model.SlicePort{{Name: "http", Protocol: model.TCP, Port: 8080}},
		LastChangeTriggerTimeMS: 1_754_000_000_000,
	}
	for i := range endpoints {
		s.Endpoints = append(s.Endpoints, WebEndpoint(i))
	}
	return s
}

// WebEndpoint is the i-th endpoint of a WebSlice.
func WebEndpoint(i int) model.Endpoint {
	return model.Endpoint{
		Address:    netip.AddrFrom4([4]byte{10, 180, byte(100 + i/250), byte(1 + i%250)}),
		Conditions: model.Conditions{Ready: true, Serving: true},
		NodeName:   fmt.Sprintf("node-%03d.example", 100+i), Zone: fmt.Sprintf("europe-west4-%c", 'a'+i%3),
	}
}

// Digests returns made-up digests as the wire has them, one for each number; 0 is that of no objects.
func Digests(numbers ...byte) []byte {
	var out []model.Digest
	for _, n := range numbers {
		out = append(out, model.Digest{n})
	}
	return model.JoinDigests(out)
}

// ShardDigest returns the digest of the shard that holds these objects.
func ShardDigest(objects ...model.Object) model.Digest {
	return model.ShardDigest(model.BucketDigests(func(yield func(model.Key, model.Version) bool) {
		for _, o := range objects {
			if !yield(o.Key(), o.ContentVersion()) {
				return
			}
		}
	}))
}
