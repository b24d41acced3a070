package ipvs

import (
	"net/netip"
	"time"
)

// drainEvery is the time between two checks for draining backends that have no connections left.
const drainEvery = 2 * time.Second

// drains are the backends whose connections may still end by themselves, by virtual service, each
// with the time when the wait ends.
//
// Invariants:
//
//  1. A backend in drains gets no new connections: it has the weight 0 in IPVS, unless the
//     transaction that was to set it was refused.
//  2. No backend in drains is wanted by the Service port of its virtual service.
//  3. The wait for a backend ends when it ended first: beginning it again does not prolong it.
type drains map[serviceKey]map[netip.AddrPort]time.Time

// begin starts the wait for a backend's connections, unless it has started before.
func (d drains) begin(k serviceKey, b netip.AddrPort, limit time.Duration) {
	if d[k] == nil {
		d[k] = map[netip.AddrPort]time.Time{}
	}
	if _, already := d[k][b]; !already {
		d[k][b] = time.Now().Add(limit)
	}
}

// stop ends the wait for a backend that is wanted again. It reports whether there was one.
func (d drains) stop(k serviceKey, b netip.AddrPort) bool {
	_, draining := d[k][b]
	delete(d[k], b)
	return draining
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
		if held, err = f.ipvs.readBackends(held[:0], k); err != nil {
			f.options.Log.Warn("Cannot read draining backends, keeping them in IPVS for now", "err", err)
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
		f.options.Log.Warn("Cannot remove drained backends, which get no new connections", "err", err)
	}
}
