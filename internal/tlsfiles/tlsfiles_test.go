// These tests prove that both ends of a TLS connection follow their files while these are replaced,
// that bad files have no effect, and that the server's name is verified. The handshakes are real,
// with certificates of a test CA.
package tlsfiles

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/slicecast/slicecast/internal/ca"
	"github.com/slicecast/slicecast/internal/testca"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// side is one end of a connection with its files, which are in a directory of their own.
type side struct {
	t     *testing.T
	dir   string
	files Files
	logs  bytes.Buffer
	*Follower
}

// newSide returns an end with a certificate from own that trusts the CA trusted.
func newSide(t *testing.T, own func() (tls.Certificate, error), trusted *testca.CA) *side {
	t.Helper()
	s := &side{t: t, dir: t.TempDir()}
	s.issue(own)
	s.trust(trusted)
	var err error
	s.Follower, err = Follow(s.files, slog.New(slog.NewTextHandler(&s.logs, nil)))
	require.NoError(t, err)
	return s
}

func (s *side) issue(own func() (tls.Certificate, error)) {
	s.t.Helper()
	certificate, err := own()
	require.NoError(s.t, err)
	s.files.Certificate, s.files.PrivateKey, err = testca.Write(s.dir, "own", certificate)
	require.NoError(s.t, err)
}

func (s *side) trust(trusted ...*testca.CA) {
	s.t.Helper()
	var all []byte
	for _, ca := range trusted {
		all = append(all, ca.PEM()...)
	}
	s.files.CA = filepath.Join(s.dir, "ca.crt")
	require.NoError(s.t, os.WriteFile(s.files.CA, all, 0o600))
}

func newCA(t *testing.T) *testca.CA {
	t.Helper()
	c, err := testca.New()
	require.NoError(t, err)
	return c
}

func serverOf(ca *testca.CA, names ...string) func() (tls.Certificate, error) {
	return func() (tls.Certificate, error) { return ca.Server(names...) }
}

func clientOf(ca *testca.CA, user string) func() (tls.Certificate, error) {
	return func() (tls.Certificate, error) { return ca.Client(user) }
}

// handshake connects two ends. It returns the user of the client's certificate and the joined
// errors of both ends.
func handshake(t *testing.T, server *tls.Config, client *side, authority string) (string, error) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { require.NoError(t, listener.Close()) }()
	dialed, err := net.Dial("tcp", listener.Addr().String())
	require.NoError(t, err)
	defer func() { _ = dialed.Close() }()
	accepted, err := listener.Accept()
	require.NoError(t, err)
	done := make(chan error, 1)
	var user string
	go func() {
		defer func() { _ = accepted.Close() }()
		end := tls.Server(accepted, server)
		err := end.HandshakeContext(context.Background())
		if peers := end.ConnectionState().PeerCertificates; err == nil && len(peers) > 0 {
			user = peers[0].Subject.CommonName
		}
		if err == nil {
			_, err = end.Write([]byte("x"))
		}
		done <- err
	}()
	conn, _, clientErr := client.ClientCredentials().Clone().ClientHandshake(t.Context(), authority, dialed)
	// With TLS 1.3 the client learns only from the first read whether the server accepts its
	// certificate.
	if clientErr == nil {
		_, clientErr = io.ReadFull(conn, make([]byte, 1))
	} else {
		_ = dialed.Close()
	}
	return user, errors.Join(clientErr, <-done)
}

const name = "server.test"

func TestBothEndsFollowTheirFiles(t *testing.T) {
	old, next := newCA(t), newCA(t)
	server, client := newSide(t, serverOf(old, name), old), newSide(t, clientOf(old, "a"), old)
	config := server.Server(true, "h2")
	connect := func() (string, error) { return handshake(t, config, client, name+":1") }

	user, err := connect()
	require.NoError(t, err)
	require.Equal(t, "a", user)

	server.issue(serverOf(next, name))
	_, err = connect()
	require.ErrorContains(t, err, "unknown authority", "the client does not trust the new CA yet")
	client.trust(old, next)
	_, err = connect()
	require.NoError(t, err)

	client.issue(clientOf(next, "b"))
	_, err = connect()
	require.ErrorContains(t, err, "unknown", "the server does not trust the new CA yet")
	server.trust(next)
	user, err = connect()
	require.NoError(t, err)
	require.Equal(t, "b", user)

	client.issue(clientOf(old, "a"))
	_, err = connect()
	require.Error(t, err, "the server still trusts the old CA")
	client.issue(clientOf(next, "b"))
	client.trust(old)
	_, err = connect()
	require.ErrorContains(t, err, "unknown authority", "the client trusts the new CA, which it should not do any more")
	require.Contains(t, client.logs.String(), "Reloaded the TLS files")
	require.Contains(t, server.logs.String(), "Reloaded the TLS files")
}

// TestCAsAreThoseOfTheCertificate requires that a client certificate is verified with the CAs when
// it arrives. With those of the first message, a client that is slow could use a CA long
// after it was withdrawn.
func TestCAsAreThoseOfTheCertificate(t *testing.T) {
	old, err := testca.New()
	require.NoError(t, err)
	next, err := testca.New()
	require.NoError(t, err)
	serving, err := old.Server("server")
	require.NoError(t, err)
	certificate, key, err := ca.EncodePEM(serving)
	require.NoError(t, err)
	node, err := old.Node("node")
	require.NoError(t, err)
	now := PEM{Certificate: certificate, PrivateKey: key, CA: old.PEM()}
	f := FollowFunc("test", func() (PEM, error) { return now, nil }, slog.New(slog.DiscardHandler))
	before := f.CAs()
	require.NoError(t, f.VerifyClient([]*x509.Certificate{node.Leaf}))

	here, there := net.Pipe()
	defer here.Close()
	defer there.Close()
	config := Config()
	config.ServerName, config.RootCAs = "server", old.Pool()
	config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
		now.CA = next.PEM() // the server reads it later, as it waits for this client
		return &node, nil
	}
	client := make(chan error, 1)
	go func() {
		c := tls.Client(there, config)
		_, err := c.Read(make([]byte, 1)) // the server's alert
		client <- err
	}()
	err = tls.Server(here, f.Server(true)).HandshakeContext(t.Context())
	var invalid *tls.CertificateVerificationError
	require.ErrorAs(t, err, &invalid)
	require.Error(t, <-client)
	require.Error(t, f.VerifyClient([]*x509.Certificate{node.Leaf}))
	require.NotSame(t, before, f.CAs())
}

// TestBadFilesChangeNothing requires that a file that is missing, incomplete or does not match its
// counterpart has no effect, and is logged only once within the interval.
func TestBadFilesChangeNothing(t *testing.T) {
	own, other := newCA(t), newCA(t)
	server, client := newSide(t, serverOf(own, name), own), newSide(t, clientOf(own, "a"), own)
	config := server.Server(true, "h2")
	replacement, err := other.Client("b")
	require.NoError(t, err)
	certPEM, keyPEM, err := ca.EncodePEM(replacement)
	require.NoError(t, err)
	for _, side := range []*side{server, client} {
		for _, path := range []string{side.files.Certificate, side.files.PrivateKey, side.files.CA} {
			good, err := os.ReadFile(path)
			require.NoError(t, err)
			torn := append(bytes.Clone(good), good[:len(good)/2]...) // as second block
			for what, content := range map[string][]byte{
				"empty": nil, "torn": good[:len(good)/2], "second torn": torn, "certificate": certPEM, "key": keyPEM,
			} {
				if path == side.files.CA && what == "certificate" || path == side.files.PrivateKey && what == "second torn" {
					continue // this content is usable
				}
				require.NoError(t, os.WriteFile(path, content, 0o600))
				user, err := handshake(t, config, client, name+":1")
				require.NoError(t, err, "%s: %s", path, what)
				require.Equal(t, "a", user)
			}
			require.NoError(t, os.Remove(path))
			_, err = handshake(t, config, client, name+":1")
			require.NoError(t, err)
			require.NoError(t, os.WriteFile(path, good, 0o600))
		}
		require.Equal(t, 1, strings.Count(side.logs.String(), "Cannot reload the TLS files"), side.logs.String())
		require.NotContains(t, side.logs.String(), "have changed")
	}
}

// TestEarlyCAs requires that CAs from elsewhere count until there has been a file of CAs, and never
// again, whatever the file has and whether it stays.
func TestEarlyCAs(t *testing.T) {
	one, other := newCA(t), newCA(t)
	client := &side{t: t, dir: t.TempDir()}
	client.files.CA = filepath.Join(client.dir, "ca.crt")
	var early []byte
	client.Follower = FollowLater(client.files, func() []byte { return early }, slog.New(slog.NewTextHandler(&client.logs, nil)))
	requireTrust := func(want *testca.CA) {
		t.Helper()
		for _, ca := range []*testca.CA{one, other} {
			_, err := handshake(t, newSide(t, serverOf(ca, name), ca).Server(false, "h2"), client, name+":1")
			require.Equal(t, ca == want, err == nil, err)
		}
	}
	requireTrust(nil)
	require.Contains(t, client.logs.String(), "open "+client.files.CA+": no such file")
	early = one.PEM()
	requireTrust(one)
	early = other.PEM()
	requireTrust(other)
	early = nil
	requireTrust(other) // the last ones

	require.NoError(t, os.WriteFile(client.files.CA, one.PEM()[:100], 0o600))
	early = one.PEM()
	requireTrust(other)
	client.trust(one)
	early = other.PEM()
	requireTrust(one)
	require.NoError(t, os.Remove(client.files.CA))
	requireTrust(one)
}

// TestEnds requires that a Follower knows when what it uses ends: of several CAs, the last one.
func TestEnds(t *testing.T) {
	now := time.Now().Truncate(time.Second)
	pemOf := func(name string, end time.Time) (cert, key []byte) {
		c, err := ca.New(name, ca.Validity{NotBefore: now, NotAfter: end})
		require.NoError(t, err)
		cert, key, err = c.PEM()
		require.NoError(t, err)
		return cert, key
	}
	own, key := pemOf("own", now.Add(time.Hour))
	first, _ := pemOf("first", now.Add(3*time.Hour))
	second, _ := pemOf("second", now.Add(2*time.Hour))
	content, err := PEM{}, errors.New("there is none yet")
	f := FollowFunc("test", func() (PEM, error) { return content, err }, slog.New(slog.DiscardHandler))
	_, handshake := f.Server(false).GetConfigForClient(nil)
	require.ErrorIs(t, handshake, err)
	certificate, last := f.Ends()
	require.Zero(t, certificate)
	require.Zero(t, last)
	content, err = PEM{Certificate: own, PrivateKey: key, CA: slices.Concat(first, second)}, nil
	certificate, last = f.Ends()
	require.True(t, now.Add(time.Hour).Equal(certificate))
	require.True(t, now.Add(3*time.Hour).Equal(last))
	err = errors.New("away")
	_, handshake = f.Server(false).GetConfigForClient(nil)
	require.NoError(t, handshake, "the last usable content stays")
}

// TestServerNameIsVerified covers servers dialed by name and by address.
func TestServerNameIsVerified(t *testing.T) {
	ca := newCA(t)
	server, client := newSide(t, serverOf(ca, name, "192.0.2.1"), ca), newSide(t, clientOf(ca, "a"), ca)
	for authority, want := range map[string]string{
		name + ":1": "", "192.0.2.1:1": "", "other.test:1": "not other.test", "192.0.2.2:1": "not 192.0.2.2",
	} {
		_, err := handshake(t, server.Server(false, "h2"), client, authority)
		if want == "" {
			require.NoError(t, err, authority)
			continue
		}
		require.ErrorContains(t, err, want)
	}
}

func TestClientCertificatesAreOptional(t *testing.T) {
	ca := newCA(t)
	server, client := newSide(t, serverOf(ca, name), ca), &side{t: t, dir: t.TempDir()}
	client.trust(ca)
	var err error
	client.Follower, err = Follow(client.files, slog.Default())
	require.NoError(t, err)
	user, err := handshake(t, server.Server(true, "h2"), client, name+":1")
	require.NoError(t, err)
	require.Empty(t, user)
}

func TestFollowReportsWhichFileIsBad(t *testing.T) {
	ca := newCA(t)
	good := newSide(t, serverOf(ca, name), ca).files
	other := newSide(t, serverOf(ca, name), ca).files
	for _, test := range []struct {
		files Files
		want  string
	}{
		{Files{Certificate: "/nowhere", PrivateKey: good.PrivateKey}, "/nowhere"},
		{Files{Certificate: good.Certificate, PrivateKey: other.PrivateKey}, "does not match"},
		{Files{Certificate: good.Certificate}, "with key"},
		{Files{Certificate: good.Certificate, PrivateKey: good.PrivateKey, CA: good.PrivateKey}, "contains no PEM certificate"},
	} {
		_, err := Follow(test.files, slog.Default())
		require.ErrorContains(t, err, test.want)
	}
}
