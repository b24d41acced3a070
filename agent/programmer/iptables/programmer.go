package iptables

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os/exec"
	"slices"
	"sync"

	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/xtables"
)

// Variant selects the kernel interface that iptables works over.
type Variant string

// The variants.
const (
	// DefaultVariant is the variant of the program "iptables" on the PATH.
	DefaultVariant Variant = ""
	// NFT keeps its rules in nf_tables ("iptables-nft").
	NFT Variant = "nft"
	// Legacy keeps its rules in x_tables ("iptables-legacy").
	Legacy Variant = "legacy"
)

// Options are the options for New. The zero value is usable.
type Options struct {
	Variant Variant
	// MasqueradeMark is the single bit of the packet mark that is set when a Service is looked up,
	// until the packet is masqueraded. 0 means programmer.DefaultMasqueradeMark.
	MasqueradeMark uint32
	// Metrics receives what is about rules; nil means that nobody does.
	Metrics *Metrics
	// Log receives what this machine lacks and, at level debug, each write. nil means slog.Default().
	Log *slog.Logger
}

// Programmer is the programmer for iptables.
//
// Invariants:
//
//  1. families has the same keys and values since New. mu guards what the values hold.
//  2. Once alone is set, each Replace removes this package's rules from the other variant, too.
type Programmer struct {
	run runner
	log *slog.Logger

	mu sync.Mutex // guards the fields below, because Watch reads them while the Programmer is used
	// families are the IP families that this machine has. Service ports of another family are left
	// out, because no packet of that family can reach them.
	families map[model.Family]*kernelFamily
	// missing has a FamilyError for each family that this machine lacks.
	missing []error
	watch   watch
	// alone means that RetireOtherVariant has removed what the other variant held.
	alone bool
}

var _ programmer.Monitor = (*Programmer)(nil)

// New looks for the variant's programs, checks whether the kernel supports them, and changes
// nothing. It is enough if the machine has one of the IP families. In that case New logs it, and
// the other family's Service ports are left out.
func New(options Options) (*Programmer, error) {
	return newProgrammer(options, runCommand)
}

func newProgrammer(options Options, run runner) (*Programmer, error) {
	mark, err := programmer.MasqueradeMark(options.MasqueradeMark)
	if err != nil {
		return nil, err
	}
	switch options.Variant {
	case DefaultVariant, NFT, Legacy:
	default:
		return nil, fmt.Errorf("iptables variant is %q: use %q, %q or the empty string", options.Variant, NFT, Legacy)
	}
	log := cmp.Or(options.Log, slog.Default())
	p := &Programmer{families: map[model.Family]*kernelFamily{}, run: run, log: log}
	for _, family := range []model.Family{model.IPv4, model.IPv6} {
		t, err := newTool(family, options.Variant, run)
		if err == nil {
			err = t.probe(context.Background())
		}
		if errors.Is(err, exec.ErrNotFound) || errors.Is(err, errNoFamily) {
			log.Warn("This node does not support an IP family, its Services are not programmed",
				"family", family, "err", err)
			p.missing = append(p.missing, &programmer.FamilyError{Family: family, Err: fmt.Errorf("no iptables for %v: %w", family, err)})
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("iptables for %v: %w; run as root with CAP_NET_ADMIN, or use another programmer "+
				"or variant",
				family, err)
		}
		p.families[family] = &kernelFamily{
			dialect: newDialect(family, mark, t.modern()),
			tool:    t,
			log:     log,
			metrics: options.Metrics,
			refused: map[view.ServicePortID]bool{},
		}
		log.Debug("Found iptables", "family", family, "program", t.name, "version", t.version())
	}
	if len(p.families) == 0 {
		var reasons []error
		for _, err := range p.missing {
			reasons = append(reasons, errors.Unwrap(err))
		}
		return nil, fmt.Errorf("%w; install iptables, load its kernel modules, or use another programmer or variant",
			errors.Join(reasons...))
	}
	return p, nil
}

// Families returns the IP families that this machine has programs for.
func (p *Programmer) Families() []model.Family { return slices.Sorted(maps.Keys(p.families)) }

// Replace makes the kernel hold exactly this state. It does not touch chains that are as wanted. If
// all are, it writes nothing. What an earlier run left in the other variant stays until
// RetireOtherVariant has removed it. If one IP family fails as a whole, the other one is
// programmed.
func (p *Programmer) Replace(ctx context.Context, state view.State) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.watch.forget()
	p.addCounters()
	err := p.operate(func(f *kernelFamily) error { return f.replace(ctx, state) })
	if p.alone {
		if err := p.removeOtherVariant(ctx); err != nil {
			p.log.Error("Cannot remove the rules in the other variant of iptables, which may misdirect traffic; "+
				"remove them with slicecast-agent cleanup, which interrupts Services until the agent runs again",
				"err", err)
		}
	}
	p.routeLocalnet()
	return errors.Join(err, programmer.CheckPrimary(state.Node, p.Families()))
}

// Intact implements programmer.Keeper.
func (p *Programmer) Intact(ctx context.Context, state view.State) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, f := range p.families {
		if !f.intact(ctx, state) {
			return false
		}
	}
	return true
}

// addCounters creates the counters in the kernel, if it has such. A counter that others have
// removed was not in use.
func (p *Programmer) addCounters() {
	err := addCounters()
	if err != nil {
		p.log.Debug("Cannot create counters of packets, the metrics of them are missing", "err", err)
	}
	for _, f := range p.families {
		f.counters = err == nil
	}
}

// Apply writes the chains of the Service ports that changed, and the chains that lead to them, with
// one iptables-restore for each IP family, or two: see write.
func (p *Programmer) Apply(ctx context.Context, changes []view.Change) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.operate(func(f *kernelFamily) error { return f.apply(ctx, changes) })
}

// operate changes the kernel in each family. It returns a FamilyError for a family that fails as a
// whole.
func (p *Programmer) operate(change func(*kernelFamily) error) error {
	before := p.stamp()
	var errs []error
	commits := 0
	for family, f := range p.families {
		f.tool.commits = 0
		errs = append(errs, programmer.OfFamily(family, change(f)))
		commits += f.tool.commits
	}
	p.watch.operated(before, p.stamp(), commits)
	return errors.Join(errs...)
}

// RetireOtherVariant removes what an earlier run left in the variant that is not in use, as Retire
// does for other programmers. The caller waits until Replace has programmed everything that can be
// programmed. Until then, the old rules may be the only ones that lead connections to a Service.
// After RetireOtherVariant has succeeded, each Replace removes such rules, too.
func (p *Programmer) RetireOtherVariant(ctx context.Context) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	err := p.removeOtherVariant(ctx)
	p.alone = p.alone || err == nil
	return err
}

// removeOtherVariant is RetireOtherVariant without locking. The caller holds p.mu.
func (p *Programmer) removeOtherVariant(ctx context.Context) error {
	var errs []error
	for family, f := range p.families {
		if f.held == nil {
			continue // the Replace failed, and the old rules may be all that serves this family
		}
		if _, err := cleanup(ctx, family, p.otherVariant(), p.run, f.dialect); err != nil {
			errs = append(errs, fmt.Errorf("clean up with %s: %w", programName(family, p.otherVariant()), err))
		}
	}
	return errors.Join(errs...)
}

// OtherVariantServes reports whether an earlier run has left rules for an IP family in the variant
// that is not in use.
func (p *Programmer) OtherVariantServes(family model.Family) (bool, error) {
	if p.otherVariant() == NFT {
		return nft.HasChain(family, nat.String(), ServicesChain)
	}
	chains, err := xtables.Chains(family, nat.String())
	return slices.Contains(chains, ServicesChain), err
}

func (p *Programmer) otherVariant() Variant {
	for _, f := range p.families {
		if f.tool.variant == Legacy {
			return NFT
		}
	}
	return Legacy
}

// routeLocalnet lets NodePorts be on loopback addresses, if they shall be and the guard chain is in
// place.
func (p *Programmer) routeLocalnet() {
	f := p.families[model.IPv4]
	if f == nil || f.held == nil || !f.localnet { // if held is not known, the guard may be missing
		return
	}
	if err := programmer.SetSysctl(programmer.RouteLocalnet, "1"); err != nil {
		p.log.Error("NodePorts on loopback addresses do not work; run the agent with --init-only in a privileged "+
			"init container",
			"err", err)
	}
}

// RouteLocalnet does in advance the part of a Replace with NodePorts on loopback addresses that
// needs a privileged container. It adds the guard chain, then sets the sysctl. Use it only on nodes
// where a Replace with such NodePorts follows. Any other Replace keeps the guard as long as the
// sysctl is set.
func RouteLocalnet(ctx context.Context, options Options) error {
	p, err := New(options)
	if err != nil {
		return err
	}
	f := p.families[model.IPv4]
	if f == nil {
		return nil
	}
	if err := f.guardLocalnet(ctx); err != nil {
		return fmt.Errorf("guard loopback addresses: %w", err)
	}
	return programmer.SetSysctl(programmer.RouteLocalnet, "1")
}

// Cleanup removes everything that the function Cleanup removes.
func (p *Programmer) Cleanup(ctx context.Context) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, f := range p.families {
		f.held = nil
	}
	return cleanupAll(ctx, p.run)
}
