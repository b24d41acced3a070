package view

import (
	"net/netip"
	"slices"
	"time"

	"github.com/slicecast/slicecast/internal/model"
)

// ServicePortID names one port of one Service in one IP family, which is the unit that programmers
// work on.
type ServicePortID struct {
	Service  model.ServiceKey
	Port     string // the port's name; may be empty
	Protocol model.Protocol
	Family   model.Family
}

// String returns "namespace/name:port/TCP/IPv4", for logs and for the comments of rules.
func (id ServicePortID) String() string {
	return id.Service.String() + ":" + id.Port + "/" + id.Protocol.String() + "/" + id.Family.String()
}

// ServicePort is what the node does for one Service port: its addresses and the backends that they
// lead to. It is immutable. If a change leaves a set of backends as it was, Before and After share
// that set, so that comparing the two costs nothing.
type ServicePort struct {
	ID ServicePortID
	// Frontends are the addresses that traffic comes to, in a fixed order. Each pair of address and
	// port appears once, and no other Service port has it.
	Frontends []Frontend
	// Cluster and Local are the sets of backends that routes lead to. Within a set, every backend
	// receives a new connection with the same probability. A set that no route leads to is empty.
	Cluster, Local Backends
	// Affinity is how long new connections from a client's address go to the backend of its last
	// connection, across all Frontends. It applies only while that backend is in the set that the
	// route leads to. 0 means no affinity.
	Affinity time.Duration
	// Serving contains, for UDP, every endpoint that serves, whether it receives new connections or
	// not. conntrack treats UDP flows to any other endpoint as stale. It is empty for other protocols.
	Serving Backends
	// Scheduler is the IPVS scheduler that chooses a backend for each new connection. It is one of
	// Options.Schedulers, or empty for the programmer's default.
	Scheduler string
	// HealthCheckPort is the Service's healthCheckNodePort, or 0 if it has none. The agent answers
	// there over TCP on the addresses that have NodePorts (Node.NodePorts), so a node that accepts
	// only known ports has to accept this one. Only one of a Service's ports in a family has it.
	HealthCheckPort uint16
}

// Backends returns the set of backends that a target is. It is empty for other targets.
func (p *ServicePort) Backends(t Target) Backends {
	switch t {
	case Cluster:
		return p.Cluster
	case Local:
		return p.Local
	}
	return Backends{}
}

// FrontendKind is the kind of address that a frontend has.
type FrontendKind uint8

// These are the kinds of frontends.
const (
	ClusterIP FrontendKind = iota + 1
	ExternalIP
	LoadBalancer // an ingress IP of the Service's load balancer
	NodePort     // Port is matched on the node's own addresses (Node.NodePorts); Address is not set
)

// String returns the kind's name: "clusterIP", "externalIP", "loadBalancer" or "nodePort".
func (k FrontendKind) String() string {
	return [...]string{"unknown", "clusterIP", "externalIP", "loadBalancer", "nodePort"}[k]
}

// Target is what happens to a new connection.
type Target uint8

// These are the targets.
const (
	// Reject refuses the connection at once, by ICMP port unreachable or by a TCP reset where that is
	// better.
	Reject Target = iota + 1
	// Drop drops the connection without an answer.
	Drop
	// Cluster sends the connection to a backend of ServicePort.Cluster, which is not empty.
	Cluster
	// Local sends the connection to a backend of ServicePort.Local, which is not empty.
	Local
)

// String returns the target's name: "reject", "drop", "cluster" or "local".
func (t Target) String() string {
	return [...]string{"unknown", "reject", "drop", "cluster", "local"}[t]
}

// Leads reports whether the target is a set of backends.
func (t Target) Leads() bool { return t == Cluster || t == Local }

// Route is where new connections lead, and how.
type Route struct {
	To Target
	// Masquerade makes the node's address the source of the connections. Even if it is false, a
	// connection that a backend on this node makes to itself (hairpin) is masqueraded.
	Masquerade bool
}

// Frontend is one address and port of a Service port.
type Frontend struct {
	Kind    FrontendKind
	Address netip.Addr // not set for NodePort
	Port    uint16
	// Sources are the source addresses that may use the frontend. New connections from other addresses
	// are dropped before anything else applies. Empty means that every address may use it.
	Sources []netip.Prefix
	// Pods is the route for connections from pods, as Node.Pods recognizes them. Node is the route for
	// other connections from this node, whatever their source address. Others is the route for
	// everything else. If Node.Pods recognizes no pods of the family, Pods equals Others.
	Pods, Node, Others Route
}

// Equal reports whether the frontends are the same in every field.
func (f Frontend) Equal(o Frontend) bool {
	return f.Kind == o.Kind && f.Address == o.Address && f.Port == o.Port &&
		slices.Equal(f.Sources, o.Sources) && f.Pods == o.Pods && f.Node == o.Node && f.Others == o.Others
}

// Backend is one endpoint's address and port, to which traffic goes.
type Backend struct {
	Address netip.AddrPort
	// Local reports that the backend is on this node. Only a local backend can be its own client, so
	// only a local backend needs hairpin masquerading.
	Local bool
}

// State is everything that a programmer programs.
type State struct {
	Node  Node
	Ports map[ServicePortID]*ServicePort
}

// Node is what programmers need to know about the node. It seldom changes; when it does, the whole
// state is programmed anew.
type Node struct {
	Pods PodDetector
	// NodePorts are prefixes that select the node's own addresses on which NodePorts are open. A
	// prefix of length 0 selects all addresses of its family. A family without a prefix has no
	// NodePorts.
	NodePorts []netip.Prefix
	// LocalhostNodePorts opens IPv4 NodePorts on loopback addresses, too, as far as the prefixes in
	// NodePorts include them. This needs the sysctl route_localnet, and a guard against packets from
	// outside with a loopback source address.
	LocalhostNodePorts bool
	// ServiceCIDRs are the ranges of cluster IPs, ascending, none inside another. An address of theirs
	// that no frontend has is unused, or belongs to a Service that another proxy serves. Empty means
	// that the ranges are not known.
	ServiceCIDRs []netip.Prefix
	// PodCIDRs are the Node's podCIDRs, for choosing a pod's address. What recognizes pods is Pods.
	// Nothing is programmed for them, so their change is no change of the node.
	PodCIDRs []netip.Prefix
	// Primary is the IP family of the Node's first InternalIP, or IPv4 while none is known. The zero
	// value means that the node has no primary family.
	Primary model.Family
}

// PodDetector recognizes new connections from pods, by whichever of its fields is set. It
// corresponds to kube-proxy's detect-local mode. If no field is set, or Prefixes has none of a
// family, no connection counts as from a pod.
type PodDetector struct {
	// Prefixes contain the addresses of pods.
	Prefixes []netip.Prefix
	// Interface is the name of the bridge through which traffic from pods arrives.
	Interface string
	// InterfacePrefix is the prefix of the names of the interfaces through which traffic from pods
	// arrives.
	InterfacePrefix string
}

// Of reports whether connections from pods can be recognized in this family.
func (d PodDetector) Of(family model.Family) bool {
	return d.Interface != "" || d.InterfacePrefix != "" ||
		slices.ContainsFunc(d.Prefixes, func(p netip.Prefix) bool { return model.FamilyOf(p.Addr()) == family })
}

// Change is the difference in one Service port. Before is nil if the port is new, and After is nil
// if it was removed.
type Change struct {
	Before, After *ServicePort
}

// ID returns the name of the Service port.
func (c Change) ID() ServicePortID {
	if c.After != nil {
		return c.After.ID
	}
	return c.Before.ID
}

// HealthCheckID names the health check on a Service's healthCheckNodePort in one IP family. As in
// kube-proxy, the families of a Service are counted separately: a pod with two addresses counts
// once in each.
type HealthCheckID struct {
	Service model.ServiceKey
	Family  model.Family
}

// HealthCheck is what a Service's healthCheckNodePort reports to load balancers, for Services with
// externalTrafficPolicy Local (KEP-27).
type HealthCheck struct {
	Port uint16
	// LocalEndpoints is the number of ready endpoints on this node. An address counts once, whichever
	// of the Service's ports it serves.
	LocalEndpoints int
	// Addresses are the load balancer's addresses of the family, ascending: at most maxCheckAddresses.
	// A load balancer that passes packets on as they are sends its health checks to its own address,
	// which the node then has, too (kubernetes/kubernetes#117621).
	Addresses []netip.Addr
}

// Equal reports whether the health checks are the same in every field.
func (h HealthCheck) Equal(o HealthCheck) bool {
	return h.Port == o.Port && h.LocalEndpoints == o.LocalEndpoints && slices.Equal(h.Addresses, o.Addresses)
}

// maxCheckAddresses bounds the addresses of a load balancer, of one family, at which health checks
// are answered.
const maxCheckAddresses = 16

// Problem describes what this node cannot serve of a Service as it is written.
type Problem struct {
	Service model.ServiceKey
	// Reason says what is not served, and why. It is the same text as long as the cause is the same,
	// and "" once the node serves everything again.
	Reason string
}
