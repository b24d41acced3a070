package reconcile

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// metrics are a Reconciler's metrics.
type metrics struct {
	seconds *prometheus.HistogramVec
	errors  *prometheus.CounterVec
	repairs prometheus.Counter
	ports   prometheus.Gauge
	nacks   prometheus.Gauge
	failing *prometheus.GaugeVec
}

func newMetrics(r prometheus.Registerer) *metrics {
	f := promauto.With(r)
	m := &metrics{
		seconds: f.NewHistogramVec(prometheus.HistogramOpts{
			Namespace: "slicecast", Subsystem: "agent", Name: "program_duration_seconds",
			Help: "Time to program the kernel in seconds, by operation: apply (changes) or replace (the whole " +
				"state).",
			Buckets: prometheus.ExponentialBuckets(1e-4, 4, 10),
		}, []string{"operation"}),
		errors: f.NewCounterVec(prometheus.CounterOpts{
			Namespace: "slicecast", Subsystem: "agent", Name: "program_errors_total",
			Help: "Number of operations that could not program everything, by operation: apply (changes) or replace " +
				"(the whole state).",
		}, []string{"operation"}),
		repairs: f.NewCounter(prometheus.CounterOpts{
			Namespace: "slicecast", Subsystem: "agent", Name: "repairs_total",
			Help: "Number of times that the whole state was programmed again because others had changed the rules.",
		}),
		ports: f.NewGauge(prometheus.GaugeOpts{
			Namespace: "slicecast", Subsystem: "agent", Name: "service_ports",
			Help: "Number of Service ports that the node serves, counted once for each IP family.",
		}),
		nacks: f.NewGauge(prometheus.GaugeOpts{
			Namespace: "slicecast", Subsystem: "agent", Name: "failed_services",
			Help: "Number of Services that are not completely programmed. The log and the status command say why.",
		}),
		failing: f.NewGaugeVec(prometheus.GaugeOpts{
			Namespace: "slicecast", Subsystem: "agent", Name: "failed_families",
			Help: "1 while nothing of the IP family is known to be programmed, 0 otherwise. The log and the status " +
				"command say why.",
		}, []string{"family"}),
	}
	for _, operation := range []string{"apply", "replace"} {
		m.errors.WithLabelValues(operation) // rates need the series before its first increment
	}
	return m
}
