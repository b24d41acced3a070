// This test proves that one host name can stand for all servers, with a DNS server of the test's
// own: clients resolve it when no known server answers, and only then.
package fabric

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"strconv"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/dns/dnsmessage"

	"github.com/slicecast/slicecast/agent/client"
	"github.com/slicecast/slicecast/server/app"
)

// serversName is a host name that is in the certificates of all servers.
const serversName = "slicecast.test"

// dns resolves serversName for this process.
type dns struct {
	mu        sync.Mutex
	addresses []netip.Addr
	asked     int // queries for IPv4 addresses
	// dialed are the resolver's connections. A lookup that nobody waits for any more holds one until
	// an answer comes, for 5 s at most.
	dialed []*net.UDPConn
	ended  bool // nothing is dialed any more
}

func newDNS(t *testing.T) *dns {
	t.Helper()
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	require.NoError(t, err)
	d := &dns{}
	var running sync.WaitGroup
	running.Go(func() { d.serve(conn) })
	before := net.DefaultResolver
	net.DefaultResolver = &net.Resolver{PreferGo: true, Dial: func(context.Context, string, string) (net.Conn, error) {
		return d.dial(conn.LocalAddr().(*net.UDPAddr))
	}}
	t.Cleanup(func() {
		net.DefaultResolver = before
		d.end()
		require.NoError(t, conn.Close())
		running.Wait()
	})
	return d
}

// dial connects the resolver. A Dialer would use the resolver that newDNS sets.
func (d *dns) dial(to *net.UDPAddr) (net.Conn, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.ended {
		return nil, net.ErrClosed
	}
	c, err := net.DialUDP("udp", nil, to)
	if err != nil {
		return nil, err
	}
	d.dialed = append(d.dialed, c)
	return c, nil
}

// end ends the lookups that still wait for an answer.
func (d *dns) end() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.ended = true
	for _, c := range d.dialed {
		_ = c.Close() // those whose lookup is over are closed already
	}
}

func (d *dns) serve(conn net.PacketConn) {
	b := make([]byte, 512)
	for {
		n, from, err := conn.ReadFrom(b)
		if err != nil {
			return
		}
		var m dnsmessage.Message
		if m.Unpack(b[:n]) != nil || len(m.Questions) != 1 {
			continue
		}
		d.answer(&m)
		if answer, err := m.Pack(); err == nil {
			_, _ = conn.WriteTo(answer, from) // a client without an answer asks again
		}
	}
}

func (d *dns) answer(m *dnsmessage.Message) {
	d.mu.Lock()
	defer d.mu.Unlock()
	q := m.Questions[0]
	m.Response, m.RecursionAvailable, m.Additionals = true, true, nil
	switch {
	case q.Name.String() != serversName+".":
		m.RCode = dnsmessage.RCodeNameError
	case q.Type == dnsmessage.TypeA:
		d.asked++
		for _, a := range d.addresses {
			m.Answers = append(m.Answers, dnsmessage.Resource{
				Header: dnsmessage.ResourceHeader{Name: q.Name, Class: q.Class}, Body: &dnsmessage.AResource{A: a.As4()},
			})
		}
	}
}

// lead sets the addresses that serversName resolves to.
func (d *dns) lead(servers ...*server) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.addresses = nil
	for _, s := range servers {
		d.addresses = append(d.addresses, netip.MustParseAddrPort(s.address()).Addr())
	}
}

func (d *dns) questions() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.asked
}

// TestServersByDNS checks that a host name stands for all servers that it resolves to. It is
// resolved when no known server answers, and not before.
func TestServersByDNS(t *testing.T) {
	d := newDNS(t)
	c := newLargeCluster(t)
	port := "0"
	at := func(host string) *server {
		s := serve(t, &watch{cluster: c}, quietServer, func(c *app.Config) { c.BindAddress = net.JoinHostPort(host, port) })
		port = strconv.Itoa(int(netip.MustParseAddrPort(s.address()).Port()))
		ready(t, c, s.address(), s.acks(t))
		return s
	}
	one, other := at("127.0.0.2"), at("127.0.0.3")
	d.lead(one, other)
	a := follow(t, agentOptions{
		node: nodes[0], find: client.Resolve([]string{net.JoinHostPort(serversName, port)}, slog.New(slog.DiscardHandler)),
	})
	a.waitEquals(t, c)
	require.Equal(t, 1, d.questions())
	serves := func(s *server) bool { return s.metric(t, "slicecast_server_nodes") == 1 }
	require.True(t, eventually(func() bool { return serves(one) != serves(other) }))
	if serves(other) {
		one, other = other, one
	}
	resumes := func(s *server) {
		t.Helper()
		require.True(t, eventually(func() bool { return serves(s) }))
		a.waitEquals(t, c)
		require.EqualValues(t, 1, s.metric(t, "slicecast_server_stream_starts_total", "resume"))
		require.LessOrEqual(t, a.traffic.bytes(), int64(resumeCost+farewell))
	}

	a.traffic.reset()
	one.stop()
	resumes(other)

	before := d.questions()
	a.traffic.reset()
	other.stop()
	require.True(t, eventually(func() bool { return d.questions() > before+1 }), "none answers")
	require.NoError(t, a.contentDiffers(c.state()), "it keeps what it has")
	third := at("127.0.0.4")
	d.lead(third)
	resumes(third)
}
