// TestH2spec proves that the server passes h2spec, the public conformance suite for HTTP/2 servers,
// apart from the listed cases.
package h2

import (
	"crypto/tls"
	"encoding/xml"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
)

// h2specExceptions has the cases of h2spec that do not pass, by section and title, with the reason
// for each.
var h2specExceptions = map[string]string{
	"generic/5: Sends a dynamic table size update": "it assumes a table of 4,096 bytes; the server has announced that it has none, and " +
		"hpack/6.3 holds it to that",
	"generic/5: Sends multiple dynamic table size update": "as the one before",
	"http2/5.3.1: Sends HEADERS frame that depend on itself": "priorities are of RFC 7540; RFC 9113, section 5.3.2, has none, and the " +
		"server ignores them",
	"http2/5.3.1: Sends PRIORITY frame that depend on itself": "as the one before",
}

// TestH2spec runs the public conformance suite for HTTP/2 servers. Its requests are not those of
// gRPC. So the server is made to accept them for its method, and answers each with a message.
func TestH2spec(t *testing.T) {
	f := start(t, func(s *session) error {
		if err := s.Send([]byte("hello")); err != nil {
			return err
		}
		return echo(s)
	})
	f.server.parse = func(*http2.MetaHeadersFrame, string) (request, *refusal) {
		return request{metadata: metadata.MD{}}, nil
	}
	_, port, err := net.SplitHostPort(f.serveHTTP2(t))
	require.NoError(t, err)

	root := filepath.Join("..", "..")
	build := exec.CommandContext(t.Context(), "internal/tools/build.sh", "internal/tools/h2spec", "github.com/summerwind/h2spec/cmd/h2spec")
	build.Dir, build.Stderr = root, os.Stderr
	binary, err := build.Output()
	require.NoError(t, err)
	report := filepath.Join(t.TempDir(), "report.xml")
	run := exec.CommandContext(t.Context(), strings.TrimSpace(string(binary)), "--strict", "--tls", "--insecure", "--port", port,
		"--timeout", "5", // seconds, for what takes milliseconds
		"--junit-report", report)
	output, err := run.CombinedOutput() // the report says what failed
	t.Logf("%s\n%v", output, err)

	var suites struct {
		Suites []struct {
			Cases []struct {
				Package string    `xml:"package,attr"`
				Title   string    `xml:"classname,attr"`
				Skipped *struct{} `xml:"skipped"`
				Failure *struct{} `xml:"failure"`
				Error   *struct{} `xml:"error"`
			} `xml:"testcase"`
		} `xml:"testsuite"`
	}
	b, err := os.ReadFile(report)
	require.NoError(t, err)
	require.NoError(t, xml.Unmarshal(b, &suites))
	passed, exceptions := 0, make(map[string]bool)
	for _, suite := range suites.Suites {
		for _, c := range suite.Cases {
			name := c.Package + ": " + c.Title
			if c.Skipped == nil && c.Failure == nil && c.Error == nil {
				passed++
				require.NotContains(t, h2specExceptions, name, "it passes, and is no exception any more")
				continue
			}
			exceptions[name] = true
			if h2specExceptions[name] == "" {
				t.Errorf("%s: not passed", name)
			}
		}
	}
	for name := range h2specExceptions {
		require.Contains(t, exceptions, name, "h2spec has no such case")
	}
	require.Greater(t, passed, 100)
}

// serveHTTP2 serves clients that offer HTTP/2 by its own name, as a Mux does for Protocol.
func (f *fixture) serveHTTP2(t *testing.T) (address string) {
	l := listen(t)
	config := f.inner.Clone()
	config.NextProtos = []string{http2Protocol}
	var wait sync.WaitGroup
	t.Cleanup(func() {
		l.Close()
		wait.Wait()
	})
	wait.Go(func() {
		for {
			raw, err := l.Accept()
			if err != nil {
				return
			}
			wait.Go(func() {
				connection := f.mux.conns.enter(raw) // it also ends the handshake
				under := &socket{Conn: raw}
				secure := tls.Server(under, config)
				err := secure.Handshake()
				if err == nil {
					err = f.server.serve(secure, under, connectionInfo{credentials.TLSInfo{State: secure.ConnectionState()}, connection})
				}
				if err != nil {
					raw.Close()
					connection.end()
				}
			})
		}
	})
	return l.Addr().String()
}
