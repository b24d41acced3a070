package ipvs

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/bits"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	mobyipvs "github.com/moby/ipvs"
	"github.com/vishvananda/netlink"

	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// DefaultScheduler is round robin, which gives each backend of a Service the same number of new
// connections, in turn.
const DefaultScheduler = "rr"

// Schedulers returns the names of the IPVS schedulers that Options accepts. ipvsadm(8) describes
// them.
func Schedulers() []string {
	return []string{"rr", "wrr", "lc", "wlc", "sed", "nq", "dh", "sh", "mh", "lblc", "lblcr"}
}

// Default values of Options.
const (
	// DefaultMasqueradeMark is the bit that kube-proxy uses, although kube-proxy uses it in the
	// packet's mark.
	DefaultMasqueradeMark = 1 << 14
	// DefaultDrainLimit is how long connections to a backend that was removed may last.
	DefaultDrainLimit = 15 * time.Minute
)

// Options are the options for New. The zero value is usable.
type Options struct {
	// Scheduler chooses the backends of all Services. Empty means DefaultScheduler.
	Scheduler string
	// MasqueradeMark is the single bit of conntrack's mark that says that a connection is to be
	// masqueraded. 0 means DefaultMasqueradeMark.
	MasqueradeMark uint32
	// DrainLimit is how long TCP connections to a backend that was removed may last. 0 means
	// DefaultDrainLimit.
	DrainLimit time.Duration
	// StrictARP makes the node answer ARP requests only for addresses of the interface on which they
	// arrive, and so not for those of Services. It is for load balancers that announce these addresses
	// themselves, such as MetalLB.
	StrictARP bool
	// ExcludeCIDRs are the ranges in which virtual services of others stay theirs. Outside of them, a
	// virtual service of others for the address and port of a Service port with affinity becomes that
	// Service port's, because IPVS can have only one.
	ExcludeCIDRs []netip.Prefix
	// TCPTimeout, TCPFinTimeout and UDPTimeout are how long IPVS remembers idle connections of each
	// kind, in whole seconds. 0 leaves the kernel's setting.
	TCPTimeout, TCPFinTimeout, UDPTimeout time.Duration
	// Log receives what is missing on this machine and, at level debug, each write. nil means
	// slog.Default().
	Log *slog.Logger
}

// complete checks the options and sets defaults.
func (o *Options) complete() error {
	if o.Scheduler == "" {
		o.Scheduler = DefaultScheduler
	}
	if !slices.Contains(Schedulers(), o.Scheduler) {
		return fmt.Errorf("IPVS scheduler %q: it must be one of %s", o.Scheduler, strings.Join(Schedulers(), ", "))
	}
	if o.MasqueradeMark == 0 {
		o.MasqueradeMark = DefaultMasqueradeMark
	}
	if bits.OnesCount32(o.MasqueradeMark) != 1 {
		return fmt.Errorf("masquerade mark 0x%x: it must be one bit", o.MasqueradeMark)
	}
	if o.DrainLimit == 0 {
		o.DrainLimit = DefaultDrainLimit
	}
	if o.Log == nil {
		o.Log = slog.Default()
	}
	return nil
}

// machine is what the IP families share: the sockets to the kernel, and the device.
type machine struct {
	options Options
	log     *slog.Logger
	// ipvs and links are for rare requests. commands and addresses are for frequent ones, which they
	// send in batches.
	ipvs       *mobyipvs.Handle
	ipvsFamily uint16 // number of IPVS in generic netlink
	commands   *socket
	entries    *entryReader
	links      *netlink.Handle
	addresses  *socket
	requests   requests // reused by each operation
	tables     *tables
	device     netlink.Link
}

// Programmer is the programmer for IPVS.
type Programmer struct {
	// mu guards all other fields, including those of machine and of the families. Watch uses them,
	// too, and ends drains.
	mu sync.Mutex
	*machine
	families []*family // that this machine has
	unset    string    // the last logged error about sysctls; empty if they are set
	// unseen are the Service ports that serviceLost has still to check in this round.
	unseen []view.ServicePortID
}

var _ programmer.Monitor = (*Programmer)(nil)

// family is one IP family: its table, virtual services and addresses. Each family is read, changed
// and reported separately.
//
// Invariants while known is true:
//
//  1. The kernel holds the virtual services that services returns for each Service port, with these
//     backends at weight 1. Exceptions are Service ports with refused set, and schedulers in
//     lacking, which the node's scheduler replaces.
//  2. shared counts the elements that Service ports share. The table holds each of them with a
//     count above 0, except for addresses in foreign.
//  3. An address is on the device if its count in shared is above 0 and it is not in foreign.
//  4. taken holds the number of every virtual service. Numbers are reused as late as possible.
type family struct {
	*machine
	family model.Family
	// known is false while it is unknown what the kernel holds, and a Replace must come next.
	known  bool
	layout *layout
	ports  map[view.ServicePortID]*programmed // nil before the first Replace
	// shared counts the Service ports, or their frontends or backends, that have an element which
	// others may have, too.
	shared map[elementKey]int
	// foreign are the addresses of Services that are not on the device because another device has
	// them.
	foreign map[netip.Addr]bool
	// elsewhere are the addresses that other devices had at the last Replace. nodeAddresses are those
	// of them that have NodePorts, in ascending order.
	elsewhere     map[netip.Addr]bool
	nodeAddresses []netip.Addr
	taken         map[uint32]bool // numbers of virtual services
	last          uint32          // the number assigned last
	draining      drains
	// theirs are virtual services of others, in ExcludeCIDRs, that a Service port here would need.
	theirs  map[serviceKey]bool
	lacking map[string]bool // schedulers that Service ports ask for and the kernel lacks
	looked  []heldBackend   // reused by holds
}

func newFamily(m *machine, name model.Family) *family {
	return &family{machine: m, family: name, draining: drains{}}
}

// programmed is a Service port that the kernel holds.
type programmed struct {
	port *view.ServicePort
	identity
	refused bool // IPVS has refused a part of it since the last Replace
}

// Families returns the IP families that this machine has.
func (p *Programmer) Families() []model.Family {
	var names []model.Family
	for _, f := range p.families {
		names = append(names, f.family)
	}
	return names
}

// family returns the state of an IP family, or nil if this machine does not have the family.
func (p *Programmer) family(name model.Family) *family {
	for _, f := range p.families {
		if f.family == name {
			return f
		}
	}
	return nil
}

// each calls do for each IP family, whether or not it fails for another one. It returns the
// PortErrors, and a FamilyError for each family that fails as a whole.
func (p *Programmer) each(do func(*family) error) error {
	var errs []error
	for _, f := range p.families {
		err := do(f)
		if _, programmed := programmer.PortErrors(err); !programmed {
			err = &programmer.FamilyError{Family: f.family, Err: err}
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// Replace makes the kernel hold exactly this state, one IP family after the other. It does not
// touch what is already as wanted. Virtual services keep their numbers, and so their connections,
// even if another process assigned the numbers.
func (p *Programmer) Replace(ctx context.Context, state view.State) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, f := range p.families {
		f.known = false
	}
	if err := p.prepare(); err != nil {
		return err
	}
	if err := p.tables.begin(); err != nil {
		return err
	}
	services, err := p.ipvs.GetServices()
	if err != nil {
		return fmt.Errorf("read IPVS' virtual services: %w", err)
	}
	err = p.each(func(f *family) error { return f.replace(ctx, state, services) })
	return errors.Join(err, programmer.CheckPrimary(state.Node, p.Families()))
}

// replace is Replace for one IP family. all are all virtual services in IPVS.
func (f *family) replace(ctx context.Context, state view.State, all []*mobyipvs.Service) error {
	f.layout, f.lacking = newLayout(f.family, state.Node, f.options.MasqueradeMark), map[string]bool{}
	if err := f.readAddresses(); err != nil {
		return err
	}
	held, whole, err := f.tables.read(f.layout)
	if err != nil {
		return err
	}
	x := newChange()
	x.held, x.rules = held, !whole
	numbers := map[string]uint32{}
	for k, e := range held {
		if k.set == setServices {
			numbers[e.comment] = hostNumber([]byte(k.key)) &^ markTagMask
		}
	}
	// Others may have changed the table, so what this process remembers has precedence.
	for _, known := range f.ports {
		for r, number := range known.numbers {
			if number != 0 {
				numbers[serviceComment(known.port.ID.String(), role(r))] = number
			}
		}
	}
	services, err := f.readServices(all)
	if err != nil {
		return err
	}
	onDevice, err := f.deviceAddresses(f.device, domain(f.family))
	if err != nil {
		return err
	}
	f.ports = make(map[view.ServicePortID]*programmed, len(state.Ports))
	f.shared, f.foreign, f.taken = map[elementKey]int{}, map[netip.Addr]bool{}, map[uint32]bool{}
	for k := range services {
		f.taken[k.number] = true
	}
	for _, number := range numbers {
		f.taken[number] = true
	}
	left := leftIn(held, state, numbers)
	for id, port := range state.Ports {
		if id.Family != f.family {
			continue
		}
		now := &programmed{port: port, identity: identity{numbers: numbersOf(id.String(), numbers)}}
		if now.numbers == (ids{}) {
			left.inherit(now)
		}
		for r, number := range now.numbers {
			if services[serviceKey{family: f.family, number: number}] == nil {
				now.numbers[r] = 0
			}
		}
		for k := range f.byAddress(port) {
			now.addressed = now.addressed || services[k] != nil
		}
		f.identify(now)
		f.blameTheirs(x, port)
		for _, v := range f.services(now) {
			f.replaceService(x, v, services[v.serviceKey])
			delete(services, v.serviceKey)
		}
		f.ports[id] = now
		f.wantOwn(x.want, now)
		shared(port, func(k elementKey) { f.shared[k]++ })
	}
	for k := range services {
		x.removeService(k)
	}
	f.replaceShared(x, onDevice)
	return f.carryOut(ctx, x)
}

// replaceShared adds the elements that Service ports share to the wanted ones, and brings the
// device's addresses in line with them.
func (f *family) replaceShared(x *change, onDevice map[netip.Addr]bool) {
	wanted := map[netip.Addr]bool{}
	for k := range f.shared {
		if k.set == setAddresses {
			a, _ := netip.AddrFromSlice([]byte(k.key))
			if onDevice[a] && f.elsewhere[a] {
				f.foreign[a] = true
				continue
			}
			if !onDevice[a] && !f.arrives(a) {
				continue
			}
			wanted[a] = true
			if !onDevice[a] {
				x.arrive = append(x.arrive, a)
			}
		}
		x.want[k] = element{}
	}
	for a := range onDevice {
		if !wanted[a] {
			x.depart = append(x.depart, a)
		}
	}
}

// arrives reports whether an address is to be added to the device. Otherwise it is the node's own,
// and arrives adds it to foreign.
func (f *family) arrives(a netip.Addr) bool {
	own := f.nodesOwn(a)
	if own {
		f.foreign[a] = true
	}
	return !own
}

// numbersOf returns the numbers of the virtual services of the Service port with this name.
func numbersOf(name string, numbers map[string]uint32) (of ids) {
	for r := range roles {
		of[r] = numbers[serviceComment(name, r)]
	}
	return of
}

// leftIn returns what Service ports leave behind that the table holds and the state lacks.
func leftIn(held elements, state view.State, numbers map[string]uint32) estate {
	stay, used := make(map[string]bool, len(state.Ports)), map[uint32]bool{}
	for id := range state.Ports {
		name := id.String()
		stay[name] = true
		for _, number := range numbersOf(name, numbers) {
			used[number] = true // also if a Replace that failed assigned it
		}
	}
	found, left := estate{}, map[string]*identity{}
	for k, e := range held {
		name := e.comment
		if k.set != others.frontends() && k.set != others.nodePorts() || stay[name] {
			continue
		}
		if left[name] == nil {
			left[name] = &identity{}
			for r, number := range numbersOf(name, numbers) {
				if !used[number] {
					left[name].numbers[r] = number
				}
			}
		}
		found[k] = left[name]
	}
	return found
}

// identify assigns a Service port the virtual services that it needs and lacks.
func (f *family) identify(now *programmed) {
	if now.port.Affinity > 0 {
		now.addressed = true
		return
	}
	for r := range roles {
		if now.numbers[r] == 0 && r.backends(now.port).Len() > 0 {
			now.numbers[r] = f.number()
		}
	}
}

// replaceService adds the commands that make a virtual service as it should be. held is nil if the
// kernel lacks it.
func (f *family) replaceService(x *change, v *virtual, held *heldService) {
	if held == nil {
		held = &heldService{}
	}
	x.ensureService(v, held.service)
	left := held.backends
	gone := func(b heldBackend) {
		if b.weight == 0 && v.waits() {
			f.drain(v.serviceKey, b.address)
			return
		}
		f.removeBackend(x, v, b.address)
	}
	for b := range v.backends.All() {
		for len(left) > 0 && left[0].address.Compare(b.Address) < 0 {
			gone(left[0])
			left = left[1:]
		}
		if len(left) == 0 || left[0].address != b.Address {
			f.addBackend(x, v, b.Address, false)
			continue
		}
		if left[0].weight != 1 {
			f.addBackend(x, v, b.Address, true)
		}
		// Also if a transaction was refused before it set the weight to 0.
		delete(f.draining[v.serviceKey], b.Address)
		left = left[1:]
	}
	for _, b := range left {
		gone(b)
	}
	f.finishService(x, v)
}

// finishService completes replaceService and changeService: it makes room for the backends and
// reports the fault of the virtual service.
func (f *family) finishService(x *change, v *virtual) {
	f.makeRoom(x, v)
	if v.fault != nil {
		x.blame(v.owner, v.fault, true)
	}
}

// Apply changes the virtual services and backends of the Service ports that changed. Where packets
// are led changes in one transaction for each IP family.
func (p *Programmer) Apply(ctx context.Context, changes []view.Change) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.each(func(f *family) error {
		mine := slices.DeleteFunc(slices.Clone(changes), func(c view.Change) bool { return c.ID().Family != f.family })
		if len(mine) == 0 {
			return nil
		}
		return f.apply(ctx, mine)
	})
}

// apply is Apply for the changes of one IP family.
func (f *family) apply(ctx context.Context, changes []view.Change) error {
	if !f.known {
		return errors.New("it is not known what the kernel holds: call Replace first")
	}
	f.known = false // until everything has succeeded
	x := newChange()
	touched := map[elementKey]int{} // by how much the count of each shared element changes
	before, after := map[serviceKey]*virtual{}, []*virtual(nil)
	left := estate{}
	for _, c := range changes {
		if was := f.ports[c.ID()]; was != nil && c.After == nil {
			left.leaveAll(was)
		}
	}
	if err := f.noteTheirs(changes); err != nil {
		return err
	}
	for _, c := range changes {
		id := c.ID()
		was, now := f.ports[id], (*programmed)(nil)
		delete(f.ports, id)
		if c.After != nil {
			now = &programmed{port: c.After}
			if was != nil {
				now.identity, now.refused = was.identity, was.refused
			} else {
				left.inherit(now)
			}
			f.identify(now)
			f.blameTheirs(x, c.After)
			f.ports[id] = now
		}
		if was != nil && now != nil && sameTable(was, now) {
			f.changeBackends(x, touched, was, now)
			continue
		}
		if was != nil {
			for _, v := range f.services(was) {
				before[v.serviceKey] = v
			}
			f.wantOwn(x.held, was)
			shared(was.port, func(k elementKey) { touched[k]-- })
		}
		if now != nil {
			after = append(after, f.services(now)...)
			f.wantOwn(x.want, now)
			shared(now.port, func(k elementKey) { touched[k]++ })
		}
	}
	for _, v := range after {
		f.changeService(x, before[v.serviceKey], v)
		delete(before, v.serviceKey)
	}
	for k := range before {
		x.removeService(k)
	}
	for k, more := range touched {
		f.changeShared(x, k, more)
	}
	return f.carryOut(ctx, x)
}

// sameTable reports whether two states of a Service port have the same virtual services and the
// same elements of their own.
func sameTable(was, now *programmed) bool {
	a, b := was.port.Frontends, now.port.Frontends
	return was.identity == now.identity && was.port.Affinity == now.port.Affinity && was.port.Scheduler == now.port.Scheduler &&
		len(a) == len(b) && len(a) > 0 && &a[0] == &b[0]
}

// changeBackends changes a Service port of which only the backends differ.
func (f *family) changeBackends(x *change, touched map[elementKey]int, was, now *programmed) {
	last := f.services(was)
	for i, v := range f.services(now) {
		f.changeService(x, last[i], v)
	}
	for r := range roles {
		for before, after := range r.backends(now.port).Differences(r.backends(was.port)) {
			if before.Local {
				touched[hairpin(before)]--
			}
			if after.Local {
				touched[hairpin(after)]++
			}
		}
	}
}

// changeService adds the commands that make a virtual service as it should be. was is nil for a new
// one.
func (f *family) changeService(x *change, was, v *virtual) {
	var last view.Backends
	if was == nil {
		x.ensureService(v, nil)
	} else {
		last = was.backends
		if was.scheduler != v.scheduler || was.affinity != v.affinity {
			x.ensureService(v, was.moby())
		}
	}
	for was, is := range v.backends.Differences(last) {
		switch {
		case !is.Address.IsValid():
			f.removeBackend(x, v, was.Address)
		case !was.Address.IsValid():
			f.addBackend(x, v, is.Address, false)
		}
	}
	f.finishService(x, v)
}

// changeShared changes the count of an element that Service ports share. It adds the element with
// the first of them and removes it with the last, as invariants 2 and 3 of family require.
func (f *family) changeShared(x *change, k elementKey, more int) {
	count := f.shared[k]
	becomes := count + more
	f.shared[k] = becomes
	if becomes == 0 {
		delete(f.shared, k)
	}
	if (count > 0) == (becomes > 0) {
		return
	}
	if k.set == setAddresses {
		a, _ := netip.AddrFromSlice([]byte(k.key))
		if becomes == 0 && f.foreign[a] {
			delete(f.foreign, a)
			return
		}
		if becomes == 0 {
			x.depart = append(x.depart, a)
		} else {
			if !f.arrives(a) {
				return
			}
			x.arrive = append(x.arrive, a)
		}
	}
	if becomes == 0 {
		x.held[k] = element{}
	} else {
		x.want[k] = element{}
	}
}

func (f *family) wantOwn(to elements, of *programmed) {
	own(of.port, of.numbers, f.layout.node.Pods.Of(f.family), func(k elementKey, e element) { to[k] = e })
}

// number returns a number that is not taken. It does not soon reuse a number, because the kernel
// may still have its connections. The highest number is reserved for trying what the kernel
// accepts.
func (f *family) number() uint32 {
	for {
		if f.last++; f.last >= maxID {
			f.last = 1
		}
		if !f.taken[f.last] {
			f.taken[f.last] = true
			return f.last
		}
	}
}
