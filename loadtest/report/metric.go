package report

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
)

// Unit is the unit of a metric's values.
type Unit string

// Units of metrics.
const (
	Seconds Unit = "s"
	Millis  Unit = "ms"
	Micros  Unit = "µs"
	Bytes   Unit = "B"
	Number  Unit = ""
)

// Metric is a figure that a repeat may have. For every metric, less is better.
type Metric struct {
	// Name is the metric's name in objectives and comparisons.
	Name string
	Unit Unit
	// Help describes the metric in one line.
	Help string
	// value returns the metric's value for a repeat, or NaN if it was not measured.
	value func(*figures) float64
}

// figures are the phases of a repeat, joined by kind.
type figures struct {
	peer    Peer
	nodes   float64
	repeat  *Repeat
	cold    joined
	changes joined
	resync  joined
}

// joined is the sum of all phases of one kind.
type joined struct {
	seconds     float64
	updates     float64
	received    float64
	sent        float64
	messages    float64
	made        float64 // number of changes
	server      *CPU
	apiServer   *CPU
	client      CPU
	latency     Distribution
	lag         *Lag
	convergence *Convergence
	// aside is the part that the costs per update leave out.
	aside Aside
}

// join adds up the phases of a kind. Lag and convergence are those of the phase with the longest.
// Latencies of several phases are merged if all of them have histograms, and are unknown otherwise.
func join(r *Repeat, kind PhaseKind) (j joined) {
	var latencies []Distribution
	for i := range r.Phases {
		p := &r.Phases[i]
		if p.Kind != kind {
			continue
		}
		j.seconds += p.Seconds
		j.updates += float64(p.Updates)
		j.received += float64(p.ReceivedBytes)
		j.sent += float64(p.SentBytes)
		j.messages += float64(p.MessageBytes)
		j.made += float64(p.Changes)
		j.client = j.client.add(p.ClientCPU)
		latencies = append(latencies, p.Latency)
		if a := p.Aside; a != nil {
			j.aside.Updates += a.Updates
			j.aside.ReceivedBytes += a.ReceivedBytes
			j.aside.SentBytes += a.SentBytes
			j.aside.ServerCPU = sum(j.aside.ServerCPU, a.ServerCPU)
		}
		j.server = sum(j.server, p.ServerCPU)
		j.apiServer = sum(j.apiServer, p.APIServerCPU)
		if l := p.SourceLag; l != nil && (j.lag == nil || l.P99 > j.lag.P99) {
			j.lag = l
		}
		if c := p.Convergence; c != nil && (j.convergence == nil || c.Nodes100.Max > j.convergence.Nodes100.Max) {
			j.convergence = c
		}
	}
	if len(latencies) == 1 {
		j.latency = latencies[0]
	} else if merged, err := Merge(latencies...); err == nil {
		j.latency = merged
	}
	return j
}

// sum returns the sum of those arguments that are not nil, or nil if both are.
func sum(a, b *CPU) *CPU {
	if a == nil || b == nil {
		return cmp.Or(a, b)
	}
	return new(a.add(*b))
}

const microsPerSecond = 1e6

// Metrics lists all metrics, in the order of reports.
var Metrics = slices.Concat(
	when(func(f *figures) bool { return f.changes.latency.Count > 0 },
		Metric{"p50", Millis,
			"latency from when a change was due until a node had applied it, without slow nodes (--slow-percent): median",
			func(f *figures) float64 { return f.changes.latency.P50 }},
		Metric{"p90", Millis, "… 90th percentile", func(f *figures) float64 { return f.changes.latency.P90 }},
		Metric{"p99", Millis, "… 99th percentile", func(f *figures) float64 { return f.changes.latency.P99 }},
		Metric{"p999", Millis, "… 99.9th percentile", func(f *figures) float64 { return f.changes.latency.P999 }},
		Metric{"max", Millis, "… maximum", func(f *figures) float64 { return f.changes.latency.Max }},
		Metric{"mean", Millis, "… mean", func(f *figures) float64 { return f.changes.latency.Mean }},
	),
	when(func(f *figures) bool { return f.changes.convergence != nil },
		Metric{"converge50", Millis, "longest time from when a change was due until 50 % of the nodes had it",
			func(f *figures) float64 { return f.changes.convergence.Nodes50.Max }},
		Metric{"converge99", Millis, "… until 99 % had it",
			func(f *figures) float64 { return f.changes.convergence.Nodes99.Max }},
		Metric{"converge100", Millis, "… until all had it",
			func(f *figures) float64 { return f.changes.convergence.Nodes100.Max }},
	),
	when(func(f *figures) bool { return f.changes.updates > 0 },
		Metric{"bytes-per-update", Bytes,
			"bytes below TLS that nodes received, per node-update; bytes and updates during an event are left out",
			func(f *figures) float64 {
				return per(f.changes.received-float64(f.changes.aside.ReceivedBytes), f.changes.ordinary())
			}},
		Metric{"sent-bytes-per-update", Bytes, "bytes below TLS that nodes sent, per node-update; an event is left out",
			func(f *figures) float64 {
				return per(f.changes.sent-float64(f.changes.aside.SentBytes), f.changes.ordinary())
			}},
		Metric{"cpu-per-update", Micros, "server CPU per node-update; an event is left out", cpuPerUpdate(CPU.Total)},
		Metric{"cpu-user-per-update", Micros, "… in user mode", cpuPerUpdate(func(c CPU) float64 { return c.User })},
		Metric{"cpu-system-per-update", Micros, "… in the kernel", cpuPerUpdate(func(c CPU) float64 { return c.System })},
		Metric{"changes-bytes", Bytes, "bytes below TLS that all nodes received for all changes and for an event among them",
			func(f *figures) float64 { return f.changes.received }},
		Metric{"changes-cpu", Seconds, "server CPU for all changes and for an event among them",
			func(f *figures) float64 { return total(f.changes.server) }},
	),
	[]Metric{
		{"api-server-cpu-per-change", Micros,
			"API server CPU per change, including the write but not etcd, if the API server is the peer or the run's own",
			func(f *figures) float64 {
				spent := f.changes.apiServer
				if f.peer == KubeAPIServer {
					spent = f.changes.server
				}
				return per(total(spent)*microsPerSecond, f.changes.made)
			}},
		{"changes-time", Seconds, "time from the first change until all nodes had the last",
			func(f *figures) float64 { return only(f.changes.updates > 0, f.changes.seconds) }},
		{"server-cores", Number, "CPU cores that the server used during the changes",
			func(f *figures) float64 { return per(total(f.changes.server), f.changes.seconds) }},
		{"client-cores", Number, "CPU cores that the load tester used during the changes",
			func(f *figures) float64 { return per(f.changes.client.Total(), f.changes.seconds) }},
		{"client-cpu-per-update", Micros, "CPU that the load tester used per node-update",
			func(f *figures) float64 { return per(f.changes.client.Total()*microsPerSecond, f.changes.updates) }},
	},
	when(func(f *figures) bool { return f.changes.lag != nil },
		Metric{"source-lag", Millis, "how late the source made changes: 99th percentile",
			func(f *figures) float64 { return f.changes.lag.P99 }}),
	[]Metric{
		{"reconnects", Number, "streams that broke during the whole repeat and that the scenario did not break",
			func(f *figures) float64 { return float64(f.repeat.Reconnects) }},
	},
	syncMetrics("cold", "a node without state to receive all of it", func(f *figures) *joined { return &f.cold }),
	syncMetrics("resync", "a node that still holds the state to resync", func(f *figures) *joined { return &f.resync }),
	when(func(f *figures) bool { return f.repeat.ServerMemory != nil },
		Metric{"memory-state", Bytes, "server's heap and stacks with the state and without nodes", func(f *figures) float64 {
			return float64(f.repeat.ServerMemory.State.Heap + f.repeat.ServerMemory.State.Stacks)
		}},
		Metric{"resident-state", Bytes, "server's RAM with the state and without nodes", func(f *figures) float64 {
			return float64(f.repeat.ServerMemory.State.Resident)
		}},
		Metric{"anonymous-state", Bytes, "… without pages of files, which are mostly the program", func(f *figures) float64 {
			return positive(f.repeat.ServerMemory.State.Anonymous)
		}},
		Metric{"memory-per-node", Bytes, "server's heap and stacks per connected node", func(f *figures) float64 {
			m := f.repeat.ServerMemory
			return per(float64(m.Connected.Heap+m.Connected.Stacks-m.State.Heap-m.State.Stacks), f.nodes)
		}},
		Metric{"resident-per-node", Bytes, "server's RAM per connected node", func(f *figures) float64 {
			return per(float64(f.repeat.ServerMemory.Connected.Resident-f.repeat.ServerMemory.State.Resident), f.nodes)
		}},
	),
	[]Metric{
		{"server-peak", Bytes, "peak RAM of the server before --floor",
			func(f *figures) float64 { return positive(f.repeat.ServerPeakBytes) }},
		{"client-peak", Bytes, "peak RAM of the processes with nodes before --floor",
			func(f *figures) float64 { return positive(f.repeat.ClientPeakBytes) }},
	},
	when(func(f *figures) bool { return f.repeat.Floor != nil },
		Metric{"floor-handshake-cpu", Micros, "raw TLS: server CPU per handshake", func(f *figures) float64 {
			return per(f.repeat.Floor.HandshakeCPU.Total()*microsPerSecond, float64(f.repeat.Floor.Handshakes))
		}},
		Metric{"floor-handshake-bytes", Bytes, "raw TLS: bytes that a client receives per handshake", func(f *figures) float64 {
			return per(float64(f.repeat.Floor.HandshakeBytes), float64(f.repeat.Floor.Handshakes))
		}},
		Metric{"floor-cold-cpu", Micros, "raw TLS: server CPU for the bytes of a cold sync", func(f *figures) float64 {
			return f.repeat.Floor.Cold.cpuPerWrite()
		}},
		Metric{"floor-write-cpu", Micros, "raw TLS: server CPU per message of 100 bytes", func(f *figures) float64 {
			if f.repeat.Floor.Churn == nil {
				return math.NaN()
			}
			return f.repeat.Floor.Churn.cpuPerWrite()
		}},
	),
)

// when returns metrics that were measured only if a condition holds.
func when(measured func(*figures) bool, metrics ...Metric) []Metric {
	for i := range metrics {
		value := metrics[i].value
		metrics[i].value = func(f *figures) float64 {
			if !measured(f) {
				return math.NaN()
			}
			return value(f)
		}
	}
	return metrics
}

// syncMetrics returns the metrics of a sync.
func syncMetrics(name, what string, of func(*figures) *joined) []Metric {
	return slices.Concat(
		when(func(f *figures) bool { return of(f).updates > 0 },
			Metric{name + "-bytes-per-node", Bytes, "bytes below TLS for " + what,
				func(f *figures) float64 { return of(f).received / of(f).updates }},
			Metric{name + "-message-bytes-per-node", Bytes, "… in messages, before HTTP/2 and TLS",
				func(f *figures) float64 { return only(of(f).messages > 0, of(f).messages/of(f).updates) }},
			Metric{name + "-cpu-per-node", Micros, "server CPU for " + what + ", including the TLS handshake",
				func(f *figures) float64 { return total(of(f).server) * microsPerSecond / of(f).updates }},
			Metric{name + "-time", Seconds, "time until the last node was in sync",
				func(f *figures) float64 { return of(f).seconds }},
		),
		when(func(f *figures) bool { return of(f).latency.Count > 0 },
			Metric{name + "-p50", Millis, "time for " + what + ": median",
				func(f *figures) float64 { return of(f).latency.P50 }},
			Metric{name + "-p99", Millis, "… 99th percentile", func(f *figures) float64 { return of(f).latency.P99 }},
		),
	)
}

// only returns v if a condition holds, and NaN otherwise.
func only(is bool, v float64) float64 {
	if !is {
		return math.NaN()
	}
	return v
}

// positive returns v, and NaN for 0, which means that v was not measured.
func positive(v int64) float64 { return only(v > 0, float64(v)) }

// per returns v for each of n, or NaN if there are none.
func per(v, n float64) float64 { return only(n > 0, v/n) }

// total returns the total of c, or NaN if c was not measured.
func total(c *CPU) float64 {
	if c == nil {
		return math.NaN()
	}
	return c.Total()
}

func (w *FloorWrites) cpuPerWrite() float64 {
	return per(w.ServerCPU.Total()*microsPerSecond, float64(w.Writes))
}

// ordinary returns the number of updates that arrived outside of events.
func (j *joined) ordinary() float64 { return j.updates - float64(j.aside.Updates) }

func cpuPerUpdate(of func(CPU) float64) func(*figures) float64 {
	return func(f *figures) float64 {
		if f.changes.server == nil {
			return math.NaN()
		}
		spent := of(*f.changes.server)
		if a := f.changes.aside.ServerCPU; a != nil {
			spent -= of(*a)
		}
		// The divided parts of Aside are imprecise, so a difference may fall below zero and counts
		// as 0. An undivided time says nothing about its parts, so those are not measured.
		divided := f.changes.server.Undivided == 0 || spent > 0
		return only(divided, per(max(0, spent)*microsPerSecond, f.changes.ordinary()))
	}
}

// OfPeer reports whether the metric describes the peer. The other metrics describe the load tester
// and the machine; readers need them to judge the figures.
func (m *Metric) OfPeer() bool {
	return m.Name != "source-lag" && !strings.HasPrefix(m.Name, "client-") && !strings.HasPrefix(m.Name, "floor-")
}

// MarshalText returns the metric's name.
func (m *Metric) MarshalText() ([]byte, error) { return []byte(m.Name), nil }

// MetricNamed returns the metric with a name. Its error lists all names.
func MetricNamed(name string) (*Metric, error) {
	i := slices.IndexFunc(Metrics, func(m Metric) bool { return m.Name == name })
	if i < 0 {
		names := make([]string, len(Metrics))
		for i := range Metrics {
			names[i] = Metrics[i].Name
		}
		return nil, fmt.Errorf("there is no metric %q: use one of %s", name, strings.Join(names, ", "))
	}
	return &Metrics[i], nil
}

// Spread is the median and the range of a metric over repeats.
type Spread struct {
	Unit Unit `json:"unit"`
	// Median is the median of the repeats. If their number is even, it is the mean of the two in
	// the middle.
	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
	// Values are the values of those repeats that have one, in order.
	Values []float64 `json:"values"`
}

// SpreadOf returns the spread of values, of which there is at least one.
func SpreadOf(unit Unit, values []float64) Spread {
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	return Spread{
		Unit: unit, Median: (sorted[(n-1)/2] + sorted[n/2]) / 2, Min: sorted[0], Max: sorted[n-1], Values: values,
	}
}

// Summarize computes Summary from the repeats.
func (r *Report) Summarize() {
	r.Summary = make(map[string]Spread)
	all := make([]figures, len(r.Repeats))
	for i := range r.Repeats {
		p := &r.Repeats[i]
		all[i] = figures{r.Peer, float64(r.Nodes), p, join(p, ColdSync), join(p, Changes), join(p, Resync)}
	}
	for _, m := range Metrics {
		var values []float64
		for i := range all {
			if v := m.value(&all[i]); !math.IsNaN(v) {
				values = append(values, v)
			}
		}
		if len(values) > 0 {
			r.Summary[m.Name] = SpreadOf(m.Unit, values)
		}
	}
}
