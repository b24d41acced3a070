// Package health answers load balancers and kubelets as kube-proxy 1.37 does: /healthz and /livez for the node, and for each
// Service with a healthCheckNodePort (type LoadBalancer, externalTrafficPolicy Local) whether it has endpoints on this node.
// All of it is open to whoever can reach the port, as what asks has no credentials.
//
// The node is healthy if each of its IP families is. A family is healthy unless a change has been
// waiting to be programmed, one programming of the kernel has lasted, or the kernel has lacked what
// others removed or could not be programmed at all, for longer than a minute: twice kube-proxy's
// default sync period, as there; or for longer than twice the time that changes are let gather, if
// that is more. /livez says that and no more. /healthz also asks load balancers to leave a node
// that is about to be deleted, is being deleted or is deleted (KEP-3458). /readyz is ours: whether
// every IP family has been programmed since the agent started.
//
// Ports are opened and closed as Services come and go, on the addresses that NodePorts are on. A port that is taken is tried
// again until it is free: kube-proxy may still be there and have it.
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
	"github.com/slicecast/slicecast/internal/model"
)

// minPending is the least time that a change may wait to be programmed until the node counts as unhealthy.
const minPending = time.Minute

// Programming is how the kernel stands. reconcile.Reconciler is one.
type Programming interface {
	// Families returns the IP families that the node is to have, ascending.
	Families() []model.Family
	// Pending reports whether a change of the family has been waiting to be programmed, and since when.
	Pending(family model.Family) (since time.Time, pending bool)
	// LastProgrammed returns when the kernel last got all there was of the family; zero means not yet.
	LastProgrammed(family model.Family) time.Time
}

// Options set up a Server.
type Options struct {
	Programming Programming
	// Node returns this machine's Node, which is Deleting if it is gone; nil means that none is known.
	Node func() *model.Node
	// MinSyncPeriod is how long changes gather at most before they are programmed.
	MinSyncPeriod time.Duration
	// Addresses, each host:port, are where /healthz, /livez and /readyz are.
	Addresses  []string
	Logger     *slog.Logger          // nil: slog's default
	Registerer prometheus.Registerer // nil: no metrics
	// Displaced is what bounded.NewDisplaced returns; nil means that it is not registered.
	Displaced *prometheus.CounterVec
}

// Server answers. It must be run.
type Server struct {
	Options
	// wake holds a value when checks or node have changed.
	wake     chan struct{}
	retry    time.Duration
	failures prometheus.Counter
	// nodePort bounds the connections for the node, servicePort those for all Services.
	nodePort, servicePort *bounded.Port

	mu     sync.Mutex // guards what is below
	checks map[view.HealthCheckID]view.HealthCheck
	node   view.Node
}

// New makes a Server.
func New(o Options) *Server {
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	if o.Displaced == nil {
		o.Displaced = bounded.NewDisplaced(nil, "agent")
	}
	return &Server{
		Options: o, wake: make(chan struct{}, 1), retry: retryInterval,
		nodePort:    bounded.NewPort("health", bounded.Health, o.Logger, o.Displaced),
		servicePort: bounded.NewPort("service_health", bounded.ServiceHealth, o.Logger, o.Displaced),
		failures: promauto.With(o.Registerer).NewCounter(prometheus.CounterOpts{Namespace: "slicecast", Subsystem: "agent", Name: "health_listen_errors_total",
			Help: "Tries to open a port for health checks that failed, most likely as another program has it."}),
	}
}

// Sync tells which Services have a healthCheckNodePort, and what is to be answered there. It does not wait.
func (s *Server) Sync(checks map[view.HealthCheckID]view.HealthCheck, node view.Node) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.checks, s.node = checks, node
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// Run answers until the context ends.
func (s *Server) Run(ctx context.Context) {
	l := listeners{Server: s, open: make(map[listenerKey]*http.Server), failed: make(map[listenerKey]bool)}
	defer l.close()
	tick := time.NewTicker(s.retry)
	defer tick.Stop()
	for {
		l.update(ctx)
		select {
		case <-ctx.Done():
			return
		case <-s.wake:
		case <-tick.C: // addresses come and go, and so do other programs
		}
	}
}

// nodeHealth is kube-proxy's answer, key by key.
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

// health tells how the node is. As with kube-proxy, it is healthy while there is nothing to program yet: what an earlier agent
// programmed is still there. From the first try on the time counts.
func (s *Server) health() nodeHealth {
	maxPending := max(minPending, 2*s.MinSyncPeriod)
	h := nodeHealth{CurrentTime: time.Now(), Healthy: true, Status: make(map[string]familyHealth)}
	for _, family := range s.Programming.Families() {
		last := s.Programming.LastProgrammed(family)
		since, pending := s.Programming.Pending(family)
		f := familyHealth{LastUpdated: last, Healthy: !pending || h.CurrentTime.Sub(since) < maxPending}
		h.Status[family.String()] = f
		h.Healthy = h.Healthy && f.Healthy
		if last.After(h.LastUpdated) {
			h.LastUpdated = last
		}
	}
	return h
}

// nodeHandler answers for the node.
func (s *Server) nodeHandler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) {
		h, node := s.health(), s.Node()
		eligible := node != nil && !node.Deleting && !node.TaintedForDeletion
		h.NodeEligible = &eligible
		h.answer(w, h.Healthy && eligible)
	})
	mux.HandleFunc("/livez", func(w http.ResponseWriter, _ *http.Request) {
		h := s.health()
		h.answer(w, h.Healthy)
	})
	mux.HandleFunc("/readyz", func(w http.ResponseWriter, _ *http.Request) {
		for _, family := range s.Programming.Families() {
			if s.Programming.LastProgrammed(family).IsZero() {
				http.Error(w, fmt.Sprintf("%v is not programmed yet", family), http.StatusServiceUnavailable)
				return
			}
		}
		_, _ = fmt.Fprintln(w, "ok") // an error is the client's
	})
	return mux
}

func (h *nodeHealth) answer(w http.ResponseWriter, ok bool) {
	if ok { // what load balancers read is how old the answer is
		h.LastUpdated = h.CurrentTime
	}
	body, _ := json.Marshal(h) // can't fail on these types
	answer(w, ok, body)
}

// serviceHealth is kube-proxy's answer.
type serviceHealth struct {
	Service struct {
		Namespace string `json:"namespace"`
		Name      string `json:"name"`
	} `json:"service"`
	LocalEndpoints      int  `json:"localEndpoints"`
	ServiceProxyHealthy bool `json:"serviceProxyHealthy"`
}

// serviceHandler answers for a Service in one family, whatever the path is.
func (s *Server) serviceHandler(id view.HealthCheckID) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		s.mu.Lock()
		count := s.checks[id].LocalEndpoints
		s.mu.Unlock()
		h := serviceHealth{LocalEndpoints: count, ServiceProxyHealthy: s.health().Healthy}
		h.Service.Namespace, h.Service.Name = id.Service.Namespace, id.Service.Name
		w.Header().Set("X-Load-Balancing-Endpoint-Weight", strconv.Itoa(count))
		body, _ := json.MarshalIndent(h, "", "\t") // can't fail on these types
		answer(w, count > 0 && h.ServiceProxyHealthy, body)
	}
}

func answer(w http.ResponseWriter, ok bool, body []byte) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	if !ok {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	_, _ = w.Write(body) // an error is the client's
}
