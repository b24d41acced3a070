package kube

import (
	"fmt"
	"sync"
	"time"
)

// silence is for how long a watch may bring nothing. API servers end each watch after 5 to 10
// minutes, and opening the next one counts as an answer. Bookmarks come more often, but need not.
const silence = 12 * time.Minute

// contact records when the API server was last heard of, and since when it has not answered.
type contact struct {
	mu sync.Mutex // guards the fields below
	// heard is when something last came from the API server; zero before the first answer.
	heard time.Time
	// failing is when the first of consecutive failures happened; zero if there is none. why is the
	// latest failure.
	failing time.Time
	why     string
	// asked is when a list or watch was requested that is not answered yet; zero if there is none.
	asked time.Time
}

// ask records that a list or watch is requested, and returns what to call when the request has
// ended.
func (c *contact) ask(at time.Time) (ended func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.asked = at
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.asked = time.Time{}
	}
}

// hear records that something came from the API server.
func (c *contact) hear(at time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.heard = at
}

// succeed records that a request was answered.
func (c *contact) succeed(at time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.heard, c.failing, c.why = at, time.Time{}, ""
}

// fail records that a request failed, or that its answer was refused.
func (c *contact) fail(at time.Time, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.failing.IsZero() {
		c.failing = at
	}
	c.why = err.Error()
}

// last returns when something last came from the API server, or zero.
func (c *contact) last() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.heard
}

// stale returns since when changes may have been missed, as of now, and why. It returns zero if
// none were. Before the first answer nothing can be missed, because the server does not serve yet.
func (c *contact) stale(now time.Time) (since time.Time, why string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.heard.IsZero():
		return time.Time{}, ""
	case !c.failing.IsZero():
		return c.failing, c.why
	case !c.asked.IsZero() && now.Sub(c.asked) > askOnce:
		return c.asked, fmt.Sprintf("the API server has not answered a request for %v", askOnce)
	case now.Sub(c.heard) > silence:
		return c.heard, fmt.Sprintf("neither an event nor an answer has come from the API server for %v", silence)
	}
	return time.Time{}, ""
}
