// These tests prove that nodes connect to a real server, on both transports, however many silent
// connections strangers hold.
package app

import (
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/bounded"
	"github.com/slicecast/slicecast/internal/wire"
)

// flood opens n connections, from each of the addresses in turn. They send nothing until the test
// ends.
func flood(t *testing.T, n int, address string, from func(i int) net.IP) {
	t.Helper()
	conns := make([]net.Conn, 0, n)
	t.Cleanup(func() {
		for _, c := range conns {
			_ = c.Close() // the server may have closed it
		}
	})
	for i := range n {
		dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: from(i)}}
		c, err := dialer.DialContext(t.Context(), "tcp", address)
		require.NoError(t, err)
		conns = append(conns, c)
	}
}

// TestStrangersDoNotKeepClientsOut checks that nodes connect on both transports, however many
// connections strangers hold.
func TestStrangersDoNotKeepClientsOut(t *testing.T) {
	const n = 8192 + 64
	for name, from := range map[string]func(i int) net.IP{
		"two addresses":  func(i int) net.IP { return net.IPv4(127, 0, 1, byte(1+i%2)) },
		"many addresses": func(i int) net.IP { return net.IPv4(127, 1, byte(i>>8), byte(i)) },
	} {
		t.Run(name, func(t *testing.T) {
			c, ca := tlsConfig(t)
			r := start(t, c)
			r.sync()
			address := r.Addresses().GRPC.String()
			begin := time.Now()
			flood(t, n, address, from)
			t.Logf("%d connections in %v", n, time.Since(begin))
			for i, protocols := range [][]string{{wire.Protocol, "h2"}, {"h2"}} {
				node := fmt.Sprint("node-", i)
				config := ca.ClientTLS(ca.Node(node))
				config.NextProtos = protocols
				_, err := hello(t, dial(t, address, config), node)
				require.NoError(t, err, protocols)
			}
		})
	}
}

// TestPlaintextConnectionsAreBounded checks the same without TLS.
func TestPlaintextConnectionsAreBounded(t *testing.T) {
	r := start(t, testConfig(t))
	r.sync()
	address := r.Addresses().GRPC.String()
	stream, err := hello(t, dial(t, address, nil), "node-0")
	require.NoError(t, err)
	flood(t, bounded.Plaintext.PerAddress+8, address, func(int) net.IP { return net.IPv4(127, 0, 1, 1) })
	_, err = hello(t, dial(t, address, nil), "node-1")
	require.NoError(t, err)
	require.NoError(t, stream.Context().Err())
	require.Eventually(t, func() bool {
		return strings.Contains(get(t, nil, "http://"+r.Addresses().Metrics.String()+"/metrics"),
			`slicecast_server_displaced_connections_total{port="plaintext"} 8`)
	}, deadline, time.Millisecond)
}
