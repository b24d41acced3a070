package ipvs

import (
	"context"
	"errors"
	"net/netip"
	"time"

	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// change gathers what is to be done once all that packets may be led to is there.
type change struct {
	held, want     map[model.Family]elements
	rules          map[model.Family]bool // they are written, in a new table where nothing is held
	arrive, depart []netip.Addr
	// before and after are what IPVS does before and after the rest changes, last what it does in the end.
	before, after, last []command
	gone                []serviceKey
	adopted             []*virtual // that somebody else had made already
	errs                []error    // PortErrors
}

func newChange() *change {
	return &change{
		held:  map[model.Family]elements{model.IPv4: {}, model.IPv6: {}},
		want:  map[model.Family]elements{model.IPv4: {}, model.IPv6: {}},
		rules: map[model.Family]bool{},
	}
}

// blame notes an error that is about one Service port.
func (x *change) blame(id view.ServicePortID, err error, lasting bool) {
	x.errs = append(x.errs, &programmer.PortError{ID: id, Err: err, Lasting: lasting})
}

// carryOut makes packets go where they should, and then removes what they do not go to any more. An address that goes is
// taken away first and one that comes is added last: in between, packets to it would be for whatever listens on the node.
func (p *Programmer) carryOut(_ context.Context, x *change) error {
	start := time.Now()
	x.after = append(x.after, x.last...)
	commands := len(x.before) + len(x.after)
	if x.onlyIPVS() {
		x.before, x.after = append(x.before, x.after...), nil
	}
	if err := p.run(x, x.before); err != nil {
		return err
	}
	if err := p.adopt(x); err != nil {
		return err
	}
	if err := p.removeAddresses(x.depart); err != nil {
		return err
	}
	for _, family := range p.families {
		l, held := p.layouts[family], x.held[family]
		switch {
		case !x.rules[family]:
		case held == nil:
			if err := p.tables.create(l); err != nil {
				return err
			}
		default:
			p.tables.writeRules(l)
		}
		if err := p.tables.change(l, held, x.want[family]); err != nil {
			return err
		}
	}
	if err := p.tables.write(); err != nil {
		return err
	}
	refused, err := p.addAddresses(x.arrive)
	if err != nil {
		return err
	}
	p.blameAddresses(x, refused)
	if err := p.run(x, x.after); err != nil {
		return err
	}
	for _, k := range x.gone {
		delete(p.taken, k.number)
		delete(p.draining, k)
	}
	p.known = true
	p.log.Debug("programmed IPVS", "addresses", len(x.arrive)+len(x.depart), "commands", commands, "duration", time.Since(start))
	return errors.Join(x.errs...)
}

// blameAddresses notes the Service ports with addresses that the device did not get.
func (p *Programmer) blameAddresses(x *change, refused map[netip.Addr]error) {
	if len(refused) == 0 {
		return
	}
	for id, now := range p.ports {
		for _, f := range now.port.Frontends {
			if why := refused[f.Address]; why != nil && f.Kind != view.NodePort {
				x.blame(id, why, false)
				break
			}
		}
	}
}

// onlyIPVS tells whether nothing else changes.
func (x *change) onlyIPVS() bool {
	for family, want := range x.want {
		if len(want)+len(x.held[family]) > 0 || x.rules[family] {
			return false
		}
	}
	return len(x.arrive)+len(x.depart) == 0
}
