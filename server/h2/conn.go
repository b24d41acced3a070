package h2

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
)

const (
	// frameSize is the largest frame that every peer must accept, and the largest that this one
	// accepts (RFC 9113, section 4.2).
	frameSize = 16 << 10
	// initialWindow is HTTP/2's initial window of streams and connections. Clients send little, so
	// this side does not enlarge it.
	initialWindow = 64<<10 - 1
	// headerTableSize is the size of the table for a client's headers once the client has
	// acknowledged the settings. Until then it is HTTP/2's initial size.
	headerTableSize, initialHeaderTableSize = 0, 4096
	// maxWindow is the largest window that HTTP/2 allows.
	maxWindow = math.MaxInt32
	// maxRunning bounds the sessions of a connection that have not returned. The streams of all but
	// one of them have ended.
	maxRunning = 4
	// lingerBytes bounds what is read from a client after it broke the protocol. Reading on lets
	// the client receive the reason.
	lingerBytes = 1 << 20
)

// conn is a connection. One goroutine reads it. Any goroutine may write under mu. Its invariants:
//
//  1. mu is never held during a wait, except in sync.Cond.Wait, which releases it.
//  2. Once closed is set, nothing is written.
//  3. stream is nil or the client's open stream, whose number is at most lastID.
//  4. running counts the sessions that have not returned. It is at most maxRunning.
type conn struct {
	server *Server
	secure net.Conn // TLS over socket
	socket *socket
	peer   *peer.Peer
	gone   func()        // is called when the connection has ended
	guard  guard         // reads from secure; all reads go through it
	framer *http2.Framer // only reads
	// lastRead is when a frame of the client last arrived, on the clock of now.
	lastRead atomic.Int64

	mu      sync.Mutex // guards the fields below, the stream's fields, and writes
	changed sync.Cond  // signals changes of windows, of the socket, and ends of streams
	closed  error      // why nothing is written any more; nil while the connection is open
	stream  *Stream    // nil if there is none
	running int        // sessions that have not returned
	lastID  uint32     // highest number of a stream that the client has opened
	ended   bool       // the client has ended its side of stream lastID
	// window and receive are the connection's windows of flow control for sending and for
	// receiving, in bytes.
	window, receive int64
	// initial is the send window of a new stream, in bytes. maxHeaders bounds the headers that the
	// client accepts.
	initial    int64
	maxHeaders uint32
	draining   bool // no new streams are accepted
	pings      pings
}

func newConn(s *Server, secure net.Conn, under *socket, info connectionInfo) *conn {
	c := &conn{
		server: s, secure: secure, socket: under, gone: info.connection.end,
		peer:   &peer.Peer{Addr: secure.RemoteAddr(), LocalAddr: secure.LocalAddr(), AuthInfo: info},
		window: initialWindow, receive: initialWindow, initial: initialWindow, maxHeaders: math.MaxUint32,
	}
	c.changed.L = &c.mu
	c.guard = s.newGuard(secure, under, info.connection, false, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.breakLocked(errBlockTooSlow)
	})
	c.framer = http2.NewFramer(nil, &c.guard)
	c.framer.SetMaxReadFrameSize(frameSize)
	c.framer.ReadMetaHeaders = hpack.NewDecoder(initialHeaderTableSize, nil)
	c.framer.MaxHeaderListSize = s.options.MaxHeaderBytes
	c.lastRead.Store(int64(now()))
	return c
}

func (c *conn) start() error {
	if err := c.socket.noWait(&c.server.wait, c.flushed); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.startPingsLocked()
	return c.controlLocked(func(f *http2.Framer) error {
		return f.WriteSettings(
			http2.Setting{ID: http2.SettingMaxConcurrentStreams, Val: 1},
			http2.Setting{ID: http2.SettingMaxHeaderListSize, Val: c.server.options.MaxHeaderBytes},
			// A table is of little use to a connection with one stream.
			http2.Setting{ID: http2.SettingHeaderTableSize, Val: headerTableSize},
		)
	})
}

func (c *conn) run() {
	defer c.server.remove(c)
	defer c.socket.Close()
	err := c.readPreface()
	for err == nil {
		err = c.readFrame()
	}
	v, ok := c.violation(err)
	c.mu.Lock()
	if ok && c.breakLocked(v) {
		c.mu.Unlock()
		_, _ = io.CopyN(io.Discard, c.socket.Conn, lingerBytes) // the content is ignored
		return
	}
	c.closeLocked(err, false)
	c.mu.Unlock()
}

// breakLocked ends the connection of a client that broke the protocol. It returns false if the
// connection had ended before.
func (c *conn) breakLocked(v violation) bool {
	if c.closed != nil {
		return false
	}
	c.server.violations.Inc()
	c.server.options.Logger.Debug("Client broke the protocol", "client", c.peer.Addr.String(), "err", v)
	_ = c.controlLocked(func(f *http2.Framer) error { return f.WriteGoAway(c.lastID, v.code, []byte(v.reason)) })
	c.closeLocked(v, true)
	return true
}

// violation returns the violation behind an error. ok is false for other errors, such as those of
// I/O.
func (c *conn) violation(err error) (v violation, ok bool) {
	var code http2.ConnectionError
	switch {
	case errors.As(err, &v):
	case errors.Is(err, http2.ErrFrameTooLarge):
		v = violation{http2.ErrCodeFrameSize, err.Error()}
	case errors.As(err, &code):
		v = violation{http2.ErrCode(code), err.Error()}
		if detail := c.framer.ErrorDetail(); detail != nil {
			v.reason = detail.Error()
		}
	default:
		return v, false
	}
	return v, true
}

// readPreface reads the client's connection preface (RFC 9113, section 3.4).
func (c *conn) readPreface() error {
	preface := make([]byte, len(http2.ClientPreface))
	if _, err := io.ReadFull(&c.guard, preface); err != nil {
		return err
	}
	if string(preface) != http2.ClientPreface {
		return violation{http2.ErrCodeProtocol, "the client does not speak HTTP/2"}
	}
	frame, err := c.framer.ReadFrame()
	if err != nil {
		return err
	}
	settings, ok := frame.(*http2.SettingsFrame)
	if !ok || settings.IsAck() {
		return violation{http2.ErrCodeProtocol, "the first frame is not SETTINGS"}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.settingsLocked(settings)
}

func (c *conn) readFrame() error {
	header, err := c.framer.ReadFrameHeader()
	if err != nil {
		return err
	}
	at := now()
	c.lastRead.Store(int64(at))
	if header.Type == http2.FrameData {
		return c.readData(header)
	}
	frame, err := c.framer.ReadFrameForHeader(header)
	c.mu.Lock()
	defer c.mu.Unlock()
	var broken http2.StreamError
	if errors.As(err, &broken) {
		if broken.StreamID > c.lastID {
			c.lastID, c.ended = broken.StreamID, false
		}
		return c.resetLocked(broken.StreamID, broken.Code)
	}
	if err != nil {
		return err
	}
	return c.frameLocked(frame, at)
}

// frameLocked handles a frame other than DATA that arrived at this time.
func (c *conn) frameLocked(frame http2.Frame, at time.Duration) error {
	switch f := frame.(type) {
	case *http2.MetaHeadersFrame:
		return c.headersLocked(f)
	case *http2.SettingsFrame:
		if !f.IsAck() {
			return c.settingsLocked(f)
		}
		c.framer.ReadMetaHeaders.SetAllowedMaxDynamicTableSize(headerTableSize)
	case *http2.PingFrame:
		if !f.IsAck() {
			return c.pingLocked(f, at)
		}
	case *http2.WindowUpdateFrame:
		return c.windowUpdateLocked(f)
	case *http2.RSTStreamFrame:
		if f.StreamID > c.lastID && !c.draining {
			return violation{http2.ErrCodeProtocol, "RST_STREAM for a stream that was never opened"}
		}
		c.ended = c.ended || f.StreamID == c.lastID
		if s := c.stream; s != nil && s.id == f.StreamID {
			s.dropLocked(status.Errorf(codes.Canceled, "the client has reset the stream (%s)", f.ErrCode))
		}
	case *http2.GoAwayFrame:
		c.draining = true
		c.endIfDrainedLocked()
	case *http2.PushPromiseFrame:
		return violation{http2.ErrCodeProtocol, "PUSH_PROMISE from a client"}
	}
	return nil
}

// settingsLocked applies the client's settings. Two settings have no effect here. The client's
// largest frame does not matter, as this side sends no frame larger than every peer must accept.
// The size of its header table does not matter, as this side does not use the table.
func (c *conn) settingsLocked(f *http2.SettingsFrame) error {
	err := f.ForeachSetting(func(s http2.Setting) error {
		if err := s.Valid(); err != nil {
			return err
		}
		switch s.ID {
		case http2.SettingInitialWindowSize:
			if c.stream != nil {
				c.stream.window += int64(s.Val) - c.initial
				if c.stream.window > maxWindow {
					return violation{http2.ErrCodeFlowControl, "SETTINGS make a window exceed the maximum"}
				}
			}
			c.initial = int64(s.Val)
			c.changed.Broadcast()
		case http2.SettingMaxHeaderListSize:
			c.maxHeaders = s.Val
		}
		return nil
	})
	if err != nil {
		return err
	}
	return c.controlLocked((*http2.Framer).WriteSettingsAck)
}

func (c *conn) windowUpdateLocked(f *http2.WindowUpdateFrame) error {
	switch s := c.stream; {
	case f.StreamID == 0:
		c.window += int64(f.Increment)
		if c.window > maxWindow {
			return violation{http2.ErrCodeFlowControl, "the connection's window exceeds the maximum"}
		}
	case f.StreamID > c.lastID && !c.draining:
		return violation{http2.ErrCodeProtocol, "WINDOW_UPDATE for a stream that was never opened"}
	case s != nil && s.id == f.StreamID:
		s.window += int64(f.Increment)
		if s.window > maxWindow {
			return c.resetLocked(s.id, http2.ErrCodeFlowControl)
		}
	}
	c.changed.Broadcast()
	return nil
}

func (c *conn) endsLocked() bool { return c.draining || c.closed != nil }

// headersLocked handles the headers of a request: it begins a stream, or refuses it.
func (c *conn) headersLocked(f *http2.MetaHeadersFrame) error {
	id := f.StreamID
	switch {
	case id%2 == 0:
		return violation{http2.ErrCodeProtocol, "a client's stream must have an odd number"}
	case c.stream != nil && c.stream.id == id:
		return c.requestTrailersLocked(f)
	// The client sent the request before it knew that the connection is draining or has ended. Nobody
	// would end a stream that begins on a connection that has ended.
	case c.endsLocked():
		return nil
	case id == c.lastID && c.ended:
		return errAlreadyEnded
	// The client sent the trailers before it knew that the stream has ended.
	case id == c.lastID:
		return nil
	case id < c.lastID:
		return violation{http2.ErrCodeProtocol, "a stream's number is lower than an earlier one"}
	}
	c.lastID, c.ended = id, f.StreamEnded()
	length, ok := checkRequest(f)
	if !ok {
		return c.resetLocked(id, http2.ErrCodeProtocol)
	}
	if c.stream != nil || c.running == maxRunning {
		return c.refuseExtraLocked(id)
	}
	r, refusal := c.server.parse(f, c.server.options.Path)
	if refusal != nil {
		return c.trailersLocked(id, refusal.httpStatus, refusal.status, f.StreamEnded())
	}
	c.openLocked(id, r, length, f.StreamEnded())
	return nil
}

// refuseExtraLocked refuses a stream because the connection has one already.
func (c *conn) refuseExtraLocked(id uint32) error {
	c.server.extra.Inc()
	c.server.extraLogged.Do(func() {
		c.server.options.Logger.Warn("Refused a second stream on a connection; logged at most once per interval",
			"client", c.peer.Addr.String(), "interval", logInterval)
	})
	err := c.trailersLocked(id, httpOK, status.New(codes.ResourceExhausted,
		"a connection has one stream at a time: open another connection"), true)
	if err != nil {
		return err
	}
	return c.resetLocked(id, http2.ErrCodeRefusedStream)
}

// openLocked starts a stream for a request with this content-length, which is negative if there is
// none. halfClosed means that the client sends nothing more.
func (c *conn) openLocked(id uint32, r request, length int64, halfClosed bool) {
	ctx := metadata.NewIncomingContext(peer.NewContext(context.Background(), c.peer), r.metadata)
	s := &Stream{conn: c, id: id, window: c.initial, receive: initialWindow, halfClosed: halfClosed, left: length}
	if r.hasTimeout {
		s.ctx, s.cancel = context.WithTimeout(ctx, r.timeout)
		context.AfterFunc(s.ctx, func() {
			c.mu.Lock()
			defer c.mu.Unlock()
			s.failLocked(status.FromContextError(s.ctx.Err()).Err())
		})
	} else {
		s.ctx, s.cancel = context.WithCancel(ctx)
	}
	c.stream = s
	c.running++
	c.server.wait.Go(s.run)
}

// requestTrailersLocked ends the client's side of the stream. It ignores the trailers' content, as
// requests of gRPC have none.
func (c *conn) requestTrailersLocked(f *http2.MetaHeadersFrame) error {
	s := c.stream
	switch {
	case s.halfClosed:
		return c.resetLocked(s.id, http2.ErrCodeStreamClosed)
	case !f.StreamEnded() || len(f.PseudoFields()) > 0 || s.left > 0:
		return c.resetLocked(s.id, http2.ErrCodeProtocol)
	}
	c.ended = true
	s.takeLocked(nil, true)
	return nil
}

func (c *conn) readData(h http2.FrameHeader) error {
	if h.StreamID == 0 {
		return violation{http2.ErrCodeProtocol, "DATA without a stream"}
	}
	buffer := buffers.Get().(*buffer)
	defer buffers.Put(buffer)
	data := buffer[:h.Length] // the framer limits it to frameSize
	if _, err := io.ReadFull(&c.guard, data); err != nil {
		return err
	}
	if h.Flags.Has(http2.FlagDataPadded) {
		if len(data) == 0 || int(data[0]) >= len(data) {
			return violation{http2.ErrCodeProtocol, "DATA with more padding than payload"}
		}
		data = data[1 : len(data)-int(data[0])]
	}

	c.mu.Lock()
	defer c.mu.Unlock()
	size := int64(h.Length)
	// It cannot fall below zero: a frame is smaller than half a window, and creditLocked reopens
	// the window at half.
	c.receive -= size
	if h.StreamID > c.lastID && !c.draining {
		return violation{http2.ErrCodeProtocol, "DATA for a stream that was never opened"}
	}
	s := c.stream
	if s == nil || s.id != h.StreamID {
		if h.StreamID == c.lastID && c.ended {
			return errAlreadyEnded
		}
		return c.creditLocked()
	}
	if s.halfClosed {
		return c.resetLocked(s.id, http2.ErrCodeStreamClosed)
	}
	last := h.Flags.Has(http2.FlagDataEndStream)
	c.ended = c.ended || last
	if s.left >= 0 {
		if s.left -= int64(len(data)); s.left < 0 || last && s.left > 0 {
			return c.resetLocked(s.id, http2.ErrCodeProtocol)
		}
	}
	if s.receive -= size; s.receive < 0 {
		return c.resetLocked(s.id, http2.ErrCodeFlowControl)
	}
	s.takeLocked(data, last)
	return c.creditLocked()
}

// creditLocked reopens the windows for what the client sends, once half of a window is used.
func (c *conn) creditLocked() error {
	var ofStream, ofConn int64
	if c.receive <= initialWindow/2 {
		ofConn = initialWindow - c.receive
	}
	s := c.stream
	if s != nil && s.session != nil && !s.halfClosed && s.receive <= initialWindow/2 {
		ofStream = initialWindow - s.receive
	}
	if ofConn+ofStream == 0 {
		return nil
	}
	return c.controlLocked(func(f *http2.Framer) error {
		c.receive += ofConn
		if ofStream == 0 {
			return f.WriteWindowUpdate(0, uint32(ofConn))
		}
		s.receive += ofStream
		err := f.WriteWindowUpdate(s.id, uint32(ofStream))
		if err == nil && ofConn > 0 {
			err = f.WriteWindowUpdate(0, uint32(ofConn))
		}
		return err
	})
}

// resetLocked ends a stream at once, without a status.
func (c *conn) resetLocked(id uint32, code http2.ErrCode) error {
	if id == c.lastID {
		c.ended = false // the client may send more until it receives the reset
	}
	if s := c.stream; s != nil && s.id == id {
		s.dropLocked(status.Errorf(codes.Internal, "the client broke the stream's protocol (%s)", code))
	}
	return c.controlLocked(func(f *http2.Framer) error { return f.WriteRSTStream(id, code) })
}

// trailersLocked ends a stream with a status. httpStatus is sent if no headers were sent before,
// and is 0 otherwise.
func (c *conn) trailersLocked(id uint32, httpStatus int, st *status.Status, halfClosed bool) error {
	return c.controlLocked(func(f *http2.Framer) error {
		err := f.WriteHeaders(http2.HeadersFrameParam{
			StreamID: id, BlockFragment: trailers(httpStatus, st, c.maxHeaders), EndStream: true, EndHeaders: true,
		})
		if err == nil && !halfClosed {
			// the server ignores whatever the client still sends
			err = f.WriteRSTStream(id, http2.ErrCodeNo)
		}
		return err
	})
}

// controlLocked writes frames other than DATA. It never waits.
func (c *conn) controlLocked(build func(*http2.Framer) error) error {
	var b bytes.Buffer
	if err := build(http2.NewFramer(&b, nil)); err != nil {
		return fmt.Errorf("build a frame: %w", err)
	}
	return c.writeLocked(b.Bytes())
}

// writeLocked writes frames. It never waits. An error ends the connection.
func (c *conn) writeLocked(b []byte) error {
	if c.closed == nil {
		if _, err := c.secure.Write(b); err != nil {
			c.closeLocked(fmt.Errorf("write: %w", err), false)
		}
	}
	return c.closed
}

// flushed is called when the socket can accept more.
func (c *conn) flushed() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.changed.Broadcast()
}

// drainLocked refuses further streams and ends the connection once it has no stream.
func (c *conn) drainLocked() {
	if c.endsLocked() {
		return
	}
	c.draining = true
	if c.controlLocked(func(f *http2.Framer) error { return f.WriteGoAway(c.lastID, http2.ErrCodeNo, nil) }) == nil {
		c.endIfDrainedLocked()
	}
}

func (c *conn) endIfDrainedLocked() {
	if c.draining && c.stream == nil {
		c.closeLocked(errDrained, true)
	}
}

// closeLocked ends the connection at once. If linger is set, the client first has time to read the
// last frames.
func (c *conn) closeLocked(err error, linger bool) {
	if c.closed != nil {
		return
	}
	c.closed = err
	c.pings.timer.Stop()
	if c.stream != nil {
		c.stream.dropLocked(status.Errorf(codes.Unavailable, "the connection has ended: %v", err))
	}
	if !linger {
		c.socket.Close()
		return
	}
	if secure, ok := c.secure.(interface{ CloseWrite() error }); ok {
		_ = secure.CloseWrite() // the socket keeps the error
	}
	c.socket.shutdown()
}

// buffer has the size of one frame, which makes one TLS record and one system call.
type buffer [frameSize]byte

// buffers are used for the duration of one write or read.
var buffers = sync.Pool{New: func() any { return new(buffer) }}

func appendFrame(b []byte, size int, kind http2.FrameType, flags http2.Flags, stream uint32) []byte {
	b = append(b, byte(size>>16), byte(size>>8), byte(size), byte(kind), byte(flags))
	return binary.BigEndian.AppendUint32(b, stream)
}
