package app

import (
	"context"
	"crypto/tls"
	"net"

	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
	"github.com/slicecast/slicecast/server/auth"
	"github.com/slicecast/slicecast/server/fanout"
	"github.com/slicecast/slicecast/server/h2"
)

// addTLS serves gRPC over TLS: agents' streams by the lean server, everything else by grpc-go.
func (s *Server) addTLS(l net.Listener, config *tls.Config, authentication *auth.Auth) net.Addr {
	c := s.config
	s.lean = h2.New(h2.Options{
		Path: pb.DistributionService_Stream_FullMethodName,
		Open: func(stream *h2.Stream) (h2.Session, error) {
			ctx, err := authentication.Enter(stream.Context(), authentication.Credentials)
			if err != nil {
				return nil, err
			}
			return s.hub.Open(leanTransport{stream, ctx}), nil
		},
		MaxReceive: maxReceived, MaxHeaderBytes: maxHeaderBytes, PingInterval: pingInterval, PingTimeout: pingTimeout,
		MinClientPing: minClientPing, MaxIdle: maxLeanIdle, Logger: c.Logger, Registerer: c.Registry,
	})
	s.mux = h2.NewMux(h2.MuxOptions{
		Listener: l, TLS: config, Server: s.lean, HandshakeTimeout: handshakeTimeout,
		MaxStrangers: maxStrangers, MaxStrangersPerAddress: maxStrangersPerAddress, Logger: c.Logger, Registerer: c.Registry,
	})
	s.addGRPC("gRPC", s.mux.GRPC(), s.newGRPC(h2.Credentials(), authentication, authentication.Credentials))
	s.parts = append(s.parts, part{"TLS", l, func(context.Context, net.Listener) error {
		return s.mux.Serve()
	}})
	return l.Addr()
}

// leanTransport is a stream of the lean server whose context says who is behind it.
type leanTransport struct {
	*h2.Stream
	ctx context.Context
}

var _ fanout.Transport = leanTransport{}

// Context implements fanout.Transport.
func (t leanTransport) Context() context.Context { return t.ctx }
