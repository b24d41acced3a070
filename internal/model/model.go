// Package model holds the objects that Slicecast distributes, trimmed to what a node needs, with their content versions,
// their deltas and the shard they belong to. It is what source, store, cache and view speak; the wire API has its own
// types (internal/wire translates).
//
// All objects are immutable once their version is set: they are shared by readers in any number of goroutines.
package model

import (
	"cmp"
	"fmt"
	"net/netip"
	"strings"

	"github.com/cespare/xxhash/v2"
)

// Kind tells the kinds of objects apart.
type Kind uint8

// The kinds of objects. Services and Slices are sharded and go to every node; a Node goes to its own agent only. ServiceCIDRs
// go to nobody: sources see them, and put what they say into each Node.
const (
	KindService Kind = iota + 1
	KindSlice
	KindNode
	KindServiceCIDR
)

// String gives the Kubernetes name of the kind.
func (k Kind) String() string {
	switch k {
	case KindService:
		return "Service"
	case KindSlice:
		return "EndpointSlice"
	case KindNode:
		return "Node"
	case KindServiceCIDR:
		return "ServiceCIDR"
	}
	return fmt.Sprintf("Kind(%d)", uint8(k))
}

// Key names an object. Namespace is empty for Nodes and ServiceCIDRs.
type Key struct {
	Kind      Kind
	Namespace string
	Name      string
}

// String gives the form that logs and errors use: "Service default/web".
func (k Key) String() string {
	if k.Namespace == "" {
		return k.Kind.String() + " " + k.Name
	}
	return k.Kind.String() + " " + k.Namespace + "/" + k.Name
}

// Compare orders keys by kind, namespace and name.
func (k Key) Compare(o Key) int {
	return cmp.Or(cmp.Compare(k.Kind, o.Kind), cmp.Compare(k.Namespace, o.Namespace), cmp.Compare(k.Name, o.Name))
}

// Buckets divide each shard for comparison: in a shard of a large cluster there are few objects in each, and their digests
// have 1.6 KiB together. The wire API has the same number.
const Buckets = 64

// Bucket returns the number of the bucket that the object is in. As on the wire, Services are of kind 1 and slices of kind 2.
func (k Key) Bucket() uint32 {
	var d xxhash.Digest
	d.Reset()
	_, _ = d.Write([]byte{'0' + byte(k.Kind), '/'})
	_, _ = d.WriteString(k.Namespace)
	_, _ = d.WriteString("/")
	_, _ = d.WriteString(k.Name)
	return uint32(d.Sum64()) % Buckets
}

// ServiceKey names a Service.
type ServiceKey struct {
	Namespace string
	Name      string
}

// ParseServiceKey takes "namespace/name"; ok is false for all else.
func ParseServiceKey(s string) (key ServiceKey, ok bool) {
	key.Namespace, key.Name, _ = strings.Cut(s, "/")
	return key, key.Namespace != "" && key.Name != "" && !strings.Contains(key.Name, "/")
}

// String gives "namespace/name".
func (k ServiceKey) String() string { return k.Namespace + "/" + k.Name }

// Shard tells which of count shards (a power of two) holds the Service and its slices.
func (k ServiceKey) Shard(count uint32) uint32 {
	var d xxhash.Digest
	d.Reset()
	_, _ = d.WriteString(k.Namespace)
	_, _ = d.WriteString("/")
	_, _ = d.WriteString(k.Name)
	return uint32(d.Sum64()) & (count - 1)
}

// Keyed is any object: a *Service, a *Slice or a *Node.
type Keyed interface {
	Key() Key
}

// Version is a hash of an object's content, its key included: the same content has the same
// version everywhere, and no two contents have the same; see HashSize. The zero value means that
// there is no object.
type Version hash

// Object is a Service or a Slice: what shards hold.
type Object interface {
	Key() Key
	// ServiceKey is the Service whose shard the object is in.
	ServiceKey() ServiceKey
	// ContentVersion is the version set by the constructor.
	ContentVersion() Version
}

// Protocol of a port.
type Protocol uint8

// The protocols that Services have.
const (
	TCP Protocol = iota + 1
	UDP
	SCTP
)

// String gives the Kubernetes name.
func (p Protocol) String() string {
	switch p {
	case TCP:
		return "TCP"
	case UDP:
		return "UDP"
	case SCTP:
		return "SCTP"
	}
	return fmt.Sprintf("Protocol(%d)", uint8(p))
}

// Family is an IP family.
type Family uint8

// The IP families.
const (
	IPv4 Family = iota + 1
	IPv6
)

// String gives "IPv4" or "IPv6".
func (f Family) String() string {
	switch f {
	case IPv4:
		return "IPv4"
	case IPv6:
		return "IPv6"
	}
	return fmt.Sprintf("Family(%d)", uint8(f))
}

// FamilyOf gives the family of a valid address; a 4-in-6 mapped one counts as IPv6.
func FamilyOf(a netip.Addr) Family {
	if a.Is4() {
		return IPv4
	}
	return IPv6
}

// ServiceType as in Kubernetes, without ExternalName.
type ServiceType uint8

// The types of Services that are distributed.
const (
	ClusterIP ServiceType = iota + 1
	NodePort
	LoadBalancer
)

// TrafficPolicy is an internalTrafficPolicy or externalTrafficPolicy. The zero value means Cluster.
type TrafficPolicy uint8

// The traffic policies.
const (
	TrafficCluster TrafficPolicy = iota + 1
	TrafficLocal
)

// Service is what a node needs of a Kubernetes Service.
type Service struct {
	Namespace, Name       string
	Type                  ServiceType
	ClusterIPs            []netip.Addr // at most one of each family
	ExternalIPs           []netip.Addr
	LoadBalancerIngress   []LoadBalancerIngress
	Ports                 []ServicePort
	InternalTrafficPolicy TrafficPolicy
	ExternalTrafficPolicy TrafficPolicy
	// ClientIPAffinitySeconds is how long a client's IP sticks to its endpoint; 0: no session affinity.
	ClientIPAffinitySeconds  uint32
	LoadBalancerSourceRanges []netip.Prefix
	HealthCheckNodePort      uint16 // 0: none
	TrafficDistribution      string // as in Kubernetes; empty: none
	CreationTimeSeconds      int64  // since 1970
	// IPVSScheduler is the annotation slicecast.io/ipvs-scheduler, whatever it says; empty: none.
	IPVSScheduler string

	version Version
	exact   bool // as a Slice's
	newer   bool // as a Slice's
}

// LoadBalancerIngress is an ingress point of a Service's load balancer.
type LoadBalancerIngress struct {
	IP        netip.Addr
	ProxyMode bool // ipMode Proxy: nodes do not capture the address (KEP-1860)
}

// ServicePort is a port of a Service, without its targetPort: traffic goes to the slice port of the same name and
// protocol.
type ServicePort struct {
	Name     string
	Protocol Protocol
	Port     uint16
	NodePort uint16 // 0: none
}

// Key names the Service.
func (s *Service) Key() Key { return Key{KindService, s.Namespace, s.Name} }

// ServiceKey names the Service.
func (s *Service) ServiceKey() ServiceKey { return ServiceKey{s.Namespace, s.Name} }

// ContentVersion is the version that NewService or the wire gave.
func (s *Service) ContentVersion() Version { return s.version }

// Slice is what a node needs of a Kubernetes EndpointSlice.
type Slice struct {
	Namespace, Name string
	Service         string // name of the Service, in the same namespace
	Family          Family
	Ports           []SlicePort
	Endpoints       []Endpoint // ascending by Address, each address once
	// LastChangeTriggerTimeMS is when the change happened that led to this state, milliseconds since 1970; 0: unknown.
	// It is not part of the version: a slice that differs in nothing else is not sent.
	LastChangeTriggerTimeMS int64

	version Version
	leaves  []hash // of the endpoints, so that a delta need not hash all of them; see version.go
	exact   bool   // version is the hash of what is here
	newer   bool   // it is not, as what came has fields that this software does not know
}

// SlicePort is a port of a Slice's endpoints.
type SlicePort struct {
	Name     string
	Protocol Protocol
	Port     uint16
}

// Endpoint is one address of a Slice. Kubernetes' defaults for absent conditions are already applied.
type Endpoint struct {
	Address    netip.Addr
	Conditions Conditions
	NodeName   string // empty: local nowhere
	Zone       string // empty: unknown
	ZoneHints  []string
	NodeHints  []string
}

// Conditions of an endpoint.
type Conditions struct {
	Ready       bool
	Serving     bool
	Terminating bool
}

// Key names the Slice.
func (s *Slice) Key() Key { return Key{KindSlice, s.Namespace, s.Name} }

// ServiceKey names the Service that the Slice belongs to.
func (s *Slice) ServiceKey() ServiceKey { return ServiceKey{s.Namespace, s.Service} }

// ContentVersion is the version that NewSlice, a delta or the wire gave.
func (s *Slice) ContentVersion() Version { return s.version }

// Key names the Node.
func (n *Node) Key() Key { return Key{Kind: KindNode, Name: n.Name} }

// Node is what a node needs to know of itself and its cluster.
type Node struct {
	Name        string
	Labels      map[string]string
	InternalIPs []netip.Addr // in the order of the Node's status; of a family without any, its ExternalIPs, as in kube-proxy
	PodCIDRs    []netip.Prefix
	// Deleting: the Node object is being deleted. In an agent's cache it may be gone altogether.
	Deleting bool
	// TaintedForDeletion: the cluster autoscaler's taint ToBeDeletedByClusterAutoscaler is set.
	TaintedForDeletion bool
	// ServiceCIDRs are the ranges that the cluster's cluster IPs come from, ascending, each once; they may overlap. None: not known.
	ServiceCIDRs []netip.Prefix
}
