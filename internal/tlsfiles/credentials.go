package tlsfiles

import (
	"context"
	"crypto/tls"
	"net"

	"google.golang.org/grpc/credentials"
)

// ClientCredentials returns the credentials of a gRPC client. The server's certificate must have
// the name of the channel's authority: the host of its address, or the value of grpc.WithAuthority.
// The client offers protocols (ALPN) before h2.
func (f *Follower) ClientCredentials(protocols ...string) credentials.TransportCredentials {
	return clientCredentials{credentials.NewTLS(&tls.Config{MinVersion: tls.VersionTLS13}), f, protocols}
}

// clientCredentials create a new configuration for each handshake. A client's tls.Config can follow
// its own certificate, but it can follow the CA only with InsecureSkipVerify and its own check in
// VerifyConnection. That check is easy to get wrong: a server dialed by IP address has no server
// name there, and a check that ignores this accepts any certificate of the CA. With a new
// configuration crypto/tls verifies chain and name itself.
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
	config := &tls.Config{
		// gRPC appends "h2"
		RootCAs: now.ca, Certificates: now.certificates, MinVersion: tls.VersionTLS13, NextProtos: c.protocols,
		Time: c.follower.Now,
	}
	return credentials.NewTLS(config).ClientHandshake(ctx, authority, conn)
}

// Clone implements credentials.TransportCredentials.
func (c clientCredentials) Clone() credentials.TransportCredentials { return c }
