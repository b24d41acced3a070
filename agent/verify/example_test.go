// This file has the state that the tests program: a Service of each kind.
package verify

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

var (
	podCIDRs     = []netip.Prefix{netip.MustParsePrefix("10.180.0.0/16"), netip.MustParsePrefix("fd00:10:180::/48")}
	serviceCIDRs = []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd00:10:96::/112")}

	toCluster     = view.Route{To: view.Cluster}
	toClusterMasq = view.Route{To: view.Cluster, Masquerade: true}
	toLocal       = view.Route{To: view.Local}
	toLocalMasq   = view.Route{To: view.Local, Masquerade: true}
)

// address returns an address in a network of the family.
func address(family model.Family, network string, last byte) netip.Addr {
	if family == model.IPv4 {
		return netip.MustParseAddr(fmt.Sprintf("10.%s.0.%d", network, last))
	}
	return netip.MustParseAddr(fmt.Sprintf("fd00:10:%s::%x", network, last))
}

// pods returns backends. The first is on this node.
func pods(family model.Family, first byte, count int) view.Backends {
	var all []view.Backend
	for i := range count {
		a := address(family, "180", first+byte(i))
		all = append(all, view.Backend{Address: netip.AddrPortFrom(a, 8080), Local: i == 0})
	}
	return view.NewBackends(all...)
}

func id(name string, protocol model.Protocol, family model.Family) view.ServicePortID {
	return view.ServicePortID{Service: model.ServiceKey{Namespace: "shop", Name: name}, Port: "http", Protocol: protocol, Family: family}
}

func frontend(kind view.FrontendKind, a netip.Addr, port uint16, pods, node, others view.Route) view.Frontend {
	return view.Frontend{Kind: kind, Address: a, Port: port, Pods: pods, Node: node, Others: others}
}

// clusterIP returns the frontend of an ordinary cluster IP.
func clusterIP(family model.Family, last byte) view.Frontend {
	return frontend(view.ClusterIP, address(family, "96", last), 80, toCluster, toClusterMasq, toClusterMasq)
}

// exampleState returns a state with a Service of each kind in both families.
func exampleState(*testenv.Node) view.State {
	s := view.State{
		Node: view.Node{
			Pods:      view.PodDetector{Prefixes: podCIDRs},
			NodePorts: []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")}, ServiceCIDRs: serviceCIDRs,
		},
		Ports: map[view.ServicePortID]*view.ServicePort{},
	}
	reject, drop := view.Route{To: view.Reject}, view.Route{To: view.Drop}
	for _, f := range []model.Family{model.IPv4, model.IPv6} {
		add := func(p view.ServicePort) { s.Ports[p.ID] = &p }
		add(view.ServicePort{
			ID: id("web", model.TCP, f), Cluster: pods(f, 1, 3),
			Frontends: []view.Frontend{
				clusterIP(f, 1),
				frontend(view.ExternalIP, address(f, "97", 1), 80, toClusterMasq, toClusterMasq, toClusterMasq),
				frontend(view.NodePort, netip.Addr{}, 30001, toClusterMasq, toClusterMasq, toClusterMasq),
			},
		})
		add(view.ServicePort{
			ID: id("dns", model.UDP, f), Cluster: pods(f, 11, 21), Frontends: []view.Frontend{clusterIP(f, 2)},
		})
		add(view.ServicePort{
			ID: id("sticky", model.TCP, f), Cluster: pods(f, 41, 3), Affinity: 3 * time.Hour,
			Frontends: []view.Frontend{
				clusterIP(f, 3), frontend(view.NodePort, netip.Addr{}, 30003, toClusterMasq, toClusterMasq, toClusterMasq),
			},
		})
		ranges := frontend(view.LoadBalancer, address(f, "97", 4), 80, toCluster, toClusterMasq, toLocal)
		bits := 24
		if f == model.IPv6 {
			bits = 112
		}
		ranges.Sources = []netip.Prefix{podCIDRs[f-model.IPv4], netip.PrefixFrom(address(f, "98", 0), bits)}
		add(view.ServicePort{
			ID: id("edge", model.TCP, f), Cluster: pods(f, 51, 3), Local: pods(f, 51, 1),
			Frontends: []view.Frontend{
				clusterIP(f, 4), ranges, frontend(view.NodePort, netip.Addr{}, 30004, toCluster, toClusterMasq, toLocal),
			},
		})
		add(view.ServicePort{
			ID: id("inner", model.TCP, f), Local: pods(f, 61, 1),
			Frontends: []view.Frontend{frontend(view.ClusterIP, address(f, "96", 6), 80, toLocal, toLocalMasq, toLocalMasq)},
		})
		add(view.ServicePort{
			ID: id("none", model.TCP, f),
			Frontends: []view.Frontend{
				frontend(view.ClusterIP, address(f, "96", 5), 80, reject, reject, reject),
				frontend(view.LoadBalancer, address(f, "97", 5), 80, reject, reject, drop),
				frontend(view.NodePort, netip.Addr{}, 30005, reject, reject, drop),
			},
		})
	}
	return s
}
