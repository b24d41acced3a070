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
}

// Metrics lists all metrics, in the order of reports.
var Metrics = []Metric{
	{"p50", Millis, "latency from when a change was due until a node had applied it, without slow nodes (--slow-percent): median"},
	{"p90", Millis, "… 90th percentile"},
	{"p99", Millis, "… 99th percentile"},
	{"p999", Millis, "… 99.9th percentile"},
	{"max", Millis, "… maximum"},
	{"mean", Millis, "… mean"},
	{"converge50", Millis, "longest time from when a change was due until 50 % of the nodes had it"},
	{"converge99", Millis, "… until 99 % had it"},
	{"converge100", Millis, "… until all had it"},
	{"bytes-per-update", Bytes,
		"bytes below TLS that nodes received, per node-update; bytes and updates during an event are left out"},
	{"sent-bytes-per-update", Bytes, "bytes below TLS that nodes sent, per node-update; an event is left out"},
	{"cpu-per-update", Micros, "server CPU per node-update; an event is left out"},
	{"cpu-user-per-update", Micros, "… in user mode"},
	{"cpu-system-per-update", Micros, "… in the kernel"},
	{"changes-bytes", Bytes, "bytes below TLS that all nodes received for all changes and for an event among them"},
	{"changes-cpu", Seconds, "server CPU for all changes and for an event among them"},
	{"api-server-cpu-per-change", Micros,
		"API server CPU per change, including the write but not etcd, if the API server is the peer or the run's own"},
	{"changes-time", Seconds, "time from the first change until all nodes had the last"},
	{"server-cores", Number, "CPU cores that the server used during the changes"},
	{"client-cores", Number, "CPU cores that the load tester used during the changes"},
	{"client-cpu-per-update", Micros, "CPU that the load tester used per node-update"},
	{"source-lag", Millis, "how late the source made changes: 99th percentile"},
	{"reconnects", Number, "streams that broke during the whole repeat and that the scenario did not break"},
	{"cold-bytes-per-node", Bytes, "bytes below TLS for a node without state to receive all of it"},
	{"cold-message-bytes-per-node", Bytes, "… in messages, before HTTP/2 and TLS"},
	{"cold-cpu-per-node", Micros, "server CPU for a node without state to receive all of it, including the TLS handshake"},
	{"cold-time", Seconds, "time until the last node was in sync"},
	{"cold-p50", Millis, "time for a node without state to receive all of it: median"},
	{"cold-p99", Millis, "… 99th percentile"},
	{"resync-bytes-per-node", Bytes, "bytes below TLS for a node that still holds the state to resync"},
	{"resync-message-bytes-per-node", Bytes, "… in messages, before HTTP/2 and TLS"},
	{"resync-cpu-per-node", Micros, "server CPU for a node that still holds the state to resync, including the TLS handshake"},
	{"resync-time", Seconds, "time until the last node was in sync"},
	{"resync-p50", Millis, "time for a node that still holds the state to resync: median"},
	{"resync-p99", Millis, "… 99th percentile"},
	{"memory-state", Bytes, "server's heap and stacks with the state and without nodes"},
	{"resident-state", Bytes, "server's RAM with the state and without nodes"},
	{"anonymous-state", Bytes, "… without pages of files, which are mostly the program"},
	{"memory-per-node", Bytes, "server's heap and stacks per connected node"},
	{"resident-per-node", Bytes, "server's RAM per connected node"},
	{"server-peak", Bytes, "peak RAM of the server before --floor"},
	{"client-peak", Bytes, "peak RAM of the processes with nodes before --floor"},
	{"floor-handshake-cpu", Micros, "raw TLS: server CPU per handshake"},
	{"floor-handshake-bytes", Bytes, "raw TLS: bytes that a client receives per handshake"},
	{"floor-cold-cpu", Micros, "raw TLS: server CPU for the bytes of a cold sync"},
	{"floor-write-cpu", Micros, "raw TLS: server CPU per message of 100 bytes"},
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

// values are the metrics that were measured, by name.
type values map[string]float64

func (r *Report) values(repeat *Repeat) values {
	v := values{"reconnects": float64(repeat.Reconnects)}
	v.changes(join(repeat, Changes), r.Peer)
	v.sync("cold", join(repeat, ColdSync))
	v.sync("resync", join(repeat, Resync))
	v.positive("server-peak", repeat.ServerPeakBytes)
	v.positive("client-peak", repeat.ClientPeakBytes)
	if m := repeat.ServerMemory; m != nil {
		state, nodes := m.State.Heap+m.State.Stacks, float64(r.Nodes)
		v["memory-state"], v["resident-state"] = float64(state), float64(m.State.Resident)
		v.positive("anonymous-state", m.State.Anonymous)
		v.per("memory-per-node", float64(m.Connected.Heap+m.Connected.Stacks-state), nodes)
		v.per("resident-per-node", float64(m.Connected.Resident-m.State.Resident), nodes)
	}
	if f := repeat.Floor; f != nil {
		v.per("floor-handshake-cpu", f.HandshakeCPU.micros(), float64(f.Handshakes))
		v.per("floor-handshake-bytes", float64(f.HandshakeBytes), float64(f.Handshakes))
		v.per("floor-cold-cpu", f.Cold.ServerCPU.micros(), float64(f.Cold.Writes))
		if f.Churn != nil {
			v.per("floor-write-cpu", f.Churn.ServerCPU.micros(), float64(f.Churn.Writes))
		}
	}
	return v
}

// positive sets a metric unless it is 0, which means that it was not measured.
func (v values) positive(name string, value int64) {
	if value > 0 {
		v[name] = float64(value)
	}
}

// per sets a metric to a value for each of n, unless there are none.
func (v values) per(name string, value, n float64) {
	if n > 0 {
		v[name] = value / n
	}
}

func (v values) changes(j joined, peer Peer) {
	if l := &j.latency; l.Count > 0 {
		v["p50"], v["p90"], v["p99"], v["p999"], v["max"], v["mean"] = l.P50, l.P90, l.P99, l.P999, l.Max, l.Mean
	}
	if c := j.convergence; c != nil {
		v["converge50"], v["converge99"], v["converge100"] = c.Nodes50.Max, c.Nodes99.Max, c.Nodes100.Max
	}
	ordinary := j.updates - float64(j.aside.Updates) // arrived outside of events
	v.per("bytes-per-update", j.received-float64(j.aside.ReceivedBytes), ordinary)
	v.per("sent-bytes-per-update", j.sent-float64(j.aside.SentBytes), ordinary)
	v.per("client-cores", j.client.Total(), j.seconds)
	v.per("client-cpu-per-update", j.client.micros(), j.updates)
	if j.updates > 0 {
		v["changes-bytes"], v["changes-time"] = j.received, j.seconds
	}
	if j.lag != nil {
		v["source-lag"] = j.lag.P99
	}
	if peer == KubeAPIServer {
		j.apiServer = j.server
	}
	if j.apiServer != nil {
		v.per("api-server-cpu-per-change", j.apiServer.micros(), j.made)
	}
	if j.server == nil {
		return
	}
	v.per("server-cores", j.server.Total(), j.seconds)
	if j.updates > 0 {
		v["changes-cpu"] = j.server.Total()
	}
	aside := cmp.Or(j.aside.ServerCPU, &CPU{})
	for name, of := range map[string]func(CPU) float64{
		"cpu-per-update": CPU.Total, "cpu-user-per-update": func(c CPU) float64 { return c.User },
		"cpu-system-per-update": func(c CPU) float64 { return c.System },
	} {
		// The divided parts of Aside are imprecise, so a difference may fall below zero and counts
		// as 0. An undivided time says nothing about its parts, so those are not measured.
		if spent := of(*j.server) - of(*aside); j.server.Undivided == 0 || spent > 0 {
			v.per(name, max(0, spent)*microsPerSecond, ordinary)
		}
	}
}

// sync sets the metrics of a sync, whose names begin with a prefix.
func (v values) sync(prefix string, j joined) {
	if j.latency.Count > 0 {
		v[prefix+"-p50"], v[prefix+"-p99"] = j.latency.P50, j.latency.P99
	}
	if j.updates == 0 {
		return
	}
	v[prefix+"-bytes-per-node"], v[prefix+"-time"] = j.received/j.updates, j.seconds
	if j.messages > 0 {
		v[prefix+"-message-bytes-per-node"] = j.messages / j.updates
	}
	if j.server != nil {
		v[prefix+"-cpu-per-node"] = j.server.micros() / j.updates
	}
}

func (c CPU) micros() float64 { return c.Total() * microsPerSecond }

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
	measured := make(map[string][]float64)
	for i := range r.Repeats {
		for name, v := range r.values(&r.Repeats[i]) {
			measured[name] = append(measured[name], v)
		}
	}
	for _, m := range Metrics {
		if values := measured[m.Name]; len(values) > 0 {
			r.Summary[m.Name] = SpreadOf(m.Unit, values)
		}
	}
}
