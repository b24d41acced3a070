package ipvs

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/netlink"
	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// lookEvery is the time between two checks of IPVS, which does not report changes.
const lookEvery = 500 * time.Millisecond

// tryEvery is the time between two checks for schedulers that the kernel lacks.
const tryEvery = 30 * time.Second

// lookedAt is the number of IPv4 backends that one check covers, which takes about two
// milliseconds. A virtual service counts as serviceCounts of them. An IPv6 backend, which is read
// by netlink, counts as backendIPv6Counts.
const lookedAt, serviceCounts, backendIPv6Counts = 7000, 50, 4

// Watch calls lost when others change the table, remove addresses from the device or set it down,
// or change virtual services or their backends. It checks virtual services one after the other.
// With many of them, that takes minutes, but it notices at once if all are gone.
//
// Watch also removes the backends whose connections have ended. Without it, removed backends stay,
// without new connections.
func (p *Programmer) Watch(ctx context.Context, lost func(reason string)) {
	var wg sync.WaitGroup
	defer wg.Wait()
	failed := func(of string) func(error) {
		return func(err error) {
			p.options.Log.Warn("Cannot watch for changes by other processes, trying again in a minute", "of", of, "err", err)
		}
	}
	wg.Go(func() {
		p.nft.Watch(ctx, time.Minute, []nft.Table{tableOf(model.IPv4), tableOf(model.IPv6)}, lost, failed("nftables"))
	})
	wg.Go(func() {
		if err := p.device.watcher.Open(); err == nil && p.addressesChanged() {
			lost(addressesLost)
		}
		p.device.watcher.Watch(ctx, time.Minute, p.addressLoss, lost, failed("addresses"))
	})
	p.look(ctx, lost)
}

// addressesLost is what Watch says about changes of addresses, or of deliveryRules.
const addressesLost = "another process changed the addresses of " + Device + " or of the node, or the routing policy"

// look checks what the kernel does not report, until ctx ends, and ends drains.
func (p *Programmer) look(ctx context.Context, lost func(reason string)) {
	look, drain, try := time.Tick(lookEvery), time.Tick(drainEvery), time.Tick(tryEvery)
	for {
		select {
		case <-ctx.Done():
			return
		case <-look:
			if k, owner, ok := p.serviceLost(); ok {
				lost(fmt.Sprintf("another process changed or removed the IPVS virtual service %v of %v", k, owner))
			}
		case now := <-drain:
			p.endDrains(now)
		case <-try:
			p.deliver()
			if name := p.schedulerFound(); name != "" {
				lost("the IPVS scheduler " + name + " has become available")
			}
		}
	}
}

// deliver adds the routes of deliveryTable again if others have removed them. The kernel reports
// that only to those who listen to all changes of routes.
func (p *Programmer) deliver() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, f := range p.families {
		if f.ports != nil {
			f.undelivered = f.device.deliver(f.family)
		}
	}
}

// schedulerFound returns a scheduler that the kernel lacked when it was needed and has now, or "".
func (p *Programmer) schedulerFound() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, f := range p.families {
		for name := range f.lacking {
			if p.ipvs.try(f.family, name, view.Backends{}) == nil {
				return name
			}
		}
	}
	return ""
}

// addressesChanged reports whether relevant addresses differ from those that the last Replace and
// later changes have left.
func (p *Programmer) addressesChanged() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.ContainsFunc(p.families, func(f *family) bool { return f.known && f.addressesChanged() })
}

func (f *family) addressesChanged() bool {
	held, elsewhere, err := f.device.read(f.family)
	if err != nil || !f.device.isUp() || !slices.Equal(nodePortAddresses(f.layout.node, elsewhere), f.nodeAddresses) {
		return true
	}
	for k := range f.shared {
		a, ok := k.address()
		if !ok {
			continue
		}
		if foreign := f.foreign[a]; held[a] == foreign || foreign != (elsewhere[a] || foreign && f.device.nodesOwn(a)) {
			return true
		}
	}
	return false
}

// serviceLost checks some of the virtual services, different ones each time. It returns one that is
// not as it was made. ok is false if it finds none.
func (p *Programmer) serviceLost() (_ serviceKey, owner view.ServicePortID, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.unseen) == 0 {
		for _, f := range p.families {
			p.unseen = slices.AppendSeq(p.unseen, maps.Keys(f.ports))
		}
	}
	for looked := 0; looked < lookedAt && len(p.unseen) > 0; p.unseen = p.unseen[1:] {
		f := p.family(p.unseen[0].Family)
		known := f.ports[p.unseen[0]]
		if !f.known || known == nil || known.refused {
			continue
		}
		counts := 1
		if f.family == model.IPv6 {
			counts = backendIPv6Counts
		}
		for _, v := range f.services(known) {
			looked += serviceCounts + v.backends.Len()*counts
			if f.lacking[v.scheduler] {
				v.scheduler = p.options.Scheduler
			}
			if !f.holds(v) {
				return v.serviceKey, v.owner, true
			}
		}
		for _, k := range f.theirsOf(known.port) {
			looked += serviceCounts
			if theirs, err := p.isTheirs(k); err == nil && !theirs {
				return k, known.port.ID, true
			}
		}
	}
	return serviceKey{}, owner, false
}

// holds reports whether the kernel has a virtual service as it was made, apart from backends
// without new connections.
func (f *family) holds(v *virtual) bool {
	have, err := f.ipvs.readService(v.serviceKey)
	if err != nil || !have.are(v.settings()) {
		return false
	}
	if f.looked, err = f.ipvs.readBackends(f.looked[:0], v.serviceKey); err != nil {
		return false
	}
	found := 0
	for _, b := range f.looked {
		switch wanted := v.backends.Contains(b.address); {
		case wanted && !b.serves(), !wanted && b.weight > 0:
			return false
		case wanted:
			found++
		}
	}
	return found == v.backends.Len()
}

// addressLoss returns addressesLost if a notification is about one of these changes, and ""
// otherwise:
//
//   - The device is down.
//   - An address that should be on the device is not.
//   - One of the node's own addresses changes that has NodePorts or is a Service's as well.
//
// It also returns it if one of deliveryRules is removed.
func (p *Programmer) addressLoss(m netlink.Message) string {
	if r, ok := netlink.RuleOf(m); ok && m.Kind == unix.RTM_DELRULE && slices.Contains(deliveryRules, r) {
		return addressesLost
	}
	if p.concerns(m) && p.addressesChanged() {
		return addressesLost
	}
	return ""
}

// concerns reports whether addressesChanged may return true after a notification. The kernel also
// reports the addresses that this package adds. There may be thousands of them, so they must not
// lead to reading all addresses.
func (p *Programmer) concerns(m netlink.Message) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch m.Kind {
	case unix.RTM_NEWLINK:
		return len(m.Body) >= unix.SizeofIfInfomsg && int(netlink.Uint32(m.Body[4:8])) == p.device.index()
	case unix.RTM_DELADDR, unix.RTM_NEWADDR:
		a, ok := netlink.AddressOf(m)
		f := p.family(model.FamilyOf(a.Addr()))
		if !ok || f == nil || !f.known || a.Link == p.device.index() && m.Kind == unix.RTM_NEWADDR {
			return false
		}
		return f.shared[elementKey{setAddresses, addressKey(a.Addr())}] > 0 || hasNodePorts(f.layout.node, a.Addr())
	}
	return false
}
