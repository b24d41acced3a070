package model

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// The methods Check define what a canonical object is. Sources make no others: they leave out, and report, what the API server
// would not have admitted. Decoders refuse others, so that what a rogue server sends is no worse for a node than what a tenant
// can write. Check looks at the content only, not at the version. Its errors name the field as the wire API does.
//
// A canonical object has, beside what the functions say:
//
//  1. lists in ascending order, each entry once; NewService and NewSlice sort them. A Node's addresses and pod CIDRs keep the
//     order that the cluster has given them, which counts.
//  2. addresses and ranges in one form: no zones, no IPv4-mapped IPv6, and ranges without host bits.
//  3. names as Kubernetes has them.
//
// Nothing has to be there but what names the object: newer software may leave out what it says in another way.

// Bounds of what is in an object. Those of slices are the API server's own.
const (
	MaxEndpoints  = 1000   // of a slice
	MaxSlicePorts = 20_000 // of a slice
	MaxHints      = 8      // of an endpoint, of each kind
	// MaxAffinitySeconds bounds how long a client's IP sticks to its endpoint: a day.
	MaxAffinitySeconds = 86_400
	// MaxNodeAddresses is a hundred times what Nodes have. The API server has no bound.
	MaxNodeAddresses = 1000
	// MaxCIDRs bounds the ranges of a Node's pods, and those of one ServiceCIDR. The API server admits one of each family.
	MaxCIDRs = 16
	// MaxServiceCIDRs bounds the ranges of all ServiceCIDRs together.
	MaxServiceCIDRs = 1000

	// In bytes.
	maxLabel     = 63
	maxSubdomain = 253
)

// AddressUse says what an address is used for, on which it depends which ones make sense.
type AddressUse uint8

// The uses of addresses, from the strictest on.
const (
	// ForEndpoints is for what traffic leads to, and for external IPs. The API server admits no loopback or link-local addresses
	// there: they are the node's own, such as that of a cloud's metadata service.
	ForEndpoints AddressUse = iota
	// ForServices is for cluster IPs, and for a load balancer's addresses. Link-local ones are in use there.
	ForServices
	// ForNodes is for a Node's own addresses.
	ForNodes
)

// CheckAddress returns what is wrong with an address for that use, or nil.
func CheckAddress(a netip.Addr, use AddressUse) error {
	switch {
	case !a.IsValid():
		return errors.New("no address")
	case a.Zone() != "" || a.Is4In6():
		return fmt.Errorf("%s is no plain IPv4 or IPv6 address", a)
	case a.IsUnspecified() || a.IsMulticast() || a == broadcast:
		return fmt.Errorf("%s is no unicast address", a)
	case use <= ForServices && a.IsLoopback():
		return fmt.Errorf("%s is a loopback address", a)
	case use <= ForEndpoints && a.IsLinkLocalUnicast():
		return fmt.Errorf("%s is a link-local address", a)
	}
	return nil
}

var broadcast = netip.AddrFrom4([4]byte{255, 255, 255, 255})

// The classes of characters in names.
const (
	lower  = 1 << iota // a-z, 0-9
	upper              // A-Z
	hyphen             // -
	inner              // _ and ., which may be in label values, but not at their ends
)

var classes = func() (c [256]uint8) {
	for b := byte('a'); b <= 'z'; b++ {
		c[b], c[b-'a'+'A'] = lower, upper
	}
	for b := byte('0'); b <= '9'; b++ {
		c[b] = lower
	}
	c['-'], c['_'], c['.'] = hyphen, inner, inner
	return c
}()

// isWord reports whether all of s is of some classes, and its ends are of those of letters and digits among them.
func isWord(s string, of uint8) bool {
	ends := of & (lower | upper)
	if s == "" || classes[s[0]]&ends == 0 || classes[s[len(s)-1]]&ends == 0 {
		return false
	}
	for i := range len(s) {
		if classes[s[i]]&of == 0 {
			return false
		}
	}
	return true
}

// IsLabel reports whether s is a DNS label as Kubernetes has them (RFC 1123): the name of a namespace, Service or port.
func IsLabel(s string) bool { return len(s) <= maxLabel && isWord(s, lower|hyphen) }

// IsSubdomain reports whether s is a DNS subdomain as Kubernetes has them (RFC 1123): the name of a slice or Node.
func IsSubdomain(s string) bool {
	if len(s) > maxSubdomain {
		return false
	}
	for {
		dot := strings.IndexByte(s, '.')
		if dot < 0 {
			return isWord(s, lower|hyphen)
		}
		if !isWord(s[:dot], lower|hyphen) {
			return false
		}
		s = s[dot+1:]
	}
}

// IsLabelValue reports whether s can be the value of a label, such as the name of a zone. It may be empty.
func IsLabelValue(s string) bool {
	return s == "" || len(s) <= maxLabel && isWord(s, lower|upper|hyphen|inner)
}

// IsQualifiedName reports whether s can be the key of a label: a word, with a DNS subdomain and a slash before it or not.
func IsQualifiedName(s string) bool {
	prefix, name, ok := strings.Cut(s, "/")
	if !ok {
		prefix, name = "", s
	}
	return (!ok || IsSubdomain(prefix)) && name != "" && IsLabelValue(name)
}

// checker keeps the first error.
type checker struct{ err error }

func (c *checker) fail(format string, args ...any) {
	if c.err == nil {
		c.err = fmt.Errorf(format, args...)
	}
}

// want fails, where ok does not hold, with a value that anybody may have written.
func (c *checker) want(ok bool, field, value, what string) {
	if !ok {
		c.fail("%s: %.80q is no %s", field, value, what)
	}
}

func (c *checker) key(k Key) {
	switch k.Kind {
	case KindService:
		c.want(IsLabel(k.Namespace), "namespace", k.Namespace, "name of a namespace")
		c.want(IsLabel(k.Name), "name", k.Name, "name of a Service")
	case KindSlice:
		c.want(IsLabel(k.Namespace), "namespace", k.Namespace, "name of a namespace")
		c.want(IsSubdomain(k.Name), "name", k.Name, "name of an EndpointSlice")
	case KindNode, KindServiceCIDR:
		c.want(k.Namespace == "", "namespace", k.Namespace, "namespace of an object without one")
		c.want(IsSubdomain(k.Name), "name", k.Name, "name of a "+k.Kind.String())
	default:
		c.fail("kind: unknown value %d", k.Kind)
	}
}

// count fails for a list that is too long.
func (c *checker) count(field string, n, most int) {
	if n > most {
		c.fail("%s: has %d entries, and may have %d", field, n, most)
	}
}

// ascending fails where the ith entry of a list, to which the ones before it are compared, does not come after the one before.
func (c *checker) ascending(field string, i, compared int) {
	if i > 0 && compared >= 0 {
		c.fail("%s: entry %d comes twice, or out of order", field, i)
	}
}

// families counts the entries of each IP family, and fails where one has too many.
type families [2]int

func (f *families) add(c *checker, field string, a netip.Addr, most int) {
	n := &f[0]
	if !a.Is4() {
		n = &f[1]
	}
	if *n++; *n > most {
		c.fail("%s: has more than %d entries of a family", field, most)
	}
}

func (c *checker) address(field string, a netip.Addr, use AddressUse) {
	if err := CheckAddress(a, use); err != nil {
		c.fail("%s: %w", field, err)
	}
}

// addresses checks a list in ascending order, with so many entries of a family at most.
func (c *checker) addresses(field string, list []netip.Addr, use AddressUse, most int) {
	var n families
	for i, a := range list {
		c.address(field, a, use)
		n.add(c, field, a, most)
		c.ascending(field, i, list[max(i-1, 0)].Compare(a))
	}
}

func (c *checker) prefix(field string, p netip.Prefix) {
	if !p.IsValid() || p.Addr().Is4In6() || p != p.Masked() {
		c.fail("%s: %s is no canonical IPv4 or IPv6 range", field, p)
	}
}

// prefixes checks a list in ascending order, with so many entries of a family at most.
func (c *checker) prefixes(field string, list []netip.Prefix, most int) {
	var n families
	for i, p := range list {
		c.prefix(field, p)
		n.add(c, field, p.Addr(), most)
		c.ascending(field, i, ComparePrefix(list[max(i-1, 0)], p))
	}
}

// port checks a port's name, protocol and number.
func (c *checker) port(name string, protocol Protocol, number uint16) {
	c.want(name == "" || IsLabel(name), "ports.name", name, "name of a port")
	if protocol < TCP || protocol > SCTP {
		c.fail("ports.protocol: unknown value %d", protocol)
	}
	if number == 0 {
		c.fail("ports.port: 0 is no port number")
	}
}

func comparePort(aName string, a Protocol, bName string, b Protocol) int {
	return cmp.Or(cmp.Compare(aName, bName), cmp.Compare(a, b))
}

// Check returns an error if no object can have the key.
func (k Key) Check() error {
	var c checker
	c.key(k)
	return c.err
}

// Check returns an error if the Service is not canonical.
//
//   - It has at most one cluster IP of each family, and at most MaxFrontends external IPs, load-balancer addresses and source
//     ranges of each, and MaxFrontends ports.
//   - No two ports have the same name and protocol, the same number and protocol, or the same NodePort and protocol. None has
//     the number 0. Only Services of type NodePort or LoadBalancer have NodePorts.
//   - Load-balancer addresses and source ranges are only in Services of type LoadBalancer; a port for health checks in one
//     with the external traffic policy Local.
//   - The affinity lasts MaxAffinitySeconds at most.
func (s *Service) Check() error {
	var c checker
	c.key(s.Key())
	if s.Type < ClusterIP || s.Type > LoadBalancer {
		c.fail("type: unknown value %d", s.Type)
	}
	c.addresses("cluster_ips", s.ClusterIPs, ForServices, 1)
	c.addresses("external_ips", s.ExternalIPs, ForEndpoints, MaxFrontends)
	c.loadBalancer(s)
	c.servicePorts(s)
	if s.InternalTrafficPolicy > TrafficLocal {
		c.fail("internal_traffic_policy: unknown value %d", s.InternalTrafficPolicy)
	}
	if s.ExternalTrafficPolicy > TrafficLocal {
		c.fail("external_traffic_policy: unknown value %d", s.ExternalTrafficPolicy)
	}
	if s.ClientIPAffinitySeconds > MaxAffinitySeconds {
		c.fail("client_ip_affinity_seconds: %d is more than %d", s.ClientIPAffinitySeconds, MaxAffinitySeconds)
	}
	c.want(s.TrafficDistribution == "" || IsQualifiedName(s.TrafficDistribution), "traffic_distribution", s.TrafficDistribution, "traffic distribution")
	c.want(IsLabelValue(s.IPVSScheduler), "ipvs_scheduler", s.IPVSScheduler, "name of a scheduler")
	return c.err
}

func (c *checker) loadBalancer(s *Service) {
	var n families
	for i, in := range s.LoadBalancerIngress {
		c.address("load_balancer_ingress", in.IP, ForServices)
		n.add(c, "load_balancer_ingress", in.IP, MaxFrontends)
		c.ascending("load_balancer_ingress", i, s.LoadBalancerIngress[max(i-1, 0)].IP.Compare(in.IP))
	}
	c.prefixes("load_balancer_source_ranges", s.LoadBalancerSourceRanges, MaxFrontends)
	if s.Type != LoadBalancer && len(s.LoadBalancerIngress)+len(s.LoadBalancerSourceRanges) > 0 {
		c.fail("load_balancer_ingress: only a Service of type LoadBalancer has that, and source ranges")
	}
	if s.HealthCheckNodePort != 0 && (s.Type != LoadBalancer || s.ExternalTrafficPolicy != TrafficLocal) {
		c.fail("health_check_node_port: only a Service of type LoadBalancer with the external traffic policy Local has that")
	}
}

func (c *checker) servicePorts(s *Service) {
	c.count("ports", len(s.Ports), MaxFrontends)
	for i := range s.Ports {
		p, before := &s.Ports[i], &s.Ports[max(i-1, 0)]
		c.port(p.Name, p.Protocol, p.Port)
		c.ascending("ports", i, comparePort(before.Name, before.Protocol, p.Name, p.Protocol))
		if p.NodePort != 0 && s.Type == ClusterIP {
			c.fail("ports.node_port: a Service of type ClusterIP has none")
		}
	}
	if len(s.Ports) > 1 && c.err == nil {
		numbers, nodePorts := make(map[number]struct{}, len(s.Ports)), make(map[number]struct{}, len(s.Ports))
		for i := range s.Ports {
			p := &s.Ports[i]
			numbers[number{p.Protocol, p.Port}] = struct{}{}
			if len(numbers) <= i {
				c.fail("ports.port: %d/%s comes twice", p.Port, p.Protocol)
			}
			if p.NodePort == 0 {
				continue
			}
			n := len(nodePorts)
			if nodePorts[number{p.Protocol, p.NodePort}] = struct{}{}; len(nodePorts) == n {
				c.fail("ports.node_port: %d/%s comes twice", p.NodePort, p.Protocol)
			}
		}
	}
}

type number struct {
	protocol Protocol
	port     uint16
}

// Check returns an error if the slice is not canonical.
//
//   - It has at most MaxSlicePorts ports, no two with the same name and protocol, none with the number 0, and at most
//     MaxEndpoints endpoints, all of its family.
//   - An endpoint has at most MaxHints hints of each kind. Its zone, and those of hints, can be values of labels.
func (s *Slice) Check() error {
	var c checker
	c.key(s.Key())
	c.want(s.Service != "" && IsLabelValue(s.Service), "service", s.Service, "value of a label")
	if s.Family < IPv4 || s.Family > IPv6 {
		c.fail("address_type: unknown value %d", s.Family)
	}
	c.count("ports", len(s.Ports), MaxSlicePorts)
	for i := range s.Ports {
		p, before := &s.Ports[i], &s.Ports[max(i-1, 0)]
		c.port(p.Name, p.Protocol, p.Port)
		c.ascending("ports", i, comparePort(before.Name, before.Protocol, p.Name, p.Protocol))
	}
	c.endpoints(s.Endpoints, s.Family)
	return c.err
}

// endpoints checks a list of endpoints of a family.
func (c *checker) endpoints(list []Endpoint, family Family) {
	c.count("endpoints", len(list), MaxEndpoints)
	for i := range list {
		e := &list[i]
		c.address("address", e.Address, ForEndpoints)
		if FamilyOf(e.Address) != family {
			c.fail("address: %s in a slice of %s", e.Address, family)
		}
		c.ascending("endpoints", i, list[max(i-1, 0)].Address.Compare(e.Address))
		c.want(e.NodeName == "" || IsSubdomain(e.NodeName), "node_name", e.NodeName, "name of a Node")
		c.want(IsLabelValue(e.Zone), "zone", e.Zone, "name of a zone")
		c.count("zone_hints", len(e.ZoneHints), MaxHints)
		for j, z := range e.ZoneHints {
			c.want(IsLabelValue(z), "zone_hints", z, "name of a zone")
			c.ascending("zone_hints", j, cmp.Compare(e.ZoneHints[max(j-1, 0)], z))
		}
		c.count("node_hints", len(e.NodeHints), MaxHints)
		for j, n := range e.NodeHints {
			c.want(IsSubdomain(n), "node_hints", n, "name of a Node")
			c.ascending("node_hints", j, cmp.Compare(e.NodeHints[max(j-1, 0)], n))
		}
	}
}

// Check returns an error if the delta can't lead from one canonical slice to another. Apply checks what depends on the first.
//
// Each address and index is there once, whatever it is for, and all addresses are of one family.
func (d *SliceDelta) Check() error {
	var c checker
	c.key(d.Key())
	if len(d.Endpoints) > 0 {
		c.endpoints(d.Endpoints, FamilyOf(d.Endpoints[0].Address))
	}
	c.count("conditions", len(d.Conditions), MaxEndpoints)
	for i, e := range d.Conditions {
		if e.Index >= MaxEndpoints {
			c.fail("conditions: index %d of at most %d endpoints", e.Index, MaxEndpoints)
		}
		c.ascending("conditions", i, cmp.Compare(d.Conditions[max(i-1, 0)].Index, e.Index))
	}
	c.addresses("removed", d.Removed, ForEndpoints, MaxEndpoints)
	if len(d.Removed) > 0 {
		family, e := FamilyOf(d.Removed[0]), 0
		if len(d.Endpoints) > 0 {
			family = FamilyOf(d.Endpoints[0].Address)
		}
		for _, a := range d.Removed {
			if FamilyOf(a) != family {
				c.fail("removed: %s in a slice of %s", a, family)
			}
			for e < len(d.Endpoints) && d.Endpoints[e].Address.Less(a) {
				e++
			}
			if e < len(d.Endpoints) && d.Endpoints[e].Address == a {
				c.fail("removed: %s is among the endpoints, too", a)
			}
		}
	}
	return c.err
}

// Check returns an error if the Node is not canonical. Its service CIDRs are ascending, other lists keep their order.
func (n *Node) Check() error {
	var c checker
	c.key(n.Key())
	for k, v := range n.Labels {
		c.want(IsQualifiedName(k), "labels", k, "key of a label")
		c.want(IsLabelValue(v), "labels", v, "value of a label")
	}
	c.count("internal_ips", len(n.InternalIPs), MaxNodeAddresses)
	c.count("pod_cidrs", len(n.PodCIDRs), MaxCIDRs)
	if c.err != nil {
		return c.err // each entry is compared to all before it
	}
	for i, a := range n.InternalIPs {
		c.address("internal_ips", a, ForNodes)
		if slices.Contains(n.InternalIPs[:i], a) {
			c.fail("internal_ips: %s comes twice", a)
		}
	}
	for i, p := range n.PodCIDRs {
		c.prefix("pod_cidrs", p)
		if slices.Contains(n.PodCIDRs[:i], p) {
			c.fail("pod_cidrs: %s comes twice", p)
		}
	}
	c.prefixes("service_cidrs", n.ServiceCIDRs, MaxServiceCIDRs)
	return c.err
}
