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
		disconnects: counter("disconnects_total", "Number of streams that ended and of attempts to connect that failed."),
		moves:       counter("moves_total", "Number of moves to the preferred server."),
		retryHints: counter("retry_hints_total",
			"Number of attempts that a server answered with a time to wait before the next one."),
	}
}
