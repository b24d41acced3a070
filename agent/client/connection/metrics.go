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
}

// newMetrics registers the metrics of an agent, or of the upstream side of a relay.
func newMetrics(r prometheus.Registerer, subsystem string) *metrics {
	f := promauto.With(r)
	opts := func(name, help string) prometheus.Opts {
		return prometheus.Opts{Namespace: "slicecast", Subsystem: subsystem, Name: name, Help: help}
	}
	counter := func(name, help string) prometheus.Counter {
		return f.NewCounter(prometheus.CounterOpts(opts(name, help)))
	}
	return &metrics{
		connected: f.NewGauge(prometheus.GaugeOpts(opts("connected",
			"1 while a stream is open and in sync, 0 otherwise."))),
		received:      counter("received_frames_total", "Frames received."),
		receivedBytes: counter("received_bytes_total", "Bytes of frames received, before TLS and HTTP/2."),
		nacks:         counter("nacks_total", "Objects that could not be programmed or decoded, once for each reason."),
		resyncs: f.NewCounterVec(prometheus.CounterOpts(opts("resyncs_total",
			"State asked for again, by reason: base (a delta did not fit), digest (a heartbeat's digest differed), "+
				"unreadable (what did not decode has changed), delta (a change did not decode), "+
				"software (the server before was of another version), "+
				"resume (the server asked for the digests of a shard's buckets).")), []string{"reason"}),
		server: f.NewGaugeVec(prometheus.GaugeOpts(opts("server_info",
			"1 for the server that the last stream was with.")), []string{"address", "name", "version"}),
	}
}
