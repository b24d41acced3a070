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

// MissingError tells what this machine lacks, so that it can't be programmed with IPVS.
type MissingError struct {
	// What is missing, and how to get it.
	What string
	Err  error
}

func (e *MissingError) Error() string {
	return fmt.Sprintf("this node has no %s: %v", e.What, e.Err)
}

func (e *MissingError) Unwrap() error { return e.Err }

// probe asks the kernel for one thing that is needed.
type probe struct {
	what string
	// module has it, if it is not there yet; empty: the kernel loads it by itself.
	module string
	ask    func() error
}

// find looks for what is needed, having modules loaded if need be.
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

func (p *Programmer) probes() []probe {
	return []probe{
		{"IPVS", "ip_vs", func() error {
			_, err := netlink.GenlFamilyGet("IPVS")
			return err
		}},
		{"IPVS that tells conntrack of its connections, CONFIG_IP_VS_NFCT", "ip_vs", func() error {
			_, err := os.Stat(filepath.Join("/proc/sys", conntrackSysctl))
			return err
		}},
		{"IPVS scheduler " + p.options.Scheduler, "ip_vs_" + p.options.Scheduler, func() error { return p.tryScheduler(model.IPv4, p.options.Scheduler) }},
		{"dummy devices", "dummy", p.tryDevice},
		{"nftables with all that is needed", "nf_tables", func() error { return p.tryTable(model.IPv4) }},
	}
}

// probesIPv6 are for Services that have IPv6 addresses.
func (p *Programmer) probesIPv6() []probe {
	return []probe{
		{"IPVS for IPv6, CONFIG_IP_VS_IPV6", "ip_vs", func() error { return p.tryScheduler(model.IPv6, p.options.Scheduler) }},
		{"nftables with all that is needed for IPv6", "nf_tables", func() error { return p.tryTable(model.IPv6) }},
	}
}

// tryTable has the kernel make a table with all kinds of rules, and remove it in the same transaction.
func (p *Programmer) tryTable(family model.Family) error {
	l := newLayout(family, view.Node{
		Pods:      view.PodDetector{Prefixes: []netip.Prefix{loopback(family)}, Interface: "lo", InterfacePrefix: "lo"},
		NodePorts: []netip.Prefix{loopback(family)}, ServiceCIDRs: []netip.Prefix{loopback(family)},
	}, p.options.MasqueradeMark)
	l.table.Name += "-check"
	if err := p.tables.create(l); err != nil {
		return err
	}
	p.tables.conn.DelTable(l.table)
	return p.tables.write()
}

// tryScheduler makes a virtual service that no packet comes to, and removes it.
func (p *Programmer) tryScheduler(family model.Family, name string) error {
	if err := p.openIPVS(); err != nil {
		return err
	}
	v := &virtual{serviceKey: serviceKey{number: maxID, family: family}, scheduler: name}
	err := p.ipvs.NewService(v.moby())
	if errors.Is(err, unix.EEXIST) { // from one who was killed meanwhile
		err = errors.Join(p.ipvs.DelService(v.moby()), p.ipvs.NewService(v.moby()))
	}
	if err != nil {
		return err
	}
	return p.ipvs.DelService(v.moby())
}

// tryDevice makes the device, and removes it if it was not there before.
func (p *Programmer) tryDevice() error {
	if _, err := p.links.LinkByName(Device); err == nil {
		return nil
	}
	if err := p.links.LinkAdd(&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: Device}}); err != nil {
		return err
	}
	return removeDevice(p.links)
}

// openIPVS opens the socket for IPVS, which must be there: the library asks for it only once.
func (p *Programmer) openIPVS() error {
	if p.ipvs != nil {
		return nil
	}
	family, err := netlink.GenlFamilyGet("IPVS")
	if err != nil {
		return err
	}
	if p.commands, err = dial(unix.NETLINK_GENERIC); err != nil {
		return err
	}
	if p.entries, err = newEntryReader(); err != nil {
		return err
	}
	p.ipvsFamily = family.ID
	// It has modprobe called, too, and logs it if there is none.
	logrus.SetOutput(io.Discard)
	p.ipvs, err = mobyipvs.New("")
	return err
}

// New looks for what is needed, has the kernel load it if it can, and leaves nothing behind. What is missing is told by
// MissingErrors. A machine without IPv6 is good enough; one that has it and can't have IPVS serve it is not, as its Services
// would be lost.
func New(options Options) (*Programmer, error) {
	if err := options.complete(); err != nil {
		return nil, err
	}
	p := &Programmer{options: options, log: options.Log, families: []model.Family{model.IPv4}, draining: drains{}}
	err := p.open()
	if err == nil {
		err = find(p.probes(), modprobe)
	}
	if _, missing := os.Stat("/proc/sys/net/ipv6"); err == nil && missing == nil {
		p.families = append(p.families, model.IPv6)
		err = find(p.probesIPv6(), modprobe)
	}
	if err != nil {
		p.close()
		return nil, err
	}
	return p, nil
}

// close closes what is open.
func (p *Programmer) close() {
	if p.links != nil {
		p.links.Close()
	}
	if p.addresses != nil {
		p.addresses.close()
	}
	if p.tables != nil {
		p.tables.close()
	}
	if p.commands != nil {
		p.commands.close()
	}
	if p.entries != nil {
		p.entries.close()
	}
	if p.ipvs != nil {
		p.ipvs.Close()
	}
}

// open opens what is there on any machine.
func (p *Programmer) open() error {
	if err := p.openLinks(); err != nil {
		return err
	}
	var err error
	if p.tables, err = dialTables(); err != nil {
		return fmt.Errorf("open a socket for nftables: %w", err)
	}
	return nil
}

// openLinks opens what devices and addresses take.
func (p *Programmer) openLinks() (err error) {
	if p.links, err = netlink.NewHandle(); err != nil {
		return fmt.Errorf("open a netlink socket: %w", err)
	}
	if p.addresses, err = dial(unix.NETLINK_ROUTE); err != nil {
		return fmt.Errorf("open a netlink socket for addresses: %w", err)
	}
	return nil
}

// conntrackSysctl has IPVS tell conntrack of its connections.
const conntrackSysctl = "net/ipv4/vs/conntrack"

// sysctls are what kube-proxy sets in its IPVS mode, too, and run_estimation. Masquerading needs conntrack to know of IPVS'
// connections. When a backend is removed, its connections end at their next packet, and its clients are free to go
// elsewhere. Rates are not estimated: before Linux 6.2 a timer goes through all backends every two seconds for that, which
// with many of them holds packets up. Older kernels lack the setting (marked with ?).
var sysctls = map[string]string{
	conntrackSysctl:                         "1",
	"?net/ipv4/vs/run_estimation":           "0",
	"net/ipv4/vs/expire_nodest_conn":        "1",
	"net/ipv4/vs/expire_quiescent_template": "1",
	"net/ipv4/ip_forward":                   "1",
}

// reuseSysctl set to 0 has a new connection from an address and port that IPVS remembers led like the one before, as kube-proxy sets it where
// slowReuse: otherwise its first packet is dropped there, and the client tries again a second later. Before Linux 4.1 there is no such setting.
const reuseSysctl = "?net/ipv4/vs/conn_reuse_mode"

// slowReuse tells whether a kernel is older than 5.9, which leads such connections anew at once.
func slowReuse(release string) bool {
	var major, minor int
	_, err := fmt.Sscanf(release, "%d.%d", &major, &minor)
	return err == nil && (major < 5 || major == 5 && minor < 9)
}

// strictARP is for StrictARP.
var strictARP = map[string]string{
	"net/ipv4/conf/all/arp_ignore":   "1",
	"net/ipv4/conf/all/arp_announce": "2",
}

// SetSysctls does ahead what of a Replace takes a privileged container, as far as it can. IPVS must be loaded, which New has it.
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
			continue // in a container without privileges it can be read only
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

// setSysctls makes the settings, which others may change. What can't be made is logged once: the rest of a node's Services works without.
// Only a node that has not been programmed yet is to have conntrackSysctl before.
func (p *Programmer) setSysctls() error {
	err := SetSysctls(p.options)
	if err != nil && p.ports == nil && !isSet(conntrackSysctl, sysctls[conntrackSysctl]) {
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

// prepare sets what is set once.
func (p *Programmer) prepare(node view.Node) error {
	if err := p.setSysctls(); err != nil {
		return err
	}
	timeouts := &mobyipvs.Config{TimeoutTCP: p.options.TCPTimeout, TimeoutTCPFin: p.options.TCPFinTimeout, TimeoutUDP: p.options.UDPTimeout}
	if *timeouts != (mobyipvs.Config{}) {
		if err := p.ipvs.SetConfig(timeouts); err != nil {
			return fmt.Errorf("set IPVS' timeouts: %w", err)
		}
	}
	if err := p.ensureDevice(); err != nil {
		return err
	}
	if err := p.restoreSources(); err != nil {
		return err
	}
	var err error
	if p.elsewhere, err = p.addressesElsewhere(); err != nil {
		return err
	}
	p.nodeAddresses = nodePortAddresses(node, p.elsewhere)
	return nil
}

// Cleanup removes what the function Cleanup removes.
func (p *Programmer) Cleanup(ctx context.Context) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.known, p.ports, p.draining = false, nil, drains{}
	return p.cleanup(ctx)
}

// Cleanup removes what this package made, also in earlier runs: the device, the tables and the virtual services. Settings
// of the kernel stay. Open connections through IPVS end, see ledFrontends.
func Cleanup(ctx context.Context) error {
	p := &Programmer{}
	defer p.close()
	if err := p.open(); errors.Is(err, unix.EPROTONOSUPPORT) {
		return nil // without nftables nothing was made
	} else if err != nil {
		return err
	}
	// Asking for IPVS would have it loaded.
	if _, err := os.Stat("/proc/net/ip_vs"); err == nil {
		if err := p.openIPVS(); err != nil {
			return fmt.Errorf("open a socket for IPVS: %w", err)
		}
	}
	return p.cleanup(ctx)
}

func (p *Programmer) cleanup(context.Context) error {
	if err := removeDevice(p.links); err != nil {
		return err
	}
	if err := p.tables.dropAnswers(); err != nil {
		return err
	}
	tables, err := p.tables.conn.ListTables()
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EINVAL) {
		return nil // without nf_tables nothing was made
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
		held, _, err := p.tables.read(l)
		if err != nil {
			return err
		}
		led.addTable(family, held)
		p.tables.conn.DelTable(t)
	}
	if err := p.tables.write(); err != nil {
		return err
	}
	if p.ipvs == nil {
		return nil
	}
	services, err := p.ipvs.GetServices()
	if err != nil {
		return fmt.Errorf("read IPVS' virtual services: %w", err)
	}
	x := newChange()
	for _, s := range services {
		if k, ok := ours(s); ok {
			x.removeService(k)
		}
	}
	if err := p.run(x, x.after); err != nil {
		return err
	}
	return led.forget()
}
