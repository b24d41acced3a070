package fanout

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

type metrics struct {
	streams        prometheus.Gauge
	updates        prometheus.Counter
	updateBytes    prometheus.Histogram
	publishSeconds prometheus.Histogram
	encodeErrors   prometheus.Counter
	catchUps       prometheus.Counter
	lapped         prometheus.Counter
	sentFrames     prometheus.Counter
	sentBytes      prometheus.Counter
	acks           prometheus.Counter
	nacks          prometheus.Counter
	resyncs        prometheus.Counter
}

func newMetrics(r prometheus.Registerer) *metrics {
	f := promauto.With(r)
	counter := func(name, help string) prometheus.Counter {
		return f.NewCounter(prometheus.CounterOpts{Namespace: "slicecast", Subsystem: "server", Name: name, Help: help})
	}
	return &metrics{
		streams: f.NewGauge(prometheus.GaugeOpts{Namespace: "slicecast", Subsystem: "server", Name: "streams",
			Help: "Open streams."}),
		updates: counter("updates_total", "Updates published, one for each changed shard of a publish."),
		updateBytes: f.NewHistogram(prometheus.HistogramOpts{Namespace: "slicecast", Subsystem: "server", Name: "update_size_bytes",
			Help: "Size of published updates, before TLS and HTTP/2.", Buckets: prometheus.ExponentialBuckets(64, 4, 10)}),
		publishSeconds: f.NewHistogram(prometheus.HistogramOpts{Namespace: "slicecast", Subsystem: "server", Name: "publish_duration_seconds",
			Help: "Time to publish pending changes: apply, diff and encode.", Buckets: prometheus.ExponentialBuckets(1e-5, 4, 10)}),
		encodeErrors: counter("encode_errors_total", "Updates that could not be encoded."),
		catchUps:     counter("catch_up_frames_total", "Snapshot and catch-up frames built, each for any number of streams."),
		lapped:       counter("lapped_streams_total", "Times a slow stream was caught up from snapshots."),
		sentFrames:   counter("sent_frames_total", "Frames sent, over all streams."),
		sentBytes:    counter("sent_bytes_total", "Bytes of frames sent, before TLS and HTTP/2."),
		acks:         counter("acks_total", "Acks received."),
		nacks:        counter("nacks_total", "Nacks received: objects that a node could not program."),
		resyncs:      counter("resyncs_total", "Requests for state to be sent again."),
	}
}
