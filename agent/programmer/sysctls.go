package programmer

import (
	"bytes"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/xtables"
)

const procSys = "/proc/sys"

// RouteLocalnet is the sysctl that makes the kernel route packets of loopback addresses to and from
// the network, so that NodePorts can be on loopback addresses. Before a programmer sets it, rules
// must keep packets from outside away from these addresses: the guard. While the programmer is
// used, it never resets the sysctl, because others may rely on it, and keeps the guard for as long
// as the sysctl is set. See NeedsGuard for what happens when its rules are removed.
const RouteLocalnet = "net/ipv4/conf/all/route_localnet"

// guards are the tables and chains of IPv4 that keep the node's neighbors from loopback addresses.
// Those in the table filter are in either variant of iptables. The last one belongs to kubelet or
// kube-proxy.
var guards = [][2]string{{"slicecast", "guard-loopback"}, {"filter", "SLICECAST-LOCALNET"}, {"filter", "KUBE-FIREWALL"}}

// NeedsGuard reports whether a guard, which exists, must stay when all other rules of its
// programmer are removed, because nothing else guards loopback addresses and packets of them are
// still routed. It resets the sysctl if it can. If there is another guard, the sysctl is for that
// one's owner to keep or reset.
func NeedsGuard() (needed bool, err error) {
	if !SysctlIs(RouteLocalnet, "1") {
		return false, nil
	}
	legacy, err := xtables.Chains(model.IPv4, "filter")
	if err != nil {
		return true, err
	}
	count := 0
	for _, g := range guards {
		has, err := nft.HasChain(model.IPv4, g[0], g[1])
		if err != nil {
			return true, err
		}
		if has {
			count++
		}
		if slices.Contains(legacy, g[1]) {
			count++
		}
	}
	if count > 1 {
		return false, nil
	}
	if err := SetSysctl(RouteLocalnet, "0"); err != nil {
		slog.Warn("Kept the rules that guard the node's loopback addresses, because their packets are still routed",
			"err", err)
		return true, nil
	}
	return false, nil
}

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
