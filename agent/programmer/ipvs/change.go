package ipvs

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/view"
)

// change collects what has to be done for one IP family, in an order in which packets are only led
// to what exists.
type change struct {
	held, want     elements
	rules          bool // rules are to be written, into a new table if held is nil
	arrive, depart []netip.Addr
	// before and after are commands for IPVS before and after the table and the addresses change. last
	// are commands that come at the very end.
	before, after, last []command
	gone                []serviceKey
	adopted             []*virtual // that others had created before
	// touched is by how much the count of each element changes that Service ports share.
	touched map[elementKey]int
	errs    []error // of type PortError
}

func newChange() *change {
	return &change{held: elements{}, want: elements{}, touched: map[elementKey]int{}}
}

// blame records an error that concerns a single Service port.
func (x *change) blame(id view.ServicePortID, err error, lasting bool) {
	x.errs = append(x.errs, &programmer.PortError{ID: id, Err: err, Lasting: lasting})
}

// blameScheduler records that a virtual service has another scheduler than the wanted one, and why.
func (x *change) blameScheduler(v *virtual, why error) {
	x.errs = append(x.errs, &programmer.PortError{ID: v.owner, Err: why, Lasting: true, Served: true})
}

// carryOut first makes packets go where they should, and then removes what they no longer go to. It
// removes addresses from the device before the table changes, and adds new ones afterwards. If the
// device had an address that the table does not know, packets to it would reach whatever listens on
// the node.
func (f *family) carryOut(ctx context.Context, x *change) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if f.undelivered != nil && len(f.ports) > 0 {
		return f.undelivered
	}
	start := time.Now()
	x.after = append(x.after, x.last...)
	commands := len(x.before) + len(x.after)
	if len(x.want)+len(x.held)+len(x.arrive)+len(x.depart) == 0 && !x.rules { // only IPVS changes
		x.before, x.after = append(x.before, x.after...), nil
	}
	if err := f.run(x, x.before); err != nil {
		return err
	}
	if err := f.adopt(x); err != nil {
		return err
	}
	if err := f.device.removeAddresses(x.depart); err != nil {
		return err
	}
	if err := f.writeTable(x); err != nil {
		return err
	}
	// A device that refuses every address has lost all of its addresses, so the family is not served,
	// however much of it is in place by now.
	refused, err := f.device.addAddresses(x.arrive)
	if err == nil && len(refused) > 0 {
		err = f.checkOrdinaryAddress()
	}
	if err != nil {
		return err
	}
	f.blameAddresses(x, refused)
	if err := f.run(x, x.after); err != nil {
		return err
	}
	for _, k := range x.gone {
		delete(f.numbers.taken, k.number)
		delete(f.draining, k)
	}
	f.known = true
	f.options.Log.Debug("Programmed IPVS", "family", f.family, "addresses", len(x.arrive)+len(x.depart),
		"commands", commands, "duration", time.Since(start))
	return errors.Join(x.errs...)
}

// blameAddresses records errors for the Service ports with addresses that the device did not get.
func (f *family) blameAddresses(x *change, refused map[netip.Addr]error) {
	if len(refused) == 0 {
		return
	}
	for id, now := range f.ports {
		for _, at := range now.port.Frontends {
			if why := refused[at.Address]; why != nil && at.Kind != view.NodePort {
				x.blame(id, why, false)
				break
			}
		}
	}
}

// checkOrdinary returns an error if IPVS refuses the backends of an ordinary Service port.
func (f *family) checkOrdinary() error {
	if err := f.ipvs.try(f.family, f.options.Scheduler, programmer.Ordinary(f.family).Cluster); err != nil {
		return fmt.Errorf("%w: %w", programmer.ErrOrdinary, err)
	}
	return nil
}

// checkOrdinaryAddress returns an error if the kernel refuses to give the device the address of an
// ordinary Service port.
func (f *family) checkOrdinaryAddress() error {
	address := programmer.Ordinary(f.family).Frontends[0].Address
	held, _, err := f.device.read(f.family)
	if err != nil || held[address] { // a Service has that address
		return err
	}
	refused, err := f.device.addAddresses([]netip.Addr{address})
	if err = cmp.Or(err, refused[address]); err != nil {
		return fmt.Errorf("%w: %w", programmer.ErrOrdinary, err)
	}
	return f.device.removeAddresses([]netip.Addr{address})
}
