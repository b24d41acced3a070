package connection

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

type metrics struct {
	connected     prometheus.Gauge
	received      prometheus.Counter
	receivedBytes prometheus.Counter
	nacks         prometheus.Counter
	resyncs       *prometheus.CounterVec
	server        *prometheus.GaugeVec
	serverStale   prometheus.Gauge
	probes        *prometheus.CounterVec
}

// These are the values of the label of the metric of probes.
const (
	probeFresh  = "fresh"
	probeStale  = "stale"
	probeFailed = "failed"
)

// newMetrics registers the metrics of an agent, or of the upstream side of a relay.
func newMetrics(r prometheus.Registerer, subsystem string) *metrics {
	f := promauto.With(r)
	opts := func(name, help string) prometheus.Opts {
		return prometheus.Opts{Namespace: "slicecast", Subsystem: subsystem, Name: name, Help: help}
	}
	counter := func(name, help string) prometheus.Counter {
		return f.NewCounter(prometheus.CounterOpts(opts(name, help)))
	}
	m := &metrics{
		connected: f.NewGauge(prometheus.GaugeOpts(opts("connected",
			"1 while a stream is open and in sync, 0 otherwise."))),
		received:      counter("received_frames_total", "Number of frames received."),
		receivedBytes: counter("received_bytes_total", "Number of bytes of frames received, before TLS and HTTP/2."),
		nacks: counter("nacks_total",
			"Number of objects that could not be programmed or decoded, counted once for each reason."),
		resyncs: f.NewCounterVec(prometheus.CounterOpts(opts("resyncs_total",
			"Number of requests for state to be sent again, by reason: base (a delta did not fit), "+
				"digest (a heartbeat's digest differed), "+
				"unreadable (an object that did not decode has changed), delta (a change did not decode), "+
				"resume (the server asked for the digests of a shard's buckets).")), []string{"reason"}),
		server: f.NewGaugeVec(prometheus.GaugeOpts(opts("server_info",
			"Always 1, with the server of the last stream as labels.")), []string{"address", "name", "version"}),
		serverStale: f.NewGauge(prometheus.GaugeOpts(opts("server_stale",
			"1 while the server of the stream says that it may lack changes, 0 otherwise."))),
		probes: f.NewCounterVec(prometheus.CounterOpts(opts("probes_total",
			"Number of other servers that were asked before a move, by result: fresh (the server would serve this client), "+
				"stale (it may lack changes itself) or failed.")), []string{"result"}),
	}
	for _, result := range []string{probeFresh, probeStale, probeFailed} {
		m.probes.WithLabelValues(result)
	}
	for _, reason := range []string{"base", "digest", "unreadable", "delta", "resume"} {
		m.resyncs.WithLabelValues(reason) // rates need the series before its first increment
	}
	return m
}
