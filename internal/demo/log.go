package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"sync/atomic"
)

// agentLog reads an agent's log. It always prints warnings and errors, and prints the deltas that
// the agent receives while printing is on.
type agentLog struct {
	printing atomic.Bool

	mu      sync.Mutex    // guards the fields below
	seen    []line        // lines that wait has not looked at yet, at most about maxSeen
	changed chan struct{} // closed and replaced with each line
}

// maxSeen bounds the number of lines kept for wait. It exceeds the number of lines of any one step.
const maxSeen = 1000

// line is the part of a log line that the demo uses.
type line struct {
	Level     string `json:"level"`
	Message   string `json:"msg"`
	Err       string `json:"err"`
	Slice     string `json:"slice"`
	Changed   int    `json:"endpoints_changed"`
	Removed   int    `json:"endpoints_removed"`
	Bytes     int    `json:"bytes"`
	Endpoints int    `json:"endpoints"`
	Whole     int    `json:"slice_bytes"`
}

func followLog(r io.Reader) *agentLog {
	l := &agentLog{changed: make(chan struct{})}
	go func() {
		for s := bufio.NewScanner(r); s.Scan(); {
			l.take(s.Bytes())
		}
	}()
	return l
}

// take records a line of the log and prints it if necessary.
func (l *agentLog) take(b []byte) {
	var m line
	if err := json.Unmarshal(b, &m); err != nil {
		fmt.Fprintf(os.Stderr, "agent: %s\n", b)
		return
	}
	switch {
	case m.Level == "WARN" || m.Level == "ERROR":
		fmt.Fprintf(os.Stderr, "agent: %s %s\n", m.Message, m.Err)
	case m.Message == "Received delta" && l.printing.Load():
		say("received %d bytes: %d changed, %d removed of %d endpoints in %s (whole slice: %d bytes)",
			m.Bytes, m.Changed, m.Removed, m.Endpoints, m.Slice, m.Whole)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.seen = append(l.seen[max(0, len(l.seen)-maxSeen):], m)
	close(l.changed)
	l.changed = make(chan struct{})
}

// wait waits for a line with this message about a slice whose name contains slice.
func (l *agentLog) wait(ctx context.Context, message, slice string) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		l.mu.Lock()
		seen, changed := l.seen, l.changed
		l.seen = nil
		l.mu.Unlock()
		for _, m := range seen {
			if m.Message == message && strings.Contains(m.Slice, slice) {
				return nil
			}
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: no line %q in the agent's log", ctx.Err(), message)
		case <-changed:
		}
	}
}
