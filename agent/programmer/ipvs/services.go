package ipvs

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"time"

	mobyipvs "github.com/moby/ipvs"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// Flags of a virtual service (include/uapi/linux/ip_vs.h).
const (
	persistent = 0x1
	// hashPort has the scheduler mh take the source's port into account as well, so that one client's connections
	// go to different backends.
	hashPort = 0x10
)

// ourFlags are the flags that we set; others are the kernel's.
const ourFlags = persistent | hashPort

// serviceKey names a virtual service of IPVS: by the number in its mark or, if that is 0, by address and port.
type serviceKey struct {
	family   model.Family
	number   uint32
	address  netip.Addr
	protocol model.Protocol
	port     uint16
}

// virtual is a virtual service of IPVS.
type virtual struct {
	serviceKey
	scheduler string
	affinity  time.Duration
	backends  []view.Backend
	owner     view.ServicePortID
}

// moby gives the name as the library has it.
func (k serviceKey) moby() *mobyipvs.Service {
	s := &mobyipvs.Service{AddressFamily: unix.AF_INET, Netmask: 1<<32 - 1}
	if k.family == model.IPv6 {
		s.AddressFamily, s.Netmask = unix.AF_INET6, 128
	}
	if k.number != 0 {
		s.FWMark = markTag | k.number
	} else {
		s.Address, s.Protocol, s.Port = k.address.AsSlice(), uint16(protocolNumber(k.protocol)), k.port
	}
	return s
}

// moby gives it as the library has it.
func (v *virtual) moby() *mobyipvs.Service {
	s := v.serviceKey.moby()
	s.SchedName = v.scheduler
	if v.scheduler == "mh" {
		s.Flags |= hashPort
	}
	if v.affinity > 0 {
		s.Flags |= persistent
		s.Timeout = uint32(v.affinity / time.Second)
	}
	return s
}

// String names it as ipvsadm does.
func (k serviceKey) String() string {
	if k.number != 0 {
		return fmt.Sprintf("FWM %d", markTag|k.number)
	}
	return fmt.Sprintf("%v %v", k.protocol, netip.AddrPortFrom(k.address, k.port))
}

// same tells whether the kernel has the service as it should be.
func same(have, want *mobyipvs.Service) bool {
	return have.SchedName == want.SchedName && have.Flags&ourFlags == want.Flags && (want.Flags&persistent == 0 || have.Timeout == want.Timeout)
}

func destination(a netip.AddrPort, weight int) *mobyipvs.Destination {
	return &mobyipvs.Destination{
		Address: a.Addr().AsSlice(), Port: a.Port(), Weight: weight, ConnectionFlags: mobyipvs.ConnectionFlagMasq,
	}
}

func addressOf(d *mobyipvs.Destination) netip.AddrPort {
	a, _ := netip.AddrFromSlice(d.Address)
	return netip.AddrPortFrom(a.Unmap(), d.Port)
}

// keyOf names a virtual service that the kernel has; ok is false for one of a protocol that no Service has.
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
	for _, p := range []model.Protocol{model.TCP, model.UDP, model.SCTP} {
		if s.Protocol == uint16(protocolNumber(p)) {
			k.protocol = p
			return k, true
		}
	}
	return k, false
}

// heldService is what the kernel has of a virtual service.
type heldService struct {
	service *mobyipvs.Service
	weights map[netip.AddrPort]int
}

// readServices gives the virtual services that are ours: those with our marks, and of others the ones that named tells.
func (p *Programmer) readServices(named func(serviceKey) bool) (map[serviceKey]*heldService, error) {
	all, err := p.ipvs.GetServices()
	if err != nil {
		return nil, fmt.Errorf("read IPVS' virtual services: %w", err)
	}
	held := map[serviceKey]*heldService{}
	for _, s := range all {
		k, ok := keyOf(s)
		if !ok || k.number == 0 && !named(k) {
			continue
		}
		destinations, err := p.ipvs.GetDestinations(s)
		if err != nil {
			return nil, fmt.Errorf("read the destinations of IPVS' virtual service %v: %w", k, err)
		}
		h := &heldService{service: s, weights: make(map[netip.AddrPort]int, len(destinations))}
		for _, d := range destinations {
			h.weights[addressOf(d)] = d.Weight
		}
		held[k] = h
	}
	return held, nil
}

// removal is a backend that gets no new connections any more.
type removal struct {
	service serviceKey
	backend netip.AddrPort
	// atOnce: its connections are not waited for.
	atOnce bool
}

// drainKey names a backend whose connections are waited for.
type drainKey struct {
	service serviceKey
	backend netip.AddrPort
}

// services gives the virtual services of a Service port. Without affinity it is one for each set of backends, by mark,
// for all of its frontends. IPVS knows no affinity for marks where the port changes, too (ip_vs_sched_persist keeps the
// port that the packet came for): so with affinity it is one for each address, to which Others' target applies.
func (p *Programmer) services(of *programmed) (list []*virtual) {
	if of == nil {
		return nil
	}
	id := of.port.ID
	add := func(k serviceKey, backends []view.Backend) {
		k.family = id.Family
		list = append(list, &virtual{serviceKey: k, scheduler: p.options.Scheduler, affinity: of.port.Affinity, backends: backends, owner: id})
	}
	if of.port.Affinity == 0 {
		for r, number := range of.numbers {
			if number != 0 {
				add(serviceKey{number: number}, role(r).backends(of.port))
			}
		}
		return list
	}
	for _, f := range of.port.Frontends {
		addresses := []netip.Addr{f.Address}
		if f.Kind == view.NodePort {
			addresses = p.nodeAddresses[id.Family]
		}
		for _, a := range addresses {
			add(serviceKey{address: a, protocol: id.Protocol, port: f.Port}, affinitySet(of.port, f))
		}
	}
	return list
}

// affinitySet gives the backends that a frontend with affinity leads to: those for Others unless these are not served.
func affinitySet(port *view.ServicePort, f view.Frontend) []view.Backend {
	for _, r := range []view.Route{f.Others, f.Node, f.Pods} {
		switch r.To {
		case view.Cluster:
			return port.Cluster
		case view.Local:
			return port.Local
		}
	}
	return nil
}

// ensureService makes a virtual service, or changes it if the kernel has another; have is nil if it has none.
func (p *Programmer) ensureService(x *change, v *virtual, have *mobyipvs.Service) error {
	wanted := v.moby()
	if have != nil && same(have, wanted) {
		return nil
	}
	put := p.ipvs.NewService
	if have != nil {
		put = p.ipvs.UpdateService
	}
	err := put(wanted)
	if errors.Is(err, unix.EEXIST) {
		err = p.ipvs.UpdateService(wanted)
	}
	if err != nil {
		return x.port(v.owner, fmt.Errorf("make IPVS' virtual service %v with the scheduler %s: %w", v.serviceKey, v.scheduler, err))
	}
	return nil
}

// addBackend has a backend take new connections.
func (p *Programmer) addBackend(k serviceKey, b netip.AddrPort) error {
	first, second := p.ipvs.NewDestination, p.ipvs.UpdateDestination
	if _, draining := p.draining[drainKey{k, b}]; draining {
		first, second = second, first
	}
	delete(p.draining, drainKey{k, b})
	err := first(k.moby(), destination(b, 1))
	if errors.Is(err, unix.EEXIST) || errors.Is(err, unix.ENOENT) {
		err = second(k.moby(), destination(b, 1))
	}
	if err != nil {
		return fmt.Errorf("add backend %v to IPVS: %w", b, err)
	}
	return nil
}

// removeBackend has a backend take no new connections. Those that it has go on for as long as they last, up to a limit.
func (p *Programmer) removeBackend(r removal) error {
	key := drainKey{r.service, r.backend}
	if r.atOnce {
		delete(p.draining, key)
		return p.deleteBackend(r.service, r.backend)
	}
	err := p.ipvs.UpdateDestination(r.service.moby(), destination(r.backend, 0))
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("drain backend %v of IPVS: %w", r.backend, err)
	}
	p.drain(key)
	return nil
}

func (p *Programmer) deleteBackend(k serviceKey, b netip.AddrPort) error {
	if err := p.ipvs.DelDestination(k.moby(), destination(b, 0)); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("remove backend %v from IPVS: %w", b, err)
	}
	return nil
}

// waits tells whether a protocol's connections are waited for: UDP has none that end, and SCTP is as in kube-proxy.
func waits(p model.Protocol) bool { return p == model.TCP }

// difference calls added and removed for what two ascending lists of backends do not share.
func difference(before, after []view.Backend, added, removed func(netip.AddrPort)) {
	for len(before) > 0 || len(after) > 0 {
		var order int
		switch {
		case len(before) == 0:
			order = 1
		case len(after) == 0:
			order = -1
		default:
			order = cmp.Or(before[0].Address.Addr().Compare(after[0].Address.Addr()), cmp.Compare(before[0].Address.Port(), after[0].Address.Port()))
		}
		if order <= 0 {
			if order < 0 {
				removed(before[0].Address)
			}
			before = before[1:]
		}
		if order >= 0 {
			if order > 0 {
				added(after[0].Address)
			}
			after = after[1:]
		}
	}
}
