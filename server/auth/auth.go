package auth

import (
	"context"
	"crypto/x509"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
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
	reviews := newReviewsCounter(o.Registerer)
	if o.Tokens != nil {
		o.Tokens.reviews = reviews
	}
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
				"the client certificate of %q is neither a node's (organization %s, common name %s<name>), nor a relay's (%s), "+
					"nor an observer's (%s), nor an operator's (%s)",
				certificate.Subject, nodesGroup, nodeUserPrefix, relaysGroup, observersGroup, mastersGroup)
		}
		return i, nil
	}
	if len(authorization) == 0 {
		return Identity{}, a.refusals.refuse(ctx, reasonNoCredentials, codes.Unauthenticated,
			"no credentials: use a client certificate (one that is not of a CA in the server's --client-ca-file does not even get sent), "+
				"or send a ServiceAccount token as the bearer token")
	}
	token, ok := bearerToken(authorization[0])
	if !ok {
		return Identity{}, a.refusals.refuse(ctx, reasonToken, codes.Unauthenticated,
			"the authorization header holds no bearer token")
	}
	if a.tokens == nil {
		return Identity{}, a.refusals.refuse(ctx, reasonToken, codes.Unauthenticated,
			"this server takes no tokens (it has neither --agent-service-account nor --relay-service-account): use a client certificate")
	}
	verdict, err := a.tokens.review(ctx, token)
	if err != nil {
		return Identity{}, a.refusals.refuse(ctx, reasonReview, codes.Unavailable,
			"the API server could not be asked about the token: try again later: %v", err)
	}
	if verdict.refusal != "" {
		err := a.refusals.refuse(ctx, verdict.reason, verdict.code, "%s", verdict.refusal)
		if verdict.retry > 0 { // not all come at the same time
			err = wire.RetryLater(err, verdict.retry/2+rand.N(verdict.retry))
		}
		return Identity{}, err
	}
	return verdict.identity, nil
}

// bearerToken gives the token of an authorization header (RFC 6750).
func bearerToken(header string) (string, bool) {
	scheme, token, ok := strings.Cut(header, " ")
	token = strings.TrimSpace(token)
	return token, ok && strings.EqualFold(scheme, "Bearer") && token != ""
}

// Authorize tells whether the caller may stream as the agent of that node, as a relay, or else as
// an observer, be it one that follows a node's Node, who that is, and until when; zero: for ever. A
// node has one name, whether it has shown a certificate or a token. The error is a gRPC status.
func (a *Auth) Authorize(ctx context.Context, kind pb.ClientKind, nodeName string) (user string, until time.Time, err error) {
	i, ok := identityOf(ctx)
	if !ok { // a method that no interceptor guards would be a bug here; refuse rather than serve
		return "", time.Time{}, a.refusals.refuse(ctx, reasonNoCredentials, codes.Unauthenticated, "no credentials")
	}
	user = i.Name()
	if kind == pb.ClientKind_CLIENT_KIND_AGENT && !i.Operator {
		user = nodeUserPrefix + i.Node
	}
	return user, i.Until, a.stream(ctx, i, kind, nodeName)
}

func (a *Auth) stream(ctx context.Context, i Identity, kind pb.ClientKind, nodeName string) error {
	switch kind {
	case pb.ClientKind_CLIENT_KIND_AGENT:
		if i.Operator || i.Node != "" && i.Node == nodeName {
			return nil
		}
		if i.Node == "" {
			return a.refusals.refuse(ctx, reasonOtherNode, codes.PermissionDenied, "%s is no node, so it can't be the agent of node %q: "+
				"use a certificate of the node's (organization %s) or a token of the agent's ServiceAccount", i.User, nodeName, nodesGroup)
		}
		return a.refusals.refuse(ctx, reasonOtherNode, codes.PermissionDenied,
			"%s is node %q, not %q: start the agent with the name of the Node that it runs on", i.User, i.Node, nodeName)
	case pb.ClientKind_CLIENT_KIND_RELAY:
		if i.Operator || i.Relay {
			return nil
		}
		return a.refusals.refuse(ctx, reasonRelay, codes.PermissionDenied,
			"%s may not be a relay: use a certificate of the organization %s, or start this server with the relay's --relay-service-account",
			i.User, relaysGroup)
	default:
		return a.observe(ctx, i, "observe, but on the debug socket")
	}
}

// observe tells whether a caller may look at everything, for what it says.
func (a *Auth) observe(ctx context.Context, i Identity, what string) error {
	if i.Operator || i.Observer {
		return nil
	}
	return a.refusals.refuse(ctx, reasonObserver, codes.PermissionDenied,
		"%s is not allowed to %s: use a certificate of the organization %s", i.User, what, observersGroup)
}

// open are the methods for everyone whom the server knows; those of streams ask Authorize when they know what the client
// wants to be. Prefixes that end with a slash stand for all methods of a service.
var open = []string{
	pb.DistributionService_Stream_FullMethodName,
	"/" + healthpb.Health_ServiceDesc.ServiceName + "/",
}

// Enter gives the context of a stream, for a transport that has no interceptors: it says who is behind it.
func (a *Auth) Enter(ctx context.Context, authenticate Authenticator) (context.Context, error) {
	return a.enter(ctx, authenticate, pb.DistributionService_Stream_FullMethodName)
}

// enter tells who is behind a call of a method, if it may call it.
func (a *Auth) enter(ctx context.Context, authenticate Authenticator, method string) (context.Context, error) {
	i, err := authenticate(ctx)
	if err != nil {
		return nil, err
	}
	if !slices.ContainsFunc(open, func(p string) bool { return method == p || strings.HasSuffix(p, "/") && strings.HasPrefix(method, p) }) {
		if err := a.observe(ctx, i, "call "+method+", but on the debug socket"); err != nil {
			return nil, err
		}
	}
	return withIdentity(ctx, i), nil
}

// ServerOptions make a gRPC server that lets in whom authenticate knows: to streams and health checks all of them, to any
// other method those who may observe.
func (a *Auth) ServerOptions(authenticate Authenticator) []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.UnaryInterceptor(func(ctx context.Context, request any, call *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
			ctx, err := a.enter(ctx, authenticate, call.FullMethod)
			if err != nil {
				return nil, err
			}
			return handler(ctx, request)
		}),
		grpc.StreamInterceptor(func(server any, stream grpc.ServerStream, call *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
			ctx, err := a.enter(stream.Context(), authenticate, call.FullMethod)
			if err != nil {
				return err
			}
			return handler(server, authenticated{stream, ctx})
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
			err = a.observe(ctx, i, "look at this page")
		}
		if err != nil {
			w.Header().Set("Connection", "close") // the next try costs its client a handshake
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
	case codes.ResourceExhausted:
		return http.StatusTooManyRequests
	default:
		return http.StatusServiceUnavailable
	}
}
