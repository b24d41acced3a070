// Package report is what a load test has to say: a machine-readable form with a versioned schema, and one for people.
package report

import (
	"encoding/json"
	"fmt"
	"io"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/slicecast/slicecast/loadtest/usage"
)

// Schema names the form of the JSON. Fields may be added to it; anything else gets a new name.
const Schema = "slicecast-loadtest/v1"

// Report is the outcome of a run. Durations are in the unit that a field's name ends with, sizes in bytes.
type Report struct {
	Schema string    `json:"schema"`
	Start  time.Time `json:"start"`
	// Version of the load tester, and of the server that it starts.
	Version    string        `json:"version"`
	Machine    usage.Machine `json:"machine"`
	Parameters Parameters    `json:"parameters"`
	ColdSync   ColdSync      `json:"coldSync"`
	// ServerMemory is absent where the run observes a running server, and so are Floor and Restart, or if nobody asked.
	ServerMemory *ServerMemory `json:"serverMemory,omitempty"`
	Churn        Churn         `json:"churn"`
	Floor        *Floor        `json:"floor,omitempty"`
	Restart      *Restart      `json:"restart,omitempty"`
	// Server is absent where the server's process is not known.
	Server *Process `json:"server,omitempty"`
	// Client is the process with the nodes: what the load tester itself costs.
	Client Process `json:"client"`
	// Check tells whether all nodes hold the true state at the end.
	Check Check `json:"check"`
	// Notes say what a reader of the figures has to know about this run.
	Notes []string `json:"notes"`
}

// Parameters of the run.
type Parameters struct {
	Nodes int `json:"nodes"`
	// Server is the address of a running server; empty: the run started its own, to which the next seven belong.
	Server         string  `json:"server,omitempty"`
	Services       int     `json:"services"`
	Endpoints      int     `json:"endpointsPerService"`
	LargeServices  int     `json:"largeServices"`
	LargeEndpoints int     `json:"endpointsPerLargeService"`
	ChurnRate      float64 `json:"churnPerSecond"`
	Seed           uint64  `json:"seed"`
	WarmUpSeconds  float64 `json:"warmUpSeconds"`
	// DurationSeconds of the measured churn.
	DurationSeconds float64 `json:"durationSeconds"`
	// Connecting is how many nodes at a time were on their way to their first state.
	Connecting int `json:"connecting"`
	// GRPCGo: the nodes were served by grpc-go, for comparison.
	GRPCGo bool `json:"grpcGo"`
}

// ColdSync is how nodes that held nothing got the whole state.
type ColdSync struct {
	// Services, Slices and Endpoints of the state.
	Services  int `json:"services"`
	Slices    int `json:"slices"`
	Endpoints int `json:"endpoints"`
	// BytesPerNode is the mean of what a node received, below TLS and with its handshake.
	BytesPerNode float64 `json:"bytesPerNode"`
	// MessageBytesPerNode is how much of it is messages, before HTTP/2 and TLS.
	MessageBytesPerNode float64 `json:"messageBytesPerNode"`
	// AllSeconds is from the first node's first attempt until all had the state.
	AllSeconds float64 `json:"allSeconds"`
	// Node is from a node's first attempt until it had the state.
	Node Distribution `json:"node"`
	// ServerCPUMicrosPerNode includes the handshake; absent where the server's process is not known.
	ServerCPUMicrosPerNode *CPU `json:"serverCPUMicrosPerNode,omitempty"`
	// ServerPeakBytes is the most RAM that the server ever had until then; 0: unknown.
	ServerPeakBytes int64 `json:"serverPeakBytes"`
}

// ServerMemory is what the server's process has in use without garbage.
type ServerMemory struct {
	// State is with the whole state and before the first node, Connected with all nodes in sync.
	State     Memory `json:"state"`
	Connected Memory `json:"connected"`
	// BytesPerNode and ResidentBytesPerNode are the differences, of heap and stacks, and of RAM, for a node.
	BytesPerNode         float64 `json:"bytesPerNode"`
	ResidentBytesPerNode float64 `json:"residentBytesPerNode"`
}

// Memory of a process, in bytes.
type Memory struct {
	// Heap and Stacks as Go counts them.
	Heap   int64 `json:"heapBytes"`
	Stacks int64 `json:"stackBytes"`
	// Resident is what the process has in RAM, the program itself included.
	Resident int64 `json:"residentBytes"`
}

// Floor is what the same two processes pay for as many connections, bytes and writes over TLS and nothing else.
type Floor struct {
	// HandshakeCPUMicros is server CPU for a connection.
	HandshakeCPUMicros CPU `json:"handshakeCPUMicros"`
	// HandshakeBytes is what a client receives until the connection is there.
	HandshakeBytes float64 `json:"handshakeBytes"`
	// Cold: each connection got once as many bytes as a node did in the cold sync.
	Cold FloorWrites `json:"cold"`
	// Churn: each connection got a message of 100 bytes for each change, on the same schedule; absent without churn.
	Churn *FloorWrites `json:"churn,omitempty"`
}

// FloorWrites are messages over raw TLS.
type FloorWrites struct {
	MessageBytes int64   `json:"messageBytes"`
	Writes       int64   `json:"writes"`
	Seconds      float64 `json:"seconds"`
	// ServerCPUMicrosPerWrite is for a message on one connection.
	ServerCPUMicrosPerWrite CPU `json:"serverCPUMicrosPerWrite"`
	// Lag of the schedule.
	Lag Lag `json:"lag"`
}

// Restart is how the nodes came back to a server that was killed and started again with the state that they hold.
type Restart struct {
	// BytesPerNode and MaxBytes are what a node received until it was in sync again, below TLS and with the handshake: the
	// mean, and the most.
	BytesPerNode float64 `json:"bytesPerNode"`
	MaxBytes     int64   `json:"maxBytes"`
	// MessageBytesPerNode is how much of it is messages, before HTTP/2 and TLS.
	MessageBytesPerNode float64 `json:"messageBytesPerNode"`
	// DownSeconds is from the kill until the new process listened, AllSeconds from the kill until the last node was in sync.
	DownSeconds float64 `json:"downSeconds"`
	AllSeconds  float64 `json:"allSeconds"`
	// Node is from the kill until a node was in sync.
	Node Distribution `json:"node"`
	// ServerCPUMicrosPerNode is the new process's, from when it listened, with the handshake.
	ServerCPUMicrosPerNode CPU   `json:"serverCPUMicrosPerNode"`
	ServerPeakBytes        int64 `json:"serverPeakBytes"`
}

// Churn is what the measured window cost, from the first change until the last was everywhere.
type Churn struct {
	Seconds float64 `json:"seconds"`
	// Changes of the state. Where a running server is observed it is not known, and 0.
	Changes int `json:"changes"`
	// NodeUpdates is changes times nodes; where a running server is observed, objects that nodes received.
	NodeUpdates int64 `json:"nodeUpdates"`
	// ReceivedBytes and SentBytes are all nodes', below TLS, with all that streams carry: heartbeats, acks, window updates.
	ReceivedBytes              int64   `json:"receivedBytes"`
	SentBytes                  int64   `json:"sentBytes"`
	ReceivedBytesPerNodeUpdate float64 `json:"receivedBytesPerNodeUpdate"`
	SentBytesPerNodeUpdate     float64 `json:"sentBytesPerNodeUpdate"`
	// Server CPU; absent where the server's process is not known.
	ServerCPUMicrosPerNodeUpdate *CPU `json:"serverCPUMicrosPerNodeUpdate,omitempty"`
	// Latency is from the time at which a change was due at the source to when a node's client had applied it.
	Latency Distribution `json:"latency"`
	// SourceLag is how late changes were made at the source: a part of the latency that is not the server's.
	SourceLag *Lag `json:"sourceLag,omitempty"`
	// Reconnects is how many streams broke, since the start of the run.
	Reconnects int64 `json:"reconnects"`
}

// CPU time, in microseconds.
type CPU struct {
	User   float64 `json:"user"`
	System float64 `json:"system"`
	Total  float64 `json:"total"`
}

// Lag is how late things were done on a schedule, in milliseconds.
type Lag struct {
	P99 float64 `json:"p99Millis"`
	Max float64 `json:"maxMillis"`
}

// Distribution of durations, in milliseconds.
type Distribution struct {
	Count int64   `json:"count"`
	P50   float64 `json:"p50Millis"`
	P99   float64 `json:"p99Millis"`
	Max   float64 `json:"maxMillis"`
}

// DistributionOf reads a histogram of microseconds.
func DistributionOf(h *hdrhistogram.Histogram) Distribution {
	millis := func(us int64) float64 { return float64(us) / 1000 }
	return Distribution{
		Count: h.TotalCount(), P50: millis(h.ValueAtQuantile(50)), P99: millis(h.ValueAtQuantile(99)), Max: millis(h.Max()),
	}
}

// Process is what a process used.
type Process struct {
	// CPU cores in use, on average, while the nodes got their first state, and during the churn.
	ColdSyncCores float64 `json:"coldSyncCores"`
	ChurnCores    float64 `json:"churnCores"`
	// ResidentBytes after the churn, and the most there ever was.
	ResidentBytes int64 `json:"residentBytes"`
	PeakBytes     int64 `json:"peakBytes"`
}

// Check of the nodes against the true state.
type Check struct {
	Nodes int `json:"nodes"`
	// Shards of each node.
	Shards int  `json:"shards"`
	OK     bool `json:"ok"`
	// Error names nodes and shards; empty if OK.
	Error string `json:"error,omitempty"`
}

// WriteJSON writes the report for machines.
func (r *Report) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(r)
}

// Read reads a report for machines.
func Read(r io.Reader) (*Report, error) {
	var out Report
	if err := json.NewDecoder(r).Decode(&out); err != nil {
		return nil, fmt.Errorf("not a report: %w", err)
	}
	if out.Schema != Schema {
		return nil, fmt.Errorf("not a report of this version: its schema is %q, and not %q", out.Schema, Schema)
	}
	return &out, nil
}

// WriteText writes the report for people.
func (r *Report) WriteText(w io.Writer) error {
	t := &text{w: w}
	p, c := r.Parameters, r.Churn
	t.line("slicecast-loadtest %s, %s", r.Version, r.Start.UTC().Format(time.RFC3339))
	t.line("machine         %d CPUs %s, %s, Linux %s, %s", r.Machine.CPUs, r.Machine.CPU, size(r.Machine.Memory), r.Machine.Kernel, r.Machine.Go)
	if p.Server != "" {
		t.line("parameters      %d nodes, server %s, observed for %gs", p.Nodes, p.Server, p.DurationSeconds)
	} else {
		t.line("parameters      %d nodes, %d Services × %d endpoints, %d × %d, churn %g/s for %gs after %gs of warm-up, seed %d",
			p.Nodes, p.Services, p.Endpoints, p.LargeServices, p.LargeEndpoints, p.ChurnRate, p.DurationSeconds, p.WarmUpSeconds, p.Seed)
	}
	if p.GRPCGo {
		t.line("                served by grpc-go, for comparison")
	}
	t.line("state           %d Services, %d slices, %d endpoints", r.ColdSync.Services, r.ColdSync.Slices, r.ColdSync.Endpoints)
	t.line("cold sync       %s a node; all in sync after %.1fs, %d at a time; a node: p50 %s, p99 %s, max %s",
		size(int64(r.ColdSync.BytesPerNode)), r.ColdSync.AllSeconds, p.Connecting,
		millis(r.ColdSync.Node.P50), millis(r.ColdSync.Node.P99), millis(r.ColdSync.Node.Max))
	if cpu := r.ColdSync.ServerCPUMicrosPerNode; cpu != nil {
		t.line("                server CPU %s a node, peak memory %s", cpu.text(), size(r.ColdSync.ServerPeakBytes))
	}
	if m := r.ServerMemory; m != nil {
		t.line("server memory   heap and stacks %s with the state, %s with all nodes: %s a node",
			size(m.State.Heap+m.State.Stacks), size(m.Connected.Heap+m.Connected.Stacks), size(int64(m.BytesPerNode)))
		t.line("                in RAM %s with the state, %s with all nodes: %s a node",
			size(m.State.Resident), size(m.Connected.Resident), size(int64(m.ResidentBytesPerNode)))
	}
	t.line("node-updates    %d in %.1fs", c.NodeUpdates, c.Seconds)
	t.line("bytes           %.0f received, %.0f sent, a node-update (below TLS, everything included)",
		c.ReceivedBytesPerNodeUpdate, c.SentBytesPerNodeUpdate)
	if cpu := c.ServerCPUMicrosPerNodeUpdate; cpu != nil {
		t.line("server CPU      %s a node-update", cpu.text())
	}
	if c.Latency.Count > 0 {
		t.line("latency         p50 %s, p99 %s, max %s, from due at the source to applied at the node",
			millis(c.Latency.P50), millis(c.Latency.P99), millis(c.Latency.Max))
	}
	if c.SourceLag != nil {
		t.line("                of which the source was late by p99 %s, max %s", millis(c.SourceLag.P99), millis(c.SourceLag.Max))
	}
	if f := r.Floor; f != nil {
		t.line("raw TLS         server CPU %s and %.0f bytes received for a handshake", f.HandshakeCPUMicros.text(), f.HandshakeBytes)
		t.line("                %s for %s to a node; all of it in %.1fs", f.Cold.ServerCPUMicrosPerWrite.text(), size(f.Cold.MessageBytes), f.Cold.Seconds)
		if c := f.Churn; c != nil {
			t.line("                %s for a write of %d bytes, %d of them in %.1fs", c.ServerCPUMicrosPerWrite.text(), c.MessageBytes, c.Writes, c.Seconds)
		}
	}
	if s := r.Restart; s != nil {
		t.line("restart         %.0f bytes a node, of which %.0f in messages, at most %d; down for %.1fs, all in sync %.1fs after the kill; "+
			"a node: p50 %s, p99 %s", s.BytesPerNode, s.MessageBytesPerNode, s.MaxBytes, s.DownSeconds, s.AllSeconds, millis(s.Node.P50), millis(s.Node.P99))
		t.line("                server CPU %s a node, peak memory %s", s.ServerCPUMicrosPerNode.text(), size(s.ServerPeakBytes))
	}
	if s := r.Server; s != nil {
		t.line("server          memory %s, peak %s; %.2f cores in the cold sync, %.2f in the churn",
			size(s.ResidentBytes), size(s.PeakBytes), s.ColdSyncCores, s.ChurnCores)
	}
	t.line("load tester     memory %s, peak %s; %.2f cores in the cold sync, %.2f in the churn",
		size(r.Client.ResidentBytes), size(r.Client.PeakBytes), r.Client.ColdSyncCores, r.Client.ChurnCores)
	if r.Check.OK {
		t.line("check           all %d shards of all %d nodes hold the true state", r.Check.Shards, r.Check.Nodes)
	} else {
		t.line("check           FAILED: %s", r.Check.Error)
	}
	for _, n := range r.Notes {
		t.line("note            %s", n)
	}
	return t.err
}

// text keeps the first error.
type text struct {
	w   io.Writer
	err error
}

func (t *text) line(format string, args ...any) {
	if t.err == nil {
		_, t.err = fmt.Fprintf(t.w, format+"\n", args...)
	}
}

func (c *CPU) text() string {
	return fmt.Sprintf("%.1f µs (user %.1f, system %.1f)", c.Total, c.User, c.System)
}

func millis(v float64) string {
	if v >= 10_000 {
		return fmt.Sprintf("%.1f s", v/1000)
	}
	return fmt.Sprintf("%.1f ms", v)
}

func size(bytes int64) string {
	switch {
	case bytes >= 1<<30:
		return fmt.Sprintf("%.1f GiB", float64(bytes)/(1<<30))
	case bytes >= 1<<20:
		return fmt.Sprintf("%.1f MiB", float64(bytes)/(1<<20))
	}
	return fmt.Sprintf("%.1f KiB", float64(bytes)/(1<<10))
}
