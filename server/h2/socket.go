package h2

import (
	"errors"
	"fmt"
	"net"
	"sync"
	"syscall"
	"time"

	"github.com/slicecast/slicecast/internal/bounded"
)

const (
	// maxPending bounds the bytes that wait for a client that does not read. They are one write of
	// the session, and answers to the client's own frames, such as pings.
	maxPending = 64 << 10
	// lingerTime is how long a client has to read the last frames and to close its side, before the
	// connection is closed.
	lingerTime = 5 * time.Second
	// maxUndelivered bounds the bytes that TLS reads from a client before it delivers any. These
	// are the bytes of a handshake, and later those of a record or a handshake message. The bound
	// is above the largest record.
	maxUndelivered = bounded.MaxHandshake
)

// socket is the connection under TLS. At first, it behaves like the net.Conn that it wraps. After
// noWait, Write never waits: bytes that the kernel does not accept at once are kept in order. A
// goroutine that lives until they are written writes them.
//
// Invariants after noWait, under mu:
//
//  1. While flushing is set, a flush goroutine runs, and only that goroutine writes to Conn.
//     Otherwise nothing is pending.
//  2. flight and pending together have at most maxPending bytes.
//  3. Once err is set, every Write returns it.
type socket struct {
	net.Conn
	// turn is the handshake's place among those that compute. It is nil after the handshake. The
	// goroutine that uses the socket holds the place, except while it waits for the client.
	turn *turn
	// undelivered counts the bytes that TLS has read since it last delivered any. Only the reading
	// goroutine uses it.
	undelivered int

	// try writes what is accepted at once, and returns the number of bytes. It is nil before
	// noWait, while Write blocks.
	try      func(b []byte) (int, error)
	wait     *sync.WaitGroup // counts the flush goroutines
	onFlush  func()          // called without locks once nothing is pending any more
	mu       sync.Mutex      // guards the fields below
	err      error           // once a write has failed, of all writes
	pending  []byte
	flight   int // bytes that the flush goroutine is writing
	flushing bool
	last     bool // no more writes follow: the sending side closes once nothing is pending
}

// tryWriter is a connection that is no socket of the kernel, such as one in memory.
type tryWriter interface {
	// TryWrite writes what is accepted at once, and returns the number of bytes.
	TryWrite(b []byte) (int, error)
}

func (s *socket) noWait(wait *sync.WaitGroup, onFlush func()) error {
	var try func(b []byte) (int, error)
	switch conn := s.Conn.(type) {
	case tryWriter:
		try = conn.TryWrite
	case syscall.Conn:
		raw, err := conn.SyscallConn()
		if err != nil {
			return fmt.Errorf("write without waiting: %w", err)
		}
		try = tryKernel(raw)
	default:
		return fmt.Errorf("write without waiting: unsupported connection type %T", s.Conn)
	}
	if err := s.Conn.SetWriteDeadline(time.Time{}); err != nil {
		return err
	}
	s.try, s.wait, s.onFlush = try, wait, onFlush
	return nil
}

// tryKernel returns a function that writes to a socket of the kernel once. The function is for one
// caller at a time, and allocates nothing.
func tryKernel(raw syscall.RawConn) func(b []byte) (int, error) {
	var out []byte
	var written int
	var failed error
	attempt := func(fd uintptr) bool {
		for {
			written, failed = syscall.Write(int(fd), out)
			if !errors.Is(failed, syscall.EINTR) {
				return true
			}
		}
	}
	return func(b []byte) (int, error) {
		out, written, failed = b, 0, nil
		err := raw.Write(attempt)
		out = nil
		switch {
		case err != nil:
			return max(written, 0), err
		case errors.Is(failed, syscall.EAGAIN):
			return 0, nil
		}
		return max(written, 0), failed // written is -1 with an error
	}
}

// Read implements net.Conn, for TLS.
func (s *socket) Read(b []byte) (n int, err error) {
	if s.undelivered == maxUndelivered {
		return 0, errUndelivered
	}
	s.turn.leave()
	n, err = s.Conn.Read(b[:min(len(b), maxUndelivered-s.undelivered)])
	s.undelivered += n
	if err == nil {
		err = s.turn.take()
	}
	return n, err
}

// turn is a place among the handshakes that compute. A nil turn needs no place.
type turn struct {
	places *bounded.Turns
	of     *Connection
	held   bool
}

// take waits for the place. It returns an error if the connection ends before.
func (t *turn) take() error {
	if t == nil || t.held {
		return nil
	}
	if t.held = t.places.Take(t.of.source, t.of.ofNode, t.of.gone); !t.held {
		return net.ErrClosed
	}
	return nil
}

func (t *turn) leave() {
	if t != nil && t.held {
		t.places.Leave()
		t.held = false
	}
}

// move goes on in a place among others.
func (t *turn) move(to *bounded.Turns) error {
	t.leave()
	t.places = to
	return t.take()
}

// delivery reads what TLS delivers from a socket, and resets the socket's count of undelivered
// bytes.
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
	if s.try == nil {
		return s.Conn.Write(b)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return 0, s.err
	}
	n := 0
	if !s.flushing {
		if n, s.err = s.try(b); s.err != nil || n == len(b) {
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

func (s *socket) busy() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.flushing
}

// shutdown closes the sending side once all pending bytes are written. The client has lingerTime to
// read them and to close its own side.
func (s *socket) shutdown() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.last = true
	if !s.flushing {
		s.closeWrite()
	}
	_ = s.SetReadDeadline(time.Now().Add(lingerTime)) // this fails if the connection is gone
	_ = s.Conn.SetWriteDeadline(time.Now().Add(lingerTime))
}

func (s *socket) closeWrite() {
	if c, ok := s.Conn.(interface{ CloseWrite() error }); ok {
		_ = c.CloseWrite() // this fails if the connection is gone
	}
}

// SetWriteDeadline implements net.Conn. After noWait it does nothing: crypto/tls sets a deadline
// around its last record, which would cut off pending bytes, and writes do not block anyway.
func (s *socket) SetWriteDeadline(t time.Time) error {
	if s.try != nil {
		return nil
	}
	return s.Conn.SetWriteDeadline(t)
}
