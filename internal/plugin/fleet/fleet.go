// Package fleet finds the servers and relays of a cluster and asks all of them, with the rights of
// whoever runs the command.
//
// A user has a kubeconfig and RBAC, and neither a client certificate for the servers nor a network
// to them. So each server is reached through a port-forward. The user requests a short-lived token
// of the ServiceAccount slicecast-viewer for it, with the audience of that tier of servers. A
// server asks the API server whether the token's ServiceAccount may call the method (see
// internal/auth). The user's own credentials are shown to the API server only.
//
// A server's certificate is verified as agents do it: against the CAs that are published in a
// ConfigMap, for the name that the servers' Service has. The server's Pod has this in its command
// line.
package fleet

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/version"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/slicecast/slicecast/internal/plugin/redact"
	"github.com/slicecast/slicecast/internal/source/kube"
	"github.com/slicecast/slicecast/internal/tlsfiles"
	"github.com/slicecast/slicecast/internal/wire"
)

// parallel is how many servers are asked at the same time.
const parallel = 32

// maxRetryDelay is how long a server that has not been reached is not tried again.
const maxRetryDelay = 2 * time.Second

// A server that asks for it is asked again, at most attempts times in all, and not sooner than
// after minRetryDelay.
const (
	attempts      = 8
	minRetryDelay = 100 * time.Millisecond
)

// ErrNoServers means that no Pod has the labels of a server.
var ErrNoServers = errors.New("no servers")

// errTerminating is why a Pod that is being deleted is not asked. Its clients move to others.
var errTerminating = errors.New("the Pod is being deleted")

// Options configures a Fleet.
type Options struct {
	// Config is the user's configuration for the API server.
	Config *rest.Config
	// Namespace is that of the servers. Empty means all namespaces. Then everybody who may create a
	// Pod in one of them can pretend to be a server.
	Namespace string
	// ServiceAccount is the one whose tokens the servers are shown; it is in the namespace of each
	// server.
	ServiceAccount string
	// Timeout bounds each request to the API server, and each question to a server.
	Timeout time.Duration
	// Logger is told at the level info who was asked and how long that took, and at the level debug
	// of each request to the API server. It is required.
	Logger *slog.Logger
}

// Fleet reaches the servers of a cluster. Its methods may be called at any time.
type Fleet struct {
	options Options
	client  kubernetes.Interface
	tokens  *tokens

	mu sync.Mutex // guards conns
	// conns are the connections to servers, by the UIDs of their Pods.
	conns map[types.UID]*connection
}

// connection is a connection to a server.
type connection struct {
	*grpc.ClientConn

	mu    sync.Mutex // guards chain
	chain []*x509.Certificate
}

// New returns a Fleet. The caller must close it.
func New(o Options) (*Fleet, error) {
	config := rest.CopyConfig(o.Config)
	config.QPS = -1 // parallel bounds the requests
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return logged{next, o.Logger} })
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("client for the API server: %w", err)
	}
	o.Config = config
	f := &Fleet{options: o, client: client, conns: make(map[types.UID]*connection)}
	f.tokens = newTokens(client, o.ServiceAccount, o.Timeout)
	return f, nil
}

// Within makes a request to the API server. After the timeout it ends with an error that says so.
func Within[T any](ctx context.Context, f *Fleet, request func(context.Context) (T, error)) (T, error) {
	ctx, cancel := f.bound(ctx)
	defer cancel()
	value, err := request(ctx)
	if err != nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	return value, err
}

// List is [Within] with the method List of a client for the API server.
func List[T any](ctx context.Context, f *Fleet, list func(context.Context, metav1.ListOptions) (T, error), o metav1.ListOptions) (T, error) {
	return Within(ctx, f, func(ctx context.Context) (T, error) { return list(ctx, o) })
}

// ErrTimeout means that something has not answered within Options.Timeout.
var ErrTimeout = errors.New("no answer")

// bound returns ctx with the timeout.
func (f *Fleet) bound(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, f.options.Timeout, fmt.Errorf("%w within %v (--timeout)", ErrTimeout, f.options.Timeout))
}

// APIServer is what the API server says of itself.
type APIServer struct {
	// Version is that of Kubernetes, such as v1.37.2.
	Version string
	// Ahead is by how much its clock is ahead of this machine's, to within a second.
	Ahead time.Duration
}

// APIServer asks the API server for its version and the time.
func (f *Fleet) APIServer(ctx context.Context) (out APIServer, err error) {
	core, now, err := kube.Core(f.options.Config)
	if err != nil {
		return out, err
	}
	raw, err := Within(ctx, f, func(ctx context.Context) ([]byte, error) { return core.Get().AbsPath("/version").Do(ctx).Raw() })
	if err != nil {
		return out, fmt.Errorf("ask the API server for its version: %w", err)
	}
	var info version.Info
	if err := json.Unmarshal(raw, &info); err != nil {
		return out, fmt.Errorf("the version of the API server: %w", err)
	}
	return APIServer{Version: info.GitVersion, Ahead: time.Until(now())}, nil
}

// Secrets returns the user's own credentials, which must be in no output. Files that cannot be read
// have given none to the client either. What a credential plugin prints is not among them.
func (f *Fleet) Secrets() []string {
	c := f.options.Config
	all := []string{c.BearerToken, c.Password, string(c.KeyData)}
	for _, file := range []string{c.BearerTokenFile, c.KeyFile} {
		if content, err := os.ReadFile(file); err == nil {
			all = append(all, string(content))
		}
	}
	if c.ExecProvider != nil {
		for _, e := range c.ExecProvider.Env {
			if redact.IsSecret(e.Name, e.Value) {
				all = append(all, e.Value)
			}
		}
	}
	if c.AuthProvider != nil {
		for name, value := range c.AuthProvider.Config {
			if redact.IsSecret(name, value) {
				all = append(all, value)
			}
		}
	}
	return all
}

// Client returns the client for the API server.
func (f *Fleet) Client() kubernetes.Interface { return f.client }

// Close closes all connections.
func (f *Fleet) Close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, c := range f.conns {
		_ = c.Close() // fails only if it is closed already
	}
	clear(f.conns)
}

// Answer is what a server has answered.
type Answer[T any] struct {
	Server *Server
	// Value is the answer. It is not valid if Err is set.
	Value T
	// Err is why there is no answer.
	Err error
	// Sent and Received say when the server was asked and when it answered, by this machine's
	// clock.
	Sent, Received time.Time
}

// Ask asks servers in parallel, and returns an answer for each of them, in the same order. Servers
// that do not answer in time have an error.
func Ask[T any](
	ctx context.Context, f *Fleet, servers []*Server, ask func(context.Context, *grpc.ClientConn) (T, error),
) []Answer[T] {
	f.forget(servers)
	answers := make([]Answer[T], len(servers))
	var all errgroup.Group
	all.SetLimit(parallel)
	for i, s := range servers {
		all.Go(func() error {
			a := &answers[i]
			a.Server = s
			ctx, cancel := f.bound(ctx)
			defer cancel()
			began := time.Now()
			a.Err = explain(ctx, insist(ctx, func() error { return askOnce(ctx, f, a, ask) }))
			if errors.Is(a.Err, ErrTimeout) {
				a.Err = fmt.Errorf("%w, although the Pod runs: the server or its node hangs, or the way to it does; see kubectl logs -n %s %s", a.Err, s.Namespace, s.Name)
			}
			f.options.Logger.Info("Asked a server", "server", s, "took", time.Since(began), "err", a.Err)
			return nil
		})
	}
	_ = all.Wait() // the errors are in the answers
	return answers
}

// askOnce asks the server of an answer.
func askOnce[T any](
	ctx context.Context, f *Fleet, a *Answer[T], ask func(context.Context, *grpc.ClientConn) (T, error),
) error {
	conn, err := f.connect(ctx, a.Server)
	if err != nil {
		return err
	}
	call := ctx
	if !a.Server.plaintext {
		if call, err = f.authenticate(ctx, a.Server); err != nil {
			return err
		}
	}
	a.Sent = time.Now()
	a.Value, err = ask(call, conn)
	a.Received = time.Now()
	return err
}

// insist asks until a server does not ask it to come back later, at most attempts times. If ctx
// ends before the server wants it back, insist returns the server's answer at once.
func insist(ctx context.Context, ask func() error) error {
	for n := 1; ; n++ {
		err := ask()
		delay := retryDelay(err)
		if end, ok := ctx.Deadline(); delay == 0 || n == attempts || ok && time.Until(end) <= delay {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(delay):
		}
	}
}

// retryDelay returns when a server that has no room now wants to be asked again. It returns 0 if
// the server does not want that.
func retryDelay(err error) time.Duration {
	delay := wire.RetryAfter(err)
	if delay == 0 || status.Code(err) != codes.ResourceExhausted {
		return 0
	}
	return max(delay, minRetryDelay)
}

// explain returns an error without gRPC's prefix. If ctx has ended, it returns the reason.
func explain(ctx context.Context, err error) error {
	switch s, ok := status.FromError(err); {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case ok && s.Code() == codes.Unimplemented:
		return errors.New("this version of the server does not answer that: upgrade it")
	case ok && s.Code() != codes.Unknown:
		return errors.New(s.Message())
	}
	return err
}

// forget closes the connections to other servers than these, such as to those whose Pods are gone.
func (f *Fleet) forget(but []*Server) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for uid, c := range f.conns {
		if !slices.ContainsFunc(but, func(s *Server) bool { return s.UID == uid }) {
			_ = c.Close() // fails only if it is closed already
			delete(f.conns, uid)
		}
	}
}

// connect returns a connection to a server. It is not established before it is used.
func (f *Fleet) connect(ctx context.Context, s *Server) (*grpc.ClientConn, error) {
	if s.missing != nil {
		return nil, s.missing
	}
	f.mu.Lock()
	c, ok := f.conns[s.UID]
	f.mu.Unlock()
	if ok {
		return c.ClientConn, nil
	}
	c = &connection{}
	retry := backoff.DefaultConfig
	retry.MaxDelay = maxRetryDelay
	options := []grpc.DialOption{
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return forward(ctx, f.options.Config, s.Namespace, s.Name, s.port)
		}),
		grpc.WithDisableServiceConfig(), grpc.WithConnectParams(grpc.ConnectParams{
			// Whoever asks does not wait as long, and gets to know that.
			Backoff: retry, MinConnectTimeout: 2 * f.options.Timeout,
		}),
	}
	if s.plaintext {
		options = append(options, grpc.WithTransportCredentials(insecure.NewCredentials()))
	} else {
		pool, err := f.pool(ctx, s.ca)
		if err != nil {
			return nil, err
		}
		options = append(options,
			grpc.WithTransportCredentials(credentials.NewTLS(tlsfiles.ClientConfig(pool, s.serverName, nil, c.keepChain))))
	}
	var err error
	if c.ClientConn, err = grpc.NewClient("passthrough:///"+s.String(), options...); err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.conns[s.UID] = c
	return c.ClientConn, nil
}

// authenticate returns ctx with a token for calls of a server with TLS.
func (f *Fleet) authenticate(ctx context.Context, s *Server) (context.Context, error) {
	token, err := f.tokens.get(ctx, s.Namespace, s.audience)
	return metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token), err
}

// keepChain keeps the certificates of a server that has been verified.
func (c *connection) keepChain(chain []*x509.Certificate) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.chain = chain
}

// Chain returns the certificates with which a server was verified, its own first, or nil if there
// was no TLS connection to it.
func (f *Fleet) Chain(s *Server) []*x509.Certificate {
	f.mu.Lock()
	c, ok := f.conns[s.UID]
	f.mu.Unlock()
	if !ok {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.chain
}
