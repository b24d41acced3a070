package model

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// The methods named Check define canonical objects. Sources create only canonical objects: they
// leave out, and report, what an API server would not have admitted. Decoders refuse any other
// object, so a rogue server can do no more to a node than a tenant can. Check looks at the content
// only, not at the version. Its errors name fields as the wire API does.
//
// Besides what each Check lists, these invariants hold for a canonical object:
//
//  1. Its lists are in ascending order without duplicates; NewService and NewSlice sort them. A
//     Node's addresses and pod CIDRs keep the cluster's order instead, because that order has a
//     meaning.
//  2. Its addresses and ranges have one form: no zones, no IPv4-mapped IPv6 addresses, and no host
//     bits in ranges.
//  3. Its names are valid Kubernetes names.
//
// Only the name of the object is required, because newer software may express other fields in
// another way.

// Bounds of the content of objects. The bounds of slices are those of the API server.
const (
	MaxEndpoints  = 1000   // endpoints of a slice
	MaxSlicePorts = 20_000 // ports of a slice
	MaxHints      = 8      // hints of an endpoint, of each kind
	// MaxFrontends bounds the number of ports of a Service times the number of its addresses, in
	// each IP family. Nodes program no more frontends than that, so sources keep no more ports,
	// addresses or ranges in a list.
	MaxFrontends = 10_000
	// MaxAffinitySeconds bounds the duration of session affinity: one day, in seconds.
	MaxAffinitySeconds = 86_400
	// MaxNodeAddresses bounds the addresses of a Node. The API server has no bound; this one is a
	// hundred times what Nodes have in practice.
	MaxNodeAddresses = 1000
	// MaxCIDRs bounds the pod CIDRs of a Node and the ranges of one ServiceCIDR. The API server
	// admits one range of each family.
	MaxCIDRs = 16
	// MaxServiceCIDRs bounds the ranges of all ServiceCIDRs together.
	MaxServiceCIDRs = 1000

	// Lengths of names in bytes.
	maxLabel     = 63
	maxSubdomain = 253
)

// AddressUse is the purpose of an address. It decides which addresses are valid.
type AddressUse uint8

// The uses of addresses, the strictest first.
const (
	// ForEndpoints is the use of endpoint addresses and external IPs. The API server admits no
	// loopback or link-local addresses there, because they belong to the node itself or to services
	// such as a cloud's metadata server.
	ForEndpoints AddressUse = iota
	// ForServices is the use of cluster IPs and load-balancer addresses. Link-local addresses are
	// valid and in use there.
	ForServices
	// ForNodes is the use of a Node's own addresses.
	ForNodes
)

// CheckAddress returns an error if the address is not valid for the use.
func CheckAddress(a netip.Addr, use AddressUse) error {
	switch {
	case !a.IsValid():
		return errors.New("missing address")
	case a.Zone() != "" || a.Is4In6():
		return fmt.Errorf("%s is not a plain IPv4 or IPv6 address", a)
	case a.IsUnspecified() || a.IsMulticast() || a == broadcast:
		return fmt.Errorf("%s is not a unicast address", a)
	case use <= ForServices && a.IsLoopback():
		return fmt.Errorf("%s is a loopback address", a)
	case use <= ForEndpoints && a.IsLinkLocalUnicast():
		return fmt.Errorf("%s is a link-local address", a)
	}
	return nil
}

var broadcast = netip.AddrFrom4([4]byte{255, 255, 255, 255})

// Classes of characters in names.
const (
	lower  = 1 << iota // a-z, 0-9
	upper              // A-Z
	hyphen             // -
	inner              // _ and ., which a label value may contain but neither begin nor end with
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

// isWord reports whether every character of s belongs to one of the classes in of, and the first
// and the last character are letters or digits.
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

// IsLabel reports whether s is a DNS label (RFC 1123). Namespaces, Services and ports have such
// names.
func IsLabel(s string) bool { return len(s) <= maxLabel && isWord(s, lower|hyphen) }

// IsSubdomain reports whether s is a DNS subdomain (RFC 1123). Slices and Nodes have such names.
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

// IsLabelValue reports whether s can be the value of a label, such as the name of a zone. An empty
// string can.
func IsLabelValue(s string) bool {
	return s == "" || len(s) <= maxLabel && isWord(s, lower|upper|hyphen|inner)
}

// IsQualifiedName reports whether s can be the key of a label: a name, optionally preceded by a DNS
// subdomain and a slash.
func IsQualifiedName(s string) bool {
	prefix, name, ok := strings.Cut(s, "/")
	if !ok {
		prefix, name = "", s
	}
	return (!ok || IsSubdomain(prefix)) && name != "" && IsLabelValue(name)
}

// checker keeps the first error of a check.
type checker struct{ err error }

func (c *checker) fail(format string, args ...any) {
	if c.err == nil {
		c.err = fmt.Errorf(format, args...)
	}
}

// want fails unless ok. The error quotes at most 80 characters of the value, because anybody may
// have written it.
func (c *checker) want(ok bool, field, value, what string) {
	if !ok {
		c.fail("%s: %.80q is not a valid %s", field, value, what)
	}
}

func (c *checker) key(k Key) {
	switch k.Kind {
	case KindService:
		c.want(IsLabel(k.Namespace), "namespace", k.Namespace, "namespace name")
		c.want(IsLabel(k.Name), "name", k.Name, "Service name")
	case KindSlice:
		c.want(IsLabel(k.Namespace), "namespace", k.Namespace, "namespace name")
		c.want(IsSubdomain(k.Name), "name", k.Name, "EndpointSlice name")
	case KindNode, KindServiceCIDR:
		c.want(k.Namespace == "", "namespace", k.Namespace, "namespace for an object without one")
		c.want(IsSubdomain(k.Name), "name", k.Name, k.Kind.String()+" name")
	default:
		c.fail("kind: unknown value %d", k.Kind)
	}
}

// count fails if a list has more than most entries.
func (c *checker) count(field string, n, most int) {
	if n > most {
		c.fail("%s: has %d entries, more than the maximum of %d", field, n, most)
	}
}

// ascending fails unless entry i of a list sorts after entry i-1. compared is the result of
// comparing entry i-1 with entry i; it is ignored for the first entry.
func (c *checker) ascending(field string, i, compared int) {
	if i > 0 && compared >= 0 {
		c.fail("%s: entry %d is a duplicate or out of order", field, i)
	}
}

// families counts the entries of a list in each IP family: IPv4 first, then IPv6.
type families [2]int

// add counts an address and fails if its family has more than most entries.
func (f *families) add(c *checker, field string, a netip.Addr, most int) {
	n := &f[FamilyOf(a)-IPv4]
	if *n++; *n > most {
		c.fail("%s: has more than %d entries of one IP family", field, most)
	}
}

func (c *checker) address(field string, a netip.Addr, use AddressUse) {
	if err := CheckAddress(a, use); err != nil {
		c.fail("%s: %w", field, err)
	}
}

// addresses checks an ascending list of addresses, with a limit of most entries in each IP family.
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
		c.fail("%s: %s is not a canonical IPv4 or IPv6 range", field, p)
	}
}

// prefixes checks an ascending list of ranges, with a limit of most entries in each IP family.
func (c *checker) prefixes(field string, list []netip.Prefix, most int) {
	var n families
	for i, p := range list {
		c.prefix(field, p)
		n.add(c, field, p.Addr(), most)
		c.ascending(field, i, list[max(i-1, 0)].Compare(p))
	}
}

func (c *checker) port(name string, protocol Protocol, number uint16) {
	c.want(name == "" || IsLabel(name), "ports.name", name, "port name")
	if protocol < TCP || protocol > SCTP {
		c.fail("ports.protocol: unknown value %d", protocol)
	}
	if number == 0 {
		c.fail("ports.port: 0 is not a valid port number")
	}
}

func comparePort(aName string, a Protocol, bName string, b Protocol) int {
	return cmp.Or(cmp.Compare(aName, bName), cmp.Compare(a, b))
}

// Check returns an error if the key is not valid for any object.
func (k Key) Check() error {
	var c checker
	c.key(k)
	return c.err
}

// Check returns an error if the Service is not canonical.
//
//   - It has at most one cluster IP in each family and at most MaxFrontends ports. It has at most
//     MaxFrontends external IPs, load-balancer addresses and source ranges in each family.
//   - No two ports share name and protocol, number and protocol, or NodePort and protocol. No port
//     has the number 0. Only Services of type NodePort or LoadBalancer have NodePorts.
//   - Only Services of type LoadBalancer have load-balancer addresses and source ranges. Only those
//     with the external traffic policy Local have a port for health checks.
//   - The affinity lasts at most MaxAffinitySeconds.
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
	c.want(IsLabelValue(s.IPVSScheduler), "ipvs_scheduler", s.IPVSScheduler, "scheduler name")
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
		c.fail("load_balancer_ingress: only a Service of type LoadBalancer has ingress addresses and source ranges")
	}
	if s.HealthCheckNodePort != 0 && (s.Type != LoadBalancer || s.ExternalTrafficPolicy != TrafficLocal) {
		c.fail("health_check_node_port: only a Service of type LoadBalancer with the external traffic policy Local has one")
	}
}

func (c *checker) servicePorts(s *Service) {
	c.count("ports", len(s.Ports), MaxFrontends)
	for i := range s.Ports {
		p, before := &s.Ports[i], &s.Ports[max(i-1, 0)]
		c.port(p.Name, p.Protocol, p.Port)
		c.ascending("ports", i, comparePort(before.Name, before.Protocol, p.Name, p.Protocol))
		if p.NodePort != 0 && s.Type == ClusterIP {
			c.fail("ports.node_port: a Service of type ClusterIP has no NodePorts")
		}
	}
	if len(s.Ports) > 1 && c.err == nil {
		numbers, nodePorts := make(map[number]struct{}, len(s.Ports)), make(map[number]struct{}, len(s.Ports))
		for i := range s.Ports {
			p := &s.Ports[i]
			numbers[number{p.Protocol, p.Port}] = struct{}{}
			if len(numbers) <= i {
				c.fail("ports.port: %d/%s occurs twice", p.Port, p.Protocol)
			}
			if p.NodePort == 0 {
				continue
			}
			n := len(nodePorts)
			if nodePorts[number{p.Protocol, p.NodePort}] = struct{}{}; len(nodePorts) == n {
				c.fail("ports.node_port: %d/%s occurs twice", p.NodePort, p.Protocol)
			}
		}
	}
}

// number is a port number of a protocol.
type number struct {
	protocol Protocol
	port     uint16
}

// Check returns an error if the slice is not canonical.
//
//   - It has at most MaxSlicePorts ports. No two share name and protocol, and none has the number
//     0.
//   - It has at most MaxEndpoints endpoints, all of its family.
//   - An endpoint has at most MaxHints hints of each kind. Its zone and the zones in its hints are
//     valid label values.
func (s *Slice) Check() error {
	var c checker
	c.key(s.Key())
	c.want(s.Service != "" && IsLabelValue(s.Service), "service", s.Service, "label value")
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

// endpoints checks the endpoints of a slice or delta of the family.
func (c *checker) endpoints(list []Endpoint, family Family) {
	c.count("endpoints", len(list), MaxEndpoints)
	for i := range list {
		e := &list[i]
		c.address("address", e.Address, ForEndpoints)
		if FamilyOf(e.Address) != family {
			c.fail("address: %s in a slice of %s", e.Address, family)
		}
		c.ascending("endpoints", i, list[max(i-1, 0)].Address.Compare(e.Address))
		c.want(e.NodeName == "" || IsSubdomain(e.NodeName), "node_name", e.NodeName, "Node name")
		c.want(IsLabelValue(e.Zone), "zone", e.Zone, "zone name")
		c.count("zone_hints", len(e.ZoneHints), MaxHints)
		for j, z := range e.ZoneHints {
			c.want(IsLabelValue(z), "zone_hints", z, "zone name")
			c.ascending("zone_hints", j, cmp.Compare(e.ZoneHints[max(j-1, 0)], z))
		}
		c.count("node_hints", len(e.NodeHints), MaxHints)
		for j, n := range e.NodeHints {
			c.want(IsSubdomain(n), "node_hints", n, "Node name")
			c.ascending("node_hints", j, cmp.Compare(e.NodeHints[max(j-1, 0)], n))
		}
	}
}

// Check returns an error if the delta cannot lead from one canonical slice to another. Apply checks
// what depends on the slice that the delta is applied to.
//
// Each address and each index occurs once in the delta, and all addresses are of one family.
func (d *SliceDelta) Check() error {
	var c checker
	c.key(d.Key())
	if len(d.Endpoints) > 0 {
		c.endpoints(d.Endpoints, FamilyOf(d.Endpoints[0].Address))
	}
	// Their indexes ascend below MaxEndpoints, so there are at most MaxEndpoints.
	for i, e := range d.Conditions {
		if e.Index >= MaxEndpoints {
			c.fail("conditions: index %d exceeds the maximum of %d endpoints", e.Index, MaxEndpoints)
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
				c.fail("removed: %s is also among the endpoints", a)
			}
		}
	}
	return c.err
}

// Check returns an error if the Node is not canonical. Its service CIDRs are ascending; its other
// lists are in the cluster's order.
func (n *Node) Check() error {
	var c checker
	c.key(n.Key())
	for k, v := range n.Labels {
		c.want(IsQualifiedName(k), "labels", k, "label key")
		c.want(IsLabelValue(v), "labels", v, "label value")
	}
	c.count("addresses", len(n.Addresses), MaxNodeAddresses)
	c.count("pod_cidrs", len(n.PodCIDRs), MaxCIDRs)
	if c.err != nil {
		return c.err // each entry is compared to all before it
	}
	for i, a := range n.Addresses {
		c.address("addresses", a, ForNodes)
		if slices.Contains(n.Addresses[:i], a) {
			c.fail("addresses: %s occurs twice", a)
		}
	}
	for i, p := range n.PodCIDRs {
		c.prefix("pod_cidrs", p)
		if slices.Contains(n.PodCIDRs[:i], p) {
			c.fail("pod_cidrs: %s occurs twice", p)
		}
	}
	c.prefixes("service_cidrs", n.ServiceCIDRs, MaxServiceCIDRs)
	return c.err
}
