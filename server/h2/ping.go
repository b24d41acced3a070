package h2

import (
	"errors"
	"time"

	"golang.org/x/net/http2"
)

// maxStrikes is how many pings in a row may come too early, as grpc-go's servers have it.
const maxStrikes = 2

var (
	// errTooManyPings makes grpc-go's client ping less often.
	errTooManyPings = violation{http2.ErrCodeEnhanceYourCalm, "too_many_pings"}
	errDead         = errors.New("the client does not answer pings")
)

var started = time.Now()

// now is a clock for what is kept in few bytes.
func now() time.Duration { return time.Since(started) }

// pings are those of both sides. conn.mu guards them.
type pings struct {
	timer *time.Timer
	sent  time.Duration // when a ping was sent that has no answer; 0: there is none
	idle  time.Duration // since when there has been no stream, if there is none

	last    time.Duration // when the client pinged
	strikes int
	pardon  bool // something was sent since, so that a ping is in order
}

func (c *conn) startPingsLocked() {
	c.pings.idle = now()
	c.pings.last = -c.server.options.MinClientPing
	c.pings.timer = time.AfterFunc(c.server.options.PingInterval, c.keepAlive)
}

// keepAlive finds clients that are gone.
func (c *conn) keepAlive() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed != nil {
		return
	}
	o, p, at, read := c.server.options, &c.pings, now(), time.Duration(c.lastRead.Load())
	if p.sent != 0 && read <= p.sent {
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

// pingLocked answers a ping.
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
