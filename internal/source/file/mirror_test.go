// These tests prove that an Endpoints object is mirrored as slices of at most a hundred endpoints
// in which each address is once, and that a change of a few addresses changes few slices. Histories
// are random.
package file

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
	"pgregory.net/rapid"

	"github.com/slicecast/slicecast/internal/model"
)

var web = model.ServiceKey{Namespace: "default", Name: "web"}

func addresses(from, count int) []corev1.EndpointAddress {
	var as []corev1.EndpointAddress
	for i := from; i < from+count; i++ {
		as = append(as, corev1.EndpointAddress{IP: fmt.Sprintf("10.0.%d.%d", i/250, 1+i%250)})
	}
	return as
}

func endpointsOf(subsets ...corev1.EndpointSubset) *endpoints {
	e, skips := newEndpoints(&corev1.Endpoints{Subsets: subsets})
	if skips != nil {
		panic(skips)
	}
	return e
}

func subset(as []corev1.EndpointAddress) corev1.EndpointSubset {
	return corev1.EndpointSubset{Addresses: as, Ports: []corev1.EndpointPort{{Port: 80}}}
}

// sizes returns the slices as "name:endpoints".
func sizes(ss []*model.Slice) []string {
	var out []string
	for _, s := range ss {
		out = append(out, fmt.Sprintf("%s:%d", s.Name, len(s.Endpoints)))
	}
	return out
}

// changed counts the slices that are not the same in two states.
func changed(a, b []*model.Slice) int {
	versions := map[model.Key][2]model.Version{}
	for i, list := range [][]*model.Slice{a, b} {
		for _, s := range list {
			v := versions[s.Key()]
			v[i] = s.ContentVersion()
			versions[s.Key()] = v
		}
	}
	n := 0
	for _, v := range versions {
		if v[0] != v[1] {
			n++
		}
	}
	return n
}

func TestMirrorOf250AddressesIsThreeSlices(t *testing.T) {
	m := mirrors{}
	as := addresses(0, 250)
	before := m.slices(web, endpointsOf(subset(as)))
	require.Equal(t, []string{"web-mirrored-1:100", "web-mirrored-2:100", "web-mirrored-3:50"}, sizes(before))
	require.Equal(t, "web", before[0].Service)
	require.Equal(t, []model.SlicePort{{Protocol: model.TCP, Port: 80}}, before[0].Ports)
	require.Equal(t, model.Conditions{Ready: true, Serving: true}, before[0].Endpoints[0].Conditions)

	as[42] = corev1.EndpointAddress{IP: "10.9.9.9"}
	after := m.slices(web, endpointsOf(subset(as)))
	require.Equal(t, 1, changed(before, after), "one address for another: one slice")

	last := m.slices(web, endpointsOf(subset(slices.Concat(as[:42], as[43:]))))
	require.Equal(t, 1, changed(after, last))
	require.Equal(t, []string{"web-mirrored-1:99", "web-mirrored-2:100", "web-mirrored-3:50"}, sizes(last))

	require.Equal(t, sizes(before), sizes(mirrors{}.slices(web, endpointsOf(subset(addresses(0, 250))))), "the same after a restart")
}

func TestMirrorTakesAThousandOfASubset(t *testing.T) {
	ready, notReady := addresses(0, 990), addresses(990, 30)
	e := endpointsOf(corev1.EndpointSubset{Addresses: ready, NotReadyAddresses: notReady, Ports: []corev1.EndpointPort{{Port: 80}}})
	ss := mirrors{}.slices(web, e)
	require.Len(t, ss, 10)
	count := map[bool]int{}
	for _, s := range ss {
		for _, endpoint := range s.Endpoints {
			count[endpoint.Conditions.Ready]++
		}
	}
	require.Equal(t, map[bool]int{true: 990, false: 10}, count)
}

// TestMirrorOfPortsOfOneName checks that two ports of an Endpoints object with the same name come
// in separate slices, as a name has one number in a slice.
func TestMirrorOfPortsOfOneName(t *testing.T) {
	port := func(number int32) corev1.EndpointSubset {
		return corev1.EndpointSubset{Addresses: addresses(0, 2), Ports: []corev1.EndpointPort{{Name: "http", Port: number}}}
	}
	ss := mirrors{}.slices(web, endpointsOf(port(80), port(81), port(82)))
	require.Len(t, ss, 3)
	numbers := map[uint16]bool{}
	for _, s := range ss {
		require.NoError(t, s.Check())
		require.Len(t, s.Endpoints, 2)
		numbers[s.Ports[0].Port] = true
	}
	require.Equal(t, map[uint16]bool{80: true, 81: true, 82: true}, numbers)
}

// TestMirrorOfWhatIsNotCanonical checks that an Endpoints object is bad if its mirror would not be
// canonical.
func TestMirrorOfWhatIsNotCanonical(t *testing.T) {
	for field, change := range map[string]func(s *corev1.EndpointSubset){
		"subsets[0].ports[0].name":           func(s *corev1.EndpointSubset) { s.Ports[0].Name = "A b" },
		"subsets[0].addresses[0].ip":         func(s *corev1.EndpointSubset) { s.Addresses[0].IP = "169.254.169.254" },
		"subsets[0].addresses[0].nodeName":   func(s *corev1.EndpointSubset) { s.Addresses[0].NodeName = ptr.To("A b") },
		"subsets[0].notReadyAddresses[0].ip": func(s *corev1.EndpointSubset) { s.NotReadyAddresses = []corev1.EndpointAddress{{IP: "127.0.0.1"}} },
	} {
		s := subset(addresses(0, 1))
		change(&s)
		_, skips := newEndpoints(&corev1.Endpoints{Subsets: []corev1.EndpointSubset{s}})
		require.Len(t, skips, 1)
		require.Equal(t, field, skips[0].Field)
	}
}

func TestMirrorOfOldAddresses(t *testing.T) {
	e := endpointsOf(subset([]corev1.EndpointAddress{{IP: "::ffff:10.0.0.2"}, {IP: "010.000.0.1"}, {IP: "::ffff:a00:3"}}))
	ss := mirrors{}.slices(web, e)
	require.Len(t, ss, 1, "all are of one family")
	var held []string
	for _, endpoint := range ss[0].Endpoints {
		held = append(held, endpoint.Address.String())
	}
	require.Equal(t, []string{"10.0.0.1", "10.0.0.2", "10.0.0.3"}, held)
}

func TestMirrorByFamilyAndPorts(t *testing.T) {
	e := endpointsOf(
		corev1.EndpointSubset{
			Addresses:         []corev1.EndpointAddress{{IP: "10.0.0.1", NodeName: ptr.To("n1")}, {IP: "fd00::1"}},
			NotReadyAddresses: []corev1.EndpointAddress{{IP: "10.0.0.2"}},
			Ports:             []corev1.EndpointPort{{Name: "http", Port: 80}, {Name: "dns", Port: 53, Protocol: corev1.ProtocolUDP}},
		},
		corev1.EndpointSubset{
			Addresses: []corev1.EndpointAddress{{IP: "10.0.0.1"}}, Ports: []corev1.EndpointPort{{Name: "metrics", Port: 9090}},
		},
	)
	ss := mirrors{}.slices(web, e)
	require.Len(t, ss, 3)
	ip := netip.MustParseAddr
	for _, want := range []model.Slice{
		{
			Family: model.IPv4, Ports: []model.SlicePort{{Name: "dns", Protocol: model.UDP, Port: 53}, {Name: "http", Protocol: model.TCP, Port: 80}},
			Endpoints: []model.Endpoint{
				{Address: ip("10.0.0.1"), NodeName: "n1", Conditions: model.Conditions{Ready: true, Serving: true}},
				{Address: ip("10.0.0.2"), Conditions: model.Conditions{Serving: true}},
			},
		},
		{
			Family: model.IPv6, Ports: []model.SlicePort{{Name: "dns", Protocol: model.UDP, Port: 53}, {Name: "http", Protocol: model.TCP, Port: 80}},
			Endpoints: []model.Endpoint{{Address: ip("fd00::1"), Conditions: model.Conditions{Ready: true, Serving: true}}},
		},
		{
			Family: model.IPv4, Ports: []model.SlicePort{{Name: "metrics", Protocol: model.TCP, Port: 9090}},
			Endpoints: []model.Endpoint{{Address: ip("10.0.0.1"), Conditions: model.Conditions{Ready: true, Serving: true}}},
		},
	} {
		require.True(t, slices.ContainsFunc(ss, func(s *model.Slice) bool {
			want.Namespace, want.Name, want.Service = s.Namespace, s.Name, s.Service
			return s.ContentVersion() == model.NewSlice(want).ContentVersion()
		}), "%+v is missing", want)
	}
}

func TestMirrorNotReadyTrumpsReady(t *testing.T) {
	as := []corev1.EndpointAddress{{IP: "10.0.0.1"}}
	ports := []corev1.EndpointPort{{Port: 80}}
	for _, subsets := range [][]corev1.EndpointSubset{
		{{Addresses: as, Ports: ports}, {NotReadyAddresses: as, Ports: ports}},
		{{NotReadyAddresses: as, Ports: ports}, {Addresses: as, Ports: ports}},
	} {
		ss := mirrors{}.slices(web, endpointsOf(subsets...))
		require.Len(t, ss, 1)
		require.Equal(t, model.Conditions{Serving: true}, ss[0].Endpoints[0].Conditions)
	}
}

// TestMirrorPlacement checks over random histories that each address is in exactly one slice, that
// no slice is too large, and that no more slices change than addresses do.
func TestMirrorPlacement(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := mirrors{}
		var before []*model.Slice
		had := map[int]bool{}
		for range rapid.IntRange(1, 6).Draw(t, "steps") {
			have := map[int]bool{}
			var as []corev1.EndpointAddress
			from, to, gap := rapid.IntRange(0, 300).Draw(t, "from"), rapid.IntRange(0, 600).Draw(t, "to"), rapid.IntRange(2, 50).Draw(t, "gap")
			for i := from; i < to; i++ {
				if i%gap != 0 {
					have[i] = true
					as = append(as, addresses(i, 1)...)
				}
			}
			after := m.slices(web, endpointsOf(subset(as)))

			seen, names := map[netip.Addr]bool{}, map[string]bool{}
			for _, s := range after {
				if len(s.Endpoints) == 0 || len(s.Endpoints) > maxEndpointsPerSlice || names[s.Name] {
					t.Fatalf("bad slice %s with %d endpoints", s.Name, len(s.Endpoints))
				}
				names[s.Name] = true
				for _, e := range s.Endpoints {
					if seen[e.Address] {
						t.Fatalf("%s is in two slices", e.Address)
					}
					seen[e.Address] = true
				}
			}
			if len(seen) != len(as) {
				t.Fatalf("%d addresses are mirrored, want %d", len(seen), len(as))
			}
			moved := 0
			for i := range 600 {
				if had[i] != have[i] {
					moved++
				}
			}
			if n := changed(before, after); n > moved {
				t.Fatalf("%d slices changed for %d addresses", n, moved)
			}
			before, had = after, have
		}
	})
}
