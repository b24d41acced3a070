// Package modeltest draws canonical objects of the model for property tests, from pools so small that names, addresses and whole
// objects meet again, and makes the realistic ones that sizes and speeds are measured with.
package modeltest

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

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

func portNumber(t *rapid.T) uint16 { return uint16(rapid.IntRange(1, 65535).Draw(t, "port")) }

// slicePort adds a port to a list, unless its name and protocol are there.
func slicePort(list []model.SlicePort, p model.SlicePort) []model.SlicePort {
	if slices.ContainsFunc(list, func(o model.SlicePort) bool { return o.Name == p.Name && o.Protocol == p.Protocol }) {
		return list
	}
	return append(list, p)
}

// servicePort adds a port to a list, unless something of it is there.
func servicePort(list []model.ServicePort, p model.ServicePort) []model.ServicePort {
	if slices.ContainsFunc(list, func(o model.ServicePort) bool {
		return o.Protocol == p.Protocol && (o.Name == p.Name || o.Port == p.Port || o.NodePort != 0 && o.NodePort == p.NodePort)
	}) {
		return list
	}
	return append(list, p)
}

// Slice draws a Slice with a key.
func Slice(t *rapid.T, key model.Key) *model.Slice {
	s := model.Slice{
		Namespace: key.Namespace, Name: key.Name, Service: rapid.SampledFrom(Services).Draw(t, "service"),
		Family:                  rapid.SampledFrom([]model.Family{model.IPv4, model.IPv6}).Draw(t, "family"),
		LastChangeTriggerTimeMS: rapid.Int64Range(0, 2e12).Draw(t, "time"),
	}
	for range rapid.IntRange(0, 3).Draw(t, "ports") {
		s.Ports = slicePort(s.Ports, model.SlicePort{
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
		n.Ports = slicePort(n.Ports, model.SlicePort{Name: "more", Protocol: protocol(t), Port: portNumber(t)})
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
	if s.Type == model.LoadBalancer {
		loadBalancer(t, &s, family)
	}
	for range rapid.IntRange(0, 3).Draw(t, "ports") {
		p := model.ServicePort{Name: rapid.SampledFrom(ports).Draw(t, "port name"), Protocol: protocol(t), Port: portNumber(t)}
		if s.Type != model.ClusterIP {
			p.NodePort = rapid.SampledFrom([]uint16{0, portNumber(t)}).Draw(t, "node port")
		}
		s.Ports = servicePort(s.Ports, p)
	}
	return model.NewService(s)
}

// loadBalancer draws what only Services of type LoadBalancer have.
func loadBalancer(t *rapid.T, s *model.Service, family *rapid.Generator[model.Family]) {
	for _, f := range rapid.SliceOfN(family, 0, 2).Draw(t, "ingress") {
		in := model.LoadBalancerIngress{IP: Address(t, f), ProxyMode: rapid.Bool().Draw(t, "proxy mode")}
		if !slices.ContainsFunc(s.LoadBalancerIngress, func(o model.LoadBalancerIngress) bool { return o.IP == in.IP }) {
			s.LoadBalancerIngress = append(s.LoadBalancerIngress, in)
		}
	}
	for _, f := range rapid.SliceOfN(family, 0, 2).Draw(t, "source ranges") {
		p, err := Address(t, f).Prefix(rapid.IntRange(0, 32).Draw(t, "bits"))
		if err != nil {
			t.Fatal(err)
		}
		s.LoadBalancerSourceRanges = append(s.LoadBalancerSourceRanges, p)
	}
	if s.ExternalTrafficPolicy == model.TrafficLocal {
		s.HealthCheckNodePort = rapid.SampledFrom([]uint16{0, 30080}).Draw(t, "health check")
	}
}

// Node draws a Node.
func Node(t *rapid.T, name string) *model.Node {
	n := &model.Node{
		Name:     name,
		Labels:   rapid.MapOfN(rapid.SampledFrom([]string{"zone", "arch", "pool"}), rapid.StringMatching("[a-z]{0,3}"), 0, 3).Draw(t, "labels"),
		Deleting: rapid.Bool().Draw(t, "deleting"), TaintedForDeletion: rapid.Bool().Draw(t, "tainted"),
	}
	for range rapid.IntRange(0, 2).Draw(t, "addresses") {
		if a := Address(t, model.IPv4); !slices.Contains(n.InternalIPs, a) {
			n.InternalIPs = append(n.InternalIPs, a)
			n.PodCIDRs = append(n.PodCIDRs, netip.PrefixFrom(a, 32))
		}
	}
	for range rapid.IntRange(0, 1).Draw(t, "service CIDRs") {
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

// Extremes returns Services that are canonical and each as far as it goes in something: what a rogue server, or a tenant, can send at
// worst. Some want what others have.
func Extremes() []*model.Service {
	long := strings.Repeat("a", 63)
	cluster := 0
	// service returns a Service of type LoadBalancer that has everything, of both families.
	service := func(name string, change func(s *model.Service)) *model.Service {
		cluster++
		s := model.Service{
			Namespace: "default", Name: name, Type: model.LoadBalancer,
			ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 96, 77, byte(cluster)}), netip.AddrFrom16([16]byte{0: 0xfd, 1: 0x77, 15: byte(cluster)})},
			Ports:      []model.ServicePort{{Name: "http", Protocol: model.TCP, Port: 80, NodePort: uint16(31000 + cluster)}},
		}
		change(&s)
		return model.NewService(s)
	}
	address := netip.MustParseAddr
	return []*model.Service{
		service(long, func(s *model.Service) {
			s.Namespace, s.IPVSScheduler, s.TrafficDistribution = long, long, long
			s.Ports = []model.ServicePort{
				{Name: long, Protocol: model.TCP, Port: 65535, NodePort: 65535}, {Name: "b" + long[1:], Protocol: model.UDP, Port: 65535, NodePort: 65535},
				{Name: "c" + long[1:], Protocol: model.SCTP, Port: 65535, NodePort: 65535}, {Name: "d" + long[1:], Protocol: model.TCP, Port: 1, NodePort: 1},
			}
		}),
		service("affinity-longest", func(s *model.Service) { s.ClientIPAffinitySeconds = model.MaxAffinitySeconds }),
		service("affinity-shortest", func(s *model.Service) { s.ClientIPAffinitySeconds = 1 }),
		service("ports", func(s *model.Service) {
			s.Ports = nil
			for i := range 300 {
				s.Ports = append(s.Ports, model.ServicePort{
					Name: fmt.Sprint("p", i), Protocol: model.Protocol(1 + i%3), Port: uint16(1 + i), NodePort: uint16(40000 + i),
				})
			}
		}),
		service("addresses", func(s *model.Service) {
			for i := range 300 {
				s.ExternalIPs = append(s.ExternalIPs, netip.AddrFrom4([4]byte{203, 0, byte(i >> 8), byte(i)}),
					netip.AddrFrom16([16]byte{0: 0x20, 1: 1, 2: 0xd, 3: 0xb8, 14: byte(i >> 8), 15: byte(1 + i)}))
			}
		}),
		service("ranges", func(s *model.Service) {
			s.LoadBalancerIngress = []model.LoadBalancerIngress{{IP: address("198.51.100.1")}, {IP: address("2001:db8:1::1")}}
			for bits := range 33 { // each is in the one before, and the last is that of one address
				p, _ := address("10.20.30.40").Prefix(bits)
				s.LoadBalancerSourceRanges = append(s.LoadBalancerSourceRanges, p)
			}
			for bits := 1; bits <= 128; bits++ { // without the zero one, which opens everything
				p, _ := address("2001:db8:ffff:ffff:ffff:ffff:ffff:ffff").Prefix(bits)
				s.LoadBalancerSourceRanges = append(s.LoadBalancerSourceRanges, p)
			}
		}),
		service("last-addresses", func(s *model.Service) {
			s.ExternalIPs = []netip.Addr{address("0.0.0.1"), address("255.255.255.254"), address("::2"), address("feff:ffff:ffff:ffff:ffff:ffff:ffff:ffff")}
			s.LoadBalancerIngress = []model.LoadBalancerIngress{{IP: address("169.254.0.1")}, {IP: address("fe80::1"), ProxyMode: true}}
		}),
		service("health-check-on-a-node-port", func(s *model.Service) {
			s.ExternalTrafficPolicy, s.InternalTrafficPolicy = model.TrafficLocal, model.TrafficLocal
			s.HealthCheckNodePort = s.Ports[0].NodePort
			s.LoadBalancerIngress = []model.LoadBalancerIngress{{IP: address("198.51.100.2")}}
		}),
		service("health-check-on-anothers", func(s *model.Service) {
			s.ExternalTrafficPolicy, s.HealthCheckNodePort = model.TrafficLocal, 31000+uint16(cluster)-1
		}),
		// The same addresses, ports and NodePorts as others have.
		service("anothers-addresses", func(s *model.Service) {
			s.ExternalIPs = []netip.Addr{address("10.96.77.2"), address("198.51.100.1"), address("203.0.0.7"), address("fd77::2"), address("2001:db8:1::1")}
			s.Ports[0].NodePort = 31002
		}),
		service("anothers-cluster-ip", func(s *model.Service) {
			s.ClusterIPs = []netip.Addr{address("10.96.77.3"), address("fd77::3")}
			s.LoadBalancerIngress = []model.LoadBalancerIngress{{IP: address("10.96.77.2")}, {IP: address("fd77::2")}}
		}),
		service("no-ports", func(s *model.Service) { s.Ports = nil }),
		service("no-addresses", func(s *model.Service) { s.ClusterIPs = nil }),
		service("no-endpoints", func(*model.Service) {}),
	}
}

// ExtremeSlices returns slices of a Service: each has as many endpoints as there can be, all of their names as long as they can be, and
// all ports of the Service.
func ExtremeSlices(of *model.Service, endpoints int) []*model.Slice {
	var out []*model.Slice
	for _, family := range []model.Family{model.IPv4, model.IPv6} {
		s := model.Slice{
			Namespace: of.Namespace, Name: strings.Repeat("a", 240) + fmt.Sprintf("-%.8s-%d", of.Name, family), Service: of.Name, Family: family,
		}
		for _, p := range of.Ports {
			s.Ports = append(s.Ports, model.SlicePort{Name: p.Name, Protocol: p.Protocol, Port: 65535 - p.Port%1000})
		}
		for i := range endpoints {
			e := model.Endpoint{
				Address: netip.AddrFrom4([4]byte{10, 200, byte(i >> 8), byte(i)}), Conditions: model.Conditions{Ready: i%3 != 0, Serving: i%2 == 0, Terminating: i%5 == 0},
				NodeName: strings.Repeat("n", 253), Zone: strings.Repeat("Z", 63),
			}
			if family == model.IPv6 {
				e.Address = netip.AddrFrom16([16]byte{0: 0xfd, 14: byte(i >> 8), 15: byte(1 + i)})
			}
			for h := range model.MaxHints {
				e.ZoneHints = append(e.ZoneHints, fmt.Sprint(h, strings.Repeat("z", 62)))
				e.NodeHints = append(e.NodeHints, fmt.Sprint(h, strings.Repeat("n", 252)))
			}
			s.Endpoints = append(s.Endpoints, e)
		}
		out = append(out, model.NewSlice(s))
	}
	return out
}
