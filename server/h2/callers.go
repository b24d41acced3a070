package h2

import (
	"container/list"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Caller identifies whom a call comes from, and bounds what it may have open on all connections of
// a Mux. If calls with the same name carry different bounds, each call is checked against its own.
type Caller struct {
	// Name is unique. If it is empty, nothing is bounded.
	Name string
	// MaxConnections bounds the connections whose first call was the caller's. If they are too
	// many, a call on a further connection is refused. With Displace, the oldest of the connections
	// is closed instead.
	MaxConnections int
	Displace       bool
	// MaxCalls bounds the open calls. A call beyond it is refused. 0 means that calls are neither
	// bounded nor counted.
	MaxCalls int
}

// These are the reasons for which calls are refused.
const (
	reasonConnections = "connections"
	reasonCalls       = "calls"
)

// holdings is what a caller has open. connections.mu guards it. Callers without anything open are
// not in the map.
type holdings struct {
	connections list.List // of *Connection, oldest first
	calls       int
}

// holdLocked counts a call for its caller, and the connection if this is its first call. If the
// caller has too much open, it returns a reason and a gRPC status. If another connection has to be
// closed instead, it returns that connection.
func (c *Connection) holdLocked(by Caller) (displaced *Connection, reason string, err error) {
	if by.Name == "" {
		return nil, "", nil
	}
	a := c.all
	h := a.callers[by.Name]
	if h == nil {
		h = new(holdings)
	}
	more := c.owner == ""
	switch full := more && h.connections.Len() >= by.MaxConnections; {
	case by.MaxCalls > 0 && h.calls >= by.MaxCalls:
		return nil, reasonCalls, status.Errorf(codes.ResourceExhausted,
			"%s has %d open calls, the maximum: end some of them", by.Name, h.calls)
	case full && !by.Displace:
		return nil, reasonConnections, status.Errorf(codes.ResourceExhausted,
			"%s has %d open connections, the maximum: close some of them", by.Name, h.connections.Len())
	case full:
		displaced = h.connections.Front().Value.(*Connection)
	}
	a.callers[by.Name] = h
	if more {
		c.owner, c.owned = by.Name, h.connections.PushBack(c)
	}
	if by.MaxCalls > 0 {
		h.calls++
	}
	return displaced, "", nil
}

func (a *connections) dropCallLocked(by Caller) {
	if by.Name == "" || by.MaxCalls == 0 {
		return
	}
	a.callers[by.Name].calls--
	a.forgetLocked(by.Name)
}

func (c *Connection) disownLocked() {
	if c.owner == "" {
		return
	}
	c.all.callers[c.owner].connections.Remove(c.owned)
	c.all.forgetLocked(c.owner)
	c.owner, c.owned = "", nil
}

func (a *connections) forgetLocked(name string) {
	if h := a.callers[name]; h.calls == 0 && h.connections.Len() == 0 {
		delete(a.callers, name)
	}
}
