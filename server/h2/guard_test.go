// These tests prove each bound on frames and header blocks at its exact number, and that clients
// that flood lose their connection on both transports.
package h2

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math"
	"net"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// testGuard returns the guard of a connection on which a call has been admitted.
func testGuard(r io.Reader) guard {
	return guard{
		reader: r, maxBlock: 32 << 10, blockTime: maxBlockTime, slow: func() {}, stranger: func() bool { return false },
		skip: len(http2.ClientPreface),
	}
}

// followed passes a client's frames to a guard, after the preface. It returns the guard and the
// guard's error.
func followed(t *testing.T, say func(w *http2.Framer)) (*guard, error) {
	t.Helper()
	b := bytes.NewBufferString(http2.ClientPreface)
	w := http2.NewFramer(b, nil)
	w.AllowIllegalWrites = true
	say(w)
	g := testGuard(b)
	said := b.Len()
	n, err := io.Copy(io.Discard, struct{ io.Reader }{&g})
	if err == nil {
		require.EqualValues(t, said, n)
	}
	return &g, err
}

// TestGuardBounds checks that each bound of the guard holds at its exact number.
func TestGuardBounds(t *testing.T) {
	ok := func(err error) { require.NoError(t, err) }
	block := func(frames, size int) func(*http2.Framer) {
		return func(w *http2.Framer) {
			fragment := make([]byte, size)
			ok(w.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: fragment, EndHeaders: frames == 1}))
			for i := 1; i < frames; i++ {
				ok(w.WriteContinuation(1, i == frames-1, fragment))
			}
		}
	}
	many := func(n int, write func(w *http2.Framer) error) func(*http2.Framer) {
		return func(w *http2.Framer) {
			for range n {
				ok(write(w))
			}
		}
	}
	settings := func(n int) func(*http2.Framer) {
		return func(w *http2.Framer) { ok(w.WriteSettings(make([]http2.Setting, n)...)) }
	}
	for name, test := range map[string]struct {
		say  func(*http2.Framer)
		want error
	}{
		"frames":                  {many(maxFrames, (*http2.Framer).WriteSettingsAck), nil},
		"one frame more":          {many(maxFrames+1, (*http2.Framer).WriteSettingsAck), errTooManyFrames},
		"frames of a block":       {block(maxBlockFrames, 10), nil},
		"one more in a block":     {block(maxBlockFrames+1, 0), errBlockTooLong},
		"block":                   {block(2, 16<<10), nil},
		"larger block":            {block(3, 11<<10), errBlockTooLong},
		"settings":                {settings(maxSettings), nil},
		"one setting more":        {settings(maxSettings + 1), errTooManySettings},
		"blocks do not add up":    {func(w *http2.Framer) { block(9, 1000)(w); block(9, 1000)(w); block(1, 0)(w); block(9, 1000)(w) }, nil},
		"frames after many bytes": {func(w *http2.Framer) { ok(w.WriteData(1, false, make([]byte, 16<<10))); settings(65)(w) }, errTooManySettings},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := followed(t, test.say)
			require.Equal(t, test.want, err)
		})
	}
}

// TestFramesOfStrangersAreBounded checks that a client may send few frames until a call is
// admitted.
func TestFramesOfStrangersAreBounded(t *testing.T) {
	stranger := true
	g := testGuard(nil)
	g.stranger = func() bool { return stranger }
	frame := func() error { return g.frame(0, http2.FrameWindowUpdate, 0) }
	for range maxStrangerFrames {
		require.NoError(t, frame())
		g.budget.pay(bytesPerFrame)
	}
	stranger = false
	require.NoError(t, frame())
	stranger = true
	require.Equal(t, errTooManyFrames, frame())
}

// TestGuardInPieces checks that the guard finds frames in pieces of any size.
func TestGuardInPieces(t *testing.T) {
	said := bytes.NewBufferString(http2.ClientPreface)
	w := http2.NewFramer(said, nil)
	for range 3 {
		require.NoError(t, w.WriteSettings(make([]http2.Setting, 5)...))
		require.NoError(t, w.WriteData(1, false, make([]byte, 300)))
	}
	for size := 1; size <= said.Len(); size++ {
		g := testGuard(nil)
		for piece := range slices.Chunk(said.Bytes(), size) {
			require.NoError(t, g.follow(piece))
		}
		require.EqualValues(t, 6*bytesPerFrame, g.budget.spent.Load(), "pieces of %d", size)
	}
}

// TestBudgetIsOfASecond checks that what is paid in one second does not count in the next.
func TestBudgetIsOfASecond(t *testing.T) {
	var b frameBudget
	b.pay(1 << 20)
	at := 10 * time.Second
	for range maxFrames {
		require.NoError(t, b.spend(at))
	}
	b.pay(2 * bytesPerFrame)
	require.NoError(t, b.spend(at+time.Second))
	require.NoError(t, b.spend(at+time.Second))
	require.Equal(t, errTooManyFrames, b.spend(at+time.Second))
	require.NoError(t, b.spend(at+time.Second+1))
}

// TestBlockTime checks that a block's time runs from its first frame to its last one.
func TestBlockTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slow := 0
		g := testGuard(nil)
		g.slow = func() { slow++ }
		for range 2 {
			require.NoError(t, g.block(0, false))
			<-time.After(maxBlockTime - 1)
			require.NoError(t, g.block(0, false))
			require.NoError(t, g.block(0, true))
			<-time.After(maxBlockTime)
		}
		require.Zero(t, slow)
		require.NoError(t, g.block(0, false))
		<-time.After(maxBlockTime - 1)
		require.NoError(t, g.block(0, false))
		<-time.After(1)
		synctest.Wait()
		require.Equal(t, 1, slow)
	})
}

// TestFloods checks that clients that flood lose their connection on both transports, whatever they
// flood with and when.
func TestFloods(t *testing.T) {
	waiting := requestHeaders(testPath, hpack.HeaderField{Name: "wait", Value: "yes"})
	headers := func(c *rawClient, id uint32, last bool) error {
		return c.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: waiting, EndHeaders: last})
	}
	type flood struct {
		name string
		send func(c *rawClient, i int) error // i is the number of earlier calls
	}
	always := []flood{
		{"empty CONTINUATION", func(c *rawClient, i int) error {
			if i == 0 {
				return headers(c, 101, false)
			}
			return c.WriteContinuation(101, false, nil)
		}},
		{"CONTINUATION of no header", func(c *rawClient, i int) error {
			updates := bytes.Repeat([]byte{0x20}, 3<<10) // each updates the table's size to zero
			if i == 0 {
				return c.WriteHeaders(http2.HeadersFrameParam{StreamID: 101, BlockFragment: updates})
			}
			return c.WriteContinuation(101, false, updates)
		}},
		{"CONTINUATION byte by byte", func(c *rawClient, i int) error {
			if i == 0 {
				// a long name begins
				return c.WriteHeaders(http2.HeadersFrameParam{StreamID: 101, BlockFragment: []byte("\x00\x7f\xff\x70")})
			}
			return c.WriteContinuation(101, false, []byte("x"))
		}},
		{"SETTINGS", func(c *rawClient, _ int) error { return c.WriteSettings() }},
		{"acknowledged SETTINGS", func(c *rawClient, _ int) error { return c.WriteSettingsAck() }},
		{"many settings", func(c *rawClient, _ int) error { return c.WriteSettings(make([]http2.Setting, 2000)...) }},
		{"PING", func(c *rawClient, _ int) error { return c.WritePing(false, [8]byte{}) }},
		{"answers to PING", func(c *rawClient, _ int) error { return c.WritePing(true, [8]byte{}) }},
		{"PRIORITY", func(c *rawClient, _ int) error { return c.WritePriority(1, http2.PriorityParam{StreamDep: 3}) }},
		{"WINDOW_UPDATE", func(c *rawClient, _ int) error { return c.WriteWindowUpdate(0, 1) }},
		{"GOAWAY", func(c *rawClient, _ int) error { return c.WriteGoAway(0, 0, nil) }},
		{"frames of no known type", func(c *rawClient, _ int) error { return c.WriteRawFrame(0x42, 0xff, 1, []byte("x")) }},
		{"rapid reset", func(c *rawClient, i int) error {
			id := uint32(101 + 2*i)
			return errors.Join(headers(c, id, true), c.WriteRSTStream(id, http2.ErrCodeCancel))
		}},
	}
	streams := append(slices.Clone(always),
		flood{"empty DATA", func(c *rawClient, _ int) error { return c.WriteData(1, false, nil) }},
		flood{"DATA of one byte", func(c *rawClient, _ int) error { return c.WriteData(1, false, []byte{0}) }},
		flood{"padding", func(c *rawClient, _ int) error { return c.WriteDataPadded(1, false, nil, make([]byte, 10)) }},
		flood{"WINDOW_UPDATE of the stream", func(c *rawClient, _ int) error { return c.WriteWindowUpdate(1, 1) }},
		flood{"RST_STREAM", func(c *rawClient, _ int) error { return c.WriteRSTStream(1, http2.ErrCodeCancel) }},
		flood{"requests", func(c *rawClient, i int) error { return headers(c, uint32(101+2*i), true) }},
	)
	// begun connects and sends what every client sends first.
	begun := func(t *testing.T, f *fixture, protocol string) *rawClient {
		c := f.connect(t, protocol)
		c.write(io.WriteString(c.conn, http2.ClientPreface))
		require.NoError(t, c.WriteSettings())
		return c
	}
	for _, phase := range []struct {
		name, protocol string
		begin          func(t *testing.T, f *fixture, protocol string) *rawClient
		floods         []flood
	}{
		{"before SETTINGS", Protocol, func(t *testing.T, f *fixture, protocol string) *rawClient {
			c := f.connect(t, protocol)
			c.write(io.WriteString(c.conn, http2.ClientPreface))
			return c
		}, always},
		{"without a stream", Protocol, begun, always},
		{"while the stream opens", Protocol, func(t *testing.T, f *fixture, protocol string) *rawClient {
			f.server.options.Open = func(s *Stream) (Session, error) { <-s.Context().Done(); return nil, s.Context().Err() }
			c := begun(t, f, protocol)
			c.request(1)
			return c
		}, streams},
		{"with a stream", Protocol, func(t *testing.T, f *fixture, protocol string) *rawClient {
			c := begun(t, f, protocol)
			c.request(1)
			return c
		}, streams},
		{"with a stream that is sent messages", Protocol, func(t *testing.T, f *fixture, protocol string) *rawClient {
			f.server.options.Open = opener(func(s *session) error {
				// as often as updates are published
				publish := time.NewTicker(20 * time.Millisecond)
				defer publish.Stop()
				for s.Context().Err() == nil {
					<-publish.C
					if _, err := s.TrySend([]byte("hello")); err != nil {
						return err
					}
				}
				return nil
			})
			c := begun(t, f, protocol)
			c.request(1)
			return c
		}, streams},
		{"while the server drains", Protocol, func(t *testing.T, f *fixture, protocol string) *rawClient {
			c := begun(t, f, protocol)
			c.request(1)
			require.Eventually(t, func() (open bool) {
				f.each(func(c *conn) { open = c.stream != nil && c.stream.session != nil })
				return open
			}, patience, tick)
			f.server.end((*conn).drainLocked)
			return c
		}, streams},
		{"grpc-go before SETTINGS", http2Protocol, func(t *testing.T, f *fixture, protocol string) *rawClient {
			c := f.connect(t, protocol)
			c.write(io.WriteString(c.conn, http2.ClientPreface))
			return c
		}, always},
		{"grpc-go without a stream", http2Protocol, begun, always},
		{"grpc-go with a stream", http2Protocol, func(t *testing.T, f *fixture, protocol string) *rawClient {
			c := begun(t, f, protocol)
			c.ok(headers(c, 1, true))
			return c
		}, streams},
	} {
		for _, flood := range phase.floods {
			t.Run(phase.name+"/"+strings.ReplaceAll(flood.name, " ", "_"), func(t *testing.T) {
				f := start(t, until)
				f.anonymous = true
				c := phase.begin(t, f, phase.protocol)
				flooding := make(chan struct{})
				go func() {
					defer close(flooding)
					// until the server has closed the connection
					for i := 0; flood.send(c, i) == nil; i++ {
					}
				}()
				_, err := io.Copy(io.Discard, c.conn)
				var timeout net.Error
				require.False(t, errors.As(err, &timeout) && timeout.Timeout(), "the server does not end the connection")
				require.NoError(t, c.conn.NetConn().Close())
				<-flooding
			})
		}
	}
}

// TestSlowHeaderBlock checks on both transports that a header block that does not end in time ends
// the connection, and that another one is served.
func TestSlowHeaderBlock(t *testing.T) {
	for _, protocol := range []string{Protocol, http2Protocol} {
		t.Run(protocol, func(t *testing.T) {
			f := start(t, until)
			f.server.blockTime = 50 * time.Millisecond
			c := f.connect(t, protocol)
			c.write(io.WriteString(c.conn, http2.ClientPreface))
			require.NoError(t, c.WriteSettings())
			require.NoError(t, c.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: requestHeaders(testPath)}))
			_, err := io.Copy(io.Discard, c.conn)
			var timeout net.Error
			require.False(t, errors.As(err, &timeout) && timeout.Timeout(), "the server does not end the connection")
			require.EqualValues(t, 1, testutil.ToFloat64(f.server.violations))
		})
	}
}

// TestClientOfGRPCThatDoesNotRead checks that a client of grpc-go that does not read what it
// requested loses its connection.
func TestClientOfGRPCThatDoesNotRead(t *testing.T) {
	f := start(t, until)
	f.server.writeTime = 50 * time.Millisecond
	c := f.connect(t, http2Protocol)
	c.write(io.WriteString(c.conn, http2.ClientPreface))
	require.NoError(t, c.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: maxWindow}))
	require.NoError(t, c.WriteWindowUpdate(0, maxWindow-initialWindow))
	c.request(1, hpack.HeaderField{Name: "endless", Value: "yes"})
	require.Eventually(t, func() bool { // nothing is read
		stream, ok := f.other.Load().(context.Context)
		return ok && stream.Err() != nil
	}, patience, tick, "the server does not end the connection")
}

// TestSmallWindowsPayNothing checks that a client which takes a message byte by byte may send no
// more frames for that than others.
func TestSmallWindowsPayNothing(t *testing.T) {
	f := start(t, func(s *session) error {
		if err := s.Send(make([]byte, 4<<20)); err != nil {
			return err
		}
		return until(s)
	})
	// The goroutine that reads the connection calls it.
	f.server.parse = func(m *http2.MetaHeadersFrame, path string) (request, *refusal) {
		f.server.mu.Lock()
		defer f.server.mu.Unlock()
		for c := range f.server.conns {
			c.guard.budget.since = math.MaxInt64 // the second never ends, however slow the machine is
		}
		return parseRequest(m, path)
	}
	c := f.connect(t, Protocol)
	c.write(io.WriteString(c.conn, http2.ClientPreface))
	require.NoError(t, c.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0}))
	c.request(1)
	frames, ended := 0, false
	for ; frames < 10*maxFrames && !ended; frames++ {
		ended = c.WriteWindowUpdate(1, 1) != nil
		for !ended { // the server's next frame uses the window
			frame, err := c.ReadFrame()
			if _, data := frame.(*http2.DataFrame); data {
				break
			}
			ended = err != nil
		}
	}
	require.Less(t, frames, 2*maxFrames)
	require.EqualValues(t, 1, testutil.ToFloat64(f.server.violations))
}
