package view_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// kinds makes one endpoint for each combination.
func kinds(conditions []model.Conditions, nodeNames []string, hints [][2]string) []model.Endpoint {
	var out []model.Endpoint
	for _, c := range conditions {
		for _, node := range nodeNames {
			for _, h := range hints {
				e := model.Endpoint{Conditions: c, NodeName: node}
				if h[0] != "" {
					e.NodeHints = []string{h[0]}
				}
				if h[1] != "" {
					e.ZoneHints = []string{h[1]}
				}
				out = append(out, e)
			}
		}
	}
	return out
}

// TestCombinations holds the view to the oracle for traffic policies × conditions × nodes × hints × zones: all pairs of endpoints
// of all kinds, and all triples of those kinds that kube-proxy tells apart.
func TestCombinations(t *testing.T) {
	var all []model.Conditions
	for i := range 8 {
		all = append(all, model.Conditions{Ready: i&1 > 0, Serving: i&2 > 0, Terminating: i&4 > 0})
	}
	hints := [][2]string{{"", ""}, {here, ""}, {elsewhere, "zone-a"}, {"", "zone-a"}, {"", "zone-b"}, {here, "zone-b"}}
	pairs := kinds(all, []string{here, elsewhere}, hints)
	triples := kinds([]model.Conditions{{Ready: true, Serving: true}, {Serving: true, Terminating: true}, {}}, []string{here, elsewhere}, hints[2:])

	c := newCombinations(t)
	for i := range pairs {
		for j := range pairs[:i+1] {
			c.check(pairs[i], pairs[j])
		}
	}
	for i := range triples {
		for j := range triples[:i+1] {
			for k := range triples[:j+1] {
				c.check(triples[i], triples[j], triples[k])
			}
		}
	}
}

// combinations holds a Service for each pair of policies, with and without external addresses, and a view for each zone.
type combinations struct {
	t        *testing.T
	views    []*view.View
	worlds   []*world
	services []*model.Service
	asked    []connection
}

func newCombinations(t *testing.T) *combinations {
	c := &combinations{t: t}
	for _, zone := range []string{"", "zone-a", "zone-c"} {
		n := &model.Node{Name: here, Labels: map[string]string{"topology.kubernetes.io/zone": zone}}
		v := view.New(options)
		v.SetNode(n)
		v.Changes()
		c.views = append(c.views, v)
		c.worlds = append(c.worlds, &world{options: options, node: n})
	}
	for _, external := range []bool{false, true} {
		for _, itp := range []model.TrafficPolicy{model.TrafficCluster, model.TrafficLocal} {
			for _, etp := range []model.TrafficPolicy{model.TrafficCluster, model.TrafficLocal} {
				c.services = append(c.services, service(web, func(s *model.Service) {
					s.InternalTrafficPolicy, s.ExternalTrafficPolicy = itp, etp
					if external {
						externalIP("203.0.113.1")(s)
					}
				}))
			}
		}
	}
	for _, from := range origins {
		for _, to := range addrs("10.96.0.1", "203.0.113.1") {
			c.asked = append(c.asked, connection{from: from, source: addr("198.51.100.1"), to: to, port: 80, protocol: model.TCP, family: model.IPv4})
		}
	}
	return c
}

func (c *combinations) check(endpoints ...model.Endpoint) {
	for i := range endpoints {
		endpoints[i].Address = addr([]string{"10.180.0.1", "10.180.0.2", "10.180.0.3"}[i])
	}
	held := []*model.Slice{slice("s", endpoints...)}
	for _, s := range c.services {
		for i, v := range c.views {
			v.Set(web, s, held)
			v.Changes()
			c.worlds[i].services, c.worlds[i].slices = map[model.ServiceKey]*model.Service{web: s}, held
			for _, asked := range c.asked {
				if want, got := c.worlds[i].fate(asked), observed(v.State(), asked); !want.equal(got) {
					require.Equal(c.t, want, got, "%+v\n%+v\n%+v\n%+v", asked, s, endpoints, c.worlds[i].node)
				}
			}
		}
	}
}
