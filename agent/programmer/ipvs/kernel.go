package ipvs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	mobyipvs "github.com/moby/ipvs"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// machine is how the kernel is reached. The IP families share it.
type machine struct {
	options Options
	device  *device
	nft     *nft.Conn
	ipvs    *balancer // nil until openIPVS
}

// open opens the sockets that every machine supports.
func (m *machine) open() (err error) {
	if m.device, err = openDevice(); err != nil {
		return err
	}
	if m.nft, err = nft.Dial(); err != nil {
		return fmt.Errorf("open a socket for nftables: %w", err)
	}
	return nil
}

// openIPVS opens the sockets for IPVS, which must be loaded, unless they are open.
func (m *machine) openIPVS() (err error) {
	if m.ipvs != nil {
		return nil
	}
	if m.ipvs, err = openBalancer(); err != nil {
		return fmt.Errorf("open a socket for IPVS: %w", err)
	}
	return nil
}

// openLoaded opens the sockets for everything that is loaded. It returns nil if nf_tables is not, so
// that nothing can have been created.
func openLoaded() (*machine, error) {
	m := &machine{}
	err := m.open()
	// Asking for IPVS would load it.
	if _, missing := os.Stat("/proc/net/ip_vs"); err == nil && missing == nil {
		err = m.openIPVS()
	}
	if err == nil {
		return m, nil
	}
	m.close()
	if errors.Is(err, unix.EPROTONOSUPPORT) {
		return nil, nil
	}
	return nil, err
}

// close closes the sockets that are open.
func (m *machine) close() {
	if m.device != nil {
		m.device.close()
	}
	if m.nft != nil {
		m.nft.Close()
	}
	if m.ipvs != nil {
		m.ipvs.close()
	}
}

// MissingError reports something that this machine lacks, so that it cannot be programmed with
// IPVS.
type MissingError struct {
	// What names the missing thing and says how to get it.
	What string
	Err  error
}

func (e *MissingError) Error() string {
	return fmt.Sprintf("this node has no %s: %v", e.What, e.Err)
}

func (e *MissingError) Unwrap() error { return e.Err }

// probe asks the kernel for one thing that this package needs.
type probe struct {
	what string
	// module is the kernel module that provides it. Empty means that the kernel loads the module by
	// itself.
	module string
	ask    func() error
}

// find runs the probes, and loads a module if a probe fails without it. It returns a MissingError
// for each probe that still fails.
func find(probes []probe, load func(module string) error) error {
	var missing []error
	for _, probe := range probes {
		err := probe.ask()
		if err != nil && load(probe.module) == nil {
			err = probe.ask()
		}
		if err != nil {
			what := fmt.Sprintf("%s (kernel module %s)", probe.what, probe.module)
			missing = append(missing, &MissingError{what, err})
		}
	}
	return errors.Join(missing...)
}

func modprobe(module string) error { return exec.Command("modprobe", module).Run() }

func (m *machine) probes() []probe {
	return []probe{
		{"IPVS", "ip_vs", func() error {
			_, err := netlink.GenlFamilyGet("IPVS")
			return err
		}},
		{"IPVS that tells conntrack of its connections, CONFIG_IP_VS_NFCT", "ip_vs", func() error {
			_, err := os.Stat(filepath.Join("/proc/sys", conntrackSysctl))
			return err
		}},
		{"IPVS scheduler " + m.options.Scheduler, "ip_vs_" + m.options.Scheduler, func() error { return m.tryIPVS(model.IPv4) }},
		{"dummy devices", "dummy", m.device.try},
		{"nftables with all that is needed", "nf_tables", func() error { return m.tryTable(model.IPv4) }},
	}
}

// probesIPv6 returns the probes for Services that have IPv6 addresses.
func (m *machine) probesIPv6() []probe {
	return []probe{
		{"IPVS for IPv6, CONFIG_IP_VS_IPV6", "ip_vs", func() error { return m.tryIPVS(model.IPv6) }},
		{"nftables with all that is needed for IPv6", "nf_tables", func() error { return m.tryTable(model.IPv6) }},
	}
}

func (m *machine) tryIPVS(family model.Family) error {
	if err := m.openIPVS(); err != nil {
		return err
	}
	return m.ipvs.try(family, m.options.Scheduler, view.Backends{})
}

// New checks for everything that this package needs, lets the kernel load it if possible, and
// leaves nothing behind. It returns MissingErrors for what is missing. It is enough if the machine
// has IPv4. If it has IPv6 and IPVS cannot serve it, New fails, because IPv6 Services would be
// lost.
func New(options Options) (*Programmer, error) {
	if err := options.complete(); err != nil {
		return nil, err
	}
	m := &machine{options: options}
	p := &Programmer{machine: m, families: []*family{newFamily(m, model.IPv4)}}
	err := p.open()
	if err == nil {
		err = find(p.probes(), modprobe)
	}
	if _, missing := os.Stat("/proc/sys/net/ipv6"); err == nil && missing == nil {
		p.families = append(p.families, newFamily(m, model.IPv6))
		err = find(p.probesIPv6(), modprobe)
	}
	if err != nil {
		p.close()
		return nil, err
	}
	return p, nil
}

// prepare does what is the same for both IP families.
func (p *Programmer) prepare() error {
	if err := p.setSysctls(); err != nil {
		return err
	}
	o := p.options
	timeouts := mobyipvs.Config{TimeoutTCP: o.TCPTimeout, TimeoutTCPFin: o.TCPFinTimeout, TimeoutUDP: o.UDPTimeout}
	if timeouts != (mobyipvs.Config{}) {
		if err := p.ipvs.SetConfig(&timeouts); err != nil {
			return fmt.Errorf("set IPVS' timeouts: %w", err)
		}
	}
	return p.device.ensure()
}

// Cleanup removes everything that the function Cleanup removes.
func (p *Programmer) Cleanup(ctx context.Context) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, f := range p.families {
		f.known, f.ports, f.draining = false, nil, drains{}
	}
	return p.cleanup(ctx)
}

// Cleanup removes everything that this package has created, in this run or an earlier one: the
// device, the tables and the virtual services. Kernel settings stay. Open connections through IPVS
// end: see ledFrontends.
func Cleanup(ctx context.Context) error {
	m, err := openLoaded()
	if m == nil || err != nil {
		return err
	}
	defer m.close()
	return m.cleanup(ctx)
}

func (m *machine) cleanup(context.Context) error {
	if err := m.device.remove(); err != nil {
		return err
	}
	led := ledFrontends{}
	for _, family := range []model.Family{model.IPv4, model.IPv6} {
		l := newLayout(family, view.Node{}, 0)
		held, _, err := m.readTable(l)
		if err != nil {
			return err
		}
		led.addTable(family, held)
		if err := m.nft.RemoveTable(l.Table); err != nil {
			return fmt.Errorf("remove nftables table %s: %w", Table, err)
		}
	}
	if m.ipvs == nil {
		return nil
	}
	ours, err := m.ipvs.ours()
	if err == nil {
		err = m.removeServices(ours)
	}
	if err != nil {
		return err
	}
	return led.forget()
}
