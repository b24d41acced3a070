package h2

import (
	"crypto/tls"
	"errors"
	"net"
	"net/netip"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/slicecast/slicecast/internal/testca"
)

// listen gives a listener on the loopback interface.
func listen(t testing.TB) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	return l
}

// run runs a Mux.
func run(t *testing.T, m *Mux) {
	t.Helper()
	served := make(chan error, 1)
	go func() { served <- m.Serve() }()
	t.Cleanup(func() {
		require.NoError(t, m.Close())
		require.NoError(t, <-served)
	})
}

// Clients that connect and say nothing hold up nobody, however many they are, and no end of the server.
func TestSilentClients(t *testing.T) {
	f := start(t, echo)
	for range 8 * runtime.GOMAXPROCS(0) {
		c, err := net.Dial("tcp", f.address)
		require.NoError(t, err)
		defer c.Close()
	}
	c := open(t.Context(), t, f.dial(ours))
	c.send("hello")
	require.Equal(t, "hello", c.receive())
}

func TestTimeoutBeforeTheFirstFrame(t *testing.T) {
	f := start(t, echo)
	l := listen(t)
	m := NewMux(f.muxOptions(l, 100*time.Millisecond))
	run(t, m)
	for name, dial := range map[string]func() (net.Conn, error){
		"silent":              func() (net.Conn, error) { return net.Dial("tcp", l.Addr().String()) },
		"silent after TLS":    func() (net.Conn, error) { return tls.Dial("tcp", l.Addr().String(), f.tls(Protocol)) },
		"preface without end": func() (net.Conn, error) { return f.dialAndSay(l.Addr().String(), http2.ClientPreface) },
	} {
		t.Run(name, func(t *testing.T) {
			c, err := dial()
			require.NoError(t, err)
			defer c.Close()
			require.NoError(t, c.SetReadDeadline(time.Now().Add(patience)))
			b := make([]byte, 1000)
			for err == nil {
				_, err = c.Read(b)
			}
			var timeout net.Error
			require.False(t, errors.As(err, &timeout) && timeout.Timeout(), "the server closes it")
		})
	}
	require.Eventually(t, func() bool { return testutil.ToFloat64(m.errors) == 1 }, patience, tick, "one handshake did not end")
}

func (f *fixture) dialAndSay(address, what string) (net.Conn, error) {
	c, err := tls.Dial("tcp", address, f.tls(Protocol))
	if err == nil {
		_, err = c.Write([]byte(what))
	}
	return c, err
}

func TestProtocolsOfTLS(t *testing.T) {
	f := start(t, echo)
	for _, test := range []struct{ offered, want []string }{
		{[]string{"h2"}, []string{"h2"}},
		{[]string{Protocol}, []string{Protocol}},
		{[]string{Protocol, "h2"}, []string{Protocol}},
		{[]string{"h2", Protocol}, []string{Protocol}},
		{[]string{"http/1.1"}, nil},
		{nil, nil},
	} {
		c, err := tls.Dial("tcp", f.address, f.tls(test.offered...))
		if err == nil {
			if len(test.want) > 0 {
				require.Equal(t, test.want[0], c.ConnectionState().NegotiatedProtocol)
			} else {
				require.NoError(t, c.SetReadDeadline(time.Now().Add(patience)))
				_, err = c.Read(make([]byte, 1))
			}
			require.NoError(t, c.Close())
		}
		require.Equal(t, len(test.want) > 0, err == nil, "%v", test.offered)
	}
	require.Eventually(t, func() bool { return testutil.ToFloat64(f.mux.errors) == 2 }, patience, tick)
}

// Clients that do not show who they are can't have more than so many connections, of which those that do have none.
func TestStrangersAreBounded(t *testing.T) {
	letIn := make(chan bool, 1)
	f := start(t, until, func(o *Options) {
		accept := o.Open
		o.Open = func(s *Stream) (Session, error) {
			if <-letIn {
				return accept(s)
			}
			return nil, status.Error(codes.Unauthenticated, "who are you?")
		}
	})
	l := listen(t)
	o := f.muxOptions(l, patience)
	o.MaxStrangersPerAddress = 2
	m := NewMux(o)
	run(t, m)
	f.address = l.Addr().String()
	f.anonymous = true
	count := func() int {
		m.strange.mu.Lock()
		defer m.strange.mu.Unlock()
		require.Equal(t, m.strange.count, m.strange.byAddress[netip.MustParseAddr("127.0.0.1")])
		return m.strange.count
	}
	refused := func() {
		t.Helper()
		before := testutil.ToFloat64(m.refused.WithLabelValues(reasonStrangers))
		c, err := net.Dial("tcp", f.address)
		require.NoError(t, err)
		defer c.Close()
		require.Eventually(t, func() bool { return testutil.ToFloat64(m.refused.WithLabelValues(reasonStrangers)) > before }, patience, tick)
	}
	first, second := f.raw(t), f.raw(t)
	require.Equal(t, 2, count())
	refused()
	letIn <- false
	first.request(1)
	first.expectStatus(codes.Unauthenticated)
	refused()
	letIn <- true
	first.request(3)
	require.Eventually(t, func() bool { return count() == 1 }, patience, tick)
	third, err := tls.Dial("tcp", f.address, f.tls("h2"))
	require.NoError(t, err)
	t.Cleanup(func() { _ = third.Close() })
	handed, err := m.GRPC().Accept()
	require.NoError(t, err)
	refused()
	require.NoError(t, handed.Close())
	require.NoError(t, second.conn.Close())
	require.Eventually(t, func() bool { return count() == 0 }, patience, tick)
	f.anonymous = false
	for range 3 { // with certificates
		f.raw(t)
	}
	require.Zero(t, count())
	require.Empty(t, m.strange.byAddress)
}

// A client certificate of another CA is counted as what it is.
func TestCertificateOfAnotherCA(t *testing.T) {
	f := start(t, echo)
	another, err := testca.New()
	require.NoError(t, err)
	config := f.tls(Protocol)
	node, err := another.Node("node-1")
	require.NoError(t, err)
	config.Certificates = nil
	config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &node, nil }
	c, err := tls.Dial("tcp", f.address, config)
	if err == nil {
		t.Cleanup(func() { _ = c.Close() })
		_, err = c.Read(make([]byte, 1))
	}
	require.Error(t, err)
	require.Eventually(t, func() bool { return testutil.ToFloat64(f.mux.refused.WithLabelValues(reasonCertificate)) == 1 }, patience, tick)
}

// failing is a listener that has trouble before it works.
type failing struct {
	net.Listener
	errs chan error
}

func (l failing) Accept() (net.Conn, error) {
	select {
	case err := <-l.errs:
		return nil, err
	default:
		return l.Listener.Accept()
	}
}

func TestAcceptErrors(t *testing.T) {
	f := start(t, echo)
	l := failing{listen(t), make(chan error, 3)}
	for range cap(l.errs) {
		l.errs <- &net.OpError{Op: "accept", Net: "tcp", Err: syscall.EMFILE}
	}
	m := NewMux(f.muxOptions(l, patience))
	run(t, m)
	c, err := tls.Dial("tcp", l.Addr().String(), f.tls(Protocol))
	require.NoError(t, err)
	require.NoError(t, c.Close())

	broken := failing{listen(t), make(chan error, 1)}
	broken.errs <- errors.New("broken")
	other := NewMux(f.muxOptions(broken, patience))
	require.ErrorContains(t, other.Serve(), "broken")
	require.NoError(t, other.Close())
}

// After GracefulStop or Stop, who connects is not served.
func TestConnectionToAStoppedServer(t *testing.T) {
	f := start(t, echo)
	f.server.Stop()
	c := f.connect(t)
	_, err := c.ReadFrame()
	require.Error(t, err)
}

func TestCredentialsAreForAMux(t *testing.T) {
	here, there := net.Pipe()
	defer here.Close()
	defer there.Close()
	_, _, err := Credentials().ServerHandshake(here)
	require.ErrorContains(t, err, "listener of a Mux")
	_, _, err = Credentials().ClientHandshake(t.Context(), "", here)
	require.ErrorContains(t, err, "credentials.NewTLS")
}
