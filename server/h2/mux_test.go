// These tests prove that a Mux serves each client by the protocol it offers, is not held up by
// silent ones, and survives errors of its listener.
package h2

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/slicecast/slicecast/internal/testca"
)

// listen returns a listener on the loopback interface.
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

// TestSilentClients checks that clients that connect and send nothing delay neither other clients
// nor the end of the server, however many they are.
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

// TestCertificateOfAnotherCA checks that a client certificate of another CA is counted as such.
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
	require.Eventually(t, func() bool {
		return testutil.ToFloat64(f.mux.conns.closed.Counts.WithLabelValues(reasonCertificate)) == 1
	}, patience, tick)
}

// TestRecheck checks that connections whose certificates are no longer accepted are closed, on both
// servers, with what they have open, and that others stay, also those of clients without any.
func TestRecheck(t *testing.T) {
	f := start(t, echo)
	withdrawn, err := f.ca.Node("withdrawn")
	require.NoError(t, err)
	dial := func(protocols []string, certificates ...tls.Certificate) *grpc.ClientConn {
		config := f.tls(protocols...)
		config.Certificates = certificates
		conn, err := grpc.NewClient(f.address, grpc.WithTransportCredentials(credentials.NewTLS(config)),
			grpc.WithDefaultCallOptions(grpc.ForceCodecV2(bytesCodec{})))
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, conn.Close()) })
		return conn
	}
	wait := metadata.AppendToOutgoingContext(t.Context(), "wait", "1")
	node := f.tls().Certificates[0]
	stay, stayToo := open(t.Context(), t, dial(ours, node)), open(t.Context(), t, dial(ours))
	other := open(wait, t, dial([]string{"h2"}, node))
	end := []*call{open(t.Context(), t, dial(ours, withdrawn)), open(wait, t, dial([]string{"h2"}, withdrawn))}
	for _, c := range []*call{stay, stayToo, end[0]} {
		c.send("hello")
		require.Equal(t, "hello", c.receive())
	}
	require.Eventually(t, func() bool { return f.mux.strangers() == 0 }, patience, tick)

	verify := func(chain []*x509.Certificate) error {
		if chain[0].Subject.CommonName == withdrawn.Leaf.Subject.CommonName {
			return errors.New("withdrawn")
		}
		return nil
	}
	f.mux.Recheck(verify)
	for _, c := range end {
		require.Equal(t, codes.Unavailable, status.Code(c.end()))
	}
	for _, c := range []*call{stay, stayToo} {
		c.send("again")
		require.Equal(t, "again", c.receive())
	}
	closed := func() float64 {
		return testutil.ToFloat64(f.mux.conns.closed.Counts.WithLabelValues(reasonCertificate))
	}
	require.Equal(t, 2.0, closed())
	f.mux.Recheck(verify)
	require.Equal(t, 2.0, closed(), "once for each")
	require.NoError(t, other.Context().Err())

	for _, c := range []*call{stay, stayToo, other} {
		c.cancel()
		require.Error(t, c.end())
	}
	f.server.Stop()
	f.grpc.Stop()
	f.mux.conns.mu.Lock()
	defer f.mux.conns.mu.Unlock()
	require.Empty(t, f.mux.conns.certified, "nothing is kept of connections that have ended")
}

// failing is a listener whose first calls of Accept fail.
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

// TestConnectionToAStoppedServer checks that clients that connect after GracefulStop or Stop are
// not served.
func TestConnectionToAStoppedServer(t *testing.T) {
	f := start(t, echo)
	f.server.Stop()
	c := f.connect(t, Protocol)
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
