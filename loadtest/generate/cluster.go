// Package generate makes the state of a cluster that does not exist, and changes it on a schedule, as pods come and go and the
// EndpointSlice controller writes it down. Both follow from a few numbers and a seed, so that the processes that serve the
// state and those that check what arrives need not exchange it: each makes its own and they must agree.
package generate

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"

	"github.com/slicecast/slicecast/internal/model"
)

// servicesPerNamespace is how many Services share a namespace.
const servicesPerNamespace = 50

var (
	podRange     = netip.MustParsePrefix("100.64.0.0/10")
	serviceRange = netip.MustParsePrefix("10.96.0.0/12")
	nodeRange    = netip.MustParsePrefix("172.16.0.0/12")
)

var zones = []string{"zone-a", "zone-b", "zone-c"}

// Group is a number of Services with Least to Most endpoints each, all sizes being as likely.
type Group struct {
	Count int `json:"count"`
	Least int `json:"least"`
	Most  int `json:"most"`
}

// Config is what a Cluster follows from.
type Config struct {
	// Nodes of the cluster; the endpoints are spread over them.
	Nodes int `json:"nodes"`
	// Services, each with one port.
	Services []Group `json:"services"`
	// Changing are more Services: those whose endpoints change. Without any, all do.
	Changing []Group `json:"changing"`
	// Seed of where endpoints are and in which order they change.
	Seed uint64 `json:"seed"`
	// Change is what will happen, for which the state is prepared: to flip, every other endpoint in the order of changes is
	// not ready, so that changes go both ways in turns; to scale, the Services that change have no endpoints yet.
	Change Kind `json:"change"`
	// Namespace that all Services are in; empty: several.
	Namespace string `json:"namespace,omitempty"`
}

// Validate tells which number is out of range.
func (c Config) Validate() error {
	// Addresses are drawn until one is free, so half of them stay free. What is replaced takes new ones.
	pods := size(podRange) / 4
	services, endpoints := 0, 0
	for _, g := range slices.Concat(c.Services, c.Changing) {
		if g.Count < 0 || g.Count >= size(serviceRange) || g.Least < 1 || g.Most < g.Least || g.Most > pods {
			return fmt.Errorf("%d services with %d to %d endpoints: use 0 to %d services, and 1 to %d endpoints", g.Count, g.Least, g.Most,
				size(serviceRange)-1, pods)
		}
		services += g.Count
		endpoints += g.Count * g.Most
	}
	switch {
	case c.Nodes < 1 || c.Nodes >= size(nodeRange):
		return fmt.Errorf("%d nodes: use 1 to %d", c.Nodes, size(nodeRange)-1)
	case services < 1 || services >= size(serviceRange):
		return fmt.Errorf("%d services: use 1 to %d in all", services, size(serviceRange)-1)
	case endpoints > pods:
		return fmt.Errorf("%d endpoints: use at most %d in all", endpoints, pods)
	case c.Change == Drain && c.Nodes < 2:
		return fmt.Errorf("there is %d node, and nowhere for the pods of a drained one to go: use at least 2", c.Nodes)
	}
	return nil
}

func size(p netip.Prefix) int { return 1 << (32 - p.Bits()) }

// Cluster is the state, as of the changes made so far. It is not safe for concurrent use; the objects that it gives are
// immutable.
type Cluster struct {
	config   Config
	nodes    []*model.Node
	services []*service
	changing []*service
	pods     placement
	// order in which endpoints flip, and how many have; it is walked again and again, so that an endpoint changes a second
	// time only after all others have: nothing is undone while it may still wait to be published.
	order   []place
	flipped int
}

// place is where an endpoint is.
type place struct {
	service  *service
	slice    *slice
	endpoint int
}

// New makes the state before any change.
func New(c Config) (*Cluster, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	g := &Cluster{config: c}
	for n := range c.Nodes {
		g.nodes = append(g.nodes, node(n))
	}
	g.pods = placement{random: rand.New(rand.NewPCG(c.Seed, 1)), nodes: g.nodes, taken: make(map[int]struct{}), away: make(map[string]struct{})}
	sizes := rand.New(rand.NewPCG(c.Seed, 2))
	add := func(groups []Group, empty bool) {
		for _, group := range groups {
			for range group.Count {
				g.add(group.Least+sizes.IntN(group.Most-group.Least+1), empty)
			}
		}
	}
	add(c.Services, c.Change == Scale && len(c.Changing) == 0)
	g.changing = g.services
	if first := len(g.services); len(c.Changing) > 0 {
		add(c.Changing, c.Change == Scale)
		g.changing = g.services[first:]
	}
	if c.Change == Flip {
		g.walk()
		for i := 1; i < len(g.order); i += 2 {
			g.flip(g.order[i])
		}
	}
	return g, nil
}

// add adds a Service.
func (g *Cluster) add(endpoints int, empty bool) {
	number := len(g.services)
	s := &service{object: newService(number, g.config.Namespace), wanted: endpoints}
	var pods []model.Endpoint
	for range endpoints {
		if !empty {
			pods = append(pods, g.pods.next())
		}
	}
	s.sync(nil, nil, pods)
	g.services = append(g.services, s)
}

// walk lists the endpoints that flip, as they are now, and shuffles them: those of the Services that change, or, as long as
// these have none, of all.
func (g *Cluster) walk() {
	of := g.changing
	if !slices.ContainsFunc(of, func(s *service) bool { return len(s.addresses()) > 0 }) {
		of = g.services
	}
	for _, s := range of {
		for _, slice := range s.slices {
			for e := range slice.endpoints {
				g.order = append(g.order, place{s, slice, e})
			}
		}
	}
	rand.New(rand.NewPCG(g.config.Seed, 0)).Shuffle(len(g.order), func(i, j int) { g.order[i], g.order[j] = g.order[j], g.order[i] })
}

// placement gives pods their addresses and nodes: at random, as nothing in a real cluster sorts pods by Service, and
// what follows from the order would make what is sent smaller than it is.
type placement struct {
	random *rand.Rand
	nodes  []*model.Node
	taken  map[int]struct{}
	away   map[string]struct{} // nodes that take none
}

func (p *placement) next() model.Endpoint {
	n := p.random.IntN(len(p.nodes))
	for drained := true; drained; _, drained = p.away[p.nodes[n].Name] {
		n = p.random.IntN(len(p.nodes))
	}
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
func (g *Cluster) Objects() (out []model.Object) {
	for _, s := range g.services {
		out = append(out, s.object)
	}
	for _, s := range g.services {
		for _, slice := range s.slices {
			out = append(out, slice.object(s))
		}
	}
	return out
}

// Nodes gives the nodes.
func (g *Cluster) Nodes() []*model.Node { return g.nodes }

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

func newService(number int, namespace string) *model.Service {
	if namespace == "" {
		namespace = fmt.Sprintf("team-%03d", number/servicesPerNamespace)
	}
	return model.NewService(model.Service{
		Namespace: namespace, Name: fmt.Sprintf("service-%05d", number), Type: model.ClusterIP,
		ClusterIPs:          []netip.Addr{nth(serviceRange, number+1)},
		Ports:               []model.ServicePort{{Name: portName, Protocol: model.TCP, Port: 80}},
		CreationTimeSeconds: 1_700_000_000 + int64(number),
	})
}

// nth gives an address of an IPv4 prefix.
func nth(p netip.Prefix, n int) netip.Addr {
	b := p.Addr().As4()
	v := uint32(b[0])<<24 | uint32(b[1])<<16 | uint32(b[2])<<8 | uint32(b[3])
	v += uint32(n)
	return netip.AddrFrom4([4]byte{byte(v >> 24), byte(v >> 16), byte(v >> 8), byte(v)})
}
