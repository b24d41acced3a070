package app

import (
	"context"
	"crypto/tls"
	"fmt"
	"math"
	"time"

	"github.com/slicecast/slicecast/loadtest/floor"
	"github.com/slicecast/slicecast/loadtest/generate"
	"github.com/slicecast/slicecast/loadtest/progress"
	"github.com/slicecast/slicecast/loadtest/report"
	"github.com/slicecast/slicecast/loadtest/usage"
)

// floorMessage is the size of a short message: about that of a change, HTTP/2 and gRPC included.
const floorMessage = 100

// memory counts the memory of the server that was started, when its state is complete.
func (r *run) memory(ctx context.Context) (m report.Memory, err error) {
	if r.process == nil {
		return m, nil
	}
	counted, err := r.process.Memory(ctx)
	if err != nil {
		return m, err
	}
	u, err := usage.MemoryOf(r.process.PID())
	return report.Memory{Heap: counted.Heap, Stacks: counted.Stacks, Resident: u.Resident}, err
}

// floor measures what the server's process pays for TLS alone.
func (r *run) floor(ctx context.Context, result *report.Repeat) error {
	r.progress.Set(func() progress.Status { return r.status("raw TLS, for comparison") })
	address, err := r.process.Listen(ctx)
	if err != nil {
		return err
	}
	configs := make([]*tls.Config, r.options.Nodes)
	for i := range configs {
		if configs[i], err = r.identity.tlsConfig(generate.NodeName(i)); err != nil {
			return err
		}
		configs[i].ServerName = "127.0.0.1" // as the address has it
	}
	before, err := r.meter.read()
	if err != nil {
		return err
	}
	clients, err := floor.Dial(ctx, address, configs, r.options.Connecting)
	if err != nil {
		return err
	}
	defer clients.Close()
	after, err := r.meter.read()
	if err != nil {
		return err
	}
	nodes := int64(r.options.Nodes)
	out := &report.Floor{
		HandshakeCPU: report.CPUOf(after.server.Sub(before.server)), Handshakes: nodes, HandshakeBytes: clients.Received(),
	}

	expected := int64(0)
	write := func(w floor.Writes) (report.FloorWrites, error) {
		before, err := r.meter.read()
		if err != nil {
			return report.FloorWrites{}, err
		}
		lag, err := r.process.Write(ctx, w)
		if err != nil {
			return report.FloorWrites{}, err
		}
		expected += int64(w.Size) * int64(w.Plan.Count)
		if err := clients.Await(ctx, expected); err != nil {
			return report.FloorWrites{}, err
		}
		after, err := r.meter.read()
		if err != nil {
			return report.FloorWrites{}, err
		}
		writes := nodes * int64(w.Plan.Count)
		return report.FloorWrites{
			MessageBytes: int64(w.Size), Writes: writes, Seconds: after.at.Sub(before.at).Seconds(),
			ServerCPU: report.CPUOf(after.server.Sub(before.server)), Lag: lagOf(lag),
		}, nil
	}
	if out.Cold, err = write(floor.Writes{
		Size: int(math.Round(float64(result.Phases[0].ReceivedBytes) / float64(nodes))), AtATime: r.options.Connecting,
		Plan: generate.Plan{Start: time.Now(), Count: 1, Rate: 1},
	}); err != nil {
		return err
	}
	if r.options.Churn > 0 {
		churn, err := write(floor.Writes{Size: floorMessage, Plan: r.plan(r.options.Duration)})
		if err != nil {
			return err
		}
		out.Churn = &churn
	}
	result.Floor = out
	return nil
}

// restart kills the server, starts it again with the same state, and measures how the nodes come back.
func (r *run) restart(ctx context.Context, result *report.Repeat) error {
	r.muted.Store(true)
	defer r.muted.Store(false)
	r.setup.Address = r.process.Address
	sync := r.fleet.AwaitSync()
	killed := time.Now()
	if err := r.process.Kill(); err != nil {
		return fmt.Errorf("kill the server: %w", err)
	}
	r.process = nil
	if err := r.startProcess(ctx); err != nil {
		return err
	}
	r.meter.server = r.process.PID()
	before, err := r.meter.read()
	if err != nil {
		return err
	}
	if err := r.awaitSync(ctx, sync); err != nil {
		return err
	}
	after, err := r.meter.read()
	if err != nil {
		return err
	}
	p := r.syncPhase("restart", report.Resync, sync, before, after)
	// Nodes have waited since the kill.
	p.DownSeconds = before.at.Sub(killed).Seconds()
	p.StartSeconds, p.Seconds = p.StartSeconds-p.DownSeconds, p.Seconds+p.DownSeconds
	result.Phases = append(result.Phases, p)
	peaks(result, after)
	return nil
}

func lagOf(l generate.Lag) report.Lag { return report.Lag{P99: millis(l.P99), Max: millis(l.Max)} }
