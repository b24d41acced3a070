// Package generate makes the state of a cluster that does not exist, and changes it on a schedule. Both follow from a few
// numbers and a seed, so that the process that serves the state and the one that checks what arrives need not exchange it:
// each makes its own and they must agree.
package generate

import (
	"fmt"
	"math/rand/v2"
	"net/netip"

	"github.com/slicecast/slicecast/internal/model"
)

// sliceSize is how many endpoints a slice has at most: the EndpointSlice controller's default.
const sliceSize = 100

// servicesPerNamespace is how many Services share a namespace.
const servicesPerNamespace = 50

var (
	podRange     = netip.MustParsePrefix("100.64.0.0/10")
	serviceRange = netip.MustParsePrefix("10.96.0.0/12")
	nodeRange    = netip.MustParsePrefix("172.16.0.0/12")
)

var zones = []string{"zone-a", "zone-b", "zone-c"}

// Config is what a Cluster follows from.
type Config struct {
	// Nodes of the cluster; the endpoints are spread over them.
	Nodes int `json:"nodes"`
	// Services, each with one port.
	Services int `json:"services"`
	// Endpoints of each Service.
	Endpoints int `json:"endpoints"`
	// LargeServices are more Services, of LargeEndpoints each. If there are any, it is their endpoints that change.
	LargeServices  int `json:"largeServices"`
	LargeEndpoints int `json:"largeEndpoints"`
	// Seed of where endpoints are and in which order they change.
	Seed uint64 `json:"seed"`
}

// Validate tells which number is out of range.
func (c Config) Validate() error {
	total := c.total()
	// Addresses are drawn until one is free, so half of them stay free.
	pods := size(podRange) / 2
	switch {
	case c.Nodes < 1 || c.Nodes >= size(nodeRange):
		return fmt.Errorf("%d nodes: use 1 to %d", c.Nodes, size(nodeRange)-1)
	case c.Services < 1 || c.LargeServices < 0 || c.Services+c.LargeServices >= size(serviceRange):
		return fmt.Errorf("%d services and %d large ones: use 1 to %d in all", c.Services, c.LargeServices, size(serviceRange)-1)
	case c.Endpoints < 1 || c.LargeServices > 0 && c.LargeEndpoints < 1 || max(c.Endpoints, c.LargeEndpoints) > pods || total > pods:
		return fmt.Errorf("%d services with %d endpoints each, %d with %d: use at least 1 endpoint, and at most %d in all",
			c.Services, c.Endpoints, c.LargeServices, c.LargeEndpoints, pods)
	}
	return nil
}

// total number of endpoints.
func (c Config) total() int { return c.Services*c.Endpoints + c.LargeServices*c.LargeEndpoints }

func size(p netip.Prefix) int { return 1 << (32 - p.Bits()) }

// Cluster is the state, as of the changes made so far. It is not safe for concurrent use; the objects are immutable.
type Cluster struct {
	services []*model.Service
	slices   []*model.Slice
	nodes    []*model.Node
	// order in which endpoints change; it is walked again and again, so that an endpoint changes a second time only after
	// all others have: nothing is undone while it may still wait to be published.
	order []place
}

// place is where an endpoint is: index in Cluster.slices, and in the slice's endpoints.
type place struct{ slice, endpoint uint32 }

// New makes the state before any change. Every other endpoint in the order of changes is not ready, so that changes go both
// ways in turns.
func New(c Config) (*Cluster, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	g := &Cluster{}
	for n := range c.Nodes {
		g.nodes = append(g.nodes, node(n))
	}
	p := placement{random: rand.New(rand.NewPCG(c.Seed, 1)), nodes: g.nodes, taken: make(map[int]struct{}, c.total())}
	for s := range c.Services + c.LargeServices {
		endpoints := c.Endpoints
		if s >= c.Services {
			endpoints = c.LargeEndpoints
		}
		changes := c.LargeServices == 0 || s >= c.Services
		g.add(service(s), endpoints, changes, &p)
	}
	rand.New(rand.NewPCG(c.Seed, 0)).Shuffle(len(g.order), func(i, j int) { g.order[i], g.order[j] = g.order[j], g.order[i] })
	away := make(map[uint32][]uint32) // endpoints that are not ready, by slice
	for i := 1; i < len(g.order); i += 2 {
		away[g.order[i].slice] = append(away[g.order[i].slice], g.order[i].endpoint)
	}
	for slice, endpoints := range away {
		g.flip(slice, 0, endpoints...)
	}
	return g, nil
}

// add adds a Service and its slices. Its endpoints are among those that change, or not.
func (g *Cluster) add(service *model.Service, endpoints int, changes bool, p *placement) {
	g.services = append(g.services, service)
	for first := 0; first < endpoints; first += sliceSize {
		s := model.Slice{
			Namespace: service.Namespace, Name: fmt.Sprintf("%s-%05x", service.Name, first/sliceSize), Service: service.Name,
			Family: model.IPv4,
			Ports:  []model.SlicePort{{Name: "http", Protocol: model.TCP, Port: 8080}},
		}
		for e := range min(sliceSize, endpoints-first) {
			s.Endpoints = append(s.Endpoints, p.endpoint())
			if changes {
				g.order = append(g.order, place{uint32(len(g.slices)), uint32(e)})
			}
		}
		g.slices = append(g.slices, model.NewSlice(s))
	}
}

// placement gives endpoints their addresses and nodes: at random, as nothing in a real cluster sorts pods by Service, and
// what follows from the order would make what is sent smaller than it is.
type placement struct {
	random *rand.Rand
	nodes  []*model.Node
	taken  map[int]struct{}
}

func (p *placement) endpoint() model.Endpoint {
	n := p.random.IntN(len(p.nodes))
	pod := 0
	for used := true; used; _, used = p.taken[pod] {
		pod = 1 + p.random.IntN(size(podRange)-1)
	}
	p.taken[pod] = struct{}{}
	return model.Endpoint{
		Address:    nth(podRange, pod),
		Conditions: model.Conditions{Ready: true, Serving: true},
		NodeName:   p.nodes[n].Name,
		Zone:       zones[n%len(zones)],
	}
}

// NodeName gives the name of a node by its number.
func NodeName(n int) string { return fmt.Sprintf("node-%05d", n) }

// Objects gives the Services and slices as they are.
func (g *Cluster) Objects() []model.Object {
	out := make([]model.Object, 0, len(g.services)+len(g.slices))
	for _, s := range g.services {
		out = append(out, s)
	}
	for _, s := range g.slices {
		out = append(out, s)
	}
	return out
}

func node(n int) *model.Node {
	return &model.Node{
		Name: NodeName(n),
		Labels: map[string]string{
			"kubernetes.io/hostname":        NodeName(n),
			"kubernetes.io/os":              "linux",
			"topology.kubernetes.io/region": "region-1",
			"topology.kubernetes.io/zone":   zones[n%len(zones)],
		},
		InternalIPs: []netip.Addr{nth(nodeRange, n+1)},
	}
}

func service(s int) *model.Service {
	return model.NewService(model.Service{
		Namespace: namespace(s), Name: serviceName(s), Type: model.ClusterIP,
		ClusterIPs:          []netip.Addr{nth(serviceRange, s+1)},
		Ports:               []model.ServicePort{{Name: "http", Protocol: model.TCP, Port: 80}},
		CreationTimeSeconds: 1_700_000_000 + int64(s),
	})
}

func namespace(service int) string { return fmt.Sprintf("team-%03d", service/servicesPerNamespace) }

func serviceName(service int) string { return fmt.Sprintf("service-%05d", service) }

// nth gives an address of an IPv4 prefix.
func nth(p netip.Prefix, n int) netip.Addr {
	b := p.Addr().As4()
	v := uint32(b[0])<<24 | uint32(b[1])<<16 | uint32(b[2])<<8 | uint32(b[3])
	v += uint32(n)
	return netip.AddrFrom4([4]byte{byte(v >> 24), byte(v >> 16), byte(v >> 8), byte(v)})
}
