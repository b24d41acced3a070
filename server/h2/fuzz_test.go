// The fuzz target proves that a server survives any bytes of a client, and that the connection
// ends.
package h2

import (
	"bytes"
	"errors"
	"io"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/slicecast/slicecast/internal/wire"
)

// FuzzServer sends arbitrary bytes to a server. The server must not panic, and the connection must
// end. TLS is left out, as it would end the connection at the first unexpected byte.
func FuzzServer(f *testing.F) {
	for _, s := range conversations(f) {
		f.Add(true, s)
		f.Add(false, append([]byte(http2.ClientPreface), s...))
	}
	serve := func(s *session) error {
		return errors.Join(s.Send(make(wire.Frame, 40<<10)), echo(s))
	}
	fixture := start(f, serve, func(o *Options) { o.MaxReceive = 1 << 10 })
	// unlike ports, there are enough of them
	l, err := net.Listen("unix", filepath.Join(f.TempDir(), "socket"))
	require.NoError(f, err)
	f.Cleanup(func() { l.Close() })
	f.Fuzz(func(t *testing.T, greeted bool, said []byte) {
		there, err := net.Dial("unix", l.Addr().String())
		require.NoError(t, err)
		defer there.Close()
		here, err := l.Accept()
		require.NoError(t, err)
		s := &socket{Conn: here}
		deadline := time.Now().Add(patience)
		require.NoError(t, fixture.server.serve(s, s, connectionInfo{connection: fixture.mux.conns.enter(here)}))
		require.NoError(t, there.SetDeadline(deadline))
		go func() {
			if greeted {
				// the server may already have closed the connection
				_, _ = io.WriteString(there, http2.ClientPreface+"\x00\x00\x00\x04\x00\x00\x00\x00\x00")
			}
			_, _ = there.Write(said)
			_ = there.(*net.UnixConn).CloseWrite()
		}()
		_, err = io.Copy(io.Discard, there)
		var timeout net.Error
		require.False(t, errors.As(err, &timeout) && timeout.Timeout(), "the server does not end the connection")
		require.Eventually(t, func() bool { return fixture.connections() == 0 }, patience, time.Millisecond)
	})
}

// conversations returns what clients might send after the preface.
func conversations(f *testing.F) (all [][]byte) {
	for _, say := range []func(w *http2.Framer) error{
		func(w *http2.Framer) error {
			return errors.Join(
				w.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1 << 20}, http2.Setting{ID: http2.SettingHeaderTableSize, Val: 1}),
				w.WriteSettingsAck(),
				w.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: requestHeaders(testPath), EndHeaders: true}),
				w.WriteData(1, false, []byte(message("hello")+message("again")[:3])),
				w.WriteData(1, false, []byte(message("again")[3:])),
				w.WritePing(false, [8]byte{1}),
				w.WriteWindowUpdate(0, 1<<20), w.WriteWindowUpdate(1, 10),
				w.WriteData(1, true, nil),
				w.WriteHeaders(http2.HeadersFrameParam{StreamID: 3, BlockFragment: requestHeaders("/other"), EndHeaders: true, EndStream: true}),
			)
		},
		func(w *http2.Framer) error {
			block := requestHeaders(testPath, hpack.HeaderField{Name: "x", Value: strings.Repeat("x", 100)},
				hpack.HeaderField{Name: "grpc-timeout", Value: "100m"}, hpack.HeaderField{Name: "y-bin", Value: "AAAA"})
			return errors.Join(
				w.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 3}),
				w.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block[:50]}),
				w.WriteContinuation(1, false, block[50:60]), w.WriteContinuation(1, true, block[60:]),
				w.WriteDataPadded(1, false, []byte(message("padded")), make([]byte, 5)),
				w.WriteRSTStream(1, http2.ErrCodeCancel),
				w.WriteHeaders(http2.HeadersFrameParam{StreamID: 3, BlockFragment: requestHeaders(testPath), EndHeaders: true}),
				w.WriteData(3, false, []byte("\x00\x00\x01\x00\x00")),
				w.WriteGoAway(0, http2.ErrCodeNo, []byte("bye")),
				w.WritePriority(3, http2.PriorityParam{Weight: 1}),
				w.WriteRawFrame(0x42, 0, 3, []byte("unknown")),
			)
		},
	} {
		var b bytes.Buffer
		require.NoError(f, say(http2.NewFramer(&b, nil)))
		all = append(all, b.Bytes())
	}
	return all
}
