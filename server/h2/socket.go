package h2

import (
	"errors"
	"fmt"
	"net"
	"sync"
	"syscall"
	"time"
)

const (
	// maxPending bounds what waits for a client that does not read: one write of the session and what the client itself
	// asks for meanwhile, such as answers to its pings.
	maxPending = 64 << 10
	// lingerTime is for a client to read the last frames and to close its side before the connection is cut.
	lingerTime = 5 * time.Second
	// maxUndelivered bounds the bytes that TLS reads from a client before it delivers any: those of
	// a handshake, and later those of a record or of a handshake message. It is more than the
	// largest record, and room for a chain of about fifteen certificates.
	maxUndelivered = 32 << 10
)

var (
	errNotRead     = errors.New("the client does not read the answers to its frames")
	errUndelivered = fmt.Errorf("the client has sent %d bytes of a TLS handshake, and it is not complete", maxUndelivered)
)

// socket is what lies under a TLS connection. It begins as the net.Conn that it is made of. After noWait, its Write never
// waits: what the kernel does not take at once is kept, in order, and written by a goroutine that lives until all of it is.
type socket struct {
	net.Conn
	// slots, if not nil, holds one token for each goroutine that may compute a handshake. The goroutine that uses the
	// socket has one, except while it waits for the client.
	slots chan struct{}
	// undelivered counts the bytes that TLS has read since it last delivered any. Only the
	// goroutine that reads uses it.
	undelivered int

	raw      syscall.RawConn // nil: Write waits
	attempt  func(fd uintptr) bool
	wait     *sync.WaitGroup // of goroutines
	onFlush  func()          // called without locks when nothing is pending any more
	mu       sync.Mutex      // guards what follows
	out      []byte          // what attempt writes
	written  int             // by attempt
	err      error           // of attempt, then of all writes
	pending  []byte
	flight   int // size of what the goroutine writes
	flushing bool
	last     bool // nothing is written any more: close this side after what is pending
}

// noWait makes Write one that never waits.
func (s *socket) noWait(wait *sync.WaitGroup, onFlush func()) error {
	conn, ok := s.Conn.(syscall.Conn)
	if !ok {
		return fmt.Errorf("a connection of type %T can't be written without waiting", s.Conn)
	}
	raw, err := conn.SyscallConn()
	if err != nil {
		return fmt.Errorf("write without waiting: %w", err)
	}
	if err := s.Conn.SetWriteDeadline(time.Time{}); err != nil {
		return err
	}
	s.raw, s.wait, s.onFlush = raw, wait, onFlush
	s.attempt = func(fd uintptr) bool {
		for {
			s.written, s.err = syscall.Write(int(fd), s.out)
			if !errors.Is(s.err, syscall.EINTR) {
				return true
			}
		}
	}
	return nil
}

// Read implements net.Conn, for TLS.
func (s *socket) Read(b []byte) (n int, err error) {
	if s.undelivered == maxUndelivered {
		return 0, errUndelivered
	}
	if s.slots != nil {
		<-s.slots
		defer func() { s.slots <- struct{}{} }()
	}
	n, err = s.Conn.Read(b[:min(len(b), maxUndelivered-s.undelivered)])
	s.undelivered += n
	return n, err
}

// delivery reads what TLS delivers of what it has read from a socket.
type delivery struct {
	secure net.Conn
	under  *socket
}

// Read implements io.Reader.
func (d delivery) Read(b []byte) (int, error) {
	n, err := d.secure.Read(b)
	if n > 0 {
		d.under.undelivered = 0
	}
	return n, err
}

// Write implements net.Conn.
func (s *socket) Write(b []byte) (int, error) {
	if s.raw == nil {
		return s.Conn.Write(b)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return 0, s.err
	}
	n := 0
	if !s.flushing {
		if n = s.tryLocked(b); s.err != nil || n == len(b) {
			return n, s.err
		}
		s.flushing = true
		s.wait.Go(s.flush)
	}
	if s.flight+len(s.pending)+len(b)-n > maxPending {
		s.err = errNotRead
		return n, s.err
	}
	s.pending = append(s.pending, b[n:]...)
	return len(b), nil
}

// tryLocked writes what the kernel takes.
func (s *socket) tryLocked(b []byte) int {
	s.out, s.written = b, 0
	err := s.raw.Write(s.attempt)
	s.out = nil
	switch {
	case err != nil:
		s.err = err
	case errors.Is(s.err, syscall.EAGAIN):
		s.err, s.written = nil, 0
	}
	return max(s.written, 0) // -1 with an error
}

// flush writes what is pending.
func (s *socket) flush() {
	s.mu.Lock()
	for len(s.pending) > 0 && s.err == nil {
		b := s.pending
		s.pending, s.flight = nil, len(b)
		s.mu.Unlock()
		_, err := s.Conn.Write(b)
		s.mu.Lock()
		if err != nil {
			s.err = err
		}
	}
	s.flushing, s.pending, s.flight = false, nil, 0
	if s.last {
		s.closeWrite()
	}
	s.mu.Unlock()
	s.onFlush()
}

// busy tells whether something is pending.
func (s *socket) busy() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.flushing
}

// shutdown closes this side once all is written. The client has lingerTime for the rest.
func (s *socket) shutdown() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.last = true
	if !s.flushing {
		s.closeWrite()
	}
	_ = s.SetReadDeadline(time.Now().Add(lingerTime)) // fails when the connection is gone already
	_ = s.Conn.SetWriteDeadline(time.Now().Add(lingerTime))
}

func (s *socket) closeWrite() {
	if c, ok := s.Conn.(interface{ CloseWrite() error }); ok {
		_ = c.CloseWrite() // fails when the connection is gone already
	}
}

// SetWriteDeadline implements net.Conn. crypto/tls sets a deadline around its last record, which is no matter where writes
// do not wait, and would cut off what is pending.
func (s *socket) SetWriteDeadline(t time.Time) error {
	if s.raw != nil {
		return nil
	}
	return s.Conn.SetWriteDeadline(t)
}
