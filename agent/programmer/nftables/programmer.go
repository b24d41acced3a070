package nftables

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/netlink"
	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// Options are the options for New. The zero value is usable.
type Options struct {
	// MasqueradeMark is the single bit of the packet mark that is set when a Service is looked up,
	// until the packet is masqueraded. 0 means programmer.DefaultMasqueradeMark.
	MasqueradeMark uint32
	// Log receives what this machine lacks, and when a table has to be created again. nil means
	// slog.Default().
	Log *slog.Logger
}

// Programmer is the programmer for nftables.
type Programmer struct {
	// families are the IP families that this machine has. Service ports of another family are left
	// out, because no packet of that family can reach them.
	families []*family
	conn     *nft.Conn
	log      *slog.Logger
}

var _ programmer.Monitor = (*Programmer)(nil)

// New checks whether the kernel can do everything that this package needs, and changes nothing. It
// is enough if the machine has one of the IP families. In that case New logs it, and the other
// family's Service ports are left out. The Programmer works in the network namespace in which New
// was called, until Close.
func New(options Options) (*Programmer, error) {
	mark, err := programmer.MasqueradeMark(options.MasqueradeMark)
	if err != nil {
		return nil, err
	}
	log := cmp.Or(options.Log, slog.Default())
	c, err := nft.Dial()
	if err != nil {
		return nil, fmt.Errorf("nftables: %w; load the kernel module nf_tables, or use another programmer", err)
	}
	p := &Programmer{conn: c, log: log}
	for _, name := range []model.Family{model.IPv4, model.IPv6} {
		if !has(name) {
			log.Warn("This node does not support an IP family, its Services are not programmed", "family", name)
			continue
		}
		f := &family{dialect: newDialect(name, mark), conn: c, log: log, partSize: partSize}
		err := f.try()
		if err == nil {
			p.families = append(p.families, f)
			continue
		}
		p.Close()
		advice := "use Linux 5.10 or newer with the nft modules nat, masq, fib, ct, numgen and reject, or another programmer"
		if errors.Is(err, unix.EPERM) {
			advice = "run as root with CAP_NET_ADMIN"
		}
		return nil, fmt.Errorf("nftables for %v: %w; %s", name, err, advice)
	}
	return p, nil
}

// has reports whether the kernel has an IP family, even if no interface has an address of it.
func has(family model.Family) bool {
	fd, err := unix.Socket(int(netlink.Domain(family)), unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		_ = unix.Close(fd)
	}
	return !errors.Is(err, unix.EAFNOSUPPORT)
}

// try lets the kernel validate a table with everything that a table may need.
func (f *family) try() error {
	// It uses another table's name, because the kernel would look at all elements of the existing
	// table.
	m := &nft.Messages{Table: f.of(checkTable).Table}
	m.AddTable()
	chains := f.fixedChains(view.Node{LocalhostNodePorts: true, ServiceCIDRs: []netip.Prefix{f.Loopback()}}, true)
	chains[sourcesChain] = f.sourcesRules([]int{1})
	chains["draw"] = f.drawRules(pick{class: classOf(exactSize+1, 0, 0)})
	chains["timeout"] = f.timeoutRules(1, viaAddress)
	chains["policy"] = f.policyChain(policyOf(view.Frontend{
		Pods: view.Route{To: view.Cluster, Masquerade: true},
		Node: view.Route{To: view.Drop}, Others: view.Route{To: view.Reject},
	}), view.PodDetector{Interface: "lo", InterfacePrefix: "lo"})
	for s := range sources + 2 {
		if s.String() != "" && (s.always() || s == affinity || s > sources) {
			f.addSet(m, s)
		}
	}
	for name := range chains {
		m.AddChain(name, hooks[name])
	}
	for name, rules := range chains {
		for _, r := range rules {
			m.AddRule(name, r)
		}
	}
	return f.conn.Check(m.Batch())
}

// Close releases the Programmer's sockets and leaves the kernel as it is.
func (p *Programmer) Close() { p.conn.Close() }

// Families returns the IP families that the kernel has.
func (p *Programmer) Families() []model.Family {
	var out []model.Family
	for _, f := range p.families {
		out = append(out, f.IP)
	}
	return out
}

// Replace makes the kernel hold exactly this state. It does not touch what is already as wanted. If
// everything is, it writes nothing. If it writes much, it commits many short transactions, because
// the kernel may run no other thread on a CPU while it carries one out. If one family fails as a
// whole, the other one is programmed.
func (p *Programmer) Replace(ctx context.Context, state view.State) error {
	if err := p.conn.Watcher.Open(); err != nil { // before anything is read
		// Watch tries again and logs a warning
		p.log.Debug("Cannot watch nftables for changes by other processes yet", "err", err)
	}
	p.conn.Watcher.Forget()
	errs := []error{programmer.CheckPrimary(state.Node, p.Families())}
	for _, f := range p.families {
		errs = append(errs, programmer.OfFamily(f.IP, f.replace(ctx, state)))
	}
	p.routeLocalnet(state.Node)
	return errors.Join(errs...)
}

// Intact implements programmer.Keeper.
func (p *Programmer) Intact(_ context.Context, state view.State) bool {
	return !slices.ContainsFunc(p.families, func(f *family) bool { return !f.intact(state) })
}

// Apply changes the elements that differ, in one transaction for each IP family.
func (p *Programmer) Apply(ctx context.Context, changes []view.Change) error {
	var errs []error
	for _, f := range p.families {
		errs = append(errs, programmer.OfFamily(f.IP, f.apply(ctx, changes)))
	}
	return errors.Join(errs...)
}

// Cleanup calls the function Cleanup's removeTables on the Programmer's own socket.
func (p *Programmer) Cleanup(context.Context) error {
	for _, f := range p.families {
		f.known = false
	}
	return removeTables(p.conn)
}

// Cleanup removes the tables of this package.
func Cleanup(context.Context) error {
	c, err := nft.Dial()
	if errors.Is(err, unix.EPROTONOSUPPORT) {
		return nil // the kernel has no nf_tables, so it holds no table
	}
	if err != nil {
		return fmt.Errorf("nftables: %w", err)
	}
	defer c.Close()
	return removeTables(c)
}

// Serves reports whether a run of this programmer has left a table that serves an IP family.
func Serves(family model.Family) (bool, error) { return nft.HasChain(family, Table, servicesChain) }

func removeTables(c *nft.Conn) error {
	var errs []error
	for _, family := range []model.Family{model.IPv4, model.IPv6} {
		for _, name := range []string{StandInTable, Table} {
			if err := removeTable(c, nft.Table{Family: nft.FamilyOf(family), Name: name}); err != nil {
				errs = append(errs, fmt.Errorf("nftables for %v: %w", family, err))
			}
		}
	}
	return errors.Join(errs...)
}

// Watch calls lost when others have changed the tables of this package, as soon as the kernel
// reports it.
func (p *Programmer) Watch(ctx context.Context, lost func(reason string)) {
	var tables []nft.Table
	for _, f := range p.families {
		tables = append(tables, f.Table)
	}
	p.conn.Watch(ctx, time.Minute, tables, lost, func(err error) {
		p.log.Warn("Cannot watch nftables for changes by other processes, trying again in a minute", "err", err)
	})
}
