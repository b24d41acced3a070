// Package modeltest generates canonical objects of the model for property tests. It draws them from
// small pools, so that names, addresses and whole objects recur. It also builds the realistic
// objects that sizes and speeds are measured with.
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

// The pools that names are drawn from. A slice of any of these names can belong to any of these
// Services.
var (
	Namespaces = []string{"default", "kube-system"}
	Services   = []string{"a", "b", "c", "d"}
	Slices     = []string{"s1", "s2", "s3", "s4", "s5"}
	zones      = []string{"", "zone-a", "zone-b"}
	nodes      = []string{"", "node-1", "node-2", "node-3"}
	ports      = []string{"", "http", "dns"}
)

// Diff describes how two objects, or values made from objects, differ in content or version. It
// returns an empty string if they do not differ. Empty and nil lists are equal.
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

// Address draws one of a few addresses of a family.
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

// slicePort adds a port to a list, unless the list has a port with the same name and protocol.
func slicePort(list []model.SlicePort, p model.SlicePort) []model.SlicePort {
	if slices.ContainsFunc(list, func(o model.SlicePort) bool { return o.Name == p.Name && o.Protocol == p.Protocol }) {
		return list
	}
	return append(list, p)
}

// servicePort adds a port to a list, unless a port of the same protocol in the list has its name,
// number or NodePort.
func servicePort(list []model.ServicePort, p model.ServicePort) []model.ServicePort {
	if slices.ContainsFunc(list, func(o model.ServicePort) bool {
		return o.Protocol == p.Protocol && (o.Name == p.Name || o.Port == p.Port || o.NodePort != 0 && o.NodePort == p.NodePort)
	}) {
		return list
	}
	return append(list, p)
}

// Slice draws a Slice with the given key.
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

// Changed draws a later state of a Slice: some endpoints are added, removed or changed, and
// sometimes its Service or ports change.
func Changed(t *rapid.T, s *model.Slice) *model.Slice {
	n := *s
	n.Ports, n.Endpoints = slices.Clone(s.Ports), nil
	n.LastChangeTriggerTimeMS = rapid.Int64Range(0, 2e12).Draw(t, "time")
	for _, e := range s.Endpoints {
		switch rapid.IntRange(0, 5).Draw(t, "fate") {
		case 0: // remove the endpoint
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

// Service draws a Service with the given key.
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

// loadBalancer draws the fields that only Services of type LoadBalancer have.
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

// Node draws a Node with the given name.
func Node(t *rapid.T, name string) *model.Node {
	n := &model.Node{
		Name:     name,
		Labels:   rapid.MapOfN(rapid.SampledFrom([]string{"zone", "arch", "pool"}), rapid.StringMatching("[a-z]{0,3}"), 0, 3).Draw(t, "labels"),
		Deleting: rapid.Bool().Draw(t, "deleting"), TaintedForDeletion: rapid.Bool().Draw(t, "tainted"),
	}
	for range rapid.IntRange(0, 2).Draw(t, "addresses") {
		if a := Address(t, model.IPv4); !slices.Contains(n.Addresses, a) {
			n.Addresses = append(n.Addresses, a)
			n.PodCIDRs = append(n.PodCIDRs, netip.PrefixFrom(a, 32))
		}
	}
	for range rapid.IntRange(0, 1).Draw(t, "service CIDRs") {
		n.ServiceCIDRs = append(n.ServiceCIDRs, netip.PrefixFrom(Address(t, model.IPv4), 24).Masked())
	}
	return n
}

// Web returns the Service that WebSlice belongs to.
func Web() *model.Service {
	return model.NewService(model.Service{
		Namespace: "default", Name: "web", Type: model.ClusterIP, ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.11.42")},
		Ports:               []model.ServicePort{{Name: "http", Protocol: model.TCP, Port: 80}},
		CreationTimeSeconds: 1_754_000_000,
	})
}

// WebSlice returns a slice of ready pods like that of a cluster in a cloud, with names, addresses,
// nodes and zones of the usual lengths.
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

// WebEndpoint returns endpoint i of a WebSlice.
func WebEndpoint(i int) model.Endpoint {
	return model.Endpoint{
		Address:    netip.AddrFrom4([4]byte{10, 180, byte(100 + i/250), byte(1 + i%250)}),
		Conditions: model.Conditions{Ready: true, Serving: true},
		NodeName:   fmt.Sprintf("node-%03d.example", 100+i), Zone: fmt.Sprintf("europe-west4-%c", 'a'+i%3),
	}
}

// Digests returns the wire form of made-up digests, one for each number. The number 0 stands for
// the digest of no objects.
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

// extremes makes Services of type LoadBalancer with addresses of both families.
type extremes struct{ services []*model.Service }

// add adds a Service after applying change.
func (e *extremes) add(name string, change func(s *model.Service)) {
	number := byte(len(e.services) + 1)
	s := model.Service{
		Namespace: "default", Name: name, Type: model.LoadBalancer,
		ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 96, 77, number}), netip.AddrFrom16([16]byte{0: 0xfd, 1: 0x77, 15: number})},
		Ports:      []model.ServicePort{{Name: "http", Protocol: model.TCP, Port: 80, NodePort: 31000 + uint16(number)}},
	}
	change(&s)
	e.services = append(e.services, model.NewService(s))
}

// Extremes returns canonical Services, each of which goes to the limit in some field: the worst
// that a rogue server or a tenant can send. Some claim addresses or ports of others.
func Extremes() []*model.Service {
	e := &extremes{}
	e.addPorts()
	e.addAddresses()
	e.addClaims()
	return e.services
}

func (e *extremes) addPorts() {
	long := strings.Repeat("a", 63)
	e.add(long, func(s *model.Service) {
		s.Namespace, s.IPVSScheduler, s.TrafficDistribution = long, long, long
		s.Ports = []model.ServicePort{
			{Name: long, Protocol: model.TCP, Port: 65535, NodePort: 65535}, {Name: "b" + long[1:], Protocol: model.UDP, Port: 65535, NodePort: 65535},
			{Name: "c" + long[1:], Protocol: model.SCTP, Port: 65535, NodePort: 65535}, {Name: "d" + long[1:], Protocol: model.TCP, Port: 1, NodePort: 1},
		}
	})
	e.add("affinity-longest", func(s *model.Service) { s.ClientIPAffinitySeconds = model.MaxAffinitySeconds })
	e.add("affinity-shortest", func(s *model.Service) { s.ClientIPAffinitySeconds = 1 })
	e.add("ports", func(s *model.Service) {
		s.Ports = nil
		for i := range 300 {
			s.Ports = append(s.Ports, model.ServicePort{
				Name: fmt.Sprint("p", i), Protocol: model.Protocol(1 + i%3), Port: uint16(1 + i), NodePort: uint16(40000 + i),
			})
		}
	})
}

func (e *extremes) addAddresses() {
	address := netip.MustParseAddr
	e.add("addresses", func(s *model.Service) {
		for i := range 300 {
			s.ExternalIPs = append(s.ExternalIPs, netip.AddrFrom4([4]byte{203, 0, byte(i >> 8), byte(i)}),
				netip.AddrFrom16([16]byte{0: 0x20, 1: 1, 2: 0xd, 3: 0xb8, 14: byte(i >> 8), 15: byte(1 + i)}))
		}
	})
	e.add("ranges", func(s *model.Service) {
		s.LoadBalancerIngress = []model.LoadBalancerIngress{{IP: address("198.51.100.1")}, {IP: address("2001:db8:1::1")}}
		for bits := range 33 { // each range contains the next; the last one is a single address
			p, _ := address("10.20.30.40").Prefix(bits)
			s.LoadBalancerSourceRanges = append(s.LoadBalancerSourceRanges, p)
		}
		for bits := 1; bits <= 128; bits++ { // skip ::/0, which admits everybody
			p, _ := address("2001:db8:ffff:ffff:ffff:ffff:ffff:ffff").Prefix(bits)
			s.LoadBalancerSourceRanges = append(s.LoadBalancerSourceRanges, p)
		}
	})
	e.add("last-addresses", func(s *model.Service) {
		s.ExternalIPs = []netip.Addr{address("0.0.0.1"), address("255.255.255.254"), address("::2"), address("feff:ffff:ffff:ffff:ffff:ffff:ffff:ffff")}
		s.LoadBalancerIngress = []model.LoadBalancerIngress{{IP: address("169.254.0.1")}, {IP: address("fe80::1"), ProxyMode: true}}
	})
	e.add("health-check-on-a-node-port", func(s *model.Service) {
		s.ExternalTrafficPolicy, s.InternalTrafficPolicy = model.TrafficLocal, model.TrafficLocal
		s.HealthCheckNodePort = s.Ports[0].NodePort
		s.LoadBalancerIngress = []model.LoadBalancerIngress{{IP: address("198.51.100.2")}}
	})
	e.add("health-check-on-anothers", func(s *model.Service) {
		s.ExternalTrafficPolicy, s.HealthCheckNodePort = model.TrafficLocal, s.Ports[0].NodePort-1
	})
}

// addClaims adds Services that claim addresses, ports and NodePorts of others, and Services that
// lack something.
func (e *extremes) addClaims() {
	address := netip.MustParseAddr
	e.add("anothers-addresses", func(s *model.Service) {
		s.ExternalIPs = []netip.Addr{address("10.96.77.2"), address("198.51.100.1"), address("203.0.0.7"), address("fd77::2"), address("2001:db8:1::1")}
		s.Ports[0].NodePort = 31002
	})
	e.add("anothers-cluster-ip", func(s *model.Service) {
		s.ClusterIPs = []netip.Addr{address("10.96.77.3"), address("fd77::3")}
		s.LoadBalancerIngress = []model.LoadBalancerIngress{{IP: address("10.96.77.2")}, {IP: address("fd77::2")}}
	})
	e.add("no-ports", func(s *model.Service) { s.Ports = nil })
	e.add("no-addresses", func(s *model.Service) { s.ClusterIPs = nil })
	e.add("no-endpoints", func(*model.Service) {})
}

// ExtremeSlices returns slices of a Service, one of each family. Each has the given number of
// endpoints with names of the maximum length, and all ports of the Service.
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

// NamedService returns a Service with nothing but a name.
func NamedService(name string) *model.Service {
	return model.NewService(model.Service{Namespace: "default", Name: name, Type: model.ClusterIP})
}

// NamedSlice returns a slice of a Service with the endpoints of WebSlice.
func NamedSlice(name, service string, endpoints int) *model.Slice {
	s := WebSlice(endpoints)
	s.Name, s.Service = name, service
	return model.NewSlice(s)
}

// ChangedWeb returns WebSlice with 100 endpoints, after changes.
func ChangedWeb(changes ...func(*model.Slice)) *model.Slice {
	s := WebSlice(100)
	for _, change := range changes {
		change(&s)
	}
	return model.NewSlice(s)
}

// Unready returns a change that makes the endpoint i unready.
func Unready(i int) func(*model.Slice) {
	return func(s *model.Slice) { s.Endpoints[i].Conditions.Ready = false }
}
