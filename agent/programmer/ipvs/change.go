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
	errs                []error    // of type PortError
}

func newChange() *change { return &change{held: elements{}, want: elements{}} }

// blame records an error that concerns a single Service port.
func (x *change) blame(id view.ServicePortID, err error, lasting bool) {
	x.errs = append(x.errs, &programmer.PortError{ID: id, Err: err, Lasting: lasting})
}

// carryOut first makes packets go where they should, and then removes what they no longer go to. It
// removes addresses from the device before the table changes, and adds new ones afterwards. If the
// device had an address that the table does not know, packets to it would reach whatever listens on
// the node.
func (f *family) carryOut(ctx context.Context, x *change) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	start := time.Now()
	x.after = append(x.after, x.last...)
	commands := len(x.before) + len(x.after)
	if x.onlyIPVS() {
		x.before, x.after = append(x.before, x.after...), nil
	}
	if err := f.run(x, x.before); err != nil {
		return err
	}
	if err := f.adopt(x); err != nil {
		return err
	}
	if err := f.removeAddresses(x.depart); err != nil {
		return err
	}
	if err := f.writeTable(x); err != nil {
		return err
	}
	// A device that refuses every address has lost all of its addresses, so the family is not served,
	// however much of it is in place by now.
	refused, err := f.addAddresses(x.arrive)
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
		delete(f.taken, k.number)
		delete(f.draining, k)
	}
	f.known = true
	f.log.Debug("programmed IPVS", "family", f.family, "addresses", len(x.arrive)+len(x.depart), "commands", commands, "duration", time.Since(start))
	return errors.Join(x.errs...)
}

// writeTable makes the table hold the wanted elements, in one transaction.
func (f *family) writeTable(x *change) error {
	switch {
	case !x.rules:
	case x.held == nil:
		if err := f.tables.create(f.layout); err != nil {
			return err
		}
	default:
		f.tables.writeRules(f.layout)
	}
	if err := f.tables.change(f.layout, x.held, x.want); err != nil {
		return err
	}
	return f.tables.write()
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

// onlyIPVS reports whether neither the table nor the device's addresses change.
func (x *change) onlyIPVS() bool {
	return len(x.want)+len(x.held)+len(x.arrive)+len(x.depart) == 0 && !x.rules
}

// checkOrdinary returns an error if IPVS refuses the backends of an ordinary Service port.
func (f *family) checkOrdinary() error {
	v := &virtual{serviceKey: serviceKey{family: f.family, number: maxID}, scheduler: f.options.Scheduler}
	remove := command{kind: commandDelService, service: v.serviceKey}
	// A process that was killed during a check may have left it.
	commands := []command{remove, {kind: commandNewService, service: v.serviceKey, virtual: v}}
	for b := range programmer.Ordinary(f.family).Cluster.All() {
		commands = append(commands, command{kind: commandNewBackend, service: v.serviceKey, backend: b.Address, weight: 1})
	}
	return notOrdinary(f.run(newChange(), append(commands, remove)))
}

// checkOrdinaryAddress returns an error if the kernel refuses to give the device the address of an
// ordinary Service port.
func (f *family) checkOrdinaryAddress() error {
	address := programmer.Ordinary(f.family).Frontends[0].Address
	held, err := f.deviceAddresses(f.device, domain(f.family))
	if err != nil || held[address] { // a Service has that address
		return err
	}
	refused, err := f.addAddresses([]netip.Addr{address})
	if err = cmp.Or(err, refused[address]); err != nil {
		return notOrdinary(err)
	}
	return f.removeAddresses([]netip.Addr{address})
}

// notOrdinary wraps the error of a check that used an ordinary Service port. It returns nil for
// nil.
func notOrdinary(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("an ordinary Service port, tried by itself, can't be programmed either: %w", err)
}
