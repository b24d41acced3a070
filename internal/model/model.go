// Package model defines the objects that Slicecast distributes, trimmed to what a node needs, with
// their versions, their deltas and the shard they belong to. Sources, the store, the agent's cache
// and its view all use these types. The wire API has its own types; internal/wire translates
// between the two.
//
// An object is immutable once its version is set, because any number of goroutines read it.
package model

import (
	"cmp"
	"fmt"
	"net/netip"
	"strings"

	"github.com/cespare/xxhash/v2"
)

// Kind is a kind of object.
type Kind uint8

// The kinds of objects. Services and Slices are sharded and go to every node. A Node goes only to
// the agent on that node. ServiceCIDRs are not distributed: sources read them and copy their ranges
// into each Node.
const (
	KindService Kind = iota + 1
	KindSlice
	KindNode
	KindServiceCIDR
)

// String returns the Kubernetes name of the kind.
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

// String returns the form used in logs and errors, such as "Service default/web".
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

// Buckets is the number of buckets of a shard. Comparing digests of buckets finds the differing
// objects of a shard: even in a large cluster a bucket holds few objects, and the digests of all
// buckets of a shard take 1.6 KiB. The wire API fixes the same number.
const Buckets = 64

// Bucket returns the number of the object's bucket. The hash uses the kind numbers of the wire API,
// where a Service is 1 and a slice is 2.
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

// ParseServiceKey parses "namespace/name". ok is false if s has any other form.
func ParseServiceKey(s string) (key ServiceKey, ok bool) {
	key.Namespace, key.Name, _ = strings.Cut(s, "/")
	return key, key.Namespace != "" && key.Name != "" && !strings.Contains(key.Name, "/")
}

// String returns "namespace/name".
func (k ServiceKey) String() string { return k.Namespace + "/" + k.Name }

// ClusterService is the Service of a cluster's API server, which the API server itself creates. Its
// creation time identifies the cluster: it survives a restore of etcd, differs between clusters,
// and no tenant can change it. Whoever has the state of a cluster knows it.
var ClusterService = ServiceKey{Namespace: "default", Name: "kubernetes"}

// Shard returns the number of the shard that holds the Service and its slices. count is the number
// of shards and must be a power of two.
func (k ServiceKey) Shard(count uint32) uint32 {
	var d xxhash.Digest
	d.Reset()
	_, _ = d.WriteString(k.Namespace)
	_, _ = d.WriteString("/")
	_, _ = d.WriteString(k.Name)
	return uint32(d.Sum64()) & (count - 1)
}

// Keyed is any object that a source reads, sharded or not.
type Keyed interface {
	// Key returns the kind and the name of the object.
	Key() Key
}

// Version is a hash of an object's content, including its key. The same content has the same
// version everywhere, and different contents have different versions (see HashSize). The zero value
// means that there is no object.
//
// An object in memory has no other version than the hash of its own content. What a server claims
// the version to be is at most an Update's Unverified.
type Version hash

// Object is an object that shards hold: a *Service or a *Slice.
type Object interface {
	Keyed
	// ServiceKey returns the key of the Service whose shard the object is in.
	ServiceKey() ServiceKey
	// ContentVersion returns the hash of the content.
	ContentVersion() Version
}

// Protocol is the protocol of a port.
type Protocol uint8

// The protocols of Service ports.
const (
	TCP Protocol = iota + 1
	UDP
	SCTP
)

// String returns the Kubernetes name of the protocol.
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

// String returns "IPv4" or "IPv6".
func (f Family) String() string {
	switch f {
	case IPv4:
		return "IPv4"
	case IPv6:
		return "IPv6"
	}
	return fmt.Sprintf("Family(%d)", uint8(f))
}

// FamilyOf returns the family of a valid address. It counts an IPv4-mapped IPv6 address as IPv6.
func FamilyOf(a netip.Addr) Family {
	if a.Is4() {
		return IPv4
	}
	return IPv6
}

// ServiceType is the type of a Service, as in Kubernetes. ExternalName has no value here, because
// such Services are not distributed.
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
	ClusterIPs            []netip.Addr // has at most one address of each family
	ExternalIPs           []netip.Addr
	LoadBalancerIngress   []LoadBalancerIngress
	Ports                 []ServicePort
	InternalTrafficPolicy TrafficPolicy
	ExternalTrafficPolicy TrafficPolicy
	// ClientIPAffinitySeconds is how long, in seconds, connections from a client's address go to
	// the same endpoint; 0 means no session affinity.
	ClientIPAffinitySeconds  uint32
	LoadBalancerSourceRanges []netip.Prefix
	HealthCheckNodePort      uint16 // 0 means that the Service has none
	TrafficDistribution      string // as in Kubernetes; empty means that none is set
	CreationTimeSeconds      int64  // seconds since 1970
	// IPVSScheduler is the value of the annotation slicecast.io/ipvs-scheduler, which may name a
	// scheduler that does not exist; empty means that none is set.
	IPVSScheduler string

	version Version
}

// LoadBalancerIngress is an ingress point of a Service's load balancer.
type LoadBalancerIngress struct {
	IP        netip.Addr
	ProxyMode bool // the ipMode is Proxy, so nodes do not capture the address (KEP-1860)
}

// ServicePort is a port of a Service. It has no targetPort, because traffic goes to the slice port
// with the same name and protocol.
type ServicePort struct {
	Name     string
	Protocol Protocol
	Port     uint16
	NodePort uint16 // 0 means that the port has none
}

// Key returns the key of the Service.
func (s *Service) Key() Key { return Key{KindService, s.Namespace, s.Name} }

// ServiceKey returns the name of the Service.
func (s *Service) ServiceKey() ServiceKey { return ServiceKey{s.Namespace, s.Name} }

// ContentVersion returns the hash of the content.
func (s *Service) ContentVersion() Version { return s.version }

// Slice is what a node needs of a Kubernetes EndpointSlice.
type Slice struct {
	Namespace, Name string
	Service         string // the name of the Service, which is in the same namespace
	Family          Family
	Ports           []SlicePort
	Endpoints       []Endpoint // ascending by Address, one for each address
	// LastChangeTriggerTimeMS is the time of the change that led to this state, in milliseconds
	// since 1970; 0 means unknown. It is not part of the version, so a slice that differs in
	// nothing else is not sent.
	LastChangeTriggerTimeMS int64

	version Version
	leaves  []hash // hashes of groups of endpoints; see hashLeaves
}

// SlicePort is a port of a Slice's endpoints.
type SlicePort struct {
	Name     string
	Protocol Protocol
	Port     uint16
}

// Endpoint is one address of a Slice. Kubernetes' defaults for absent conditions are already
// applied.
type Endpoint struct {
	Address    netip.Addr
	Conditions Conditions
	NodeName   string // empty means that the endpoint is local to no node
	Zone       string // empty means unknown
	ZoneHints  []string
	NodeHints  []string
}

// Conditions are the conditions of an endpoint.
type Conditions struct {
	Ready       bool
	Serving     bool
	Terminating bool
}

// Key returns the key of the Slice.
func (s *Slice) Key() Key { return Key{KindSlice, s.Namespace, s.Name} }

// ServiceKey returns the name of the Service that the Slice belongs to.
func (s *Slice) ServiceKey() ServiceKey { return ServiceKey{s.Namespace, s.Service} }

// ContentVersion returns the hash of the content.
func (s *Slice) ContentVersion() Version { return s.version }

// Key returns the key of the Node.
func (n *Node) Key() Key { return Key{Kind: KindNode, Name: n.Name} }

// Node is what an agent needs to know about its own node and the cluster.
type Node struct {
	Name   string
	Labels map[string]string
	// Addresses are the Node's InternalIPs and then its ExternalIPs, in the order of its status. As
	// in kube-proxy, the first one of a family is an ExternalIP only if there is no InternalIP.
	Addresses []netip.Addr
	PodCIDRs  []netip.Prefix
	// Deleting means that the Node object is being deleted. In an agent's cache it may also be gone.
	Deleting bool
	// TaintedForDeletion means that the Node has the cluster autoscaler's taint
	// ToBeDeletedByClusterAutoscaler.
	TaintedForDeletion bool
	// ServiceCIDRs are the ranges of the cluster's cluster IPs, ascending and without duplicates.
	// They may overlap. An empty list means that the ranges are unknown.
	ServiceCIDRs []netip.Prefix
}
