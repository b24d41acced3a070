package page

import (
	"errors"
	"net/http"
	"os"
	"slices"
	"time"
)

const (
	// maxViewers bounds the event streams at a time. The port has room for twice as many connections
	// of one address, as which all who come through a port-forward count.
	maxViewers = 8
	// streamLife is after how long a viewer has to connect again, and so to authenticate again.
	streamLife = 5 * time.Minute
	// keepSample is for how long the latest sample is kept when nobody watches. A viewer who connects
	// again, such as after streamLife, finds the same ids of nodes.
	keepSample = 30 * time.Second
	// keepAlive is after how long without messages a viewer is sent a comment. Proxies close
	// connections on which nothing is sent, most of them after a minute, and the page takes a
	// connection for dead that has been silent for 15 seconds.
	keepAlive = 5 * time.Second
	// maxPart is how many bytes a viewer has to read within writeTimeout.
	maxPart      = 64 << 10
	writeTimeout = 10 * time.Second
)

// join counts a viewer, unless there are too many.
func (p *Page) join() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.watching == maxViewers {
		return false
	}
	p.watching++
	if p.forget != nil {
		p.forget.Stop()
		p.forget = nil
	}
	p.viewers.Set(float64(p.watching))
	return true
}

func (p *Page) leave() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.watching--
	p.viewers.Set(float64(p.watching))
	if p.watching > 0 {
		return
	}
	var own *time.Timer
	own = time.AfterFunc(p.keepSample, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.forget == own { // nobody has watched since
			p.last, p.forget = nil, nil // its memory is not needed until somebody looks again
		}
	})
	p.forget = own
}

// events sends the state, and then what changes, as server-sent events.
func (p *Page) events(w http.ResponseWriter, r *http.Request) {
	if p.draining() {
		http.Error(w, "the server is about to stop: look at another one", http.StatusServiceUnavailable)
		return
	}
	if !p.join() {
		p.refuse(reasonViewers, r)
		http.Error(w, "too many people look at this server's page: close it elsewhere, or look at another server",
			http.StatusTooManyRequests)
		return
	}
	defer p.leave()
	to := http.NewResponseController(w)
	end := time.Now().Add(p.streamLife)
	// The port's deadlines are for short answers. If this one could not be moved, the stream would
	// end at the old one, and the page would connect again.
	_ = to.SetReadDeadline(end.Add(p.writeTimeout))
	w.Header().Set("Content-Type", "text/event-stream")
	ended := time.NewTimer(time.Until(end))
	defer ended.Stop()
	tick := time.NewTicker(p.interval)
	defer tick.Stop()
	var before *sample
	var sent time.Time
	for {
		s, err := p.sample()
		if err != nil {
			return // it has no errors at this time
		}
		messages := s.since(before)
		if messages == nil && time.Since(sent) >= p.keepAlive {
			messages = []byte(": keep-alive\n\n")
		}
		if messages != nil {
			sent = time.Now()
			if err := p.send(w, messages); err != nil {
				if errors.Is(err, os.ErrDeadlineExceeded) {
					p.refuse(reasonSlow, r)
				}
				return
			}
		}
		before = s
		select {
		case <-tick.C:
		case <-ended.C:
			return
		case <-r.Context().Done():
			return
		case <-p.options.Draining:
			return
		}
	}
}

// send writes messages. The viewer has writeTimeout for each part of them.
func (p *Page) send(w http.ResponseWriter, messages []byte) error {
	to := http.NewResponseController(w)
	for part := range slices.Chunk(messages, maxPart) {
		_ = to.SetWriteDeadline(time.Now().Add(p.writeTimeout)) // as for the read deadline
		if _, err := w.Write(part); err != nil {
			return err
		}
		if err := to.Flush(); err != nil {
			return err
		}
	}
	return nil
}

func (p *Page) draining() bool {
	select {
	case <-p.options.Draining:
		return true
	default:
		return false
	}
}
