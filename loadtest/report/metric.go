package report

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Unit of a metric's values.
type Unit string

// The units.
const (
	Seconds Unit = "s"
	Millis  Unit = "ms"
	Micros  Unit = "µs"
	Bytes   Unit = "B"
	Number  Unit = ""
)

// Metric is a figure that each repeat has, or has not. Less is better for all of them.
type Metric struct {
	// Name is what objectives and comparisons call it.
	Name string
	Unit Unit
	// Help says what it is, in a line.
	Help string
	// value of a repeat with so many nodes; false: it was not measured.
	value func(*figures) (float64, bool)
}

// figures are a repeat's phases, joined by kind.
type figures struct {
	peer    Peer
	nodes   float64
	repeat  *Repeat
	cold    joined
	changes joined
	resync  joined
}

// joined are phases of one kind.
type joined struct {
	seconds     float64
	updates     float64
	received    float64
	sent        float64
	messages    float64
	made        float64 // changes
	server      *CPU
	apiServer   *CPU
	client      CPU
	latency     Distribution
	lag         *Lag
	convergence *Convergence
	// aside is what is left out of what an update costs.
	aside Aside
}

func figuresOf(r *Repeat, peer Peer, nodes int) *figures {
	return &figures{
		peer: peer, nodes: float64(nodes), repeat: r, cold: join(r, ColdSync), changes: join(r, Changes), resync: join(r, Resync),
	}
}

// join adds up phases of a kind. Lags and convergence are those of the worst. Latencies of several phases are joined if they
// have their histograms, and are otherwise unknown.
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

// sum adds up what is known.
func sum(a, b *CPU) *CPU {
	if a == nil || b == nil {
		return cmp.Or(a, b)
	}
	return new(a.add(*b))
}

const microsPerSecond = 1e6

// Metrics lists all there are, in the order in which reports have them.
var Metrics = slices.Concat(
	latencyMetrics(),
	[]Metric{
		{"converge50", Millis, "longest time from when a change was due until 50 % of the nodes had it", converge(func(c *Convergence) float64 { return c.Nodes50.Max })},
		{"converge99", Millis, "… until 99 % had it", converge(func(c *Convergence) float64 { return c.Nodes99.Max })},
		{"converge100", Millis, "… until all had it", converge(func(c *Convergence) float64 { return c.Nodes100.Max })},
		{"bytes-per-update", Bytes, "bytes below TLS that nodes received, a node-update; the time of an event, and what it cost, is left out", perUpdate(func(j *joined) float64 { return j.received - float64(j.aside.ReceivedBytes) })},
		{"sent-bytes-per-update", Bytes, "bytes below TLS that nodes sent, a node-update; without an event", perUpdate(func(j *joined) float64 { return j.sent - float64(j.aside.SentBytes) })},
		{"cpu-per-update", Micros, "server CPU, a node-update; without an event", cpuPerUpdate(CPU.Total)},
		{"cpu-user-per-update", Micros, "… in user mode", cpuPerUpdate(func(c CPU) float64 { return c.User })},
		{"cpu-system-per-update", Micros, "… in the kernel", cpuPerUpdate(func(c CPU) float64 { return c.System })},
		{"changes-bytes", Bytes, "bytes below TLS that all nodes received for all changes, and for an event meanwhile", func(f *figures) (float64, bool) {
			return f.changes.received, f.changes.updates > 0
		}},
		{"changes-cpu", Seconds, "server CPU for all changes, and for an event meanwhile", func(f *figures) (float64, bool) {
			return total(f.changes.server), f.changes.server != nil && f.changes.updates > 0
		}},
		{"api-server-cpu-per-change", Micros, "API server CPU, a change, with its write and without etcd's: where it is the peer, or the run's own that Slicecast's servers watch", func(f *figures) (float64, bool) {
			spent := f.changes.apiServer
			if f.peer == KubeAPIServer {
				spent = f.changes.server
			}
			return total(spent) * microsPerSecond / f.changes.made, spent != nil && f.changes.made > 0
		}},
		{"changes-time", Seconds, "from the first change until the last was everywhere", func(f *figures) (float64, bool) {
			return f.changes.seconds, f.changes.updates > 0
		}},
		{"server-cores", Number, "CPU cores that the server used meanwhile", func(f *figures) (float64, bool) {
			return total(f.changes.server) / f.changes.seconds, f.changes.server != nil && f.changes.seconds > 0
		}},
		{"client-cores", Number, "CPU cores that the load tester used meanwhile", func(f *figures) (float64, bool) {
			return f.changes.client.Total() / f.changes.seconds, f.changes.seconds > 0
		}},
		{"client-cpu-per-update", Micros, "CPU that the load tester used, a node-update", func(f *figures) (float64, bool) {
			return f.changes.client.Total() * microsPerSecond / f.changes.updates, f.changes.updates > 0
		}},
		{"source-lag", Millis, "how late the source made changes, p99", func(f *figures) (float64, bool) {
			if f.changes.lag == nil {
				return 0, false
			}
			return f.changes.lag.P99, true
		}},
		{"reconnects", Number, "streams that broke, from the first to the last, without the scenario's doing", func(f *figures) (float64, bool) {
			return float64(f.repeat.Reconnects), true
		}},
	},
	syncMetrics("cold", "a node that held nothing to get the whole state", func(f *figures) *joined { return &f.cold }),
	syncMetrics("resync", "a node to come back to the state that it holds", func(f *figures) *joined { return &f.resync }),
	[]Metric{
		{"memory-state", Bytes, "server's heap and stacks with the state and no node", memory(func(m *ServerMemory, _ float64) float64 {
			return float64(m.State.Heap + m.State.Stacks)
		})},
		{"resident-state", Bytes, "server's RAM with the state and no node", memory(func(m *ServerMemory, _ float64) float64 {
			return float64(m.State.Resident)
		})},
		{"anonymous-state", Bytes, "… of which not the program", func(f *figures) (float64, bool) {
			m := f.repeat.ServerMemory
			if m == nil {
				return 0, false
			}
			return float64(m.State.Anonymous), m.State.Anonymous > 0
		}},
		{"memory-per-node", Bytes, "server's heap and stacks for a connected node", memory(func(m *ServerMemory, nodes float64) float64 {
			return float64(m.Connected.Heap+m.Connected.Stacks-m.State.Heap-m.State.Stacks) / nodes
		})},
		{"resident-per-node", Bytes, "server's RAM for a connected node", memory(func(m *ServerMemory, nodes float64) float64 {
			return float64(m.Connected.Resident-m.State.Resident) / nodes
		})},
		{"server-peak", Bytes, "most RAM that the server ever had, before --floor", func(f *figures) (float64, bool) {
			return float64(f.repeat.ServerPeakBytes), f.repeat.ServerPeakBytes > 0
		}},
		{"client-peak", Bytes, "most RAM that the processes with nodes ever had, before --floor", func(f *figures) (float64, bool) {
			return float64(f.repeat.ClientPeakBytes), f.repeat.ClientPeakBytes > 0
		}},
		{"floor-handshake-cpu", Micros, "raw TLS: server CPU for a handshake", floor(func(f *Floor) (float64, bool) {
			return f.HandshakeCPU.Total() * microsPerSecond / float64(f.Handshakes), true
		})},
		{"floor-handshake-bytes", Bytes, "raw TLS: bytes that a client receives for a handshake", floor(func(f *Floor) (float64, bool) {
			return float64(f.HandshakeBytes) / float64(f.Handshakes), true
		})},
		{"floor-cold-cpu", Micros, "raw TLS: server CPU for the bytes of a cold sync", floor(func(f *Floor) (float64, bool) {
			return f.Cold.ServerCPU.Total() * microsPerSecond / float64(f.Cold.Writes), true
		})},
		{"floor-write-cpu", Micros, "raw TLS: server CPU for a message of 100 bytes", floor(func(f *Floor) (float64, bool) {
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
		{"p50", "latency of a node-update, from due at the source to applied at the node, without the nodes that --slow-percent slows down: median", func(d *Distribution) float64 { return d.P50 }},
		{"p90", "… 90th percentile", func(d *Distribution) float64 { return d.P90 }},
		{"p99", "… 99th percentile", func(d *Distribution) float64 { return d.P99 }},
		{"p999", "… 99.9th percentile", func(d *Distribution) float64 { return d.P999 }},
		{"max", "… the longest", func(d *Distribution) float64 { return d.Max }},
		{"mean", "… mean", func(d *Distribution) float64 { return d.Mean }},
	} {
		out = append(out, Metric{m.name, Millis, m.help, func(f *figures) (float64, bool) {
			return m.of(&f.changes.latency), f.changes.latency.Count > 0
		}})
	}
	return out
}

// syncMetrics are about how nodes come to the state.
func syncMetrics(name, what string, of func(*figures) *joined) []Metric {
	return []Metric{
		{name + "-bytes-per-node", Bytes, "bytes below TLS for " + what, func(f *figures) (float64, bool) {
			j := of(f)
			return j.received / j.updates, j.updates > 0
		}},
		{name + "-message-bytes-per-node", Bytes, "… of which messages, before HTTP/2 and TLS", func(f *figures) (float64, bool) {
			j := of(f)
			return j.messages / j.updates, j.updates > 0 && j.messages > 0
		}},
		{name + "-cpu-per-node", Micros, "server CPU for " + what + ", TLS handshake included", func(f *figures) (float64, bool) {
			j := of(f)
			return total(j.server) * microsPerSecond / j.updates, j.updates > 0 && j.server != nil
		}},
		{name + "-time", Seconds, "until the last node was in sync", func(f *figures) (float64, bool) {
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

// ordinary is how many updates came when no event was.
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
		// Parts of what is left out are rough; what is not divided has none.
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

// OfPeer tells whether the metric is about who distributed the state. The others are about the load tester and the machine, which
// readers have to know of.
func (m *Metric) OfPeer() bool {
	return m.Name != "source-lag" && !strings.HasPrefix(m.Name, "client-") && !strings.HasPrefix(m.Name, "floor-")
}

// MarshalText gives the metric's name.
func (m *Metric) MarshalText() ([]byte, error) { return []byte(m.Name), nil }

// MetricNamed finds a metric. The error lists the names that there are.
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

// Spread is what repeats come to, and how far they are apart.
type Spread struct {
	Unit Unit `json:"unit"`
	// Median of the repeats; of an even number of them, the mean of the two in the middle.
	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
	// Values of the repeats that have one, in their order.
	Values []float64 `json:"values"`
}

func spreadOf(unit Unit, values []float64) Spread {
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	return Spread{
		Unit: unit, Median: (sorted[(n-1)/2] + sorted[n/2]) / 2, Min: sorted[0], Max: sorted[n-1], Values: values,
	}
}

// Summarize fills in the summary from the repeats.
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
			r.Summary[m.Name] = spreadOf(m.Unit, values)
		}
	}
}
