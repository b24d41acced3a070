package h2

import (
	"time"

	"golang.org/x/net/http2"
)

// maxStrikes is how many pings in a row may come too early; grpc-go's servers allow as many.
const maxStrikes = 2

var started = time.Now()

// now returns the time since the process started, which fits into fewer bytes than a time.Time.
func now() time.Duration { return time.Since(started) }

// pings is the state of the pings of both sides. conn.mu guards it.
type pings struct {
	timer *time.Timer
	sent  time.Duration // when the unanswered ping was sent; 0 if there is none
	idle  time.Duration // when the last stream ended, if there is none now

	last    time.Duration // when the client last pinged
	strikes int
	pardon  bool // something was sent since the last ping, so the next ping is allowed
}

func (c *conn) startPingsLocked() {
	c.pings.idle = now()
	c.pings.last = -c.server.options.MinClientPing
	c.pings.timer = time.AfterFunc(c.server.options.PingInterval, c.keepAlive)
}

// keepAlive closes the connection of a client that does not answer pings or has had no stream for
// MaxIdle, and pings a client that is silent.
func (c *conn) keepAlive() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed != nil {
		return
	}
	o, p, at, read := c.server.options, &c.pings, now(), time.Duration(c.lastRead.Load())
	if p.sent != 0 && read < p.sent {
		c.closeLocked(errDead, false)
		return
	}
	p.sent = 0
	if c.stream == nil && at-p.idle >= o.MaxIdle {
		c.drainLocked()
		return
	}
	if silent := at - read; silent < o.PingInterval {
		p.timer.Reset(o.PingInterval - silent)
		return
	}
	if c.controlLocked(func(f *http2.Framer) error { return f.WritePing(false, [8]byte{}) }) == nil {
		p.sent = at
		p.timer.Reset(o.PingTimeout)
	}
}

// pingLocked answers a client's ping, and refuses pings that come too often.
func (c *conn) pingLocked(f *http2.PingFrame, at time.Duration) error {
	p := &c.pings
	switch {
	case p.pardon:
		p.pardon, p.strikes = false, 0
	case at-p.last < c.server.options.MinClientPing:
		p.strikes++
	}
	p.last = at
	if p.strikes > maxStrikes {
		return errTooManyPings
	}
	return c.controlLocked(func(w *http2.Framer) error { return w.WritePing(true, f.Data) })
}
