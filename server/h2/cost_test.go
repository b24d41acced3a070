// These tests prove that a stranger's handshake costs the server little more than a node's, and
// that handshakes with certificates delay none without. The costs are the CPU time of real
// handshakes.
package h2

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"math/big"
	"net"
	"net/netip"
	"net/url"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/internal/testca"
	"github.com/slicecast/slicecast/internal/tlsfiles"
)

// maxCost is how many times the CPU time of a node's handshake a stranger's may take.
const maxCost = 4

// handshakeCost returns the least CPU time that the server's part of a handshake takes.
func handshakeCost(t *testing.T, server, client *tls.Config) (least time.Duration) {
	t.Helper()
	least = time.Hour
	l := listen(t)
	defer func() { require.NoError(t, l.Close()) }()
	for range 20 {
		there, err := net.Dial("tcp", l.Addr().String())
		require.NoError(t, err)
		here, err := l.Accept()
		require.NoError(t, err)
		go func() {
			_ = tls.Client(there, client).Handshake() // it may fail, and the server ends the connection
			_, _ = there.Read(make([]byte, 1))
			_ = there.Close()
		}()
		cost := make(chan time.Duration, 1)
		go func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			var before, after unix.Rusage
			beforeErr := unix.Getrusage(unix.RUSAGE_THREAD, &before)
			_ = tls.Server(&socket{Conn: here}, server).Handshake() // as above
			afterErr := unix.Getrusage(unix.RUSAGE_THREAD, &after)
			_ = here.Close()
			if beforeErr != nil || afterErr != nil {
				panic("getrusage")
			}
			cost <- time.Duration(after.Utime.Nano() + after.Stime.Nano() - before.Utime.Nano() - before.Stime.Nano())
		}()
		least = min(least, <-cost)
	}
	return least
}

// TestAStrangersHandshakeIsCheap compares the most expensive handshakes of strangers with that of a
// node.
func TestAStrangersHandshakeIsCheap(t *testing.T) {
	f := start(t, echo)
	dir := t.TempDir()
	var files tlsfiles.Files
	certificate, err := f.ca.Server("127.0.0.1")
	require.NoError(t, err)
	files.Certificate, files.PrivateKey, err = testca.Write(dir, "server", certificate)
	require.NoError(t, err)
	files.CA, err = f.ca.WriteCA(dir)
	require.NoError(t, err)
	follower, err := tlsfiles.Follow(files, f.server.options.Logger)
	require.NoError(t, err)
	server := follower.Server(true, Protocol)
	anonymous := f.tls(Protocol)
	anonymous.Certificates = nil
	with := func(c tls.Certificate) *tls.Config {
		config := anonymous.Clone()
		config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &c, nil }
		return config
	}
	forged := func(length int, curve elliptic.Curve, by *testca.CA) *tls.Config {
		c, err := testca.Forged(length, curve, "node-1", by)
		require.NoError(t, err)
		return with(c)
	}
	on := func(curve tls.CurveID) *tls.Config {
		config := anonymous.Clone()
		config.CurvePreferences = []tls.CurveID{curve}
		return config
	}
	var names []*url.URL
	for range 5000 {
		names = append(names, &url.URL{Scheme: "a"})
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	self := &x509.Certificate{SerialNumber: big.NewInt(1), URIs: names}
	manyNames, err := x509.CreateCertificate(rand.Reader, self, self, &key.PublicKey, key)
	require.NoError(t, err)
	ordinary := handshakeCost(t, server, f.tls(Protocol))
	for name, client := range map[string]*tls.Config{
		"without a certificate":                        anonymous,
		"50 certificates, P-521":                       forged(50, elliptic.P521(), nil),
		"60 certificates, P-256":                       forged(60, elliptic.P256(), nil),
		"as many certificates as are admitted, P-384":  forged(5, elliptic.P384(), nil),
		"the same with P-256":                          forged(5, elliptic.P256(), nil),
		"a node's certificate, and others":             forged(50, elliptic.P521(), f.ca),
		"a node's certificate, and those admitted":     forged(5, elliptic.P384(), f.ca),
		"a certificate of many names":                  with(tls.Certificate{Certificate: [][]byte{manyNames}, PrivateKey: key}),
		"an agreement on a key, P-521":                 on(tls.CurveP521),
		"the same, P-384":                              on(tls.CurveP384),
		"the same, P-256":                              on(tls.CurveP256),
		"a key share of another curve than the server": on(tls.X25519),
	} {
		t.Run(name, func(t *testing.T) {
			cost := handshakeCost(t, server, client)
			t.Logf("%v, %.1f times that of a node", cost, float64(cost)/float64(ordinary))
			require.Less(t, cost, maxCost*ordinary)
		})
	}
}

// TestCertificatesHavePlacesOfTheirOwn checks that handshakes whose clients have sent a certificate
// wait for each other only, and that others are completed meanwhile.
func TestCertificatesHavePlacesOfTheirOwn(t *testing.T) {
	f := start(t, echo)
	for range runtime.GOMAXPROCS(0) {
		require.True(t, f.mux.certified.Take(netip.Prefix{}, false, nil))
	}
	config := f.tls(Protocol)
	greet := func(config *tls.Config) error {
		conn, err := tls.DialWithDialer(&net.Dialer{Timeout: patience}, "tcp", f.address, config)
		if err != nil {
			return err
		}
		defer func() { _ = conn.Close() }()
		// The server answers once its part of the handshake is done.
		greeting := append([]byte(http2.ClientPreface), 0, 0, 0, byte(http2.FrameSettings), 0, 0, 0, 0, 0)
		if _, err := conn.Write(greeting); err != nil {
			return err
		}
		if err := conn.SetReadDeadline(time.Now().Add(patience)); err != nil {
			return err
		}
		_, err = conn.Read(make([]byte, 1))
		return err
	}
	done := make(chan error, 1)
	go func() { done <- greet(config) }()
	require.Eventually(t, func() bool { return f.mux.strangers() == 1 }, patience, tick)
	anonymous := config.Clone()
	anonymous.Certificates = nil
	for range 4 * runtime.GOMAXPROCS(0) {
		require.NoError(t, greet(anonymous))
	}
	require.Empty(t, done)
	f.mux.certified.Leave()
	require.NoError(t, <-done)
}
