package kube

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

type metrics struct {
	lists     *prometheus.CounterVec
	watches   *prometheus.CounterVec
	errors    *prometheus.CounterVec
	lastEvent *prometheus.GaugeVec
}

func newMetrics(registerer prometheus.Registerer) *metrics {
	f := promauto.With(registerer)
	return &metrics{
		lists: f.NewCounterVec(prometheus.CounterOpts{
			Name: "slicecast_source_kube_lists_total",
			Help: "Complete states taken from the API server: one at the start, and one for each watch that could not be resumed.",
		}, []string{"kind"}),
		watches: f.NewCounterVec(prometheus.CounterOpts{
			Name: "slicecast_source_kube_watches_total",
			Help: "Watches opened on the API server, which ends each after 5 to 10 minutes.",
		}, []string{"kind"}),
		errors: f.NewCounterVec(prometheus.CounterOpts{
			Name: "slicecast_source_kube_errors_total",
			Help: "Requests to the API server that failed, and answers that were not believed, by operation: list, watch or replace.",
		}, []string{"kind", "operation"}),
		lastEvent: f.NewGaugeVec(prometheus.GaugeOpts{
			Name: "slicecast_source_kube_last_event_timestamp_seconds",
			Help: "When the API server last sent something, bookmarks included, which come about once a minute.",
		}, []string{"kind"}),
	}
}
