package tlsfiles

import (
	"context"
	"crypto/tls"
	"net"

	"google.golang.org/grpc/credentials"
)

// ClientCredentials give the credentials of a gRPC client. The server's certificate must have the name of the channel's
// authority: that of its address, or what grpc.WithAuthority says. Protocols are offered (ALPN) before that of HTTP/2.
func (f *Follower) ClientCredentials(protocols ...string) credentials.TransportCredentials {
	return clientCredentials{credentials.NewTLS(&tls.Config{MinVersion: tls.VersionTLS13}), f, protocols}
}

// clientCredentials make a configuration for each handshake. A tls.Config of a client can follow its own certificate but not
// the CA, except by checking the server in VerifyConnection with InsecureSkipVerify set; there, servers that are dialled by
// IP address have no name, and a check that does not know of that lets any certificate of the CA pass. Thus crypto/tls
// verifies chain and name itself, as always.
type clientCredentials struct {
	// TransportCredentials tell gRPC the protocol.
	credentials.TransportCredentials
	follower  *Follower
	protocols []string
}

// ClientHandshake implements credentials.TransportCredentials.
func (c clientCredentials) ClientHandshake(
	ctx context.Context, authority string, conn net.Conn,
) (net.Conn, credentials.AuthInfo, error) {
	now := c.follower.current()
	config := &tls.Config{
		RootCAs: now.ca, Certificates: now.certificates, MinVersion: tls.VersionTLS13, NextProtos: c.protocols, // and "h2", by gRPC
	}
	return credentials.NewTLS(config).ClientHandshake(ctx, authority, conn)
}

// Clone implements credentials.TransportCredentials.
func (c clientCredentials) Clone() credentials.TransportCredentials { return c }
