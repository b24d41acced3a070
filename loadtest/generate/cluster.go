// Package generate generates the state of an imaginary cluster and changes it on a schedule. Pods
// come and go, and slices change as the EndpointSlice controller would change them. State and
// changes follow from a few numbers and a seed. Processes that serve the state and processes that
// check what arrives therefore need not exchange it: each generates its own copy, and all copies
// are equal.
package generate

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"

	"github.com/slicecast/slicecast/internal/model"
)

// servicesPerNamespace is the number of Services that share a namespace.
const servicesPerNamespace = 50

var (
	podRange     = netip.MustParsePrefix("100.64.0.0/10")
	serviceRange = netip.MustParsePrefix("10.96.0.0/12")
	nodeRange    = netip.MustParsePrefix("172.16.0.0/12")
)

var zones = []string{"zone-a", "zone-b", "zone-c"}

// Group is a number of Services with Least to Most endpoints each. All sizes in this range are
// equally likely.
type Group struct {
	Count int `json:"count"`
	Least int `json:"least"`
	Most  int `json:"most"`
}

// Config determines the state of a Cluster.
type Config struct {
	// Nodes is the number of nodes. The endpoints are spread over them at random.
	Nodes int `json:"nodes"`
	// Services are the Services, each with one port. Their endpoints change only if Changing is
	// empty.
	Services []Group `json:"services"`
	// Changing are further Services: those whose endpoints change.
	Changing []Group `json:"changing"`
	// Seed is the seed of the placement of endpoints and of the order in which they change.
	Seed uint64 `json:"seed"`
	// Change is the kind of the changes to come, for which the state is prepared. For Flip, every
	// other endpoint in the order of changes is not ready, so that changes alternate in direction.
	// For Scale, the Services that change have no endpoints yet.
	Change Kind `json:"change"`
	// Namespace is the namespace of all Services. If it is empty, there are several namespaces.
	Namespace string `json:"namespace,omitempty"`
}

// Validate returns an error that names a number out of range, if there is one.
func (c Config) Validate() error {
	// Addresses are drawn at random until one is free, so at least half of them have to stay free.
	// Replaced pods get new addresses.
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
		return fmt.Errorf("%d node: use at least 2, so that the pods of a drained node can move to another", c.Nodes)
	}
	return nil
}

func size(p netip.Prefix) int { return 1 << (32 - p.Bits()) }

// Cluster is the state after the changes made so far. It is not safe for concurrent use. The
// objects that it returns are immutable.
type Cluster struct {
	config   Config
	nodes    []*model.Node
	services []*service
	changing []*service
	pods     placement
	// order lists the endpoints in the order in which they flip; flipped counts flips. After its
	// end, order starts again, so an endpoint flips for a second time only after all others have
	// flipped. Hence no flip is undone while the first one may still wait to be published.
	order   []place
	flipped int
}

type place struct {
	service  *service
	slice    *slice
	endpoint int
}

// New returns the state before any change.
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

// add adds a Service and its slices. An empty Service gets its pods later, by Scale.
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

// walk appends the endpoints that flip to order and shuffles them. They are those of the Services
// that change or, if these have none yet, of all Services.
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

// placement assigns addresses and nodes to pods. It does so at random, because pods of real
// clusters are not sorted by Service, and sorted pods would make messages smaller than they really
// are.
type placement struct {
	random *rand.Rand
	nodes  []*model.Node
	taken  map[int]struct{}
	away   map[string]struct{} // drained nodes, which get no pods
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

// NodeName returns the name of node n.
func NodeName(n int) string { return fmt.Sprintf("node-%05d", n) }

// Objects returns the current Services and slices.
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

func node(n int) *model.Node {
	return &model.Node{
		Name: NodeName(n),
		Labels: map[string]string{
			"kubernetes.io/hostname":        NodeName(n),
			"kubernetes.io/os":              "linux",
			"topology.kubernetes.io/region": "region-1",
			"topology.kubernetes.io/zone":   zones[n%len(zones)],
		},
		Addresses: []netip.Addr{nth(nodeRange, n+1)},
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

// nth returns address n of an IPv4 prefix.
func nth(p netip.Prefix, n int) netip.Addr {
	b := p.Addr().As4()
	binary.BigEndian.PutUint32(b[:], binary.BigEndian.Uint32(b[:])+uint32(n))
	return netip.AddrFrom4(b)
}
