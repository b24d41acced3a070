package ipvs

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	mobyipvs "github.com/moby/ipvs"
	vnetlink "github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/agent/programmer"
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

// openLoaded opens the sockets for everything that is loaded. It returns nil if nf_tables is not,
// so that nothing can have been created.
func openLoaded() (*machine, error) {
	m := &machine{}
	err := m.open()
	// Asking for IPVS would load it.
	if _, missing := os.Stat("/proc/thread-self/net/ip_vs"); err == nil && missing == nil {
		err = m.openIPVS()
	}
	if err == nil {
		return m, nil
	}
	m.close()
	if errors.Is(err, unix.EPROTONOSUPPORT) {
		err = nil
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

// probe asks the kernel for one thing that this package needs.
type probe struct {
	what string
	// module is the kernel module that provides it. Empty means that no module does.
	module string
	ask    func() error
}

// find runs the probes, and loads a module if a probe fails without it. It returns an
// error for each probe that still fails.
func find(probes []probe, load func(module string) error) error {
	var missing []error
	for _, probe := range probes {
		err := probe.ask()
		if err != nil && probe.module != "" && load(probe.module) == nil {
			err = probe.ask()
		}
		switch {
		case err == nil:
		case probe.module == "":
			missing = append(missing, fmt.Errorf("this node has no %s: %w", probe.what, err))
		default:
			missing = append(missing, fmt.Errorf("this node has no %s (kernel module %s): %w", probe.what, probe.module, err))
		}
	}
	return errors.Join(missing...)
}

func modprobe(module string) error { return exec.Command("modprobe", module).Run() }

func (m *machine) probes() []probe {
	scheduler := m.options.Scheduler
	return []probe{
		{"IPVS", "ip_vs", func() error {
			_, err := vnetlink.GenlFamilyGet("IPVS")
			return err
		}},
		{"IPVS that tells conntrack of its connections, CONFIG_IP_VS_NFCT", "ip_vs", func() error {
			_, err := os.Stat(filepath.Join("/proc/sys", conntrackSysctl))
			return err
		}},
		{"IPVS scheduler " + scheduler, "ip_vs_" + scheduler, func() error { return m.tryIPVS(model.IPv4) }},
		{"dummy devices", "dummy", m.device.try},
		{"nftables with all that is needed", "nf_tables", func() error { return m.tryTable(model.IPv4) }},
		{"policy routing, CONFIG_IP_MULTIPLE_TABLES", "", func() error {
			_, err := m.device.addresses.Rules(model.IPv4)
			return err
		}},
	}
}

// probesIPv6 returns the probes for Services that have IPv6 addresses.
func (m *machine) probesIPv6() []probe {
	return []probe{
		{"IPVS for IPv6, CONFIG_IP_VS_IPV6", "ip_vs", func() error { return m.tryIPVS(model.IPv6) }},
		{"nftables with all that is needed for IPv6", "nf_tables", func() error { return m.tryTable(model.IPv6) }},
		{"policy routing for IPv6, CONFIG_IPV6_MULTIPLE_TABLES", "", func() error {
			_, err := m.device.addresses.Rules(model.IPv6)
			return err
		}},
	}
}

func (m *machine) tryIPVS(family model.Family) error {
	if err := m.openIPVS(); err != nil {
		return err
	}
	return m.ipvs.try(family, m.options.Scheduler, view.Backends{})
}

// New checks for everything that this package needs, lets the kernel load it if possible, and
// leaves nothing behind. Its error names everything that is missing. It is enough if the machine
// has IPv4. If it has IPv6 and IPVS cannot serve it, New fails, because IPv6 Services would be
// lost.
func New(options Options) (*Programmer, error) {
	if err := options.complete(); err != nil {
		return nil, err
	}
	m := &machine{options: options}
	p := &Programmer{machine: m, families: []*family{{machine: m, family: model.IPv4, draining: drains{}}}}
	err := p.open()
	if err == nil {
		err = find(p.probes(), modprobe)
	}
	if _, missing := os.Stat("/proc/sys/net/ipv6"); err == nil && missing == nil {
		p.families = append(p.families, &family{machine: m, family: model.IPv6, draining: drains{}})
		err = find(p.probesIPv6(), modprobe)
	}
	if err != nil {
		p.close()
		return nil, err
	}
	return p, nil
}

// conntrackSysctl makes IPVS report its connections to conntrack.
const conntrackSysctl = "net/ipv4/vs/conntrack"

// sysctls are the settings that kube-proxy makes in its IPVS mode, too, and run_estimation.
// Masquerading requires that conntrack knows the connections of IPVS. The two expire settings end
// the connections of a removed backend at their next packet, so that clients can go elsewhere.
// Rates are not estimated, because before Linux 6.2 a timer goes through all backends every two
// seconds for that, which delays packets if there are many. Kernels may lack a setting that is
// marked with a question mark.
var sysctls = map[string]string{
	conntrackSysctl:                         "1",
	"?net/ipv4/vs/run_estimation":           "0",
	"net/ipv4/vs/expire_nodest_conn":        "1",
	"net/ipv4/vs/expire_quiescent_template": "1",
	"net/ipv4/ip_forward":                   "1",
}

// reuseSysctl set to 0 lets a new connection from an address and port that IPVS remembers go to the
// earlier connection's backend. kube-proxy sets it on kernels for which slowReuse is true, too. On
// these, its first packet would be dropped otherwise, and the client would try again a second
// later. The setting does not exist before Linux 4.1.
const reuseSysctl = "?net/ipv4/vs/conn_reuse_mode"

// slowReuse reports whether a kernel is older than 5.9. Newer kernels choose a backend for such
// connections at once.
func slowReuse(release string) bool {
	var major, minor int
	_, err := fmt.Sscanf(release, "%d.%d", &major, &minor)
	return err == nil && (major < 5 || major == 5 && minor < 9)
}

// strictARP are the settings for Options.StrictARP.
var strictARP = map[string]string{
	"net/ipv4/conf/all/arp_ignore":   "1",
	"net/ipv4/conf/all/arp_announce": "2",
}

// wantedSysctls returns the settings that the options and the kernel require.
func wantedSysctls(options Options) (map[string]string, error) {
	wanted := maps.Clone(sysctls)
	release, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		return nil, err
	}
	if slowReuse(string(release)) {
		wanted[reuseSysctl] = "0"
	}
	if options.StrictARP {
		maps.Copy(wanted, strictARP)
	}
	return wanted, nil
}

// SetSysctls does in advance the part of a Replace that needs a privileged container, as far as it
// can. IPVS must be loaded, which New does.
func SetSysctls(options Options) error {
	wanted, err := wantedSysctls(options)
	if err != nil {
		return err
	}
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(wanted)) {
		value := wanted[name]
		name, optional := strings.CutPrefix(name, "?")
		if err := programmer.SetSysctl(name, value); !optional || !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("%w; in a container, run the agent once with --init-only in a privileged one", err)
	}
	return nil
}

// setSysctls makes the settings, which others may have changed. If that fails, it logs the error
// once, because most of a node's Services work without the settings. If the node has not been
// programmed yet, it returns an error if conntrackSysctl is not set.
func (p *Programmer) setSysctls() error {
	err := SetSysctls(p.options)
	if err == nil {
		p.unset = ""
		return nil
	}
	programmed := slices.ContainsFunc(p.families, func(f *family) bool { return f.ports != nil })
	if !programmed && !programmer.SysctlIs(conntrackSysctl, sysctls[conntrackSysctl]) {
		return err
	}
	if p.unset != err.Error() {
		p.options.Log.Error("Cannot set sysctls, programming Services without them", "err", err)
	}
	p.unset = err.Error()
	return nil
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
	led := newLedFrontends()
	for _, family := range []model.Family{model.IPv4, model.IPv6} {
		if err := m.device.undeliver(family); err != nil {
			return err
		}
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
	if err := errors.Join(err, m.removeServices(ours)); err != nil {
		return err
	}
	return led.forget()
}
