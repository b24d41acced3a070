// These tests prove at which addresses a Service is reached, where connections from pods, the node
// and others lead, and whether they are masqueraded. They also cover source ranges, affinity and
// the addresses of NodePorts. The expected values are written out by hand, after kube-proxy.
package view_test

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// text formats frontends, one a line, in the form "clusterIP 10.96.0.1:80 pods cluster, node
// cluster+, others cluster+". A + means masqueraded.
func text(frontends []view.Frontend) string {
	route := func(r view.Route) string {
		if r.Masquerade {
			return r.To.String() + "+"
		}
		return r.To.String()
	}
	var lines []string
	for _, f := range frontends {
		where := netip.AddrPortFrom(f.Address, f.Port).String()
		if f.Kind == view.NodePort {
			where = fmt.Sprintf("*:%d", f.Port)
		}
		line := f.Kind.String() + " " + where + " pods " + route(f.Pods) + ", node " + route(f.Node) + ", others " + route(f.Others)
		for _, s := range f.Sources {
			line += " " + s.String()
		}
		lines = append(lines, line)
	}
	return strings.Join(lines, "\n")
}

// TestRoutes covers where connections lead and whether they are masqueraded, for Services with all
// kinds of addresses.
func TestRoutes(t *testing.T) {
	all := func(s *model.Service) { loadBalancer("192.0.2.1")(s); externalIP("203.0.113.1")(s) }
	masqueradeAll := options
	masqueradeAll.MasqueradeAll = true
	none := view.Options{NodeName: here}
	both := slice("s", endpoint("10.180.0.1", local), endpoint("10.180.1.1"))
	remote := slice("s", endpoint("10.180.1.1"))
	for name, c := range map[string]struct {
		options  view.Options
		service  *model.Service
		slice    *model.Slice
		internal string
		external string
	}{
		"Cluster":             {options, service(web, all), both, "pods cluster, node cluster+, others cluster+", "pods cluster+, node cluster+, others cluster+"},
		"Cluster, all remote": {options, service(web, all), remote, "pods cluster, node cluster+, others cluster+", "pods cluster+, node cluster+, others cluster+"},
		"internal Local": {options, service(web, all, internalLocal), both,
			"pods local, node local+, others local+", "pods cluster+, node cluster+, others cluster+"},
		"internal Local, all remote: dropped": {options, service(web, all, internalLocal), remote,
			"pods drop, node drop, others drop", "pods cluster+, node cluster+, others cluster+"},
		"external Local": {options, service(web, all, externalLocal), both,
			"pods cluster, node cluster+, others cluster+", "pods cluster, node cluster+, others local"},
		"external Local, all remote: dropped from outside": {options, service(web, all, externalLocal), remote,
			"pods cluster, node cluster+, others cluster+", "pods cluster, node cluster+, others drop"},
		"both Local": {options, service(web, all, internalLocal, externalLocal), both,
			"pods local, node local+, others local+", "pods cluster, node cluster+, others local"},
		"both Local, remote ones terminate: dropped, not rejected": {options, service(web, all, internalLocal, externalLocal),
			slice("s", endpoint("10.180.1.1", terminating)), "pods drop, node drop, others drop", "pods cluster, node cluster+, others drop"},
		"no endpoint": {options, service(web, all), slice("s"), "pods reject, node reject, others reject", "pods reject, node reject, others reject"},
		"no usable endpoint, both Local": {options, service(web, all, internalLocal, externalLocal),
			slice("s", endpoint("10.180.0.1", local, unready), endpoint("10.180.0.2", local, dead)),
			"pods reject, node reject, others reject", "pods reject, node reject, others reject"},

		"masquerade-all is about cluster IPs": {masqueradeAll, service(web, all, externalLocal), both,
			"pods cluster+, node cluster+, others cluster+", "pods cluster, node cluster+, others local"},
		"masquerade-all, internal Local": {masqueradeAll, service(web, all, internalLocal), both,
			"pods local+, node local+, others local+", "pods cluster+, node cluster+, others cluster+"},
		"masquerade-all, pods are not told": {view.Options{NodeName: here, MasqueradeAll: true}, service(web, all), both,
			"pods cluster+, node cluster+, others cluster+", "pods cluster+, node cluster+, others cluster+"},
		"pods are not told: cluster IPs are not masqueraded": {none, service(web, all), both,
			"pods cluster, node cluster, others cluster", "pods cluster+, node cluster+, others cluster+"},
		"pods are not told: they have no short circuit": {none, service(web, all, externalLocal), both,
			"pods cluster, node cluster, others cluster", "pods local, node cluster+, others local"},
		"pods are not told, none local": {none, service(web, all, externalLocal), remote,
			"pods cluster, node cluster, others cluster", "pods drop, node cluster+, others drop"},
	} {
		t.Run(name, func(t *testing.T) {
			got := see(t, c.options, c.service, c.slice)[id(http, model.IPv4)]
			require.Equal(t, "clusterIP 10.96.0.1:80 "+c.internal+"\nexternalIP 203.0.113.1:80 "+c.external+
				"\nloadBalancer 192.0.2.1:80 "+c.external+"\nnodePort *:30080 "+c.external, text(got.Frontends))
		})
	}
}

// TestPodsAreDetectedByFamily asserts that pods are recognized by prefixes only in the families
// that have one, and by interfaces in both families.
func TestPodsAreDetectedByFamily(t *testing.T) {
	for _, c := range []struct {
		options   view.Options
		four, six bool
		pods      view.PodDetector
	}{
		{options: view.Options{}},
		{options: view.Options{ClusterCIDRs: prefixes("10.180.1.2/16", "10.180.0.0/16", "10.0.0.0/9")}, four: true, pods: view.PodDetector{Prefixes: prefixes("10.0.0.0/9", "10.180.0.0/16")}},
		{options: view.Options{ClusterCIDRs: prefixes("fd00:180::/48")}, six: true, pods: view.PodDetector{Prefixes: prefixes("fd00:180::/48")}},
		{options: view.Options{DetectLocal: view.ByNodeCIDR, ClusterCIDRs: clusterCIDRs}, four: true, six: true, pods: view.PodDetector{Prefixes: thisNode.PodCIDRs}},
		{options: view.Options{DetectLocal: view.ByBridgeInterface, BridgeInterface: "cni0", InterfaceNamePrefix: "veth"}, four: true, six: true, pods: view.PodDetector{Interface: "cni0"}},
		{options: view.Options{DetectLocal: view.ByInterfaceNamePrefix, BridgeInterface: "cni0", InterfaceNamePrefix: "veth"}, four: true, six: true, pods: view.PodDetector{InterfacePrefix: "veth"}},
	} {
		v := view.New(c.options)
		v.SetNode(thisNode)
		v.Set(web, service(web, dualStack), []*model.Slice{slice("4", endpoint("10.180.1.1")), slice("6", endpoint("fd00:180::1"))})
		v.Update()
		require.Equal(t, c.pods, v.State().Node.Pods)
		told := func(family model.Family) bool { return v.State().Ports[id(http, family)].Frontends[0].Node.Masquerade }
		require.Equal(t, c.four, told(model.IPv4))
		require.Equal(t, c.six, told(model.IPv6))
		require.Equal(t, c.four, c.pods.Of(model.IPv4))
		require.Equal(t, c.six, c.pods.Of(model.IPv6))
	}
}

func TestFrontends(t *testing.T) {
	const cluster = " pods cluster, node cluster+, others cluster+"
	const masqueraded = " pods cluster+, node cluster+, others cluster+"
	endpoints := []*model.Slice{slice("4", endpoint("10.180.1.1")), slice("6", endpoint("fd00:180::1"))}
	nodePort := ports(model.ServicePort{Name: "http", Protocol: model.TCP, Port: 80, NodePort: 30080})
	proxied := func(s *model.Service) {
		s.LoadBalancerIngress = append(s.LoadBalancerIngress, model.LoadBalancerIngress{IP: addr("192.0.2.9"), ProxyMode: true})
	}
	for name, c := range map[string]struct {
		service   *model.Service
		four, six string // empty means no frontends
	}{
		"ClusterIP":                  {service(web), "clusterIP 10.96.0.1:80" + cluster, ""},
		"IPv6":                       {service(web, clusterIP("fd00:96::1")), "", "clusterIP [fd00:96::1]:80" + cluster},
		"both":                       {service(web, dualStack), "clusterIP 10.96.0.1:80" + cluster, "clusterIP [fd00:96::1]:80" + cluster},
		"no cluster IP":              {service(web, clusterIP(), externalIP("203.0.113.1")), "", ""},
		"no port":                    {service(web, ports()), "", ""},
		"two of a family: the first": {service(web, clusterIP("10.96.0.1", "10.96.0.2")), "clusterIP 10.96.0.1:80" + cluster, ""},
		"NodePort": {service(web, dualStack, nodePort, func(s *model.Service) { s.Type = model.NodePort }),
			"clusterIP 10.96.0.1:80" + cluster + "\nnodePort *:30080" + masqueraded, "clusterIP [fd00:96::1]:80" + cluster + "\nnodePort *:30080" + masqueraded},
		"no NodePorts for type ClusterIP": {service(web, nodePort), "clusterIP 10.96.0.1:80" + cluster, ""},
		"external IPs, each once and by family": {service(web, dualStack, externalIP("203.0.113.2", "2001:db8::9", "203.0.113.1", "203.0.113.2")),
			"clusterIP 10.96.0.1:80" + cluster + "\nexternalIP 203.0.113.1:80" + masqueraded + "\nexternalIP 203.0.113.2:80" + masqueraded,
			"clusterIP [fd00:96::1]:80" + cluster + "\nexternalIP [2001:db8::9]:80" + masqueraded},
		"none of another family than the cluster IP's": {service(web, loadBalancer("2001:db8::8"), externalIP("2001:db8::9")),
			"clusterIP 10.96.0.1:80" + cluster + "\nnodePort *:30080" + masqueraded, ""},
		"load balancer": {service(web, loadBalancer("192.0.2.2", "192.0.2.1"), proxied), "clusterIP 10.96.0.1:80" + cluster +
			"\nloadBalancer 192.0.2.1:80" + masqueraded + "\nloadBalancer 192.0.2.2:80" + masqueraded + "\nnodePort *:30080" + masqueraded, ""},
		"a load balancer's address is none without the type": {service(web, loadBalancer("192.0.2.1"), func(s *model.Service) { s.Type = model.NodePort }),
			"clusterIP 10.96.0.1:80" + cluster + "\nnodePort *:30080" + masqueraded, ""},
		"ipMode Proxy leaves nothing external, so policies are for nothing": {service(web, loadBalancer(), proxied, externalLocal, ports(http)),
			"clusterIP 10.96.0.1:80" + cluster, ""},
		"an external IP that is the load balancer's too has its filter": {service(web, loadBalancer("192.0.2.1"), externalIP("192.0.2.1", "192.0.2.2"), ranges("198.51.100.0/24"), ports(http)),
			"clusterIP 10.96.0.1:80" + cluster + "\nexternalIP 192.0.2.2:80" + masqueraded + "\nloadBalancer 192.0.2.1:80" + masqueraded + " 198.51.100.0/24", ""},
	} {
		t.Run(name, func(t *testing.T) {
			got := see(t, options, c.service, endpoints...)
			for family, want := range map[model.Family]string{model.IPv4: c.four, model.IPv6: c.six} {
				p := got[id(http, family)]
				require.Equal(t, want != "", p != nil)
				if p != nil {
					require.Equal(t, want, text(p.Frontends))
					require.Equal(t, id(http, family), p.ID)
				}
			}
		})
	}
}

// TestExternalPolicyWithoutAnyExternalAddress asserts that externalTrafficPolicy has no effect on a
// ClusterIP Service, unless the Service has external IPs.
func TestExternalPolicyWithoutAnyExternalAddress(t *testing.T) {
	endpoints := slice("s", endpoint("10.180.0.1", local), endpoint("10.180.1.1"))
	got := see(t, options, service(web, externalLocal), endpoints)[id(http, model.IPv4)]
	require.Equal(t, see(t, options, service(web), endpoints)[id(http, model.IPv4)], got)
	require.Zero(t, got.Local)
	got = see(t, options, service(web, externalLocal, externalIP("203.0.113.1")), endpoints)[id(http, model.IPv4)]
	require.Equal(t, at("10.180.0.1*"), got.Local)
	require.Equal(t, at("10.180.0.1* 10.180.1.1"), got.Cluster)
	require.Equal(t, view.Local, got.Frontends[1].Others.To)
}

func TestSourceRanges(t *testing.T) {
	for name, c := range map[string]struct {
		ranges    []string
		four, six []netip.Prefix // Sources of the load balancer's addresses
	}{
		"none":                       {nil, nil, nil},
		"in their order, masked":     {[]string{"198.51.100.7/24", "10.0.0.0/8", "198.51.100.0/24"}, prefixes("10.0.0.0/8", "198.51.100.0/24"), nil},
		"by family":                  {[]string{"2001:db8:1::/64", "198.51.100.0/24"}, prefixes("198.51.100.0/24"), prefixes("2001:db8:1::/64")},
		"a zero CIDR admits all":     {[]string{"0.0.0.0/0", "198.51.100.0/24", "2001:db8:1::/64"}, nil, prefixes("2001:db8:1::/64")},
		"two halves admit the node":  {[]string{"0.0.0.0/1", "128.0.0.0/1"}, prefixes("0.0.0.0/1", "128.0.0.0/1", "192.0.2.1/32", "192.0.2.2/32"), nil},
		"the node, and so the VIPs":  {[]string{"192.168.0.0/24"}, prefixes("192.0.2.1/32", "192.0.2.2/32", "192.168.0.0/24"), nil},
		"the node's IPv6 address":    {[]string{"2001:db8::/64", "10.0.0.0/8"}, prefixes("10.0.0.0/8"), prefixes("2001:db8::/64", "2001:db8::8/128")},
		"a pod CIDR is not the node": {[]string{"10.180.0.0/24"}, prefixes("10.180.0.0/24"), nil},
	} {
		t.Run(name, func(t *testing.T) {
			got := see(t, options, service(web, dualStack, externalIP("203.0.113.1"), loadBalancer("192.0.2.1", "192.0.2.2", "2001:db8::8"), ranges(c.ranges...)))
			for family, want := range map[model.Family][]netip.Prefix{model.IPv4: c.four, model.IPv6: c.six} {
				for _, f := range got[id(http, family)].Frontends {
					if f.Kind == view.LoadBalancer {
						require.Equal(t, want, f.Sources)
					} else {
						require.Empty(t, f.Sources, "the filter is for the load balancer's addresses only")
					}
				}
			}
		})
	}
}

func TestAffinity(t *testing.T) {
	got := see(t, options, service(web, dualStack, ports(http, dns), func(s *model.Service) { s.ClientIPAffinitySeconds = 10800 }))
	require.Len(t, got, 4)
	for _, p := range got {
		require.Equal(t, 3*time.Hour, p.Affinity)
	}
}

func TestNodePortAddresses(t *testing.T) {
	yes, no := true, false
	everywhere := prefixes("0.0.0.0/0", "::/0")
	for name, c := range map[string]struct {
		options   view.Options
		node      *model.Node
		want      []netip.Prefix
		localhost bool
	}{
		"default: primary":            {view.Options{}, thisNode, prefixes("192.168.0.2/32", "2001:db8::2/128"), false},
		"the first of each family":    {view.Options{}, &model.Node{Addresses: addrs("2001:db8::3", "192.168.0.3", "192.168.0.2", "2001:db8::2")}, prefixes("192.168.0.3/32", "2001:db8::3/128"), false},
		"a family without an address": {view.Options{}, &model.Node{Addresses: addrs("192.168.0.3")}, prefixes("192.168.0.3/32"), false},
		"no Node":                     {view.Options{}, nil, nil, false},
		"a Node without addresses":    {view.Options{NodePortPrimary: true}, &model.Node{Name: here}, nil, false},
		"a list needs no Node":        {view.Options{NodePortAddresses: prefixes("192.168.0.0/24")}, nil, prefixes("192.168.0.0/24", "::/0"), false},
		"primary":                     {view.Options{NodePortPrimary: true, LocalhostNodePorts: &no}, thisNode, prefixes("192.168.0.2/32", "2001:db8::2/128"), false},
		"primary and a list":          {view.Options{NodePortPrimary: true, NodePortAddresses: prefixes("192.168.1.0/24", "192.168.2.0/24", "192.168.2.7/32")}, thisNode, prefixes("192.168.0.2/32", "192.168.1.0/24", "192.168.2.0/24", "2001:db8::2/128"), false},
		"primary within a list":       {view.Options{NodePortPrimary: true, NodePortAddresses: prefixes("192.168.0.0/24")}, thisNode, prefixes("192.168.0.0/24", "2001:db8::2/128"), false},
		"primary and all of a family without an address": {view.Options{NodePortPrimary: true, NodePortAddresses: prefixes("::/0")}, &model.Node{Addresses: addrs("192.168.0.3")}, prefixes("192.168.0.3/32", "::/0"), false},
		"primary and loopback, wanted":                   {view.Options{NodePortPrimary: true, NodePortAddresses: prefixes("127.0.0.0/8"), LocalhostNodePorts: &yes}, thisNode, prefixes("127.0.0.0/8", "192.168.0.2/32", "2001:db8::2/128"), true},
		"primary and a list, no Node":                    {view.Options{NodePortPrimary: true, NodePortAddresses: prefixes("192.168.1.0/24")}, nil, prefixes("192.168.1.0/24"), false},
		"primary is not loopback":                        {view.Options{NodePortPrimary: true, LocalhostNodePorts: &yes}, thisNode, prefixes("192.168.0.2/32", "2001:db8::2/128"), false},
		"localhost not wanted: all":                      {view.Options{LocalhostNodePorts: &no}, thisNode, everywhere, false},
		"localhost wanted: all, too":                     {view.Options{LocalhostNodePorts: &yes}, thisNode, everywhere, true},
		"a list":                                         {view.Options{NodePortAddresses: prefixes("192.168.1.7/24", "2001:db8::/64")}, thisNode, prefixes("192.168.1.0/24", "2001:db8::/64"), false},
		"a list of one family":                           {view.Options{NodePortAddresses: prefixes("2001:db8::/64")}, thisNode, prefixes("0.0.0.0/0", "2001:db8::/64"), false},
		"a list with a zero prefix":                      {view.Options{NodePortAddresses: prefixes("192.168.1.0/24", "0.0.0.0/0")}, thisNode, everywhere, false},
		"loopback listed, not wanted":                    {view.Options{NodePortAddresses: prefixes("127.0.0.0/8"), LocalhostNodePorts: &no}, thisNode, prefixes("127.0.0.0/8", "::/0"), false},
		"loopback listed and wanted":                     {view.Options{NodePortAddresses: prefixes("127.0.0.1/32"), LocalhostNodePorts: &yes}, thisNode, prefixes("127.0.0.1/32", "::/0"), true},
		"loopback wanted, not listed":                    {view.Options{NodePortAddresses: prefixes("192.168.1.0/24"), LocalhostNodePorts: &yes}, thisNode, prefixes("192.168.1.0/24", "::/0"), false},
		"loopback listed, not decided":                   {view.Options{NodePortAddresses: prefixes("127.0.0.0/8")}, thisNode, prefixes("127.0.0.0/8", "::/0"), false},
	} {
		t.Run(name, func(t *testing.T) {
			v := view.New(c.options)
			v.SetNode(c.node)
			require.Equal(t, c.want, v.State().Node.NodePorts)
			require.Equal(t, c.localhost, v.State().Node.LocalhostNodePorts)
		})
	}
}

// TestAddressesOutliveTheNode asserts that the addresses of NodePorts stay the same when the Node
// is deleted: NodePorts neither close nor open on all addresses.
func TestAddressesOutliveTheNode(t *testing.T) {
	v := view.New(options)
	for _, n := range []*model.Node{thisNode, nil, nil} {
		v.SetNode(n)
		_, changed := v.Update()
		require.Equal(t, n == thisNode, changed)
		require.Equal(t, prefixes("192.168.0.2/32", "2001:db8::2/128"), v.State().Node.NodePorts)
	}
	v.SetNode(&model.Node{Name: here, Addresses: addrs("192.168.0.4")})
	require.Equal(t, prefixes("192.168.0.4/32"), v.State().Node.NodePorts, "a known Node without an IPv6 address")
}

// TestHealthCheckPorts asserts that exactly one of a Service's ports in a family carries its health
// check port, so that programmers learn it.
func TestHealthCheckPorts(t *testing.T) {
	f := newFight(t)
	check := func(s *model.Service) { s.HealthCheckNodePort = 31000 }
	has := func() (out []string) {
		for id, p := range f.State().Ports {
			if p.HealthCheckPort != 0 {
				out = append(out, fmt.Sprintf("%v %d", id, p.HealthCheckPort))
			}
		}
		slices.Sort(out)
		return out
	}
	all := []func(*model.Service){dualStack, ports(dns, http), externalLocal, check, loadBalancer("192.0.2.1")}
	f.set(web, all...)
	require.Len(t, f.change(), 4)
	require.Equal(t, []string{"default/web:dns/UDP/IPv4 31000", "default/web:dns/UDP/IPv6 31000"}, has())
	f.set(web, append(all, func(s *model.Service) { s.HealthCheckNodePort = 31001 })...)
	require.Equal(t, []string{"web", "web"}, f.change(), "one of each family")
	require.Equal(t, []string{"default/web:dns/UDP/IPv4 31001", "default/web:dns/UDP/IPv6 31001"}, has())
	f.set(web, append(all, ports(http))...)
	f.change()
	require.Equal(t, []string{"default/web:http/TCP/IPv4 31000", "default/web:http/TCP/IPv6 31000"}, has())
	f.set(web, append(all, func(s *model.Service) { s.ExternalTrafficPolicy = 0 })...)
	f.change()
	require.Empty(t, has())
}

func TestNames(t *testing.T) {
	require.Equal(t, "default/web:http/TCP/IPv4", id(http, model.IPv4).String())
	require.Equal(t, "default/web:/UDP/IPv6", id(model.ServicePort{Protocol: model.UDP}, model.IPv6).String())
	require.Equal(t, "unknown", view.FrontendKind(0).String())
	require.Equal(t, "unknown", view.Target(0).String())
	for target, leads := range map[view.Target]bool{view.Reject: false, view.Drop: false, view.Cluster: true, view.Local: true} {
		require.Equal(t, leads, target.Leads())
	}
}

// TestExternalIPsRefused asserts that refused external IPs are not served and not claimed.
func TestExternalIPsRefused(t *testing.T) {
	o := options
	o.RefuseExternalIPs = true
	v := view.New(o)
	v.SetNode(thisNode)
	v.Set(web, service(web, dualStack, loadBalancer("192.0.2.1"), externalIP("192.0.2.1", "192.0.2.2", "192.0.2.3", "2001:db8:1::1")), nil)
	v.Set(api, service(api, clusterIP("10.96.0.2"), loadBalancer("192.0.2.2"), created(9), func(s *model.Service) { s.Ports[0].NodePort = 0 }), nil)
	v.Update()
	addresses := map[netip.Addr]bool{}
	for _, p := range v.State().Ports {
		for _, f := range p.Frontends {
			require.NotEqual(t, view.ExternalIP, f.Kind)
			addresses[f.Address] = true
		}
	}
	require.True(t, addresses[addr("192.0.2.1")], "the load balancer's, with its filter")
	require.True(t, addresses[addr("192.0.2.2")], "another Service's, which is younger")
	require.False(t, addresses[addr("192.0.2.3")])
	require.Empty(t, v.Problems(), "it is as the operator wants it")
}
