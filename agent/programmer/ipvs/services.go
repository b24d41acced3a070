package ipvs

import (
	"cmp"
	"errors"
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"time"

	mobyipvs "github.com/moby/ipvs"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// Flags of a virtual service, from include/uapi/linux/ip_vs.h.
const (
	persistent = 0x1
	// onePacket makes each packet of UDP a connection of its own. This package never sets it.
	onePacket = 0x4
	// hashOthers makes the schedulers sh and mh choose another backend if the one that they chose gets
	// no new connections. Otherwise they refuse the client.
	hashOthers = 0x8
	// hashPort makes the scheduler mh take the source port into account as well, so that one client's
	// connections go to different backends.
	hashPort = 0x10
	// tagged marks a virtual service by address as one of this package, from its creation to its
	// removal, even if the agent is killed in between. It is a flag for schedulers, and none of them
	// uses it.
	tagged = 0x20
)

// ourFlags are the flags that this package sets or clears. The kernel sets others.
const ourFlags = persistent | onePacket | hashOthers | hashPort | tagged

// serviceKey identifies a virtual service of IPVS, by the number in its mark or, if that is 0, by
// address, protocol and port.
type serviceKey struct {
	family   model.Family
	number   uint32
	address  netip.Addr
	protocol model.Protocol
	port     uint16
}

// virtual is a virtual service as IPVS should hold it.
type virtual struct {
	serviceKey
	scheduler string
	affinity  time.Duration
	backends  view.Backends
	owner     view.ServicePortID
	// fault says why the scheduler is not the wanted one. nil means that it is.
	fault error
}

// settings are what a virtual service has beside its key and its backends.
type settings struct {
	scheduler string
	flags     uint32
	timeout   uint32 // of affinity, in seconds
	// netmask says which clients count as one for affinity: a mask for IPv4, and a length for IPv6.
	netmask uint32
}

func (v *virtual) settings() settings {
	s := settings{scheduler: v.scheduler, netmask: ^uint32(0)}
	if v.family == model.IPv6 {
		s.netmask = 128
	}
	switch v.scheduler {
	case "sh":
		s.flags = hashOthers
	case "mh":
		s.flags = hashOthers | hashPort
	}
	if v.number == 0 {
		s.flags |= tagged
	}
	if v.affinity > 0 {
		s.flags |= persistent
		s.timeout = uint32(v.affinity / time.Second)
	}
	return s
}

// String returns the name that ipvsadm uses.
func (k serviceKey) String() string {
	if k.number != 0 {
		return fmt.Sprintf("FWM %d", markTag|k.number)
	}
	return fmt.Sprintf("%v %v", k.protocol, netip.AddrPortFrom(k.address, k.port))
}

// are reports whether settings that the kernel holds are as they should be.
func (s settings) are(want settings) bool {
	s.flags &= ourFlags
	if want.flags&persistent == 0 {
		s.timeout, s.netmask = want.timeout, want.netmask
	}
	return s == want
}

// ours returns the keys of the virtual services that belong to this package.
func (b *balancer) ours() (keys []serviceKey, err error) {
	all, err := b.GetServices()
	if err != nil {
		return nil, fmt.Errorf("read IPVS' virtual services: %w", err)
	}
	for _, s := range all {
		if k, ok := keyOf(s); ok && isOurs(k, s) {
			keys = append(keys, k)
		}
	}
	return keys, nil
}

func isOurs(k serviceKey, s *mobyipvs.Service) bool { return k.number != 0 || s.Flags&tagged != 0 }

// removeServices removes virtual services if they exist.
func (m *machine) removeServices(keys []serviceKey) error {
	x := newChange()
	for _, k := range keys {
		x.removeService(k)
	}
	return (&family{machine: m}).run(x, x.after)
}

// keyOf returns the key of a virtual service in the kernel. ok is false if it has another mark, or
// a protocol that no Service has.
func keyOf(s *mobyipvs.Service) (k serviceKey, ok bool) {
	k.family = model.IPv4
	if s.AddressFamily == unix.AF_INET6 {
		k.family = model.IPv6
	}
	if s.FWMark != 0 {
		k.number = s.FWMark &^ markTagMask
		return k, s.FWMark&markTagMask == markTag
	}
	k.address, _ = netip.AddrFromSlice(s.Address)
	k.port = s.Port
	k.protocol, ok = protocols[s.Protocol]
	return k, ok
}

var protocols = map[uint16]model.Protocol{
	unix.IPPROTO_TCP: model.TCP, unix.IPPROTO_UDP: model.UDP, unix.IPPROTO_SCTP: model.SCTP,
}

// ascending sorts backends by their addresses, and returns them.
func ascending(list []heldBackend) []heldBackend {
	slices.SortFunc(list, func(a, b heldBackend) int { return a.address.Compare(b.address) })
	return list
}

// heldService is what the kernel holds of a virtual service.
type heldService struct {
	settings
	backends []heldBackend // in ascending order
}

// readServices returns the virtual services of this package and IP family. It records those of
// others in f.theirs.
func (f *family) readServices(all []*mobyipvs.Service) (held map[serviceKey]*heldService, err error) {
	f.theirs, held = map[serviceKey]bool{}, map[serviceKey]*heldService{}
	var space []heldBackend
	for _, s := range all {
		k, ok := keyOf(s)
		if !ok || k.family != f.family {
			continue
		}
		if !isOurs(k, s) {
			if f.isExcluded(k) {
				f.theirs[k] = true
			}
			continue
		}
		if space, err = f.ipvs.readBackends(space[:0], k); err != nil {
			return nil, err
		}
		held[k] = &heldService{settings{s.SchedName, s.Flags, s.Timeout, s.Netmask}, ascending(slices.Clone(space))}
	}
	return held, f.leaveOutKubeProxys()
}

// isExcluded reports whether a virtual service is in one of ExcludeCIDRs.
func (m *machine) isExcluded(k serviceKey) bool {
	contains := func(c netip.Prefix) bool { return c.Contains(k.address) }
	return k.number == 0 && slices.ContainsFunc(m.options.ExcludeCIDRs, contains)
}

// isTheirs reports whether a virtual service exists and belongs to others.
func (m *machine) isTheirs(k serviceKey) (bool, error) {
	have, err := m.ipvs.readService(k)
	if errors.Is(err, unix.ESRCH) {
		return false, nil
	}
	return err == nil && have.flags&tagged == 0, err
}

// noteTheirs adds to f.theirs the virtual services of others that these Service ports had or may
// get, and that appeared since the last Replace.
func (f *family) noteTheirs(changes []view.Change) error {
	if len(f.options.ExcludeCIDRs) == 0 {
		return nil
	}
	more := false
	for _, c := range changes {
		was := f.ports[c.ID()]
		for _, port := range []*view.ServicePort{c.Before, c.After} {
			if port == nil || port.Affinity == 0 && (was == nil || !was.addressed) {
				continue
			}
			for k := range f.byAddress(port) {
				if f.theirs[k] || !f.isExcluded(k) {
					continue
				}
				var err error
				if f.theirs[k], err = f.isTheirs(k); err != nil {
					return err
				}
				more = more || f.theirs[k]
			}
		}
	}
	if !more {
		return nil
	}
	return f.leaveOutKubeProxys()
}

// leaveOutKubeProxys removes kube-proxy's virtual services from f.theirs, because its Services are
// to be served here.
func (f *family) leaveOutKubeProxys() error {
	if len(f.theirs) == 0 {
		return nil
	}
	kubeProxys, err := f.kubeProxyServices()
	for _, k := range kubeProxys {
		delete(f.theirs, k)
	}
	return err
}

// theirsOf returns the virtual services that a Service port needs and that belong to others. At
// their addresses, the others serve connections.
func (f *family) theirsOf(port *view.ServicePort) (keys []serviceKey) {
	if port.Affinity == 0 || len(f.theirs) == 0 {
		return nil
	}
	for k := range f.byAddress(port) {
		if f.theirs[k] {
			keys = append(keys, k)
		}
	}
	return keys
}

// services returns the virtual services of a Service port.
//
// Without affinity, there is one for each set of backends, by mark, for all frontends. With
// affinity by mark, IPVS does not change the port of a packet: ip_vs_sched_persist keeps the port
// for which the packet came. So with affinity, there is one virtual service for each address. It
// leads everybody to the set for others. If affinity was added or removed, the virtual services
// from before stay, without backends.
func (f *family) services(of *programmed) (list []*virtual) {
	port := of.port
	add := func(k serviceKey, affinity time.Duration, backends view.Backends) {
		v := &virtual{serviceKey: k, affinity: affinity, backends: backends, owner: port.ID}
		v.scheduler, v.fault = f.scheduler(port, backends.Len())
		list = append(list, v)
	}
	for r, number := range of.numbers {
		k := serviceKey{family: port.ID.Family, number: number}
		switch {
		case number == 0:
		case port.Affinity == 0:
			add(k, 0, role(r).backends(port))
		default:
			add(k, 0, view.Backends{})
		}
	}
	if !of.addressed {
		return list
	}
	for k, at := range f.byAddress(port) {
		if !f.theirs[k] {
			add(k, port.Affinity, affinitySet(port, at))
		}
	}
	return list
}

// byAddress yields the keys of the virtual services by address that a Service port may have, with
// their frontends.
func (f *family) byAddress(port *view.ServicePort) iter.Seq2[serviceKey, view.Frontend] {
	return func(yield func(serviceKey, view.Frontend) bool) {
		for _, at := range port.Frontends {
			addresses := []netip.Addr{at.Address}
			if at.Kind == view.NodePort {
				addresses = f.nodeAddresses
			}
			for _, a := range addresses {
				if !yield(serviceKey{family: f.family, address: a, protocol: port.ID.Protocol, port: at.Port}, at) {
					return
				}
			}
		}
	}
}

// affinitySet returns the backends that a frontend with affinity leads to: those for others or, if
// others are not served, those for the node or for pods. Without affinity, there are none.
func affinitySet(port *view.ServicePort, f view.Frontend) view.Backends {
	if port.Affinity == 0 {
		return view.Backends{}
	}
	for _, r := range []view.Route{f.Others, f.Node, f.Pods} {
		if r.To.Leads() {
			return port.Backends(r.To)
		}
	}
	return view.Backends{}
}

// ensureService adds the command that creates a virtual service, or changes it if the kernel has a
// different one. have is zero if the kernel has none. A change to mh comes after backends were
// removed, because mh only has room for a limited number of them.
func (x *change) ensureService(v *virtual, have settings) {
	c := command{kind: commandNewService, service: v.serviceKey, virtual: v, owner: v.owner}
	if have != (settings{}) {
		if have.are(v.settings()) {
			return
		}
		c.kind = commandSetService
		if v.scheduler == "mh" && have.scheduler != "mh" {
			x.last = append(x.last, c)
			return
		}
	}
	x.before = append(x.before, c)
}

// addBackend adds the command that makes a backend take new connections. held means that the kernel
// has the backend already.
func (f *family) addBackend(x *change, v *virtual, b netip.AddrPort, held bool) {
	kind := byte(commandNewBackend)
	if f.draining.stop(v.serviceKey, b) || held {
		kind = commandSetBackend
	}
	x.before = append(x.before, command{kind: kind, service: v.serviceKey, backend: b, weight: 1, owner: v.owner})
}

// removeBackend adds the command that makes a backend take no new connections. If the virtual
// service waits, its TCP connections go on until they end or the limit passes. Otherwise the
// backend is removed.
func (f *family) removeBackend(x *change, v *virtual, b netip.AddrPort) {
	if !v.waits() {
		x.after = append(x.after, command{kind: commandDelBackend, service: v.serviceKey, backend: b})
		return
	}
	f.draining.begin(v.serviceKey, b, f.options.DrainLimit)
	x.after = append(x.after, command{kind: commandSetBackend, service: v.serviceKey, backend: b})
}

// adopt removes the backends that came with virtual services of others, such as kube-proxy's. IPVS
// can have only one virtual service for an address and port, so this package took them over.
func (f *family) adopt(x *change) error {
	for _, v := range x.adopted {
		held, err := f.ipvs.readBackends(nil, v.serviceKey)
		if err != nil {
			return err
		}
		f.replaceBackends(x, v, ascending(held))
	}
	return nil
}

// removeService adds the command that removes a virtual service with all of its backends.
func (x *change) removeService(k serviceKey) {
	x.gone = append(x.gone, k)
	x.after = append(x.after, command{kind: commandDelService, service: k})
}

// waits reports whether connections to removed backends may go on. UDP flows do not end, so there
// is nothing to wait for, and SCTP is treated as in kube-proxy. The scheduler dh would refuse the
// clients that its table assigns to such a backend.
func (v *virtual) waits() bool { return v.owner.Protocol == model.TCP && v.scheduler != "dh" }

// shTable and mhTable are the number of destinations for which the kernel's table of a virtual
// service has room. The kernel's options CONFIG_IP_VS_SH_TAB_BITS and CONFIG_IP_VS_MH_TAB_INDEX set
// them, and these are the defaults. A backend beyond mh's table gets no connections. If backends
// beyond it are removed, the table still holds some of them, and mh still leads connections to
// those.
const (
	shTable = 1 << 8
	mhTable = 4093
)

// mhDraining is the number of draining backends beside which mh certainly finds another one. It
// tries as many random places as its table has.
const mhDraining = 256

// scheduler returns the scheduler for a Service port with this number of backends. fault says why
// it is not the wanted one.
func (m *machine) scheduler(port *view.ServicePort, backends int) (name string, fault error) {
	name = cmp.Or(port.Scheduler, m.options.Scheduler)
	if name != "mh" || backends <= mhTable {
		return name, nil
	}
	if name = m.options.Scheduler; name == "mh" {
		name = DefaultScheduler
	}
	return name, fmt.Errorf("the IPVS scheduler mh supports at most %d backends, and there are %d: using %s",
		mhTable, backends, name)
}

// room reports whether a scheduler certainly finds a backend that takes connections. Schedulers
// that hash keep draining backends in their tables.
func room(scheduler string, backends, draining int) bool {
	switch scheduler {
	case "dh":
		return draining == 0
	case "sh":
		return backends+draining <= shTable
	case "mh":
		return draining <= mhDraining && backends+draining <= mhTable
	}
	return true
}

// makeRoom removes the draining backends if the scheduler has no room for them. It does nothing if
// there are no other backends, because then there are no new connections.
func (f *family) makeRoom(x *change, v *virtual) {
	draining := f.draining[v.serviceKey]
	if v.backends.Len() == 0 || room(v.scheduler, v.backends.Len(), len(draining)) {
		return
	}
	for b := range draining {
		x.after = append(x.after, command{kind: commandDelBackend, service: v.serviceKey, backend: b})
	}
	delete(f.draining, v.serviceKey)
}
