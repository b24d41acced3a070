package ipvs

import (
	"context"
	"encoding/binary"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	mdnetlink "github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/internal/model"
)

// lookEvery is how often IPVS is looked at, which tells of no changes, and how long a backend without connections stays.
const lookEvery = 2 * time.Second

// Watch has the backends removed whose connections have ended, and calls lost when others change our table, take addresses
// from our device or remove virtual services. Without it, backends that are gone stay, without new connections.
func (p *Programmer) Watch(ctx context.Context, lost func(reason string)) {
	p.watch(ctx, p.subscribe(), lost)
}

// subscriptions are the sockets for notifications; nil: there can't be one.
type subscriptions struct{ tables, addresses *mdnetlink.Conn }

func (p *Programmer) subscribe() (s subscriptions) {
	var err error
	if s.tables, err = follow(unix.NETLINK_NETFILTER, 1<<(unix.NFNLGRP_NFTABLES-1)); err != nil {
		p.log.Error("changes that others make to nftables will not be noticed", "err", err)
	}
	if s.addresses, err = follow(unix.NETLINK_ROUTE, unix.RTMGRP_IPV4_IFADDR|unix.RTMGRP_IPV6_IFADDR); err != nil {
		p.log.Error("changes that others make to addresses will not be noticed", "err", err)
	}
	return s
}

func (p *Programmer) watch(ctx context.Context, s subscriptions, lost func(reason string)) {
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { p.notice(ctx, s.tables, p.tables.others, lost) })
	wg.Go(func() { p.notice(ctx, s.addresses, p.addressLost, lost) })
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			if p.servicesLost() {
				lost("a virtual service of IPVS is gone")
			}
			p.endDrains(now)
		}
	}
}

// eventBuffer is how many bytes of notifications may wait.
const eventBuffer = 8 << 20

// follow opens a socket for notifications.
func follow(protocol int, groups uint32) (*mdnetlink.Conn, error) {
	conn, err := mdnetlink.Dial(protocol, &mdnetlink.Config{Groups: groups})
	if err != nil {
		return nil, err
	}
	if err := conn.SetReadBuffer(eventBuffer); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return conn, nil
}

// notice calls lost for notifications that tell of a loss, until ctx ends.
func (p *Programmer) notice(ctx context.Context, conn *mdnetlink.Conn, isLoss func(mdnetlink.Message) bool, lost func(reason string)) {
	if conn == nil {
		return
	}
	stop := context.AfterFunc(ctx, func() {
		_ = conn.Close() // which ends Receive
	})
	defer stop()
	for {
		messages, err := conn.Receive()
		switch {
		case ctx.Err() != nil:
			return
		case errors.Is(err, unix.ENOBUFS):
			lost("there were more changes than could be followed")
		case err != nil:
			p.log.Error("changes that others make will not be noticed any more: restart the agent", "err", err)
			return
		case slices.ContainsFunc(messages, isLoss):
			lost("others changed nftables table " + Table + " or the addresses of " + Device)
		}
	}
}

// servicesLost looks whether one of the virtual services is still there: who removes others' usually removes all.
func (p *Programmer) servicesLost() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, known := range p.ports {
		for _, v := range p.services(known) {
			return p.known && !p.ipvs.IsServicePresent(v.serviceKey.moby())
		}
	}
	return false
}

// others tells whether a notification is about a change of our tables that others made.
func (t *tables) others(m mdnetlink.Message) bool {
	if m.Header.Type>>8 != unix.NFNL_SUBSYS_NFTABLES || m.Header.Type&0xff == unix.NFT_MSG_NEWGEN || m.Header.PID == t.port || len(m.Data) < 4 {
		return false
	}
	attributes, err := mdnetlink.UnmarshalAttributes(m.Data[4:])
	if err != nil {
		return false
	}
	// The name of the table has the same number in all of them: NFTA_TABLE_NAME, NFTA_CHAIN_TABLE...
	return slices.ContainsFunc(attributes, func(a mdnetlink.Attribute) bool {
		return a.Type == unix.NFTA_TABLE_NAME && string(a.Data) == Table+"\x00"
	})
}

// addressLost tells whether a notification is about an address that should be on our device and is not, or one of the
// node's own that matters.
func (p *Programmer) addressLost(m mdnetlink.Message) bool {
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
	onDevice := p.device != nil && binary.NativeEndian.Uint32(m.Data[4:]) == uint32(p.device.Attrs().Index)
	switch {
	case !p.known:
		return false
	case onDevice:
		if p.shared[model.FamilyOf(address)][elementKey{setAddresses, addressKey(address)}] == 0 {
			return false
		}
		held, err := p.deviceAddresses()
		return err != nil || !held[address]
	case p.foreign[address]:
		return !p.nodesOwn(address)
	case hasNodePorts(p.node, address):
		now, err := p.findNodeAddresses(p.node)
		return err != nil || !maps.EqualFunc(now, p.nodeAddresses, slices.Equal)
	}
	return false
}

// drain notes that a backend's connections are waited for, from now on if they were not yet.
func (p *Programmer) drain(k drainKey) {
	if _, already := p.draining[k]; !already {
		p.draining[k] = time.Now().Add(p.options.DrainLimit)
	}
}

// endDrains removes the backends that drain and have no connections any more, or whose time is up.
func (p *Programmer) endDrains(now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	byService := map[serviceKey][]netip.AddrPort{}
	for k := range p.draining {
		byService[k.service] = append(byService[k.service], k.backend)
	}
	var held []heldBackend
	var ended []command
	for service, backends := range byService {
		var err error
		if held, err = p.readBackends(held[:0], service); err != nil {
			p.log.Debug("a virtual service of IPVS is gone whose backends were to be removed", "err", err)
		}
		for _, b := range backends {
			key := drainKey{service, b}
			i := slices.IndexFunc(held, func(h heldBackend) bool { return h.address == b })
			if i >= 0 && held[i].connections > 0 && now.Before(p.draining[key]) {
				continue
			}
			delete(p.draining, key)
			ended = append(ended, command{kind: commandDelBackend, service: service, backend: b})
		}
	}
	if err := p.run(newChange(), ended); err != nil {
		p.log.Warn("a backend that gets no new connections stays in IPVS; it does no harm", "err", err)
	}
}
