// These tests prove how the server answers single frames: which breach ends the connection, the
// stream or neither, how windows are kept, and how pings and GOAWAY work. The client sends and
// receives single frames over real TLS.
package h2

import (
	"bytes"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"io"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/slicecast/slicecast/internal/wire"
)

// rawClient sends and receives single frames of HTTP/2.
type rawClient struct {
	*http2.Framer
	t    *testing.T
	conn *tls.Conn
}

// raw connects and exchanges settings.
func (f *fixture) raw(t *testing.T, settings ...http2.Setting) *rawClient {
	t.Helper()
	c := f.connect(t, Protocol)
	c.write(io.WriteString(c.conn, http2.ClientPreface))
	require.NoError(t, c.WriteSettings(settings...))
	c.expectSettings()
	return c
}

// connect does the TLS handshake only.
func (f *fixture) connect(t *testing.T, protocol string) *rawClient {
	t.Helper()
	conn, err := tls.Dial("tcp", f.address, f.tls(protocol))
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() }) // a test may have closed it
	require.NoError(t, conn.SetDeadline(time.Now().Add(patience)))
	framer := http2.NewFramer(conn, conn)
	framer.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	framer.AllowIllegalWrites = true
	return &rawClient{framer, t, conn}
}

func (c *rawClient) write(_ int, err error) {
	c.t.Helper()
	require.NoError(c.t, err)
}

func (c *rawClient) expectSettings() {
	c.t.Helper()
	settings := expect[*http2.SettingsFrame](c)
	require.False(c.t, settings.IsAck())
	v, ok := settings.Value(http2.SettingMaxConcurrentStreams)
	require.True(c.t, ok)
	require.Equal(c.t, uint32(1), v)
	require.NoError(c.t, c.WriteSettingsAck())
	require.True(c.t, expect[*http2.SettingsFrame](c).IsAck())
}

// expect reads a frame, which must be of type F.
func expect[F http2.Frame](c *rawClient) F {
	c.t.Helper()
	frame, err := c.ReadFrame()
	require.NoError(c.t, err)
	return expectType[F](c.t, frame)
}

func expectType[F http2.Frame](t *testing.T, frame http2.Frame) F {
	t.Helper()
	f, ok := frame.(F)
	require.True(t, ok, "%v", frame)
	return f
}

// request opens a stream.
func (c *rawClient) request(id uint32, more ...hpack.HeaderField) {
	c.t.Helper()
	c.headers(id, false, requestHeaders(testPath, more...))
}

func (c *rawClient) headers(id uint32, last bool, block []byte) {
	c.t.Helper()
	require.NoError(c.t, c.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: block, EndHeaders: true, EndStream: last}))
}

// data sends DATA.
func (c *rawClient) data(id uint32, data string) {
	c.t.Helper()
	require.NoError(c.t, c.WriteData(id, false, []byte(data)))
}

// message returns a message with its prefix.
func message(m string) string {
	return "\x00" + string(binary.BigEndian.AppendUint32(nil, uint32(len(m)))) + m
}

// expectMessage reads a message. If it is the stream's first, the response's headers come before
// it.
func (c *rawClient) expectMessage(m string, first bool) {
	c.t.Helper()
	if first {
		require.Equal(c.t, "200", expect[*http2.MetaHeadersFrame](c).PseudoValue("status"))
	}
	require.Equal(c.t, message(m), string(expect[*http2.DataFrame](c).Data()))
}

// expectStatus reads trailers.
func (c *rawClient) expectStatus(code codes.Code) *http2.MetaHeadersFrame {
	c.t.Helper()
	f := expect[*http2.MetaHeadersFrame](c)
	require.True(c.t, f.StreamEnded())
	require.Equal(c.t, strconv.Itoa(int(code)), header(f, "grpc-status"), "%v", f.Fields)
	return f
}

func header(f *http2.MetaHeadersFrame, name string) string {
	for _, h := range f.Fields {
		if h.Name == name {
			return h.Value
		}
	}
	return ""
}

// expectGoAway reads frames up to a GOAWAY with this code, and then the end of the connection.
func (c *rawClient) expectGoAway(code http2.ErrCode) string {
	c.t.Helper()
	for {
		frame, err := c.ReadFrame()
		require.NoError(c.t, err)
		if f, ok := frame.(*http2.GoAwayFrame); ok {
			require.Equal(c.t, code, f.ErrCode, "%s", f.DebugData())
			reason := string(f.DebugData())
			_, err := c.ReadFrame()
			require.ErrorIs(c.t, err, io.EOF)
			require.NoError(c.t, c.conn.Close())
			return reason
		}
	}
}

func TestBrokenProtocolEndsTheConnection(t *testing.T) {
	f := start(t, echo)
	many := func(do func(c *rawClient) error) func(*rawClient) {
		return func(c *rawClient) {
			for range maxFrames + 1 {
				if do(c) != nil { // the connection has ended already
					return
				}
			}
		}
	}
	n := 0
	for name, test := range map[string]struct {
		code http2.ErrCode
		do   func(c *rawClient)
	}{
		"even stream":              {http2.ErrCodeProtocol, func(c *rawClient) { c.request(2) }},
		"DATA on no stream":        {http2.ErrCodeProtocol, func(c *rawClient) { c.data(0, "x") }},
		"DATA on an idle stream":   {http2.ErrCodeProtocol, func(c *rawClient) { c.data(5, "x") }},
		"RST of an idle stream":    {http2.ErrCodeProtocol, func(c *rawClient) { c.ok(c.WriteRSTStream(5, 0)) }},
		"window of an idle stream": {http2.ErrCodeProtocol, func(c *rawClient) { c.ok(c.WriteWindowUpdate(5, 1)) }},
		"empty window update":      {http2.ErrCodeProtocol, func(c *rawClient) { c.ok(c.WriteWindowUpdate(0, 0)) }},
		"window too large":         {http2.ErrCodeFlowControl, func(c *rawClient) { c.ok(c.WriteWindowUpdate(0, maxWindow)) }},
		"initial window too large": {http2.ErrCodeFlowControl, func(c *rawClient) {
			c.ok(c.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1 << 31}))
		}},
		"initial window makes one too large": {http2.ErrCodeFlowControl, func(c *rawClient) {
			c.request(1)
			c.ok(c.WriteWindowUpdate(1, maxWindow-initialWindow))
			c.ok(c.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: initialWindow + 1}))
		}},
		"padding of no DATA": {http2.ErrCodeProtocol, func(c *rawClient) { c.ok(c.WriteRawFrame(http2.FrameData, http2.FlagDataPadded, 1, nil)) }},
		"too much padding":   {http2.ErrCodeProtocol, func(c *rawClient) { c.ok(c.WriteRawFrame(http2.FrameData, http2.FlagDataPadded, 1, []byte{9, 0})) }},
		"frame too large":    {http2.ErrCodeFrameSize, func(c *rawClient) { c.ok(c.WriteRawFrame(http2.FramePing, 0, 0, make([]byte, frameSize+1))) }},
		"PUSH_PROMISE":       {http2.ErrCodeProtocol, func(c *rawClient) { c.ok(c.WritePushPromise(http2.PushPromiseParam{StreamID: 1, PromiseID: 2})) }},
		"CONTINUATION alone": {http2.ErrCodeProtocol, func(c *rawClient) { c.ok(c.WriteContinuation(1, true, nil)) }},
		"HEADERS interrupted": {http2.ErrCodeProtocol, func(c *rawClient) {
			c.ok(c.WriteHeaders(http2.HeadersFrameParam{StreamID: 1}), c.WritePing(false, [8]byte{}))
		}},
		"broken compression": {http2.ErrCodeCompression, func(c *rawClient) { c.headers(1, false, []byte{0xff, 0xff, 0xff, 0xff, 0xff}) }},
		"endless HEADERS": {http2.ErrCodeProtocol, func(c *rawClient) {
			block := requestHeaders(testPath, hpack.HeaderField{Name: "a", Value: strings.Repeat("\x01", 12<<10)})
			c.ok(c.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block}))
			for range 20 {
				if c.WriteContinuation(1, false, block) != nil {
					return
				}
			}
		}},
		"flood of SETTINGS": {http2.ErrCodeEnhanceYourCalm, many(func(c *rawClient) error { return c.WriteSettings() })},
		"flood of PINGs":    {http2.ErrCodeEnhanceYourCalm, many(func(c *rawClient) error { return c.WritePing(false, [8]byte{}) })},
		"flood of PRIORITY": {http2.ErrCodeEnhanceYourCalm, many(func(c *rawClient) error { return c.WritePriority(1, http2.PriorityParam{}) })},
		"flood of empty DATA": {http2.ErrCodeEnhanceYourCalm, func(c *rawClient) {
			c.request(1)
			many(func(c *rawClient) error { return c.WriteData(1, false, nil) })(c)
		}},
		"rapid reset": {http2.ErrCodeEnhanceYourCalm, func(c *rawClient) {
			for id := uint32(1); id < 2*maxFrames; id += 2 {
				err := c.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: requestHeaders(testPath), EndHeaders: true})
				if errors.Join(err, c.WriteRSTStream(id, http2.ErrCodeCancel)) != nil {
					return
				}
			}
		}},
	} {
		n++
		t.Run(name, func(t *testing.T) {
			c := f.raw(t)
			test.do(c)
			require.NotEmpty(t, c.expectGoAway(test.code))
		})
	}
	require.Eventually(t, func() bool { return f.connections() == 0 }, patience, tick)
	require.InDelta(t, n, testutil.ToFloat64(f.server.violations), 0)
}

func (c *rawClient) ok(errs ...error) {
	c.t.Helper()
	require.NoError(c.t, errors.Join(errs...))
}

func TestPreface(t *testing.T) {
	f := start(t, echo)
	t.Run("of another protocol", func(t *testing.T) {
		c := f.connect(t, Protocol)
		c.write(io.WriteString(c.conn, "GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"))
		require.Equal(t, "the client does not speak HTTP/2", c.expectGoAway(http2.ErrCodeProtocol))
	})
	t.Run("without SETTINGS", func(t *testing.T) {
		c := f.connect(t, Protocol)
		c.write(io.WriteString(c.conn, http2.ClientPreface))
		c.ok(c.WritePing(false, [8]byte{}))
		require.Equal(t, "the first frame is not SETTINGS", c.expectGoAway(http2.ErrCodeProtocol))
	})
	t.Run("with a stream at once", func(t *testing.T) {
		c := f.connect(t, Protocol)
		var b bytes.Buffer
		require.NoError(t, greet(&b))
		c.write(c.conn.Write(b.Bytes()))
		c.data(1, message("hello"))
		c.expectSettings()
		c.expectMessage("hello", true)
	})
}

// TestBrokenStream checks that a breach of a stream's rules ends the stream, and that the
// connection goes on.
func TestBrokenStream(t *testing.T) {
	f := start(t, echo)
	type field = hpack.HeaderField
	reset := func(code http2.ErrCode) func(c *rawClient) {
		return func(c *rawClient) { require.Equal(c.t, code, expect[*http2.RSTStreamFrame](c).ErrCode) }
	}
	answer := func(httpStatus int, code codes.Code) func(c *rawClient) {
		return func(c *rawClient) {
			h := c.expectStatus(code)
			if httpStatus != 0 {
				require.Equal(c.t, strconv.Itoa(httpStatus), h.PseudoValue("status"))
			}
			require.NotEmpty(c.t, header(h, "grpc-message"))
			require.Equal(c.t, http2.ErrCodeNo, expect[*http2.RSTStreamFrame](c).ErrCode)
		}
	}
	block := func(fields ...field) func(c *rawClient) {
		fields = append([]field{{Name: ":scheme", Value: "https"}}, fields...)
		return func(c *rawClient) { c.headers(1, false, encodeHeaders(fields)) }
	}
	with := func(fields ...field) func(c *rawClient) {
		return func(c *rawClient) { c.request(1, fields...) }
	}
	post, path, kind, host := field{Name: ":method", Value: "POST"}, field{Name: ":path", Value: testPath},
		field{Name: "content-type", Value: "application/grpc"}, field{Name: "host", Value: "h"}
	for name, test := range map[string]struct {
		do     func(c *rawClient)
		expect func(c *rawClient)
	}{
		"content-type":          {block(post, path, host, field{Name: "content-type", Value: "application/grpcx"}), answer(415, codes.InvalidArgument)},
		"no content-type":       {block(post, path, host), answer(415, codes.InvalidArgument)},
		"method":                {block(field{Name: ":method", Value: "GET"}, path, kind, host), answer(405, codes.Internal)},
		"no host":               {block(post, path, kind), answer(400, codes.Internal)},
		"two hosts":             {block(post, path, kind, host, host), answer(400, codes.Internal)},
		"connection":            {with(field{Name: "connection", Value: "close"}), reset(http2.ErrCodeProtocol)},
		"timeout without unit":  {with(field{Name: "grpc-timeout", Value: "5"}), answer(400, codes.Internal)},
		"timeout too long":      {with(field{Name: "grpc-timeout", Value: "123456789S"}), answer(400, codes.Internal)},
		"timeout no number":     {with(field{Name: "grpc-timeout", Value: "-1S"}), answer(400, codes.Internal)},
		"base64":                {with(field{Name: "x-bin", Value: "?"}), answer(400, codes.Internal)},
		"headers too large":     {with(field{Name: "x", Value: strings.Repeat("x", 16<<10)}), answer(431, codes.ResourceExhausted)},
		"path":                  {block(post, field{Name: ":path", Value: "/x"}, kind, host), answer(200, codes.Unimplemented)},
		"pseudo-header unknown": {with(field{Name: ":x", Value: "x"}), reset(http2.ErrCodeProtocol)},
		"header in capitals":    {with(field{Name: "X", Value: "x"}), reset(http2.ErrCodeProtocol)},
		"deadline":              {with(field{Name: "grpc-timeout", Value: "1m"}), answer(200, codes.DeadlineExceeded)},
		"compressed message":    {func(c *rawClient) { c.request(1); c.data(1, "\x01\x00\x00\x00\x00") }, answer(0, codes.Unimplemented)},
		"half a message": {func(c *rawClient) {
			c.request(1)
			c.ok(c.WriteData(1, true, []byte("\x00\x00")))
		}, func(c *rawClient) { c.expectStatus(codes.Internal) }},
		"trailers without an end": {func(c *rawClient) { c.request(1); c.headers(1, false, nil) }, reset(http2.ErrCodeProtocol)},
		"empty window update":     {func(c *rawClient) { c.request(1); c.ok(c.WriteWindowUpdate(1, 0)) }, reset(http2.ErrCodeProtocol)},
		"window too large":        {func(c *rawClient) { c.request(1); c.ok(c.WriteWindowUpdate(1, maxWindow)) }, reset(http2.ErrCodeFlowControl)},
	} {
		t.Run(name, func(t *testing.T) {
			c := f.raw(t)
			test.do(c)
			test.expect(c)
			c.request(3)
			c.data(3, message("still here"))
			c.expectMessage("still here", true)
		})
	}
	require.Zero(t, testutil.ToFloat64(f.server.violations))
}

func TestDataAfterTheEnd(t *testing.T) {
	f := start(t, until)
	c := f.raw(t)
	c.request(1)
	c.ok(c.WriteData(1, true, nil))
	c.data(1, message("x"))
	require.Equal(t, http2.ErrCodeStreamClosed, expect[*http2.RSTStreamFrame](c).ErrCode)
	c.data(1, message("x"))
	c.request(3)
	c.ok(c.WriteData(3, false, []byte("\x01\x00\x00\x00\x00")))
	require.Equal(t, "200", c.expectStatus(codes.Unimplemented).PseudoValue("status"))
}

// TestClientWithSmallHeaderLimit checks that a status is cut to what the client accepts.
func TestClientWithSmallHeaderLimit(t *testing.T) {
	f := start(t, func(*session) error { return status.Error(codes.Internal, strings.Repeat("x", 2000)) })
	c := f.raw(t, http2.Setting{ID: http2.SettingMaxHeaderListSize, Val: 1000})
	c.request(1)
	require.Equal(t, strings.Repeat("x", maxMessage), header(c.expectStatus(codes.Internal), "grpc-message"))
}

func TestSecondStreamIsRefused(t *testing.T) {
	f := start(t, echo)
	c := f.raw(t)
	c.request(1)
	c.request(3)
	c.expectStatus(codes.ResourceExhausted)
	require.EqualValues(t, 1, testutil.ToFloat64(f.server.extra))
	require.Equal(t, uint32(3), expect[*http2.RSTStreamFrame](c).StreamID)
	c.data(3, message("for nobody"))
	c.ok(c.WriteRSTStream(3, http2.ErrCodeCancel))
	c.data(1, message("hello"))
	c.expectMessage("hello", true)
}

// TestSessionsThatDoNotReturnAreBounded checks the bound on sessions that have not returned
// although their streams have ended.
func TestSessionsThatDoNotReturnAreBounded(t *testing.T) {
	release := make(chan struct{})
	f := start(t, func(*session) error { <-release; return nil })
	c := f.raw(t)
	id := uint32(1)
	for range maxRunning {
		c.request(id)
		c.ok(c.WriteRSTStream(id, http2.ErrCodeCancel))
		id += 2
	}
	defer close(release)
	c.request(id)
	c.expectStatus(codes.ResourceExhausted)
}

func TestMessagesInAnyPieces(t *testing.T) {
	f := start(t, echo)
	c := f.raw(t)
	c.request(1)
	all := message("one") + message("") + message("three")
	for i := range all {
		c.data(1, all[i:i+1])
	}
	c.ok(c.WriteDataPadded(1, false, []byte(message("four")+message("five")+message("six")[:3]), make([]byte, 7)))
	c.ok(c.WriteData(1, true, []byte(message("six")[3:])))
	for i, m := range []string{"one", "", "three", "four", "five", "six"} {
		c.expectMessage(m, i == 0)
	}
	c.expectStatus(codes.OK)
}

// TestWindowsForTheClient checks that windows for received data are reopened, and that this happens
// seldom.
func TestWindowsForTheClient(t *testing.T) {
	f := start(t, until, func(o *Options) {
		o.Open = func(s *Stream) (Session, error) {
			return &session{Stream: s, serve: until, message: func([]byte) error { return nil }}, nil
		}
	})
	c := f.raw(t)
	c.request(1)
	window, conn, updates := int64(initialWindow), int64(initialWindow), 0
	piece := message(strings.Repeat("x", 1000))
	for sent := 0; sent < 1<<20; {
		if n := int64(len(piece)); min(window, conn) >= n {
			c.data(1, piece)
			sent += len(piece)
			window -= n
			conn -= n
			continue
		}
		u := expect[*http2.WindowUpdateFrame](c)
		updates++
		if u.StreamID == 0 {
			conn += int64(u.Increment)
		} else {
			window += int64(u.Increment)
		}
	}
	require.LessOrEqual(t, updates, 2*(1<<20)/(initialWindow/2)+2)
}

// TestWindowsOfTheClient checks that messages wait for the client's windows, the initial ones and
// those changed by SETTINGS.
func TestWindowsOfTheClient(t *testing.T) {
	tried := make(chan bool, 3)
	f := start(t, func(s *session) error {
		for _, m := range []string{"12345", "6", "7"} {
			if m == "7" {
				<-s.received
			}
			sent, err := s.TrySend(wire.Frame(m))
			if err != nil {
				return err
			}
			tried <- sent
		}
		return s.Send([]byte("abcdefgh"))
	})
	c := f.raw(t, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 12})
	c.request(1)
	c.expectMessage("12345", true)
	require.True(t, <-tried)
	require.False(t, <-tried, "the window has room for 2 bytes")
	// The window now has room for -5 bytes.
	c.ok(c.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 5}))
	require.True(t, expect[*http2.SettingsFrame](c).IsAck())
	c.data(1, message("go on"))
	require.False(t, <-tried)
	c.ok(c.WriteWindowUpdate(1, 7)) // the window has room for 2 bytes
	data := expect[*http2.DataFrame](c).Data()
	require.Equal(t, message("abcdefgh")[:2], string(data))
	c.ok(c.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1000}))
	require.True(t, expect[*http2.SettingsFrame](c).IsAck())
	require.Equal(t, message("abcdefgh")[2:], string(expect[*http2.DataFrame](c).Data()))
	c.expectStatus(codes.OK)
}

// TestMoreThanAWindowBeforeTheSessionIsOpen checks that at most one window is buffered until then.
func TestMoreThanAWindowBeforeTheSessionIsOpen(t *testing.T) {
	f := start(t, nil, func(o *Options) {
		o.Open = func(s *Stream) (Session, error) { <-s.Context().Done(); return nil, s.Context().Err() }
	})
	c := f.raw(t)
	c.request(1)
	piece := strings.Repeat("x", initialWindow/5)
	for range 6 {
		c.data(1, piece)
	}
	for {
		frame, err := c.ReadFrame()
		require.NoError(t, err)
		if r, ok := frame.(*http2.RSTStreamFrame); ok {
			require.Equal(t, http2.ErrCodeFlowControl, r.ErrCode)
			return
		}
		require.Zero(t, expectType[*http2.WindowUpdateFrame](t, frame).StreamID, "the stream's window stays closed")
	}
}

// TestErrorInTheMiddleOfAMessage checks an error that a client's message causes while a message to
// the client is half sent. A status cannot follow half a message, so the stream is reset.
func TestErrorInTheMiddleOfAMessage(t *testing.T) {
	f := start(t, func(s *session) error { return s.Send(make([]byte, 100)) })
	c := f.raw(t, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 50})
	c.request(1)
	require.Equal(t, "200", expect[*http2.MetaHeadersFrame](c).PseudoValue("status"))
	require.Len(t, expect[*http2.DataFrame](c).Data(), 50)
	c.data(1, "\x01\x00\x00\x00\x00")
	require.Equal(t, http2.ErrCodeInternal, expect[*http2.RSTStreamFrame](c).ErrCode)
}

func TestTooManyPings(t *testing.T) {
	f := start(t, echo)
	c := f.raw(t)
	c.request(1)
	for i := range 10 { // each message allows one ping
		c.data(1, message("hello"))
		c.expectMessage("hello", i == 0)
		c.ok(c.WritePing(false, [8]byte{byte(i)}))
		pong := expect[*http2.PingFrame](c)
		require.True(t, pong.IsAck())
		require.Equal(t, [8]byte{byte(i)}, pong.Data)
	}
	for range maxStrikes + 1 {
		c.ok(c.WritePing(false, [8]byte{}))
	}
	require.Equal(t, "too_many_pings", c.expectGoAway(http2.ErrCodeEnhanceYourCalm))
}

func TestDeadClientIsFoundByPing(t *testing.T) {
	ended := make(chan error, 1)
	f := start(t, func(s *session) error { ended <- until(s); return s.Send([]byte("too late")) },
		func(o *Options) { o.PingInterval, o.PingTimeout = 20*time.Millisecond, 500*time.Millisecond })
	c := f.raw(t)
	c.request(1)
	for range 3 { // the client answers pings
		ping := expect[*http2.PingFrame](c)
		require.False(t, ping.IsAck())
		require.Empty(t, ended)
		c.ok(c.WritePing(true, ping.Data))
	}
	expect[*http2.PingFrame](c)
	require.Error(t, <-ended)
	_, err := c.ReadFrame()
	require.Error(t, err)
	require.Eventually(t, func() bool { return f.connections() == 0 }, patience, tick)
}

func TestClientGoesAway(t *testing.T) {
	f := start(t, echo)
	c := f.raw(t)
	c.request(1)
	c.ok(c.WriteGoAway(0, http2.ErrCodeNo, nil))
	c.data(1, message("the stream goes on"))
	c.expectMessage("the stream goes on", true)
	c.ok(c.WriteData(1, true, nil))
	c.expectStatus(codes.OK)
	_, err := c.ReadFrame()
	require.ErrorIs(t, err, io.EOF)
}

// TestStreamAfterGoAway checks that streams after GOAWAY are not answered. The client opens them on
// another connection.
func TestStreamAfterGoAway(t *testing.T) {
	f := start(t, echo)
	c := f.raw(t)
	c.request(1)
	c.data(1, message("hello"))
	c.expectMessage("hello", true)
	stopped := make(chan error, 1)
	go func() { stopped <- f.server.GracefulStop(t.Context()) }()
	away := expect[*http2.GoAwayFrame](c)
	require.Equal(t, http2.ErrCodeNo, away.ErrCode)
	require.Equal(t, uint32(1), away.LastStreamID)
	c.request(3)
	c.data(3, message("for nobody"))
	c.data(1, message("still here"))
	c.expectMessage("still here", false)
	c.ok(c.WriteData(1, true, nil))
	c.expectStatus(codes.OK)
	_, err := c.ReadFrame()
	require.ErrorIs(t, err, io.EOF)
	require.NoError(t, c.conn.Close())
	require.NoError(t, <-stopped)
}

func TestTimeouts(t *testing.T) {
	for v, want := range map[string]time.Duration{
		"1H": time.Hour, "2M": 2 * time.Minute, "3S": 3 * time.Second, "4m": 4 * time.Millisecond, "5u": 5 * time.Microsecond,
		"6n": 6, "0S": 0, "99999999H": 1<<63 - 1,
	} {
		got, err := parseTimeout(v)
		require.NoError(t, err)
		require.Equal(t, want, got, v)
	}
}
