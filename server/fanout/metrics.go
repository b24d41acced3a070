package fanout

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/slicecast/slicecast/internal/wire"
)

type metrics struct {
	// Publishing.
	updates, encodeErrors, catchUps, sentFrames, sentBytes, lapped prometheus.Counter
	updateBytes, publishSeconds                                    prometheus.Observer
	// Starts of streams.
	starts, behindWaits    *prometheus.CounterVec
	replaced, stalledTurns prometheus.Counter
	// Reports of clients.
	acks, nacks, droppedNacks, resyncs, unconverged prometheus.Counter
	convergence                                     [len(shares)]prometheus.Observer
}

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
	m.updates = f.counter("updates_total", "Number of published updates, one for each changed shard of a publish.")
	m.updateBytes = f.histograms("update_size_bytes", "Size of published updates in bytes, before TLS and HTTP/2.",
		64, 4, 10).WithLabelValues()
	m.publishSeconds = f.histograms("publish_duration_seconds", "Time to apply, diff and encode pending changes in seconds.",
		1e-5, 4, 10).WithLabelValues()
	m.encodeErrors = f.counter("encode_errors_total", "Number of updates that could not be encoded.")
	m.catchUps = f.counter("catch_up_frames_total",
		"Number of snapshot, catch-up and bucket frames that were built, each for any number of streams.")
	m.sentFrames = f.counter("sent_frames_total", "Number of frames sent on all streams.")
	m.sentBytes = f.counter("sent_bytes_total", "Number of bytes of frames sent, before TLS and HTTP/2.")
	m.lapped = f.counter("lapped_streams_total", "Number of times that a slow stream was caught up from snapshots.")
}

func (m *metrics) registerStarts(f metricFactory) {
	m.starts = f.counters("stream_starts_total", "Number of streams that began, by what the client held: cold "+
		"(nothing) or resume (something). Streams that were refused count as refused (the "+
		"client waited too long for whole shards), too_many (an observer or relay had too many streams) or too_often (the "+
		"client opened streams too often).", "start",
		"cold", "resume", "refused", "too_many", "too_often")
	m.replaced = f.counter("replaced_streams_total", "Number of streams that were replaced by a newer stream of the same node.")
	m.behindWaits = f.counters("behind_waits_total", "Number of clients that had seen newer state than this server and waited "+
		"for it, by result: caught_up, or gave_up (served nonetheless).", "result", "caught_up", "gave_up")
	m.stalledTurns = f.counter("admission_stalled_turns_total", "Number of turns that ended early because the client "+
		"received whole shards too slowly. It still receives them, but other clients no longer wait for it.")
}

func (m *metrics) registerReports(f metricFactory) {
	m.acks = f.counter("acks_total", "Number of acks received.")
	m.nacks = f.counter("nacks_total", "Number of nacks received, each for an object that a node could not program.")
	m.droppedNacks = f.counter("dropped_nacks_total",
		"Number of nacks that were dropped because their client had too many open nacks.")
	m.resyncs = f.counter("resyncs_total",
		"Number of resyncs that clients requested, without answers to the server's queries.")
	m.unconverged = f.counter("unconverged_updates_total",
		"Number of updates whose convergence was not measured to the end because too many newer ones followed.")
	convergence := f.histograms("convergence_duration_seconds", "Time from the publish of an update until this share "+
		"of the connected nodes had programmed it, in seconds, measured by the nodes and rounded up by at most a "+
		"sixteenth. It is observed once all nodes have the update. If some nodes lack it, shares that have it are observed "+
		"with the first heartbeat after 10 s.",
		1e-3, 2, 18, "nodes")
	for i := range shares {
		m.convergence[i] = convergence.WithLabelValues(shares[i].label)
	}
}

func (h *Hub) registerGauges(r prometheus.Registerer) {
	gauge := func(name, help string, value func() int) {
		opts := prometheus.GaugeOpts(metricOpts(name, help))
		promauto.With(r).NewGaugeFunc(opts, func() float64 { return float64(value()) })
	}
	gauge("streams", "Number of open streams.", func() int { return len(h.sessions.list()) })
	gauge("admission_waiting_streams",
		"Number of streams that wait for their turn to receive whole shards, or much of them.", h.turns.waiting)
	gauge("nodes", "Number of nodes that are served, by agents' streams or through relays.",
		func() int { return int(h.servedNodes.Load()) })
	for i, name := range wire.WarningNames {
		opts := prometheus.GaugeOpts(metricOpts("node_warnings", "Number of served nodes with this warning: something that "+
			"should be mended on the node, although everything is programmed. The status command and the log say what."))
		opts.ConstLabels = prometheus.Labels{"warning": name}
		promauto.With(r).NewGaugeFunc(opts, func() float64 { return float64(h.warnings[i].Load()) })
	}
	gauge("ring_entries", "Number of publishes and heartbeats that are kept for streams that are behind; at most 1,024.",
		func() int { entries, _ := h.ring.size(); return entries })
	gauge("ring_bytes", "Number of bytes of publishes and heartbeats that are kept for streams that are behind; at most "+
		"32 MiB, unless there is just one.", func() int { _, held := h.ring.size(); return held })
	gauge("open_updates", "Number of updates that some node lacks and whose convergence is measured; at most 256 a shard, "+
		"and 8,192.", h.convergence.openUpdates)
	gauge("tombstones", "Number of removed objects that are remembered for clients that come back; at most --tombstones a "+
		"shard.", h.store.Tombstones)
	gauge("frame_cache_bytes", "Number of bytes of snapshot and catch-up frames that are cached for other streams.", h.frames.size)
}

func (m *metrics) countSent(frames []wire.Frame) (bytes int) {
	for _, f := range frames {
		bytes += len(f)
	}
	m.sentFrames.Add(float64(len(frames)))
	m.sentBytes.Add(float64(bytes))
	return bytes
}
