// Package report is what a load test has to say: a machine-readable form with a versioned schema, and one for people.
//
// A report is about one scenario and one peer. It has the scenario's repeats, each with its phases in their order, and what
// follows from all repeats: for each metric (Metrics) the median and how far repeats were apart. Objectives, comparisons and
// docs/performance.md speak of the same metrics by the same names.
package report

import (
	"time"

	"github.com/slicecast/slicecast/loadtest/usage"
)

// Schema names the form of the JSON. Fields may be added to it; anything else gets a new name.
const Schema = "slicecast-loadtest/v2"

// Report is the outcome of a scenario. Durations are in the unit that a field's name ends with, sizes in bytes.
type Report struct {
	Schema string    `json:"schema"`
	Start  time.Time `json:"start"`
	// Peer is who distributed the state.
	Peer     Peer     `json:"peer"`
	Scenario Scenario `json:"scenario"`
	// Nodes that were simulated: Slicecast's agents, or kube-proxies that watch.
	Nodes int `json:"nodes"`
	// Processes that the nodes were in.
	Processes int `json:"processes"`
	// Server is the address of a running server or cluster that was observed; empty: the run started its own.
	Server string `json:"server,omitempty"`
	// Machine is the one with the nodes, and with the server if the run started it.
	Machine  usage.Machine `json:"machine"`
	Versions Versions      `json:"versions"`
	// Repeats of the scenario, each from the start of a server.
	Repeats []Repeat `json:"repeats"`
	// Summary has what the repeats come to, by the names of metrics; Summarize fills it in. What was not measured is absent.
	Summary map[string]Spread `json:"summary"`
	// Notes say what a reader of the figures has to know about the run as a whole.
	Notes []string `json:"notes"`
}

// Peer is who distributes state to nodes.
type Peer string

// The peers.
const (
	Slicecast     Peer = "slicecast"
	KubeAPIServer Peer = "kube-apiserver"
)

// Scenario is what was played.
type Scenario struct {
	Name        string `json:"name"`
	Description string `json:"description,omitempty"`
	// Parameters are all that the scenario's course follows from, as its file would have them: two reports with the same ones
	// can be compared.
	Parameters map[string]any `json:"parameters"`
}

// Versions of what was measured and of what measured.
type Versions struct {
	// Slicecast is that of the load tester, and of the server that it starts.
	Slicecast string `json:"slicecast"`
	Go        string `json:"go"`
	// KubeAPIServer is there where one was part of the run.
	KubeAPIServer string `json:"kubeAPIServer,omitempty"`
}

// Repeat is one course of the scenario.
type Repeat struct {
	Start time.Time `json:"start"`
	State State     `json:"state"`
	// Phases as they ended. A resync may be inside of changes: each has then what both cost, and the changes tell what that was (Aside).
	Phases []Phase `json:"phases"`
	// ServerMemory is absent where a running server is observed.
	ServerMemory *ServerMemory `json:"serverMemory,omitempty"`
	// Floor is absent if nobody asked.
	Floor *Floor `json:"floor,omitempty"`
	// Series has what happened in each second, over all phases.
	Series []Second `json:"series,omitempty"`
	// ServerPeakBytes and ClientPeakBytes are the most RAM that the server's process, and all processes with nodes, ever had; 0:
	// unknown.
	ServerPeakBytes int64 `json:"serverPeakBytes"`
	ClientPeakBytes int64 `json:"clientPeakBytes"`
	// Reconnects is how many streams broke, from the first to the last, without the scenario's doing.
	Reconnects int64 `json:"reconnects,omitempty"`
	// Check tells whether all nodes hold the true state at the end, or why there was no end.
	Check Check `json:"check"`
	// Notes say what a reader of the figures has to know about this repeat.
	Notes []string `json:"notes"`
}

// State is how much the nodes hold, when they hold everything for the first time.
type State struct {
	Services  int `json:"services"`
	Slices    int `json:"slices"`
	Endpoints int `json:"endpoints"`
}

// PhaseKind is what a phase is for.
type PhaseKind string

// The kinds.
const (
	// ColdSync has nodes that hold nothing get the whole state.
	ColdSync PhaseKind = "cold-sync"
	// WarmUp has changes that are in no figure.
	WarmUp PhaseKind = "warm-up"
	// Changes has the state change, and is over when the last change is everywhere.
	Changes PhaseKind = "changes"
	// Resync has nodes come back to the state that they hold: to a server that restarted, to another one, after a cut.
	Resync PhaseKind = "resync"
)

// Phase is a part of a repeat, and what it cost.
type Phase struct {
	// Name as the scenario has it.
	Name string    `json:"name"`
	Kind PhaseKind `json:"kind"`
	// StartSeconds since the repeat's start, and the phase's length.
	StartSeconds float64 `json:"startSeconds"`
	Seconds      float64 `json:"seconds"`
	// Changes of the state. Where a running server is observed it is not known, and 0.
	Changes int `json:"changes"`
	// Updates that reached nodes: in a sync one for each node, else changes times nodes; where a running server is observed,
	// objects that nodes received.
	Updates int64 `json:"updates"`
	// ReceivedBytes and SentBytes are all nodes', below TLS, with all that their connections carry: handshakes, heartbeats, acks.
	ReceivedBytes int64 `json:"receivedBytes"`
	SentBytes     int64 `json:"sentBytes"`
	// MessageBytes is how much of ReceivedBytes is messages, before HTTP/2 and TLS; 0: unknown.
	MessageBytes int64 `json:"messageBytes"`
	// MaxNodeBytes is the most that one node received; 0: unknown.
	MaxNodeBytes int64 `json:"maxNodeBytes"`
	// ServerCPU is absent where the server's process is not known. It includes all processes that distribute: relays too.
	ServerCPU *CPU `json:"serverCPU,omitempty"`
	// ClientCPU is that of all processes with nodes: what the load tester itself costs.
	ClientCPU CPU `json:"clientCPU"`
	// Latency of changes is from the time at which a change was due at the source until a node's client had applied it; of a
	// sync, from a node's first attempt, or the cut, until the node had everything.
	Latency Distribution `json:"latency"`
	// SlowLatency is that of nodes which the scenario slows down; Latency is then of the others. Absent if there are none.
	SlowLatency *Distribution `json:"slowLatency,omitempty"`
	// Convergence is there for changes on a schedule.
	Convergence *Convergence `json:"convergence,omitempty"`
	// SourceLag is how late changes were made at the source: a part of the latency that is not the server's.
	SourceLag *Lag `json:"sourceLag,omitempty"`
	// DownSeconds is how long there was no server.
	DownSeconds float64 `json:"downSeconds,omitempty"`
	// Reconnects is how many streams broke during the phase without the scenario's doing.
	Reconnects int64 `json:"reconnects"`
	// Aside is what of all this was while nodes came back from an event; absent if there was none.
	Aside *Aside `json:"aside,omitempty"`
}

// Aside is what happened, and was spent, in a part of a phase that is left out of what the phase's updates cost.
type Aside struct {
	Seconds float64 `json:"seconds"`
	// Updates that reached nodes meanwhile, however they did.
	Updates       int64 `json:"updates"`
	ReceivedBytes int64 `json:"receivedBytes"`
	SentBytes     int64 `json:"sentBytes"`
	// ServerCPU is absent where the phase's is.
	ServerCPU *CPU `json:"serverCPU,omitempty"`
}

// CPU time in seconds, by the accounting of the operating system. Both together are exact; how it is divided is as precise as the
// operating system's 10 ms.
type CPU struct {
	User   float64 `json:"userSeconds"`
	System float64 `json:"systemSeconds"`
}

// Total is user and system time.
func (c CPU) Total() float64 { return c.User + c.System }

func (c CPU) add(o CPU) CPU {
	return CPU{c.User + o.User, c.System + o.System}
}

// CPUOf converts a reading.
func CPUOf(c usage.CPU) CPU {
	user, system := c.Split()
	return CPU{User: user.Seconds(), System: system.Seconds()}
}

// Convergence is, over changes, how long it took from when a change was due until so many of the nodes had it.
type Convergence struct {
	Nodes50  Distribution `json:"nodes50"`
	Nodes99  Distribution `json:"nodes99"`
	Nodes100 Distribution `json:"nodes100"`
}

// Second is what happened in a second, or in as much of one as there was.
type Second struct {
	// At is the end of it, in seconds since the repeat's start.
	At float64 `json:"at"`
	// NodesUp is how many nodes were in sync with a server at the end of it.
	NodesUp int `json:"nodesUp"`
	// Sent is how many updates the source owed to nodes by changes made in this second; Applied, how many nodes applied.
	Sent    int64 `json:"sent"`
	Applied int64 `json:"applied"`
	// Latency of what was applied in this second; 0 where nothing was.
	P50 float64 `json:"p50Millis"`
	P99 float64 `json:"p99Millis"`
	Max float64 `json:"maxMillis"`
	// ServerCPU is zero where the server's process is not known.
	ServerCPU     CPU   `json:"serverCPU"`
	ReceivedBytes int64 `json:"receivedBytes"`
	SentBytes     int64 `json:"sentBytes"`
	// ServerMemory and ClientMemory are what processes have in RAM.
	ServerMemory int64 `json:"serverMemoryBytes"`
	ClientMemory int64 `json:"clientMemoryBytes"`
}

// ServerMemory is what the server's process has in use without garbage.
type ServerMemory struct {
	// State is with the whole state and before the first node, Connected with all nodes in sync.
	State     Memory `json:"state"`
	Connected Memory `json:"connected"`
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
	// HandshakeCPU is the server's for all connections.
	HandshakeCPU CPU `json:"handshakeCPU"`
	// Handshakes is how many connections there were, HandshakeBytes what all clients received until they were there.
	Handshakes     int64 `json:"handshakes"`
	HandshakeBytes int64 `json:"handshakeBytes"`
	// Cold: each connection got once as many bytes as a node did in the cold sync.
	Cold FloorWrites `json:"cold"`
	// Churn: each connection got a message of 100 bytes for each change, on the same schedule; absent without changes.
	Churn *FloorWrites `json:"churn,omitempty"`
}

// FloorWrites are messages over raw TLS.
type FloorWrites struct {
	// MessageBytes of each message, and how many were written.
	MessageBytes int64   `json:"messageBytes"`
	Writes       int64   `json:"writes"`
	Seconds      float64 `json:"seconds"`
	ServerCPU    CPU     `json:"serverCPU"`
	// Lag of the schedule.
	Lag Lag `json:"lag"`
}

// Lag is how late things were done on a schedule, in milliseconds.
type Lag struct {
	P99 float64 `json:"p99Millis"`
	Max float64 `json:"maxMillis"`
}

// Check of the nodes against the true state.
type Check struct {
	Nodes int `json:"nodes"`
	// Shards of each node; 0: the peer has none.
	Shards int  `json:"shards"`
	OK     bool `json:"ok"`
	// Error names nodes and what they lack, or says why the repeat failed before the check; empty if OK.
	Error string `json:"error,omitempty"`
}

// OK tells whether the check of every repeat was.
func (r *Report) OK() bool {
	for i := range r.Repeats {
		if !r.Repeats[i].Check.OK {
			return false
		}
	}
	return len(r.Repeats) > 0
}
