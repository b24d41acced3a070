// These tests prove that a port keeps a bounded number of connections, of one address and of all,
// and that a crowd does not keep an honest client from being answered. The crowds connect to real
// listeners of net/http.
package bounded

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/slicecast/slicecast/internal/bounded/boundedtest"
)

func TestMain(m *testing.M) {
	// After an error, net/http gives the client half a second to read the answer.
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("net/http.(*conn).closeWriteAndWait"))
}

// newPort returns a port whose timeouts never expire in a test.
func newPort(limits Limits) *Port {
	limits.Read, limits.Write, limits.Idle = time.Hour, time.Hour, time.Hour
	return NewPort("health", limits, slog.New(slog.DiscardHandler), NewDisplaced(nil, "server"))
}

// serve serves a handler that answers "ok", and returns the address of each listener.
func serve(t *testing.T, p *Port, listeners int) (addresses []string) {
	t.Helper()
	t.Cleanup(func() { // runs once all listeners are closed
		p.mu.Lock()
		defer p.mu.Unlock()
		require.Empty(t, p.conns)
		require.Empty(t, p.addresses)
	})
	for range listeners {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		addresses = append(addresses, l.Addr().String())
		server := p.Server(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok") }))
		ended := make(chan error, 1)
		go func() { ended <- server.Serve(p.Listener(l)) }()
		t.Cleanup(func() {
			require.NoError(t, server.Close())
			require.ErrorIs(t, <-ended, http.ErrServerClosed)
		})
	}
	return addresses
}

// client returns an HTTP client that connects from an address and keeps its connections.
func client(t *testing.T, from string) *http.Client {
	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	transport := &http.Transport{DialContext: dialer.DialContext}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport, Timeout: 30 * time.Second}
}

func ask(t *testing.T, c *http.Client, address string) {
	t.Helper()
	r, err := c.Get("http://" + address)
	require.NoError(t, err)
	defer r.Body.Close()
	require.Equal(t, http.StatusOK, r.StatusCode)
	_, err = io.Copy(io.Discard, r.Body)
	require.NoError(t, err)
}

// probe sends a request on a new connection, as kubelets do.
func probe(t *testing.T, from, address string) {
	t.Helper()
	c := client(t, from)
	c.Transport.(*http.Transport).DisableKeepAlives = true
	ask(t, c, address)
}

// TestOneAddress checks that the connections of one address are bounded, whatever they have sent,
// and that probes from any address are answered.
func TestOneAddress(t *testing.T) {
	for name, test := range map[string]struct {
		say   string
		crowd int
	}{
		"silent":         {"", 3000},
		"half a request": {"GET / HTTP/1.1\r\nhost: x", 500},
		"a request":      {"GET / HTTP/1.1\r\nhost: x\r\n\r\n", 500},
	} {
		t.Run(name, func(t *testing.T) {
			limits := Limits{Total: 40, PerAddress: 10}
			p := newPort(limits)
			address := serve(t, p, 1)[0]
			other := client(t, "127.0.0.3")
			ask(t, other, address)
			c := boundedtest.NewCrowd(t, address)
			for i := range test.crowd {
				c.Join(netip.MustParseAddr("127.0.0.1"), test.say)
				if i%100 == 0 {
					probe(t, "127.0.0.1", address)
					probe(t, "127.0.0.2", address)
					require.LessOrEqual(t, c.Held(), limits.PerAddress+2, "one is of each other address")
				}
			}
			probe(t, "127.0.0.1", address)
			require.GreaterOrEqual(t, testutil.ToFloat64(p.displaced), float64(test.crowd-limits.PerAddress))
			require.Equal(t, 1, held(p, "127.0.0.3"), "a connection of another address stays")
		})
	}
}

// held returns how many connections an address has.
func held(p *Port, from string) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if a := p.addresses[netip.PrefixFrom(netip.MustParseAddr(from), 32)]; a != nil {
		return a.count
	}
	return 0
}

// TestManyAddresses checks that connections from many addresses are bounded over all listeners of a
// port, and that the port's memory is, too.
func TestManyAddresses(t *testing.T) {
	limits := Limits{Total: 40, PerAddress: 10}
	p := newPort(limits)
	addresses := serve(t, p, 2)
	crowds := []*boundedtest.Crowd{boundedtest.NewCrowd(t, addresses[0]), boundedtest.NewCrowd(t, addresses[1])}
	from := netip.MustParseAddr("127.1.0.0")
	for i := range 3000 {
		from = from.Next()
		crowds[i%2].Join(from, "")
		if i%100 == 0 {
			probe(t, "127.0.0.1", addresses[0])
			probe(t, "127.0.0.1", addresses[1])
			require.LessOrEqual(t, crowds[0].Held()+crowds[1].Held(), limits.Total)
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	require.LessOrEqual(t, len(p.conns), limits.Total)
	require.LessOrEqual(t, len(p.addresses), limits.Total)
}

// TestBusiestAddressIsDisplaced checks that a client with few connections does not lose them to one
// with many.
func TestBusiestAddressIsDisplaced(t *testing.T) {
	p := newPort(Limits{Total: 40, PerAddress: 10})
	address := serve(t, p, 1)[0]
	first := client(t, "127.0.0.1")
	ask(t, first, address) // no connection has been silent for longer
	c := boundedtest.NewCrowd(t, address)
	for i := range 400 {
		c.Join(netip.MustParseAddr(fmt.Sprintf("127.0.1.%d", i%20)), "")
	}
	probe(t, "127.0.0.2", address)
	require.LessOrEqual(t, c.Held(), 40)
	require.Equal(t, 1, held(p, "127.0.0.1"))
}

// TestMostSilentConnectionIsDisplaced checks that the connection of an address that was silent for
// the longest time is closed, and not the oldest one.
func TestMostSilentConnectionIsDisplaced(t *testing.T) {
	p := newPort(Limits{Total: 40, PerAddress: 3})
	address := serve(t, p, 1)[0]
	var clients []*http.Client
	var ports []string
	for range 3 {
		c := client(t, "127.0.0.1")
		clients = append(clients, c)
		ports = append(ports, dialedFrom(t, c, address))
	}
	require.Equal(t, ports[0], dialedFrom(t, clients[0], address))
	probe(t, "127.0.0.1", address)
	require.Equal(t, ports[0], dialedFrom(t, clients[0], address), "it was active since")
	require.Equal(t, ports[2], dialedFrom(t, clients[2], address))
	require.NotEqual(t, ports[1], dialedFrom(t, clients[1], address))
}

// dialedFrom sends a request, and returns the client's address of the connection that it used.
func dialedFrom(t *testing.T, c *http.Client, address string) (from string) {
	t.Helper()
	ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{
		GotConn: func(i httptrace.GotConnInfo) { from = i.Conn.LocalAddr().String() },
	})
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address, nil)
	require.NoError(t, err)
	r, err := c.Do(request)
	require.NoError(t, err)
	defer r.Body.Close()
	_, err = io.Copy(io.Discard, r.Body)
	require.NoError(t, err)
	return from
}

// TestTimeouts checks that a port's timeouts end connections that are not displaced, in whatever
// phase of a request they stop.
func TestTimeouts(t *testing.T) {
	p := newPort(Limits{Total: 40, PerAddress: 40})
	p.limits.Read, p.limits.Idle = 50*time.Millisecond, 50*time.Millisecond
	address := serve(t, p, 1)[0]
	c := boundedtest.NewCrowd(t, address)
	for _, say := range []string{
		"", "GET / HTTP/1.1\r\nhost: x", "GET / HTTP/1.1\r\nhost: x\r\n\r\n",
		"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nx",
		"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\nexpect: 100-continue\r\n\r\n",
		"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n8\r\nx",
		"GET / HTTP/1.1\r\nhost: x\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
	} {
		c.Join(netip.MustParseAddr("127.0.0.1"), say)
	}
	require.Eventually(t, func() bool { return c.Held() == 0 }, 30*time.Second, 5*time.Millisecond)
	require.Zero(t, testutil.ToFloat64(p.displaced))
}

// TestSlowRequests checks that a request has one timeout as a whole: a client that sends it byte by
// byte, or a body without end, has no more time than one that sends nothing.
func TestSlowRequests(t *testing.T) {
	for name, test := range map[string]struct{ begin, repeat string }{
		"a request line": {"", "G"},
		"headers":        {"GET / HTTP/1.1\r\nhost: x\r\n", "x: y\r\n"},
		"a body":         {"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n", "x"},
		"chunks":         {"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n", "1\r\nx\r\n"},
		"empty lines":    {"", "\r\n"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newPort(Limits{Total: 40, PerAddress: 40})
				p.limits.Read, p.limits.Write, p.limits.Idle = 5*time.Second, 5*time.Second, 20*time.Second
				conns := make(piped, 1)
				server := p.Server(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok") }))
				ended := make(chan error, 1)
				go func() { ended <- server.Serve(p.Listener(conns)) }()
				client, raw := net.Pipe()
				conns <- raw
				var reading sync.WaitGroup
				reading.Go(func() { _, _ = io.Copy(io.Discard, client) })
				began := time.Now()
				_, err := io.WriteString(client, test.begin)
				for err == nil {
					<-time.After(100 * time.Millisecond)
					_, err = io.WriteString(client, test.repeat)
				}
				reading.Wait()
				// After an error, net/http gives the client half a second to read the answer.
				require.LessOrEqual(t, time.Since(began), p.limits.Read+time.Second)
				require.NoError(t, server.Close())
				require.ErrorIs(t, <-ended, http.ErrServerClosed)
			})
		})
	}
}

// piped is a listener whose connections are sent to it.
type piped chan net.Conn

func (p piped) Accept() (net.Conn, error) {
	conn, ok := <-p
	if !ok {
		return nil, net.ErrClosed
	}
	return conn, nil
}

func (p piped) Close() error {
	close(p)
	return nil
}

func (p piped) Addr() net.Addr { return &net.TCPAddr{} }

// TestWriteTimeout checks that an answer ends if the client does not read it.
func TestWriteTimeout(t *testing.T) {
	p := newPort(Limits{Total: 40, PerAddress: 40})
	p.limits.Write = 50 * time.Millisecond
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	written := make(chan error, 1)
	server := p.Server(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		for {
			if _, err := w.Write(make([]byte, 1<<20)); err != nil {
				written <- err
				return
			}
		}
	}))
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(p.Listener(l)) }()
	conn, err := net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	defer conn.Close()
	_, err = io.WriteString(conn, "GET / HTTP/1.1\r\nhost: x\r\n\r\n")
	require.NoError(t, err)
	require.Error(t, <-written)
	require.NoError(t, server.Close())
	require.ErrorIs(t, <-ended, http.ErrServerClosed)
}

func TestHeadersAreBounded(t *testing.T) {
	p := newPort(Limits{Total: 40, PerAddress: 40})
	address := serve(t, p, 1)[0]
	for size, want := range map[int]int{maxHeaderBytes / 2: http.StatusOK, 2 * maxHeaderBytes: http.StatusRequestHeaderFieldsTooLarge} {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+address, nil)
		require.NoError(t, err)
		request.Header.Set("x", strings.Repeat("x", size))
		r, err := client(t, "127.0.0.1").Do(request)
		require.NoError(t, err)
		require.NoError(t, r.Body.Close())
		require.Equal(t, want, r.StatusCode)
	}
}

func TestOrigin(t *testing.T) {
	for from, want := range map[string]string{
		"10.0.0.1":             "10.0.0.1/32",
		"::ffff:10.0.0.1":      "10.0.0.1/32",
		"2001:db8:0:1:2:3:4:5": "2001:db8:0:1::/64",
		"2001:db8:0:1:ffff::1": "2001:db8:0:1::/64",
		"2001:db8:0:2::1":      "2001:db8:0:2::/64",
		"fe80::1%eth0":         "fe80::/64",
		"::1":                  "::/64",
	} {
		a := netip.MustParseAddr(from)
		require.Equal(t, want, origin(net.TCPAddrFromAddrPort(netip.AddrPortFrom(a, 1))).String(), from)
	}
	require.Zero(t, origin(&net.UnixAddr{Name: "@x", Net: "unix"}))
}

// slowConn is a connection whose Close blocks.
type slowConn struct {
	net.Conn
	closing, closed chan struct{}
}

func (c *slowConn) RemoteAddr() net.Addr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)} }

func (c *slowConn) Close() error {
	close(c.closing)
	<-c.closed
	return nil
}

// TestConnectionCountsUntilItIsClosed checks that a connection counts until its socket is closed,
// and that a newcomer that displaces it waits for that.
func TestConnectionCountsUntilItIsClosed(t *testing.T) {
	p := newPort(Limits{Total: 1, PerAddress: 1})
	slow := &slowConn{closing: make(chan struct{}), closed: make(chan struct{})}
	first := p.admit(slow, unbounded)
	ended, admitted := make(chan error, 1), make(chan *conn, 1)
	go func() { ended <- first.Close() }()
	<-slow.closing
	require.Equal(t, 1, held(p, "127.0.0.1"))
	go func() { admitted <- p.admit(&slowConn{}, unbounded) }()
	require.Eventually(t, func() bool { return testutil.ToFloat64(p.displaced) == 1 }, 30*time.Second, time.Millisecond)
	require.Empty(t, admitted)
	close(slow.closed)
	<-admitted
	require.NoError(t, <-ended)
	require.Equal(t, 1, held(p, "127.0.0.1"))
}

// TestListenerEnds checks that Accept returns the error of the underlying listener.
func TestListenerEnds(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, l.Close())
	_, err = newPort(Health).Listener(l).Accept()
	require.ErrorIs(t, err, net.ErrClosed)
}

func TestServeUntilTheContextEnds(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	handler := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok") })
	go func() { ended <- newPort(Health).Serve(ctx, listener, nil, handler) }()
	ask(t, client(t, "127.0.0.1"), listener.Addr().String())

	cancel() // the idle connection must not delay the end
	require.NoError(t, <-ended)
	_, err = net.Dial("tcp", listener.Addr().String())
	require.Error(t, err)
}

func TestServeOnAClosedListener(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, listener.Close())
	err = newPort(Health).Serve(t.Context(), listener, nil, http.NotFoundHandler())
	require.ErrorIs(t, err, net.ErrClosed)
	require.ErrorContains(t, err, listener.Addr().String())
}
