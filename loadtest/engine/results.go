package engine

import (
	"fmt"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/slicecast/slicecast/loadtest/report"
	"github.com/slicecast/slicecast/loadtest/worker"
)

// From these shares of the machine on, a report says that something else than the server may be what was measured.
const (
	busyShare   = 0.85
	clientShare = 0.5
	othersShare = 0.05
)

func imported(s *hdrhistogram.Snapshot) *hdrhistogram.Histogram { return hdrhistogram.Import(s) }

// convergence is over all changes. Where nodes are in several processes, a share is reached when it is in each of them.
func convergence(got []worker.Received) *report.Convergence {
	var out [3]*hdrhistogram.Histogram
	for share := range out {
		out[share] = report.NewHistogram()
		for change := range got[0].Convergence[share] {
			longest := int64(0)
			for _, g := range got {
				longest = max(longest, g.Convergence[share][change])
			}
			_ = out[share].RecordValue(longest) // within its range
		}
	}
	return &report.Convergence{
		Nodes50: report.DistributionOf(out[0]), Nodes99: report.DistributionOf(out[1]), Nodes100: report.DistributionOf(out[2]),
	}
}

// add adds a phase with changes, and says what has to be known about it. The machine's CPU time is that of the phase.
func (r *repeat) add(p report.Phase, machine time.Duration) {
	for _, earlier := range r.result.Phases {
		if earlier.Kind == report.Resync { // it was in this one
			p.Reconnects = max(0, p.Reconnects-earlier.Updates)
		}
	}
	r.result.Phases = append(r.result.Phases, p)
	if p.Kind == report.WarmUp {
		return
	}
	note := func(is bool, format string, args ...any) {
		if is {
			r.result.Notes = append(r.result.Notes, fmt.Sprintf(format, args...))
		}
	}
	cores := float64(r.report.Machine.CPUs)
	busy := machine.Seconds() / p.Seconds
	client := p.ClientCPU.Total() / p.Seconds
	note(busy > busyShare*cores, "the machine was %.0f %% busy during the changes: latencies hold waits for a CPU", 100*busy/cores)
	note(client > clientShare*cores, "the load tester itself used more than half of the machine: latencies are also its own")
	if s := p.ServerCPU; s != nil && r.stack.writer == nil && r.stack.process == nil {
		others := busy - s.Total()/p.Seconds - client
		note(others > othersShare*cores, "other processes used %.2f cores during the changes", others)
	}
	if p.Changes > 0 && p.Seconds > 0 {
		between := 1000 * p.Seconds / float64(p.Changes)
		note(p.Latency.P50 > between, "half of the updates took longer than the %.0f ms between two changes: nodes were behind and got several "+
			"in one go, so bytes and CPU a node-update are lower than they are where nodes keep up", between)
	}
	note(p.Reconnects > 0, "%d streams broke and were opened again", p.Reconnects)
}

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
