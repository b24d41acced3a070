// Package report defines the result of a load test: JSON with a versioned schema for machines, and
// text for people.
//
// A report describes one scenario played against one peer. It contains the repeats of the scenario,
// each with its phases in order. Summarize derives the median and the range over all repeats of
// each metric in Metrics. Objectives, comparisons and docs/performance.md use the same metrics
// under the same names.
package report

import (
	"time"

	"github.com/slicecast/slicecast/loadtest/usage"
)

// Schema names the JSON schema of reports. Fields may be added under this name; any other change
// needs a new name.
const Schema = "slicecast-loadtest/v2"

// Report is the outcome of a scenario. The suffix of a field's name is its unit; sizes are in
// bytes.
type Report struct {
	Schema string    `json:"schema"`
	Start  time.Time `json:"start"`
	// Peer is the system that distributed the state.
	Peer     Peer     `json:"peer"`
	Scenario Scenario `json:"scenario"`
	// Nodes is the number of simulated nodes: Slicecast agents, or kube-proxies that watch.
	Nodes int `json:"nodes"`
	// Processes is the number of processes that simulated the nodes.
	Processes int `json:"processes"`
	// Server is the address of the running server or cluster that was observed. It is empty if the
	// run started its own.
	Server string `json:"server,omitempty"`
	// Source says where the state came from. It is empty in reports of releases that did not record
	// it.
	Source Source `json:"source,omitempty"`
	// Machine is the machine that simulated the nodes and, if the run started one, ran the server.
	Machine  usage.Machine `json:"machine"`
	Versions Versions      `json:"versions"`
	// Repeats are the repeats of the scenario, in order. Each repeat starts new servers.
	Repeats []Repeat `json:"repeats"`
	// Summary summarizes the repeats by metric name. Summarize computes it. Metrics that were not
	// measured are absent.
	Summary map[string]Spread `json:"summary"`
	// Notes are what a reader of the figures has to know about the run as a whole.
	Notes []string `json:"notes"`
}

// Peer is a system that distributes state to nodes.
type Peer string

// Supported peers.
const (
	Slicecast     Peer = "slicecast"
	KubeAPIServer Peer = "kube-apiserver"
)

// Source says where the state of a run came from.
type Source string

// Sources of state.
const (
	// Generated is state that the run's own servers generated.
	Generated Source = "generated"
	// OwnAPIServer is state that the run wrote to an API server that it started.
	OwnAPIServer Source = "own-api-server"
	// Written is state that the run wrote to a namespace of an existing cluster.
	Written Source = "written"
	// Observed is state that the run did not write; others make the changes, too.
	Observed Source = "observed"
)

// Scenario describes the scenario that was played.
type Scenario struct {
	Name        string `json:"name"`
	Description string `json:"description,omitempty"`
	// Parameters are all parameters that determine the course of the scenario, as in a scenario
	// file. Two reports with equal parameters can be compared.
	Parameters map[string]any `json:"parameters"`
}

// Versions are the versions of what was measured and of the load tester.
type Versions struct {
	// Slicecast is the version of the load tester and of the servers that it starts.
	Slicecast string `json:"slicecast"`
	Go        string `json:"go"`
	// Server is the version that an observed running server reports.
	Server string `json:"server,omitempty"`
	// KubeAPIServer is present if an API server was part of the run.
	KubeAPIServer string `json:"kubeAPIServer,omitempty"`
	// Etcd is present if the run started an API server.
	Etcd string `json:"etcd,omitempty"`
}

// Repeat is one run through the scenario.
type Repeat struct {
	Start time.Time `json:"start"`
	State State     `json:"state"`
	// Phases are in the order in which they ended. A resync may lie inside a changes phase. The
	// costs of both phases then include the resync, and Aside of the changes phase says how much
	// that was.
	Phases []Phase `json:"phases"`
	// ServerMemory is absent if a running server was observed.
	ServerMemory *ServerMemory `json:"serverMemory,omitempty"`
	// Floor is absent if it was not requested.
	Floor *Floor `json:"floor,omitempty"`
	// Series contains one entry for each second, over all phases.
	Series []Second `json:"series,omitempty"`
	// ServerPeakBytes is the most RAM that the server's process ever had; ClientPeakBytes is that
	// of all processes with nodes. Both are read before the floor is measured. 0 means unknown.
	ServerPeakBytes int64 `json:"serverPeakBytes"`
	ClientPeakBytes int64 `json:"clientPeakBytes"`
	// Reconnects is the number of streams that broke during the whole repeat and that the scenario
	// did not break.
	Reconnects int64 `json:"reconnects,omitempty"`
	// Check reports whether all nodes held the true state at the end, or why the repeat did not get
	// that far.
	Check Check `json:"check"`
	// Notes are what a reader of the figures has to know about this repeat.
	Notes []string `json:"notes"`
}

// State is the size of the state that the nodes hold once they hold all of it for the first time.
type State struct {
	Services  int `json:"services"`
	Slices    int `json:"slices"`
	Endpoints int `json:"endpoints"`
}

// PhaseKind is the purpose of a phase.
type PhaseKind string

// Kinds of phases.
const (
	// ColdSync is a phase in which nodes that hold nothing receive the whole state.
	ColdSync PhaseKind = "cold-sync"
	// WarmUp is a phase with changes that no metric counts.
	WarmUp PhaseKind = "warm-up"
	// Changes is a phase in which the state changes. It ends when all nodes have the last change.
	Changes PhaseKind = "changes"
	// Resync is a phase in which nodes that hold the state reconnect: to a restarted server, to
	// another server, or after their connections were cut.
	Resync PhaseKind = "resync"
)

// Phase is a part of a repeat, with its costs.
type Phase struct {
	// Name is the scenario's name for the phase.
	Name string    `json:"name"`
	Kind PhaseKind `json:"kind"`
	// StartSeconds is the time from the start of the repeat; Seconds is the length of the phase.
	StartSeconds float64 `json:"startSeconds"`
	Seconds      float64 `json:"seconds"`
	// Changes is the number of changes of the state. It is 0 if a running server was observed,
	// because the number is then unknown.
	Changes int `json:"changes"`
	// Updates is the number of updates that reached nodes. A sync counts one update for each node;
	// other phases count changes times nodes. If a running server was observed, it is the number of
	// objects that the nodes received.
	Updates int64 `json:"updates"`
	// ReceivedBytes and SentBytes are the bytes of all nodes below TLS. They include all that the
	// connections carry, such as handshakes, heartbeats and acks.
	ReceivedBytes int64 `json:"receivedBytes"`
	SentBytes     int64 `json:"sentBytes"`
	// MessageBytes is the size of the messages in ReceivedBytes, before HTTP/2 and TLS. 0 means
	// unknown.
	MessageBytes int64 `json:"messageBytes"`
	// MaxNodeBytes is the largest number of bytes that one node received. 0 means unknown.
	MaxNodeBytes int64 `json:"maxNodeBytes"`
	// ServerCPU is the CPU time of all processes that distribute, relays included. It is absent if
	// the server's process is unknown.
	ServerCPU *CPU `json:"serverCPU,omitempty"`
	// APIServerCPU is the CPU time of the API server that the run started and that Slicecast's
	// servers watch. It includes the writes of the changes but not etcd. It is absent if there is
	// no such API server.
	APIServerCPU *CPU `json:"apiServerCPU,omitempty"`
	// ClientCPU is the CPU time of all processes with nodes: the cost of the load tester itself.
	ClientCPU CPU `json:"clientCPU"`
	// Latency of a change is measured from the time at which the change was due at the source until
	// a node's client had applied it. Latency of a sync is measured from a node's first attempt, or
	// from the cut, until the node had everything.
	Latency Distribution `json:"latency"`
	// SlowLatency is the latency of the nodes that the scenario slows down; Latency then covers the
	// other nodes. It is absent if the scenario slows none down.
	SlowLatency *Distribution `json:"slowLatency,omitempty"`
	// Convergence is present for changes that follow a schedule.
	Convergence *Convergence `json:"convergence,omitempty"`
	// SourceLag is how late the source made the changes. This part of the latency is not the
	// server's.
	SourceLag *Lag `json:"sourceLag,omitempty"`
	// DownSeconds is how long no server was running.
	DownSeconds float64 `json:"downSeconds,omitempty"`
	// Reconnects is the number of streams that broke during the phase and that the scenario did not
	// break.
	Reconnects int64 `json:"reconnects"`
	// Aside is the part of this phase during which nodes came back from an event. It is absent if
	// there was no event.
	Aside *Aside `json:"aside,omitempty"`
}

// Aside is the part of a phase's events and costs that the costs per update leave out.
type Aside struct {
	Seconds float64 `json:"seconds"`
	// Updates is the number of updates that reached nodes in this part, by whatever way.
	Updates       int64 `json:"updates"`
	ReceivedBytes int64 `json:"receivedBytes"`
	SentBytes     int64 `json:"sentBytes"`
	// ServerCPU is absent if the phase has none.
	ServerCPU *CPU `json:"serverCPU,omitempty"`
}

// CPU is CPU time in seconds, as the operating system accounts for it. The sum of User and System
// is exact. The division between them is only as precise as the operating system's tick of 10 ms.
type CPU struct {
	User   float64 `json:"userSeconds"`
	System float64 `json:"systemSeconds"`
	// Undivided is the sum of user and system time, from sources that report no more than the sum.
	// The other fields are then 0.
	Undivided float64 `json:"undividedSeconds,omitempty"`
}

// Total returns the sum of user and system time.
func (c CPU) Total() float64 { return c.User + c.System + c.Undivided }

func (c CPU) add(o CPU) CPU {
	return CPU{c.User + o.User, c.System + o.System, c.Undivided + o.Undivided}
}

// CPUOf converts a reading of a process's CPU time.
func CPUOf(c usage.CPU) CPU {
	user, system := c.Split()
	return CPU{User: user.Seconds(), System: system.Seconds()}
}

// Convergence is a distribution over changes. It says how long after a change was due 50 %, 99 %
// and 100 % of the nodes had it.
type Convergence struct {
	Nodes50  Distribution `json:"nodes50"`
	Nodes99  Distribution `json:"nodes99"`
	Nodes100 Distribution `json:"nodes100"`
}

// Second describes one second, or the part of a second before the repeat ended.
type Second struct {
	// At is the end of the second, in seconds since the start of the repeat.
	At float64 `json:"at"`
	// NodesUp is the number of nodes that were in sync with a server at the end of the second.
	NodesUp int `json:"nodesUp"`
	// Sent is the number of node-updates due because of changes that the source made in this
	// second. Applied is the number that nodes applied in it.
	Sent    int64 `json:"sent"`
	Applied int64 `json:"applied"`
	// P50, P99 and Max are the latencies of the updates applied in this second, in milliseconds.
	// They are 0 if no update was applied.
	P50 float64 `json:"p50Millis"`
	P99 float64 `json:"p99Millis"`
	Max float64 `json:"maxMillis"`
	// ServerCPU is zero if the server's process is unknown.
	ServerCPU     CPU   `json:"serverCPU"`
	ReceivedBytes int64 `json:"receivedBytes"`
	SentBytes     int64 `json:"sentBytes"`
	// ServerMemory and ClientMemory are the resident memory of the processes, in bytes.
	ServerMemory int64 `json:"serverMemoryBytes"`
	ClientMemory int64 `json:"clientMemoryBytes"`
}

// ServerMemory is the memory of the server's process after a garbage collection.
type ServerMemory struct {
	// State is the memory with the whole state before the first node connects; Connected is the
	// memory with all nodes in sync.
	State     Memory `json:"state"`
	Connected Memory `json:"connected"`
}

// Memory is the memory of a process, in bytes.
type Memory struct {
	// Heap and Stacks are the sizes that the Go runtime reports.
	Heap   int64 `json:"heapBytes"`
	Stacks int64 `json:"stackBytes"`
	// Resident is the memory that the process has in RAM, including the program itself.
	Resident int64 `json:"residentBytes"`
	// Anonymous is Resident without the pages of files. Those are mostly the program, which
	// contains the whole load tester. 0 means that it was not measured.
	Anonymous int64 `json:"anonymousBytes,omitempty"`
}

// Floor is the cost of the same number of connections, bytes and writes between the same two
// processes over TLS alone.
type Floor struct {
	// HandshakeCPU is the server's CPU time for all handshakes.
	HandshakeCPU CPU `json:"handshakeCPU"`
	// Handshakes is the number of connections. HandshakeBytes is the number of bytes that all
	// clients received until their connections were established.
	Handshakes     int64 `json:"handshakes"`
	HandshakeBytes int64 `json:"handshakeBytes"`
	// Cold is one write to each connection of as many bytes as a node received in the cold sync.
	Cold FloorWrites `json:"cold"`
	// Churn is one message of 100 bytes to each connection for each change, on the schedule of the
	// changes. It is absent if there were no changes.
	Churn *FloorWrites `json:"churn,omitempty"`
}

// FloorWrites describes messages over raw TLS.
type FloorWrites struct {
	// MessageBytes is the size of each message; Writes is the number of messages.
	MessageBytes int64   `json:"messageBytes"`
	Writes       int64   `json:"writes"`
	Seconds      float64 `json:"seconds"`
	ServerCPU    CPU     `json:"serverCPU"`
	// Lag is how late the messages were written.
	Lag Lag `json:"lag"`
}

// Lag is how late scheduled actions were, in milliseconds.
type Lag struct {
	P99 float64 `json:"p99Millis"`
	Max float64 `json:"maxMillis"`
}

// Check is the comparison of the nodes with the true state.
type Check struct {
	Nodes int `json:"nodes"`
	// Shards is the number of shards on each node. It is 0 if the peer has no shards.
	Shards int  `json:"shards"`
	OK     bool `json:"ok"`
	// Error names nodes and what they lack, or says why the repeat failed before the check. It is
	// empty if OK.
	Error string `json:"error,omitempty"`
}

// OK reports whether there are repeats and all of them passed their checks.
func (r *Report) OK() bool {
	for i := range r.Repeats {
		if !r.Repeats[i].Check.OK {
			return false
		}
	}
	return len(r.Repeats) > 0
}
