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

// virtual is a virtual service of IPVS.
type virtual struct {
	number    uint32
	family    model.Family
	scheduler string
	affinity  time.Duration
}

// moby gives it as the library has it.
func (v virtual) moby() *mobyipvs.Service {
	s := &mobyipvs.Service{
		FWMark: markTag | v.number, AddressFamily: unix.AF_INET, Netmask: 1<<32 - 1, SchedName: v.scheduler,
	}
	if v.family == model.IPv6 {
		s.AddressFamily, s.Netmask = unix.AF_INET6, 128
	}
	if v.scheduler == "mh" {
		s.Flags |= hashPort
	}
	if v.affinity > 0 {
		s.Flags |= persistent
		s.Timeout = uint32(v.affinity / time.Second)
	}
	return s
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

// held is what the kernel has of a virtual service.
type heldService struct {
	service *mobyipvs.Service
	weights map[netip.AddrPort]int
}

// readServices gives all virtual services of ours.
func (p *Programmer) readServices() (map[model.Family]map[uint32]*heldService, error) {
	all, err := p.ipvs.GetServices()
	if err != nil {
		return nil, fmt.Errorf("read IPVS' virtual services: %w", err)
	}
	held := map[model.Family]map[uint32]*heldService{model.IPv4: {}, model.IPv6: {}}
	for _, s := range all {
		if s.FWMark&markTagMask != markTag {
			continue
		}
		destinations, err := p.ipvs.GetDestinations(s)
		if err != nil {
			return nil, fmt.Errorf("read the destinations of IPVS' virtual service %#x: %w", s.FWMark, err)
		}
		h := &heldService{service: s, weights: make(map[netip.AddrPort]int, len(destinations))}
		for _, d := range destinations {
			h.weights[addressOf(d)] = d.Weight
		}
		family := model.IPv4
		if s.AddressFamily == unix.AF_INET6 {
			family = model.IPv6
		}
		held[family][s.FWMark&^markTagMask] = h
	}
	return held, nil
}

// removal is a backend that gets no new connections any more.
type removal struct {
	service virtual
	backend netip.AddrPort
	// at once: its connections are not waited for.
	atOnce bool
}

// drainKey names a backend whose connections are waited for.
type drainKey struct {
	service virtual
	backend netip.AddrPort
}

// addBackend has a backend take new connections.
func (p *Programmer) addBackend(v virtual, b netip.AddrPort) error {
	key := drainKey{v.identity(), b}
	if _, draining := p.draining[key]; draining {
		if err := p.ipvs.UpdateDestination(v.moby(), destination(b, 1)); err == nil {
			delete(p.draining, key)
			return nil
		}
	}
	err := p.ipvs.NewDestination(v.moby(), destination(b, 1))
	if errors.Is(err, unix.EEXIST) {
		err = p.ipvs.UpdateDestination(v.moby(), destination(b, 1))
	}
	delete(p.draining, key)
	if err != nil {
		return fmt.Errorf("add backend %v to IPVS: %w", b, err)
	}
	return nil
}

// removeBackend has a backend take no new connections. Those that it has go on for as long as they last, up to a limit.
func (p *Programmer) removeBackend(r removal) error {
	if r.atOnce {
		delete(p.draining, drainKey{r.service.identity(), r.backend})
		return p.deleteBackend(r.service, r.backend)
	}
	err := p.ipvs.UpdateDestination(r.service.moby(), destination(r.backend, 0))
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("drain backend %v of IPVS: %w", r.backend, err)
	}
	p.drain(drainKey{r.service.identity(), r.backend})
	return nil
}

func (p *Programmer) deleteBackend(v virtual, b netip.AddrPort) error {
	if err := p.ipvs.DelDestination(v.moby(), destination(b, 0)); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("remove backend %v from IPVS: %w", b, err)
	}
	return nil
}

// identity leaves only what names the virtual service.
func (v virtual) identity() virtual { return virtual{number: v.number, family: v.family} }

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
