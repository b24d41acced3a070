package app

import (
	"fmt"
	"maps"
	"runtime"
	"time"

	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/loadtest/fleet"
	"github.com/slicecast/slicecast/loadtest/report"
	"github.com/slicecast/slicecast/loadtest/usage"
)

// From these shares of the machine on, a report says that something else than the server may be what was measured.
const (
	busyShare   = 0.85
	clientShare = 0.5
	othersShare = 0.05
)

func (r *run) newReport() (*report.Report, error) {
	machine, err := usage.ThisMachine()
	if err != nil {
		return nil, err
	}
	o := r.options
	parameters := map[string]any{
		"nodes": o.Nodes, "durationSeconds": o.Duration.Seconds(), "connecting": o.Connecting, "grpcGo": o.GRPCGo,
	}
	if r.cluster != nil {
		maps.Copy(parameters, map[string]any{
			"services": o.Services, "endpointsPerService": o.Endpoints, "largeServices": o.LargeServices,
			"endpointsPerLargeService": o.LargeEndpoints, "changesPerSecond": o.Churn, "seed": o.Seed, "warmUpSeconds": o.WarmUp.Seconds(),
		})
	}
	return &report.Report{
		Schema: report.Schema, Start: r.progress.Start(), Peer: report.Slicecast, Nodes: o.Nodes, Processes: 1, Server: o.Server,
		Scenario: report.Scenario{Name: "flags", Parameters: parameters}, Machine: machine,
		Versions: report.Versions{Slicecast: daemon.Version(), Go: runtime.Version()},
		Repeats:  []report.Repeat{{Start: r.progress.Start(), Notes: []string{}}},
		Notes:    []string{},
	}, nil
}

// phase is what happened between two readings.
func (r *run) phase(name string, kind report.PhaseKind, before, after reading) report.Phase {
	p := report.Phase{
		Name: name, Kind: kind, StartSeconds: before.at.Sub(r.progress.Start()).Seconds(), Seconds: after.at.Sub(before.at).Seconds(),
		ReceivedBytes: after.received - before.received, SentBytes: after.sent - before.sent,
		ClientCPU: report.CPUOf(after.client.Sub(before.client)),
	}
	if r.meter.server != 0 {
		p.ServerCPU = new(report.CPUOf(after.server.Sub(before.server)))
	}
	return p
}

// syncPhase is one in which all nodes came to the state.
func (r *run) syncPhase(name string, kind report.PhaseKind, s *fleet.Sync, before, after reading) report.Phase {
	p := r.phase(name, kind, before, after)
	nodes := s.Nodes()
	p.Updates = int64(len(nodes))
	p.ReceivedBytes = 0
	histogram := report.NewHistogram()
	for _, n := range nodes {
		p.ReceivedBytes += n.Bytes
		p.MessageBytes += n.MessageBytes
		p.MaxNodeBytes = max(p.MaxNodeBytes, n.Bytes)
		_ = histogram.RecordValue(min(n.Duration, report.MaxDuration).Microseconds()) // within its range
	}
	p.Latency = report.DistributionOf(histogram)
	return p
}

// peaks takes note of the most memory that there was.
func peaks(result *report.Repeat, at reading) {
	result.ServerPeakBytes = max(result.ServerPeakBytes, at.serverMemory.Peak)
	result.ClientPeakBytes = max(result.ClientPeakBytes, at.clientMemory.Peak)
}

// changesPhase is one in which the state changed.
func (r *run) changesPhase(name string, kind report.PhaseKind, window *fleet.Window, before, after reading) report.Phase {
	p := r.phase(name, kind, before, after)
	p.Latency = report.DistributionOf(window.Latencies())
	p.Reconnects = after.reconnects - before.reconnects
	return p
}

// notes says what has to be known about measured changes.
func (r *run) notes(result *report.Repeat, p report.Phase, cpus int, machine time.Duration) {
	note := func(is bool, format string, args ...any) {
		if is {
			result.Notes = append(result.Notes, fmt.Sprintf(format, args...))
		}
	}
	cores := float64(cpus)
	busy := machine.Seconds() / p.Seconds
	client := p.ClientCPU.Total() / p.Seconds
	note(busy > busyShare*cores, "the machine was %.0f %% busy during the changes: latencies hold waits for a CPU", 100*busy/cores)
	note(client > clientShare*cores, "the load tester itself used more than half of the machine: latencies are also its own")
	if s := p.ServerCPU; s != nil {
		others := busy - s.Total()/p.Seconds - client
		note(others > othersShare*cores, "other processes used %.2f cores during the changes", others)
	}
	if rate := r.options.Churn; r.cluster != nil && rate > 0 {
		note(p.Latency.P50 > 1000/rate, "half of the updates took longer than the %.0f ms between two changes: nodes were behind and got several "+
			"in one go, so bytes and CPU a node-update are lower than they are where nodes keep up", 1000/rate)
	}
	note(p.Reconnects > 0, "%d streams broke and were opened again", p.Reconnects)
}

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
