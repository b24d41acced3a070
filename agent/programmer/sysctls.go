package programmer

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

const procSys = "/proc/sys"

// RouteLocalnet is the sysctl that makes the kernel route packets of loopback addresses to and from
// the network, so that NodePorts can be on loopback addresses. Before a programmer sets it, rules
// must keep packets from outside away from these addresses. It is never reset, because others may
// rely on it.
const RouteLocalnet = "net/ipv4/conf/all/route_localnet"

// SysctlIs reports whether a sysctl has a value. Its name is its path below /proc/sys.
func SysctlIs(name, value string) bool {
	is, err := os.ReadFile(filepath.Join(procSys, name))
	return err == nil && string(bytes.TrimSpace(is)) == value
}

// SetSysctl sets a sysctl unless it has the value already: a container without privileges can read
// a sysctl but not set it.
func SetSysctl(name, value string) error {
	if SysctlIs(name, value) {
		return nil
	}
	if err := os.WriteFile(filepath.Join(procSys, name), []byte(value), 0); err != nil {
		return fmt.Errorf("set the sysctl %s to %s: %w", strings.ReplaceAll(name, "/", "."), value, err)
	}
	return nil
}

// TCPIsLiberal reports whether conntrack accepts TCP segments outside of the window as valid. Then
// some packets of a connection may bypass conntrack, and the administrator wants none of them
// dropped for that.
func TCPIsLiberal() bool { return SysctlIs("net/netfilter/nf_conntrack_tcp_be_liberal", "1") }
