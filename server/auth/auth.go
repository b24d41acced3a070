package auth

import (
	"context"
	"crypto/x509"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
)

// Options set up an Auth.
type Options struct {
	// Tokens reviews bearer tokens; nil: no token is accepted.
	Tokens *TokenReviewer
	// Logger gets refusals; required.
	Logger *slog.Logger
	// Registerer for metrics; required.
	Registerer prometheus.Registerer
}

// Auth knows who callers are and what they may do.
type Auth struct {
	tokens   *TokenReviewer
	refusals *refusals
}

// New makes an Auth.
func New(o Options) *Auth {
	return &Auth{tokens: o.Tokens, refusals: newRefusals(o.Registerer, o.Logger)}
}

// Authenticator tells who is behind a request. Its errors are gRPC statuses.
type Authenticator func(ctx context.Context) (Identity, error)

// Operator is the Authenticator for a way in that only operators have, or that asks nobody. It names them all user.
func Operator(user string) Authenticator {
	return func(context.Context) (Identity, error) { return Identity{User: user, Operator: true}, nil }
}

// Credentials is the Authenticator for gRPC requests over TLS: it goes by the client certificate, else by the bearer token.
func (a *Auth) Credentials(ctx context.Context) (Identity, error) {
	var chains [][]*x509.Certificate
	if p, ok := peer.FromContext(ctx); ok {
		if tls, ok := p.AuthInfo.(credentials.TLSInfo); ok {
			chains = tls.State.VerifiedChains
		}
	}
	return a.identify(ctx, chains, metadata.ValueFromIncomingContext(ctx, "authorization"))
}

// identify tells who a request comes from, by its verified certificate chains and its authorization headers.
func (a *Auth) identify(ctx context.Context, chains [][]*x509.Certificate, authorization []string) (Identity, error) {
	if len(chains) > 0 {
		certificate := chains[0][0]
		i, ok := certificateIdentity(certificate)
		if !ok {
			return Identity{}, a.refusals.refuse(ctx, reasonCertificate, codes.PermissionDenied,
				"the client certificate of %q is neither a node's (organization %s, common name %s<name>) nor an operator's (organization %s)",
				certificate.Subject, nodesGroup, nodeUserPrefix, mastersGroup)
		}
		return i, nil
	}
	if len(authorization) == 0 {
		return Identity{}, a.refusals.refuse(ctx, reasonNoCredentials, codes.Unauthenticated,
			"no credentials: use a client certificate, or send a ServiceAccount token as the bearer token")
	}
	token, ok := bearerToken(authorization[0])
	if !ok {
		return Identity{}, a.refusals.refuse(ctx, reasonToken, codes.Unauthenticated,
			"the authorization header holds no bearer token")
	}
	if a.tokens == nil {
		return Identity{}, a.refusals.refuse(ctx, reasonToken, codes.Unauthenticated,
			"this server takes no tokens (it has no --agent-service-account): use a client certificate")
	}
	verdict, err := a.tokens.review(ctx, token)
	if err != nil {
		return Identity{}, a.refusals.refuse(ctx, reasonReview, codes.Unavailable,
			"the API server could not be asked about the token: try again later: %v", err)
	}
	if verdict.refusal != "" {
		return Identity{}, a.refusals.refuse(ctx, verdict.reason, verdict.code, "%s", verdict.refusal)
	}
	return verdict.identity, nil
}

// bearerToken gives the token of an authorization header (RFC 6750).
func bearerToken(header string) (string, bool) {
	scheme, token, ok := strings.Cut(header, " ")
	token = strings.TrimSpace(token)
	return token, ok && strings.EqualFold(scheme, "Bearer") && token != ""
}

// Authorize tells whether the caller may be that node, or, if nodeName is "", an observer. Its error is a gRPC status.
func (a *Auth) Authorize(ctx context.Context, nodeName string) error {
	i, ok := identityOf(ctx)
	switch {
	case !ok: // a method that no interceptor guards would be a bug here; refuse rather than serve
		return a.refusals.refuse(ctx, reasonNoCredentials, codes.Unauthenticated, "no credentials")
	case i.Operator, nodeName != "" && i.Node == nodeName:
		return nil
	case nodeName == "":
		return a.refusals.refuse(ctx, reasonObserver, codes.PermissionDenied,
			"%s may not observe: give the name of its node (%s), or use the debug socket or a certificate of %s", i.User, i.Node, mastersGroup)
	default:
		return a.refusals.refuse(ctx, reasonOtherNode, codes.PermissionDenied,
			"%s is node %q, not %q: start the agent with the name of the Node that it runs on", i.User, i.Node, nodeName)
	}
}

// ServerOptions make a gRPC server that lets in whom authenticate knows, to every method.
func ServerOptions(authenticate Authenticator) []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.UnaryInterceptor(func(ctx context.Context, request any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
			i, err := authenticate(ctx)
			if err != nil {
				return nil, err
			}
			return handler(withIdentity(ctx, i), request)
		}),
		grpc.StreamInterceptor(func(server any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
			i, err := authenticate(stream.Context())
			if err != nil {
				return err
			}
			return handler(server, authenticated{stream, withIdentity(stream.Context(), i)})
		}),
	}
}

// authenticated is a stream whose context holds an identity.
type authenticated struct {
	grpc.ServerStream
	ctx context.Context
}

// Context implements grpc.ServerStream.
func (s authenticated) Context() context.Context { return s.ctx }

// Observers is the HTTP handler next for those who may observe, by the same credentials as on gRPC.
func (a *Auth) Observers(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx := r.Context()
		if from, err := netip.ParseAddrPort(r.RemoteAddr); err == nil {
			ctx = peer.NewContext(ctx, &peer.Peer{Addr: net.TCPAddrFromAddrPort(from)})
		}
		var chains [][]*x509.Certificate
		if r.TLS != nil {
			chains = r.TLS.VerifiedChains
		}
		i, err := a.identify(ctx, chains, r.Header.Values("Authorization"))
		if err == nil {
			err = a.Authorize(withIdentity(ctx, i), "")
		}
		if err != nil {
			http.Error(w, status.Convert(err).Message(), httpStatus(err))
			return
		}
		next.ServeHTTP(w, r)
	})
}

func httpStatus(err error) int {
	switch status.Code(err) {
	case codes.Unauthenticated:
		return http.StatusUnauthorized
	case codes.PermissionDenied:
		return http.StatusForbidden
	default:
		return http.StatusServiceUnavailable
	}
}
