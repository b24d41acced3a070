// This test proves that the view agrees with the oracle for all combinations of traffic policies,
// conditions, nodes, hints and zones that can matter to a Service's endpoints.
package view_test

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// kinds returns one endpoint for each combination.
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

// TestCombinations compares the view with the oracle for traffic policies × conditions × nodes ×
// hints × zones. It covers all pairs of endpoints of all kinds, and all triples of the kinds that
// kube-proxy distinguishes.
func TestCombinations(t *testing.T) {
	var all []model.Conditions
	for i := range 8 {
		all = append(all, model.Conditions{Ready: i&1 > 0, Serving: i&2 > 0, Terminating: i&4 > 0})
	}
	hints := [][2]string{{"", ""}, {here, ""}, {elsewhere, "zone-a"}, {"", "zone-a"}, {"", "zone-b"}, {here, "zone-b"}}
	pairs := kinds(all, []string{here, elsewhere}, hints)
	triples := kinds([]model.Conditions{{Ready: true, Serving: true}, {Serving: true, Terminating: true}, {}}, []string{here, elsewhere}, hints[2:])

	for _, zone := range []string{"", "zone-a", "zone-c"} {
		t.Run("node in "+zone, func(t *testing.T) {
			t.Parallel()
			c := newCombinations(t, zone)
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
		})
	}
}

// combinations is a view with Services of all policies, with and without an external address.
type combinations struct {
	t     *testing.T
	view  *view.View
	world world
	cases []combination
}

// combination is a Service and the connections whose fate is compared.
type combination struct {
	service *model.Service
	asked   []connection
}

func newCombinations(t *testing.T, zone string) *combinations {
	n := &model.Node{Name: here, Labels: map[string]string{"topology.kubernetes.io/zone": zone}}
	c := &combinations{t: t, view: view.New(options), world: world{options: options, node: n}}
	c.view.SetNode(n)
	asked := func(to netip.Addr) (out []connection) {
		for _, from := range origins {
			out = append(out, connection{from: from, source: addr("198.51.100.1"), to: to, port: 80, protocol: model.TCP, family: model.IPv4})
		}
		return out
	}
	internal, external := asked(addr("10.96.0.1")), asked(addr("203.0.113.1"))
	for _, itp := range []model.TrafficPolicy{model.TrafficCluster, model.TrafficLocal} {
		policy := func(s *model.Service) { s.InternalTrafficPolicy = itp }
		c.cases = append(c.cases, combination{service(web, policy), internal},
			combination{service(web, policy, externalIP("203.0.113.1")), slices.Concat(internal, external)},
			combination{service(web, policy, externalIP("203.0.113.1"), externalLocal), slices.Concat(internal, external)})
	}
	return c
}

func (c *combinations) check(endpoints ...model.Endpoint) {
	for i := range endpoints {
		endpoints[i].Address = addr([]string{"10.180.0.1", "10.180.0.2", "10.180.0.3"}[i])
	}
	held := []*model.Slice{slice("s", endpoints...)}
	for _, of := range c.cases {
		c.view.Set(web, of.service, held)
		c.view.Update()
		c.world.services, c.world.slices = map[model.ServiceKey]*model.Service{web: of.service}, held
		for _, asked := range of.asked {
			if want, got := c.world.fate(asked), observed(c.view.State(), asked); !want.equal(got) {
				require.Equal(c.t, want, got, "%+v\n%+v\n%+v\n%+v", asked, of.service, endpoints, c.world.node)
			}
		}
	}
}
