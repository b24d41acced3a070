package client

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

type metrics struct {
	connected     prometheus.Gauge
	disconnects   prometheus.Counter
	received      prometheus.Counter
	receivedBytes prometheus.Counter
	nacks         prometheus.Counter
	resyncs       *prometheus.CounterVec
}

func newMetrics(r prometheus.Registerer) *metrics {
	f := promauto.With(r)
	counter := func(name, help string) prometheus.Counter {
		return f.NewCounter(prometheus.CounterOpts{Namespace: "slicecast", Subsystem: "agent", Name: name, Help: help})
	}
	return &metrics{
		connected: f.NewGauge(prometheus.GaugeOpts{Namespace: "slicecast", Subsystem: "agent", Name: "connected",
			Help: "1 while a stream is open and in sync, 0 otherwise."}),
		disconnects:   counter("disconnects_total", "Streams that ended, and attempts that failed."),
		received:      counter("received_frames_total", "Frames received."),
		receivedBytes: counter("received_bytes_total", "Bytes of frames received, before TLS and HTTP/2."),
		nacks:         counter("nacks_total", "Objects reported to the server as not programmed."),
		resyncs: f.NewCounterVec(prometheus.CounterOpts{Namespace: "slicecast", Subsystem: "agent", Name: "resyncs_total",
			Help: "State asked for again, by reason: base (a delta did not fit), digest (a heartbeat's digest differed)."},
			[]string{"reason"}),
	}
}
