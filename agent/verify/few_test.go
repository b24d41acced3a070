// This test proves that what the programmers write for few Services of one kind, or none, with
// various settings of the node, is as wanted. Then no packet matches some of their rules.
package verify

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/slicecast/slicecast/agent/programmer/iptables"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

// fewServices returns parts of the example's Services, by name. A part has no Service, a single
// Service port, or one of its frontends. A frontend with source ranges comes again with the last
// one alone, which contains no pods.
func fewServices() map[string]map[view.ServicePortID]*view.ServicePort {
	all := map[string]map[view.ServicePortID]*view.ServicePort{"nothing": {}}
	for id, p := range exampleState(nil).Ports {
		for i := -1; i < len(p.Frontends); i++ {
			name, q := id.Service.Name, *p
			if i >= 0 {
				name += fmt.Sprint(" at its ", p.Frontends[i].Kind)
				q.Frontends = p.Frontends[i : i+1]
			}
			add := func(name string, p view.ServicePort) {
				if all[name] == nil {
					all[name] = map[view.ServicePortID]*view.ServicePort{}
				}
				all[name][id] = &p
			}
			add(name, q)
			if i >= 0 && len(p.Frontends[i].Sources) > 0 {
				limited := p.Frontends[i]
				limited.Sources = limited.Sources[len(limited.Sources)-1:]
				q.Frontends = []view.Frontend{limited}
				add(name+" without pods", q)
			}
		}
	}
	return all
}

// programmers program a node, by the name of the programmer.
var programmers = map[string]func(*testing.T, *testenv.Node, view.State){
	"nftables":        replaceNFT,
	"iptables-nft":    func(t *testing.T, n *testenv.Node, s view.State) { replaceIPTables(t, n, iptables.NFT, s) },
	"iptables-legacy": func(t *testing.T, n *testenv.Node, s view.State) { replaceIPTables(t, n, iptables.Legacy, s) },
}

func TestFewServices(t *testing.T) {
	t.Parallel()
	settings := map[string]func(*view.Node){
		"as the example":         func(*view.Node) {},
		"NodePorts on loopback":  func(n *view.Node) { n.LocalhostNodePorts = true },
		"NodePorts on one range": func(n *view.Node) { n.NodePorts = []netip.Prefix{netip.MustParsePrefix("192.168.0.0/16")} },
		"no NodePorts":           func(n *view.Node) { n.NodePorts = nil },
		"pods are not told":      func(n *view.Node) { n.Pods = view.PodDetector{} },
		"pods by interface":      func(n *view.Node) { n.Pods = view.PodDetector{InterfacePrefix: "veth"} },
		"pods by bridge":         func(n *view.Node) { n.Pods = view.PodDetector{Interface: "cni0"} },
		"no ranges":              func(n *view.Node) { n.ServiceCIDRs = nil },
		"IPv4 alone": func(n *view.Node) {
			n.NodePorts, n.ServiceCIDRs, n.Primary = n.NodePorts[:1], n.ServiceCIDRs[:1], model.IPv4
		},
	}
	for name, replace := range programmers {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			node := newNode(t)
			for of, ports := range fewServices() {
				for setting, set := range settings {
					if setting != "as the example" && strings.Contains(of, " at its ") && !strings.Contains(of, "without pods") {
						continue
					}
					state := exampleState(node)
					state.Ports = ports
					set(&state.Node)
					replace(t, node, state)
					assert.Empty(t, sentences(compare(t, node, state)), "%s, %s", of, setting)
				}
			}
		})
	}
}
