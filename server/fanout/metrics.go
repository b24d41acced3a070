package fanout

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/slicecast/slicecast/internal/wire"
)

type metrics struct {
	updates          prometheus.Counter
	updateBytes      prometheus.Histogram
	publishSeconds   prometheus.Histogram
	encodeErrors     prometheus.Counter
	catchUps         prometheus.Counter
	lapped           prometheus.Counter
	replaced         prometheus.Counter
	sentFrames       prometheus.Counter
	sentBytes        prometheus.Counter
	acks             prometheus.Counter
	nacks            prometheus.Counter
	droppedNacks     prometheus.Counter
	resyncs          prometheus.Counter
	starts           *prometheus.CounterVec
	behindWaits      *prometheus.CounterVec
	admissionWaiting prometheus.Gauge
	stalledTurns     prometheus.Counter
	unconverged      prometheus.Counter
	convergence      [len(shares)]prometheus.Observer
}

func newMetrics(r prometheus.Registerer, h *Hub) *metrics {
	f := promauto.With(r)
	opts := func(name, help string) prometheus.Opts {
		return prometheus.Opts{Namespace: "slicecast", Subsystem: "server", Name: name, Help: help}
	}
	counter := func(name, help string) prometheus.Counter {
		return f.NewCounter(prometheus.CounterOpts(opts(name, help)))
	}
	counters := func(name, help, label string, values ...string) *prometheus.CounterVec {
		v := f.NewCounterVec(prometheus.CounterOpts(opts(name, help)), []string{label})
		for _, value := range values {
			v.WithLabelValues(value)
		}
		return v
	}
	gauge := func(name, help string, value func() float64) {
		f.NewGaugeFunc(prometheus.GaugeOpts(opts(name, help)), value)
	}
	gauge("streams", "Open streams.", func() float64 { return float64(len(h.list())) })
	gauge("nodes", "Nodes that are served, by agents' streams and through relays.", func() float64 { return float64(h.nodes.Load()) })
	gauge("frame_cache_bytes", "Bytes of snapshot and catch-up frames that are kept for other streams.",
		func() float64 { return float64(h.frames.size()) })
	m := &metrics{
		updates: counter("updates_total", "Updates published, one for each changed shard of a publish."),
		updateBytes: f.NewHistogram(prometheus.HistogramOpts{Namespace: "slicecast", Subsystem: "server", Name: "update_size_bytes",
			Help: "Size of published updates, before TLS and HTTP/2.", Buckets: prometheus.ExponentialBuckets(64, 4, 10)}),
		publishSeconds: f.NewHistogram(prometheus.HistogramOpts{Namespace: "slicecast", Subsystem: "server", Name: "publish_duration_seconds",
			Help: "Time to publish pending changes: apply, diff and encode.", Buckets: prometheus.ExponentialBuckets(1e-5, 4, 10)}),
		encodeErrors: counter("encode_errors_total", "Updates that could not be encoded."),
		catchUps:     counter("catch_up_frames_total", "Snapshot, catch-up and bucket frames built, each for any number of streams."),
		lapped:       counter("lapped_streams_total", "Times a slow stream was caught up from snapshots."),
		replaced:     counter("replaced_streams_total", "Streams ended because the same node has opened a newer one."),
		sentFrames:   counter("sent_frames_total", "Frames sent, over all streams."),
		sentBytes:    counter("sent_bytes_total", "Bytes of frames sent, before TLS and HTTP/2."),
		acks:         counter("acks_total", "Acks received."),
		nacks:        counter("nacks_total", "Nacks received: objects that a node could not program."),
		droppedNacks: counter("dropped_nacks_total", "Nacks that are not remembered, as too many of the same client stood already."),
		resyncs:      counter("resyncs_total", "Requests for state to be sent again, beside answers to the server's own questions."),
		starts: counters("stream_starts_total", "Streams that began, by what the client held: cold (nothing), resume (something), "+
			"narrowed (it has a subscription); refused: those that waited for whole shards and were asked to come back later; too_many: of "+
			"observers and relays that had as many as they may, refused before they began; too_often: of clients that had opened others just "+
			"before, refused likewise.", "start",
			"cold", "resume", "narrowed", "refused", "too_many", "too_often"),
		behindWaits: counters("behind_waits_total", "Clients that had seen newer state than this server and waited for it, by result: "+
			"caught_up, or gave_up (served nonetheless).", "result", "caught_up", "gave_up"),
		admissionWaiting: f.NewGauge(prometheus.GaugeOpts(opts("admission_waiting_streams",
			"Streams of clients without any state that wait for their turn."))),
		stalledTurns: counter("admission_stalled_turns_total", "Turns that ended early because the client did not take the whole shards that it "+
			"was sent, or took them slowly. It is sent them nonetheless, and others have their turns meanwhile."),
		unconverged: counter("unconverged_updates_total", "Updates of which no time was taken until all nodes had them, as too many newer ones came meanwhile."),
	}
	convergence := f.NewHistogramVec(prometheus.HistogramOpts{Namespace: "slicecast", Subsystem: "server", Name: "convergence_duration_seconds",
		Help: "Time from the publish of an update until this share of the connected nodes had it programmed, by the nodes' own times and at most a " +
			"sixteenth more. It is observed once all nodes have the update; if some lack it, with the first heartbeat after 10 s for the shares that have it.",
		Buckets: prometheus.ExponentialBuckets(1e-3, 2, 18)}, []string{"nodes"})
	for i := range shares {
		m.convergence[i] = convergence.WithLabelValues(shares[i].label)
	}
	return m
}

// sent counts frames that are sent to a stream, and returns their bytes.
func (m *metrics) sent(frames []wire.Frame) (bytes int) {
	for _, f := range frames {
		bytes += len(f)
	}
	m.sentFrames.Add(float64(len(frames)))
	m.sentBytes.Add(float64(bytes))
	return bytes
}
