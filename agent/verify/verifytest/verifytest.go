// Package verifytest draws random Services and settings of a node, with which tests prove that
// verify finds nothing wrong with what programmers write.
package verifytest

import (
	"context"
	"fmt"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/verify"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

var (
	podCIDRs     = []netip.Prefix{netip.MustParsePrefix("10.180.0.0/16"), netip.MustParsePrefix("fd00:10:180::/48")}
	serviceCIDRs = []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd00:10:96::/112")}
)

// State draws what the view decides for a node with these addresses.
func State(t *rapid.T, ipv4, ipv6 netip.Addr) view.State {
	o := options(t)
	var all verify.Objects
	for _, object := range objects(t, ipv4, ipv6) {
		all.Upsert(object, 0)
	}
	state, err := all.State(o)
	if err != nil {
		t.Fatal(err)
	}
	return state
}

// Check asserts that verify finds nothing wrong with what a programmer writes for random Services.
func Check[P programmer.Programmer](t *testing.T, open func() (P, error), o verify.Options) {
	host := testenv.NewNetwork(t).AddNode("a")
	var p P
	require.NoError(t, host.Do(func() (err error) {
		p, err = open()
		return err
	}))
	rapid.Check(t, func(r *rapid.T) {
		o := o
		o.State = State(r, host.IPv4, host.IPv6)
		require.NoError(r, host.Do(func() error {
			if err := p.Replace(t.Context(), o.State); err != nil {
				return err
			}
			lines, err := Lines(t.Context(), o)
			require.Empty(r, lines)
			return err
		}))
	})
}

// Lines returns what verify says about the kernel of the calling thread.
func Lines(ctx context.Context, o verify.Options) (lines []string, err error) {
	found, err := verify.Kernel(ctx, o)
	for _, d := range found.Differences {
		lines = append(lines, d.String())
	}
	return append(lines, found.Unjudged...), err
}

// address returns an address in a network of the family.
func address(family model.Family, network string, last byte) netip.Addr {
	if family == model.IPv4 {
		return netip.MustParseAddr(fmt.Sprintf("10.%s.0.%d", network, last))
	}
	return netip.MustParseAddr(fmt.Sprintf("fd00:10:%s::%x", network, last))
}

const nodeName, namespace = "node-1", "shop"

// options draws settings of a node.
func options(t *rapid.T) view.Options {
	o := view.Options{NodeName: nodeName, MasqueradeAll: rapid.Bool().Draw(t, "masquerade all")}
	switch o.DetectLocal = rapid.SampledFrom([]view.DetectLocalMode{
		"", view.ByClusterCIDR, view.ByNodeCIDR, view.ByBridgeInterface, view.ByInterfaceNamePrefix,
	}).Draw(t, "detect pods"); o.DetectLocal {
	case view.ByClusterCIDR:
		o.ClusterCIDRs = podCIDRs
	case view.ByBridgeInterface:
		o.BridgeInterface = "cni0"
	case view.ByInterfaceNamePrefix:
		o.InterfaceNamePrefix = "veth"
	}
	switch rapid.IntRange(0, 2).Draw(t, "NodePorts") {
	case 1:
		o.NodePortPrimary = true
	case 2:
		yes := true
		o.LocalhostNodePorts = &yes
	}
	return o
}

// objects draws a Node and Services. Endpoints are pods, addresses of the node and others.
// Source ranges contain each other, the node and load balancers' addresses.
func objects(t *rapid.T, ipv4, ipv6 netip.Addr) []model.Keyed {
	bothFamilies := []model.Family{model.IPv4, model.IPv6}
	own := map[model.Family]netip.Addr{model.IPv4: ipv4, model.IPv6: ipv6}
	node := &model.Node{Name: nodeName, Addresses: []netip.Addr{ipv4, ipv6}, ServiceCIDRs: serviceCIDRs}
	if rapid.Bool().Draw(t, "podCIDRs") {
		node.PodCIDRs = []netip.Prefix{netip.MustParsePrefix("10.180.0.0/24"), netip.MustParsePrefix("fd00:10:180::/64")}
	}
	all := []model.Keyed{node}
	policy := rapid.SampledFrom([]model.TrafficPolicy{model.TrafficCluster, model.TrafficLocal})
	for i := range byte(rapid.IntRange(1, 4).Draw(t, "Services")) {
		name := string(rune('a' + i))
		s := model.Service{
			Namespace: namespace, Name: name,
			Type:                  rapid.SampledFrom([]model.ServiceType{model.ClusterIP, model.NodePort, model.LoadBalancer}).Draw(t, "type"),
			InternalTrafficPolicy: policy.Draw(t, "internal"), ExternalTrafficPolicy: policy.Draw(t, "external"),
			ClientIPAffinitySeconds: rapid.SampledFrom([]uint32{0, 0, 60}).Draw(t, "affinity"),
		}
		port := model.ServicePort{
			Name: "http", Port: 80 + uint16(i%2), Protocol: rapid.SampledFrom([]model.Protocol{model.TCP, model.UDP, model.SCTP}).Draw(t, "protocol"),
		}
		if s.Type != model.ClusterIP {
			port.NodePort = 30000 + uint16(i)
		}
		s.Ports = []model.ServicePort{port}
		for _, f := range bothFamilies {
			s.ClusterIPs = append(s.ClusterIPs, address(f, "96", 1+i))
			if rapid.Bool().Draw(t, "external IP") {
				s.ExternalIPs = append(s.ExternalIPs, rapid.SampledFrom([]netip.Addr{address(f, "97", 1+i), own[f]}).Draw(t, "external IP"))
			}
			if s.Type == model.LoadBalancer {
				s.LoadBalancerIngress = append(s.LoadBalancerIngress, model.LoadBalancerIngress{IP: address(f, "98", 1+i)})
			}
		}
		ranged := func(t *rapid.T) netip.Prefix {
			f := rapid.SampledFrom(bothFamilies).Draw(t, "family")
			of := rapid.SampledFrom([]netip.Addr{own[f], address(f, "98", 1+i), address(f, "98", 9), address(f, "180", 1), address(f, "181", 1)}).Draw(t, "of")
			bits := rapid.SampledFrom([]int{0, 1, 7, 8, 16, 23, 24, 31, 32, 64, 112, 120, 127, 128}).Draw(t, "bits")
			p, err := of.Prefix(min(bits, of.BitLen()))
			if err != nil {
				t.Fatal(err)
			}
			return p
		}
		if s.Type == model.LoadBalancer {
			if s.ExternalTrafficPolicy == model.TrafficLocal {
				s.HealthCheckNodePort = 32000 + uint16(i)
			}
			s.LoadBalancerSourceRanges = rapid.SliceOfN(rapid.Custom(ranged), 0, 4).Draw(t, "source ranges")
		}
		all = append(all, model.NewService(s))
		for _, f := range bothFamilies {
			slice := model.Slice{
				Namespace: namespace, Name: name + "-" + f.String(), Service: name, Family: f,
				Ports: []model.SlicePort{{Name: "http", Protocol: port.Protocol, Port: 8080}},
			}
			for _, kind := range rapid.SliceOfNDistinct(rapid.IntRange(0, 7), 0, 5, rapid.ID[int]).Draw(t, "endpoints") {
				e := model.Endpoint{Conditions: model.Conditions{Ready: true, Serving: true}, NodeName: "node-2", Address: address(f, "180", byte(kind))}
				switch kind {
				case 0:
					e.Address = own[f]
					fallthrough
				case 1, 2:
					e.NodeName = nodeName
				case 3:
					e.Address = address(f, "200", 1) // a host elsewhere
				case 4:
					e.Conditions = model.Conditions{Serving: true, Terminating: true}
				}
				slice.Endpoints = append(slice.Endpoints, e)
			}
			all = append(all, model.NewSlice(slice))
		}
	}
	return all
}
