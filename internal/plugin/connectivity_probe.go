package plugin

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/types"

	"github.com/slicecast/slicecast/internal/probe"
)

// dial sends to the targets of a check, and returns the results by target.
func (r *connectivityRun) dial(ctx context.Context, c trial) ([][]probe.Result, error) {
	plans := make([]probe.Plan, len(c.targets))
	for i, t := range c.targets {
		plans[i] = c.plan
		plans[i].Network, plans[i].Address = t.network, t.address
	}
	in, err := json.Marshal(plans)
	if err != nil {
		return nil, err
	}
	results := make([][]probe.Result, len(plans))
	var out lineWriter
	out.line = func(line []byte) error {
		var one probe.Result
		if err := json.Unmarshal(line, &one); err != nil || one.Plan < 0 || one.Plan >= len(plans) || len(results[one.Plan]) >= plans[one.Plan].Attempts {
			return fmt.Errorf("the probe has printed %.100q: use an image of this version", line)
		}
		results[one.Plan] = append(results[one.Plan], one)
		return nil
	}
	if err := r.exec(ctx, c.pod, bytes.NewReader(in), &out, "dial"); err != nil {
		return nil, err
	}
	for i := range results {
		lost := 0
		for _, one := range results[i] {
			if one.Outcome != probe.Answered {
				lost++
			}
		}
		endedEarly := plans[i].MaxFailures > 0 && lost >= plans[i].MaxFailures
		if len(results[i]) != plans[i].Attempts && !endedEarly {
			return nil, fmt.Errorf("the probe has printed %d of %d results", len(results[i]), plans[i].Attempts)
		}
	}
	return results, nil
}

// exec runs a command of the probe in a Pod.
func (r *connectivityRun) exec(ctx context.Context, pod string, in io.Reader, out io.Writer, args ...string) error {
	name := types.NamespacedName{Namespace: r.namespace, Name: pod}
	return r.fleet.Exec(ctx, name, probeContainer, in, out, append([]string{"slicecast-agent", "probe"}, args...)...)
}

// maxLine bounds a line of a probe, in bytes.
const maxLine = 64 << 10

// lineWriter calls line for each line.
type lineWriter struct {
	line func([]byte) error
	rest []byte
}

// Write implements io.Writer.
func (w *lineWriter) Write(p []byte) (int, error) {
	w.rest = append(w.rest, p...)
	for {
		end := bytes.IndexByte(w.rest, '\n')
		switch {
		case end < 0 && len(w.rest) > maxLine:
			return 0, errors.New("the probe has printed a line that is too long")
		case end < 0:
			return len(p), nil
		}
		if err := w.line(w.rest[:end]); err != nil {
			return 0, err
		}
		w.rest = w.rest[end+1:]
	}
}

// series is what comes of attempts that last while something changes.
type series struct {
	node   string
	pod    string
	target target
	// results receives the results.
	results chan timedResult
	// lost are the attempts without an answer of which nobody knew when the series was stopped. They
	// are valid after that.
	lost []probe.Result
}

// timedResult is a result with the time at which its attempt began, by this machine's clock.
// Results arrive in bursts, so the time of arrival says little. The probe says when each attempt
// began, by a clock of its own. The result that has arrived fastest says how the clocks differ, up
// to the time that it took to arrive.
type timedResult struct {
	probe.Result
	at time.Time
}

// start lets a client on each node send to the targets until stop is called, which waits for the
// end. It returns the series of each node and target.
func (r *connectivityRun) start(ctx context.Context, targets []target, plan probe.Plan) (all []*series, stop func() error) {
	ctx, cancel := context.WithCancel(ctx)
	var running errgroup.Group
	var inputs []*io.PipeWriter
	for i, n := range r.nodes {
		pod := podName(roleClient, i)
		plans := make([]probe.Plan, len(targets))
		own := make([]*series, len(targets))
		for j, t := range targets {
			plans[j] = plan
			plans[j].Network, plans[j].Address = t.network, t.address
			own[j] = &series{node: n.name, pod: pod, target: t, results: make(chan timedResult, 4096)}
		}
		all = append(all, own...)
		in, input := io.Pipe()
		inputs = append(inputs, input)
		reader := io.MultiReader(encoded(plans), in)
		var base time.Time // when the plans began, by this machine's clock; zero until the first result
		out := &lineWriter{line: func(line []byte) error {
			var one probe.Result
			if err := json.Unmarshal(line, &one); err != nil || one.Plan < 0 || one.Plan >= len(own) {
				return fmt.Errorf("the probe has printed %.100q: use an image of this version", line)
			}
			if began := time.Now().Add(-one.Began); base.IsZero() || began.Before(base) {
				base = began
			}
			select {
			case own[one.Plan].results <- timedResult{one, base.Add(one.Began)}:
				return nil
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}}
		running.Go(func() error {
			defer func() {
				for _, s := range own {
					close(s.results)
				}
			}()
			return r.exec(ctx, pod, reader, out, "dial")
		})
	}
	return all, func() error {
		for _, in := range inputs {
			_ = in.Close()
		}
		defer cancel()
		var late sync.WaitGroup
		for _, s := range all {
			late.Go(func() {
				for one := range s.results {
					if one.Outcome != probe.Answered {
						s.lost = append(s.lost, one.Result)
					}
				}
			})
		}
		err := running.Wait()
		late.Wait()
		return err
	}
}

func encoded(plans []probe.Plan) io.Reader {
	text, err := json.Marshal(plans)
	if err != nil {
		text = []byte(err.Error()) // a Plan can always be encoded
	}
	return bytes.NewReader(text)
}

// await receives results until done says that it has seen enough, for settleTime at most.
func (s *series) await(ctx context.Context, done func(timedResult) bool) error {
	timer := time.NewTimer(settleTime)
	defer timer.Stop()
	for {
		select {
		case one, ok := <-s.results:
			switch {
			case !ok:
				return errors.New("the probe has ended")
			case done(one):
				return nil
			}
		case <-timer.C:
			return errLimit
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
