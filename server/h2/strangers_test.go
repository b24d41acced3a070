// These tests prove that connections without an admitted call are bounded in number and time, which
// of them a newcomer displaces, and that admitted ones are not affected.
package h2

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// dialFrom connects from an address of the loopback network.
func dialFrom(t *testing.T, from, to string) net.Conn {
	t.Helper()
	dialer := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(from), 0))}
	c, err := dialer.DialContext(t.Context(), "tcp", to)
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() }) // a test may have closed it
	return c
}

// requireClosed waits for the server to close a connection.
func requireClosed(t *testing.T, c net.Conn) {
	t.Helper()
	require.NoError(t, c.SetReadDeadline(time.Now().Add(patience)))
	_, err := io.Copy(io.Discard, c)
	var timeout net.Error
	require.False(t, errors.As(err, &timeout) && timeout.Timeout(), "the server does not close the connection")
}

// strangers returns how many strangers a Mux has.
func (m *Mux) strangers() int {
	m.conns.mu.Lock()
	defer m.conns.mu.Unlock()
	n := 0
	for _, of := range m.conns.sources {
		n += of.Len()
	}
	return n
}

// TestNewcomersDisplaceTheOldestStrangers checks that newcomers displace the oldest strangers of
// their address, or of all addresses. Strangers from Nodes are not displaced by others.
func TestNewcomersDisplaceTheOldestStrangers(t *testing.T) {
	f := start(t, until)
	l := listen(t)
	o := f.muxOptions(l, patience)
	o.MaxStrangersPerAddress, o.MaxStrangers, o.MaxStrangersOfNodes = 2, 3, 2
	o.NodeAddress = netip.MustParsePrefix("127.0.1.0/24").Contains
	m := NewMux(o)
	run(t, m)
	address := l.Addr().String()
	displaced := func(reason string) float64 { return testutil.ToFloat64(m.conns.closed.Counts.WithLabelValues(reason)) }
	from := func(source string, strangers int) net.Conn {
		t.Helper()
		c := dialFrom(t, source, address)
		require.Eventually(t, func() bool {
			m.conns.mu.Lock()
			defer m.conns.mu.Unlock()
			last := m.conns.others.Back()
			if o.NodeAddress(netip.MustParseAddr(source)) {
				last = m.conns.ofNodes.Back()
			}
			return last != nil && last.Value.(*Connection).raw.RemoteAddr().String() == c.LocalAddr().String()
		}, patience, tick)
		require.Equal(t, strangers, m.strangers())
		return c
	}
	a1, a2 := from("127.0.0.2", 1), from("127.0.0.2", 2)
	n1, n2 := from("127.0.1.1", 3), from("127.0.1.2", 4)

	from("127.0.0.2", 4)
	requireClosed(t, a1)
	require.Equal(t, 1.0, displaced(reasonAddress))
	from("127.0.0.3", 5)
	from("127.0.0.4", 5)
	requireClosed(t, a2)
	require.Equal(t, 1.0, displaced(reasonStrangers))
	from("127.0.1.3", 5)
	requireClosed(t, n1)
	require.Equal(t, 2.0, displaced(reasonStrangers))

	// A connection with an admitted call is not displaced, however many newcomers there are.
	secure := tls.Client(dialFrom(t, "127.0.0.5", address), f.tls(Protocol))
	require.NoError(t, secure.SetDeadline(time.Now().Add(patience)))
	framer := http2.NewFramer(secure, secure)
	_, err := io.WriteString(secure, http2.ClientPreface)
	require.NoError(t, err)
	require.NoError(t, framer.WriteSettings())
	require.NoError(t, framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: requestHeaders(testPath), EndHeaders: true}))
	require.Eventually(t, func() bool { return m.strangers() == 4 }, patience, tick)
	for range 10 {
		dialFrom(t, "127.0.0.5", address)
	}
	require.NoError(t, framer.WritePing(false, [8]byte{7}))
	for {
		frame, err := framer.ReadFrame()
		require.NoError(t, err)
		if pong, ok := frame.(*http2.PingFrame); ok && pong.IsAck() {
			break
		}
	}

	// A Node's address is bounded, too.
	from("127.0.1.3", 5)
	requireClosed(t, n2)
	n3 := from("127.0.1.3", 5)
	require.NoError(t, n3.Close())
	require.Eventually(t, func() bool { return m.strangers() == 4 }, patience, tick)
}

// TestSourcesOfStrangers checks that clients count by their address, or by their network in IPv6,
// where a host has any number of addresses.
func TestSourcesOfStrangers(t *testing.T) {
	a := &connections{options: &MuxOptions{NodeAddress: func(a netip.Addr) bool {
		return a == netip.MustParseAddr("10.0.0.1") || a == netip.MustParseAddr("2001:db8::1")
	}}}
	for _, test := range []struct {
		address, source string
		ofNode          bool
	}{
		{"10.0.0.1", "10.0.0.1/32", true},
		{"::ffff:10.0.0.1", "10.0.0.1/32", true},
		{"10.0.0.2", "10.0.0.2/32", false},
		{"::ffff:10.0.0.2", "10.0.0.2/32", false},
		{"2001:db8::1", "2001:db8::1/128", true},
		{"2001:db8::2", "2001:db8::/64", false},
		{"2001:db8::ffff:ffff:ffff:ffff", "2001:db8::/64", false},
		{"2001:db8:0:1::2", "2001:db8:0:1::/64", false},
		{"fe80::1%eth0", "fe80::/64", false},
	} {
		source, ofNode := a.source(net.TCPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(test.address), 1)))
		require.Equal(t, test.source, source.String(), test.address)
		require.Equal(t, test.ofNode, ofNode, test.address)
	}
	source, ofNode := a.source(&net.UnixAddr{Name: "/socket", Net: "unix"})
	require.False(t, source.IsValid() || ofNode)
}

// drip writes b, and then its last byte repeatedly until the connection is closed. It reads
// nothing.
func drip(c net.Conn, b []byte) {
	for i := 0; ; i++ {
		if _, err := c.Write(b[min(i, len(b)-1):][:1]); err != nil {
			return
		}
		<-time.After(tick)
	}
}

// TestStrangersEnd checks that a connection without an admitted call ends in time, whatever else
// its client does, and however slowly.
func TestStrangersEnd(t *testing.T) {
	f := start(t, until)
	f.refuse.Store(true)
	// Neither server limits a client's time here, so only the Mux ends its connection.
	l := listen(t)
	o := f.muxOptions(l, time.Second)
	m := NewMux(o)
	run(t, m)
	// Its connections go to the fixture's servers.
	moved := make(chan struct{})
	go func() {
		defer close(moved)
		for {
			c, err := m.GRPC().Accept()
			if err != nil {
				return
			}
			f.mux.grpc.conns <- c
		}
	}()
	t.Cleanup(func() {
		_ = m.GRPC().Close()
		<-moved
	})
	address := l.Addr().String()

	var hello bytes.Buffer // a ClientHello
	_ = tls.Client(recorder{&hello}, f.tls(Protocol)).HandshakeContext(t.Context())
	secure := func(t *testing.T, protocol string) net.Conn {
		t.Helper()
		c, err := tls.Dial("tcp", address, f.tls(protocol))
		require.NoError(t, err)
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	raw := func(t *testing.T) net.Conn {
		t.Helper()
		return dialFrom(t, "127.0.0.1", address)
	}
	greeting := append([]byte(http2.ClientPreface), 0, 0, 0, byte(http2.FrameSettings), 0, 0, 0, 0, 0)
	type phase struct {
		name string
		dial func(t *testing.T) net.Conn
		say  func(c net.Conn) // until the connection is closed
	}
	silent := func(net.Conn) {}
	phases := []phase{
		{"silent", raw, silent},
		{"handshake, byte by byte", raw, func(c net.Conn) { drip(c, hello.Bytes()) }},
		{"handshake without end", raw, func(c net.Conn) { drip(c, hello.Bytes()[:hello.Len()/2]) }},
	}
	for _, protocol := range []string{Protocol, "h2"} {
		dial := func(t *testing.T) net.Conn { return secure(t, protocol) }
		phases = append(phases,
			phase{protocol + ", silent after TLS", dial, silent},
			phase{protocol + ", preface without end", dial, func(c net.Conn) { drip(c, []byte(http2.ClientPreface)[:10]) }},
			phase{protocol + ", greeted", dial, func(c net.Conn) { _, _ = c.Write(greeting) }},
			phase{protocol + ", frame without end", dial, func(c net.Conn) {
				_, _ = c.Write(greeting)
				drip(c, []byte{0, 0x3f, 0, byte(http2.FrameHeaders), 0, 0, 0, 0, 1})
			}},
			phase{protocol + ", refused calls", dial, func(c net.Conn) {
				_, _ = c.Write(greeting)
				framer := http2.NewFramer(c, nil)
				for id := uint32(1); ; id += 2 {
					if framer.WriteHeaders(http2.HeadersFrameParam{
						StreamID: id, BlockFragment: requestHeaders(testPath), EndHeaders: true, EndStream: true,
					}) != nil {
						return
					}
					<-time.After(10 * tick)
				}
			}},
		)
	}
	for _, p := range phases {
		t.Run(p.name, func(t *testing.T) {
			t.Parallel()
			c := p.dial(t)
			said := make(chan struct{})
			go func() {
				defer close(said)
				p.say(c)
			}()
			requireClosed(t, c)
			_ = c.Close()
			<-said
		})
	}
}

// recorder is a connection on which nobody answers.
type recorder struct{ *bytes.Buffer }

func (recorder) Read([]byte) (int, error)         { return 0, io.EOF }
func (recorder) Close() error                     { return nil }
func (recorder) LocalAddr() net.Addr              { return nil }
func (recorder) RemoteAddr() net.Addr             { return nil }
func (recorder) SetDeadline(time.Time) error      { return nil }
func (recorder) SetReadDeadline(time.Time) error  { return nil }
func (recorder) SetWriteDeadline(time.Time) error { return nil }

// TestRefusedCallsAreBounded checks that a few calls of a connection are refused, and that the next
// one closes it without identify being called. Other connections of its address are unaffected, and
// so is any number of calls with valid credentials.
func TestRefusedCallsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fixture{server: &Server{options: Options{Logger: slog.New(slog.DiscardHandler)}}}
		o := f.muxOptions(nil, time.Hour)
		all := newConnections(&o)
		connect := func() *Connection {
			here, there := net.Pipe()
			t.Cleanup(func() { _ = there.Close() })
			c := all.enter(here)
			t.Cleanup(c.end)
			return c
		}
		asked := 0
		unknown := func() (Caller, error) {
			asked++
			return Caller{}, status.Error(codes.Unauthenticated, "who are you?")
		}
		refused := func(c *Connection) codes.Code { return status.Code(c.Enter(t.Context(), unknown)) }
		ended := func() float64 { return testutil.ToFloat64(all.closed.Counts.WithLabelValues(reasonRefused)) }

		c := connect()
		for range maxRefusedCalls {
			require.Equal(t, codes.Unauthenticated, refused(c))
		}
		<-time.After(refusedCallEvery)
		require.Equal(t, codes.Unauthenticated, refused(c), "one more after a while")
		require.Zero(t, ended())
		require.Equal(t, codes.Unavailable, refused(c))
		require.Equal(t, maxRefusedCalls+1, asked)
		require.Equal(t, 1.0, ended())
		_, err := c.raw.Write([]byte{1})
		require.ErrorIs(t, err, io.ErrClosedPipe)
		require.Equal(t, codes.Unavailable, status.Code(c.Enter(t.Context(), as(Caller{}))), "it has ended")
		require.Equal(t, 1.0, ended(), "once")

		c = connect()
		require.True(t, c.stranger())
		for range 10 * maxRefusedCalls {
			require.NoError(t, c.Enter(t.Context(), as(Caller{})))
		}
		require.False(t, c.stranger())

		// Calls that are refused because of their caller's bounds do not end the connection.
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		one := as(Caller{Name: "a", MaxConnections: 1, MaxCalls: 1})
		require.NoError(t, c.Enter(ctx, one))
		for range 10 * maxRefusedCalls {
			require.Equal(t, codes.ResourceExhausted, status.Code(c.Enter(ctx, one)))
		}
	})
}

// TestConnectionsEndWithoutCalls checks that a connection lasts while it has admitted calls, and
// ends after a long time without any, even if others were refused meanwhile.
func TestConnectionsEndWithoutCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fixture{server: &Server{options: Options{Logger: slog.New(slog.DiscardHandler)}}}
		o := f.muxOptions(nil, 20*time.Second)
		o.MaxIdle = time.Minute
		all := newConnections(&o)
		here, there := net.Pipe()
		defer there.Close()
		closed := make(chan time.Time, 1)
		go func() {
			_, _ = there.Read(make([]byte, 1))
			closed <- time.Now()
		}()
		c := all.enter(here)
		<-time.After(19 * time.Second)
		ctx, cancel := context.WithCancel(t.Context())
		require.NoError(t, c.Enter(ctx, as(Caller{})))
		ctx2, cancel2 := context.WithCancel(t.Context())
		require.NoError(t, c.Enter(ctx2, as(Caller{})))
		<-time.After(time.Hour)
		cancel()
		<-time.After(time.Hour)
		cancel2()
		synctest.Wait()
		<-time.After(59 * time.Second)
		ctx, cancel = context.WithCancel(t.Context())
		require.NoError(t, c.Enter(ctx, as(Caller{})))
		<-time.After(2 * time.Second)
		require.Empty(t, closed)
		begin := time.Now()
		cancel()
		require.Equal(t, time.Minute, (<-closed).Sub(begin))
		require.Equal(t, codes.Unavailable.String(), status.Code(c.Enter(t.Context(), as(Caller{}))).String())
	})
}
