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

// DefaultScheduler gives each backend of a Service the same number of new connections, in turn.
const DefaultScheduler = "rr"

// Schedulers are IPVS' schedulers that may be asked for; ipvsadm(8) says what each does.
func Schedulers() []string {
	return []string{"rr", "wrr", "lc", "wlc", "sed", "nq", "dh", "sh", "mh", "lblc", "lblcr"}
}

// Defaults.
const (
	// DefaultMasqueradeMark is the bit that kube-proxy uses, though of the packet's mark.
	DefaultMasqueradeMark = 1 << 14
	// DefaultDrainLimit is how long connections to a backend that is gone may last.
	DefaultDrainLimit = 15 * time.Minute
)

// Options for New. The zero value is good.
type Options struct {
	// Scheduler chooses the backends of all Services. Empty: DefaultScheduler.
	Scheduler string
	// MasqueradeMark is the one bit of conntrack's mark that says that a connection is to be masqueraded. 0:
	// DefaultMasqueradeMark.
	MasqueradeMark uint32
	// DrainLimit is how long TCP connections to a backend that is gone may last. 0: DefaultDrainLimit.
	DrainLimit time.Duration
	// StrictARP has the node answer ARP requests for the addresses of the interface only that they come in by, and so not
	// for those of Services: for load balancers that announce these addresses themselves, e.g. MetalLB.
	StrictARP bool
	// ExcludeCIDRs are where the virtual services of others stay theirs. Elsewhere one for the address and port of a Service
	// port with affinity becomes that Service port's, as IPVS has one at most.
	ExcludeCIDRs []netip.Prefix
	// TCPTimeout, TCPFinTimeout and UDPTimeout are how long IPVS remembers idle connections, in seconds, of each kind. 0: as
	// the kernel has it.
	TCPTimeout, TCPFinTimeout, UDPTimeout time.Duration
	// Log is told what is missing on this machine and, at level debug, each write. nil: slog.Default().
	Log *slog.Logger
}

// complete checks the options and puts the defaults in.
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

// Programmer is the programmer for IPVS.
type Programmer struct {
	options  Options
	log      *slog.Logger
	families []model.Family // that this machine has
	// ipvs is for what is asked or set now and then, commands for what there is much of; so are links and addresses.
	ipvs       *mobyipvs.Handle
	ipvsFamily uint16 // of generic netlink
	commands   *socket
	entries    *entryReader
	links      *netlink.Handle
	addresses  *socket
	requests   requests // reused
	tables     *tables

	// mu guards what is below: Watch looks at it, too, and ends what drains.
	mu     sync.Mutex
	device netlink.Link
	// known is false while it is not known what the kernel holds, and a Replace must come.
	known   bool
	layouts map[model.Family]*layout
	ports   map[view.ServicePortID]*programmed
	// shared counts the Service ports (or their frontends, backends) that have an element which others may have.
	shared map[model.Family]map[elementKey]int
	// foreign are those of the wanted addresses that are not on our device as another has them.
	foreign map[netip.Addr]bool
	node    view.Node
	// elsewhere are the addresses that other devices had at the last Replace, nodeAddresses those of them that NodePorts with
	// affinity are on.
	elsewhere     map[netip.Addr]bool
	nodeAddresses map[model.Family][]netip.Addr
	unset         string          // what was said last of settings that can't be made
	taken         map[uint32]bool // numbers of virtual services
	last          uint32          // the number that was given last
	draining      drains
	theirs        map[serviceKey]bool // virtual services of others, in ExcludeCIDRs, that one of ours would have to be
	lacking       map[string]bool     // schedulers that Service ports ask for and the kernel has not
	// unseen are the Service ports that serviceLost has still to look at in this round.
	unseen []view.ServicePortID
	// looked is holds' memory.
	looked []heldBackend
}

var _ programmer.Monitor = (*Programmer)(nil)

// programmed is a Service port that the kernel has.
type programmed struct {
	port *view.ServicePort
	identity
	refused bool // IPVS has refused some of it, since the last Replace
}

// Families returns those that this machine has.
func (p *Programmer) Families() []model.Family { return slices.Clone(p.families) }

// Replace makes the kernel hold exactly this state. Both IP families share transactions, so that they
// fail together. What is as wanted is not touched. Virtual services keep their numbers,
// and so their connections, also if another process gave them.
func (p *Programmer) Replace(ctx context.Context, state view.State) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.known, p.node = false, state.Node
	if err := p.prepare(state.Node); err != nil {
		return err
	}
	if err := p.tables.begin(); err != nil {
		return err
	}
	p.layouts, p.lacking = map[model.Family]*layout{}, map[string]bool{}
	x := newChange()
	numbers := map[string]uint32{}
	for _, family := range p.families {
		l := newLayout(family, state.Node, p.options.MasqueradeMark)
		p.layouts[family] = l
		held, whole, err := p.tables.read(l)
		if err != nil {
			return err
		}
		x.held[family], x.rules[family] = held, !whole
		for k, e := range held {
			if k.set == setServices {
				numbers[e.comment] = hostNumber([]byte(k.key)) &^ markTagMask
			}
		}
	}
	// What this process remembers counts for more than a table that others may have changed.
	for _, known := range p.ports {
		for r, number := range known.numbers {
			if number != 0 {
				numbers[serviceComment(known.port.ID.String(), role(r))] = number
			}
		}
	}
	services, err := p.readServices()
	if err != nil {
		return err
	}
	onDevice, err := p.deviceAddresses(p.device)
	if err != nil {
		return err
	}
	p.ports = make(map[view.ServicePortID]*programmed, len(state.Ports))
	p.shared = map[model.Family]map[elementKey]int{model.IPv4: {}, model.IPv6: {}}
	p.foreign, p.taken = map[netip.Addr]bool{}, map[uint32]bool{}
	for k := range services {
		p.taken[k.number] = true
	}
	for _, number := range numbers {
		p.taken[number] = true
	}
	left := leftIn(x.held, state, numbers)
	for id, port := range state.Ports {
		if p.layouts[id.Family] == nil {
			continue
		}
		now := &programmed{port: port, identity: identity{numbers: numbersOf(id.String(), numbers)}}
		if now.numbers == (ids{}) {
			left.inherit(now)
		}
		for r, number := range now.numbers {
			if services[serviceKey{family: id.Family, number: number}] == nil {
				now.numbers[r] = 0
			}
		}
		for k := range p.byAddress(port) {
			now.addressed = now.addressed || services[k] != nil
		}
		p.identify(now)
		p.blameTheirs(x, port)
		for _, v := range p.services(now) {
			p.replaceService(x, v, services[v.serviceKey])
			delete(services, v.serviceKey)
		}
		p.ports[id] = now
		p.wantOwn(x.want[id.Family], now)
		shared(port, func(k elementKey) { p.shared[id.Family][k]++ })
	}
	for k := range services {
		x.removeService(k)
	}
	p.replaceShared(x, onDevice)
	return errors.Join(p.carryOut(ctx, x), programmer.CheckPrimary(state.Node, p.families))
}

// replaceShared wants the elements that Service ports share, and their addresses on the device.
func (p *Programmer) replaceShared(x *change, onDevice map[netip.Addr]bool) {
	wanted := map[netip.Addr]bool{}
	for family, keys := range p.shared {
		for k := range keys {
			if k.set == setAddresses {
				a, _ := netip.AddrFromSlice([]byte(k.key))
				if onDevice[a] && p.elsewhere[a] {
					p.foreign[a] = true
					continue
				}
				if !onDevice[a] && !p.arrives(a) {
					continue
				}
				wanted[a] = true
				if !onDevice[a] {
					x.arrive = append(x.arrive, a)
				}
			}
			x.want[family][k] = element{}
		}
	}
	for a := range onDevice {
		if !wanted[a] {
			x.depart = append(x.depart, a)
		}
	}
}

// arrives tells whether an address is to come to our device, and notes it if not.
func (p *Programmer) arrives(a netip.Addr) bool {
	own := p.nodesOwn(a)
	if own {
		p.foreign[a] = true
	}
	return !own
}

// numbersOf gives the numbers of the virtual services of a Service port with this name.
func numbersOf(name string, numbers map[string]uint32) (of ids) {
	for r := range roles {
		of[r] = numbers[serviceComment(name, r)]
	}
	return of
}

// leftIn gives what Service ports leave that the tables have and the state has not.
func leftIn(tables map[model.Family]elements, state view.State, numbers map[string]uint32) estate {
	stay, used := make(map[string]bool, len(state.Ports)), map[uint32]bool{}
	for id := range state.Ports {
		name := id.String()
		stay[name] = true
		for _, number := range numbersOf(name, numbers) {
			used[number] = true // also where it was left in a Replace that failed
		}
	}
	found, left := estate{}, map[string]*identity{}
	for family, held := range tables {
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
			found.leave(family, k, left[name])
		}
	}
	return found
}

// identify gives a Service port the virtual services that it needs and has not.
func (p *Programmer) identify(now *programmed) {
	if now.port.Affinity > 0 {
		now.addressed = true
		return
	}
	for r := range roles {
		if now.numbers[r] == 0 && r.backends(now.port).Len() > 0 {
			now.numbers[r] = p.number()
		}
	}
}

// replaceService has a virtual service made as it should be. held is nil if there is none.
func (p *Programmer) replaceService(x *change, v *virtual, held *heldService) {
	if held == nil {
		held = &heldService{}
	}
	x.ensureService(v, held.service)
	left := held.backends
	gone := func(b heldBackend) {
		if b.weight == 0 && v.waits() {
			p.drain(v.serviceKey, b.address)
			return
		}
		p.removeBackend(x, v, b.address)
	}
	for b := range v.backends.All() {
		for len(left) > 0 && left[0].address.Compare(b.Address) < 0 {
			gone(left[0])
			left = left[1:]
		}
		if len(left) == 0 || left[0].address != b.Address {
			p.addBackend(x, v, b.Address, false)
			continue
		}
		if left[0].weight != 1 {
			p.addBackend(x, v, b.Address, true)
		}
		delete(p.draining[v.serviceKey], b.Address) // also where a transaction was refused before it got to drain
		left = left[1:]
	}
	for _, b := range left {
		gone(b)
	}
	p.finishService(x, v)
}

// finishService ends what replaceService and changeService do.
func (p *Programmer) finishService(x *change, v *virtual) {
	p.makeRoom(x, v)
	if v.fault != nil {
		x.blame(v.owner, v.fault, true)
	}
}

// Apply changes the virtual services and backends of the Service ports that changed. What clients see of it changes in one
// transaction for each IP family.
func (p *Programmer) Apply(ctx context.Context, changes []view.Change) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.known {
		return errors.New("it is not known what the kernel holds: call Replace first")
	}
	p.known = false // unless all goes well
	x := newChange()
	touched := map[model.Family]map[elementKey]int{model.IPv4: {}, model.IPv6: {}} // how much more of each
	before, after := map[serviceKey]*virtual{}, []*virtual(nil)
	left := estate{}
	for _, c := range changes {
		if was := p.ports[c.ID()]; was != nil && c.After == nil {
			left.leaveAll(was)
		}
	}
	if err := p.noteTheirs(changes); err != nil {
		return err
	}
	for _, c := range changes {
		id := c.ID()
		if p.layouts[id.Family] == nil {
			continue
		}
		was, now := p.ports[id], (*programmed)(nil)
		delete(p.ports, id)
		if c.After != nil {
			now = &programmed{port: c.After}
			if was != nil {
				now.identity, now.refused = was.identity, was.refused
			} else {
				left.inherit(now)
			}
			p.identify(now)
			p.blameTheirs(x, c.After)
			p.ports[id] = now
		}
		if was != nil && now != nil && sameTable(was, now) {
			p.changeBackends(x, touched[id.Family], was, now)
			continue
		}
		if was != nil {
			for _, v := range p.services(was) {
				before[v.serviceKey] = v
			}
			p.wantOwn(x.held[id.Family], was)
			shared(was.port, func(k elementKey) { touched[id.Family][k]-- })
		}
		if now != nil {
			after = append(after, p.services(now)...)
			p.wantOwn(x.want[id.Family], now)
			shared(now.port, func(k elementKey) { touched[id.Family][k]++ })
		}
	}
	for _, v := range after {
		p.changeService(x, before[v.serviceKey], v)
		delete(before, v.serviceKey)
	}
	for k := range before {
		x.removeService(k)
	}
	for family, keys := range touched {
		for k, more := range keys {
			p.changeShared(x, family, k, more)
		}
	}
	return p.carryOut(ctx, x)
}

// sameTable tells whether two states of a Service port have the same virtual services, and the same elements of their own.
func sameTable(was, now *programmed) bool {
	a, b := was.port.Frontends, now.port.Frontends
	return was.identity == now.identity && was.port.Affinity == now.port.Affinity && was.port.Scheduler == now.port.Scheduler &&
		len(a) == len(b) && len(a) > 0 && &a[0] == &b[0]
}

// changeBackends changes a Service port that differs in its backends only.
func (p *Programmer) changeBackends(x *change, touched map[elementKey]int, was, now *programmed) {
	last := p.services(was)
	for i, v := range p.services(now) {
		p.changeService(x, last[i], v)
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

// changeService has a virtual service made as it should be. was is nil for a new one.
func (p *Programmer) changeService(x *change, was, v *virtual) {
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
			p.removeBackend(x, v, was.Address)
		case !was.Address.IsValid():
			p.addBackend(x, v, is.Address, false)
		}
	}
	p.finishService(x, v)
}

// changeShared counts an element that Service ports share, and changes it when the first one comes or the last one goes.
func (p *Programmer) changeShared(x *change, family model.Family, k elementKey, more int) {
	count := p.shared[family][k]
	becomes := count + more
	p.shared[family][k] = becomes
	if becomes == 0 {
		delete(p.shared[family], k)
	}
	if (count > 0) == (becomes > 0) {
		return
	}
	if k.set == setAddresses {
		a, _ := netip.AddrFromSlice([]byte(k.key))
		if becomes == 0 && p.foreign[a] {
			delete(p.foreign, a)
			return
		}
		if becomes == 0 {
			x.depart = append(x.depart, a)
		} else {
			if !p.arrives(a) {
				return
			}
			x.arrive = append(x.arrive, a)
		}
	}
	if becomes == 0 {
		x.held[family][k] = element{}
	} else {
		x.want[family][k] = element{}
	}
}

func (p *Programmer) wantOwn(to elements, of *programmed) {
	l := p.layouts[of.port.ID.Family]
	own(of.port, of.numbers, l.node.Pods.Of(l.family), func(k elementKey, e element) { to[k] = e })
}

// number gives a number that is not taken: not one that was given up a moment ago, whose connections the kernel may still
// have.
func (p *Programmer) number() uint32 {
	for {
		if p.last++; p.last > maxID {
			p.last = 1
		}
		if !p.taken[p.last] {
			p.taken[p.last] = true
			return p.last
		}
	}
}
