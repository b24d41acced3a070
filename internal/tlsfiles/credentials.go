package tlsfiles

import (
	"context"
	"errors"
	"net"

	"google.golang.org/grpc/credentials"
)

// ClientCredentials returns the credentials of a gRPC client. The server's certificate must have
// the name of the channel's authority: the host of its address, or the value of grpc.WithAuthority.
// The client offers protocols (ALPN) before h2.
func (f *Follower) ClientCredentials(protocols ...string) credentials.TransportCredentials {
	return clientCredentials{credentials.NewTLS(Config()), f, protocols}
}

// clientCredentials create a new configuration for each handshake, which has the current files and
// the name of the server that is dialed.
type clientCredentials struct {
	// TransportCredentials provides the protocol information for gRPC.
	credentials.TransportCredentials
	follower  *Follower
	protocols []string
}

// ClientHandshake implements credentials.TransportCredentials.
func (c clientCredentials) ClientHandshake(
	ctx context.Context, authority string, conn net.Conn,
) (net.Conn, credentials.AuthInfo, error) {
	now, err := c.follower.refresh()
	if err != nil {
		return nil, nil, err
	}
	name, _, err := net.SplitHostPort(authority)
	if err != nil {
		name = authority // it has no port
	}
	config := ClientConfig(now.ca, name, c.follower.Now, nil)
	config.Certificates, config.NextProtos = now.certificates, c.protocols // gRPC appends "h2"
	under := &handshaking{Conn: conn, left: maxHandshake}
	secure, info, err := credentials.NewTLS(config).ClientHandshake(ctx, authority, under)
	under.done = true
	return secure, info, err
}

// Clone implements credentials.TransportCredentials.
func (c clientCredentials) Clone() credentials.TransportCredentials { return c }

// handshaking is the connection under TLS. Until done is set, at most left bytes can be read.
type handshaking struct {
	net.Conn
	left int
	done bool
}

// Read implements net.Conn.
func (h *handshaking) Read(b []byte) (int, error) {
	if h.done {
		return h.Conn.Read(b)
	}
	if h.left == 0 {
		return 0, errors.New("the server's part of the TLS handshake is too long")
	}
	n, err := h.Conn.Read(b[:min(len(b), h.left)])
	h.left -= n
	return n, err
}
