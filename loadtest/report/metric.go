package report

import (
	"cmp"
	"fmt"
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
	// value returns the metric's value for a repeat, and false if it was not measured.
	value func(*figures) (float64, bool)
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

func figuresOf(r *Repeat, peer Peer, nodes int) *figures {
	return &figures{
		peer: peer, nodes: float64(nodes), repeat: r, cold: join(r, ColdSync), changes: join(r, Changes), resync: join(r, Resync),
	}
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
	latencyMetrics(),
	[]Metric{
		{"converge50", Millis, "longest time from when a change was due until 50 % of the nodes had it", converge(func(c *Convergence) float64 { return c.Nodes50.Max })},
		{"converge99", Millis, "… until 99 % had it", converge(func(c *Convergence) float64 { return c.Nodes99.Max })},
		{"converge100", Millis, "… until all had it", converge(func(c *Convergence) float64 { return c.Nodes100.Max })},
		{"bytes-per-update", Bytes, "bytes below TLS that nodes received, per node-update; bytes and updates during an event are left out", perUpdate(func(j *joined) float64 { return j.received - float64(j.aside.ReceivedBytes) })},
		{"sent-bytes-per-update", Bytes, "bytes below TLS that nodes sent, per node-update; an event is left out", perUpdate(func(j *joined) float64 { return j.sent - float64(j.aside.SentBytes) })},
		{"cpu-per-update", Micros, "server CPU per node-update; an event is left out", cpuPerUpdate(CPU.Total)},
		{"cpu-user-per-update", Micros, "… in user mode", cpuPerUpdate(func(c CPU) float64 { return c.User })},
		{"cpu-system-per-update", Micros, "… in the kernel", cpuPerUpdate(func(c CPU) float64 { return c.System })},
		{"changes-bytes", Bytes, "bytes below TLS that all nodes received for all changes and for an event among them", func(f *figures) (float64, bool) {
			return f.changes.received, f.changes.updates > 0
		}},
		{"changes-cpu", Seconds, "server CPU for all changes and for an event among them", func(f *figures) (float64, bool) {
			return total(f.changes.server), f.changes.server != nil && f.changes.updates > 0
		}},
		{"api-server-cpu-per-change", Micros, "API server CPU per change, including the write but not etcd, if the API server is the peer or the run's own", func(f *figures) (float64, bool) {
			spent := f.changes.apiServer
			if f.peer == KubeAPIServer {
				spent = f.changes.server
			}
			return total(spent) * microsPerSecond / f.changes.made, spent != nil && f.changes.made > 0
		}},
		{"changes-time", Seconds, "time from the first change until all nodes had the last", func(f *figures) (float64, bool) {
			return f.changes.seconds, f.changes.updates > 0
		}},
		{"server-cores", Number, "CPU cores that the server used during the changes", func(f *figures) (float64, bool) {
			return total(f.changes.server) / f.changes.seconds, f.changes.server != nil && f.changes.seconds > 0
		}},
		{"client-cores", Number, "CPU cores that the load tester used during the changes", func(f *figures) (float64, bool) {
			return f.changes.client.Total() / f.changes.seconds, f.changes.seconds > 0
		}},
		{"client-cpu-per-update", Micros, "CPU that the load tester used per node-update", func(f *figures) (float64, bool) {
			return f.changes.client.Total() * microsPerSecond / f.changes.updates, f.changes.updates > 0
		}},
		{"source-lag", Millis, "how late the source made changes: 99th percentile", func(f *figures) (float64, bool) {
			if f.changes.lag == nil {
				return 0, false
			}
			return f.changes.lag.P99, true
		}},
		{"reconnects", Number, "streams that broke during the whole repeat and that the scenario did not break", func(f *figures) (float64, bool) {
			return float64(f.repeat.Reconnects), true
		}},
	},
	syncMetrics("cold", "a node without state to receive all of it", func(f *figures) *joined { return &f.cold }),
	syncMetrics("resync", "a node that still holds the state to resync", func(f *figures) *joined { return &f.resync }),
	[]Metric{
		{"memory-state", Bytes, "server's heap and stacks with the state and without nodes", memory(func(m *ServerMemory, _ float64) float64 {
			return float64(m.State.Heap + m.State.Stacks)
		})},
		{"resident-state", Bytes, "server's RAM with the state and without nodes", memory(func(m *ServerMemory, _ float64) float64 {
			return float64(m.State.Resident)
		})},
		{"anonymous-state", Bytes, "… without pages of files, which are mostly the program", func(f *figures) (float64, bool) {
			m := f.repeat.ServerMemory
			if m == nil {
				return 0, false
			}
			return float64(m.State.Anonymous), m.State.Anonymous > 0
		}},
		{"memory-per-node", Bytes, "server's heap and stacks per connected node", memory(func(m *ServerMemory, nodes float64) float64 {
			return float64(m.Connected.Heap+m.Connected.Stacks-m.State.Heap-m.State.Stacks) / nodes
		})},
		{"resident-per-node", Bytes, "server's RAM per connected node", memory(func(m *ServerMemory, nodes float64) float64 {
			return float64(m.Connected.Resident-m.State.Resident) / nodes
		})},
		{"server-peak", Bytes, "peak RAM of the server before --floor", func(f *figures) (float64, bool) {
			return float64(f.repeat.ServerPeakBytes), f.repeat.ServerPeakBytes > 0
		}},
		{"client-peak", Bytes, "peak RAM of the processes with nodes before --floor", func(f *figures) (float64, bool) {
			return float64(f.repeat.ClientPeakBytes), f.repeat.ClientPeakBytes > 0
		}},
		{"floor-handshake-cpu", Micros, "raw TLS: server CPU per handshake", floor(func(f *Floor) (float64, bool) {
			return f.HandshakeCPU.Total() * microsPerSecond / float64(f.Handshakes), true
		})},
		{"floor-handshake-bytes", Bytes, "raw TLS: bytes that a client receives per handshake", floor(func(f *Floor) (float64, bool) {
			return float64(f.HandshakeBytes) / float64(f.Handshakes), true
		})},
		{"floor-cold-cpu", Micros, "raw TLS: server CPU for the bytes of a cold sync", floor(func(f *Floor) (float64, bool) {
			return f.Cold.ServerCPU.Total() * microsPerSecond / float64(f.Cold.Writes), true
		})},
		{"floor-write-cpu", Micros, "raw TLS: server CPU per message of 100 bytes", floor(func(f *Floor) (float64, bool) {
			if f.Churn == nil {
				return 0, false
			}
			return f.Churn.ServerCPU.Total() * microsPerSecond / float64(f.Churn.Writes), true
		})},
	},
)

func latencyMetrics() (out []Metric) {
	for _, m := range []struct {
		name, help string
		of         func(*Distribution) float64
	}{
		{"p50", "latency from when a change was due until a node had applied it, without slow nodes (--slow-percent): median", func(d *Distribution) float64 { return d.P50 }},
		{"p90", "… 90th percentile", func(d *Distribution) float64 { return d.P90 }},
		{"p99", "… 99th percentile", func(d *Distribution) float64 { return d.P99 }},
		{"p999", "… 99.9th percentile", func(d *Distribution) float64 { return d.P999 }},
		{"max", "… maximum", func(d *Distribution) float64 { return d.Max }},
		{"mean", "… mean", func(d *Distribution) float64 { return d.Mean }},
	} {
		out = append(out, Metric{m.name, Millis, m.help, func(f *figures) (float64, bool) {
			return m.of(&f.changes.latency), f.changes.latency.Count > 0
		}})
	}
	return out
}

// syncMetrics returns the metrics of a sync.
func syncMetrics(name, what string, of func(*figures) *joined) []Metric {
	return []Metric{
		{name + "-bytes-per-node", Bytes, "bytes below TLS for " + what, func(f *figures) (float64, bool) {
			j := of(f)
			return j.received / j.updates, j.updates > 0
		}},
		{name + "-message-bytes-per-node", Bytes, "… in messages, before HTTP/2 and TLS", func(f *figures) (float64, bool) {
			j := of(f)
			return j.messages / j.updates, j.updates > 0 && j.messages > 0
		}},
		{name + "-cpu-per-node", Micros, "server CPU for " + what + ", including the TLS handshake", func(f *figures) (float64, bool) {
			j := of(f)
			return total(j.server) * microsPerSecond / j.updates, j.updates > 0 && j.server != nil
		}},
		{name + "-time", Seconds, "time until the last node was in sync", func(f *figures) (float64, bool) {
			return of(f).seconds, of(f).updates > 0
		}},
		{name + "-p50", Millis, "time for " + what + ": median", func(f *figures) (float64, bool) {
			return of(f).latency.P50, of(f).latency.Count > 0
		}},
		{name + "-p99", Millis, "… 99th percentile", func(f *figures) (float64, bool) {
			return of(f).latency.P99, of(f).latency.Count > 0
		}},
	}
}

func converge(of func(*Convergence) float64) func(*figures) (float64, bool) {
	return func(f *figures) (float64, bool) {
		if f.changes.convergence == nil {
			return 0, false
		}
		return of(f.changes.convergence), true
	}
}

func perUpdate(of func(*joined) float64) func(*figures) (float64, bool) {
	return func(f *figures) (float64, bool) {
		updates := f.changes.ordinary()
		return of(&f.changes) / updates, updates > 0
	}
}

// ordinary returns the number of updates that arrived outside of events.
func (j *joined) ordinary() float64 { return j.updates - float64(j.aside.Updates) }

func cpuPerUpdate(of func(CPU) float64) func(*figures) (float64, bool) {
	return func(f *figures) (float64, bool) {
		updates := f.changes.ordinary()
		if f.changes.server == nil || updates <= 0 {
			return 0, false
		}
		spent := of(*f.changes.server)
		if a := f.changes.aside.ServerCPU; a != nil {
			spent -= of(*a)
		}
		// The divided parts of Aside are imprecise, so a difference may fall below zero and counts
		// as 0. An undivided time says nothing about its parts, so those are not measured.
		return max(0, spent) * microsPerSecond / updates, f.changes.server.Undivided == 0 || spent > 0
	}
}

func memory(of func(m *ServerMemory, nodes float64) float64) func(*figures) (float64, bool) {
	return func(f *figures) (float64, bool) {
		if f.repeat.ServerMemory == nil {
			return 0, false
		}
		return of(f.repeat.ServerMemory, f.nodes), true
	}
}

func floor(of func(*Floor) (float64, bool)) func(*figures) (float64, bool) {
	return func(f *figures) (float64, bool) {
		if f.repeat.Floor == nil {
			return 0, false
		}
		return of(f.repeat.Floor)
	}
}

func total(c *CPU) float64 {
	if c == nil {
		return 0
	}
	return c.Total()
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
	all := make([]*figures, len(r.Repeats))
	for i := range r.Repeats {
		all[i] = figuresOf(&r.Repeats[i], r.Peer, r.Nodes)
	}
	for i := range Metrics {
		m := &Metrics[i]
		var values []float64
		for _, f := range all {
			if v, ok := m.value(f); ok {
				values = append(values, v)
			}
		}
		if len(values) > 0 {
			r.Summary[m.Name] = SpreadOf(m.Unit, values)
		}
	}
}
