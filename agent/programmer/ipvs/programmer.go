package ipvs

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// Programmer is the programmer for IPVS.
type Programmer struct {
	// mu guards all other fields, including those of machine and of the families. Watch uses them,
	// too, and ends drains.
	mu sync.Mutex
	*machine
	families []*family // that this machine has
	unset    string    // the last logged error about sysctls; empty if they are set
	// unseen are the Service ports that serviceLost has still to check in this round.
	unseen []view.ServicePortID
}

var _ programmer.Monitor = (*Programmer)(nil)

// Families returns the IP families that this machine has.
func (p *Programmer) Families() []model.Family {
	var names []model.Family
	for _, f := range p.families {
		names = append(names, f.family)
	}
	return names
}

// family returns the state of an IP family, or nil if this machine does not have the family.
func (p *Programmer) family(name model.Family) *family {
	for _, f := range p.families {
		if f.family == name {
			return f
		}
	}
	return nil
}

// each calls do for each IP family, whether or not it fails for another one. It returns the
// PortErrors, and a FamilyError for each family that fails as a whole.
func (p *Programmer) each(do func(*family) error) error {
	var errs []error
	for _, f := range p.families {
		err := do(f)
		if _, programmed := programmer.PortErrors(err); !programmed {
			err = &programmer.FamilyError{Family: f.family, Err: err}
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// Replace makes the kernel hold exactly this state, one IP family after the other. It does not
// touch what is already as wanted. Virtual services keep their numbers, and so their connections,
// even if another process assigned the numbers.
func (p *Programmer) Replace(ctx context.Context, state view.State) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, f := range p.families {
		f.known = false
	}
	if err := p.prepare(); err != nil {
		return err
	}
	if err := p.nft.Watcher.Open(); err != nil { // before anything is read
		// Watch tries again and logs a warning.
		p.options.Log.Debug("changes of nftables by others can't be seen yet", "err", err)
	}
	p.nft.Watcher.Forget()
	services, err := p.ipvs.GetServices()
	if err != nil {
		return fmt.Errorf("read IPVS' virtual services: %w", err)
	}
	err = p.each(func(f *family) error { return f.replace(ctx, state, services) })
	return errors.Join(err, programmer.CheckPrimary(state.Node, p.Families()))
}

// Apply changes the virtual services and backends of the Service ports that changed. Where packets
// are led changes in one transaction for each IP family.
func (p *Programmer) Apply(ctx context.Context, changes []view.Change) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.each(func(f *family) error {
		mine := slices.DeleteFunc(slices.Clone(changes), func(c view.Change) bool { return c.ID().Family != f.family })
		if len(mine) == 0 {
			return nil
		}
		return f.apply(ctx, mine)
	})
}
