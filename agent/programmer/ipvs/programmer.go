package ipvs

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// DefaultScheduler is round robin, which gives each backend of a Service the same number of new
// connections, in turn.
const DefaultScheduler = "rr"

// Schedulers returns the names of the IPVS schedulers that Options accepts. ipvsadm(8) describes
// them.
func Schedulers() []string {
	return []string{"rr", "wrr", "lc", "wlc", "sed", "nq", "dh", "sh", "mh", "lblc", "lblcr"}
}

// DefaultDrainLimit is how long connections to a backend that was removed may last by default.
const DefaultDrainLimit = 15 * time.Minute

// Options are the options for New. The zero value is usable.
type Options struct {
	// Scheduler chooses the backends of all Services. Empty means DefaultScheduler.
	Scheduler string
	// MasqueradeMark is the single bit of conntrack's mark that says that a connection is to be
	// masqueraded. 0 means programmer.DefaultMasqueradeMark, which kube-proxy uses in the packet's
	// mark.
	MasqueradeMark uint32
	// DrainLimit is how long TCP connections to a backend that was removed may last. 0 means
	// DefaultDrainLimit.
	DrainLimit time.Duration
	// StrictARP makes the node answer ARP requests only for addresses of the interface on which they
	// arrive, and so not for those of Services. It is for load balancers that announce these addresses
	// themselves, such as MetalLB.
	StrictARP bool
	// ExcludeCIDRs are the ranges in which virtual services of others stay theirs. Outside of them, a
	// virtual service of others for the address and port of a Service port with affinity becomes that
	// Service port's, because IPVS can have only one.
	ExcludeCIDRs []netip.Prefix
	// TCPTimeout, TCPFinTimeout and UDPTimeout are how long IPVS remembers idle connections of each
	// kind, in whole seconds. 0 leaves the kernel's setting.
	TCPTimeout, TCPFinTimeout, UDPTimeout time.Duration
	// Log receives what is missing on this machine and, at level debug, each write. nil means
	// slog.Default().
	Log *slog.Logger
}

// complete checks the options and sets defaults.
func (o *Options) complete() (err error) {
	o.Scheduler = cmp.Or(o.Scheduler, DefaultScheduler)
	o.DrainLimit = cmp.Or(o.DrainLimit, DefaultDrainLimit)
	o.Log = cmp.Or(o.Log, slog.Default())
	if !slices.Contains(Schedulers(), o.Scheduler) {
		return fmt.Errorf("IPVS scheduler is %q: use one of %s", o.Scheduler, strings.Join(Schedulers(), ", "))
	}
	o.MasqueradeMark, err = programmer.MasqueradeMark(o.MasqueradeMark)
	return err
}

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
		errs = append(errs, programmer.OfFamily(f.family, do(f)))
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
		p.options.Log.Debug("Cannot watch nftables for changes by other processes yet", "err", err)
	}
	p.nft.Watcher.Forget()
	services, err := p.ipvs.GetServices()
	if err != nil {
		return fmt.Errorf("read IPVS' virtual services: %w", err)
	}
	err = p.each(func(f *family) error { return f.replace(ctx, state, services) })
	return errors.Join(err, programmer.CheckPrimary(state.Node, p.Families()))
}

// Intact implements programmer.Keeper. Unlike those of Service ports, rules that depend on the Node
// have to be those of this state.
func (p *Programmer) Intact(_ context.Context, state view.State) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if exists, err := p.device.find(); !exists || err != nil || !p.device.isUp() {
		return false
	}
	services, err := p.ipvs.GetServices()
	if err != nil {
		return false
	}
	for _, f := range p.families {
		f.layout = newLayout(f.family, state.Node, f.options.MasqueradeMark)
		held, err := f.read(services)
		if err != nil || len(held.different) > 0 {
			return false
		}
		for _, number := range held.numbers {
			if held.services[serviceKey{family: f.family, number: number}] == nil {
				return false // the table leads to it
			}
		}
		if !programmer.HoldsSome(state, f.family, func(id view.ServicePortID) bool {
			return slices.ContainsFunc(state.Ports[id].Frontends, func(at view.Frontend) bool { return held.addresses[at.Address] })
		}) {
			return false
		}
	}
	return true
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
