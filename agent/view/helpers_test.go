// This file holds the builders of Services, slices and endpoints that the tests of the view share.
package view_test

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

const here, elsewhere = "node-1", "node-2"

var (
	web = model.ServiceKey{Namespace: "default", Name: "web"}
	api = model.ServiceKey{Namespace: "default", Name: "api"}

	clusterCIDRs = prefixes("10.180.0.0/16", "fd00:180::/48")
	// thisNode is the Node that most tests use.
	thisNode = &model.Node{
		Name: here, Labels: map[string]string{"topology.kubernetes.io/zone": "zone-a"},
		Addresses: addrs("192.168.0.2", "2001:db8::2"), PodCIDRs: prefixes("10.180.0.0/24", "fd00:180::/64"),
	}
	options = view.Options{NodeName: here, ClusterCIDRs: clusterCIDRs}
)

func addr(s string) netip.Addr   { return netip.MustParseAddr(s) }
func ap(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }

func addrs(list ...string) []netip.Addr {
	var out []netip.Addr
	for _, s := range list {
		out = append(out, addr(s))
	}
	return out
}

func prefixes(list ...string) []netip.Prefix {
	var out []netip.Prefix
	for _, s := range list {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

// service returns a Service with a cluster IP and the TCP port 80 named http, with these edits
// applied.
func service(key model.ServiceKey, edit ...func(*model.Service)) *model.Service {
	s := model.Service{
		Namespace: key.Namespace, Name: key.Name, Type: model.ClusterIP, ClusterIPs: addrs("10.96.0.1"), Ports: []model.ServicePort{http},
	}
	for _, f := range edit {
		f(&s)
	}
	return model.NewService(s)
}

// loadBalancer returns an edit that makes a Service a LoadBalancer with these addresses, and sets a
// NodePort on its first port.
func loadBalancer(vips ...string) func(*model.Service) {
	return func(s *model.Service) {
		s.Type = model.LoadBalancer
		for _, ip := range vips {
			s.LoadBalancerIngress = append(s.LoadBalancerIngress, model.LoadBalancerIngress{IP: addr(ip)})
		}
		s.Ports = slices.Clone(s.Ports)
		s.Ports[0].NodePort = 30080
	}
}

func externalLocal(s *model.Service) { s.ExternalTrafficPolicy = model.TrafficLocal }
func internalLocal(s *model.Service) { s.InternalTrafficPolicy = model.TrafficLocal }
func dualStack(s *model.Service)     { s.ClusterIPs = addrs("10.96.0.1", "fd00:96::1") }

func clusterIP(ips ...string) func(*model.Service) {
	return func(s *model.Service) { s.ClusterIPs = addrs(ips...) }
}

func externalIP(ips ...string) func(*model.Service) {
	return func(s *model.Service) { s.ExternalIPs = addrs(ips...) }
}

func ranges(list ...string) func(*model.Service) {
	return func(s *model.Service) { s.LoadBalancerSourceRanges = prefixes(list...) }
}

func ports(list ...model.ServicePort) func(*model.Service) {
	return func(s *model.Service) { s.Ports = list }
}

func created(seconds int64) func(*model.Service) {
	return func(s *model.Service) { s.CreationTimeSeconds = seconds }
}

var (
	http = model.ServicePort{Name: "http", Protocol: model.TCP, Port: 80}
	dns  = model.ServicePort{Name: "dns", Protocol: model.UDP, Port: 53}

	http8080 = model.SlicePort{Name: "http", Protocol: model.TCP, Port: 8080}
	dns5353  = model.SlicePort{Name: "dns", Protocol: model.UDP, Port: 5353}
)

// slice returns a slice of web with the port http8080. Its family is that of the first endpoint.
func slice(name string, endpoints ...model.Endpoint) *model.Slice {
	return sliceOf(name, []model.SlicePort{http8080}, endpoints...)
}

func sliceOf(name string, ports []model.SlicePort, endpoints ...model.Endpoint) *model.Slice {
	family := model.IPv4
	if len(endpoints) > 0 {
		family = model.FamilyOf(endpoints[0].Address)
	}
	return model.NewSlice(model.Slice{
		Namespace: web.Namespace, Name: name, Service: web.Name, Family: family, Ports: ports, Endpoints: endpoints,
	})
}

// endpoint returns a ready endpoint on another node, with these edits applied.
func endpoint(address string, edit ...func(*model.Endpoint)) model.Endpoint {
	e := model.Endpoint{Address: addr(address), NodeName: elsewhere, Conditions: model.Conditions{Ready: true, Serving: true}}
	for _, f := range edit {
		f(&e)
	}
	return e
}

func local(e *model.Endpoint)   { e.NodeName = here }
func unready(e *model.Endpoint) { e.Conditions = model.Conditions{} }
func terminating(e *model.Endpoint) {
	e.Conditions = model.Conditions{Serving: true, Terminating: true}
}
func dead(e *model.Endpoint) { e.Conditions = model.Conditions{Terminating: true} }

func zones(list ...string) func(*model.Endpoint) {
	return func(e *model.Endpoint) { e.ZoneHints = list }
}

func nodes(list ...string) func(*model.Endpoint) {
	return func(e *model.Endpoint) { e.NodeHints = list }
}

func id(port model.ServicePort, family model.Family) view.ServicePortID {
	return view.ServicePortID{Service: web, Port: port.Name, Protocol: port.Protocol, Family: family}
}

// see returns the Service ports that a view with these options computes for web on thisNode.
func see(t *testing.T, o view.Options, s *model.Service, endpointSlices ...*model.Slice) map[view.ServicePortID]*view.ServicePort {
	t.Helper()
	v := view.New(o)
	v.SetNode(thisNode)
	v.Set(web, s, endpointSlices)
	v.Update()
	require.Empty(t, v.Problems())
	return v.State().Ports
}

// at returns backends at port 8080. list contains their addresses, with a star after those on this
// node: "10.180.0.1* 10.180.1.1".
func at(list string) view.Backends {
	var out []view.Backend
	for _, s := range strings.Fields(list) {
		address, isLocal := strings.CutSuffix(s, "*")
		out = append(out, view.Backend{Address: netip.AddrPortFrom(addr(address), 8080), Local: isLocal})
	}
	return view.NewBackends(out...)
}
