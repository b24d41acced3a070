package hostiletest

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

// walks changes each field of a Service, and of its ports, to its ith value. No value comes back,
// as far as the field has so many.
var walks = map[string]func(s *model.Service, i int){
	"Namespace":  func(s *model.Service, i int) { s.Namespace = fmt.Sprint("namespace-", i) },
	"Name":       func(s *model.Service, i int) { s.Name = fmt.Sprint("name-", i) },
	"Type":       func(s *model.Service, i int) { *s = *typed(s, i) },
	"ClusterIPs": func(s *model.Service, i int) { s.ClusterIPs = walkAddresses(10, i) },
	"ExternalIPs": func(s *model.Service, i int) {
		s.ExternalIPs = walkAddresses(11, i)
	},
	"LoadBalancerIngress": func(s *model.Service, i int) {
		s.LoadBalancerIngress = nil
		for _, a := range walkAddresses(12, i) {
			s.LoadBalancerIngress = append(s.LoadBalancerIngress, model.LoadBalancerIngress{IP: a})
		}
	},
	"Ports": func(s *model.Service, i int) {
		for j := range 1 + i%5 {
			s.Ports = append(s.Ports, model.ServicePort{Name: fmt.Sprint("more-", i, "-", j), Protocol: model.UDP, Port: uint16(1000 + 10*i + j)})
		}
	},
	"Ports.Name":               func(s *model.Service, i int) { s.Ports[0].Name = fmt.Sprint("port-", i) },
	"Ports.Protocol":           func(s *model.Service, i int) { s.Ports[0].Protocol = model.TCP + model.Protocol(i%3) },
	"Ports.Port":               func(s *model.Service, i int) { s.Ports[0].Port = uint16(1000 + i) },
	"Ports.NodePort":           func(s *model.Service, i int) { s.Ports[0].NodePort = uint16(31000 + i) },
	"InternalTrafficPolicy":    func(s *model.Service, i int) { s.InternalTrafficPolicy = model.TrafficPolicy(i % 2) },
	"ExternalTrafficPolicy":    func(s *model.Service, i int) { *s = *policed(s, i) },
	"ClientIPAffinitySeconds":  func(s *model.Service, i int) { s.ClientIPAffinitySeconds = uint32(40_000 + i) },
	"LoadBalancerSourceRanges": func(s *model.Service, i int) { s.LoadBalancerSourceRanges = walkRanges(i) },
	"HealthCheckNodePort":      func(s *model.Service, i int) { s.HealthCheckNodePort = uint16(32000 + i) },
	"TrafficDistribution":      func(s *model.Service, i int) { s.TrafficDistribution = fmt.Sprint("Prefer", i) },
	"CreationTimeSeconds":      func(s *model.Service, i int) { s.CreationTimeSeconds += int64(i) },
	"IPVSScheduler":            func(s *model.Service, i int) { s.IPVSScheduler = fmt.Sprint("scheduler-", i) },
}

func typed(s *model.Service, i int) *model.Service {
	if s.Type -= model.ServiceType(i % 3); s.Type != model.LoadBalancer {
		s.LoadBalancerIngress, s.LoadBalancerSourceRanges, s.HealthCheckNodePort = nil, nil, 0
	}
	if s.Type == model.ClusterIP {
		s.Ports[0].NodePort = 0
	}
	return s
}

func policed(s *model.Service, i int) *model.Service {
	if s.ExternalTrafficPolicy = model.TrafficPolicy(i % 2); s.ExternalTrafficPolicy != model.TrafficLocal {
		s.HealthCheckNodePort = 0
	}
	return s
}

// walkAddresses returns an address of each family.
func walkAddresses(kind byte, i int) []netip.Addr {
	return []netip.Addr{
		netip.AddrFrom4([4]byte{10, 99, kind, byte(i)}),
		netip.AddrFrom16([16]byte{0: 0xfd, 1: 0x99, 14: kind, 15: byte(i)}),
	}
}

// walkRanges returns a range of each family, of changing lengths.
func walkRanges(i int) []netip.Prefix {
	return []netip.Prefix{
		netip.PrefixFrom(netip.AddrFrom4([4]byte{172, byte(i), 0, 0}), 16+i%17),
		netip.PrefixFrom(netip.AddrFrom16([16]byte{0xfd, byte(i)}), 16+i%113),
	}
}

// walked returns a Service that uses every field, changed by one walk, and its slices. Two of three
// endpoints are on the node.
func walked(node string, change func(*model.Service, int), i int) (*model.Service, []*model.Slice) {
	s := &model.Service{
		Namespace: "walk", Name: "walk", Type: model.LoadBalancer, CreationTimeSeconds: 1_754_000_000,
		ClusterIPs: walkAddresses(1, 1), ExternalIPs: walkAddresses(2, 1),
		Ports:                 []model.ServicePort{{Name: "http", Protocol: model.TCP, Port: 80, NodePort: 30999}},
		InternalTrafficPolicy: model.TrafficLocal, ExternalTrafficPolicy: model.TrafficLocal, HealthCheckNodePort: 31999,
		LoadBalancerSourceRanges: walkRanges(200), ClientIPAffinitySeconds: 10_800,
	}
	for _, a := range walkAddresses(3, 1) {
		s.LoadBalancerIngress = append(s.LoadBalancerIngress, model.LoadBalancerIngress{IP: a})
	}
	change(s, i)
	s = model.NewService(*s)
	var endpointSlices []*model.Slice
	for _, family := range []model.Family{model.IPv4, model.IPv6} {
		slice := model.Slice{Namespace: s.Namespace, Name: fmt.Sprint("slice-", family), Service: s.Name, Family: family}
		for _, p := range s.Ports {
			slice.Ports = append(slice.Ports, model.SlicePort{Name: p.Name, Protocol: p.Protocol, Port: 8080})
		}
		for j := range 3 {
			slice.Endpoints = append(slice.Endpoints, model.Endpoint{
				Address: walkAddresses(byte(100+j), 1)[family-model.IPv4], Conditions: model.Conditions{Ready: true, Serving: true},
				NodeName: []string{node, node, "elsewhere"}[j],
			})
		}
		endpointSlices = append(endpointSlices, model.NewSlice(slice))
	}
	return s, endpointSlices
}

// Walk walks through every field of a Service with values that never come back, as its owner may do
// for as long as they like. It asserts that what the kernel holds does not grow with the number of
// changes, whether the programmer keeps something for later or not.
func Walk(t *testing.T, c Cluster, p programmer.Programmer) {
	t.Helper()
	for of, prefix := range map[reflect.Type]string{reflect.TypeFor[model.Service](): "", reflect.TypeFor[model.ServicePort](): "Ports."} {
		for i := range of.NumField() {
			if f := of.Field(i); f.IsExported() {
				require.Contains(t, walks, prefix+f.Name)
			}
		}
	}
	d := c.driver(t)
	d.view.Update()
	require.NoError(t, p.Replace(t.Context(), d.view.State()))
	// The two rounds that are compared are a multiple of what changes back and forth apart.
	const warm, rounds = 16, 47
	for _, field := range slices.Sorted(maps.Keys(walks)) {
		var early, late int
		var last model.ServiceKey
		for i := range rounds {
			s, endpointSlices := walked(c.Node.Name, walks[field], i)
			require.NoError(t, s.Check(), field)
			if key := s.ServiceKey(); i > 0 && key != last {
				d.view.Set(last, nil, nil)
			}
			last = s.ServiceKey()
			d.view.Set(last, s, endpointSlices)
			d.apply(p, field)
			switch i {
			case warm:
				early = held(t, c.Node.Host)
			case rounds - 1:
				late = held(t, c.Node.Host)
			}
		}
		require.LessOrEqual(t, late, early+early/5, field)
		d.view.Set(last, nil, nil)
		d.apply(p, field)
	}
}

// held returns the length of everything that the kernel lists of the node, in bytes.
func held(t *testing.T, host *testenv.Host) int {
	t.Helper()
	const list = `nft list ruleset; ip addr; for i in ip ip6; do ${i}tables-legacy-save || :; done; ` +
		`cat /proc/net/ip_vs || :; ls /proc/net/xt_recent || :`
	out, err := host.Run(t.Context(), "sh", "-c", "{ "+list+"; } 2>/dev/null")
	require.NoError(t, err)
	return cmp.Or(len(out), -1)
}
