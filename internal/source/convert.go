package source

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/slicecast/slicecast/internal/intern"
	"github.com/slicecast/slicecast/internal/model"
)

// LabelServiceProxyName names the proxy that serves a Service. Without the label, the cluster's
// default proxy does.
const LabelServiceProxyName = "service.kubernetes.io/service-proxy-name"

// AnnotationIPVSScheduler names the scheduler with which IPVS chooses among a Service's backends.
const AnnotationIPVSScheduler = "slicecast.io/ipvs-scheduler"

// taintToBeDeleted is the taint with which the cluster autoscaler announces that it will remove a
// node.
const taintToBeDeleted = "ToBeDeletedByClusterAutoscaler"

// Converter converts Kubernetes objects to objects of the model. It trims them, and sets absent
// fields to Kubernetes' defaults. Any number of goroutines may use it. It retains only strings of
// its input.
type Converter struct {
	proxyName string
	strings   intern.Strings
}

// NewConverter returns a Converter for the Services whose label
// service.kubernetes.io/service-proxy-name has this value. If it is empty, the Converter is for
// Services without the label.
func NewConverter(serviceProxyName string) *Converter {
	return &Converter{proxyName: serviceProxyName}
}

// Convert converts a Service, an EndpointSlice, a Node or a ServiceCIDR. It panics for any other
// type, which is a bug. The object is nil if all of it is left out. The skips say why, or which
// parts are left out.
func (c *Converter) Convert(o metav1.Object) (model.Key, model.Keyed, []Skip) {
	switch o := o.(type) {
	case *corev1.Service:
		key := model.Key{Kind: model.KindService, Namespace: o.Namespace, Name: o.Name}
		s, skips := c.FromService(o)
		return key, canonical(s, (*SkipList)(&skips)), skips
	case *discoveryv1.EndpointSlice:
		key := model.Key{Kind: model.KindSlice, Namespace: o.Namespace, Name: o.Name}
		s, skips := c.FromEndpointSlice(o)
		return key, canonical(s, (*SkipList)(&skips)), skips
	case *corev1.Node:
		n, skips := c.FromNode(o)
		return n.Key(), canonical(n, (*SkipList)(&skips)), skips
	case *networkingv1.ServiceCIDR:
		s, skips := c.FromServiceCIDR(o)
		return s.Key(), s, skips
	}
	panic(fmt.Sprintf("cannot convert a %T", o))
}

// canonical returns the object if it is canonical. Otherwise, or if o is nil, it returns nil, as
// decoders would refuse the object. Only names that the API server does not admit make an object
// non-canonical at this point.
func canonical[T any, O interface {
	*T
	model.Keyed
	Check() error
}](o O, skips *SkipList) model.Keyed {
	if o == nil {
		return nil
	}
	reason := InvalidText
	err := o.Key().Check()
	if err == nil {
		reason, err = Invalid, o.Check()
	}
	if err != nil {
		skips.Add(reason, "metadata.name", "%v", err)
		return nil
	}
	return o
}

// ResourceVersion returns an object's resourceVersion as a number, or 0 if it is none.
func ResourceVersion(o metav1.Object) uint64 {
	rv, err := strconv.ParseUint(o.GetResourceVersion(), 10, 64)
	if err != nil {
		return 0
	}
	return rv
}

// FromService converts a Service. It returns nil if nodes do not serve the Service: if it is
// headless, of type ExternalName, for another proxy, or invalid as a whole. Fields that do not
// apply to the Service's type are left out, as the API server clears them.
func (c *Converter) FromService(o *corev1.Service) (*model.Service, []Skip) {
	var skips SkipList
	if !c.servesService(o, &skips) {
		return nil, skips
	}
	s := model.Service{
		Namespace:             c.strings.Get(o.Namespace),
		Name:                  c.strings.Get(o.Name),
		InternalTrafficPolicy: model.TrafficCluster,
		ExternalTrafficPolicy: model.TrafficCluster,
	}
	var ok bool
	if s.Type, ok = serviceTypes[o.Spec.Type]; !ok {
		skips.Add(InvalidType, "spec.type", "%q is not one of ClusterIP, NodePort, LoadBalancer, ExternalName", o.Spec.Type)
		return nil, skips
	}
	s.ClusterIPs = clusterIPs(o, &skips)
	if len(s.ClusterIPs) == 0 {
		return nil, skips
	}
	s.ExternalIPs = externalIPs(o, &skips)
	s.Ports = c.servicePorts(o, s.Type, &skips)

	if p := o.Spec.InternalTrafficPolicy; p != nil && *p == corev1.ServiceInternalTrafficPolicyLocal {
		s.InternalTrafficPolicy = model.TrafficLocal
	}
	if o.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal {
		s.ExternalTrafficPolicy = model.TrafficLocal
	}
	s.ClientIPAffinitySeconds = affinitySeconds(o, &skips)
	if d := ptr.Deref(o.Spec.TrafficDistribution, ""); d == "" || model.IsQualifiedName(d) {
		s.TrafficDistribution = c.strings.Get(d)
	} else {
		skips.Add(InvalidText, "spec.trafficDistribution", "%.80q is not a valid traffic distribution", d)
	}
	if name := o.Annotations[AnnotationIPVSScheduler]; !model.IsLabelValue(name) {
		skips.Add(InvalidAnnotation, "metadata.annotations", "%s is not a valid scheduler name", AnnotationIPVSScheduler)
	} else {
		s.IPVSScheduler = c.strings.Get(name)
	}
	if !o.CreationTimestamp.IsZero() {
		s.CreationTimeSeconds = o.CreationTimestamp.Unix()
	}
	if s.Type == model.LoadBalancer {
		loadBalancer(o, &s, &skips)
	}
	return model.NewService(s), skips
}

var serviceTypes = map[corev1.ServiceType]model.ServiceType{
	"": model.ClusterIP, corev1.ServiceTypeClusterIP: model.ClusterIP, corev1.ServiceTypeNodePort: model.NodePort,
	corev1.ServiceTypeLoadBalancer: model.LoadBalancer,
}

// servesService reports whether this proxy serves the Service, by kube-proxy's rules.
func (c *Converter) servesService(o *corev1.Service, skips *SkipList) bool {
	if name, ok := o.Labels[LabelServiceProxyName]; name != c.proxyName || ok != (c.proxyName != "") {
		skips.Add(OtherProxy, "metadata.labels", "%s is %q", LabelServiceProxyName, name)
		return false
	}
	if o.Spec.Type == corev1.ServiceTypeExternalName {
		skips.Add(ExternalName, "spec.type", "is ExternalName")
		return false
	}
	if o.Spec.ClusterIP == corev1.ClusterIPNone || len(o.Spec.ClusterIPs) > 0 && o.Spec.ClusterIPs[0] == corev1.ClusterIPNone {
		skips.Add(Headless, "spec.clusterIP", "is None")
		return false
	}
	return true
}

// clusterIPs returns the valid cluster IPs, at most one of each family.
func clusterIPs(o *corev1.Service, skips *SkipList) []netip.Addr {
	given, field := o.Spec.ClusterIPs, "spec.clusterIPs[%d]"
	if len(given) == 0 && o.Spec.ClusterIP != "" {
		given, field = []string{o.Spec.ClusterIP}, "spec.clusterIP"
	}
	if len(given) == 0 {
		skips.Add(NoClusterIP, "spec.clusterIP", "is missing")
	}
	var addrs []netip.Addr
	for i, ip := range given {
		a, ok := skips.Address(ip, model.ForServices, field, i)
		if ok && hasFamily(addrs, model.FamilyOf(a)) {
			skips.Add(WrongFamily, at(field, i), "%q is the second address of its family", ip)
		} else if ok {
			addrs = append(addrs, a)
		}
	}
	return addrs
}

// externalIPs returns the valid external IPs, each once.
func externalIPs(o *corev1.Service, skips *SkipList) (addrs []netip.Addr) {
	external := unique[netip.Addr]{field: "spec.externalIPs", skips: skips}
	for i, ip := range o.Spec.ExternalIPs {
		if a, ok := skips.Address(ip, model.ForEndpoints, "spec.externalIPs[%d]", i); ok && external.add(a, a) {
			addrs = append(addrs, a)
		}
	}
	return addrs
}

func (c *Converter) servicePorts(o *corev1.Service, t model.ServiceType, skips *SkipList) []model.ServicePort {
	given := first(o.Spec.Ports, model.MaxFrontends, "spec.ports", skips)
	ports := make([]model.ServicePort, 0, len(given))
	for i := range given {
		p, field := &given[i], at("spec.ports[%d]", i)
		protocol, number, ok := skips.Port(p.Protocol, p.Port, field)
		if !ok || !skips.PortName(p.Name, field) {
			continue
		}
		kept := model.ServicePort{Name: c.strings.Get(p.Name), Protocol: protocol, Port: number}
		if t != model.ClusterIP && p.NodePort != 0 {
			kept.NodePort, _ = skips.portNumber(p.NodePort, field+".nodePort")
		}
		ports = append(ports, kept)
	}
	return distinctPorts(ports, "spec.ports", skips, func(p model.ServicePort) []portProperty {
		properties := []portProperty{
			{kind: "name", name: p.Name, protocol: p.Protocol}, {kind: "port", number: p.Port, protocol: p.Protocol},
		}
		if p.NodePort != 0 {
			properties = append(properties, portProperty{kind: "nodePort", number: p.NodePort, protocol: p.Protocol})
		}
		return properties
	})
}

// portProperty is a property that two ports with the same protocol must not share.
type portProperty struct {
	kind, name string
	number     uint16
	protocol   model.Protocol
}

// distinctPorts removes ports that share a property with an earlier port. The first property of a
// port is its name.
func distinctPorts[P any](ports []P, field string, skips *SkipList, properties func(P) []portProperty) []P {
	if len(ports) < 2 {
		return ports
	}
	seen := make(map[portProperty]bool, len(ports))
	return slices.DeleteFunc(ports, func(p P) bool {
		all := properties(p)
		if i := slices.IndexFunc(all, func(property portProperty) bool { return seen[property] }); i >= 0 {
			skips.Add(Duplicate, field, "port %q has the %s of an earlier port with the same protocol", all[0].name, all[i].kind)
			return true
		}
		for _, property := range all {
			seen[property] = true
		}
		return false
	})
}

func affinitySeconds(o *corev1.Service, skips *SkipList) uint32 {
	if o.Spec.SessionAffinity != corev1.ServiceAffinityClientIP {
		return 0
	}
	c := o.Spec.SessionAffinityConfig
	if c == nil || c.ClientIP == nil || c.ClientIP.TimeoutSeconds == nil {
		return uint32(corev1.DefaultClientIPServiceAffinitySeconds)
	}
	if t := *c.ClientIP.TimeoutSeconds; t > 0 && t <= model.MaxAffinitySeconds {
		return uint32(t)
	}
	skips.Add(InvalidTimeout, "spec.sessionAffinityConfig.clientIP.timeoutSeconds",
		"%d is not within 1 to %d", *c.ClientIP.TimeoutSeconds, model.MaxAffinitySeconds)
	return uint32(corev1.DefaultClientIPServiceAffinitySeconds)
}

// loadBalancer sets the fields that only Services of type LoadBalancer have.
func loadBalancer(o *corev1.Service, s *model.Service, skips *SkipList) {
	ranges := unique[netip.Prefix]{field: "spec.loadBalancerSourceRanges", skips: skips}
	for i, r := range o.Spec.LoadBalancerSourceRanges {
		let := nobody // a family without any range would be open to all
		if p, ok := ParsePrefix(r); ok {
			let = []netip.Prefix{p}
		} else {
			skips.Add(InvalidRange, at("spec.loadBalancerSourceRanges[%d]", i), "%q is not a CIDR and admits no client", r)
		}
		for _, p := range let {
			if ranges.add(p, p.Addr()) {
				s.LoadBalancerSourceRanges = append(s.LoadBalancerSourceRanges, p)
			}
		}
	}
	ingress := unique[netip.Addr]{field: "status.loadBalancer.ingress", skips: skips}
	for i, ing := range o.Status.LoadBalancer.Ingress {
		if ing.IP == "" {
			continue // a host name, which only DNS uses
		}
		a, ok := skips.Address(ing.IP, model.ForServices, "status.loadBalancer.ingress[%d].ip", i)
		if ok && ingress.add(a, a) {
			s.LoadBalancerIngress = append(s.LoadBalancerIngress, model.LoadBalancerIngress{
				IP: a, ProxyMode: ing.IPMode != nil && *ing.IPMode != corev1.LoadBalancerIPModeVIP,
			})
		}
	}
	if n := o.Spec.HealthCheckNodePort; s.ExternalTrafficPolicy == model.TrafficLocal && n != 0 {
		s.HealthCheckNodePort, _ = skips.portNumber(n, "spec.healthCheckNodePort")
	}
}

// FromEndpointSlice converts an EndpointSlice. It returns nil for a slice of FQDNs, of a headless
// Service, or without a Service. As in kube-proxy, the label
// service.kubernetes.io/service-proxy-name has no effect here: on a slice it may be missing or come
// late.
func (c *Converter) FromEndpointSlice(o *discoveryv1.EndpointSlice) (*model.Slice, []Skip) {
	var skips SkipList
	s := model.Slice{
		Namespace: c.strings.Get(o.Namespace),
		Name:      o.Name,
		Service:   c.strings.Get(o.Labels[discoveryv1.LabelServiceName]),
	}
	if _, ok := o.Labels[corev1.IsHeadlessService]; ok {
		skips.Add(Headless, "metadata.labels", "has %s", corev1.IsHeadlessService)
		return nil, skips
	}
	if s.Service == "" {
		skips.Add(NoService, "metadata.labels", "has no %s", discoveryv1.LabelServiceName)
		return nil, skips
	}
	switch o.AddressType {
	case discoveryv1.AddressTypeIPv4:
		s.Family = model.IPv4
	case discoveryv1.AddressTypeIPv6:
		s.Family = model.IPv6
	case discoveryv1.AddressTypeFQDN:
		skips.Add(FQDN, "addressType", "is FQDN")
		return nil, skips
	default:
		skips.Add(InvalidType, "addressType", "%q is not one of IPv4, IPv6, FQDN", o.AddressType)
		return nil, skips
	}

	s.Ports = c.slicePorts(o, &skips)
	endpoints := first(o.Endpoints, model.MaxEndpoints, "endpoints", &skips)
	s.Endpoints = make([]model.Endpoint, 0, len(endpoints))
	for i := range endpoints {
		if e, ok := c.endpoint(&endpoints[i], i, s.Family, &skips); ok {
			s.Endpoints = append(s.Endpoints, e)
		}
	}
	if at, ok := o.Annotations[corev1.EndpointsLastChangeTriggerTime]; ok {
		if t, err := time.Parse(time.RFC3339Nano, at); err == nil {
			s.LastChangeTriggerTimeMS = t.UnixMilli()
		}
	}
	return model.NewSlice(s), skips
}

func (c *Converter) slicePorts(o *discoveryv1.EndpointSlice, skips *SkipList) []model.SlicePort {
	given := first(o.Ports, model.MaxSlicePorts, "ports", skips)
	ports := make([]model.SlicePort, 0, len(given))
	for i := range given {
		p, field := &given[i], at("ports[%d]", i)
		if p.Port == nil {
			skips.Add(PortWithoutNumber, field, "has no number")
			continue
		}
		protocol, number, ok := skips.Port(ptr.Deref(p.Protocol, corev1.ProtocolTCP), *p.Port, field)
		if ok && skips.PortName(ptr.Deref(p.Name, ""), field) {
			ports = append(ports, model.SlicePort{Name: c.strings.Get(ptr.Deref(p.Name, "")), Protocol: protocol, Port: number})
		}
	}
	return distinctPorts(ports, "ports", skips, func(p model.SlicePort) []portProperty {
		return []portProperty{{kind: "name", name: p.Name, protocol: p.Protocol}}
	})
}

func (c *Converter) endpoint(o *discoveryv1.Endpoint, i int, family model.Family, skips *SkipList) (model.Endpoint, bool) {
	a, ok := endpointAddress(o, i, family, skips)
	if !ok {
		return model.Endpoint{}, false
	}
	e := model.Endpoint{
		Address: a,
		Conditions: model.Conditions{
			Ready:       ptr.Deref(o.Conditions.Ready, true),
			Serving:     ptr.Deref(o.Conditions.Serving, true),
			Terminating: ptr.Deref(o.Conditions.Terminating, false),
		},
	}
	// An invalid name of a Node or zone is left out, so no node treats the endpoint as local. The
	// API server does not validate the zone.
	if name := ptr.Deref(o.NodeName, ""); name == "" || model.IsSubdomain(name) {
		e.NodeName = c.strings.Get(name)
	} else {
		skips.Add(InvalidText, at("endpoints[%d].nodeName", i), "%.80q is not a valid Node name", name)
	}
	if zone := ptr.Deref(o.Zone, ""); model.IsLabelValue(zone) {
		e.Zone = c.strings.Get(zone)
	} else {
		skips.Add(InvalidText, at("endpoints[%d].zone", i), "%.80q is not a valid zone name", zone)
	}
	if o.Hints == nil {
		return e, true
	}
	for _, z := range first(o.Hints.ForZones, model.MaxHints, "endpoints.hints.forZones", skips) {
		if model.IsLabelValue(z.Name) {
			e.ZoneHints = append(e.ZoneHints, c.strings.Get(z.Name))
		} else {
			skips.Add(InvalidText, at("endpoints[%d].hints", i), "%.80q is not a valid zone name", z.Name)
		}
	}
	for _, n := range first(o.Hints.ForNodes, model.MaxHints, "endpoints.hints.forNodes", skips) {
		if model.IsSubdomain(n.Name) {
			e.NodeHints = append(e.NodeHints, c.strings.Get(n.Name))
		} else {
			skips.Add(InvalidText, at("endpoints[%d].hints", i), "%.80q is not a valid Node name", n.Name)
		}
	}
	return e, true
}

// endpointAddress returns the first address of an endpoint, if it is valid and of the slice's
// family. kube-proxy uses no other.
func endpointAddress(o *discoveryv1.Endpoint, i int, family model.Family, skips *SkipList) (netip.Addr, bool) {
	if len(o.Addresses) == 0 {
		skips.Add(InvalidAddress, at("endpoints[%d].addresses", i), "is empty")
		return netip.Addr{}, false
	}
	a, ok := skips.Address(o.Addresses[0], model.ForEndpoints, "endpoints[%d].addresses[0]", i)
	if ok && model.FamilyOf(a) != family {
		skips.Add(WrongFamily, at("endpoints[%d].addresses[0]", i), "%s is not %s", a, family)
		ok = false
	}
	return a, ok
}

// FromNode converts a Node. Its result is never nil, as every node may have an agent. It leaves out
// labels, addresses and ranges that are invalid or duplicates.
func (c *Converter) FromNode(o *corev1.Node) (*model.Node, []Skip) {
	var skips SkipList
	n := &model.Node{
		Name:     c.strings.Get(o.Name),
		Deleting: o.DeletionTimestamp != nil,
		TaintedForDeletion: slices.ContainsFunc(o.Spec.Taints, func(t corev1.Taint) bool {
			return t.Key == taintToBeDeleted
		}),
	}
	if len(o.Labels) > 0 {
		n.Labels = make(map[string]string, len(o.Labels))
		for k, v := range o.Labels {
			if !model.IsQualifiedName(k) || !model.IsLabelValue(v) {
				skips.Add(InvalidText, "metadata.labels", "%.80q is not a valid label key, or %.80q not a valid value", k, v)
				continue
			}
			n.Labels[c.strings.Get(k)] = c.strings.Get(v)
		}
	}
	n.Addresses = nodeAddrs(o, corev1.NodeInternalIP, &skips)
	for _, a := range nodeAddrs(o, corev1.NodeExternalIP, &skips) {
		if !slices.Contains(n.Addresses, a) {
			n.Addresses = append(n.Addresses, a)
		}
	}
	cidrs := o.Spec.PodCIDRs
	if len(cidrs) == 0 && o.Spec.PodCIDR != "" {
		cidrs = []string{o.Spec.PodCIDR}
	}
	for _, p := range skips.prefixes(cidrs, "spec.podCIDRs") {
		if !slices.Contains(n.PodCIDRs, p) {
			n.PodCIDRs = append(n.PodCIDRs, p)
		}
	}
	return n, skips
}

func hasFamily(addrs []netip.Addr, family model.Family) bool {
	return slices.ContainsFunc(addrs, func(a netip.Addr) bool { return model.FamilyOf(a) == family })
}

func nodeAddrs(o *corev1.Node, t corev1.NodeAddressType, skips *SkipList) []netip.Addr {
	var out []netip.Addr
	for i, address := range first(o.Status.Addresses, model.MaxNodeAddresses, "status.addresses", skips) {
		if address.Type != t {
			continue
		}
		a, ok := skips.Address(address.Address, model.ForNodes, "status.addresses[%d].address", i)
		if ok && !slices.Contains(out, a) {
			out = append(out, a)
		}
	}
	return out
}
