// Package reporttest builds reports with made-up figures, for tests of code that processes reports.
package reporttest

import (
	"encoding/json"
	"math/rand/v2"
	"time"

	"github.com/google/jsonschema-go/jsonschema"

	"github.com/slicecast/slicecast/loadtest/report"
	"github.com/slicecast/slicecast/loadtest/usage"
)

const (
	nodes   = 1000
	changes = 100
)

// Validate validates the JSON of a report against the published schema.
func Validate(content []byte) error { return ValidateAs(report.JSONSchema, content) }

// ValidateAs validates JSON against a schema.
func ValidateAs(schema, content []byte) error {
	var s jsonschema.Schema
	if err := json.Unmarshal(schema, &s); err != nil {
		return err
	}
	resolved, err := s.Resolve(nil)
	if err != nil {
		return err
	}
	var value any
	if err := json.Unmarshal(content, &value); err != nil {
		return err
	}
	return resolved.Validate(value)
}

// begin is the start of all reports.
var begin = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// Slicecast returns a report that has everything that a report can have. All figures grow with the
// factor.
func Slicecast(repeats int, factor float64) *report.Report {
	return build(report.Slicecast, repeats, factor)
}

// APIServer returns a report of the same scenario with a kube-apiserver, which costs more.
func APIServer(repeats int) *report.Report {
	const more = 5
	r := build(report.KubeAPIServer, repeats, more)
	r.Versions.KubeAPIServer, r.Versions.Etcd, r.Source = "v1.36.3", "3.6.8", report.OwnAPIServer
	for i := range r.Repeats {
		r.Repeats[i].ServerMemory, r.Repeats[i].Floor = nil, nil
		r.Repeats[i].Check.Shards = 0
		for j := range r.Repeats[i].Phases {
			r.Repeats[i].Phases[j].APIServerCPU = nil
		}
	}
	r.Summarize()
	return r
}

func build(peer report.Peer, repeats int, factor float64) *report.Report {
	r := &report.Report{
		Schema: report.Schema, Start: begin, Peer: peer, Nodes: nodes, Processes: 1, Source: report.Generated,
		Scenario: report.Scenario{
			Name: "steady", Description: "Endpoints flip at a rate.",
			Parameters: map[string]any{"changesPerSecond": 5, "services": map[string]any{"count": 1000, "endpoints": 50}, "seed": 1},
		},
		Machine:  usage.Machine{CPUs: 2, CPU: "Example <CPU>", Memory: 8 << 30, Kernel: "6.18.0"},
		Versions: report.Versions{Slicecast: "v1.0.0", Go: "go1.26.8"},
		Notes:    []string{"made for a test"},
	}
	random := rand.New(rand.NewPCG(1, uint64(factor*1000)))
	for i := range repeats {
		r.Repeats = append(r.Repeats, repeat(begin.Add(time.Duration(i)*time.Minute), random, factor*(1+0.01*float64(i))))
	}
	r.Summarize()
	return r
}

func cpu(seconds, factor float64) *report.CPU {
	return &report.CPU{User: seconds * factor / 3, System: seconds * factor * 2 / 3}
}

// repeat returns a repeat of half a minute: three seconds of cold sync, two of warm-up, twenty of
// changes and five after a restart.
func repeat(start time.Time, random *rand.Rand, factor float64) report.Repeat {
	cpu := func(seconds float64) *report.CPU { return cpu(seconds, factor) }
	latency := func(count int, median float64) report.Distribution {
		h := report.NewHistogram()
		for range count {
			_ = h.RecordValue(int64(1000*median*factor*(0.5+random.ExpFloat64())) + 1)
		}
		return report.DistributionOf(h)
	}
	const updates = nodes * changes
	out := report.Repeat{
		Start: start, State: report.State{Services: 1001, Slices: 1050, Endpoints: 55000},
		Phases: []report.Phase{
			{
				Name: "cold sync", Kind: report.ColdSync, Seconds: 3, Updates: nodes, ReceivedBytes: int64(565_000 * nodes * factor), SentBytes: 2000 * nodes,
				MessageBytes: int64(560_000 * nodes * factor), MaxNodeBytes: int64(566_000 * factor), ServerCPU: cpu(1.2), ClientCPU: *cpu(4),
				Latency: latency(nodes, 90),
			},
			{
				Name: "warm-up", Kind: report.WarmUp, StartSeconds: 3, Seconds: 2, Changes: 10, Updates: 10 * nodes,
				ReceivedBytes: int64(110 * 10 * nodes * factor), SentBytes: 11 * 10 * nodes, ServerCPU: cpu(0.2), ClientCPU: *cpu(0.4), Latency: latency(1000, 15),
			},
			{
				Name: "changes", Kind: report.Changes, StartSeconds: 5, Seconds: 20, Changes: changes, Updates: updates,
				ReceivedBytes: int64(110 * updates * factor), SentBytes: 11 * updates, ServerCPU: cpu(1.4), APIServerCPU: cpu(0.9), ClientCPU: *cpu(6), Latency: latency(20_000, 15),
				Convergence: &report.Convergence{Nodes50: latency(changes, 10), Nodes99: latency(changes, 30), Nodes100: latency(changes, 40)},
				SourceLag:   &report.Lag{P99: 1.5, Max: 3},
			},
			{
				Name: "restart", Kind: report.Resync, StartSeconds: 25, Seconds: 5, Updates: nodes, ReceivedBytes: int64(2500 * nodes * factor),
				MessageBytes: 300 * nodes, MaxNodeBytes: 2600, ServerCPU: cpu(0.6), ClientCPU: *cpu(1), Latency: latency(nodes, 2000), DownSeconds: 0.4,
			},
		},
		ServerMemory: &report.ServerMemory{
			State:     report.Memory{Heap: 16 << 20, Stacks: 1 << 19, Resident: 48 << 20, Anonymous: 30 << 20},
			Connected: report.Memory{Heap: 40 << 20, Stacks: 20 << 20, Resident: 100 << 20, Anonymous: 82 << 20},
		},
		Floor: &report.Floor{
			HandshakeCPU: *cpu(0.6), Handshakes: nodes, HandshakeBytes: 1986 * nodes,
			Cold:  report.FloorWrites{MessageBytes: 565_000, Writes: nodes, Seconds: 0.5, ServerCPU: *cpu(0.4), Lag: report.Lag{P99: 0.3, Max: 0.3}},
			Churn: &report.FloorWrites{MessageBytes: 100, Writes: updates, Seconds: 20, ServerCPU: *cpu(0.9), Lag: report.Lag{P99: 1.2, Max: 1.3}},
		},
		ServerPeakBytes: int64(120 * factor * (1 << 20)), ClientPeakBytes: 900 << 20,
		Check:  report.Check{Nodes: nodes, Shards: 64, OK: true},
		Notes:  []string{"the machine was 90 % busy during the changes: latencies hold waits for a CPU"},
		Series: series(random, factor),
	}
	return out
}

// series returns the seconds of a repeat.
func series(random *rand.Rand, factor float64) (out []report.Second) {
	for second := 1; second <= 30; second++ {
		s := report.Second{
			At: float64(second), NodesUp: min(nodes, second*400), ServerMemory: int64(float64(48+2*second) * factor * (1 << 20)),
			ClientMemory: int64(100+20*second) << 20, ServerCPU: *cpu(0.07, factor), ReceivedBytes: int64(110 * 5 * nodes * factor), SentBytes: 11 * 5 * nodes,
		}
		if second > 3 && second <= 25 {
			s.Sent, s.Applied = 5*nodes, int64(5*nodes-second%3)
			s.P50, s.P99, s.Max = (14+random.Float64())*factor, (35+4*random.Float64())*factor, (60+10*random.Float64())*factor
		}
		out = append(out, s)
	}
	return out
}
