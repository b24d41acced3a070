// This file is a node: its kernel, its disk, and the agent that runs on it, which has the parts of
// a real one.
package simulate

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"

	"github.com/slicecast/slicecast/agent/client"
	"github.com/slicecast/slicecast/agent/client/checkpoint"
	"github.com/slicecast/slicecast/agent/reconcile"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/wire"
)

// node is a machine of the cluster.
type node struct {
	world  *world
	host   string // its address
	name   string // of its Node
	kernel *kernel
	disk   *disk
	form   form   // of the agent that runs, or ran last
	agent  *agent // nil while none runs
	boot   int
	// noted means that an agent that is killed leaves a mark: the kernel may be ahead of the
	// checkpoint.
	noted bool
}

// agent is one life of the agent on a node.
type agent struct {
	node     *node
	name     string
	process  *process
	cache    *client.Cache
	client   *client.Client
	programs *kernelProgrammer
	cancel   context.CancelFunc
	running  sync.WaitGroup
	begin    time.Time
	restored bool  // the cache began with a checkpoint
	cluster  int64 // of the checkpoint; 0 means unknown

	mu sync.Mutex // guards the fields below
	// confirmed means that a server has sent an InSync. It is set before the cache knows.
	confirmed bool
	// foreign means that a server of another cluster than the checkpoint's has answered before the
	// checkpoint counted.
	foreign bool
	// had has the states of each Service that the cache held while its content counted, oldest first.
	had map[model.ServiceKey][]telling
	// told has what each shard's updates said of their Services, oldest first, for positions that
	// are not acknowledged yet. The first one is the last that was acknowledged.
	told  map[model.ServiceKey][]telling
	epoch uint64
	// received has the positions that servers have named to this agent. Of a checkpoint, there are
	// none.
	received map[position]bool
	// synced means that a server has brought the cache in sync.
	synced bool
	// doubted has acknowledged positions that were not received when they were acknowledged. The
	// client reports a response after the cache has it, so the test may learn of it after its
	// acknowledgement.
	doubted []position
	// nacked has the Services of which something is not programmed, as reported.
	nacked map[model.ServiceKey]bool
}

// position is a sequence of a shard in an epoch.
type position struct {
	epoch    uint64
	shard    uint32
	sequence uint64
}

// telling is the state of a Service at a sequence of its shard.
type telling struct {
	sequence uint64
	service  int            // the number of its state
	slices   map[string]int // the numbers of the slices' states, by name
}

func (t telling) same(o telling) bool {
	return t.service == o.service && maps.Equal(t.slices, o.slices)
}

// staleGrace is how long an agent waits for a server before it uses its checkpoint; see package
// checkpoint.
const staleGrace = 5 * time.Second

func (n *node) viewOptions() view.Options {
	return view.Options{NodeName: n.name, Schedulers: schedulers[1:]}
}

// start starts an agent.
func (n *node) start() {
	w := n.world
	a := &agent{
		node: n, name: n.name, process: w.network.process(n.host), cache: client.NewCache(),
		told: make(map[model.ServiceKey][]telling), nacked: make(map[model.ServiceKey]bool), received: make(map[position]bool),
		had: make(map[model.ServiceKey][]telling), begin: time.Now(),
	}
	registry, is := prometheus.NewRegistry(), n.form
	logger := w.logger(n.name)
	n.disk.mu.Lock()
	full := n.disk.full
	n.disk.mu.Unlock()
	settled := make(chan struct{})
	kept := checkpoint.Open(checkpoint.Options{
		Path: checkpointPath, NodeName: n.name, Cache: a.cache, Boot: fmt.Sprint(n.host, " ", n.boot), Settled: settled,
		Disk: mounted{n.disk, a.process}, Logger: logger, Registerer: registry,
	})
	if a.restored = !kept.Saved().IsZero(); a.restored {
		a.remember()
		if s, _ := a.cache.Service(model.ClusterService); s != nil {
			a.cluster = s.CreationTimeSeconds
		}
	}
	a.client = client.New(client.Options{
		Servers: client.Static(w.addressesFor(n)...), NodeName: n.name, Version: "simulated", Programmer: "simulated",
		DialOptions: append(w.credentials(n.name), grpc.WithContextDialer(a.process.dialGRPC), w.skewed(n.name, func() form { return is })),
		Decode:      a.decode(is), Cache: a.cache, Observe: a.observe, Logger: logger, Registerer: registry,
	})
	n.kernel.mu.Lock()
	n.kernel.loose, n.kernel.ahead = true, n.noted
	n.kernel.mu.Unlock()
	n.noted = n.noted || !full
	a.programs = &kernelProgrammer{kernel: n.kernel, process: a.process, agent: a}
	r := reconcile.New(reconcile.Options{
		Ahead: kept.Ahead(), Cache: a.cache, View: view.New(n.viewOptions()), Programmer: a.programs, Reporter: reporter{a.client, a},
		FreeMemory: func() {}, Logger: logger, Registerer: registry,
	})
	ctx, cancel := context.WithCancel(context.Background())
	a.cancel = cancel
	var programming sync.WaitGroup
	programming.Go(func() { _ = a.client.Run(ctx) })
	programming.Go(func() { r.Run(ctx) })
	a.running.Go(func() { programming.Wait(); close(settled) })
	a.running.Go(func() { kept.Run(ctx) })
	n.agent = a
}

// kill ends the agent as SIGKILL does.
func (n *node) kill() {
	if a := n.agent; a != nil {
		a.process.kill()
		n.world.bury(a.cancel, &a.running)
		n.agent = nil
	}
}

// stop ends the agent as SIGTERM does.
func (n *node) stop() {
	if a := n.agent; a != nil {
		a.cancel()
		a.running.Wait()
		a.process.kill()
		n.agent = nil
		// An agent that no server has confirmed has saved nothing. With a checkpoint, it leaves an
		// earlier note.
		n.kernel.mu.Lock()
		n.noted = n.kernel.ahead && a.restored && !a.isConfirmed()
		n.kernel.mu.Unlock()
	}
}

// fail turns the node's power off. Its kernel and what is not durable are lost.
func (n *node) fail() {
	n.world.network.power(n.host, false)
	n.kill()
	n.boot, n.noted = n.boot+1, false
	n.kernel.reset()
	n.disk.fail()
}

// state returns what the cache holds of a Service.
func (a *agent) state(key model.ServiceKey, sequence uint64) telling {
	t := telling{sequence: sequence, slices: make(map[string]int)}
	service, list := a.cache.Service(key)
	if service != nil {
		t.service = -1
		for _, ip := range service.ExternalIPs {
			if _, number, ok := unmark(serviceMark, ip); ok {
				t.service = number
			}
		}
	}
	for _, s := range list {
		for _, e := range s.Endpoints {
			if _, number, ok := unmark(sliceMark, e.Address); ok {
				t.slices[s.Name] = number
			}
		}
	}
	return t
}

// serviceKeys returns the keys of all Services that may exist.
func serviceKeys() (keys []model.ServiceKey) {
	for i := range maxServices {
		keys = append(keys, model.ServiceKey{Namespace: namespace, Name: fmt.Sprint("svc-", i)})
	}
	return keys
}

// decode returns how the agent decodes frames. It notes an InSync before the cache has it.
func (a *agent) decode(is form) func(wire.Frame) (*wire.Response, error) {
	known := is.decode()
	return func(frame wire.Frame) (*wire.Response, error) {
		r, err := known(frame)
		if err != nil {
			return r, err
		}
		a.mu.Lock()
		defer a.mu.Unlock()
		a.confirmed = a.confirmed || r.InSync != nil
		if c := r.Welcome.GetCluster(); c != 0 && a.cluster != 0 && c != a.cluster && !a.confirmed && time.Since(a.begin) < staleGrace {
			a.foreign = true
		}
		return r, nil
	}
}

// remember notes what the cache holds.
func (a *agent) remember() {
	for _, key := range serviceKeys() {
		t := a.state(key, 0)
		a.mu.Lock()
		a.rememberLocked(key, t)
		a.mu.Unlock()
	}
}

func (a *agent) rememberLocked(key model.ServiceKey, t telling) {
	if all := a.had[key]; len(all) == 0 || !all[len(all)-1].same(t) {
		a.had[key] = append(all, t)
	}
}

// mayProgram reports whether the content of the cache counts: because a server has confirmed it, or
// because it is that of a checkpoint, and no server has answered in time, nor one of another
// cluster.
func (a *agent) mayProgram() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.confirmed || a.restored && !a.foreign && time.Since(a.begin) >= staleGrace
}

// isConfirmed reports whether a server has sent an InSync.
func (a *agent) isConfirmed() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.confirmed
}

// knew reports whether the cache has held, since the agent started, a state of a Service for which
// is returns true. The newest states come first.
func (a *agent) knew(key model.ServiceKey, is func(telling) bool) bool {
	if is(a.state(key, 0)) {
		return true
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, t := range slices.Backward(a.had[key]) {
		if is(t) {
			return true
		}
	}
	return false
}

// observe notes what a response has made the cache hold. The client calls it after each response.
func (a *agent) observe(r *wire.Response, _ int) {
	switch {
	case r.Welcome != nil:
		a.mu.Lock()
		if epoch := r.Welcome.GetEpoch(); epoch != a.epoch {
			a.epoch = epoch
			clear(a.told)
		}
		a.mu.Unlock()
	case r.Update != nil && !r.More:
		a.receive(r.Update.Shard, r.Update.To)
		for _, key := range serviceKeys() {
			if a.cache.ShardOf(key) == r.Update.Shard {
				a.tell(key, a.state(key, r.Update.To))
			}
		}
	case r.InSync != nil:
		a.mu.Lock()
		a.synced = true
		a.mu.Unlock()
		for shard, sequence := range r.InSync.GetSequences() {
			a.receive(uint32(shard), sequence)
		}
		for _, key := range serviceKeys() {
			a.tell(key, a.state(key, r.InSync.GetSequences()[a.cache.ShardOf(key)]))
		}
	}
}

func (a *agent) receive(shard uint32, sequence uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.received[position{a.epoch, shard, sequence}] = true
}

func (a *agent) tell(key model.ServiceKey, t telling) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if all := a.told[key]; len(all) == 0 || !all[len(all)-1].same(t) {
		a.told[key] = append(all, t)
	}
	if a.confirmed || a.restored {
		a.rememberLocked(key, t)
	}
}

// reporter passes on what the reconciler reports, after checking that it is true.
type reporter struct {
	reconcile.Reporter
	agent *agent
}

// Ack implements reconcile.Reporter.
func (r reporter) Ack(epoch uint64, positions map[uint32]uint64) {
	if !r.agent.process.hasEnded() {
		r.agent.acked(epoch, positions)
	}
	r.Reporter.Ack(epoch, positions)
}

// Nack implements reconcile.Reporter.
func (r reporter) Nack(service model.ServiceKey, reason string) {
	r.agent.mu.Lock()
	r.agent.nacked[service] = true
	r.agent.mu.Unlock()
	r.Reporter.Nack(service, reason)
}

// Resolve implements reconcile.Reporter.
func (r reporter) Resolve(service model.ServiceKey) {
	r.agent.mu.Lock()
	delete(r.agent.nacked, service)
	r.agent.mu.Unlock()
	r.Reporter.Resolve(service)
}

// acked checks that the kernel holds what the positions cover.
func (a *agent) acked(epoch uint64, positions map[uint32]uint64) {
	k := a.node.kernel
	k.mu.Lock()
	defer k.mu.Unlock()
	a.mu.Lock()
	defer a.mu.Unlock()
	if epoch == a.epoch {
		for key, all := range a.told {
			position, ok := positions[a.cache.ShardOf(key)]
			if !ok {
				continue
			}
			last := -1
			for i, t := range all {
				if t.sequence <= position {
					last = i
				}
			}
			if last < 0 {
				continue
			}
			a.told[key] = all[last:]
			if !a.nacked[key] {
				a.holds(key, append(slices.Clone(all[last:]), a.state(key, 0)))
			}
		}
	}
	for shard, sequence := range positions {
		if p := (position{epoch, shard, sequence}); !a.synced || !a.received[p] {
			a.doubted = append(a.doubted, p)
		}
		a.node.world.convergence.programmed(a.name, epoch, shard, sequence, time.Now())
	}
}

// checkAcked checks that a server has confirmed what was acknowledged. All goroutines wait.
func (a *agent) checkAcked() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, p := range a.doubted {
		switch {
		case !a.synced:
			a.node.world.violated("%s: acknowledged %+v before a server has brought the cache in sync", a.name, p)
		case !a.received[p]:
			a.node.world.violated("%s: acknowledged %+v, which no server has named", a.name, p)
		}
	}
	a.doubted = nil
}

// holds checks that the kernel holds one of some states of a Service. The kernel's mutex is held.
func (a *agent) holds(key model.ServiceKey, states []telling) {
	k := a.node.kernel
	if k.flushed {
		return
	}
	for family := range k.staleFamily {
		if !slices.ContainsFunc(states, func(t telling) bool { return !a.node.world.cluster.serves(key, t.service, family) }) {
			a.node.world.violated("%s: acknowledged %v although nothing of %v is programmed", a.name, key, family)
		}
	}
	for id, p := range k.ports {
		if id.Service != key || k.stale[id] || k.staleFamily[id.Family] {
			continue
		}
		now := read(p)
		if !slices.ContainsFunc(states, func(t telling) bool { return t.service == now.service && t.has(id, now) }) {
			a.node.world.violated("%s: acknowledged %v, which shows %+v, and the server's states are %+v", a.name, id, now, states)
		}
	}
	// At least one of the states has to exist if the Service has no port in the kernel.
	if !slices.ContainsFunc(slices.Collect(maps.Keys(k.ports)), func(id view.ServicePortID) bool { return id.Service == key }) &&
		len(k.staleFamily) == 0 && len(k.stale) == 0 && !slices.ContainsFunc(states, func(t telling) bool { return t.service <= 0 }) {
		a.node.world.violated("%s: acknowledged %v, of which nothing is programmed; the server's states are %+v", a.name, key, states)
	}
}

// has reports whether a reading shows exactly the slices of its family that a telling has.
func (t telling) has(id view.ServicePortID, now reading) bool {
	n := 0
	for name, number := range t.slices {
		var service, part int
		var family model.Family
		if _, err := fmt.Sscanf(name, "svc-%d-%d-%d", &service, &family, &part); err != nil {
			panic(err)
		}
		if family != id.Family {
			continue
		}
		n++
		if now.slices[part] != number {
			return false
		}
	}
	return n == len(now.slices)
}

// logger returns a logger whose warnings are in the history.
func (w *world) logger(name string) *slog.Logger {
	return slog.New(&historian{world: w, name: name})
}

// historian implements slog.Handler.
type historian struct {
	world *world
	name  string
}

func (h *historian) Enabled(_ context.Context, level slog.Level) bool { return level >= slog.LevelWarn }

// Handle implements slog.Handler.
func (h *historian) Handle(_ context.Context, r slog.Record) error {
	text := r.Message
	r.Attrs(func(a slog.Attr) bool { text += fmt.Sprint(" ", a); return true })
	h.world.observed("%s: log: %s", h.name, text)
	return nil
}

func (h *historian) WithAttrs([]slog.Attr) slog.Handler { return h }
func (h *historian) WithGroup(string) slog.Handler      { return h }
