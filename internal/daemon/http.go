package daemon

import (
	"fmt"
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// AgentServer is the value of the header Server in the answers of agents where kube-proxy answers,
// too. The answers of kube-proxy have no such header.
const AgentServer = "slicecast-agent"

// HealthHandler answers the usual paths of Kubernetes components. /healthz and /livez always
// succeed. /readyz succeeds if ready returns nil, and otherwise answers with status 503 and the
// error.
func HealthHandler(ready func() error) http.Handler {
	mux := http.NewServeMux()
	// If the write fails, the client notices.
	ok := func(w http.ResponseWriter, _ *http.Request) { _, _ = fmt.Fprintln(w, "ok") }
	mux.HandleFunc("GET /healthz", ok)
	mux.HandleFunc("GET /livez", ok)
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, r *http.Request) {
		if err := ready(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		ok(w, r)
	})
	return mux
}

// Registry is the interface of *prometheus.Registry that Slicecast uses. Another implementation can
// record what is registered.
type Registry interface {
	prometheus.Registerer
	prometheus.Gatherer
}

// NewRegistry returns a registry with the metrics of the process and of the Go runtime.
func NewRegistry() *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return r
}

// MetricsHandler answers all requests with the metrics of g.
func MetricsHandler(g prometheus.Gatherer) http.Handler {
	return promhttp.HandlerFor(g, promhttp.HandlerOpts{})
}
