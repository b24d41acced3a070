// This file is a node's kernel: rules that outlive the agent, take time to change, refuse changes,
// and are removed by others. Each change is compared with the truth.
package simulate

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// refusal is how the kernel treats the next operation.
type refusal uint8

const (
	accepts      refusal = iota
	failsBefore          // nothing changes
	failsHalfway         // a part changes
	failsAfter           // everything changes, and the answer is lost
	failsPort            // one Service port does not change
	failsFamily          // one IP family does not change
	refusals
)

// portObject is an object as a Service port shows it.
type portObject struct {
	port view.ServicePortID
	key  model.Key
}

// kernel is the state of a node's kernel.
type kernel struct {
	world *world
	name  string

	mu    sync.Mutex // guards the fields below
	ports map[view.ServicePortID]*view.ServicePort
	node  view.Node
	// at has the state of each object that is programmed, as an index of its entries.
	at map[portObject]int
	// loose means that the kernel may go back in time until a Replace has succeeded, because the agent
	// has restarted.
	loose bool
	// based means that what does not depend on Services was programmed since the kernel started.
	based bool
	// ahead means that an agent was killed since the kernel started, and that it has noted that. So
	// what it has programmed may be later than its checkpoint. Until a server has confirmed the next
	// agent's cache, the kernel must not go back, unless it has said that it is not intact.
	ahead bool
	// stale has the Service ports, and staleFamily the IP families, that could not be programmed.
	stale       map[view.ServicePortID]bool
	staleFamily map[model.Family]bool
	// next are the refusals of the next operations, and slow is how long each operation takes.
	next []refusal
	slow time.Duration
	// flushed means that others have removed rules since the last Replace.
	flushed bool
	lost    chan string
}

func newKernel(w *world, name string) *kernel {
	k := &kernel{world: w, name: name, lost: make(chan string, 1)}
	k.reset()
	return k
}

// reset empties the kernel, as a reboot does.
func (k *kernel) reset() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.ports, k.at = make(map[view.ServicePortID]*view.ServicePort), make(map[portObject]int)
	k.stale, k.staleFamily = make(map[view.ServicePortID]bool), make(map[model.Family]bool)
	k.node, k.loose, k.based, k.ahead = view.Node{}, true, false, false
}

// kernelProgrammer is one agent's access to the kernel.
//
// Invariants:
//
//  1. Apply only follows a Replace or Apply that succeeded, apart from single Service ports.
//  2. Once the process has ended, nothing changes any more.
//  3. Nothing changes before the content of the agent's cache counts, and what changes comes from a
//     state that the cache has held since.
type kernelProgrammer struct {
	*kernel
	process *process
	agent   *agent
	known   bool
}

var (
	_ programmer.Monitor = (*kernelProgrammer)(nil)
	_ programmer.Keeper  = (*kernelProgrammer)(nil)
)

// Families implements programmer.Programmer.
func (p *kernelProgrammer) Families() []model.Family { return []model.Family{model.IPv4, model.IPv6} }

// Cleanup implements programmer.Programmer.
func (p *kernelProgrammer) Cleanup(context.Context) error { return nil }

// Intact implements programmer.Keeper.
func (p *kernelProgrammer) Intact(_ context.Context, state view.State) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	intact := p.based
	for _, family := range p.Families() {
		intact = intact && programmer.HoldsSome(state, family, func(id view.ServicePortID) bool { return p.ports[id] != nil })
	}
	p.ahead = p.ahead && intact
	return intact
}

// Watch implements programmer.Monitor.
func (p *kernelProgrammer) Watch(ctx context.Context, lost func(string)) {
	for {
		select {
		case <-ctx.Done():
			return
		case reason := <-p.lost:
			lost(reason)
		}
	}
}

var errEnded = errors.New("the process has ended")

func (p *kernelProgrammer) begin() (refusal, error) {
	p.mu.Lock()
	slow := p.slow
	p.mu.Unlock()
	if slow > 0 {
		<-time.After(slow)
	}
	if p.process.hasEnded() {
		return 0, errEnded
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.next) == 0 {
		return accepts, nil
	}
	r := p.next[0]
	p.next = p.next[1:]
	return r, nil
}

func compareIDs(a, b view.ServicePortID) int {
	return cmp.Or(cmp.Compare(a.Service.String(), b.Service.String()), cmp.Compare(a.Family, b.Family), cmp.Compare(a.Port, b.Port),
		cmp.Compare(a.Protocol, b.Protocol))
}

// Replace implements programmer.Programmer.
func (p *kernelProgrammer) Replace(_ context.Context, state view.State) error {
	want, node := maps.Clone(state.Ports), state.Node
	r, err := p.begin()
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	var changes []view.Change
	for id, before := range p.ports {
		if after := want[id]; after != before {
			changes = append(changes, view.Change{Before: before, After: after})
		}
	}
	for id, after := range want {
		if p.ports[id] == nil {
			changes = append(changes, view.Change{After: after})
		}
	}
	clear(p.stale)
	clear(p.staleFamily)
	p.flushed = false
	err = p.carryOut("replace", r, changes)
	if p.loose && (r == accepts || r == failsAfter) {
		// What is not programmed has gone back, too.
		maps.DeleteFunc(p.at, func(o portObject, _ int) bool { return want[o.port] == nil })
		p.loose = false
	}
	p.node, p.based = node, p.based || r != failsBefore
	return err
}

// Apply implements programmer.Programmer.
func (p *kernelProgrammer) Apply(_ context.Context, changes []view.Change) error {
	if !p.known {
		p.world.violated("%s: Apply although the kernel's state is unknown", p.name)
	}
	r, err := p.begin()
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range changes {
		id := c.ID()
		if p.staleFamily[id.Family] {
			p.world.violated("%s: Apply changes %v although its family has failed", p.name, id)
		}
		if held := p.ports[id]; !p.stale[id] && !p.flushed && !reflect.DeepEqual(held, c.Before) {
			p.world.violated("%s: Apply expects another state of %v than the kernel has: %v, not %v", p.name, id, c.Before, held)
		}
	}
	return p.carryOut("apply", r, changes)
}

// carryOut makes changes as far as the kernel accepts them.
func (p *kernelProgrammer) carryOut(operation string, r refusal, changes []view.Change) error {
	slices.SortFunc(changes, func(a, b view.Change) int { return compareIDs(a.ID(), b.ID()) })
	if !p.agent.mayProgram() {
		p.world.violated("%s: %s before a server has brought the cache in sync, %v after a start with a checkpoint: %v",
			p.name, operation, time.Since(p.agent.begin), p.agent.restored)
	}
	if p.ahead && !p.agent.isConfirmed() {
		p.loose = false
	}
	if len(changes) == 0 && r != failsBefore && r != failsAfter {
		r = accepts
	}
	var failed error
	switch some := changes[:len(changes)/2]; r {
	case failsBefore:
		changes, failed = nil, errors.New("the kernel refuses the transaction")
	case failsHalfway:
		changes, failed = some, errors.New("the kernel refuses the second transaction")
	case failsAfter:
		failed = errors.New("the kernel's answer is lost")
	case failsPort:
		id := changes[0].ID()
		p.stale[id] = true
		changes, failed = changes[1:], &programmer.PortError{ID: id, Err: errors.New("the kernel refuses it")}
	case failsFamily:
		family := changes[0].ID().Family
		p.staleFamily[family] = true
		changes = slices.DeleteFunc(slices.Clone(changes), func(c view.Change) bool { return c.ID().Family == family })
		failed = &programmer.FamilyError{Family: family, Err: errors.New("the kernel lacks a module")}
	}
	p.known = failed == nil || r == failsPort || r == failsFamily && operation == "replace"
	p.world.observed("%s: %s, %d changes, %v", p.name, operation, len(changes), failed)
	c := p.world.cluster
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, c := range changes {
		id := c.ID()
		p.check(id, p.ports[id], c.After)
		p.checkSource(id, c.After)
		delete(p.stale, id)
		if c.After == nil {
			delete(p.ports, id)
		} else {
			p.ports[id] = c.After
		}
	}
	return failed
}

// flush removes some rules, as another program would, and tells the agent.
func (k *kernel) flush(some int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.flushed = true
	ids := slices.SortedFunc(maps.Keys(k.ports), compareIDs)
	for i, id := range ids {
		if i%3 == some%3 {
			delete(k.ports, id)
		}
	}
	select {
	case k.lost <- "others removed rules":
	default:
	}
}

// reading is what a Service port says of the objects that it was made from.
type reading struct {
	service   int         // number of the Service's state; 0 if it is not there
	slices    map[int]int // numbers of the slices' states, by part
	endpoints map[int]bool
}

func read(p *view.ServicePort) reading {
	r := reading{slices: make(map[int]int), endpoints: make(map[int]bool)}
	if p == nil {
		return r
	}
	for _, f := range p.Frontends {
		if _, number, ok := unmark(serviceMark, f.Address); ok && f.Kind == view.ExternalIP {
			r.service = number
		}
	}
	for b := range p.Cluster.All() {
		if part, number, ok := unmark(sliceMark, b.Address.Addr()); ok {
			r.slices[part] = number
			continue
		}
		a := b.Address.Addr().AsSlice()
		r.endpoints[int(a[len(a)-1])-1] = true
	}
	return r
}

func indexOf(service model.ServiceKey) (i int) {
	if _, err := fmt.Sscanf(service.Name, "svc-%d", &i); err != nil {
		panic(err)
	}
	return i
}

// check compares a Service port that is about to be programmed with the truth.
func (k *kernel) check(id view.ServicePortID, before, after *view.ServicePort) {
	c, i := k.world.cluster, indexOf(id.Service)
	service := c.services[i]
	now := read(after)
	at, ok := k.advance(id, service, func(e *entry) bool {
		if after == nil { // the Service is gone, or has no such port
			return !e.offers(id)
		}
		return e.number == now.service
	})
	if !ok || after == nil {
		return
	}
	if !service.entries[at].offers(id) {
		k.world.violated("%s: %v is programmed from state %d of the Service, which has no such port", k.name, id, now.service)
	}
	newest := 0
	may, must := make(map[int]bool), make(map[int]int)
	for _, o := range c.slices[i] {
		if o.family != id.Family {
			continue
		}
		if was, ok := k.at[portObject{id, o.key}]; ok {
			newest = max(newest, o.entries[was].tick)
		}
		at, ok := k.advance(id, o, func(e *entry) bool { return e.number == now.slices[o.part] })
		if !ok {
			return
		}
		if e := &o.entries[at]; e.number > 0 {
			for n, ready := range e.slice.endpoints {
				if ready {
					may[n] = true
				}
				must[n] |= 1
				if !ready {
					must[n] |= 2
				}
			}
		}
	}
	for n, how := range must {
		if how == 1 && !now.endpoints[n] {
			k.world.violated("%s: %v lacks endpoint %d, which its slices have", k.name, id, n)
		}
	}
	for n := range now.endpoints {
		if !may[n] {
			k.world.violated("%s: %v has endpoint %d, which none of its slices has", k.name, id, n)
		}
	}
	k.dropped(id, before, now, newest)
}

// checkSource checks that a Service port comes from a state that the agent's cache has held. The
// cluster's mutex is held.
func (p *kernelProgrammer) checkSource(id view.ServicePortID, after *view.ServicePort) {
	service, now := p.world.cluster.services[indexOf(id.Service)], read(after)
	if !p.agent.knew(id.Service, func(t telling) bool {
		if after == nil {
			return !service.offers(t.service, id)
		}
		return t.service == now.service && t.has(id, now)
	}) {
		p.world.violated("%s: %v becomes %+v, which the agent's cache has not held", p.name, id, now)
	}
}

// dropped checks that each endpoint that a Service port loses was removed at some time since the
// newest of the states that the port was made from.
func (k *kernel) dropped(id view.ServicePortID, before *view.ServicePort, now reading, newest int) {
	if before == nil || k.loose {
		return
	}
	was := read(before)
	for n := range was.endpoints {
		if !now.endpoints[n] && !k.world.cluster.removedSince(indexOf(id.Service), id.Family, n, newest) && !k.world.mayGoBack() {
			k.world.violated("%s: %v drops endpoint %d, which nobody removed", k.name, id, n)
		}
	}
}

// advance finds the state of an object that a Service port shows. It is the one that was programmed
// before, or a later one. at is its index.
func (k *kernel) advance(id view.ServicePortID, o *object, is func(*entry) bool) (at int, ok bool) {
	key := portObject{id, o.key}
	from := k.at[key]
	if k.loose { // it may be any; an object that does not exist has several such states
		from = 0
	}
	for i := from; i < len(o.entries); i++ {
		if is(&o.entries[i]) {
			k.at[key] = i
			return i, true
		}
	}
	for i := from - 1; i >= 0; i-- {
		if !is(&o.entries[i]) {
			continue
		}
		if !k.world.mayGoBack() {
			k.world.violated("%s: %v goes back from state %d of %v to state %d", k.name, id, o.entries[from].number, o.key, o.entries[i].number)
		}
		k.at[key] = i
		return i, true
	}
	k.world.violated("%s: %v shows a state of %v that never was", k.name, id, o.key)
	return 0, false
}

// differs returns how the kernel differs from a state, or nil. What an agent of the form does not
// know may differ, because it reads its checkpoint with the code of this tree.
func (k *kernel) differs(want view.State, f form) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	for id, p := range want.Ports {
		held := k.ports[id]
		if f == older && held != nil {
			less := *held
			less.Scheduler = ""
			held = &less
		}
		if !reflect.DeepEqual(held, p) {
			return fmt.Errorf("%v is %+v and should be %+v", id, held, p)
		}
	}
	for id := range k.ports {
		if want.Ports[id] == nil {
			return fmt.Errorf("%v should not be there", id)
		}
	}
	if !reflect.DeepEqual(k.node, want.Node) {
		return fmt.Errorf("the node is %+v and should be %+v", k.node, want.Node)
	}
	return nil
}
