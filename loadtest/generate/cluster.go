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
	// Seed of the order in which endpoints change.
	Seed uint64 `json:"seed"`
}

// Validate tells which number is out of range.
func (c Config) Validate() error {
	total := c.Services * c.Endpoints
	switch {
	case c.Nodes < 1 || c.Nodes >= size(nodeRange):
		return fmt.Errorf("%d nodes: use 1 to %d", c.Nodes, size(nodeRange)-1)
	case c.Services < 1 || c.Services >= size(serviceRange):
		return fmt.Errorf("%d services: use 1 to %d", c.Services, size(serviceRange)-1)
	case c.Endpoints < 1 || c.Endpoints >= size(podRange) || total >= size(podRange):
		return fmt.Errorf("%d services with %d endpoints each: use at least 1 endpoint, and less than %d in all",
			c.Services, c.Endpoints, size(podRange))
	}
	return nil
}

func size(p netip.Prefix) int { return 1 << (32 - p.Bits()) }

// Cluster is the state, as of the changes made so far. It is not safe for concurrent use; the objects are immutable.
type Cluster struct {
	config   Config
	services []*model.Service
	slices   []*model.Slice
	nodes    []*model.Node
	// order in which endpoints change, by their number; it is walked again and again, so that an endpoint changes a second
	// time only after all others have: nothing is undone while it may still wait to be published.
	order []uint32
}

// New makes the state before any change: all endpoints are ready.
func New(c Config) (*Cluster, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	g := &Cluster{config: c}
	for n := range c.Nodes {
		g.nodes = append(g.nodes, c.node(n))
	}
	for s := range c.Services {
		g.services = append(g.services, c.service(s))
		for i := range c.slicesPerService() {
			g.slices = append(g.slices, c.slice(s, i))
		}
	}
	g.order = make([]uint32, c.Services*c.Endpoints)
	for i := range g.order {
		g.order[i] = uint32(i)
	}
	rand.New(rand.NewPCG(c.Seed, 0)).Shuffle(len(g.order), func(i, j int) { g.order[i], g.order[j] = g.order[j], g.order[i] })
	return g, nil
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

func (c Config) slicesPerService() int { return (c.Endpoints + sliceSize - 1) / sliceSize }

func (c Config) node(n int) *model.Node {
	ip := nth(nodeRange, n+1)
	return &model.Node{
		Name: NodeName(n),
		Labels: map[string]string{
			"kubernetes.io/hostname":        NodeName(n),
			"kubernetes.io/os":              "linux",
			"topology.kubernetes.io/region": "region-1",
			"topology.kubernetes.io/zone":   zones[n%len(zones)],
		},
		InternalIPs: []netip.Addr{ip},
	}
}

func (c Config) service(s int) *model.Service {
	return model.NewService(model.Service{
		Namespace: namespace(s), Name: serviceName(s), Type: model.ClusterIP,
		ClusterIPs:          []netip.Addr{nth(serviceRange, s+1)},
		Ports:               []model.ServicePort{{Name: "http", Protocol: model.TCP, Port: 80}},
		CreationTimeSeconds: 1_700_000_000 + int64(s),
	})
}

func (c Config) slice(service, index int) *model.Slice {
	s := model.Slice{
		Namespace: namespace(service), Name: fmt.Sprintf("%s-%05x", serviceName(service), index), Service: serviceName(service),
		Family: model.IPv4,
		Ports:  []model.SlicePort{{Name: "http", Protocol: model.TCP, Port: 8080}},
	}
	for e := index * sliceSize; e < min((index+1)*sliceSize, c.Endpoints); e++ {
		pod := service*c.Endpoints + e
		node := pod % c.Nodes
		s.Endpoints = append(s.Endpoints, model.Endpoint{
			Address:    c.address(pod),
			Conditions: model.Conditions{Ready: true, Serving: true},
			NodeName:   NodeName(node),
			Zone:       zones[node%len(zones)],
		})
	}
	return model.NewSlice(s)
}

func (c Config) address(pod int) netip.Addr { return nth(podRange, pod+1) }

func namespace(service int) string { return fmt.Sprintf("team-%03d", service/servicesPerNamespace) }

func serviceName(service int) string { return fmt.Sprintf("service-%05d", service) }

// nth gives an address of an IPv4 prefix.
func nth(p netip.Prefix, n int) netip.Addr {
	b := p.Addr().As4()
	v := uint32(b[0])<<24 | uint32(b[1])<<16 | uint32(b[2])<<8 | uint32(b[3])
	v += uint32(n)
	return netip.AddrFrom4([4]byte{byte(v >> 24), byte(v >> 16), byte(v >> 8), byte(v)})
}
