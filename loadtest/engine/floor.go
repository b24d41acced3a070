package engine

import (
	"context"
	"time"

	"github.com/slicecast/slicecast/loadtest/child"
	"github.com/slicecast/slicecast/loadtest/floor"
	"github.com/slicecast/slicecast/loadtest/generate"
	"github.com/slicecast/slicecast/loadtest/report"
	"github.com/slicecast/slicecast/loadtest/target"
	"github.com/slicecast/slicecast/loadtest/worker"
)

// floorMessage is the size of a short message, in bytes: about that of a change with HTTP/2 and
// gRPC.
const floorMessage = 100

// floor measures what TLS alone costs the server's process.
func (r *repeat) floor(ctx context.Context) error {
	r.meter.enter("raw TLS, for comparison")
	out, err := r.floorConnections(ctx)
	if err != nil {
		return err
	}
	cold, expected := r.result.Phases[0], int64(0)
	if out.Cold, err = r.floorWrite(ctx, &expected, floor.Writes{
		Size: int(cold.ReceivedBytes / out.Handshakes), AtATime: r.scenario.Connecting, Schedule: generate.Schedule{Start: time.Now(), Count: 1, Rate: 1},
	}); err != nil {
		return err
	}
	if r.scenario.Change == generate.Flip {
		plan := r.scenario.Plan(time.Now().Add(leadTime))
		churn, err := r.floorWrite(ctx, &expected, floor.Writes{Size: floorMessage, Schedule: plan.Schedule})
		if err != nil {
			return err
		}
		out.Churn = &churn
	}
	r.result.Floor = out
	return nil
}

// floorConnections opens a raw connection for each node, and measures the handshakes.
func (r *repeat) floorConnections(ctx context.Context) (*report.Floor, error) {
	address, err := child.Call(ctx, r.stack.servers[0].Process, (*target.Servant).Listen, child.None{})
	if err != nil {
		return nil, err
	}
	before, err := r.meter.read(ctx)
	if err != nil {
		return nil, err
	}
	r.result.ServerPeakBytes, r.result.ClientPeakBytes = r.meter.peaks()
	received, err := within(ctx, r, "raw connections", (*worker.Worker).Floor, address)
	if err != nil {
		return nil, err
	}
	after, err := r.meter.read(ctx)
	if err != nil {
		return nil, err
	}
	out := &report.Floor{HandshakeCPU: report.CPUOf(after.server.Sub(before.server)), Handshakes: int64(r.scenario.Nodes)}
	for _, n := range received {
		out.HandshakeBytes += n
	}
	return out, nil
}

// floorWrite writes to all raw connections. expected is the number of bytes that each of them has
// received so far; floorWrite adds its own.
func (r *repeat) floorWrite(ctx context.Context, expected *int64, w floor.Writes) (f report.FloorWrites, err error) {
	before, err := r.meter.readFor(ctx, w.Schedule.Start)
	if err != nil {
		return f, err
	}
	lag, err := child.Call(ctx, r.stack.servers[0].Process, (*target.Servant).Write, w)
	if err != nil {
		return f, err
	}
	*expected += int64(w.Size) * int64(w.Schedule.Count)
	if _, err := within(ctx, r, "raw messages", (*worker.Worker).FloorReceived, *expected); err != nil {
		return f, err
	}
	after, err := r.meter.read(ctx)
	return report.FloorWrites{
		MessageBytes: int64(w.Size), Writes: int64(r.scenario.Nodes) * int64(w.Schedule.Count), Seconds: after.at.Sub(before.at).Seconds(),
		ServerCPU: report.CPUOf(after.server.Sub(before.server)), Lag: report.Lag{P99: millis(lag.P99), Max: millis(lag.Max)},
	}, err
}
