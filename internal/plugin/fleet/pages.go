package fleet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"time"

	"github.com/slicecast/slicecast/internal/tlsfiles"
)

// errNoPages is why a server without a port for metrics has no page.
var errNoPages = errors.New("it serves no page: start it with --metrics-bind-address")

// idlePages is how long a connection for pages may be without a request.
const idlePages = time.Minute

// Pages reaches what a server serves over HTTP, where it serves its metrics.
type Pages struct {
	// Base is the address to make requests to. Its host is only a name.
	Base *url.URL

	fleet     *Fleet
	server    *Server
	transport *http.Transport
}

// Pages returns the pages of a server. Connections to it are made by the first requests. The caller
// must close it.
func (f *Fleet) Pages(ctx context.Context, s *Server) (*Pages, error) {
	switch {
	case s.missing != nil:
		return nil, s.missing
	case s.pagesPort == 0:
		return nil, errNoPages
	}
	p := &Pages{Base: &url.URL{Scheme: "http", Host: s.Name}, fleet: f, server: s, transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return forward(ctx, f.options.Config, s.Namespace, s.Name, s.pagesPort)
		},
		TLSHandshakeTimeout: f.options.Timeout, ResponseHeaderTimeout: f.options.Timeout, IdleConnTimeout: idlePages,
		DisableCompression: true,
	}}
	if s.plaintext {
		return p, nil
	}
	ctx, cancel := context.WithTimeout(ctx, f.options.Timeout)
	defer cancel()
	pool, err := f.pool(ctx, s.ca)
	if err != nil {
		return nil, err
	}
	p.Base.Scheme = "https"
	p.transport.TLSClientConfig = tlsfiles.ClientConfig(pool, s.serverName, nil, nil)
	return p, nil
}

// RoundTrip implements http.RoundTripper. The server is shown a token, as by Ask.
func (p *Pages) RoundTrip(r *http.Request) (*http.Response, error) {
	if p.server.plaintext {
		return p.transport.RoundTrip(r)
	}
	token, err := p.fleet.tokens.get(r.Context(), p.server.Namespace, p.server.audience)
	if err != nil {
		return nil, err
	}
	r = r.Clone(r.Context())
	r.Header.Set("Authorization", "Bearer "+token)
	response, err := p.transport.RoundTrip(r)
	if err != nil {
		return nil, fmt.Errorf("ask %s: %w", p.server, err)
	}
	return response, nil
}

// Close closes the connections that serve no request.
func (p *Pages) Close() { p.transport.CloseIdleConnections() }
