package ipvs

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	mdnetlink "github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/xtables"
)

// lookEvery is the time between two checks of IPVS, which does not report changes.
const lookEvery = 500 * time.Millisecond

// drainEvery is the time between two checks for draining backends that have no connections left.
const drainEvery = 2 * time.Second

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
	p.watch(ctx, lost, p.followTables, followAddresses, time.Minute)
}

// dialer opens a socket for notifications.
type dialer func() (*mdnetlink.Conn, error)

func (p *Programmer) followTables() (*mdnetlink.Conn, error) {
	conn, err := follow(unix.NETLINK_NETFILTER, 1<<(unix.NFNLGRP_NFTABLES-1))
	if err != nil {
		return nil, err
	}
	filter, err := xtables.WithoutOwn(p.tables.port)
	if err == nil {
		err = conn.SetBPF(filter)
	}
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return conn, nil
}

func followAddresses() (*mdnetlink.Conn, error) {
	return follow(unix.NETLINK_ROUTE, unix.RTMGRP_LINK|unix.RTMGRP_IPV4_IFADDR|unix.RTMGRP_IPV6_IFADDR)
}

// watch is Watch. If a socket fails, it opens the socket again after a pause.
func (p *Programmer) watch(ctx context.Context, lost func(reason string), tables, addresses dialer, pause time.Duration) {
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		p.keepNoticing(ctx, losses{"nftables table " + Table, tables, p.rulesetChanged, changesTable}, pause, lost)
	})
	wg.Go(func() {
		p.keepNoticing(ctx, losses{"the addresses of " + Device + " or of the node", addresses, p.addressesChanged, p.addressLost}, pause, lost)
	})
	tried, drained := time.Now(), time.Now()
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			if k, owner, ok := p.serviceLost(); ok {
				lost(fmt.Sprintf("others have changed or removed IPVS' virtual service %v of %v", k, owner))
			}
			if now.Sub(drained) >= drainEvery {
				drained = now
				p.endDrains(now)
			}
			if now.Sub(tried) >= tryEvery {
				tried = now
				if name := p.schedulerFound(); name != "" {
					lost("the node has the IPVS scheduler " + name + " now")
				}
			}
		}
	}
}

// schedulerFound returns a scheduler that the kernel lacked when it was needed and has now, or "".
func (p *Programmer) schedulerFound() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, f := range p.families {
		for name := range f.lacking {
			if p.tryScheduler(f.family, name) == nil {
				return name
			}
		}
	}
	return ""
}

// follow opens a socket for notifications.
func follow(protocol int, groups uint32) (*mdnetlink.Conn, error) {
	conn, err := mdnetlink.Dial(protocol, &mdnetlink.Config{Groups: groups})
	if err != nil {
		return nil, err
	}
	if err := conn.SetReadBuffer(xtables.NotificationBuffer); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return conn, nil
}

// losses describes one kind of changes by others.
type losses struct {
	of      string // what others change
	dial    dialer
	changed func() bool // reports whether others have changed something since the last Replace began
	isLoss  func(mdnetlink.Message) bool
}

// keepNoticing calls lost for changes until ctx ends, and for those from before the call.
func (p *Programmer) keepNoticing(ctx context.Context, l losses, pause time.Duration, lost func(reason string)) {
	for {
		conn, err := l.dial()
		if err == nil {
			if l.changed() {
				lost("others have changed " + l.of + " unseen")
			}
			err = notice(ctx, conn, l, lost)
		}
		if ctx.Err() != nil {
			return
		}
		p.log.Warn("changes that others make can't be seen; trying again", "of", l.of, "in", pause, "err", err)
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
	}
}

// notice is keepNoticing until the socket fails. It closes the socket.
func notice(ctx context.Context, conn *mdnetlink.Conn, l losses, lost func(reason string)) error {
	stop := context.AfterFunc(ctx, func() {
		_ = conn.Close() // ends Receive
	})
	defer func() {
		if stop() {
			_ = conn.Close() // there is no remedy
		}
	}()
	for {
		messages, err := conn.Receive()
		switch {
		case errors.Is(err, unix.ENOBUFS):
			lost("there were more changes than could be followed")
		case err != nil:
			return err
		case slices.ContainsFunc(messages, l.isLoss):
			lost("others changed " + l.of)
		}
	}
}

// rulesetChanged reports whether others have changed nftables, in any table, since the last Replace
// began.
func (p *Programmer) rulesetChanged() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	changed, err := p.tables.othersWrote()
	return p.anyKnown() && (changed || err != nil)
}

// anyKnown reports whether it is known for any IP family what the kernel holds.
func (p *Programmer) anyKnown() bool {
	return slices.ContainsFunc(p.families, func(f *family) bool { return f.known })
}

// addressesChanged reports whether relevant addresses differ from those that the last Replace and
// later changes have left.
func (p *Programmer) addressesChanged() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.ContainsFunc(p.families, func(f *family) bool { return f.known && f.addressesChanged() })
}

func (f *family) addressesChanged() bool {
	if !f.isDeviceUp() {
		return true
	}
	held, err := f.deviceAddresses(f.device, domain(f.family))
	elsewhere, errElsewhere := f.addressesElsewhere()
	if err != nil || errElsewhere != nil || !f.sameNodePorts(elsewhere) {
		return true
	}
	for k := range f.shared {
		if k.set != setAddresses {
			continue
		}
		a, _ := netip.AddrFromSlice([]byte(k.key))
		if foreign := f.foreign[a]; held[a] == foreign || foreign != (elsewhere[a] || foreign && f.nodesOwn(a)) {
			return true
		}
	}
	return false
}

// sameNodePorts reports whether NodePorts are on the same addresses as at the last Replace, given
// the node's own addresses now.
func (f *family) sameNodePorts(own map[netip.Addr]bool) bool {
	return slices.Equal(nodePortAddresses(f.layout.node, own), f.nodeAddresses)
}

// isDeviceUp reports whether the device exists and is up. Otherwise its addresses are not the
// node's.
func (m *machine) isDeviceUp() bool {
	link, err := m.links.LinkByName(Device)
	return err == nil && link.Attrs().Flags&net.FlagUp != 0
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
		if len(f.theirs) == 0 || known.port.Affinity == 0 {
			continue
		}
		for k := range f.byAddress(known.port) {
			if !f.theirs[k] {
				continue
			}
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
	have, err := f.readService(v.serviceKey)
	if err != nil || !same(&have, v.moby()) {
		return false
	}
	if f.looked, err = f.readBackends(f.looked[:0], v.serviceKey); err != nil {
		return false
	}
	found := 0
	for _, b := range f.looked {
		switch wanted := v.backends.Contains(b.address); {
		case wanted != (b.weight > 0):
			return false
		case wanted:
			found++
		}
	}
	return found == v.backends.Len()
}

// changesTable reports whether a notification is about a change of this package's tables.
func changesTable(m mdnetlink.Message) bool {
	if m.Header.Type>>8 != unix.NFNL_SUBSYS_NFTABLES || m.Header.Type&0xff == unix.NFT_MSG_NEWGEN || len(m.Data) < 4 {
		return false
	}
	attributes, err := mdnetlink.UnmarshalAttributes(m.Data[4:])
	if err != nil {
		return false
	}
	// The table's name has the same attribute number in all of them: NFTA_TABLE_NAME, NFTA_CHAIN_TABLE
	// and so on.
	return slices.ContainsFunc(attributes, func(a mdnetlink.Attribute) bool {
		return a.Type == unix.NFTA_TABLE_NAME && string(a.Data) == Table+"\x00"
	})
}

// addressLost reports whether a notification is about one of these changes:
//
//   - The device is down.
//   - An address that should be on the device is not.
//   - One of the node's own addresses changes that has NodePorts or is a Service's as well.
func (p *Programmer) addressLost(m mdnetlink.Message) bool {
	if m.Header.Type == unix.RTM_NEWLINK && len(m.Data) >= unix.SizeofIfInfomsg {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.anyKnown() && int(binary.NativeEndian.Uint32(m.Data[4:])) == p.device.Attrs().Index && !p.isDeviceUp()
	}
	if m.Header.Type != unix.RTM_DELADDR && m.Header.Type != unix.RTM_NEWADDR || len(m.Data) < unix.SizeofIfAddrmsg {
		return false
	}
	attributes, err := mdnetlink.UnmarshalAttributes(m.Data[unix.SizeofIfAddrmsg:])
	if err != nil {
		return false
	}
	i := slices.IndexFunc(attributes, func(a mdnetlink.Attribute) bool { return a.Type == unix.IFA_ADDRESS })
	if i < 0 {
		return false
	}
	address, _ := netip.AddrFromSlice(attributes[i].Data)
	p.mu.Lock()
	defer p.mu.Unlock()
	f := p.family(model.FamilyOf(address))
	if f == nil || !f.known {
		return false
	}
	index := int(binary.NativeEndian.Uint32(m.Data[4:]))
	services := f.shared[elementKey{setAddresses, addressKey(address)}] > 0
	arrived := m.Header.Type == unix.RTM_NEWADDR
	switch {
	case index == f.device.Attrs().Index:
		if !services || arrived { // the kernel also reports the addresses that this package adds
			return false
		}
		held, err := f.deviceAddresses(f.device, domain(f.family))
		return err != nil || !held[address]
	case f.foreign[address]:
		return !f.nodesOwn(address)
	case services && arrived:
		return !f.isKubeProxys(index)
	case hasNodePorts(f.layout.node, address):
		now, err := f.addressesElsewhere()
		return err != nil || !f.sameNodePorts(now)
	}
	return false
}

// drains are the backends whose connections may still end by themselves, by virtual service, each
// with the time when the wait ends.
type drains map[serviceKey]map[netip.AddrPort]time.Time

// drain starts the wait for a backend's connections, unless it has started before.
func (f *family) drain(k serviceKey, b netip.AddrPort) {
	if f.draining[k] == nil {
		f.draining[k] = map[netip.AddrPort]time.Time{}
	}
	if _, already := f.draining[k][b]; !already {
		f.draining[k][b] = time.Now().Add(f.options.DrainLimit)
	}
}

// endDrains removes the draining backends that have no connections any more or whose time is up.
func (p *Programmer) endDrains(now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, f := range p.families {
		f.endDrains(now)
	}
}

func (f *family) endDrains(now time.Time) {
	var held []heldBackend
	var ended []command
	for k, draining := range f.draining {
		var err error
		if held, err = f.readBackends(held[:0], k); err != nil {
			f.log.Warn("backends that get no new connections stay in IPVS for now", "err", err)
			continue
		}
		left := map[netip.AddrPort]time.Time{}
		for _, b := range held {
			until, ok := draining[b.address]
			switch {
			case !ok, b.weight > 0: // the transaction that was to set the weight to 0 was refused
			case b.connections > 0 && now.Before(until):
				left[b.address] = until
			default:
				ended = append(ended, command{kind: commandDelBackend, service: k, backend: b.address})
			}
		}
		if f.draining[k] = left; len(left) == 0 {
			delete(f.draining, k)
		}
	}
	if err := f.run(newChange(), ended); err != nil {
		f.log.Warn("a backend that gets no new connections stays in IPVS; it does no harm", "err", err)
	}
}
