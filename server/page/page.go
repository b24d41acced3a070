// Package page serves a page on which people see the clients of one server: which nodes are behind,
// how the latest changes spread, and which nodes lack a change or a Service.
//
// The page only reads what the debug service knows anyway, and only while somebody looks at it.
//
// Guarantees:
//
//   - Every path is behind the guard that the caller of Handle chooses, apart from a redirect.
//   - At most maxViewers people look at the same time. One of them who does not read is cut off
//     after writeTimeout, and everybody has to authenticate again after streamLife.
//   - The state is read at most once per interval for all viewers together, and reading it takes at
//     most a twentieth of the time. At most maxLookups further questions are answered at a time,
//     and lookupRate per second. Viewers who do not read the answers delay nobody.
//   - Names and texts are data to the page. The browser runs, and loads, nothing but the files in
//     assets, which the Content-Security-Policy says.
package page

import (
	"bytes"
	"context"
	"embed"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"path"
	"strings"
	"sync"
	"time"
	"unicode"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"golang.org/x/time/rate"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/refusals"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
	"github.com/slicecast/slicecast/server/fanout"
)

// Path is the path of the page. Everything that the page consists of is below it.
const Path = "/page/"

// maxText bounds a name or text that the page shows, in bytes.
const maxText = 512

// policy is the Content-Security-Policy. Trusted Types are required and none exist, so that even
// the page's own scripts cannot make a text into elements.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; " +
	"require-trusted-types-for 'script'; trusted-types 'none'"

// assets are the files of the page.
//
//go:embed assets
var assets embed.FS

// These are the reasons for which viewers are refused or cut off, and values of the metric's label.
const (
	reasonViewers   = "too_many_viewers"
	reasonSlow      = "slow_viewer"
	reasonLookups   = "too_many_lookups"
	reasonCrossSite = "cross_site"
)

// Server is what the page asks the server. The debug service and the hub implement it together.
type Server interface {
	// GetStatus returns the server's state.
	GetStatus(context.Context, *pb.GetStatusRequest) (*pb.GetStatusResponse, error)
	// GetService returns what the server has of a Service.
	GetService(context.Context, *pb.GetServiceRequest) (*pb.GetServiceResponse, error)
	// Agents returns the clients. With a Service, it says of each whether it lacks the Service's
	// latest state. They are the caller's.
	Agents(about *model.ServiceKey) []*pb.AgentStatus
	// AgentsLacking returns the clients that lack a shard up to a sequence.
	AgentsLacking(shard uint32, sequence uint64) []*pb.AgentStatus
	// Convergences returns the latest changes, newest first.
	Convergences() []fanout.Convergence
	// Steps returns the curve of a change.
	Steps(shard uint32, sequence uint64) []fanout.Step
}

// Options configures a Page. All fields are required.
type Options struct {
	Server Server
	// Draining is closed when the server begins to drain. Everything that the page serves ends then.
	Draining <-chan struct{}
	// Logger receives refusals, and Registerer registers the metrics.
	Logger     *slog.Logger
	Registerer prometheus.Registerer
}

// Page serves the page.
type Page struct {
	options  Options
	refusals *refusals.Counter
	viewers  prometheus.Gauge
	// lookups has an element for each question that is being answered.
	lookups chan struct{}
	// rate bounds the questions per second.
	rate *rate.Limiter
	// interval and the others are the constants, except in tests.
	interval, writeTimeout, streamLife, keepSample, keepAlive time.Duration

	mu sync.Mutex // guards the fields below, also while a sample is taken
	// watching is the number of viewers; it is at most maxViewers.
	watching int
	// last is the latest sample. It is nil if nobody has watched for keepSample.
	last *sample
	// forget drops last; it is nil while somebody watches, and if last is nil.
	forget *time.Timer
	// number is that of the latest sample, and id that of the client that was seen last. Both only
	// grow.
	number, id uint64
}

// New returns a Page.
func New(o Options) *Page {
	return &Page{
		options: o, lookups: make(chan struct{}, maxLookups),
		interval: interval, writeTimeout: writeTimeout, streamLife: streamLife, keepSample: keepSample, keepAlive: keepAlive,
		rate: rate.NewLimiter(lookupRate, lookupBurst),
		refusals: refusals.New(o.Logger, o.Registerer, prometheus.CounterOpts{
			Name: "slicecast_server_page_refusals_total",
			Help: "Number of viewers of the server's page that were refused or cut off, by reason.",
		}, map[string]string{
			reasonViewers:   "too many viewers at a time",
			reasonSlow:      "the viewer does not read",
			reasonLookups:   "too many questions about nodes, Services and changes",
			reasonCrossSite: "another site asks for the page's data",
		}),
		viewers: promauto.With(o.Registerer).NewGauge(prometheus.GaugeOpts{
			Name: "slicecast_server_page_viewers", Help: "Number of people who look at the server's page now.",
		}),
	}
}

// Handle adds the paths of the page to a mux. Each of them is wrapped in guard, which refuses those
// who may not see the page.
func (p *Page) Handle(mux *http.ServeMux, guard func(http.Handler) http.Handler) {
	handle := func(path string, h http.Handler) {
		// The pattern names the exact path, so that guard is not asked about others.
		mux.Handle(path, restrict(guard(h)))
	}
	files, err := assets.ReadDir("assets")
	if err != nil {
		panic(err) // the files are embedded
	}
	for _, f := range files {
		content, err := assets.ReadFile(path.Join("assets", f.Name()))
		if err != nil {
			panic(err)
		}
		if f.Name() == "index.html" {
			handle(Path+"{$}", file(f.Name(), content))
		} else {
			handle(Path+f.Name(), file(f.Name(), content))
		}
	}
	handle(Path+"events", p.sameSite(p.events))
	handle(Path+"node", p.sameSite(p.lookup(p.node)))
	handle(Path+"service", p.sameSite(p.lookup(p.service)))
	handle(Path+"change", p.sameSite(p.lookup(p.change)))
	// A relative address also holds behind a proxy.
	mux.Handle(strings.TrimSuffix(Path, "/"), http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Location", strings.TrimPrefix(Path, "/"))
		w.WriteHeader(http.StatusMovedPermanently)
	}))
}

// restrict refuses everything but GET, and says what a browser may do with the answer.
func restrict(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", policy)
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cross-Origin-Opener-Policy", "same-origin")
		h.Set("Cross-Origin-Resource-Policy", "same-origin")
		h.Set("Cache-Control", "no-store")
		if r.Method != http.MethodGet {
			h.Set("Allow", http.MethodGet)
			http.Error(w, "the page is read only: use GET", http.StatusMethodNotAllowed)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// types are the media types of the page's files.
var types = map[string]string{
	".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8",
	".svg": "image/svg+xml",
}

// file serves a file of the page.
func file(name string, content []byte) http.Handler {
	kind := types[path.Ext(name)]
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", kind)
		http.ServeContent(w, r, name, time.Time{}, bytes.NewReader(content))
	})
}

// sameSite refuses requests that a browser makes for the page of another site. That site cannot
// read the answer, but it could use up the viewers.
func (p *Page) sameSite(next http.HandlerFunc) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.Header.Get("Sec-Fetch-Site") {
		case "", "same-origin", "none":
			next(w, r)
		default:
			p.refuse(reasonCrossSite, r)
			http.Error(w, "another site may not ask for this: open "+Path, http.StatusForbidden)
		}
	})
}

func (p *Page) refuse(reason string, r *http.Request) {
	var client net.Addr
	if from, err := netip.ParseAddrPort(r.RemoteAddr); err == nil {
		client = net.TCPAddrFromAddrPort(from)
	}
	p.refusals.Add(reason, client)
}

// clean returns a text without control characters, line breaks, and characters that change the
// direction of what follows. Clients choose some of the texts that the page shows.
func clean(s string) string {
	if len(s) > maxText {
		s = strings.ToValidUTF8(s[:maxText], "") + "…"
	}
	plain := true // as nearly always
	for i := range len(s) {
		plain = plain && ' ' <= s[i] && s[i] <= '~'
	}
	if plain {
		return s
	}
	return strings.Map(func(r rune) rune {
		if unicode.In(r, unicode.Cc, unicode.Cf, unicode.Zl, unicode.Zp) {
			return ' '
		}
		return r
	}, s)
}
