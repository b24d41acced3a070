package ipvs

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	mobyipvs "github.com/moby/ipvs"

	"github.com/slicecast/slicecast/agent/netlink"
	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// family is one IP family: its table, virtual services and addresses. Each family is read, changed
// and reported separately.
type family struct {
	*machine
	family model.Family
	layout *layout
	record
	draining drains
	// undelivered says why packets with markDeliver are not delivered. nil means that they are.
	undelivered error
	looked      []heldBackend // reused by holds
}

// record is what this process knows of one IP family in the kernel.
//
// Invariants while known is true:
//
//  1. The kernel holds the virtual services that family.services returns for each Service port,
//     with these backends at weight 1. Exceptions are Service ports with refused set, and
//     schedulers in lacking, which the node's scheduler replaces.
//  2. shared counts the elements that Service ports share. The table holds each of them with a
//     count above 0, except for addresses in foreign.
//  3. An address is on the device if its count in shared is above 0 and it is not in foreign.
//  4. numbers holds the number of every virtual service by mark.
type record struct {
	// known is false while it is unknown what the kernel holds, and a Replace must come next.
	known bool
	ports map[view.ServicePortID]*programmed // nil before the first Replace
	// shared counts the Service ports, or their frontends or backends, that have an element which
	// others may have, too.
	shared  map[elementKey]int
	numbers numbers
	// foreign are the addresses of Services that are not on the device because another device has
	// them.
	foreign map[netip.Addr]bool
	// nodeAddresses are the addresses of other devices that had NodePorts at the last Replace, in
	// ascending order.
	nodeAddresses []netip.Addr
	// theirs are virtual services of others, in ExcludeCIDRs, that a Service port here would need.
	theirs  map[serviceKey]bool
	lacking map[string]bool // schedulers that Service ports ask for and the kernel lacks
}

// numbers are the numbers of virtual services by mark that are taken.
type numbers struct {
	taken map[uint32]bool
	last  uint32 // the number assigned last
}

// take returns a number that was not taken. It does not soon reuse a number, because the kernel may
// still have its connections. The highest number is reserved for trying what the kernel accepts.
func (n *numbers) take() uint32 {
	for {
		if n.last++; n.last >= maxID {
			n.last = 1
		}
		if !n.taken[n.last] {
			n.taken[n.last] = true
			return n.last
		}
	}
}

// programmed is a Service port that the kernel holds.
type programmed struct {
	port *view.ServicePort
	identity
	refused bool // IPVS has refused a part of it since the last Replace
}

// found is what the kernel holds of one IP family.
type found struct {
	elements elements
	// different is what the table should have instead of what it has, apart from its elements. If it
	// is not empty, at least the table's rules must be written.
	different []string
	services  map[serviceKey]*heldService
	// numbers are the numbers of virtual services by mark, by their comments in the table.
	numbers   map[string]uint32
	addresses map[netip.Addr]bool // of the device
	elsewhere map[netip.Addr]bool // of other devices
}

// read returns what the kernel holds. all are all virtual services in IPVS.
func (f *family) read(all []*mobyipvs.Service) (held found, err error) {
	if held.addresses, held.elsewhere, err = f.device.read(f.family); err != nil {
		return held, err
	}
	if held.elements, held.different, err = f.readTable(f.layout); err != nil {
		return held, err
	}
	held.numbers = map[string]uint32{}
	for k, e := range held.elements {
		if k.set == setServices {
			held.numbers[e.comment] = netlink.Uint32([]byte(k.key)) &^ markTagMask
		}
	}
	// Others may have changed the table, so what this process remembers has precedence.
	for _, known := range f.ports {
		for r, number := range known.numbers {
			if number != 0 {
				held.numbers[serviceComment(known.port.ID.String(), role(r))] = number
			}
		}
	}
	held.services, err = f.readServices(all)
	return held, err
}

// restart begins a new record, with the addresses and numbers that the kernel holds.
func (f *family) restart(held found) {
	taken := map[uint32]bool{}
	for k := range held.services {
		taken[k.number] = true
	}
	for _, number := range held.numbers {
		taken[number] = true
	}
	f.record = record{
		ports: map[view.ServicePortID]*programmed{}, shared: map[elementKey]int{}, numbers: numbers{taken, f.numbers.last},
		foreign: map[netip.Addr]bool{}, nodeAddresses: nodePortAddresses(f.layout.node, held.elsewhere),
		theirs: f.theirs, lacking: map[string]bool{},
	}
}

// replace is Replace for one IP family. all are all virtual services in IPVS.
func (f *family) replace(ctx context.Context, state view.State, all []*mobyipvs.Service) error {
	if err := f.device.restoreSources(f.family); err != nil {
		return err
	}
	f.undelivered = f.device.deliver(f.family)
	x, _, err := f.plan(state, all)
	if err != nil {
		return err
	}
	return f.carryOut(ctx, x)
}

// plan reads what the kernel holds, and returns the change that makes it hold a state. all are all
// virtual services in IPVS.
func (f *family) plan(state view.State, all []*mobyipvs.Service) (x *change, held found, err error) {
	f.layout = newLayout(f.family, state.Node, f.options.MasqueradeMark)
	if held, err = f.read(all); err != nil {
		return nil, held, err
	}
	f.restart(held)
	x = newChange()
	x.held, x.rules = held.elements, len(held.different) > 0
	left := leftIn(held, state)
	for id, port := range state.Ports {
		if id.Family != f.family {
			continue
		}
		now := f.recognize(held, left, port)
		f.settle(x, now)
		f.count(x, x.want, now, 1)
		for _, v := range f.services(now) {
			f.replaceService(x, v, held.services[v.serviceKey])
			delete(held.services, v.serviceKey)
		}
	}
	for k := range held.services {
		x.removeService(k)
	}
	for k, count := range x.touched {
		f.changeShared(x, k, count, held)
	}
	x.depart = slices.Collect(maps.Keys(held.addresses))
	return x, held, nil
}

// recognize returns a Service port with the virtual services that it has in the kernel.
func (f *family) recognize(held found, left estate, port *view.ServicePort) *programmed {
	now := &programmed{port: port, identity: identity{numbers: numbersOf(port.ID.String(), held.numbers)}}
	if now.numbers == (ids{}) {
		left.inherit(now)
	}
	for r, number := range now.numbers {
		if held.services[serviceKey{family: f.family, number: number}] == nil {
			now.numbers[r] = 0
		}
	}
	for k := range f.byAddress(port) {
		now.addressed = now.addressed || held.services[k] != nil
	}
	return now
}

// settle records a Service port and assigns it the virtual services that it needs and lacks.
func (f *family) settle(x *change, now *programmed) {
	f.ports[now.port.ID] = now
	for _, k := range f.theirsOf(now.port) {
		err := fmt.Errorf("another process owns the IPVS virtual service %v, and --ipvs-exclude-cidrs covers it", k)
		x.blame(now.port.ID, err, true)
	}
	if now.port.Affinity > 0 {
		now.addressed = true
		return
	}
	for r := range roles {
		if now.numbers[r] == 0 && r.backends(now.port).Len() > 0 {
			now.numbers[r] = f.numbers.take()
		}
	}
}

// count adds the elements that a Service port has for itself to elements, and those that it shares
// to x.touched, by times.
func (f *family) count(x *change, elements elements, of *programmed, by int) {
	own(elements, of.port, of.numbers, f.layout.node.Pods.Of(f.family))
	shared(x.touched, of.port, by)
}

// replaceService adds the commands that make a virtual service as it should be. held is nil if the
// kernel lacks it.
func (f *family) replaceService(x *change, v *virtual, held *heldService) {
	if held == nil {
		held = &heldService{}
	}
	x.ensureService(v, held.settings)
	f.replaceBackends(x, v, held.backends)
	if v.fault != nil {
		x.blameScheduler(v, v.fault)
	}
}

// replaceBackends adds the commands that make a virtual service have its backends. held are those
// that the kernel has, in ascending order.
func (f *family) replaceBackends(x *change, v *virtual, held []heldBackend) {
	gone := func(b heldBackend) {
		if b.weight == 0 && v.waits() {
			f.draining.begin(v.serviceKey, b.address, f.options.DrainLimit)
			return
		}
		f.removeBackend(x, v, b.address)
	}
	for b := range v.backends.All() {
		for len(held) > 0 && held[0].address.Compare(b.Address) < 0 {
			gone(held[0])
			held = held[1:]
		}
		if len(held) == 0 || held[0].address != b.Address {
			f.addBackend(x, v, b.Address, false)
			continue
		}
		if !held[0].serves() {
			f.addBackend(x, v, b.Address, true)
		}
		// Also if a transaction was refused before it set the weight to 0.
		f.draining.stop(v.serviceKey, b.Address)
		held = held[1:]
	}
	for _, b := range held {
		gone(b)
	}
	f.makeRoom(x, v)
}

// apply is Apply for the changes of one IP family.
func (f *family) apply(ctx context.Context, changes []view.Change) error {
	if !f.known {
		return programmer.ErrReplaceFirst
	}
	f.known = false // until everything has succeeded
	x := newChange()
	left := estate{}
	for _, c := range changes {
		if was := f.ports[c.ID()]; was != nil && c.After == nil {
			left.leaveAll(was)
		}
	}
	if err := f.noteTheirs(changes); err != nil {
		return err
	}
	before, after := map[serviceKey]*virtual{}, []*virtual(nil)
	for _, c := range changes {
		was, now := f.move(x, left, c)
		if was != nil && now != nil && sameTable(was, now) {
			f.changeBackends(x, was, now)
			continue
		}
		if was != nil {
			for _, v := range f.services(was) {
				before[v.serviceKey] = v
			}
			f.count(x, x.held, was, -1)
		}
		if now != nil {
			after = append(after, f.services(now)...)
			f.count(x, x.want, now, 1)
		}
	}
	for _, v := range after {
		f.changeService(x, before[v.serviceKey], v)
		delete(before, v.serviceKey)
	}
	for k := range before {
		x.removeService(k)
	}
	for k, more := range x.touched {
		f.changeShared(x, k, more, found{})
	}
	return f.carryOut(ctx, x)
}

// move changes the record of one Service port, and returns the earlier and the new one. nil means
// that there is none.
func (f *family) move(x *change, left estate, c view.Change) (was, now *programmed) {
	was = f.ports[c.ID()]
	delete(f.ports, c.ID())
	if c.After == nil {
		return was, nil
	}
	now = &programmed{port: c.After}
	if was != nil {
		now.identity, now.refused = was.identity, was.refused
	} else {
		left.inherit(now)
	}
	f.settle(x, now)
	return was, now
}

// sameTable reports whether two states of a Service port have the same virtual services and the
// same elements of their own.
func sameTable(was, now *programmed) bool {
	a, b := was.port, now.port
	return was.identity == now.identity && a.Affinity == b.Affinity && a.Scheduler == b.Scheduler &&
		a.HealthCheckPort == b.HealthCheckPort && len(a.Frontends) == len(b.Frontends) && len(a.Frontends) > 0 && &a.Frontends[0] == &b.Frontends[0]
}

// changeBackends changes a Service port of which only the backends differ.
func (f *family) changeBackends(x *change, was, now *programmed) {
	last := f.services(was)
	for i, v := range f.services(now) {
		f.changeService(x, last[i], v)
	}
	for r := range roles {
		for before, after := range r.backends(now.port).Differences(r.backends(was.port)) {
			if before.Local {
				x.touched[hairpin(before)]--
			}
			if after.Local {
				x.touched[hairpin(after)]++
			}
		}
	}
}

// changeService adds the commands that make a virtual service as it should be. was is nil for a new
// one.
func (f *family) changeService(x *change, was, v *virtual) {
	var last view.Backends
	var have settings
	if was != nil {
		last, have = was.backends, was.settings()
	}
	x.ensureService(v, have)
	for was, is := range v.backends.Differences(last) {
		switch {
		case !is.Address.IsValid():
			f.removeBackend(x, v, was.Address)
		case !was.Address.IsValid():
			f.addBackend(x, v, is.Address, false)
		}
	}
	f.makeRoom(x, v)
	if v.fault != nil {
		x.blameScheduler(v, v.fault)
	}
}

// changeShared changes the count of an element that Service ports share. It adds the element with
// the first of them and removes it with the last, as invariants 2 and 3 of record require. It
// removes addresses that stay on the device from those in held.
func (f *family) changeShared(x *change, k elementKey, more int, held found) {
	count := f.shared[k]
	becomes := count + more
	f.shared[k] = becomes
	if becomes == 0 {
		delete(f.shared, k)
	}
	if (count > 0) == (becomes > 0) {
		return
	}
	address, isAddress := k.address()
	switch {
	case becomes == 0 && isAddress && f.foreign[address]:
		delete(f.foreign, address)
		return
	case becomes == 0:
		x.held[k] = element{}
		if isAddress {
			x.depart = append(x.depart, address)
		}
		return
	case isAddress && held.addresses[address] && !held.elsewhere[address]:
		delete(held.addresses, address)
	case isAddress && (held.addresses[address] || f.device.nodesOwn(address)):
		f.foreign[address] = true
		return
	case isAddress:
		x.arrive = append(x.arrive, address)
	}
	x.want[k] = element{}
}
