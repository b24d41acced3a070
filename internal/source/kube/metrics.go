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
			Help: "Number of complete lists from the API server: one at the start, one for each watch that could not be resumed, and one after each outage.",
		}, []string{"kind"}),
		watches: f.NewCounterVec(prometheus.CounterOpts{
			Name: "slicecast_source_kube_watches_total",
			Help: "Number of watches opened on the API server, which ends each after 5 to 10 minutes.",
		}, []string{"kind"}),
		errors: f.NewCounterVec(prometheus.CounterOpts{
			Name: "slicecast_source_kube_errors_total",
			Help: "Number of failed requests to the API server, and of lists that were refused as implausible, by operation: list, watch or replace.",
		}, []string{"kind", "operation"}),
		lastEvent: f.NewGaugeVec(prometheus.GaugeOpts{
			Name: "slicecast_source_kube_last_event_timestamp_seconds",
			Help: "Time of the last event from the API server, or of the program's start before the first one, in seconds since 1970. " +
				"Bookmarks with a newer resourceVersion count, and arrive about once a minute. A kind that the API server lacks or does not permit has none.",
		}, []string{"kind"}),
	}
}
