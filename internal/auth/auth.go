package auth

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
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
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/slicecast/slicecast/internal/refusals"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// Options configures an Auth.
type Options struct {
	// Program is the part of the names of metrics that says whose they are: server or agent.
	Program string
	// ClientCAFlag and TokenFlags are the flags for client certificates and for tokens, for
	// messages.
	ClientCAFlag, TokenFlags string
	// Diagnosis is the command that shows whether the API server answers, for messages. Empty means
	// that there is none.
	Diagnosis string
	// Tokens configures the review of bearer tokens. nil means that no token is accepted.
	Tokens *TokenOptions
	// KnownNode reports whether a Node of that name exists. It is required if Tokens has agents.
	KnownNode func(name string) bool
	// VerifyClient returns an error if the client certificate of a page's reader, which was verified
	// when the reader connected, is not accepted any more. nil means that it still is.
	VerifyClient func(chain []*x509.Certificate) error
	// Now returns the time by which tokens expire. nil means time.Now.
	Now func() time.Time
	// Refused is called with the context of a gRPC call whose caller is known and may not do what
	// it asks for. nil means nothing.
	Refused func(context.Context)
	// Logger receives refusals. It is required.
	Logger *slog.Logger
	// Registerer registers the metrics. It is required.
	Registerer prometheus.Registerer
}

// Auth identifies callers and decides what they may do.
type Auth struct {
	options  Options
	tokens   *tokenReviewer // nil if no token is accepted
	refusals *refusals.Counter
}

// New returns an Auth.
func New(o Options) *Auth {
	a := &Auth{options: o, refusals: newRefusals(o.Registerer, o.Logger, o.Program)}
	reviews := newReviewsCounter(o.Registerer, o.Program)
	if o.Tokens != nil {
		a.tokens = newTokenReviewer(*o.Tokens, o.KnownNode, reviews)
		if o.Now != nil {
			a.tokens.now = o.Now
		}
	}
	return a
}

// Authenticator returns the identity behind a call of a gRPC method. Its errors are gRPC statuses.
type Authenticator func(ctx context.Context, method string) (Identity, error)

// Operator returns an Authenticator for a listener that only operators can reach, or that asks for
// no credentials. It names all callers user.
func Operator(user string) Authenticator {
	return func(context.Context, string) (Identity, error) { return Identity{User: user, Operator: true}, nil }
}

// Credentials is the Authenticator for gRPC requests over TLS. It uses the client certificate if
// there is one, and the bearer token otherwise.
func (a *Auth) Credentials(ctx context.Context, method string) (Identity, error) {
	var certificates []*x509.Certificate
	if p, ok := peer.FromContext(ctx); ok {
		if tls, ok := p.AuthInfo.(credentials.TLSInfo); ok {
			certificates = tls.State.PeerCertificates
		}
	}
	// A call of gRPC is a POST request for the method's path.
	post := access{verb: "post", path: method}
	return a.identify(ctx, post, certificates, metadata.ValueFromIncomingContext(ctx, "authorization"))
}

// identify returns the identity behind a request with these certificates of a client and
// authorization headers. The certificates are verified: TLS with an unverified one is only possible
// in internal/tlsfiles, which completes no handshake with it.
func (a *Auth) identify(
	ctx context.Context, request access, certificates []*x509.Certificate, authorization []string,
) (Identity, error) {
	if len(certificates) > 0 {
		certificate := certificates[0]
		i, ok := certificateIdentity(certificate)
		if !ok {
			return Identity{}, a.refuse(ctx, reasonCertificate, codes.PermissionDenied,
				"the client certificate of %q has no role: use one of a node (organization %s, common name %s<name>), "+
					"a relay (%s), an observer (%s) or an operator (%s)",
				certificate.Subject, nodesGroup, nodeUserPrefix, relaysGroup, observersGroup, mastersGroup)
		}
		return i, nil
	}
	if len(authorization) == 0 {
		return Identity{}, a.refuse(ctx, reasonNoCredentials, codes.Unauthenticated,
			"no credentials: use a client certificate of a CA in %s (TLS clients do not send others), or send a "+
				"ServiceAccount token as the bearer token", a.options.ClientCAFlag)
	}
	token, ok := bearerToken(authorization[0])
	if !ok {
		return Identity{}, a.refuse(ctx, reasonToken, codes.Unauthenticated,
			"the authorization header contains no bearer token")
	}
	if a.tokens == nil {
		return Identity{}, a.refuse(ctx, reasonToken, codes.Unauthenticated,
			"tokens are not accepted without %s: use a client certificate", a.options.TokenFlags)
	}
	verdict, err := a.tokens.review(ctx, token, request)
	if err != nil {
		return Identity{}, a.refuse(ctx, reasonReview, codes.Unavailable, "%s", a.unreviewed(err))
	}
	if verdict.refusal != "" {
		err := a.refuse(ctx, verdict.reason, verdict.code, "%s", verdict.refusal)
		if verdict.retry > 0 { // spreads the retries
			err = wire.RetryLater(err, verdict.retry/2+rand.N(verdict.retry))
		}
		return Identity{}, err
	}
	return verdict.identity, nil
}

// unreviewed returns the message for a caller whose token was not reviewed because of err.
func (a *Auth) unreviewed(err error) string {
	if answer := apierrors.APIStatus(nil); errors.As(err, &answer) {
		return fmt.Sprintf("the API server did not review the token, try again later: %v", err)
	}
	text := fmt.Sprintf("this %s cannot reach the API server to have the token reviewed: %v; try again later",
		a.options.Program, err)
	if a.options.Diagnosis != "" {
		text += ", or find out why with: " + a.options.Diagnosis
	}
	return text
}

func bearerToken(header string) (string, bool) {
	scheme, token, ok := strings.Cut(header, " ")
	token = strings.TrimSpace(token)
	return token, ok && strings.EqualFold(scheme, "Bearer") && token != ""
}

// Authorize checks whether the caller may stream as the agent of nodeName, as a relay, or as an
// observer. nodeName may be the Node that an observer follows. Authorize returns the caller's name,
// which is the same for a node's certificate and its token, and when the caller's credentials
// expire. The zero time means never. The error is a gRPC status.
func (a *Auth) Authorize(ctx context.Context, kind pb.ClientKind, nodeName string) (user string, until time.Time, err error) {
	i, ok := identityOf(ctx)
	// Only a bug can leave a method without an interceptor. Refuse rather than serve.
	if !ok {
		return "", time.Time{}, a.refuse(ctx, reasonNoCredentials, codes.Unauthenticated, "no credentials")
	}
	user = i.Name()
	if kind == pb.ClientKind_CLIENT_KIND_AGENT && !i.Operator {
		user = nodeUserPrefix + i.Node
	}
	return user, i.Until, a.refused(ctx, a.stream(ctx, i, kind, nodeName))
}

// refused calls Options.Refused if err is set, and returns err.
func (a *Auth) refused(ctx context.Context, err error) error {
	if err != nil && a.options.Refused != nil {
		a.options.Refused(ctx)
	}
	return err
}

func (a *Auth) stream(ctx context.Context, i Identity, kind pb.ClientKind, nodeName string) error {
	switch kind {
	case pb.ClientKind_CLIENT_KIND_AGENT:
		if i.Operator || i.Node != "" && i.Node == nodeName {
			return nil
		}
		if i.Node == "" {
			return a.refuse(ctx, reasonOtherNode, codes.PermissionDenied,
				"%s is not a node and cannot be the agent of node %q: use the node's client certificate "+
					"(organization %s) or a token of the agent's ServiceAccount", i.User, nodeName, nodesGroup)
		}
		return a.refuse(ctx, reasonOtherNode, codes.PermissionDenied,
			"%s is node %q and cannot be the agent of node %q: set the agent's --node-name to the Node that it runs on",
			i.User, i.Node, nodeName)
	case pb.ClientKind_CLIENT_KIND_RELAY:
		if i.Operator || i.Relay {
			return nil
		}
		return a.refuse(ctx, reasonRelay, codes.PermissionDenied,
			"%s may not be a relay: use a client certificate of the organization %s, or start the server with "+
				"--relay-service-account set to the relay's ServiceAccount", i.User, relaysGroup)
	default:
		return a.observe(ctx, i, "observe", orDebugSocket)
	}
}

// orDebugSocket completes the error of observe where the debug socket answers the same.
const orDebugSocket = ", or the server's debug socket"

// observe returns an error unless a caller may see everything. action is what the caller attempted,
// and or another way to do it.
func (a *Auth) observe(ctx context.Context, i Identity, action, or string) error {
	if i.Operator || i.Observer {
		return nil
	}
	return a.refuse(ctx, reasonObserver, codes.PermissionDenied,
		"%s is not allowed to %s: use a client certificate of the organization %s, or the token of a ServiceAccount "+
			"that the API server allows it to%s",
		i.User, action, observersGroup, or)
}

// open are the methods that every identified caller may call. The handlers of streams call
// Authorize once they know which role the client wants. An entry that ends with a slash stands for
// all methods of a service.
var open = []string{
	pb.DistributionService_Stream_FullMethodName,
	"/" + healthpb.Health_ServiceDesc.ServiceName + "/",
}

// Enter returns a stream's context with the caller's identity. It is for transports that have no
// interceptors.
func (a *Auth) Enter(ctx context.Context, authenticate Authenticator) (context.Context, error) {
	return a.enter(ctx, authenticate, pb.DistributionService_Stream_FullMethodName)
}

// enter returns ctx with the identity of a caller, if it may call the method.
func (a *Auth) enter(ctx context.Context, authenticate Authenticator, method string) (context.Context, error) {
	i, err := authenticate(ctx, method)
	if err != nil {
		return nil, err
	}
	isOpen := func(p string) bool { return method == p || strings.HasSuffix(p, "/") && strings.HasPrefix(method, p) }
	if !slices.ContainsFunc(open, isOpen) {
		if err := a.refused(ctx, a.observe(ctx, i, "call "+method, orDebugSocket)); err != nil {
			return nil, err
		}
	}
	return withIdentity(ctx, i), nil
}

// ServerOptions returns options for a gRPC server that admits callers whom authenticate identifies.
// All of them may call streams and health checks. Other methods are for callers who may observe.
func (a *Auth) ServerOptions(authenticate Authenticator) []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.UnaryInterceptor(func(
			ctx context.Context, request any, call *grpc.UnaryServerInfo, handler grpc.UnaryHandler,
		) (any, error) {
			ctx, err := a.enter(ctx, authenticate, call.FullMethod)
			if err != nil {
				return nil, err
			}
			return handler(ctx, request)
		}),
		grpc.StreamInterceptor(func(
			server any, stream grpc.ServerStream, call *grpc.StreamServerInfo, handler grpc.StreamHandler,
		) error {
			ctx, err := a.enter(stream.Context(), authenticate, call.FullMethod)
			if err != nil {
				return err
			}
			return handler(server, authenticated{stream, ctx})
		}),
	}
}

type authenticated struct {
	grpc.ServerStream
	ctx context.Context
}

// Context implements grpc.ServerStream.
func (s authenticated) Context() context.Context { return s.ctx }

// Observers wraps the HTTP handler of a page for callers who may observe. It uses the same
// credentials as gRPC. Each path and method has a verdict of its own, for which the API server may
// be asked. So put it around pages that exist, not around a ServeMux.
func (a *Auth) Observers(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx := r.Context()
		if from, err := netip.ParseAddrPort(r.RemoteAddr); err == nil {
			ctx = peer.NewContext(ctx, &peer.Peer{Addr: net.TCPAddrFromAddrPort(from)})
		}
		var certificates []*x509.Certificate
		if r.TLS != nil {
			certificates = r.TLS.PeerCertificates
		}
		request := access{verb: strings.ToLower(r.Method), path: r.URL.Path}
		var i Identity
		var err error
		if len(certificates) > 0 && a.options.VerifyClient != nil {
			err = a.options.VerifyClient(certificates)
		}
		if err != nil {
			err = a.refuse(ctx, reasonCertificate, codes.Unauthenticated, "the client certificate is not valid any more: %v", err)
		} else if i, err = a.identify(ctx, request, certificates, r.Header.Values("Authorization")); err == nil {
			err = a.observe(ctx, i, "read this page", "")
		}
		if err != nil {
			// The client's next attempt then costs it a handshake.
			w.Header().Set("Connection", "close")
			if after := wire.RetryAfter(err); after > 0 {
				w.Header().Set("Retry-After", strconv.Itoa(int(math.Ceil(after.Seconds()))))
			}
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
