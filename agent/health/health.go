// Package health answers health checks as kube-proxy 1.37 does. /healthz and /livez are about the
// node. The healthCheckNodePort of a Service (type LoadBalancer, externalTrafficPolicy Local) says
// whether the Service has endpoints on this node. All ports are open to everybody who can reach
// them, because load balancers and kubelets have no credentials.
//
// The node is healthy if each of its IP families is. A family is unhealthy if, for longer than a
// minute, one of these holds:
//
//   - A change waits to be programmed.
//   - One operation of the programmer is in progress.
//   - The kernel lacks what others have removed, or the family could not be programmed at all.
//
// The minute is twice kube-proxy's default sync period, as in kube-proxy. If Options.MinSyncPeriod
// is more than half a minute, the limit is twice that period.
//
// /livez reports only this. /healthz also fails for a node that is deleted, is being deleted, or is
// about to be, so that load balancers leave it (KEP-3458). /readyz does not exist in kube-proxy. It
// reports whether every IP family has been programmed since the agent started.
//
// Ports are opened and closed as Services come and go, on the addresses that have NodePorts. If a
// port is in use, the server retries until it is free, because kube-proxy may still run and use it.
package health

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/bounded"
	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/internal/model"
)

// minPending is the least time after which a waiting change makes the node unhealthy.
const minPending = time.Minute

// Programming is what health checks need to know about the kernel. reconcile.Reconciler implements
// it.
type Programming interface {
	// Families returns the IP families that the node should have, ascending.
	Families() []model.Family
	// Pending reports whether the kernel lacks anything of the family, and since when.
	Pending(family model.Family) (since time.Time, pending bool)
	// LastProgrammed returns when the kernel last held everything of the family; zero means never.
	LastProgrammed(family model.Family) time.Time
}

// Options configure a Server. Node is required.
type Options struct {
	// Node returns this machine's Node, with Deleting set if it was deleted; nil means that no Node is
	// known.
	Node func() *model.Node
	// MinSyncPeriod is the longest time for which changes are collected before they are programmed.
	MinSyncPeriod time.Duration
	// Addresses are where /healthz, /livez and /readyz are served, as "host:port".
	Addresses  []string
	Logger     *slog.Logger          // nil means slog's default logger
	Registerer prometheus.Registerer // nil means that metrics are not registered
	// Displaced is the result of bounded.NewDisplaced; nil means that this metric is not registered.
	Displaced *prometheus.CounterVec
}

// Server answers health checks while Run runs.
//
// Invariants:
//
//  1. checks and node are those of the last Sync.
//  2. wake holds a value unless Run has seen the last Sync.
type Server struct {
	Options
	wake     chan struct{}
	retry    time.Duration
	failures prometheus.Counter
	// healthz and livez count the answers of the node's port, by their status.
	healthz, livez *prometheus.CounterVec
	// nodePort bounds the connections to the node's port, and servicePort those to the ports of all
	// Services together.
	nodePort, servicePort *bounded.Port

	mu     sync.Mutex // guards the fields below
	checks map[view.HealthCheckID]view.HealthCheck
	node   view.Node
}

// New returns a Server.
func New(o Options) *Server {
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	if o.Displaced == nil {
		o.Displaced = bounded.NewDisplaced(nil, "agent")
	}
	f := promauto.With(o.Registerer)
	answers := func(page string) *prometheus.CounterVec {
		return f.NewCounterVec(prometheus.CounterOpts{
			Namespace: "kubeproxy", Name: "proxy_" + page + "_total",
			Help: "Number of answers of /" + page + " at --healthz-bind-address, by HTTP status.",
		}, []string{"code"})
	}
	return &Server{
		Options: o, healthz: answers("healthz"), livez: answers("livez"), wake: make(chan struct{}, 1), retry: retryInterval,
		nodePort:    bounded.NewPort("health", bounded.Health, o.Logger, o.Displaced),
		servicePort: bounded.NewPort("service_health", bounded.ServiceHealth, o.Logger, o.Displaced),
		failures: f.NewCounter(prometheus.CounterOpts{
			Namespace: "slicecast", Subsystem: "agent", Name: "health_listen_errors_total",
			Help: "Number of failed attempts to open a port for health checks, most likely because another program " +
				"uses it.",
		}),
	}
}

// Sync sets the health checks of Services, and the node whose addresses they are on. It does not
// block.
func (s *Server) Sync(checks map[view.HealthCheckID]view.HealthCheck, node view.Node) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.checks, s.node = checks, node
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// Run answers health checks until ctx ends, from what programming says.
func (s *Server) Run(ctx context.Context, programming Programming) {
	l := listeners{
		handlers: handlers{s, programming}, open: make(map[listenerKey]*http.Server), failed: make(map[listenerKey]bool),
		lines: bounded.NewLines(),
	}
	defer l.close()
	tick := time.NewTicker(s.retry)
	defer tick.Stop()
	for {
		l.update(ctx)
		select {
		case <-ctx.Done():
			return
		case <-s.wake:
		case <-tick.C: // addresses and other programs come and go
		}
	}
}

// nodeHealth is the body of kube-proxy's answer, key by key.
type nodeHealth struct {
	LastUpdated  time.Time               `json:"lastUpdated"`
	CurrentTime  time.Time               `json:"currentTime"`
	NodeEligible *bool                   `json:"nodeEligible,omitempty"`
	Healthy      bool                    `json:"healthy"`
	Status       map[string]familyHealth `json:"status,omitempty"`
}

type familyHealth struct {
	LastUpdated time.Time `json:"lastUpdated"`
	Healthy     bool      `json:"healthy"`
}

// handlers answers the requests of health checks.
type handlers struct {
	*Server
	programming Programming
}

// health returns the node's health. As with kube-proxy, a node is healthy while there is nothing to
// program yet, because what an earlier agent programmed is still there. After the first change, the
// time limit applies.
func (s handlers) health() nodeHealth {
	maxPending := max(minPending, 2*s.MinSyncPeriod)
	h := nodeHealth{CurrentTime: time.Now(), Healthy: true, Status: make(map[string]familyHealth)}
	for _, family := range s.programming.Families() {
		last := s.programming.LastProgrammed(family)
		since, pending := s.programming.Pending(family)
		f := familyHealth{LastUpdated: last, Healthy: !pending || h.CurrentTime.Sub(since) < maxPending}
		h.Status[family.String()] = f
		h.Healthy = h.Healthy && f.Healthy
		if last.After(h.LastUpdated) {
			h.LastUpdated = last
		}
	}
	return h
}

// nodeHandler returns the handler for /healthz, /livez and /readyz.
func (s handlers) nodeHandler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) {
		h, node := s.health(), s.Node()
		eligible := node != nil && !node.Deleting && !node.TaintedForDeletion
		h.NodeEligible = &eligible
		h.answer(w, h.Healthy && eligible, s.healthz)
	})
	mux.HandleFunc("/livez", func(w http.ResponseWriter, _ *http.Request) {
		h := s.health()
		h.answer(w, h.Healthy, s.livez)
	})
	mux.HandleFunc("/readyz", func(w http.ResponseWriter, _ *http.Request) {
		for _, family := range s.programming.Families() {
			if s.programming.LastProgrammed(family).IsZero() {
				http.Error(w, fmt.Sprintf("%v is not programmed yet", family), http.StatusServiceUnavailable)
				return
			}
		}
		_, _ = fmt.Fprintln(w, "ok") // an error concerns only the client
	})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Server", daemon.AgentServer)
		mux.ServeHTTP(w, r)
	})
}

// answer answers with the node's health, and counts the answer by its status.
func (h *nodeHealth) answer(w http.ResponseWriter, ok bool, count *prometheus.CounterVec) {
	status := http.StatusOK
	if !ok {
		status = http.StatusServiceUnavailable
	}
	count.WithLabelValues(strconv.Itoa(status)).Inc()
	// Load balancers read from LastUpdated how old the answer is.
	if ok {
		h.LastUpdated = h.CurrentTime
	}
	body, _ := json.Marshal(h) // cannot fail for these types
	answer(w, ok, body)
}

// serviceHealth is the body of kube-proxy's answer for a Service.
type serviceHealth struct {
	Service struct {
		Namespace string `json:"namespace"`
		Name      string `json:"name"`
	} `json:"service"`
	LocalEndpoints      int  `json:"localEndpoints"`
	ServiceProxyHealthy bool `json:"serviceProxyHealthy"`
}

// serviceHandler returns the handler for a Service in one family. It ignores the path.
func (s handlers) serviceHandler(id view.HealthCheckID) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		s.mu.Lock()
		count := s.checks[id].LocalEndpoints
		s.mu.Unlock()
		h := serviceHealth{LocalEndpoints: count, ServiceProxyHealthy: s.health().Healthy}
		h.Service.Namespace, h.Service.Name = id.Service.Namespace, id.Service.Name
		w.Header().Set("X-Load-Balancing-Endpoint-Weight", strconv.Itoa(count))
		body, _ := json.MarshalIndent(h, "", "\t") // cannot fail for these types
		answer(w, count > 0 && h.ServiceProxyHealthy, body)
	}
}

func answer(w http.ResponseWriter, ok bool, body []byte) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	if !ok {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	_, _ = w.Write(body) // an error concerns only the client
}
