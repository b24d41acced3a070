package kube

import (
	"context"
	"net/url"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	clientmetrics "k8s.io/client-go/tools/metrics"
)

// These metrics have the names, labels and buckets that they have in the components of Kubernetes
// (k8s.io/component-base/metrics/prometheus/restclient, 1.37). They are global, as are the hooks of
// client-go that feed them.
var (
	clientRequests = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "rest_client_requests_total",
		Help: "Number of requests to the API server, by HTTP status, method and host. An agent with servers makes few.",
	}, []string{"code", "method", "host"})
	clientSeconds = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name:    "rest_client_request_duration_seconds",
		Help:    "Time of requests to the API server, by method and host, in seconds. An agent with servers makes few.",
		Buckets: []float64{0.005, 0.025, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60},
	}, []string{"verb", "host"})
)

// RegisterClientMetrics registers metrics of the requests that this process makes to API servers.
// It must be called at the start of a process, before any client runs.
func RegisterClientMetrics(r prometheus.Registerer) {
	clientmetrics.Register(clientmetrics.RegisterOpts{RequestLatency: requestLatency{}, RequestResult: requestResult{}})
	r.MustRegister(clientRequests, clientSeconds)
}

type requestLatency struct{}

// Observe implements clientmetrics.LatencyMetric.
func (requestLatency) Observe(_ context.Context, verb string, u url.URL, latency time.Duration) {
	clientSeconds.WithLabelValues(verb, u.Host).Observe(latency.Seconds())
}

type requestResult struct{}

// Increment implements clientmetrics.ResultMetric.
func (requestResult) Increment(_ context.Context, code, method, host string) {
	clientRequests.WithLabelValues(code, method, host).Inc()
}
