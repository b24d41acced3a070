package h2

import (
	"context"
	"encoding/binary"
	"sync/atomic"

	"golang.org/x/net/http2"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/slicecast/slicecast/internal/wire"
)

const (
	// messagePrefix is the size of the prefix of each message: a flag for compression, and its
	// length.
	messagePrefix = 5
	// chunk bounds the bytes of messages in one write. A buffer also has to hold the headers of two
	// frames and the block of the response's headers.
	chunk = frameSize - 64
)

// Stream is a stream of a client. Send and TrySend may be called from different goroutines, but not
// concurrently.
//
// Invariants, under conn.mu:
//
//  1. Once over is set, it stays as it is, the context is done, and no message is sent.
//  2. While partial is set, the stream can only end with a reset, because a message is incomplete.
//  3. Until the session is open, inbox has at most initialWindow bytes, because the stream's window
//     is not reopened.
type Stream struct {
	conn   *conn
	id     uint32
	ctx    context.Context
	cancel context.CancelFunc
	taken  atomic.Uint64 // bytes of messages written to the connection

	// conn.mu guards the fields below.
	over     error // the status after which nothing is sent any more; nil while the stream is open
	window   int64 // bytes that the client's window allows to send
	receive  int64 // bytes that the client may still send
	answered bool  // the response's headers are sent
	sending  bool  // Send is running
	partial  bool  // a message is only partly sent
	// halfClosed is set once the client has ended its side.
	halfClosed bool
	// left is how many bytes of DATA are missing from the request's content-length; negative if it
	// has none.
	left    int64
	session Session // nil until it is open
	// inbox holds received bytes. Before the session is open, it has all bytes so far. Afterwards
	// it has the beginning of an incomplete message, and the goroutine that reads the connection
	// changes it without conn.mu.
	inbox []byte
}

// Context returns a context that ends with the stream. It carries the client's metadata and
// peer.Peer.
func (s *Stream) Context() context.Context { return s.ctx }

// Taken returns how many bytes of messages have been written to the connection. The connection
// buffers little, so the client or the network has accepted nearly all of them. Any goroutine may
// call it.
func (s *Stream) Taken() uint64 { return s.taken.Load() }

// Send sends messages. It blocks while the client does not accept them. Without messages, it sends
// the response's headers if they are not sent yet. Its error is the status with which the stream
// has ended.
func (s *Stream) Send(frames ...wire.Frame) error {
	c := s.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	s.sending = true
	defer func() { s.sending = false }()
	m := messages{frames: frames}
	c.guard.budget.pay(bytesPerFrame * len(frames)) // for the client's acknowledgements
	for left := m.size(); left > 0 || !s.answered; {
		for s.over == nil && (c.socket.busy() || left > 0 && min(s.window, c.window) <= 0) {
			c.changed.Wait()
		}
		if s.over != nil {
			return s.over
		}
		n := int(max(0, min(int64(left), s.window, c.window, chunk)))
		left -= n
		s.partial = left > 0
		if err := s.sendLocked(&m, n); err != nil {
			return s.over
		}
	}
	return s.over
}

// TrySend sends messages of at most 16 KiB in all, if it need not wait. Otherwise it sends nothing
// and returns false.
func (s *Stream) TrySend(frames ...wire.Frame) (sent bool, err error) {
	c := s.conn
	m := messages{frames: frames}
	n := m.size()
	c.mu.Lock()
	defer c.mu.Unlock()
	if s.over != nil {
		return false, s.over
	}
	if s.sending || int64(n) > min(s.window, c.window, chunk) || c.socket.busy() {
		return false, nil
	}
	c.guard.budget.pay(bytesPerFrame * len(frames))
	if err := s.sendLocked(&m, n); err != nil {
		return false, s.over
	}
	return true, nil
}

// sendLocked sends the next n bytes, which must be within chunk and the windows. An error has ended
// the connection.
func (s *Stream) sendLocked(m *messages, n int) error {
	c := s.conn
	buffer := buffers.Get().(*buffer)
	defer buffers.Put(buffer)
	b := buffer[:0]
	if !s.answered {
		s.answered = true
		b = appendFrame(b, len(responseHeaders), http2.FrameHeaders, http2.FlagHeadersEndHeaders, s.id)
		b = append(b, responseHeaders...)
	}
	if n > 0 {
		b = appendFrame(b, n, http2.FrameData, 0, s.id)
		b = m.appendTo(b, n)
	}
	s.window -= int64(n)
	c.window -= int64(n)
	s.taken.Add(uint64(n))
	c.pings.pardon = true
	// These pay for the client's window updates. It is paid by bytes and not by frames, as a client
	// with a small window makes any number of frames.
	c.guard.budget.pay(n)
	return c.writeLocked(b)
}

// messages are frames with their prefixes. The first sent bytes of the first one are sent already.
type messages struct {
	frames []wire.Frame
	sent   int
}

func (m *messages) size() int {
	n := -m.sent
	for _, f := range m.frames {
		n += messagePrefix + len(f)
	}
	return n
}

func (m *messages) appendTo(b []byte, n int) []byte {
	for n > 0 {
		f := m.frames[0]
		var part []byte
		if m.sent < messagePrefix {
			var prefix [messagePrefix]byte
			binary.BigEndian.PutUint32(prefix[1:], uint32(len(f)))
			part = prefix[m.sent:]
		} else {
			part = f[m.sent-messagePrefix:]
		}
		part = part[:min(n, len(part))]
		b = append(b, part...)
		n -= len(part)
		if m.sent += len(part); m.sent == messagePrefix+len(f) {
			m.frames, m.sent = m.frames[1:], 0
		}
	}
	return b
}

func (s *Stream) run() {
	session, err := s.conn.server.options.Open(s)
	if err == nil {
		s.begin(session)
		err = session.Serve()
	}
	s.finish(err)
}

// begin passes on the messages that arrived before the session was open, and opens it.
func (s *Stream) begin(session Session) {
	c := s.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	for s.over == nil {
		data := s.inbox
		s.inbox = nil
		c.mu.Unlock()
		rest, err := s.deliver(session, data)
		c.mu.Lock()
		if err != nil {
			s.failLocked(err)
			return
		}
		if len(s.inbox) > 0 {
			s.inbox = append(rest, s.inbox...)
			continue
		}
		if len(rest) > 0 {
			s.inbox = rest
		}
		s.session = session
		if s.halfClosed {
			c.mu.Unlock()
			s.closeSend(session)
			c.mu.Lock()
		}
		_ = c.creditLocked() // an error has ended the stream
		return
	}
}

// takeLocked processes what the client sends, on the goroutine that reads the connection. It
// releases the lock during calls to the session.
func (s *Stream) takeLocked(data []byte, last bool) {
	s.halfClosed = last
	if s.session == nil {
		if s.over == nil {
			s.inbox = append(s.inbox, data...)
		}
		return
	}
	if s.over != nil {
		return
	}
	c := s.conn
	c.mu.Unlock()
	if len(s.inbox) > 0 {
		s.inbox = append(s.inbox, data...)
		data = s.inbox
	}
	rest, err := s.deliver(s.session, data)
	if n := len(data) - len(rest); n > 0 {
		c.guard.budget.pay(bytesPerFrame + n)
	}
	if len(rest) == 0 {
		s.inbox = nil
	} else {
		s.inbox = append(s.inbox[:0], rest...)
	}
	if err == nil && last {
		s.closeSend(s.session)
	}
	c.mu.Lock()
	if err != nil {
		s.failLocked(err)
	}
}

// deliver passes complete messages to the session, and returns the incomplete rest.
func (s *Stream) deliver(session Session, data []byte) (rest []byte, err error) {
	for len(data) >= messagePrefix {
		size := binary.BigEndian.Uint32(data[1:])
		switch {
		case data[0] != 0:
			return nil, status.Error(codes.Unimplemented, "compressed messages are not supported: send messages "+
				"uncompressed")
		case int64(size) > int64(s.conn.server.options.MaxReceive):
			return nil, status.Errorf(codes.ResourceExhausted, "message of %d bytes: the limit is %d bytes",
				size, s.conn.server.options.MaxReceive)
		case len(data) < messagePrefix+int(size):
			return data, nil
		}
		if err := session.Message(data[messagePrefix:][:size]); err != nil {
			return nil, err
		}
		data = data[messagePrefix+int(size):]
	}
	return data, nil
}

// closeSend reports the end of the client's messages to the session.
func (s *Stream) closeSend(session Session) {
	if len(s.inbox) == 0 {
		session.CloseSend()
		return
	}
	s.conn.mu.Lock()
	defer s.conn.mu.Unlock()
	s.failLocked(status.Error(codes.Internal, "the client closed its side in the middle of a message"))
}

// failLocked sets the stream's status and ends its context. finish sends the status.
func (s *Stream) failLocked(err error) {
	if s.over == nil {
		s.over = err
		s.cancel()
		s.conn.changed.Broadcast()
	}
}

func (s *Stream) dropLocked(err error) {
	s.failLocked(err)
	s.goneLocked()
}

// goneLocked makes room for another stream. A stream that was never admitted does not reset the
// connection's idle time.
func (s *Stream) goneLocked() {
	s.conn.stream = nil
	if s.session != nil {
		s.conn.pings.idle = now()
	}
}

func (s *Stream) finish(err error) {
	c := s.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	c.running--
	if c.stream == s { // it was not dropped
		// The deadline's own call of failLocked may not have run yet.
		if late := s.ctx.Err(); late != nil {
			s.failLocked(status.FromContextError(late).Err())
		}
		if s.over != nil {
			err = s.over
		}
		s.failLocked(errServed)
		s.goneLocked()
		c.pings.pardon = true
		if s.partial {
			_ = c.resetLocked(s.id, http2.ErrCodeInternal) // an error has ended the connection
		} else {
			httpStatus := httpOK
			if s.answered {
				httpStatus = 0
			}
			_ = c.trailersLocked(s.id, httpStatus, statusOf(err), s.halfClosed)
		}
	}
	c.endIfDrainedLocked()
}

// End ends the stream with a status. A blocked Send returns, and the context is done, so the
// session must return. Any goroutine may call End.
func (s *Stream) End(err error) {
	c := s.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	s.failLocked(err)
}
