// These tests prove that crowds which stop in any phase of a TLS connection keep no honest client
// from being answered, and that handshakes are paced without a queue that others can make long.
package bounded

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/time/rate"

	"github.com/slicecast/slicecast/internal/bounded/boundedtest"
	"github.com/slicecast/slicecast/internal/testca"
)

// answerSize is more than the buffers of a connection hold.
const answerSize = 32 << 20

// serveTLS serves "ok", and something long at /long, over TLS until the test ends.
func serveTLS(t *testing.T, p *Port) (address string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	authority, err := testca.New()
	require.NoError(t, err)
	certificate, err := authority.Server("a")
	require.NoError(t, err)
	config := &tls.Config{Certificates: []tls.Certificate{certificate}, MinVersion: tls.VersionTLS13}
	go func() {
		ended <- p.Serve(ctx, l, config, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/long" {
				_, _ = w.Write(make([]byte, answerSize))
				return
			}
			if _, err := io.Copy(io.Discard, r.Body); err != nil {
				http.Error(w, err.Error(), http.StatusBadRequest)
				return
			}
			_, _ = io.WriteString(w, "ok")
		}))
	}()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-ended)
	})
	return l.Addr().String()
}

// dialTLS does a handshake from an address.
func dialTLS(t *testing.T, from netip.Addr, address string) (*tls.Conn, error) {
	t.Helper()
	dialer := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(from, 0)), Timeout: 30 * time.Second}
	return tls.DialWithDialer(&dialer, "tcp", address, &tls.Config{InsecureSkipVerify: true})
}

// probeTLS asks on a new connection from an address.
func probeTLS(t *testing.T, from, address string) {
	t.Helper()
	conn, err := dialTLS(t, netip.MustParseAddr(from), address)
	require.NoError(t, err)
	defer func() { _ = conn.Close() }() // the server may have closed it
	_, err = io.WriteString(conn, "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
	require.NoError(t, err)
	answer, err := io.ReadAll(conn)
	require.NoError(t, err)
	require.Contains(t, string(answer), "HTTP/1.1 200 OK")
}

// hello returns the first message of a TLS client.
func hello(t *testing.T) string {
	t.Helper()
	client, server := net.Pipe()
	go func() {
		// It fails, because the server closes the connection.
		_ = tls.Client(client, &tls.Config{InsecureSkipVerify: true}).HandshakeContext(t.Context())
		_ = client.Close()
	}()
	defer server.Close()
	b := make([]byte, 16<<10)
	n, err := server.Read(b)
	require.NoError(t, err)
	return string(b[:n])
}

// TestCrowdsInEveryPhase checks that a probe is answered, and the connections are bounded, while
// crowds from one address and from many have stopped in each phase of a connection.
func TestCrowdsInEveryPhase(t *testing.T) {
	first := hello(t)
	for phase, test := range map[string]struct{ before, within string }{
		"before TLS":               {},
		"in the first message":     {before: first[:len(first)/2]},
		"in the handshake":         {before: first},
		"before the request":       {within: "-"},
		"in the request":           {within: "GET / HTTP/1.1\r\nHost: x"},
		"while reading the answer": {within: "GET /long HTTP/1.1\r\nHost: x\r\n\r\n"},
		"after the answer":         {within: "GET / HTTP/1.1\r\nHost: x\r\n\r\n"},
	} {
		t.Run(phase, func(t *testing.T) {
			limits := Limits{Total: 20, PerAddress: 5}
			p := newPort(limits)
			address := serveTLS(t, p)
			crowd := boundedtest.NewCrowd(t, address)
			for i := range 6 * limits.Total {
				from := netip.MustParseAddr("127.0.0.1")
				if i >= 3*limits.Total {
					from = netip.MustParseAddr(fmt.Sprintf("127.0.1.%d", i))
				}
				if test.within == "" {
					crowd.Join(from, test.before)
				} else if conn, err := dialTLS(t, from, address); err == nil { // otherwise it was displaced
					t.Cleanup(func() { _ = conn.Close() })
					if test.within != "-" {
						_, _ = io.WriteString(conn, test.within) // as above
					}
				}
				if i%limits.Total == 0 {
					probeTLS(t, "127.0.0.2", address)
					require.LessOrEqual(t, crowd.Held(), limits.Total)
				}
			}
			probeTLS(t, "127.0.0.2", address)
			require.LessOrEqual(t, crowd.Held(), limits.Total)
		})
	}
}

// TestHandshakesArePaced checks that no handshake is computed beyond the rate, and that what waits
// for its turn is bounded, from any address.
func TestHandshakesArePaced(t *testing.T) {
	limits := Limits{Total: 10, PerAddress: 10, Handshakes: rate.Every(time.Hour)}
	p := newPort(limits)
	address := serveTLS(t, p)
	for range limits.Total {
		probeTLS(t, "127.0.0.1", address)
	}
	before := runtime.NumGoroutine()
	waiting, first := boundedtest.NewCrowd(t, address), hello(t)
	for range 50 * limits.Total {
		waiting.Join(netip.MustParseAddr("127.0.0.1"), first)
	}
	// Each connection has a goroutine, and net/http may have another one for it.
	bounded := func() bool {
		return p.turn.waiting() > 0 && runtime.NumGoroutine() <= before+3*limits.Total && waiting.Held() <= limits.Total
	}
	require.Eventually(t, bounded, 30*time.Second, time.Millisecond)
	require.Less(t, p.handshakes.Tokens(), 1.0)
	require.Greater(t, p.handshakes.Tokens(), -2.0, "those who are gone reserve nothing")
}

// TestPacedHandshakesTakeTurns checks that clients who wait for their turn are answered.
func TestPacedHandshakesTakeTurns(t *testing.T) {
	limits := Limits{Total: 4, PerAddress: 4, Handshakes: 200}
	address := serveTLS(t, newPort(limits))
	begin := time.Now()
	for range 5 * limits.Total {
		probeTLS(t, "127.0.0.1", address)
	}
	require.GreaterOrEqual(t, time.Since(begin), 4*time.Duration(limits.Total)*time.Second/200)
}

// TestHandshakesOfAPortAreBounded checks that a handshake which goes on for too long ends, and that
// requests after a handshake may be larger.
func TestHandshakesOfAPortAreBounded(t *testing.T) {
	address := serveTLS(t, newPort(Metrics))
	raw, err := net.Dial("tcp", address)
	require.NoError(t, err)
	defer func() { _ = raw.Close() }()
	record := make([]byte, 5+16<<10) // the first quarter of a ClientHello of 64 KiB
	copy(record, []byte{22, 3, 1, 0x40, 0, 1, 0, 0xff, 0})
	for range 3 {
		if _, err = raw.Write(record); err != nil {
			break // the server has closed the connection
		}
		copy(record[5:], make([]byte, 4))
	}
	require.NoError(t, raw.SetReadDeadline(time.Now().Add(30*time.Second)))
	_, err = io.Copy(io.Discard, raw)
	var timeout net.Error
	require.False(t, errors.As(err, &timeout) && timeout.Timeout(), "the server does not end the handshake")

	client := http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
	defer client.CloseIdleConnections()
	response, err := client.Post("https://"+address, "text/plain", strings.NewReader(strings.Repeat("x", 4*MaxHandshake)))
	require.NoError(t, err)
	require.NoError(t, response.Body.Close())
	require.Equal(t, http.StatusOK, response.StatusCode)
}
