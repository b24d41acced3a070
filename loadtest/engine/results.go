package engine

import (
	"fmt"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/slicecast/slicecast/loadtest/generate"
	"github.com/slicecast/slicecast/loadtest/report"
	"github.com/slicecast/slicecast/loadtest/worker"
)

// If more than these shares of the machine's CPUs are busy, are used by the load tester, or are
// used by other processes, the report notes that the figures may show something other than the
// server.
const (
	busyShare   = 0.85
	clientShare = 0.5
	othersShare = 0.05
	// roughSeconds is the CPU time below which the division into user mode and kernel is imprecise,
	// because it covers too few ticks of the kernel.
	roughSeconds = 1
)

// convergence returns the convergence of all changes. If several processes have nodes, a change has
// reached a share of the nodes once it has reached that share in each process.
func convergence(got []worker.Received) *report.Convergence {
	var out [3]*hdrhistogram.Histogram
	for share := range out {
		out[share] = report.NewHistogram()
		for change := range got[0].Convergence[share] {
			longest := int64(0)
			for _, g := range got {
				longest = max(longest, g.Convergence[share][change])
			}
			_ = out[share].RecordValue(longest) // in range
		}
	}
	return &report.Convergence{
		Nodes50: report.DistributionOf(out[0]), Nodes99: report.DistributionOf(out[1]), Nodes100: report.DistributionOf(out[2]),
	}
}

// add appends a phase, and adds notes about it if it is what the run is about. That is the changes
// or, if the run has none, each sync. machine is the CPU time of the whole machine during the
// phase.
func (r *repeat) add(p report.Phase, machine time.Duration) {
	if p.Kind == report.Changes {
		for _, earlier := range r.result.Phases {
			if earlier.Kind == report.Resync { // it happened during this phase
				p.Reconnects = max(0, p.Reconnects-earlier.Updates)
			}
		}
	}
	r.result.Phases = append(r.result.Phases, p)
	about := p.Kind == report.Changes || !r.changing() && p.Kind != report.WarmUp
	if !about || p.Seconds <= 0 {
		return
	}
	when := "the changes"
	if p.Kind != report.Changes {
		when = "the " + p.Name
	}
	cores := float64(r.report.Machine.CPUs)
	busy := machine.Seconds() / p.Seconds
	client := p.ClientCPU.Total() / p.Seconds
	r.note(busy > busyShare*cores, "the machine was %.0f %% busy during %s: latencies include waiting for a CPU", 100*busy/cores, when)
	r.note(client > clientShare*cores,
		"the load tester itself used more than half of the machine during %s: it may cause part of the latencies", when)
	if s := p.ServerCPU; s != nil {
		if r.stack.writer == nil && r.stack.process == nil {
			others := busy - s.Total()/p.Seconds - client
			r.note(others > othersShare*cores, "other processes used %.2f cores during %s", others, when)
		}
		r.note(s.Undivided == 0 && s.Total() < roughSeconds, "the server used less than %d s of CPU time during %s: its division into user mode and "+
			"kernel is imprecise, because the kernel counts in steps of 10 ms", roughSeconds, when)
	}
	if a := p.Aside; a != nil {
		r.note(true, "bytes and CPU per node-update leave out the %s of the %s, in which nodes received %d of the %d updates",
			report.FormatValue(a.Seconds, report.Seconds), r.scenario.Event, a.Updates, p.Updates)
	}
	if p.Changes > 0 && p.Aside == nil {
		r.note(p.Latency.P99 > report.Pace, "more than 1 %% of the updates took longer than a second: nodes did not keep up with the changes")
	}
}

func (r *repeat) changing() bool { return r.stack.cluster == nil || r.scenario.Change != generate.None }

func (r *repeat) note(is bool, format string, args ...any) {
	if is {
		r.result.Notes = append(r.result.Notes, fmt.Sprintf(format, args...))
	}
}

// reconnected notes how many streams broke by themselves in the whole repeat. Streams that nodes
// had to open again after an event do not count.
func (r *repeat) reconnected(all int64) {
	for _, p := range r.result.Phases {
		if p.Kind == report.Resync {
			all -= p.Updates
		}
	}
	r.result.Reconnects = max(0, all)
	r.note(all > 0, "%d streams broke and were reopened", all)
}

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
