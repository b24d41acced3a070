// These tests prove what each field of the API's objects becomes, which objects and parts are left
// out and why, and that the result is canonical. The fuzz target compares the checks of names with
// Kubernetes' own.
package source

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/utils/ptr"

	"github.com/slicecast/slicecast/internal/model"
)

func service(change ...func(*corev1.Service)) *corev1.Service {
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeClusterIP, ClusterIP: "10.96.0.10", ClusterIPs: []string{"10.96.0.10"},
			Ports: []corev1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80}},
		},
	}
	for _, c := range change {
		c(s)
	}
	return s
}

func wantService(change ...func(*model.Service)) *model.Service {
	s := model.Service{
		Namespace: "default", Name: "web", Type: model.ClusterIP,
		ClusterIPs:            []netip.Addr{netip.MustParseAddr("10.96.0.10")},
		Ports:                 []model.ServicePort{{Name: "http", Protocol: model.TCP, Port: 80}},
		InternalTrafficPolicy: model.TrafficCluster, ExternalTrafficPolicy: model.TrafficCluster,
	}
	for _, c := range change {
		c(&s)
	}
	return model.NewService(s)
}

func reasons(skips []Skip) []Reason {
	var rs []Reason
	for _, s := range skips {
		rs = append(rs, s.Reason)
	}
	return rs
}

func addrs(s ...string) []netip.Addr {
	var as []netip.Addr
	for _, a := range s {
		as = append(as, netip.MustParseAddr(a))
	}
	return as
}

func TestFromService(t *testing.T) {
	created := time.Unix(1_700_000_000, 0)
	loadBalancer := func(s *corev1.Service) {
		s.Spec.Type = corev1.ServiceTypeLoadBalancer
		s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "203.0.113.9"}}
	}
	balanced := func(s *model.Service) {
		s.Type = model.LoadBalancer
		s.LoadBalancerIngress = []model.LoadBalancerIngress{{IP: netip.MustParseAddr("203.0.113.9")}}
	}
	for name, c := range map[string]struct {
		in    *corev1.Service
		proxy string
		want  *model.Service
		skips []Reason
	}{
		"plain": {in: service(), want: wantService()},
		"defaults of absent fields": {
			in: service(func(s *corev1.Service) {
				s.Spec.Type, s.Spec.ClusterIPs, s.Spec.Ports[0].Protocol = "", nil, ""
			}),
			want: wantService(),
		},
		"everything": {
			in: service(func(s *corev1.Service) {
				s.CreationTimestamp = metav1.NewTime(created)
				s.Annotations = map[string]string{"slicecast.io/ipvs-scheduler": "lc", "example.com/other": "x"}
				s.Spec = corev1.ServiceSpec{
					Type: corev1.ServiceTypeLoadBalancer, ClusterIP: "10.96.0.10", ClusterIPs: []string{"10.96.0.10", "fd00::10"},
					ExternalIPs: []string{"198.51.100.1", "2001:db8::1", "198.51.100.1"},
					Ports: []corev1.ServicePort{
						{Name: "dns", Protocol: corev1.ProtocolUDP, Port: 53, NodePort: 30053},
						{Name: "sig", Protocol: corev1.ProtocolSCTP, Port: 2905},
					},
					InternalTrafficPolicy: ptr.To(corev1.ServiceInternalTrafficPolicyLocal),
					ExternalTrafficPolicy: corev1.ServiceExternalTrafficPolicyLocal,
					SessionAffinity:       corev1.ServiceAffinityClientIP,
					SessionAffinityConfig: &corev1.SessionAffinityConfig{
						ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: ptr.To[int32](60)},
					},
					LoadBalancerSourceRanges: []string{" 192.0.2.77/24 ", "2001:db8::/32"},
					HealthCheckNodePort:      32000,
					TrafficDistribution:      ptr.To("PreferSameZone"),
				}
				s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{
					{IP: "203.0.113.9", IPMode: ptr.To(corev1.LoadBalancerIPModeVIP)},
					{IP: "2001:db8::9", IPMode: ptr.To(corev1.LoadBalancerIPModeProxy)},
					{Hostname: "lb.example.com"},
				}
			}),
			want: model.NewService(model.Service{
				Namespace: "default", Name: "web", Type: model.LoadBalancer,
				ClusterIPs: addrs("10.96.0.10", "fd00::10"), ExternalIPs: addrs("198.51.100.1", "2001:db8::1"),
				LoadBalancerIngress: []model.LoadBalancerIngress{
					{IP: netip.MustParseAddr("203.0.113.9")}, {IP: netip.MustParseAddr("2001:db8::9"), ProxyMode: true},
				},
				Ports: []model.ServicePort{
					{Name: "dns", Protocol: model.UDP, Port: 53, NodePort: 30053}, {Name: "sig", Protocol: model.SCTP, Port: 2905},
				},
				InternalTrafficPolicy: model.TrafficLocal, ExternalTrafficPolicy: model.TrafficLocal,
				ClientIPAffinitySeconds:  60,
				LoadBalancerSourceRanges: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("2001:db8::/32")},
				HealthCheckNodePort:      32000, TrafficDistribution: "PreferSameZone", CreationTimeSeconds: created.Unix(),
				IPVSScheduler: "lc",
			}),
		},
		"a scheduler's name that is none": {
			in: service(func(s *corev1.Service) {
				s.Annotations = map[string]string{"slicecast.io/ipvs-scheduler": strings.Repeat("r", 64)}
			}),
			want: wantService(), skips: []Reason{InvalidAnnotation},
		},
		"affinity without a timeout": {
			in:   service(func(s *corev1.Service) { s.Spec.SessionAffinity = corev1.ServiceAffinityClientIP }),
			want: wantService(func(s *model.Service) { s.ClientIPAffinitySeconds = 10800 }),
		},
		"affinity with a wrong timeout": {
			in: service(func(s *corev1.Service) {
				s.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
				s.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{
					ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: ptr.To[int32](86401)},
				}
			}),
			want:  wantService(func(s *model.Service) { s.ClientIPAffinitySeconds = 10800 }),
			skips: []Reason{InvalidTimeout},
		},
		"what does not apply to the type": {
			in: service(loadBalancer, func(s *corev1.Service) {
				s.Spec.Type, s.Spec.Ports[0].NodePort, s.Spec.HealthCheckNodePort = corev1.ServiceTypeClusterIP, 30080, 32000
			}),
			want: wantService(),
		},
		"health check port without local policy": {
			in:   service(loadBalancer, func(s *corev1.Service) { s.Spec.HealthCheckNodePort = 32000 }),
			want: wantService(balanced),
		},
		"addresses as old releases took them": {
			in: service(func(s *corev1.Service) {
				s.Spec.ClusterIPs, s.Spec.ExternalIPs = []string{"010.096.000.010"}, []string{"::ffff:192.0.2.1"}
			}),
			want: wantService(func(s *model.Service) { s.ExternalIPs = addrs("192.0.2.1") }),
		},
		"invalid parts": {
			in: service(func(s *corev1.Service) {
				s.Spec.Type = corev1.ServiceTypeNodePort
				s.Spec.ClusterIPs = []string{"10.96.0.10", "10.96.0.11"}
				s.Spec.ExternalIPs = []string{"no", "fe80::1%eth0", "198.51.100.1"}
				s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Port: 0}, corev1.ServicePort{Port: 65536},
					corev1.ServicePort{Port: 1, Protocol: "ICMP"}, corev1.ServicePort{Name: "np", Port: 81, NodePort: -1})
			}),
			want: wantService(func(s *model.Service) {
				s.Type, s.ExternalIPs = model.NodePort, addrs("198.51.100.1")
				s.Ports = append(s.Ports, model.ServicePort{Name: "np", Protocol: model.TCP, Port: 81})
			}),
			skips: []Reason{WrongFamily, InvalidAddress, InvalidPort, InvalidProtocol},
		},
		"source ranges as old releases took them": {
			in: service(loadBalancer, func(s *corev1.Service) {
				s.Spec.LoadBalancerSourceRanges = []string{"::ffff:10.0.0.0/104", "010.1.0.77/16", "::ffff:0a02:0/112"}
			}),
			want: wantService(balanced, func(s *model.Service) {
				s.LoadBalancerSourceRanges = prefixes("10.0.0.0/8", "10.1.0.0/16", "10.2.0.0/16")
			}),
		},
		"a source range that is lost admits nobody, in either family": {
			in: service(loadBalancer, func(s *corev1.Service) {
				s.Spec.LoadBalancerSourceRanges = []string{"192.0.2.0/24", "192.0.2.0/33", "", "::ffff:10.0.0.0/8"}
			}),
			want: wantService(balanced, func(s *model.Service) {
				s.LoadBalancerSourceRanges = prefixes("192.0.2.0/24", "0.0.0.0/32", "::/128")
			}),
			skips: []Reason{InvalidRange},
		},
		// As in kube-proxy, any mode other than VIP is proxy mode.
		"a mode of an ingress address that is unknown": {
			in: service(loadBalancer, func(s *corev1.Service) {
				s.Status.LoadBalancer.Ingress[0].IPMode = ptr.To[corev1.LoadBalancerIPMode]("Tunnel")
			}),
			want: wantService(balanced, func(s *model.Service) { s.LoadBalancerIngress[0].ProxyMode = true }),
		},
		"headless":            {in: service(func(s *corev1.Service) { s.Spec.ClusterIP, s.Spec.ClusterIPs = "None", nil }), skips: []Reason{Headless}},
		"headless, new field": {in: service(func(s *corev1.Service) { s.Spec.ClusterIP, s.Spec.ClusterIPs = "", []string{"None"} }), skips: []Reason{Headless}},
		"external name":       {in: service(func(s *corev1.Service) { s.Spec = corev1.ServiceSpec{Type: "ExternalName", ExternalName: "x.org"} }), skips: []Reason{ExternalName}},
		"unknown type":        {in: service(func(s *corev1.Service) { s.Spec.Type = "Magic" }), skips: []Reason{InvalidType}},
		"no cluster IP":       {in: service(func(s *corev1.Service) { s.Spec.ClusterIP, s.Spec.ClusterIPs = "", nil }), skips: []Reason{NoClusterIP}},
		"bad cluster IP":      {in: service(func(s *corev1.Service) { s.Spec.ClusterIPs = []string{"10.96.0"} }), skips: []Reason{InvalidAddress}},
		"other proxy's":       {in: service(func(s *corev1.Service) { s.Labels = map[string]string{LabelServiceProxyName: "cilium"} }), skips: []Reason{OtherProxy}},
		"label with empty value is another proxy's": {
			in: service(func(s *corev1.Service) { s.Labels = map[string]string{LabelServiceProxyName: ""} }), skips: []Reason{OtherProxy}},
		"the label of headless Services' slices means nothing here": {
			in: service(func(s *corev1.Service) { s.Labels = map[string]string{corev1.IsHeadlessService: ""} }), want: wantService()},
		"this proxy's": {
			in: service(func(s *corev1.Service) { s.Labels = map[string]string{LabelServiceProxyName: "mine"} }), proxy: "mine", want: wantService()},
		"not this proxy's": {in: service(), proxy: "mine", skips: []Reason{OtherProxy}},
	} {
		t.Run(name, func(t *testing.T) {
			got, skips := NewConverter(c.proxy).FromService(c.in)
			require.Equal(t, c.want, got)
			require.Equal(t, c.skips, reasons(skips), "%v", skips)
		})
	}
}

func slice(change ...func(*discoveryv1.EndpointSlice)) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "default", Name: "web-1", Labels: map[string]string{discoveryv1.LabelServiceName: "web"}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: ptr.To("http"), Protocol: ptr.To(corev1.ProtocolTCP), Port: ptr.To[int32](8080)}},
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{"10.0.0.1"}}},
	}
	for _, c := range change {
		c(s)
	}
	return s
}

func wantSlice(change ...func(*model.Slice)) *model.Slice {
	s := model.Slice{
		Namespace: "default", Name: "web-1", Service: "web", Family: model.IPv4,
		Ports: []model.SlicePort{{Name: "http", Protocol: model.TCP, Port: 8080}},
		Endpoints: []model.Endpoint{{
			Address: netip.MustParseAddr("10.0.0.1"), Conditions: model.Conditions{Ready: true, Serving: true},
		}},
	}
	for _, c := range change {
		c(&s)
	}
	return model.NewSlice(s)
}

func TestFromEndpointSlice(t *testing.T) {
	for name, c := range map[string]struct {
		in    *discoveryv1.EndpointSlice
		want  *model.Slice
		skips []Reason
	}{
		"conditions absent": {in: slice(), want: wantSlice()},
		"conditions given": {
			in: slice(func(s *discoveryv1.EndpointSlice) {
				s.Endpoints[0].Conditions = discoveryv1.EndpointConditions{Ready: ptr.To(false), Serving: ptr.To(false), Terminating: ptr.To(true)}
			}),
			want: wantSlice(func(s *model.Slice) { s.Endpoints[0].Conditions = model.Conditions{Terminating: true} }),
		},
		"everything": {
			in: slice(func(s *discoveryv1.EndpointSlice) {
				s.AddressType = discoveryv1.AddressTypeIPv6
				s.Annotations = map[string]string{corev1.EndpointsLastChangeTriggerTime: "2026-01-02T03:04:05.678Z"}
				s.Ports = append(s.Ports, discoveryv1.EndpointPort{Port: ptr.To[int32](53), Protocol: ptr.To(corev1.ProtocolUDP)})
				s.Endpoints = []discoveryv1.Endpoint{{
					Addresses: []string{"fd00::2", "fd00::3"}, NodeName: ptr.To("n1"), Zone: ptr.To("z1"),
					Hints: &discoveryv1.EndpointHints{
						ForZones: []discoveryv1.ForZone{{Name: "z2"}, {Name: "z1"}}, ForNodes: []discoveryv1.ForNode{{Name: "n1"}},
					},
				}}
			}),
			want: wantSlice(func(s *model.Slice) {
				s.Family, s.LastChangeTriggerTimeMS = model.IPv6, time.Date(2026, 1, 2, 3, 4, 5, 678e6, time.UTC).UnixMilli()
				s.Ports = append(s.Ports, model.SlicePort{Protocol: model.UDP, Port: 53})
				s.Endpoints = []model.Endpoint{{
					Address: netip.MustParseAddr("fd00::2"), Conditions: model.Conditions{Ready: true, Serving: true},
					NodeName: "n1", Zone: "z1", ZoneHints: []string{"z1", "z2"}, NodeHints: []string{"n1"},
				}}
			}),
		},
		"absent port fields": {
			in:   slice(func(s *discoveryv1.EndpointSlice) { s.Ports[0].Name, s.Ports[0].Protocol = nil, nil }),
			want: wantSlice(func(s *model.Slice) { s.Ports[0].Name = "" }),
		},
		"port without a number": {
			in:    slice(func(s *discoveryv1.EndpointSlice) { s.Ports = append(s.Ports, discoveryv1.EndpointPort{}) }),
			want:  wantSlice(),
			skips: []Reason{PortWithoutNumber},
		},
		"no ports": {
			in:   slice(func(s *discoveryv1.EndpointSlice) { s.Ports = nil }),
			want: wantSlice(func(s *model.Slice) { s.Ports = []model.SlicePort{} }),
		},
		"no endpoints": {
			in:   slice(func(s *discoveryv1.EndpointSlice) { s.Endpoints = nil }),
			want: wantSlice(func(s *model.Slice) { s.Endpoints = []model.Endpoint{} }),
		},
		"invalid parts": {
			in: slice(func(s *discoveryv1.EndpointSlice) {
				s.Ports = append(s.Ports, discoveryv1.EndpointPort{Port: ptr.To[int32](0)},
					discoveryv1.EndpointPort{Port: ptr.To[int32](9), Protocol: ptr.To[corev1.Protocol]("ICMP")})
				s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{}, discoveryv1.Endpoint{Addresses: []string{"pod-1"}},
					discoveryv1.Endpoint{Addresses: []string{"fd00::1"}})
			}),
			want:  wantSlice(),
			skips: []Reason{InvalidPort, InvalidProtocol, InvalidAddress, WrongFamily},
		},
		"unparsable trigger time": {
			in: slice(func(s *discoveryv1.EndpointSlice) {
				s.Annotations = map[string]string{corev1.EndpointsLastChangeTriggerTime: "now"}
			}),
			want: wantSlice(),
		},
		"another proxy's label does not matter": {
			in: slice(func(s *discoveryv1.EndpointSlice) { s.Labels[LabelServiceProxyName] = "cilium" }), want: wantSlice()},
		"FQDN":         {in: slice(func(s *discoveryv1.EndpointSlice) { s.AddressType = discoveryv1.AddressTypeFQDN }), skips: []Reason{FQDN}},
		"unknown type": {in: slice(func(s *discoveryv1.EndpointSlice) { s.AddressType = "IPX" }), skips: []Reason{InvalidType}},
		"no service":   {in: slice(func(s *discoveryv1.EndpointSlice) { s.Labels = nil }), skips: []Reason{NoService}},
		"headless":     {in: slice(func(s *discoveryv1.EndpointSlice) { s.Labels[corev1.IsHeadlessService] = "" }), skips: []Reason{Headless}},
	} {
		t.Run(name, func(t *testing.T) {
			got, skips := NewConverter("").FromEndpointSlice(c.in)
			require.Equal(t, c.want, got)
			require.Equal(t, c.skips, reasons(skips), "%v", skips)
		})
	}
}

// TestSlicesWithoutPorts asserts that a slice which a controller writes again and again, with ports
// that are absent or empty in turn, has the same version each time (kubernetes/kubernetes#136502).
// The store publishes nothing for it.
func TestSlicesWithoutPorts(t *testing.T) {
	c := NewConverter("")
	convert := func(change func(*discoveryv1.EndpointSlice)) *model.Slice {
		object, skips := c.FromEndpointSlice(slice(change))
		require.Empty(t, skips)
		return object
	}
	absent := convert(func(s *discoveryv1.EndpointSlice) { s.Ports = nil })
	again := convert(func(s *discoveryv1.EndpointSlice) {
		s.Ports, s.Generation, s.ResourceVersion = []discoveryv1.EndpointPort{}, 7, "1234"
		s.Annotations = map[string]string{corev1.EndpointsLastChangeTriggerTime: "2026-01-02T03:04:05Z"}
	})
	require.Equal(t, absent.ContentVersion(), again.ContentVersion())
	require.NotEqual(t, absent.ContentVersion(), convert(func(*discoveryv1.EndpointSlice) {}).ContentVersion(), "with a port")
}

func TestFromNode(t *testing.T) {
	deleted := metav1.Now()
	got, skips := NewConverter("").FromNode(&corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: "n1", Labels: map[string]string{"zone": "z1"}, DeletionTimestamp: &deleted},
		Spec: corev1.NodeSpec{
			PodCIDRs: []string{"10.1.0.0/24", "fd00:1::/64", "10.2.0.0"},
			Taints:   []corev1.Taint{{Key: "other"}, {Key: "ToBeDeletedByClusterAutoscaler", Value: "1"}},
		},
		Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{
			{Type: corev1.NodeHostName, Address: "n1"}, {Type: corev1.NodeInternalIP, Address: "192.0.2.2"},
			{Type: corev1.NodeExternalIP, Address: "198.51.100.2"}, {Type: corev1.NodeInternalIP, Address: "192.0.2.1"},
			{Type: corev1.NodeInternalIP, Address: "n1"}, {Type: corev1.NodeExternalIP, Address: "2001:db8::2"},
			{Type: corev1.NodeExternalIP, Address: "2001:db8::1"},
		}},
	})
	require.True(t, got.Equal(&model.Node{
		Name: "n1", Labels: map[string]string{"zone": "z1"}, Addresses: addrs("192.0.2.2", "192.0.2.1", "198.51.100.2", "2001:db8::2", "2001:db8::1"),
		PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.1.0.0/24"), netip.MustParsePrefix("fd00:1::/64")},
		Deleting: true, TaintedForDeletion: true,
	}), "%+v", got)
	require.Equal(t, []Reason{InvalidAddress, InvalidRange}, reasons(skips))

	got, skips = NewConverter("").FromNode(&corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: "n2"}, Spec: corev1.NodeSpec{PodCIDR: "10.3.0.0/24"},
	})
	require.True(t, got.Equal(&model.Node{Name: "n2", PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.3.0.0/24")}}), "%+v", got)
	require.Empty(t, skips)
}

func TestFromServiceCIDR(t *testing.T) {
	deleted := metav1.Now()
	in := &networkingv1.ServiceCIDR{
		ObjectMeta: metav1.ObjectMeta{Name: "kubernetes", DeletionTimestamp: &deleted},
		Spec:       networkingv1.ServiceCIDRSpec{CIDRs: []string{"10.96.0.0/16", "10.96.0.0", "fd00:10:96::1/112"}},
	}
	key, got, skips := NewConverter("").Convert(in)
	require.Equal(t, "ServiceCIDR kubernetes", key.String())
	require.Equal(t, &ServiceCIDR{
		Name: "kubernetes", CIDRs: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd00:10:96::/112")},
	}, got)
	require.Equal(t, []Skip{{InvalidRange, "spec.cidrs[1]", `"10.96.0.0" is not a CIDR`}}, skips)
}

func TestConvertGivesNilForWhatIsLeftOut(t *testing.T) {
	c := NewConverter("")
	key, o, skips := c.Convert(service(func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeExternalName }))
	require.Equal(t, model.Key{Kind: model.KindService, Namespace: "default", Name: "web"}, key)
	require.True(t, o == nil)
	require.NotEmpty(t, skips)
	key, o, _ = c.Convert(slice(func(s *discoveryv1.EndpointSlice) { s.Labels = nil }))
	require.Equal(t, model.Key{Kind: model.KindSlice, Namespace: "default", Name: "web-1"}, key)
	require.True(t, o == nil)
}

// TestOnlyCanonicalObjects checks that what the API server does not admit is left out and reported:
// the invalid part if possible, and otherwise the object. The result is canonical.
func TestOnlyCanonicalObjects(t *testing.T) {
	endpoints := func(change func(e *discoveryv1.Endpoint)) metav1.Object {
		return slice(func(s *discoveryv1.EndpointSlice) { change(&s.Endpoints[0]) })
	}
	balanced := func(change func(s *corev1.Service)) metav1.Object {
		return service(func(s *corev1.Service) {
			s.Spec.Type = corev1.ServiceTypeLoadBalancer
			change(s)
		})
	}
	node := func(change func(n *corev1.Node)) metav1.Object {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n", Labels: map[string]string{"a": "b"}}}
		change(n)
		return n
	}
	addresses := func(list ...string) func(n *corev1.Node) {
		return func(n *corev1.Node) {
			for _, a := range list {
				n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a})
			}
		}
	}
	long := strings.Repeat("a", 254)
	for name, c := range map[string]struct {
		in     metav1.Object
		reason Reason // empty if nothing is left out
		field  string
		left   func(o model.Keyed) any // selects a part of the object
		want   any                     // nil if the object is left out
	}{
		"name of a Service":      {service(func(s *corev1.Service) { s.Name = "a.b" }), InvalidText, "metadata.name", nil, nil},
		"namespace of a Service": {service(func(s *corev1.Service) { s.Namespace = "\xff" }), InvalidText, "metadata.name", nil, nil},
		"name of a slice":        {slice(func(s *discoveryv1.EndpointSlice) { s.Name = long }), InvalidText, "metadata.name", nil, nil},
		"Service of a slice": {slice(func(s *discoveryv1.EndpointSlice) { s.Labels[discoveryv1.LabelServiceName] = "a/b" }),
			Invalid, "metadata.name", nil, nil},
		"name of a Node": {node(func(n *corev1.Node) { n.Name = "A" }), InvalidText, "metadata.name", nil, nil},

		"port name": {service(func(s *corev1.Service) { s.Spec.Ports[0].Name = "\xff" }), InvalidText, "spec.ports[0].name",
			func(o model.Keyed) any { return len(o.(*model.Service).Ports) }, 0},
		"port twice": {service(func(s *corev1.Service) {
			s.Spec.Ports = []corev1.ServicePort{{Name: "a", Port: 80}, {Name: "b", Port: 80}, {Name: "c", Port: 80, Protocol: corev1.ProtocolUDP}, {Name: "a", Port: 81}}
		}), Duplicate, "spec.ports", func(o model.Keyed) any { return len(o.(*model.Service).Ports) }, 2},
		"NodePort twice": {balanced(func(s *corev1.Service) {
			s.Spec.Ports = []corev1.ServicePort{{Name: "a", Port: 80, NodePort: 30080}, {Name: "b", Port: 81, NodePort: 30080}, {Name: "c", Port: 82}, {Name: "d", Port: 83}}
		}), Duplicate, "spec.ports", func(o model.Keyed) any { return len(o.(*model.Service).Ports) }, 3},
		"traffic distribution": {service(func(s *corev1.Service) { s.Spec.TrafficDistribution = ptr.To("\xff") }), InvalidText, "spec.trafficDistribution",
			func(o model.Keyed) any { return o.(*model.Service).TrafficDistribution }, ""},
		"scheduler": {service(func(s *corev1.Service) { s.Annotations = map[string]string{AnnotationIPVSScheduler: "a b"} }), InvalidAnnotation, "metadata.annotations",
			func(o model.Keyed) any { return o.(*model.Service).IPVSScheduler }, ""},
		"loopback cluster IP": {service(func(s *corev1.Service) { s.Spec.ClusterIP, s.Spec.ClusterIPs = "", []string{"127.0.0.1", "10.96.0.9"} }),
			InvalidAddress, "spec.clusterIPs[0]", func(o model.Keyed) any { return o.(*model.Service).ClusterIPs[0].String() }, "10.96.0.9"},
		"metadata service as an external IP": {service(func(s *corev1.Service) { s.Spec.ExternalIPs = []string{"169.254.169.254", "192.0.2.7"} }),
			InvalidAddress, "spec.externalIPs[0]", func(o model.Keyed) any { return o.(*model.Service).ExternalIPs[0].String() }, "192.0.2.7"},
		"broadcast as an external IP": {service(func(s *corev1.Service) { s.Spec.ExternalIPs = []string{"255.255.255.255"} }),
			InvalidAddress, "spec.externalIPs[0]", func(o model.Keyed) any { return len(o.(*model.Service).ExternalIPs) }, 0},
		"loopback ingress": {balanced(func(s *corev1.Service) { s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "::1"}} }),
			InvalidAddress, "status.loadBalancer.ingress[0].ip", func(o model.Keyed) any { return len(o.(*model.Service).LoadBalancerIngress) }, 0},
		"link-local ingress": {balanced(func(s *corev1.Service) {
			s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "169.254.1.1"}}
		}),
			"", "", func(o model.Keyed) any { return len(o.(*model.Service).LoadBalancerIngress) }, 1},

		"slice port name": {slice(func(s *discoveryv1.EndpointSlice) { s.Ports[0].Name = ptr.To("A") }), InvalidText, "ports[0].name",
			func(o model.Keyed) any { return len(o.(*model.Slice).Ports) }, 0},
		"slice port twice": {slice(func(s *discoveryv1.EndpointSlice) {
			s.Ports = []discoveryv1.EndpointPort{{Port: ptr.To[int32](80)}, {Port: ptr.To[int32](53), Protocol: ptr.To(corev1.ProtocolUDP)}, {Port: ptr.To[int32](81)}}
		}), Duplicate, "ports", func(o model.Keyed) any { return len(o.(*model.Slice).Ports) }, 2},
		"metadata service as an endpoint": {endpoints(func(e *discoveryv1.Endpoint) { e.Addresses = []string{"169.254.169.254"} }),
			InvalidAddress, "endpoints[0].addresses[0]", func(o model.Keyed) any { return len(o.(*model.Slice).Endpoints) }, 0},
		// Objects from before the API server validated the name may have these. kube-proxy serves
		// them as endpoints that are not local.
		"node of an endpoint": {endpoints(func(e *discoveryv1.Endpoint) { e.NodeName = ptr.To("\xff") }), InvalidText, "endpoints[0].nodeName",
			func(o model.Keyed) any { return o.(*model.Slice).Endpoints[0].NodeName }, ""},
		"zone of an endpoint": {endpoints(func(e *discoveryv1.Endpoint) { e.Zone = ptr.To("\xff") }), InvalidText, "endpoints[0].zone",
			func(o model.Keyed) any { return o.(*model.Slice).Endpoints[0].Zone }, ""},
		"zone hints": {endpoints(func(e *discoveryv1.Endpoint) {
			e.Hints = &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: "a"}, {Name: "\xff"}, {Name: "a"}}}
		}), InvalidText, "endpoints[0].hints", func(o model.Keyed) any { return strings.Join(o.(*model.Slice).Endpoints[0].ZoneHints, " ") }, "a"},
		"node hints": {endpoints(func(e *discoveryv1.Endpoint) {
			e.Hints = &discoveryv1.EndpointHints{ForNodes: []discoveryv1.ForNode{{Name: "b"}, {Name: long}, {Name: "a"}}}
		}), InvalidText, "endpoints[0].hints", func(o model.Keyed) any { return strings.Join(o.(*model.Slice).Endpoints[0].NodeHints, " ") }, "a b"},

		"label": {node(func(n *corev1.Node) { n.Labels["x y"] = "z" }), InvalidText, "metadata.labels",
			func(o model.Keyed) any { return len(o.(*model.Node).Labels) }, 1},
		"label's value": {node(func(n *corev1.Node) { n.Labels["c"] = "\xff" }), InvalidText, "metadata.labels",
			func(o model.Keyed) any { return len(o.(*model.Node).Labels) }, 1},
		"address of a Node": {node(addresses("0.0.0.0", "10.0.0.1", "10.0.0.1", "127.0.0.1", "fe80::1")), InvalidAddress, "status.addresses[0].address",
			func(o model.Keyed) any { return len(o.(*model.Node).Addresses) }, 3},
		"pod CIDR twice": {node(func(n *corev1.Node) { n.Spec.PodCIDRs = []string{"10.0.0.0/24", "10.0.0.1/24"} }), "", "",
			func(o model.Keyed) any { return len(o.(*model.Node).PodCIDRs) }, 1},
	} {
		t.Run(name, func(t *testing.T) {
			_, o, skips := NewConverter("").Convert(c.in)
			if c.reason == "" {
				require.Empty(t, skips)
			} else {
				require.Len(t, skips, 1)
				require.Equal(t, c.reason, skips[0].Reason, skips[0].Detail)
				require.Equal(t, c.field, skips[0].Field)
				require.True(t, skips[0].Invalid())
			}
			if c.want == nil {
				require.Nil(t, o)
				return
			}
			require.NoError(t, o.(interface{ Check() error }).Check())
			require.Equal(t, c.want, c.left(o))
		})
	}
}

// TestAddressesOfTenants asserts which addresses can be external IPs and endpoints, which tenants
// write, and which can be load balancers' addresses, which controllers write: however they are
// written, not those that mean the node itself or a service of the cloud. Who gets an address that
// several Services want is for the agent to decide.
func TestAddressesOfTenants(t *testing.T) {
	const never, balanced, always = "", "balanced", "external balanced endpoint"
	for address, want := range map[string]string{
		"127.0.0.1": never, "127.1.2.3": never, "::1": never, "0.0.0.0": never, "::": never, "255.255.255.255": never,
		"224.0.0.1": never, "ff02::1": never, "fe80::1%eth0": never, "::ffff:127.0.0.1": never, "::ffff:0.0.0.0": never, "::ffff:224.0.0.1": never,
		"169.254.169.254": balanced, "169.254.20.10": balanced, "fe80::1": balanced, "::ffff:169.254.169.254": balanced, "169.254.169.0254": balanced,
		"10.96.0.11": always, "192.168.0.2": always, "::ffff:192.168.0.2": always, "fd00:ec2::254": always, "2001:db8::1": always,
	} {
		s, _ := NewConverter("").FromService(service(func(s *corev1.Service) {
			s.Spec.ExternalIPs, s.Spec.Type = []string{address}, corev1.ServiceTypeLoadBalancer
			s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: address}}
		}))
		var got []string
		if len(s.ExternalIPs) > 0 {
			got = append(got, "external")
		}
		if len(s.LoadBalancerIngress) > 0 {
			got = append(got, "balanced")
		}
		for _, family := range []discoveryv1.AddressType{discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6} {
			e, _ := NewConverter("").FromEndpointSlice(slice(func(s *discoveryv1.EndpointSlice) {
				s.AddressType, s.Endpoints[0].Addresses = family, []string{address}
			}))
			if len(e.Endpoints) > 0 {
				got = append(got, "endpoint")
			}
		}
		require.Equal(t, want, strings.Join(got, " "), address)
	}
}

// FuzzNames compares the checks of names with Kubernetes' own functions.
func FuzzNames(f *testing.F) {
	for _, s := range []string{"", "a", "a-b", "-a", "a-", "a.b", "a..b", ".a", "A_b", "a/b", "/b", "a/", "a/b/c", "a/B_.c", "\xff", "a\n", strings.Repeat("a", 63),
		strings.Repeat("a", 64), strings.Repeat("a.", 126) + "a", strings.Repeat("a.", 127), strings.Repeat("a", 253) + "/" + strings.Repeat("b", 63)} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		require.Equal(t, len(validation.IsDNS1123Label(s)) == 0, model.IsLabel(s))
		require.Equal(t, len(validation.IsDNS1123Subdomain(s)) == 0, model.IsSubdomain(s))
		require.Equal(t, len(validation.IsValidLabelValue(s)) == 0, model.IsLabelValue(s))
		require.Equal(t, len(validation.IsQualifiedName(s)) == 0, model.IsQualifiedName(s))
	})
}

func TestResourceVersion(t *testing.T) {
	for in, want := range map[string]uint64{"": 0, "12": 12, "x1": 0, "18446744073709551615": 1<<64 - 1} {
		require.Equal(t, want, ResourceVersion(&metav1.ObjectMeta{ResourceVersion: in}), in)
	}
}
