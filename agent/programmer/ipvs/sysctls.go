package ipvs

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

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
		err := os.WriteFile(filepath.Join("/proc/sys", name), []byte(value), 0)
		if err != nil && (!optional || !errors.Is(err, os.ErrNotExist)) {
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
	if err == nil {
		p.unset = ""
		return nil
	}
	programmed := slices.ContainsFunc(p.families, func(f *family) bool { return f.ports != nil })
	if !programmed && !isSet(conntrackSysctl, sysctls[conntrackSysctl]) {
		return err
	}
	if p.unset != err.Error() {
		p.options.Log.Error("Settings of the kernel can't be made; Services are programmed without them", "err", err)
	}
	p.unset = err.Error()
	return nil
}
