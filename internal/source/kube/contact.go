package kube

import (
	"fmt"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
)

// silence is for how long a watch may bring nothing. API servers end each watch after 5 to 10
// minutes, and opening the next one counts as an answer. Bookmarks come more often, but need not.
const silence = 12 * time.Minute

const (
	// stillTime is for how long a watch may bring no newer resourceVersion. API servers send
	// bookmarks about once a minute, and the resourceVersion of a cluster never rests.
	stillTime = 4 * time.Minute
	// openTime is for how long a new watch may do so, however long ago the last one has.
	openTime = 2 * time.Minute
	// streamPause is for how long a streamed list may bring nothing before it is complete, and
	// streamTime is how long all of it may take.
	streamPause, streamTime = 10 * time.Second, 2 * time.Minute
	// outage is the shortest time in which all API servers can be stopped, etcd restored from a
	// backup, and an API server started.
	outage = 5 * time.Second
	// checkPause is the pause after such a time until a list confirms what is held. It is up to twice
	// as long, so that the many clients of an API server do not all list at once.
	checkPause = 30 * time.Second
)

// contact records when the API server was last heard of, and since when it has not answered.
type contact struct {
	mu sync.Mutex // guards the fields below
	// heard is when something last came from the API server; zero before the first answer.
	heard time.Time
	// failing is when the first of consecutive failures happened; zero if there is none. why is the
	// latest failure.
	failing time.Time
	why     string
	// refused is when the API server first said what is not believed, since the last complete list;
	// zero if it has not. An answer to a request does not undo it.
	refused time.Time
	// asked is when a list or watch was requested that is not answered yet; zero if there is none.
	// While a list is streamed, it is when the latest object came.
	asked time.Time
	// streaming is when a streamed list began that is not complete; zero if there is none.
	streaming time.Time
	// advanced is when a newer resourceVersion last came, in an event, a bookmark or a list.
	advanced time.Time
	// still is since when watches have brought nothing of what a list has shown; zero if they have.
	still time.Time
	// check is when a list is due because a watch was resumed after an outage; zero if none is.
	check time.Time
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

// hear records that a watch has brought a newer resourceVersion.
func (c *contact) hear(at time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.heard, c.advanced, c.still = at, at, time.Time{}
}

// stream records that a streamed list begins.
func (c *contact) stream(at time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.asked, c.streaming = at, at
}

// streamed records that a streamed list has brought an object.
func (c *contact) streamed(at time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.streaming.IsZero() {
		c.asked = at
	}
}

// isStreaming reports whether a list is streamed, or was until it was given up.
func (c *contact) isStreaming() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return !c.streaming.IsZero()
}

// complete records that a list is complete. missed means that it has what a watch should have
// brought long before. complete reports whether that is news.
func (c *contact) complete(at time.Time, missed bool) (news bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	news = missed && c.still.IsZero()
	if news {
		c.still = c.advanced
	} else if !missed {
		c.still = time.Time{}
	}
	c.heard, c.advanced, c.failing, c.why = at, at, time.Time{}, ""
	c.refused, c.asked, c.streaming, c.check = time.Time{}, time.Time{}, time.Time{}, time.Time{}
	return news
}

// resume records that a watch is resumed, before its success is recorded. same means that it uses
// the connection of the watch or list before it. If etcd may have been restored meanwhile, a list
// has to follow: the resourceVersions of a restored etcd soon reach those from before, so the API
// server accepts the watch, but the objects from before need not exist.
func (c *contact) resume(at time.Time, same bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.check.IsZero() && (!same || !c.failing.IsZero()) && at.Sub(c.heard) >= outage {
		c.check = at.Add(wait.Jitter(checkPause, 1))
	}
}

// isCheckDue reports whether a list is due because a watch was resumed after an outage.
func (c *contact) isCheckDue(now time.Time) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return !c.check.IsZero() && !now.Before(c.check)
}

// left returns for how long a watch that was opened at a time may go on without news. If it is not
// positive, the watch makes no progress, or a list is due.
func (c *contact) left(opened, now time.Time) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.streaming.IsZero() {
		return min(c.asked.Add(streamPause).Sub(now), c.streaming.Add(streamTime).Sub(now))
	}
	left := max(c.advanced.Add(stillTime).Sub(now), opened.Add(openTime).Sub(now))
	if !c.check.IsZero() {
		left = min(left, c.check.Sub(now))
	}
	return left
}

// succeed records that a request was answered.
func (c *contact) succeed(at time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.heard, c.failing = at, c.refused
}

// fail records that a request failed.
func (c *contact) fail(at time.Time, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.failing.IsZero() {
		c.failing = at
	}
	c.why = err.Error()
}

// refuse records that what the API server says is not believed, until a list is complete.
func (c *contact) refuse(at time.Time, err error) {
	c.fail(at, err)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.refused.IsZero() {
		c.refused = at
	}
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
	case !c.still.IsZero():
		return c.still, "the API server's watch stands still, and what has changed since is only known from lists"
	case now.Sub(c.heard) > silence:
		return c.heard, fmt.Sprintf("neither an event nor an answer has come from the API server for %v", silence)
	}
	return time.Time{}, ""
}
