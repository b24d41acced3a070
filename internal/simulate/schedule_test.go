// This file is the schedule: steps that a seed draws without looking at the cluster, so that a seed
// has one schedule, and what each kind of step does.
package simulate

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/slicecast/slicecast/agent/client/discovery"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/server/fanout"
)

// step is one step of a schedule.
type step struct {
	kind    int // index of actions
	a, b, c uint32
	// wait is the time before the step. If it is 0, the step happens while others run, after they had
	// this many turns.
	wait  time.Duration
	turns int
}

// action is a kind of step.
type action struct {
	name   string
	weight int
	fault  bool // rather than a change of objects, or the end of a fault
	// do carries out the step and returns what it did, or nothing if it had no effect. The text
	// depends on nothing but the steps so far.
	do func(w *world, s step) string
}

// These actions have names because a test looks for them.
const backUpEtcd, restoreEtcd = "back up etcd", "restore etcd"

var actions []action

func init() {
	actions = []action{
		{"write a slice", 40, false, (*world).writeSlice},
		{"move an endpoint", 8, false, (*world).moveEndpoint},
		{"remove a slice", 5, false, (*world).removeSlice},
		{"write a Service", 6, false, (*world).writeService},
		{"remove a Service", 3, false, (*world).removeService},
		{"undo changes", 3, false, (*world).undo},
		{"write a Node", 2, false, (*world).writeNode},
		{"nothing", 7, false, func(*world, step) string { return "" }},
		{"limit memory", 3, true, (*world).limitMemory},
		{"kill an agent", 6, true, (*world).killAgent},
		{"stop an agent", 2, true, (*world).stopAgent},
		{"start an agent", 10, false, (*world).startAgent},
		{"power off a node", 1, true, (*world).failNode},
		{"rename a node", 1, true, (*world).renameNode},
		{"refuse in the kernel", 8, true, (*world).refuseInKernel},
		{"slow a kernel down", 3, true, (*world).slowKernel},
		{"flush a kernel", 3, true, (*world).flushKernel},
		{"fill a disk", 1, true, (*world).fillDisk},
		{"mend a node", 2, false, (*world).mendNode},
		{"kill a server", 4, true, (*world).killServer},
		{"drain a server", 2, true, (*world).drainServer},
		{"let a server lie", 1, true, (*world).letLie},
		{"power off a server", 1, true, (*world).failServer},
		{"start a server", 8, false, (*world).startServer},
		{"cut a way", 8, true, (*world).cutWay},
		{"change a version", 2, true, (*world).changeForm},
		{"slow a way", 4, true, (*world).slowWay},
		{"heal a way", 8, false, (*world).healWay},
		{"reset connections", 6, true, (*world).resetConnections},
		{"hold an API server back", 3, true, (*world).holdAPI},
		{"let an API server go on", 6, false, (*world).releaseAPI},
		{"break watches", 3, true, (*world).breakWatches},
		{"compact etcd", 2, true, (*world).compact},
		{"a stale list", 1, true, (*world).staleList},
		{"streams without an end", 1, true, (*world).endlessStreams},
		{"kill an API server", 1, true, (*world).killAPI},
		{"start an API server", 4, false, (*world).startAPI},
		{backUpEtcd, 2, false, (*world).backUp},
		{restoreEtcd, 1, true, (*world).restore},
		{"let a certificate end", 2, true, (*world).endCertificate},
		{"renew certificates", 2, false, (*world).renewSome},
		{"set a clock", 2, true, (*world).setClock},
		{"set all clocks right", 1, false, func(w *world, _ step) string { w.setClocks(); return "" }},
		{"ask for the convergence", 3, false, (*world).askConvergence},
		{"undo what a server has not heard", 2, true, (*world).trail},
		{"cut a server off", 1, true, (*world).cutOff},
		{"quiet", 1, false, func(w *world, _ step) string { w.quiet(); return "everything is well and equal" }},
	}
}

// draw draws a schedule.
func draw(r *rand.Rand, n int) []step {
	sum := 0
	for _, a := range actions {
		sum += a.weight
	}
	out := make([]step, n)
	for i := range out {
		s := step{a: r.Uint32(), b: r.Uint32(), c: r.Uint32()}
		for x := r.IntN(sum); x >= actions[s.kind].weight; s.kind++ {
			x -= actions[s.kind].weight
		}
		switch r.IntN(10) {
		case 0, 1:
			s.turns = r.IntN(60)
		case 2, 3, 4, 5:
			s.wait = time.Duration(r.IntN(20)) * time.Millisecond
		case 6, 7:
			s.wait = time.Duration(r.IntN(1000)) * time.Millisecond
		case 8:
			s.wait = time.Duration(r.IntN(6)) * time.Second
		case 9:
			if r.IntN(10) == 0 {
				s.wait = time.Duration(r.IntN(180)) * time.Second
			}
		}
		out[i] = s
	}
	return out
}

// take carries out a step and returns what it did.
func (w *world) take(s step) string {
	if s.wait > 0 {
		w.pass(s.wait)
		w.checkAcked()
	}
	for range s.turns {
		runtime.Gosched()
	}
	w.checkMemory()
	w.replaceStarved()
	w.missed = false
	did := actions[s.kind].do(w, s)
	if did != "" {
		if actions[s.kind].fault && !w.missed {
			w.faults++
		}
		w.observed("* %s", did)
	}
	return did
}

// pass lets time pass until all goroutines wait.
func (w *world) pass(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

func pick[T any](all []T, n uint32) T { return all[int(n)%len(all)] }

func (w *world) drawService(n uint32) *serviceState {
	s := &serviceState{local: n&1 != 0 && n&2 != 0, nodePort: n&2 != 0, affinity: n&4 != 0, scheduler: pick(schedulers, n>>8)}
	s.families = [][]model.Family{{model.IPv4}, {model.IPv4, model.IPv6}, {model.IPv6}, {model.IPv4}}[n>>3&3]
	for i, name := range portNames {
		if n>>(5+i)&1 != 0 || i == 0 && n>>5&7 == 0 {
			s.ports = append(s.ports, name)
		}
	}
	return s
}

func (w *world) slice(n uint32) *object { return pick(pick(w.cluster.slices, n), n>>8) }

func (w *world) writeSlice(s step) string {
	o := w.slice(s.a)
	state := &sliceState{endpoints: make(map[int]bool)}
	if now := o.now(); now.number > 0 {
		maps.Copy(state.endpoints, now.slice.endpoints)
	}
	n := int(s.b) % maxEndpoints
	var what string
	switch ready, has := state.endpoints[n]; {
	case !has:
		state.endpoints[n] = s.c&3 != 0
		what = fmt.Sprintf("gets endpoint %d, ready: %v", n, state.endpoints[n])
	case s.c&3 == 0:
		delete(state.endpoints, n)
		what = fmt.Sprintf("loses endpoint %d", n)
	default:
		state.endpoints[n] = !ready
		what = fmt.Sprintf("has endpoint %d ready: %v", n, !ready)
	}
	w.cluster.set(o, nil, state)
	return fmt.Sprintf("%s %s, state %d", o.key.Name, what, o.now().number)
}

// moveEndpoint moves an endpoint to another slice of its Service and family, as the controller of
// EndpointSlices does: it is in the new one before it leaves the old one.
func (w *world) moveEndpoint(s step) string {
	from := w.slice(s.a)
	if from.now().number == 0 || len(from.now().slice.endpoints) == 0 {
		return ""
	}
	n := pick(sortedKeys(from.now().slice.endpoints), s.b)
	var to *object
	for _, o := range w.cluster.slices[from.index] {
		if o.family == from.family && o.part == (from.part+1+int(s.c)%(maxSlices-1))%maxSlices {
			to = o
		}
	}
	more, less := &sliceState{endpoints: make(map[int]bool)}, &sliceState{endpoints: make(map[int]bool)}
	if to.now().number > 0 {
		maps.Copy(more.endpoints, to.now().slice.endpoints)
	}
	more.endpoints[n] = from.now().slice.endpoints[n]
	maps.Copy(less.endpoints, from.now().slice.endpoints)
	delete(less.endpoints, n)
	w.cluster.set(to, nil, more)
	w.cluster.set(from, nil, less)
	return fmt.Sprintf("endpoint %d moves from %s to %s", n, from.key.Name, to.key.Name)
}

func (w *world) removeSlice(s step) string {
	o := w.slice(s.a)
	if o.now().number == 0 {
		return ""
	}
	w.cluster.set(o, nil, nil)
	return o.key.Name + " is removed"
}

func (w *world) writeService(s step) string {
	o := pick(w.cluster.services, s.a)
	w.cluster.set(o, w.drawService(s.b), nil)
	return fmt.Sprintf("%s is written, state %d", o.key.Name, o.now().number)
}

func (w *world) removeService(s step) string {
	o := pick(w.cluster.services, s.a)
	if o.now().number == 0 {
		return ""
	}
	w.cluster.set(o, nil, nil)
	for _, slice := range w.cluster.slices[o.index] {
		if s.b&1 == 0 {
			w.cluster.set(slice, nil, nil)
		}
	}
	return fmt.Sprintf("%s is removed, with its slices: %v", o.key.Name, s.b&1 == 0)
}

func (w *world) writeNode(s step) string {
	n := pick(w.nodes, s.a)
	if w.cluster.nodes[n.name] == nil {
		return ""
	}
	w.cluster.setNode(n.name, func(n *corev1.Node) { n.Labels[corev1.LabelTopologyZone] = fmt.Sprint("zone-", s.b%3) })
	return n.name + " gets another zone"
}

// undo undoes the last changes. The content of before comes back under new resource versions.
func (w *world) undo(s step) string {
	if !w.cluster.undo(w.cluster.tick - 1 - int(s.a%3)) {
		return ""
	}
	return "the last changes are undone"
}

// trail makes and undoes a change that one API server does not hear of. The clients of other
// servers have seen both when they come to a server of that API server, which has the same content.
// They are cut off, and the API server hears of the change alone.
func (w *world) trail(s step) string {
	a := pick(w.apis, s.a)
	is := func(own bool) func(*server) bool {
		return func(o *server) bool { return !o.relayed && o.life != nil && (o.api == a) == own }
	}
	if a.process.hasEnded() || !slices.ContainsFunc(w.servers, is(true)) || !slices.ContainsFunc(w.servers, is(false)) {
		return ""
	}
	a.hold(true)
	w.pass(time.Duration(s.b%1000) * time.Millisecond)
	tick := w.cluster.tick
	what := pick([]func(step) string{w.moveEndpoint, w.writeSlice, w.writeService, w.removeSlice}, s.b)(s)
	w.pass(time.Second)
	changed := w.cluster.etcd.backup()
	if !w.cluster.undo(tick) {
		return ""
	}
	w.pass(time.Second)
	for _, o := range w.servers {
		if is(false)(o) {
			o.kill()
		}
	}
	w.pass(2 * time.Second)
	for _, o := range w.servers {
		if !is(true)(o) {
			continue
		}
		for _, other := range w.servers {
			w.network.reset(o.host(), other.host())
		}
		for _, n := range w.nodes {
			w.network.reset(o.host(), n.host)
		}
	}
	w.pass(time.Second)
	a.change(func() { a.held = changed })
	w.pass(time.Second)
	return fmt.Sprintf("%s hears nothing, then %s, but not that this is undone", a.address, what)
}

func (w *world) killAgent(s step) string {
	n := pick(w.nodes, s.a)
	if n.agent == nil {
		return ""
	}
	n.kill()
	if s.b&3 == 0 {
		return n.name + ": the agent is killed"
	}
	return n.name + ": the agent is killed, " + n.restart(s)
}

func (w *world) stopAgent(s step) string {
	n := pick(w.nodes, s.a)
	if n.agent == nil {
		return ""
	}
	n.stop()
	return n.name + ": the agent is stopped"
}

func (w *world) startAgent(s step) string {
	n := pick(w.nodes, s.a)
	if n.agent != nil {
		return ""
	}
	w.network.power(n.host, true)
	return n.name + ": " + n.restart(s)
}

// restart starts the agent with its checkpoint, or with an older one, a torn one, or none.
func (n *node) restart(s step) string {
	d := n.disk
	d.mu.Lock()
	kept := append([][]byte(nil), d.kept...)
	d.mu.Unlock()
	how := "and starts with its checkpoint"
	switch s.b >> 2 & 7 {
	case 0:
		d.put(nil)
		how = "and starts without a checkpoint"
	case 1, 2:
		how = "and starts with an old checkpoint, if there is one"
		if len(kept) > 0 {
			d.put(pick(kept, s.c))
		}
	case 3:
		how = "and starts with a torn checkpoint, if there is one"
		if len(kept) > 0 {
			b := pick(kept, s.c)
			d.put(b[:int(s.c>>4)%(len(b)+1)])
		}
	}
	n.start()
	return how
}

func (w *world) failNode(s step) string {
	n := pick(w.nodes, s.a)
	n.fail()
	return n.name + " loses its power"
}

// renameNode registers the machine under another name. Its checkpoint is for the old one.
func (w *world) renameNode(s step) string {
	n := pick(w.nodes, s.a)
	old := n.name
	n.stop()
	n.name = fmt.Sprintf("%s-%d", old[:len("node-0")], s.b%5)
	if n.name == old {
		n.name = old[:len("node-0")]
	}
	n.kernel.name = n.name
	w.cluster.setNode(old, nil)
	w.addNode(n.name, int(old[len("node-")]-'0'))
	n.start()
	return old + " is renamed to " + n.name
}

func (w *world) refuseInKernel(s step) string {
	k := pick(w.nodes, s.a).kernel
	k.mu.Lock()
	defer k.mu.Unlock()
	r := refusal(1 + s.b%uint32(refusals-1))
	k.next = append(k.next, r)
	return fmt.Sprintf("%s: the kernel will fail, %d", k.name, r)
}

func (w *world) slowKernel(s step) string {
	k := pick(w.nodes, s.a).kernel
	k.mu.Lock()
	defer k.mu.Unlock()
	k.slow = []time.Duration{time.Millisecond, 100 * time.Millisecond, 3 * time.Second}[s.b%3]
	return fmt.Sprintf("%s: the kernel takes %v", k.name, k.slow)
}

func (w *world) flushKernel(s step) string {
	k := pick(w.nodes, s.a).kernel
	k.flush(int(s.b & 7))
	return k.name + ": others remove rules"
}

func (w *world) fillDisk(s step) string {
	n := pick(w.nodes, s.a)
	n.disk.mu.Lock()
	defer n.disk.mu.Unlock()
	if n.disk.full {
		return ""
	}
	n.disk.full = true
	return n.name + ": the disk is full"
}

func (w *world) mendNode(s step) string {
	n := pick(w.nodes, s.a)
	n.kernel.mu.Lock()
	n.kernel.slow = 0
	n.kernel.mu.Unlock()
	n.disk.mu.Lock()
	n.disk.full = false
	n.disk.mu.Unlock()
	return n.name + ": disk and kernel are well"
}

func (w *world) killServer(s step) string {
	o := pick(w.servers, s.a)
	if o.life == nil {
		return ""
	}
	o.kill()
	if s.b&1 == 0 {
		return o.name + " is killed"
	}
	o.start()
	return o.name + " is killed and starts"
}

func (w *world) drainServer(s step) string {
	o := pick(w.servers, s.a)
	if o.life == nil {
		return ""
	}
	o.stop()
	if s.b&1 == 0 {
		return o.name + " drains"
	}
	o.start()
	return o.name + " drains and another one starts"
}

func (w *world) failServer(s step) string {
	o := pick(w.servers, s.a)
	w.network.power(o.host(), false)
	o.kill()
	return o.name + " loses its power"
}

func (w *world) startServer(s step) string {
	o := pick(w.servers, s.a)
	if o.life != nil {
		return ""
	}
	w.network.power(o.host(), true)
	o.start()
	return o.name + " starts"
}

// way draws a way between hosts that speak with each other.
func (w *world) way(s step) way {
	server := pick(w.servers, s.a)
	var other string
	switch s.b % 3 {
	case 0:
		if server.api != nil {
			other = server.api.address.Addr().String()
			break
		}
		fallthrough
	case 1:
		if server.relayed {
			other = w.servers[0].host()
			break
		}
		fallthrough
	default:
		other = pick(w.nodes, s.b>>2).host
	}
	if s.b>>8&1 == 0 {
		return way{server.host(), other}
	}
	return way{other, server.host()}
}

func (w way) both() []way { return []way{w, {w.to, w.from}} }

func (w *world) cutWay(s step) string {
	ways := w.way(s).both()
	if s.c&1 == 0 {
		ways = ways[:1]
	}
	changed := false
	for _, way := range ways {
		changed = w.network.set(way, func(x *weather) { x.cut = true }) || changed
	}
	if !changed {
		return ""
	}
	return fmt.Sprintf("%v are cut", ways)
}

func (w *world) slowWay(s step) string {
	way := w.way(s)
	w.network.set(way, func(x *weather) {
		x.delay = time.Duration(s.c&0x3ff) * time.Millisecond
		if s.c>>10&1 == 0 {
			x.rate = 20_000 + int(s.c>>11&0xffff)
		}
	})
	return fmt.Sprintf("%v is slow", way)
}

func (w *world) healWay(s step) string {
	if s.c&3 == 0 {
		w.network.heal()
		return "all ways are well"
	}
	for _, way := range w.way(s).both() {
		w.network.set(way, func(x *weather) { *x = weather{} })
	}
	return fmt.Sprintf("%v are well", w.way(s).both())
}

func (w *world) resetConnections(s step) string {
	way := w.way(s)
	w.missed = !w.network.reset(way.from, way.to)
	return fmt.Sprintf("%v loses its connections", way)
}

func (w *world) holdAPI(s step) string {
	a := pick(w.apis, s.a)
	if a.process.hasEnded() || !a.hold(true) {
		return ""
	}
	return a.address.String() + " is held back"
}

func (w *world) releaseAPI(s step) string {
	a := pick(w.apis, s.a)
	if !a.process.hasEnded() {
		a.hold(false)
		a.beStale(nil)
		a.beEndless(false)
	}
	return a.address.String() + " goes on"
}

func (w *world) breakWatches(s step) string {
	a := pick(w.apis, s.a)
	if a.process.hasEnded() {
		return ""
	}
	a.breakWatches()
	return a.address.String() + " ends its watches"
}

func (w *world) compact(s step) string {
	w.cluster.etcd.compact()
	if s.b&1 == 0 {
		for _, a := range w.apis {
			if !a.process.hasEnded() {
				a.breakWatches()
			}
		}
	}
	return "etcd is compacted"
}

// staleList makes the lists of an API server answer an earlier state over the connections that are
// open, as if a load balancer led these to a replica that is behind.
func (w *world) staleList(s step) string {
	if len(w.backups) == 0 {
		return ""
	}
	a, b := pick(w.apis, s.a), w.backups[len(w.backups)-1]
	if a.process.hasEnded() {
		return ""
	}
	a.beStale(b.etcd)
	w.cluster.etcd.compact()
	a.breakWatches()
	return a.address.String() + " answers an old list"
}

// endlessStreams makes an API server stream lists without the bookmark at their end.
func (w *world) endlessStreams(s step) string {
	a := pick(w.apis, s.a)
	if a.process.hasEnded() || a.plain || !a.beEndless(true) {
		return ""
	}
	w.cluster.etcd.compact()
	a.breakWatches()
	return a.address.String() + " streams lists without an end"
}

func (w *world) killAPI(s step) string {
	a := pick(w.apis, s.a)
	if a.process.hasEnded() {
		return ""
	}
	a.kill()
	return a.address.String() + " is killed"
}

func (w *world) startAPI(s step) string {
	a := pick(w.apis, s.a)
	if !a.process.hasEnded() {
		return ""
	}
	a.start()
	return a.address.String() + " starts"
}

func (w *world) backUp(step) string {
	if w.backups = append(w.backups, w.cluster.save()); len(w.backups) > 4 {
		w.backups = w.backups[1:]
	}
	return "etcd is backed up"
}

// restoreTime is how long no API server runs while etcd is restored. A source counts on 5 s.
const restoreTime = 6 * time.Second

// restore restores a backup of etcd, also as another cluster, while a node is off. All API servers
// are stopped meanwhile, as Kubernetes demands.
func (w *world) restore(s step) string {
	if len(w.backups) == 0 {
		return ""
	}
	b := pick(w.backups, s.a)
	bump, anew := s.b&1 == 0, s.b&3 == 3
	if off := pick(w.nodes, s.c); anew && off.agent != nil {
		off.stop()
		defer off.start()
	}
	for _, a := range w.apis {
		a.kill()
	}
	w.pass(restoreTime)
	w.cluster.restore(b, bump)
	if anew {
		w.cluster.bear()
	}
	w.cluster.mu.Lock()
	w.excused = true
	w.cluster.mu.Unlock()
	for _, a := range w.apis {
		a.start()
	}
	if !bump {
		w.lowered = true
		// A backup that is newer than what etcd holds now would be no backup any more.
		w.backups = nil
	}
	return fmt.Sprintf("etcd is restored, its version goes on: %v, in another cluster: %v", bump, anew)
}

// cutOffTime is the stated time within which all nodes follow another server if one is cut off from
// its API server. A client that has seen resource versions from before a restore that lowered them
// may wait for them once, for fanout.DefaultMaxBehindWait: a relay, and then its nodes.
const cutOffTime = 2 * time.Minute

// stillTime is the time within which a server notices that its API server's watches stand still,
// while it is not cut off: the times stillTime and openTime of the source.
const stillTime = 6 * time.Minute

// cutOff cuts a server off from its API server while everything else is well, and checks that every
// node has what is written then in time.
func (w *world) cutOff(s step) string {
	var roots []*server
	for _, o := range w.servers {
		if !o.relayed {
			roots = append(roots, o)
		}
	}
	if len(roots) < 2 || w.hasOlder() {
		return ""
	}
	w.quiet()
	// Until everybody has forgotten the faults before: servers rest for 5 minutes at most.
	w.pass(discovery.MaxRetryDelay)
	o := pick(roots, s.a)
	how := o.name + " is cut off from its API server"
	there := way{o.host(), o.api.address.Addr().String()}
	limit := cutOffTime
	switch ways := there.both(); {
	case s.b%5 == 0 && len(w.apis) > 1:
		o.api.kill()
		how = o.api.address.String() + " is killed while everything else is well"
	case s.b%5 == 1:
		o.api.hold(true)
		limit += stillTime
		how = o.api.address.String() + " stands still while everything else is well"
	case s.b%5 == 2 && !o.api.plain:
		how = w.endlessStreams(step{a: uint32(slices.Index(w.apis, o.api))}) + " while everything else is well"
	case s.b%5 == 3:
		how += ", in one direction"
		ways = ways[s.b>>3&1:][:1]
		fallthrough
	default:
		for _, way := range ways {
			w.network.set(way, func(x *weather) { x.cut = true })
		}
	}
	w.observed("%s", how)
	if w.lowered {
		limit += 2 * fanout.DefaultMaxBehindWait
	}
	begin := time.Now()
	w.observed("%s", w.moveEndpoint(step{a: s.b, b: s.c}))
	for i := range uint32(20) { // until a node has to change
		w.observed("%s", w.writeSlice(step{a: s.c + i, b: s.c>>16 + i, c: 1}))
		if w.differs() != nil {
			break
		}
	}
	for w.failed() == "" {
		err, took := w.differs(), time.Since(begin)
		if err == nil {
			w.observed("all nodes have the next change after %v", took)
			return how
		}
		if took > limit {
			w.violated("%v after a server was cut off, %v", took, err)
		}
		w.pass(time.Second)
	}
	return how
}

func (w *world) askConvergence(s step) string {
	w.compareConvergence(pick(w.servers, s.a))
	return ""
}

// history returns a schedule for humans. Steps without an effect are left out.
func history(did []string) string {
	var b strings.Builder
	for i, d := range did {
		if d != "" {
			fmt.Fprintf(&b, "%5d %s\n", i, d)
		}
	}
	return b.String()
}
