package engine

import (
	"context"
	"time"

	"github.com/slicecast/slicecast/loadtest/floor"
	"github.com/slicecast/slicecast/loadtest/generate"
	"github.com/slicecast/slicecast/loadtest/report"
	"github.com/slicecast/slicecast/loadtest/worker"
)

// floorMessage is the size of a short message, in bytes: about that of a change with HTTP/2 and
// gRPC.
const floorMessage = 100

// floor measures what TLS alone costs the server's process.
func (r *repeat) floor(ctx context.Context) error {
	r.meter.enter("raw TLS, for comparison")
	one, nodes := r.stack.servers[0], int64(r.scenario.Nodes)
	address, err := one.Listen(ctx)
	if err != nil {
		return err
	}
	before, err := r.meter.read(ctx)
	if err != nil {
		return err
	}
	r.result.ServerPeakBytes, r.result.ClientPeakBytes = r.meter.peaks()
	received := make([]int64, len(r.stack.workers))
	err = r.within(ctx, "raw connections", func(ctx context.Context, i int, w *worker.Process) (err error) {
		received[i], err = w.Floor(ctx, address)
		return err
	})
	if err != nil {
		return err
	}
	after, err := r.meter.read(ctx)
	if err != nil {
		return err
	}
	out := &report.Floor{HandshakeCPU: report.CPUOf(after.server.Sub(before.server)), Handshakes: nodes}
	for _, n := range received {
		out.HandshakeBytes += n
	}

	expected := int64(0)
	write := func(w floor.Writes) (f report.FloorWrites, err error) {
		before, err := r.meter.readFor(ctx, w.Schedule.Start)
		if err != nil {
			return f, err
		}
		lag, err := one.Write(ctx, w)
		if err != nil {
			return f, err
		}
		expected += int64(w.Size) * int64(w.Schedule.Count)
		err = r.within(ctx, "raw messages", func(ctx context.Context, _ int, w *worker.Process) error { return w.FloorReceived(ctx, expected) })
		if err != nil {
			return f, err
		}
		after, err := r.meter.read(ctx)
		return report.FloorWrites{
			MessageBytes: int64(w.Size), Writes: nodes * int64(w.Schedule.Count), Seconds: after.at.Sub(before.at).Seconds(),
			ServerCPU: report.CPUOf(after.server.Sub(before.server)), Lag: report.Lag{P99: millis(lag.P99), Max: millis(lag.Max)},
		}, err
	}
	cold := r.result.Phases[0]
	if out.Cold, err = write(floor.Writes{
		Size: int(cold.ReceivedBytes / nodes), AtATime: r.scenario.Connecting, Schedule: generate.Schedule{Start: time.Now(), Count: 1, Rate: 1},
	}); err != nil {
		return err
	}
	if r.scenario.Change == generate.Flip {
		plan := r.scenario.Plan(time.Now().Add(leadTime))
		churn, err := write(floor.Writes{Size: floorMessage, Schedule: plan.Schedule})
		if err != nil {
			return err
		}
		out.Churn = &churn
	}
	r.result.Floor = out
	return nil
}
