package h2

import (
	"container/list"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Caller is who a call comes from, and what it may have at a time on all connections of a Mux. Where the bounds of calls with
// the same name differ, each goes by its own.
type Caller struct {
	// Name is unique; "" means that nothing is bounded.
	Name string
	// MaxConnections bounds the connections whose first call was the caller's. A call on one more is refused, unless Displace is
	// set: then the oldest of these connections ends.
	MaxConnections int
	Displace       bool
	// MaxCalls bounds the calls; 0 means that they are not bounded, and do not count. A call more is refused.
	MaxCalls int
}

// Reasons for which calls are refused.
const (
	reasonConnections = "connections"
	reasonCalls       = "calls"
)

// holdings are what a caller has. connections.mu guards them. Without any, they are in no map.
type holdings struct {
	connections list.List // of *Connection, oldest first
	calls       int
}

// holdLocked counts a call for the caller, and its connection if it is its first. It returns the connection that makes room
// for it, if one must, and a gRPC status if the caller has too much.
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
		return nil, reasonCalls, status.Errorf(codes.ResourceExhausted, "%d calls of %s are open, as many as it may have: end some",
			h.calls, by.Name)
	case full && !by.Displace:
		return nil, reasonConnections, status.Errorf(codes.ResourceExhausted,
			"%d connections of %s are open, as many as it may have: close some", h.connections.Len(), by.Name)
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

// dropCallLocked is the end of a call that holdLocked has counted.
func (a *connections) dropCallLocked(by Caller) {
	if by.Name == "" || by.MaxCalls == 0 {
		return
	}
	a.callers[by.Name].calls--
	a.forgetLocked(by.Name)
}

// disownLocked takes the connection from its owner, if it has one.
func (c *Connection) disownLocked() {
	if c.owner == "" {
		return
	}
	c.all.callers[c.owner].connections.Remove(c.owned)
	c.all.forgetLocked(c.owner)
	c.owner, c.owned = "", nil
}

// forgetLocked forgets a caller that has nothing.
func (a *connections) forgetLocked(name string) {
	if h := a.callers[name]; h.calls == 0 && h.connections.Len() == 0 {
		delete(a.callers, name)
	}
}
