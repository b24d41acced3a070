package fanout

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/slicecast/slicecast/internal/wire"
)

type metrics struct {
	// Publishing.
	updates        prometheus.Counter
	updateBytes    prometheus.Observer
	publishSeconds prometheus.Observer
	encodeErrors   prometheus.Counter
	catchUps       prometheus.Counter
	sentFrames     prometheus.Counter
	sentBytes      prometheus.Counter
	lapped         prometheus.Counter
	// Starts of streams.
	starts           *prometheus.CounterVec
	replaced         prometheus.Counter
	behindWaits      *prometheus.CounterVec
	admissionWaiting prometheus.Gauge
	stalledTurns     prometheus.Counter
	// Reports of clients.
	acks         prometheus.Counter
	nacks        prometheus.Counter
	droppedNacks prometheus.Counter
	resyncs      prometheus.Counter
	unconverged  prometheus.Counter
	convergence  [len(shares)]prometheus.Observer
}

// metricFactory registers metrics of the server.
type metricFactory struct{ promauto.Factory }

func metricOpts(name, help string) prometheus.Opts {
	return prometheus.Opts{Namespace: "slicecast", Subsystem: "server", Name: name, Help: help}
}

func (f metricFactory) counter(name, help string) prometheus.Counter {
	return f.NewCounter(prometheus.CounterOpts(metricOpts(name, help)))
}

// counters returns counters by the values of a label, which are 0 at first.
func (f metricFactory) counters(name, help, label string, values ...string) *prometheus.CounterVec {
	v := f.NewCounterVec(prometheus.CounterOpts(metricOpts(name, help)), []string{label})
	for _, value := range values {
		v.WithLabelValues(value)
	}
	return v
}

// histograms returns histograms by the values of labels, with a number of buckets from the smallest
// on, each of which is wider by a factor.
func (f metricFactory) histograms(
	name, help string, smallest, factor float64, buckets int, labels ...string,
) *prometheus.HistogramVec {
	return f.NewHistogramVec(prometheus.HistogramOpts{
		Namespace: "slicecast", Subsystem: "server", Name: name, Help: help,
		Buckets: prometheus.ExponentialBuckets(smallest, factor, buckets),
	}, labels)
}

func newMetrics(r prometheus.Registerer) *metrics {
	f, m := metricFactory{promauto.With(r)}, &metrics{}
	m.registerPublishing(f)
	m.registerStarts(f)
	m.registerReports(f)
	return m
}

func (m *metrics) registerPublishing(f metricFactory) {
	m.updates = f.counter("updates_total", "Updates published, one for each changed shard of a publish.")
	m.updateBytes = f.histograms("update_size_bytes", "Size of published updates, before TLS and HTTP/2.",
		64, 4, 10).WithLabelValues()
	m.publishSeconds = f.histograms("publish_duration_seconds", "Time to publish pending changes: apply, diff and encode.",
		1e-5, 4, 10).WithLabelValues()
	m.encodeErrors = f.counter("encode_errors_total", "Updates that could not be encoded.")
	m.catchUps = f.counter("catch_up_frames_total",
		"Snapshot, catch-up and bucket frames built, each for any number of streams.")
	m.sentFrames = f.counter("sent_frames_total", "Frames sent, over all streams.")
	m.sentBytes = f.counter("sent_bytes_total", "Bytes of frames sent, before TLS and HTTP/2.")
	m.lapped = f.counter("lapped_streams_total", "Times a slow stream was caught up from snapshots.")
}

func (m *metrics) registerStarts(f metricFactory) {
	m.starts = f.counters("stream_starts_total", "Streams that began, by what the client held: cold (nothing), "+
		"resume (something), narrowed (it has a subscription); refused: those that waited for whole shards and were asked "+
		"to come back later; too_many: of observers and relays that had as many as they may, refused before they began; "+
		"too_often: of clients that had opened others just before, refused likewise.", "start",
		"cold", "resume", "narrowed", "refused", "too_many", "too_often")
	m.replaced = f.counter("replaced_streams_total", "Streams ended because the same node has opened a newer one.")
	m.behindWaits = f.counters("behind_waits_total", "Clients that had seen newer state than this server and waited for "+
		"it, by result: caught_up, or gave_up (served nonetheless).", "result", "caught_up", "gave_up")
	m.admissionWaiting = f.NewGauge(prometheus.GaugeOpts(metricOpts("admission_waiting_streams",
		"Streams of clients without any state that wait for their turn.")))
	m.stalledTurns = f.counter("admission_stalled_turns_total", "Turns that ended early because the client did not take "+
		"the whole shards that it was sent, or took them slowly. It is sent them nonetheless, and others have their turns "+
		"meanwhile.")
}

func (m *metrics) registerReports(f metricFactory) {
	m.acks = f.counter("acks_total", "Acks received.")
	m.nacks = f.counter("nacks_total", "Nacks received: objects that a node could not program.")
	m.droppedNacks = f.counter("dropped_nacks_total",
		"Nacks that are not remembered, as too many of the same client stood already.")
	m.resyncs = f.counter("resyncs_total",
		"Requests for state to be sent again, beside answers to the server's own questions.")
	m.unconverged = f.counter("unconverged_updates_total",
		"Updates of which no time was taken until all nodes had them, as too many newer ones came meanwhile.")
	convergence := f.histograms("convergence_duration_seconds", "Time from the publish of an update until this share of "+
		"the connected nodes had it programmed, by the nodes' own times and at most a sixteenth more. It is observed once "+
		"all nodes have the update; if some lack it, with the first heartbeat after 10 s for the shares that have it.",
		1e-3, 2, 18, "nodes")
	for i := range shares {
		m.convergence[i] = convergence.WithLabelValues(shares[i].label)
	}
}

// registerGauges registers the metrics of the hub's current state.
func (h *Hub) registerGauges(r prometheus.Registerer) {
	gauge := func(name, help string, value func() int) {
		opts := prometheus.GaugeOpts(metricOpts(name, help))
		promauto.With(r).NewGaugeFunc(opts, func() float64 { return float64(value()) })
	}
	gauge("streams", "Open streams.", func() int { return len(h.sessions.list()) })
	gauge("nodes", "Nodes that are served, by agents' streams and through relays.",
		func() int { return int(h.servedNodes.Load()) })
	gauge("frame_cache_bytes", "Bytes of snapshot and catch-up frames that are kept for other streams.", h.frames.size)
}

// countSent counts frames that are sent to a client, and returns their bytes.
func (m *metrics) countSent(frames []wire.Frame) (bytes int) {
	for _, f := range frames {
		bytes += len(f)
	}
	m.sentFrames.Add(float64(len(frames)))
	m.sentBytes.Add(float64(bytes))
	return bytes
}
