package discovery

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

type metrics struct{ disconnects, moves, retryHints prometheus.Counter }

func newMetrics(r prometheus.Registerer, subsystem string) *metrics {
	counter := func(name, help string) prometheus.Counter {
		return promauto.With(r).NewCounter(prometheus.CounterOpts{
			Namespace: "slicecast", Subsystem: subsystem, Name: name, Help: help,
		})
	}
	return &metrics{
		disconnects: counter("disconnects_total", "Streams that ended, and attempts that failed."),
		moves:       counter("moves_total", "Streams that were left for the server that is this node's by hashing."),
		retryHints: counter("retry_hints_total",
			"Attempts that were answered with a time before which the server is not to be tried again."),
	}
}
