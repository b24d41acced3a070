package ipvs

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	mobyipvs "github.com/moby/ipvs"

	"github.com/slicecast/slicecast/agent/netlink"
	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// Differences returns what the kernel should have for an IP family instead of what it has, in the
// network namespace of the calling thread: in the table, in IPVS, on the device and as settings. It
// changes nothing. Backends that only keep open connections are no differences. Neither is it one
// if there is neither a table nor a device, or no IPVS.
func Differences(ip model.Family, options Options, state view.State) (different []string, err error) {
	if err := options.complete(); err != nil {
		return nil, err
	}
	options.Log = slog.New(slog.DiscardHandler)
	m, err := openLoaded()
	if m == nil || err != nil {
		return nil, err
	}
	defer m.close()
	m.options = options
	serves, err := Serves(ip)
	if err != nil {
		return nil, err
	}
	if exists, err := m.device.find(); err != nil || !exists && !serves || m.ipvs == nil {
		return nil, err
	}
	all, err := m.ipvs.GetServices()
	if err != nil {
		return nil, fmt.Errorf("read IPVS' virtual services: %w", err)
	}
	f := &family{machine: m, family: ip, draining: drains{}}
	x, held, err := f.plan(state, all)
	if err != nil {
		return nil, err
	}
	settings, err := m.otherSettings()
	if err != nil {
		return nil, err
	}
	delivery, err := m.device.otherDelivery(ip)
	if err != nil {
		return nil, err
	}
	different = slices.Concat(held.different, f.otherElements(x), f.otherServices(x), f.device.otherAddresses(x), settings, delivery)
	slices.Sort(different)
	return different, nil
}

// otherElements returns what elements the table should have. It returns none if the table must be
// created again.
func (f *family) otherElements(x *change) (different []string) {
	if x.held == nil {
		return nil
	}
	names := map[string]string{}
	for _, p := range f.ports {
		for _, at := range p.port.Frontends {
			names[others.element(p.port.ID.Protocol, at).key] = p.port.ID.String()
		}
	}
	add := func(what string, k elementKey, e element) {
		if name := cmp.Or(e.comment, names[k.key]); name != "" {
			what += " of " + name
		}
		different = append(different, f.layout.Should("%s for %s in set %s", what, f.layout.describe(k, e), f.layout.sets[k.set].name))
	}
	for k, is := range x.held {
		if _, wanted := x.want[k]; !wanted {
			add("no element", k, is)
		}
	}
	for k, becomes := range x.want {
		switch is, exists := x.held[k]; {
		case !exists:
			add("an element", k, becomes)
		case is != becomes:
			add("another element", k, becomes)
		}
	}
	return different
}

// describe returns the fields of an element's key, as nft prints them.
func (l *layout) describe(k elementKey, e element) string {
	var words []string
	key := []byte(k.key)
	for _, f := range l.sets[k.set].Key {
		b := key[:f.Length]
		switch key = key[(f.Length+3)&^3:]; f {
		case nft.ProtoType:
			words = append(words, strings.ToLower(protocols[uint16(b[0])].String()))
		case nft.PortType:
			words = append(words, fmt.Sprint(binary.BigEndian.Uint16(b)))
		case nft.IntegerType:
			words = append(words, fmt.Sprintf("mark %#x", netlink.Uint32(b)))
		default:
			a, _ := netip.AddrFromSlice(b)
			words = append(words, a.String())
		}
	}
	if e.end != "" {
		a, _ := netip.AddrFromSlice([]byte(e.end[len(e.end)-l.Address.Length:]))
		words[len(words)-1] += "-" + a.String()
	}
	return strings.Join(words, " . ")
}

// otherServices returns what virtual services and backends IPVS should have.
func (f *family) otherServices(x *change) (different []string) {
	owners := map[serviceKey]view.ServicePortID{}
	for _, p := range f.ports {
		for _, v := range f.services(p) {
			owners[v.serviceKey] = v.owner
		}
	}
	for _, c := range slices.Concat(x.before, x.after, x.last) {
		var what string
		switch {
		case c.kind == commandNewService:
			what = "a"
		case c.kind == commandSetService:
			what = fmt.Sprintf("the settings %+v for the", c.virtual.settings())
		case c.kind == commandDelService:
			what = "no"
		case c.kind == commandNewBackend:
			what = fmt.Sprintf("a backend %v of the", c.backend)
		case c.weight > 0:
			what = fmt.Sprintf("backend %v with weight 1, translation and no limits in the", c.backend)
		default:
			what = fmt.Sprintf("no backend %v of the", c.backend)
		}
		what += fmt.Sprintf(" virtual service %v", c.service)
		if owner, known := owners[c.service]; known {
			what += fmt.Sprintf(" of %v", owner)
		}
		different = append(different, what+" in IPVS")
	}
	return different
}

// otherAddresses returns what addresses the device should have.
func (d *device) otherAddresses(x *change) (different []string) {
	if !d.isUp() {
		return []string{"a device " + Device + " that is up"}
	}
	for _, a := range x.arrive {
		different = append(different, fmt.Sprintf("an address %v on device %s", a, Device))
	}
	for _, a := range x.depart {
		different = append(different, fmt.Sprintf("no address %v on device %s, because no Service has it", a, Device))
	}
	return different
}

// otherSettings returns what sysctls and timeouts there should be.
func (m *machine) otherSettings() (different []string, err error) {
	wanted, err := wantedSysctls(m.options)
	if err != nil {
		return nil, err
	}
	for _, name := range slices.Sorted(maps.Keys(wanted)) {
		value := wanted[name]
		name, optional := strings.CutPrefix(name, "?")
		if _, err := os.Stat(filepath.Join("/proc/sys", name)); err != nil && optional {
			continue
		}
		if !programmer.SysctlIs(name, value) {
			different = append(different, fmt.Sprintf("the sysctl %s = %s", strings.ReplaceAll(name, "/", "."), value))
		}
	}
	is, err := m.ipvs.GetConfig()
	if err != nil {
		return nil, fmt.Errorf("read IPVS' timeouts: %w", err)
	}
	o := m.options
	should := mobyipvs.Config{
		TimeoutTCP: cmp.Or(o.TCPTimeout, is.TimeoutTCP), TimeoutTCPFin: cmp.Or(o.TCPFinTimeout, is.TimeoutTCPFin), TimeoutUDP: cmp.Or(o.UDPTimeout, is.TimeoutUDP),
	}
	if *is != should {
		different = append(different, fmt.Sprintf("other timeouts of IPVS: %+v", should))
	}
	return different, nil
}
