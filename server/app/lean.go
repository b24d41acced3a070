package app

import (
	"context"
	"crypto/tls"
	"net"

	"github.com/slicecast/slicecast/internal/auth"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
	"github.com/slicecast/slicecast/server/fanout"
	"github.com/slicecast/slicecast/server/h2"
)

// addTLS adds gRPC over TLS on a listener, whose address it returns. The lean server serves agents'
// streams, and grpc-go serves everything else.
func (s *Server) addTLS(l net.Listener, config *tls.Config, authentication *auth.Auth) net.Addr {
	c := s.config
	s.lean = h2.New(h2.Options{
		Path: pb.DistributionService_Stream_FullMethodName,
		Open: func(stream *h2.Stream) (h2.Session, error) {
			ctx, err := authentication.Enter(stream.Context(), admit(authentication.Credentials, leanCaller))
			if err != nil {
				return nil, err
			}
			return s.hub.Open(leanTransport{stream, ctx}), nil
		},
		MaxReceive: maxReceived, MaxHeaderBytes: maxHeaderBytes, PingInterval: pingInterval, PingTimeout: pingTimeout,
		MinClientPing: minClientPing, MaxIdle: maxLeanIdle, Logger: c.Logger, Registerer: c.Registry,
	})
	s.mux = h2.NewMux(h2.MuxOptions{
		Listener: l, TLS: config, Server: s.lean, StrangerTimeout: strangerTimeout, MaxIdle: maxRefusedIdle,
		MaxStrangersOfNodes: maxStrangersOfNodes, MaxStrangers: maxStrangers, MaxStrangersPerAddress: maxStrangersPerAddress,
		NodeAddress: s.store.HasNodeAddress, Logger: c.Logger, Registerer: c.Registry,
	})
	s.addGRPC("gRPC", s.mux.GRPC(), s.newGRPC(h2.Credentials(), authentication, admit(authentication.Credentials, caller)))
	s.parts = append(s.parts, part{name: "TLS", listener: l, serve: func(context.Context, net.Listener) error { return s.mux.Serve() }})
	return l.Addr()
}

// admit returns an Authenticator that admits a call if authenticate accepts its caller, and if the
// caller's bounds allow it.
func admit(authenticate auth.Authenticator, caller func(auth.Identity) h2.Caller) auth.Authenticator {
	return func(ctx context.Context, method string) (auth.Identity, error) {
		connection, ctx := h2.ConnectionOf(ctx)
		var identity auth.Identity
		err := connection.Enter(ctx, func() (_ h2.Caller, err error) {
			identity, err = authenticate(ctx, method)
			return caller(identity), err
		})
		return identity, err
	}
}

// refused counts a refused call of a known caller for its connection, so that the caller pays for
// further ones with handshakes.
func refused(ctx context.Context) {
	if connection, _ := h2.ConnectionOf(ctx); connection != nil {
		connection.Refuse()
	}
}

// caller returns whom a call is counted for. Operators are not bounded, as they may do anything.
func caller(i auth.Identity) h2.Caller {
	switch {
	case i.Operator:
		return h2.Caller{}
	// This includes callers by certificate or token, whatever other roles they have.
	case i.Node != "":
		return h2.Caller{Name: "node " + i.Node, MaxConnections: maxNodeConnections, Displace: true, MaxCalls: maxNodeCalls}
	default:
		return h2.Caller{Name: "user " + i.Name(), MaxConnections: maxUserConnections, MaxCalls: maxUserCalls}
	}
}

// leanCaller is caller for the lean server. It does not count calls, as a connection of the lean
// server has one stream. Calls on the other server thus do not affect it.
func leanCaller(i auth.Identity) h2.Caller {
	c := caller(i)
	c.MaxCalls = 0
	return c
}

// leanTransport is a stream of the lean server whose context carries the caller's identity.
type leanTransport struct {
	*h2.Stream
	ctx context.Context
}

var _ fanout.Transport = leanTransport{}

// Context implements fanout.Transport.
func (t leanTransport) Context() context.Context { return t.ctx }
