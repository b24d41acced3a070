package discovery

import (
	"math/rand/v2"
	"time"
)

// Preferred returns the server that the node prefers to current. ok is false if it prefers none. If
// no stream has named servers, the given ones count.
func (c *Choice) Preferred(current Server) (preferred Server, ok bool) {
	servers := c.options.Cache.Servers()
	if len(servers) == 0 {
		servers = c.given
	}
	servers = preference(servers, c.options.NodeName)
	if len(servers) == 0 || servers[0].Address == current.Address {
		return Server{}, false
	}
	return servers[0], true
}

// MoveDelay returns when a stream should be left for the preferred server. If the stream has named
// other servers than those known before, the client moves within MoveWindow. If it is on another
// server for any other reason, or has moved recently, it waits for ReturnDelay, so that no node
// moves back and forth. failed is when the stream's last attempt to move failed; zero if none has.
func (c *Choice) MoveDelay(to Server, serversChanged bool, failed time.Time) time.Duration {
	times := &c.options.Times
	d := rand.N(times.MoveWindow)
	if !serversChanged || time.Since(c.moved) < times.ReturnAfter || time.Since(failed) < times.ReturnAfter {
		d = c.ReturnDelay()
	}
	return d + c.rests(to.Address)
}

// ReturnDelay returns a random time between ReturnAfter and twice ReturnAfter. Any goroutine may
// call it.
func (c *Choice) ReturnDelay() time.Duration {
	return c.options.Times.ReturnAfter + rand.N(c.options.Times.ReturnAfter)
}
