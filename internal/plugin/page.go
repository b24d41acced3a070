package plugin

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/types"

	"github.com/slicecast/slicecast/internal/bounded"
	"github.com/slicecast/slicecast/internal/plugin/fleet"
	"github.com/slicecast/slicecast/internal/show"
)

// pagePath is where servers have their page. Nothing else is passed on to a browser.
const pagePath = "/page/"

// pagePolicy is the Content-Security-Policy of all answers, whatever a server says. So the page of
// a compromised server can reach nothing but that server.
const pagePolicy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; " +
	"require-trusted-types-for 'script'; trusted-types 'none'"

// pageLimits bounds what others on this machine can do at the port of a page. There is no limit for
// answers, as the page follows a stream.
var pageLimits = bounded.Limits{Total: 128, PerAddress: 64, Read: 10 * time.Second, Idle: time.Minute}

func newPageCommand(o *options) *cobra.Command {
	c := &cobra.Command{
		Use:   "page [SERVER...]",
		Short: "Show the pages of servers and relays in a browser of this machine",
		Long: `page prints an address for each server and relay, or for those with these names. While the command runs, a browser on
this machine shows the server's page there: its nodes by state and lag, the latest changes, and which nodes lack one of
them or a Service.

The addresses are those of ports of the loopback interface, one for each server, with a secret in the path. Whoever has
the address sees what you see.`,
		Example: `  kubectl slicecast page
  kubectl slicecast page slicecast-server-5d8f7c9b6d-x2x7k`,
		Args: cobra.ArbitraryArgs,
		ValidArgsFunction: func(c *cobra.Command, _ []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
			return o.complete(c, serverNames)
		},
		RunE: func(c *cobra.Command, args []string) error { return o.servePages(c, args) },
	}
	return c
}

// serverNames returns the names of all servers and relays.
func serverNames(ctx context.Context, f *fleet.Fleet) (names []string, err error) {
	found, err := f.Servers(ctx)
	for _, s := range found {
		names = append(names, s.Name)
	}
	return names, err
}

// servePages serves the pages of the servers with these names, or of all, until the command ends.
func (o *options) servePages(c *cobra.Command, names []string) error {
	f, err := o.fleet()
	if err != nil {
		return err
	}
	defer f.Close()
	found, err := f.Servers(c.Context())
	if err != nil {
		return err
	}
	chosen, err := chooseServers(found, names)
	if err != nil {
		return err
	}
	r := &pagesReport{}
	defer r.close()
	for _, s := range chosen {
		one := server{Namespace: s.Namespace, Name: s.Name, Relay: s.Relay}
		if p, err := newLocalPage(c.Context(), f, s); err != nil {
			one.Error = err.Error()
		} else {
			r.pages = append(r.pages, p)
		}
		r.servers = append(r.servers, one)
	}
	err = (&show.Options{}).Run(c.Context(), c.OutOrStdout(), func(context.Context) (show.Report, error) {
		return r, nil
	})
	if err != nil {
		return err
	}
	if len(r.pages) == 0 {
		return exitError(incomplete)
	}
	fmt.Fprintln(c.ErrOrStderr(), "Ctrl-C ends this.")
	running, ctx := errgroup.WithContext(c.Context())
	for _, p := range r.pages {
		running.Go(func() error { return p.serve(ctx) })
	}
	if err := running.Wait(); err != nil {
		return err
	}
	if r.silent() > 0 {
		return exitError(incomplete)
	}
	return nil
}

// pagesReport lists the pages, and the servers that have none.
type pagesReport struct {
	servers

	pages []*localPage
}

// Fields implements show.Report.
func (r *pagesReport) Fields() []show.Field { return []show.Field{{Name: "servers", Value: r.servers}} }

// Print implements show.Report.
func (r *pagesReport) Print(out *show.Page) {
	if len(r.pages) > 0 {
		out.Row("SERVER", "PAGE")
	}
	for _, p := range r.pages {
		out.Row(p.name.String(), p.address)
	}
	r.print(out)
}

func (r *pagesReport) close() {
	for _, p := range r.pages {
		p.close()
	}
}

// chooseServers returns the servers with these names, with or without their namespaces, or all if
// there are no names.
func chooseServers(found []*fleet.Server, names []string) (chosen []*fleet.Server, err error) {
	if len(names) == 0 {
		return found, nil
	}
	for _, name := range names {
		before := len(chosen)
		for _, s := range found {
			if s.Name == name || s.String() == name {
				chosen = append(chosen, s)
			}
		}
		if len(chosen) == before {
			err = errors.Join(err, fmt.Errorf("there is no server %q: kubectl slicecast status lists all", name))
		}
	}
	return chosen, err
}

// localPage is a server's page at a port of this machine. Each server has a port of its own, so
// that browsers keep the pages of servers apart.
type localPage struct {
	// address is the page's, which browsers show.
	address string

	name     types.NamespacedName
	pages    *fleet.Pages
	listener net.Listener
	// host is the only Host that requests may have, and secret begins their paths.
	host, secret string
	closing      sync.Once
}

func newLocalPage(ctx context.Context, f *fleet.Fleet, s *fleet.Server) (*localPage, error) {
	pages, err := f.Pages(ctx, s)
	if err != nil {
		return nil, err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("open a port for the page: %w", err)
	}
	p := &localPage{name: s.NamespacedName, pages: pages, listener: l, host: l.Addr().String(), secret: "/" + rand.Text()}
	p.address = "http://" + p.host + p.secret + pagePath
	return p, nil
}

func (p *localPage) close() {
	p.closing.Do(func() {
		_ = p.listener.Close() // serve may have closed it
		p.pages.Close()
	})
}

// serve answers requests until ctx ends.
func (p *localPage) serve(ctx context.Context) error {
	log := slog.New(slog.DiscardHandler)
	port := bounded.NewPort("page", pageLimits, log, bounded.NewDisplaced(nil, "plugin"))
	proxy := &httputil.ReverseProxy{
		Transport: filtered{p.pages}, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelError),
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(p.pages.Base)
			r.Out.Host = ""
			r.Out.URL.Path, r.Out.URL.RawPath = strings.TrimPrefix(r.In.URL.Path, p.secret), ""
			r.Out.Body, r.Out.ContentLength = nil, 0
		},
		ModifyResponse: func(r *http.Response) error {
			p.restrict(r.Header)
			return nil
		},
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, err error) {
			http.Error(w, fmt.Sprintf("%s does not answer: %v", p.name, err), http.StatusBadGateway)
		},
	}
	return port.Serve(ctx, p.listener, nil, p.guard(proxy))
}

// These are the headers that are passed on from the browser to a server, and from a server to the
// browser. All others stay where they are.
var (
	requestHeaders  = []string{"Accept", "Sec-Fetch-Site"}
	responseHeaders = []string{"Allow", "Content-Length", "Content-Type", "Retry-After"}
)

// filtered passes requests and answers on with the headers that are allowed, and without trailers.
type filtered struct{ to http.RoundTripper }

// RoundTrip implements http.RoundTripper.
func (p filtered) RoundTrip(r *http.Request) (*http.Response, error) {
	// Without the values of its context, the proxy does not pass on what precedes the answer (1xx).
	r = r.Clone(untraced{r.Context()})
	r.Header, r.Trailer = only(r.Header, requestHeaders), nil
	r.Header.Set("User-Agent", "") // net/http sends none then
	answer, err := p.to.RoundTrip(r)
	if err != nil {
		return nil, err
	}
	if answer.StatusCode < http.StatusOK { // such as one that switches to another protocol
		_ = answer.Body.Close()
		return nil, fmt.Errorf("the server has answered with status %d, which the page never does", answer.StatusCode)
	}
	// The transport adds the trailers to its own copy.
	allowed := *answer
	allowed.Header, allowed.Trailer = only(answer.Header, responseHeaders), nil
	return &allowed, nil
}

// untraced is a context without values, such as the trace of a request.
type untraced struct{ context.Context }

// Value implements context.Context.
func (untraced) Value(any) any { return nil }

// only returns the headers with these names.
func only(h http.Header, names []string) http.Header {
	out := make(http.Header)
	for _, name := range names {
		if values := h.Values(name); len(values) > 0 {
			out[name] = values
		}
	}
	return out
}

// restrict sets what a browser may do with an answer.
func (p *localPage) restrict(h http.Header) {
	h.Set("Content-Security-Policy", pagePolicy)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cross-Origin-Opener-Policy", "same-origin")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	h.Set("Cache-Control", "no-store")
}

// guard passes requests on that a browser makes for this page. Another user of this machine lacks
// the secret. A page of another site, also one whose name was made to resolve to this machine, has
// another Host or Origin.
func (p *localPage) guard(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		p.restrict(w.Header())
		path := r.URL.Path
		begin := p.secret + pagePath
		known := len(path) >= len(begin) && subtle.ConstantTimeCompare([]byte(path[:len(begin)]), []byte(begin)) == 1
		origin, site := r.Header.Get("Origin"), r.Header.Get("Sec-Fetch-Site")
		switch {
		case r.Host != p.host:
			http.Error(w, "this is not the address that the command has printed", http.StatusMisdirectedRequest)
		case origin != "" && origin != "http://"+p.host, site != "" && site != "same-origin" && site != "none":
			http.Error(w, "another site may not ask for this", http.StatusForbidden)
		case !known || strings.Contains(path, ".."):
			http.NotFound(w, r)
		case r.Method != http.MethodGet:
			http.Error(w, "the page is read only: use GET", http.StatusMethodNotAllowed)
		default:
			next.ServeHTTP(w, r)
		}
	})
}
