package view

import (
	"net/netip"

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

// ServicePort is what the node does for one Service port: where it listens and where that leads. It is immutable.
type ServicePort struct {
	ID ServicePortID
	// Frontends are the addresses that traffic comes to, in a fixed order, each (address, port) once.
	Frontends []Frontend
	// Backends are where new connections go, each with the same probability; ascending by address, each once.
	// None: new connections are rejected (ICMP port unreachable, TCP reset where the programmer can).
	Backends []Backend
}

// FrontendKind tells what kind of address a frontend is.
type FrontendKind uint8

// The kinds of frontends.
const (
	ClusterIP FrontendKind = iota + 1 // Address and Port are matched
	NodePort                          // Port is matched on the node's own addresses; Address is not set
)

// String gives the name for rule comments: "clusterIP", "nodePort".
func (k FrontendKind) String() string {
	switch k {
	case ClusterIP:
		return "clusterIP"
	case NodePort:
		return "nodePort"
	}
	return "unknown"
}

// Masquerade tells which connections through a frontend get the node's address as their source. Whatever it says, a
// connection that is sent back to the address it came from (hairpin) is masqueraded.
type Masquerade uint8

// The choices of masquerading.
const (
	// MasqueradeNever keeps the source.
	MasqueradeNever Masquerade = iota
	// MasqueradeNonLocal masquerades what does not come from a pod, as State.LocalPods tells pods.
	MasqueradeNonLocal
	// MasqueradeAlways masquerades everything.
	MasqueradeAlways
)

// Frontend is one address and port of a Service port.
type Frontend struct {
	Kind       FrontendKind
	Address    netip.Addr // not set for NodePort
	Port       uint16
	Masquerade Masquerade
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
	// LocalPods are the source addresses that count as pods for MasqueradeNonLocal. A family without any has no
	// detection, and MasqueradeNonLocal masquerades nothing in it, as in kube-proxy.
	LocalPods []netip.Prefix
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
