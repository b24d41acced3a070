package view

import (
	"net/netip"
	"slices"
	"time"

	"github.com/slicecast/slicecast/internal/model"
)

// ServicePortID names one port of one Service in one IP family: the unit that programmers work on.
type ServicePortID struct {
	Service  model.ServiceKey
	Port     string // the port's name; may be empty
	Protocol model.Protocol
	Family   model.Family
}

// String gives "namespace/name:port/TCP/IPv4", for logs and rule comments.
func (id ServicePortID) String() string {
	return id.Service.String() + ":" + id.Port + "/" + id.Protocol.String() + "/" + id.Family.String()
}

// ServicePort is what the node does for one Service port: where it listens and where that leads. It is immutable. A set that
// a change leaves as it was is the same one Before and After, so that comparing both costs nothing.
type ServicePort struct {
	ID ServicePortID
	// Frontends are the addresses that traffic comes to, in a fixed order, each (address, port) once. No other Service
	// port has one of them.
	Frontends []Frontend
	// Cluster and Local are the sets of backends that Routes lead to; within each, every backend gets a new connection with
	// the same probability. A set that no Route leads to is empty.
	Cluster, Local Backends
	// Affinity is how long new connections of a client's address go to the backend that its last one went to, over all
	// Frontends, as long as the set that its Route leads to holds that backend; 0: no affinity.
	Affinity time.Duration
	// Serving are, for UDP, all endpoints that serve, whether they get new connections or not: flows that lead elsewhere
	// are stale (conntrack).
	Serving Backends
	// Scheduler chooses a backend for each new connection in IPVS, in the place of the programmer's own; one of Options.Schedulers,
	// or empty: the programmer's own.
	Scheduler string
	// HealthCheckPort is the Service's healthCheckNodePort, 0: none. The agent answers there over TCP on the addresses of NodePorts
	// (Node.NodePorts), so a node that lets in only what is named has to let it in. Of a Service's ports in a family one has it.
	HealthCheckPort uint16
}

// FrontendKind tells what kind of address a frontend is.
type FrontendKind uint8

// The kinds of frontends.
const (
	ClusterIP FrontendKind = iota + 1
	ExternalIP
	LoadBalancer // an ingress IP of the Service's load balancer
	NodePort     // Port is matched on the node's own addresses, see Node.NodePorts; Address is not set
)

// String gives the name for rule comments: "clusterIP", "externalIP", "loadBalancer", "nodePort".
func (k FrontendKind) String() string {
	switch k {
	case ClusterIP:
		return "clusterIP"
	case ExternalIP:
		return "externalIP"
	case LoadBalancer:
		return "loadBalancer"
	case NodePort:
		return "nodePort"
	}
	return "unknown"
}

// Target tells what becomes of a new connection.
type Target uint8

// The targets.
const (
	Reject  Target = iota + 1 // refused at once: ICMP port unreachable, or a TCP reset where that does better
	Drop                      // not answered
	Cluster                   // to one of ServicePort.Cluster, which is not empty then
	Local                     // to one of ServicePort.Local, which is not empty then
)

// String gives the name: "reject", "drop", "cluster", "local".
func (t Target) String() string {
	switch t {
	case Reject:
		return "reject"
	case Drop:
		return "drop"
	case Cluster:
		return "cluster"
	case Local:
		return "local"
	}
	return "unknown"
}

// Route is where new connections lead, and how.
type Route struct {
	To Target
	// Masquerade gives them the node's address as their source. Whatever it says, a connection that a backend on this node
	// makes to itself (hairpin) is masqueraded.
	Masquerade bool
}

// Frontend is one address and port of a Service port.
type Frontend struct {
	Kind    FrontendKind
	Address netip.Addr // not set for NodePort
	Port    uint16
	// Sources are the addresses that may use it; new connections of others are dropped before all else. Empty: all may.
	Sources []netip.Prefix
	// Pods is for what comes from pods, as Node.Pods tells them; Node for what else comes from this node itself, from
	// whichever of its addresses; Others for the rest. Where Node.Pods tells no pods, Pods is as Others.
	Pods, Node, Others Route
}

// Equal tells whether both are the same in everything.
func (f Frontend) Equal(o Frontend) bool {
	return f.Kind == o.Kind && f.Address == o.Address && f.Port == o.Port && slices.Equal(f.Sources, o.Sources) &&
		f.Pods == o.Pods && f.Node == o.Node && f.Others == o.Others
}

// Backend is one endpoint that traffic goes to.
type Backend struct {
	Address netip.AddrPort
	// Local: on this node. Only local backends can be their own clients, so only they need hairpin masquerading.
	Local bool
}

// State is everything a programmer programs.
type State struct {
	Node  Node
	Ports map[ServicePortID]*ServicePort
}

// Node is what programmers need to know of the node; it changes seldom, and then the whole state is programmed anew.
type Node struct {
	Pods PodDetector
	// NodePorts tells on which of the node's own addresses NodePorts are: those in one of the prefixes of their family. A
	// zero-length prefix means all. Without any of a family there are none in it.
	NodePorts []netip.Prefix
	// LocalhostNodePorts has IPv4 NodePorts on loopback addresses too, where NodePorts (the prefixes) holds them. It needs
	// the sysctl route_localnet, and a guard against packets from outside that claim to be from loopback.
	LocalhostNodePorts bool
	// ServiceCIDRs are the ranges that cluster IPs come from, ascending, none within another. Their addresses that no frontend has are
	// unused, or of Services that another proxy serves. Empty: not known.
	ServiceCIDRs []netip.Prefix
	// Primary is the IP family of the Node's first InternalIP, or IPv4 as long as none is known. Zero means
	// that there is none.
	Primary model.Family
}

// PodDetector tells new connections of pods from others, by one of its fields: kube-proxy's detect-local. With none set
// (or no prefix of a family) nothing counts as from pods.
type PodDetector struct {
	// Prefixes are the addresses that pods have.
	Prefixes []netip.Prefix
	// Interface is the bridge that pods' traffic comes in by.
	Interface string
	// InterfacePrefix is what the names of the interfaces begin with that pods' traffic comes in by.
	InterfacePrefix string
}

// Of tells whether any pod can be told in this family.
func (d PodDetector) Of(family model.Family) bool {
	return d.Interface != "" || d.InterfacePrefix != "" ||
		slices.ContainsFunc(d.Prefixes, func(p netip.Prefix) bool { return model.FamilyOf(p.Addr()) == family })
}

// Change is the difference in one Service port. Before is nil for a new one, After for one that is gone.
type Change struct {
	Before, After *ServicePort
}

// ID names the Service port.
func (c Change) ID() ServicePortID {
	if c.After != nil {
		return c.After.ID
	}
	return c.Before.ID
}

// HealthCheckID names what answers on a Service's healthCheckNodePort in one IP family. The families of a Service are
// counted by themselves, as in kube-proxy: a pod with two addresses has the weight of one.
type HealthCheckID struct {
	Service model.ServiceKey
	Family  model.Family
}

// HealthCheck is what a Service's healthCheckNodePort tells load balancers (KEP-27, externalTrafficPolicy Local).
type HealthCheck struct {
	Port uint16
	// LocalEndpoints counts the ready endpoints on this node, by address, whichever of the Service's ports they serve.
	LocalEndpoints int
}

// Problem is what of a Service this node cannot serve as it is written.
type Problem struct {
	Service model.ServiceKey
	// Reason says what, and why; it is the same as long as nothing about that changes.
	Reason string
}
