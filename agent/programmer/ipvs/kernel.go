package ipvs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/google/nftables"
	mobyipvs "github.com/moby/ipvs"
	"github.com/sirupsen/logrus"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

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
		{"IPVS scheduler " + m.options.Scheduler, "ip_vs_" + m.options.Scheduler, func() error { return m.tryScheduler(model.IPv4, m.options.Scheduler) }},
		{"dummy devices", "dummy", m.tryDevice},
		{"nftables with all that is needed", "nf_tables", func() error { return m.tryTable(model.IPv4) }},
	}
}

// probesIPv6 returns the probes for Services that have IPv6 addresses.
func (m *machine) probesIPv6() []probe {
	return []probe{
		{"IPVS for IPv6, CONFIG_IP_VS_IPV6", "ip_vs", func() error { return m.tryScheduler(model.IPv6, m.options.Scheduler) }},
		{"nftables with all that is needed for IPv6", "nf_tables", func() error { return m.tryTable(model.IPv6) }},
	}
}

// tryTable lets the kernel create a table with all kinds of rules, and remove it in the same
// transaction.
func (m *machine) tryTable(family model.Family) error {
	l := newLayout(family, view.Node{
		Pods:      view.PodDetector{Prefixes: []netip.Prefix{loopback(family)}, Interface: "lo", InterfacePrefix: "lo"},
		NodePorts: []netip.Prefix{loopback(family)}, ServiceCIDRs: []netip.Prefix{loopback(family)},
	}, m.options.MasqueradeMark)
	l.table.Name += "-check"
	if err := m.tables.create(l); err != nil {
		return err
	}
	m.tables.conn.DelTable(l.table)
	return m.tables.write()
}

// tryScheduler creates a virtual service that receives no packets, and removes it.
func (m *machine) tryScheduler(family model.Family, name string) error {
	if err := m.openIPVS(); err != nil {
		return err
	}
	v := &virtual{serviceKey: serviceKey{number: maxID, family: family}, scheduler: name}
	err := m.ipvs.NewService(v.moby())
	if errors.Is(err, unix.EEXIST) { // left by a process that was killed
		err = errors.Join(m.ipvs.DelService(v.moby()), m.ipvs.NewService(v.moby()))
	}
	if err != nil {
		return err
	}
	return m.ipvs.DelService(v.moby())
}

// tryDevice creates the device, and removes it again unless it existed before.
func (m *machine) tryDevice() error {
	if _, err := m.links.LinkByName(Device); err == nil {
		return nil
	}
	if err := m.links.LinkAdd(&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: Device}}); err != nil {
		return err
	}
	return removeDevice(m.links)
}

// openIPVS opens the sockets for IPVS. IPVS must be loaded, because the library looks for it only
// once.
func (m *machine) openIPVS() error {
	if m.ipvs != nil {
		return nil
	}
	family, err := netlink.GenlFamilyGet("IPVS")
	if err != nil {
		return err
	}
	if m.commands, err = dial(unix.NETLINK_GENERIC); err != nil {
		return err
	}
	if m.entries, err = newEntryReader(); err != nil {
		return err
	}
	m.ipvsFamily = family.ID
	// The library calls modprobe, too, and logs if there is none.
	logrus.SetOutput(io.Discard)
	m.ipvs, err = mobyipvs.New("")
	return err
}

// New checks for everything that this package needs, lets the kernel load it if possible, and
// leaves nothing behind. It returns MissingErrors for what is missing. It is enough if the machine
// has IPv4. If it has IPv6 and IPVS cannot serve it, New fails, because IPv6 Services would be
// lost.
func New(options Options) (*Programmer, error) {
	if err := options.complete(); err != nil {
		return nil, err
	}
	m := &machine{options: options, log: options.Log}
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

// close closes the sockets that are open.
func (m *machine) close() {
	if m.links != nil {
		m.links.Close()
	}
	if m.addresses != nil {
		m.addresses.close()
	}
	if m.tables != nil {
		m.tables.close()
	}
	if m.commands != nil {
		m.commands.close()
	}
	if m.entries != nil {
		m.entries.close()
	}
	if m.ipvs != nil {
		m.ipvs.Close()
	}
}

// open opens the sockets that every machine supports.
func (m *machine) open() error {
	if err := m.openLinks(); err != nil {
		return err
	}
	var err error
	if m.tables, err = dialTables(); err != nil {
		return fmt.Errorf("open a socket for nftables: %w", err)
	}
	return nil
}

// openLinks opens the sockets for devices and addresses.
func (m *machine) openLinks() (err error) {
	if m.links, err = netlink.NewHandle(); err != nil {
		return fmt.Errorf("open a netlink socket: %w", err)
	}
	if m.addresses, err = dial(unix.NETLINK_ROUTE); err != nil {
		return fmt.Errorf("open a netlink socket for addresses: %w", err)
	}
	return nil
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

// SetSysctls does in advance the part of a Replace that needs a privileged container, as far as it
// can. IPVS must be loaded, which New does.
func SetSysctls(options Options) error {
	wanted := maps.Clone(sysctls)
	release, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		return err
	}
	if slowReuse(string(release)) {
		wanted[reuseSysctl] = "0"
	}
	if options.StrictARP {
		maps.Copy(wanted, strictARP)
	}
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(wanted)) {
		value := wanted[name]
		name, optional := strings.CutPrefix(name, "?")
		if isSet(name, value) {
			continue // a container without privileges can read the sysctl but not set it
		}
		if err := os.WriteFile(filepath.Join("/proc/sys", name), []byte(value), 0); err != nil && (!optional || !errors.Is(err, os.ErrNotExist)) {
			errs = append(errs, fmt.Errorf("set sysctl %s to %s: %w", name, value, err))
		}
	}
	if len(errs) > 0 {
		return fmt.Errorf("%w; in a container, run the agent once with --init-only in a privileged one", errors.Join(errs...))
	}
	return nil
}

func isSet(name, value string) bool {
	is, err := os.ReadFile(filepath.Join("/proc/sys", name))
	return err == nil && string(bytes.TrimSpace(is)) == value
}

// setSysctls makes the settings, which others may have changed. If that fails, it logs the error
// once, because most of a node's Services work without the settings. If the node has not been
// programmed yet, it returns an error if conntrackSysctl is not set.
func (p *Programmer) setSysctls() error {
	err := SetSysctls(p.options)
	programmed := slices.ContainsFunc(p.families, func(f *family) bool { return f.ports != nil })
	if err != nil && !programmed && !isSet(conntrackSysctl, sysctls[conntrackSysctl]) {
		return err
	}
	text := ""
	if err != nil {
		text = err.Error()
	}
	if text != p.unset && err != nil {
		p.log.Error("Settings of the kernel can't be made; Services are programmed without them", "err", err)
	}
	p.unset = text
	return nil
}

// prepare does what is the same for both IP families.
func (p *Programmer) prepare() error {
	if err := p.setSysctls(); err != nil {
		return err
	}
	timeouts := &mobyipvs.Config{TimeoutTCP: p.options.TCPTimeout, TimeoutTCPFin: p.options.TCPFinTimeout, TimeoutUDP: p.options.UDPTimeout}
	if *timeouts != (mobyipvs.Config{}) {
		if err := p.ipvs.SetConfig(timeouts); err != nil {
			return fmt.Errorf("set IPVS' timeouts: %w", err)
		}
	}
	return p.ensureDevice()
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
	m := &machine{}
	defer m.close()
	if err := m.open(); errors.Is(err, unix.EPROTONOSUPPORT) {
		return nil // without nftables, nothing can have been created
	} else if err != nil {
		return err
	}
	// Asking for IPVS would load it.
	if _, err := os.Stat("/proc/net/ip_vs"); err == nil {
		if err := m.openIPVS(); err != nil {
			return fmt.Errorf("open a socket for IPVS: %w", err)
		}
	}
	return m.cleanup(ctx)
}

func (m *machine) cleanup(context.Context) error {
	if err := removeDevice(m.links); err != nil {
		return err
	}
	if err := m.tables.dropAnswers(); err != nil {
		return err
	}
	tables, err := m.tables.conn.ListTables()
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EINVAL) {
		return nil // without nf_tables, nothing can have been created
	}
	if err != nil {
		return fmt.Errorf("list nftables tables: %w", err)
	}
	led := ledFrontends{}
	for _, t := range tables {
		if t.Name != Table {
			continue
		}
		family := model.IPv4
		if t.Family == nftables.TableFamilyIPv6 {
			family = model.IPv6
		}
		l := newLayout(family, view.Node{}, 0)
		held, _, err := m.tables.read(l)
		if err != nil {
			return err
		}
		led.addTable(family, held)
		m.tables.conn.DelTable(t)
	}
	if err := m.tables.write(); err != nil {
		return err
	}
	if m.ipvs == nil {
		return nil
	}
	services, err := m.ipvs.GetServices()
	if err != nil {
		return fmt.Errorf("read IPVS' virtual services: %w", err)
	}
	x := newChange()
	for _, s := range services {
		if k, ok := ours(s); ok {
			x.removeService(k)
		}
	}
	if err := (&family{machine: m}).run(x, x.after); err != nil {
		return err
	}
	return led.forget()
}
