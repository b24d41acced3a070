package engine

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/slicecast/slicecast/loadtest/apiserver"
	"github.com/slicecast/slicecast/loadtest/child"
	"github.com/slicecast/slicecast/loadtest/generate"
	"github.com/slicecast/slicecast/loadtest/progress"
	"github.com/slicecast/slicecast/loadtest/report"
	"github.com/slicecast/slicecast/loadtest/usage"
	"github.com/slicecast/slicecast/loadtest/worker"
)

// meter reads resource usage and progress, and keeps the latest readings.
type meter struct {
	stack *stack
	start time.Time

	// mu guards the fields below up to phase and, once the servers run, stack.servers and
	// stack.relays. It is held during a whole reading.
	mu sync.Mutex
	// gone is the CPU time of servers that were killed.
	gone    usage.CPU
	latest  reading                 // most recent reading
	recent  *hdrhistogram.Histogram // latencies since last
	last    reading                 // reading at the end of the last second
	seconds []report.Second
	peak    struct{ server, client int64 }
	phase   string

	shown atomic.Pointer[progress.Status]
}

func newMeter(s *stack, start time.Time) *meter {
	m := &meter{stack: s, start: start, recent: report.NewHistogram()}
	m.shown.Store(&progress.Status{})
	return m
}

// reading is a snapshot of usage and progress. Sums are over processes.
type reading struct {
	at                         time.Time
	server, client             usage.CPU
	machine                    time.Duration
	serverMemory, clientMemory int64
	nodes                      worker.Sample
	// apiServer is the CPU time of the API server that the run started and its servers watch.
	apiServer usage.CPU
	// account is what the API server of an existing cluster reports. It is nil if there is no
	// report.
	account *apiserver.Account
}

// pids returns the processes that distribute, or none if they are unknown.
func (m *meter) pids() (out []int) {
	s := m.stack
	switch {
	case s.options.Peer == report.KubeAPIServer && s.own != nil:
		return []int{s.own.pid()}
	case s.options.ServerPID != 0:
		return []int{s.options.ServerPID}
	}
	for _, one := range s.all() {
		out = append(out, one.PID())
	}
	return out
}

func (m *meter) read(ctx context.Context) (reading, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	r, err := m.readLocked(ctx)
	if err == nil {
		r.account = m.stack.account(ctx)
	}
	return r, err
}

// readAhead is how long before the first change of a plan the reading for it starts. The reading
// must be early enough to include all costs of the changes, and late enough to include almost
// nothing from before.
const readAhead = 50 * time.Millisecond

// readFor waits until shortly before the start of a plan, and returns the reading from which the
// plan is measured.
func (m *meter) readFor(ctx context.Context, start time.Time) (reading, error) {
	if err := generate.Await(ctx, start.Add(-readAhead)); err != nil {
		return reading{}, err
	}
	r, err := m.read(ctx)
	r.at = start
	return r, err
}

// sampleLocked returns the sum of the samples of all processes with nodes.
func (m *meter) sampleLocked(ctx context.Context) (sum worker.Sample, err error) {
	samples, err := all(ctx, m.stack.workers, (*worker.Worker).Sample, child.None{})
	if err != nil {
		return sum, err
	}
	for _, s := range samples {
		sum.Up += s.Up
		sum.Applied += s.Applied
		sum.Owed += s.Owed
		sum.Planned += s.Planned
		sum.ReceivedBytes += s.ReceivedBytes
		sum.SentBytes += s.SentBytes
		sum.Reconnects += s.Reconnects
		sum.FetchedLists += s.FetchedLists
		sum.CompressedLists += s.CompressedLists
		m.recent.Merge(hdrhistogram.Import(s.Recent))
	}
	return sum, nil
}

func (m *meter) readLocked(ctx context.Context) (r reading, err error) {
	if r.nodes, err = m.sampleLocked(ctx); err != nil {
		return r, err
	}
	r.at = time.Now()
	r.server = m.gone
	if err := addUse(m.pids(), &r.server, &r.serverMemory, &m.peak.server); err != nil {
		return r, err
	}
	if m.stack.besideOwn() {
		if r.apiServer, err = usage.CPUOf(m.stack.own.pid()); err != nil {
			return r, err
		}
	}
	var workers []int
	for _, w := range m.stack.workers {
		workers = append(workers, w.PID())
	}
	if err := addUse(workers, &r.client, &r.clientMemory, &m.peak.client); err != nil {
		return r, err
	}
	if r.machine, err = usage.MachineCPU(); err != nil {
		return r, err
	}
	m.latest = r
	m.showLocked(r)
	return r, nil
}

// peaks returns the most RAM that all servers together and all processes with nodes together had in
// any reading.
func (m *meter) peaks() (server, client int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.peak.server, m.peak.client
}

// addUse adds what processes use, and raises peak to the sum of their peaks.
func addUse(pids []int, cpu *usage.CPU, resident, peak *int64) error {
	peaks := int64(0)
	for _, pid := range pids {
		c, err := usage.CPUOf(pid)
		if err != nil {
			return err
		}
		m, err := usage.MemoryOf(pid)
		if err != nil {
			return err
		}
		*cpu = cpu.Add(c)
		*resident += m.Resident
		peaks += m.Peak
	}
	*peak = max(*peak, peaks)
	return nil
}

// kill kills a server, and keeps its CPU time in gone.
func (m *meter) kill(one *server) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	c, err := usage.CPUOf(one.PID())
	if err != nil {
		return err
	}
	one.leaving.Store(true)
	if err := one.Kill(); err != nil {
		return err
	}
	m.gone = m.gone.Add(c)
	m.stack.remove(one)
	return nil
}

func (m *meter) join(one *server) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(one.setup.Upstream) == 0 {
		m.stack.servers = append(m.stack.servers, one)
	} else {
		m.stack.relays = append(m.stack.relays, one)
	}
}

// servers returns the servers that hold the state themselves, without relays.
func (m *meter) servers() []*server {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.stack.servers)
}

// run reads everything every second until the context ends.
func (m *meter) run(ctx context.Context) {
	seconds := time.NewTicker(time.Second)
	defer seconds.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-seconds.C:
			m.mu.Lock()
			// An error means that a process has ended, which its waiter reports.
			if r, err := m.readLocked(ctx); err == nil {
				m.secondLocked(r)
			}
			m.mu.Unlock()
		}
	}
}

func (m *meter) secondLocked(r reading) {
	before := m.last
	m.last = r
	if before.at.IsZero() {
		return
	}
	s := report.Second{
		At: r.at.Sub(m.start).Seconds(), NodesUp: r.nodes.Up,
		Sent: since(before.nodes.Owed, r.nodes.Owed), Applied: since(before.nodes.Applied, r.nodes.Applied),
		ServerCPU:     report.CPUOf(r.server.Sub(before.server)),
		ReceivedBytes: r.nodes.ReceivedBytes - before.nodes.ReceivedBytes, SentBytes: r.nodes.SentBytes - before.nodes.SentBytes,
		ServerMemory: r.serverMemory, ClientMemory: r.clientMemory,
	}
	if m.recent.TotalCount() > 0 {
		millis := func(us int64) float64 { return float64(us) / 1000 }
		s.P50, s.P99, s.Max = millis(m.recent.ValueAtQuantile(50)), millis(m.recent.ValueAtQuantile(99)), millis(m.recent.Max())
		m.recent.Reset()
	}
	m.seconds = append(m.seconds, s)
}

// since returns the increase of a counter that restarts at 0 with each window.
func since(before, now int64) int64 {
	if now < before {
		return now
	}
	return now - before
}

func (m *meter) enter(phase string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.phase = phase
	m.showLocked(m.latest)
}

func (m *meter) showLocked(r reading) {
	s := progress.Status{
		Phase: m.phase, NodesUp: r.nodes.Up, Nodes: m.stack.scenario.Nodes, Sent: r.nodes.Owed, Received: r.nodes.Applied,
		Planned: r.nodes.Planned, Bytes: r.nodes.ReceivedBytes,
	}
	if n := len(m.seconds); n > 0 {
		millis := func(v float64) time.Duration { return time.Duration(v * float64(time.Millisecond)) }
		s.P50, s.P99 = millis(m.seconds[n-1].P50), millis(m.seconds[n-1].P99)
	}
	m.shown.Store(&s)
}
