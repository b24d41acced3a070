// These tests prove that what the server keeps of a handshake, and of bytes that TLS has not
// delivered yet, is bounded.
package h2

import (
	"bytes"
	"crypto/tls"
	"net"
	"testing"

	"github.com/stretchr/testify/require"
)

// heldBack passes on the first left bytes and swallows the others.
type heldBack struct {
	net.Conn
	left int
}

// Write implements net.Conn.
func (h *heldBack) Write(b []byte) (int, error) {
	n := min(len(b), h.left)
	h.left -= n
	if _, err := h.Conn.Write(b[:n]); err != nil {
		return 0, err
	}
	return len(b), nil
}

// TestHandshakesAreBounded checks that the server keeps no more of a handshake than a long chain of
// certificates needs.
func TestHandshakesAreBounded(t *testing.T) {
	f := start(t, until)
	leaf, err := f.ca.Node("a")
	require.NoError(t, err)
	connect := func(bytes, passed int) *tls.Conn {
		chain := leaf
		for bytes -= len(leaf.Certificate[0]); bytes > 0; bytes -= len(leaf.Certificate[0]) {
			chain.Certificate = append(chain.Certificate[:len(chain.Certificate):len(chain.Certificate)], leaf.Certificate[0])
		}
		config := f.tls("h2")
		config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &chain, nil }
		c := tls.Client(&heldBack{dialFrom(t, "127.0.0.1", f.address), passed}, config)
		require.NoError(t, c.Handshake(), "the client's part is done before the server has read its certificate")
		return c
	}
	const long, longer = maxUndelivered - 6<<10, maxUndelivered + 6<<10
	n, err := connect(long, 1<<20).Read(make([]byte, 100))
	require.NoError(t, err)
	require.NotZero(t, n, "the server's SETTINGS")
	requireClosed(t, connect(longer, longer-100).NetConn())
	requireClosed(t, connect(256<<10, 240_000).NetConn())
}

// swallows stands in for TLS that delivers only some of what it reads.
type swallows struct {
	net.Conn
	deliver bool
}

// Read implements net.Conn.
func (s *swallows) Read(b []byte) (int, error) {
	n, err := s.Conn.Read(make([]byte, 1000))
	if err != nil || !s.deliver {
		return 0, err
	}
	clear(b[:n])
	return n, nil
}

// TestUndeliveredBytesAreBounded checks the bound on bytes after the handshake, such as the first
// part of a message of TLS.
func TestUndeliveredBytesAreBounded(t *testing.T) {
	under := &socket{Conn: said{all: bytes.NewBuffer(make([]byte, 10*maxUndelivered))}}
	secure := &swallows{Conn: under, deliver: true}
	r := delivery{secure, under}
	b := make([]byte, 1000)
	for range 2 * maxUndelivered / len(b) {
		n, err := r.Read(b)
		require.NoError(t, err)
		require.Equal(t, len(b), n)
	}
	secure.deliver = false
	for range maxUndelivered/len(b) + 1 { // the last read returns the rest
		_, err := r.Read(b)
		require.NoError(t, err)
	}
	_, err := r.Read(b)
	require.ErrorIs(t, err, errUndelivered)
}

// said is a connection whose client has sent everything already.
type said struct {
	net.Conn
	all *bytes.Buffer
}

// Read implements net.Conn.
func (s said) Read(b []byte) (int, error) { return s.all.Read(b) }
