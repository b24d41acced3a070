package app

import (
	"fmt"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

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
	result := &report.Report{
		Schema: report.Schema, Start: r.progress.start, Version: daemon.Version(), Machine: machine,
		Parameters: report.Parameters{
			Nodes: o.Nodes, Server: o.Server, DurationSeconds: o.Duration.Seconds(), Connecting: o.Connecting, GRPCGo: o.GRPCGo,
		},
		Notes: []string{},
	}
	if r.cluster != nil {
		p := &result.Parameters
		p.LargeServices, p.LargeEndpoints = o.LargeServices, o.LargeEndpoints
		p.Services, p.Endpoints, p.ChurnRate, p.Seed, p.WarmUpSeconds = o.Services, o.Endpoints, o.Churn, o.Seed, o.WarmUp.Seconds()
	}
	if r.meter.server != 0 {
		result.Server = &report.Process{}
	}
	return result, nil
}

// coldSync fills in what it took to give all nodes the state.
func (r *run) coldSync(result *report.Report, before, after reading) {
	c := &result.ColdSync
	c.Services, c.Slices, c.Endpoints = r.fleet.Objects()
	cost := costOf(r.fleet.Sync())
	c.BytesPerNode, c.MessageBytesPerNode, c.Node = cost.bytes, cost.messageBytes, cost.took
	seconds := after.at.Sub(before.at).Seconds()
	c.AllSeconds = seconds
	result.Client.ColdSyncCores = after.client.Sub(before.client).Total().Seconds() / seconds
	if s := result.Server; s != nil {
		s.ColdSyncCores = after.server.Sub(before.server).Total().Seconds() / seconds
		c.ServerCPUMicrosPerNode = cpuPer(after.server.Sub(before.server), int64(r.options.Nodes))
		c.ServerPeakBytes = after.serverMemory.Peak
	}
}

// syncCost is what a sync took.
type syncCost struct {
	bytes, messageBytes float64 // that a node received, in the mean
	maxBytes            int64
	took                report.Distribution
}

func costOf(s *fleet.Sync) (c syncCost) {
	histogram := hdrhistogram.New(1, time.Hour.Microseconds(), 3)
	nodes := s.Nodes()
	for _, n := range nodes {
		c.bytes += float64(n.Bytes) / float64(len(nodes))
		c.messageBytes += float64(n.MessageBytes) / float64(len(nodes))
		c.maxBytes = max(c.maxBytes, n.Bytes)
		_ = histogram.RecordValue(min(n.Duration, time.Hour).Microseconds()) // within its range
	}
	c.took = report.DistributionOf(histogram)
	return c
}

// cpuPer divides CPU time by a number.
func cpuPer(c usage.CPU, n int64) *report.CPU {
	micros := func(d time.Duration) float64 { return float64(d.Microseconds()) / float64(n) }
	return &report.CPU{User: micros(c.User), System: micros(c.System), Total: micros(c.Total())}
}

// serverMemory fills in what the nodes added to the server's memory.
func (r *run) serverMemory(result *report.Report, state, connected report.Memory) {
	if r.process == nil {
		return
	}
	each := func(bytes int64) float64 { return float64(bytes) / float64(r.options.Nodes) }
	result.ServerMemory = &report.ServerMemory{
		State: state, Connected: connected,
		BytesPerNode:         each(connected.Heap + connected.Stacks - state.Heap - state.Stacks),
		ResidentBytesPerNode: each(connected.Resident - state.Resident),
	}
}

// churnCost fills in what it took to give all nodes the changes.
func (r *run) churnCost(result *report.Report, window *fleet.Window, nodeUpdates int64, before, after reading) {
	c := &result.Churn
	seconds := after.at.Sub(before.at).Seconds()
	c.Seconds = seconds
	c.NodeUpdates = nodeUpdates
	c.ReceivedBytes, c.SentBytes = after.received-before.received, after.sent-before.sent
	c.Latency = report.DistributionOf(window.Latencies())
	c.Reconnects = r.fleet.Reconnects()
	server, client := after.server.Sub(before.server), after.client.Sub(before.client)
	if nodeUpdates > 0 {
		each := func(v float64) float64 { return v / float64(nodeUpdates) }
		c.ReceivedBytesPerNodeUpdate, c.SentBytesPerNodeUpdate = each(float64(c.ReceivedBytes)), each(float64(c.SentBytes))
		if result.Server != nil {
			c.ServerCPUMicrosPerNodeUpdate = cpuPer(server, nodeUpdates)
		}
	}
	result.Client.ChurnCores = client.Total().Seconds() / seconds
	result.Client.ResidentBytes, result.Client.PeakBytes = after.clientMemory.Resident, after.clientMemory.Peak
	if s := result.Server; s != nil {
		s.ChurnCores = server.Total().Seconds() / seconds
		s.ResidentBytes, s.PeakBytes = after.serverMemory.Resident, after.serverMemory.Peak
	}

	note := func(is bool, format string, args ...any) {
		if is {
			result.Notes = append(result.Notes, fmt.Sprintf(format, args...))
		}
	}
	cores := float64(result.Machine.CPUs)
	busy := (after.machine - before.machine).Seconds() / seconds
	others := busy - (server.Total()+client.Total()).Seconds()/seconds
	note(busy > busyShare*cores, "the machine was %.0f %% busy during the churn: latencies hold waits for a CPU", 100*busy/cores)
	note(client.Total().Seconds()/seconds > clientShare*cores,
		"the load tester itself used more than half of the machine: latencies are also its own")
	note(result.Server != nil && others > othersShare*cores, "other processes used %.2f cores during the churn", others)
	if rate := result.Parameters.ChurnRate; rate > 0 {
		note(c.Latency.P50 > 1000/rate, "half of the updates took longer than the %.0f ms between two changes: nodes were behind and got several "+
			"in one go, so bytes and CPU a node-update are lower than they are where nodes keep up", 1000/rate)
	}
	note(c.Reconnects > 0, "%d streams broke and were opened again", c.Reconnects)
}

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
