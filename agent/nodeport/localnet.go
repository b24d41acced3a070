package nodeport

import (
	"bytes"
	"fmt"
	"os"
)

// RouteLocalnetPath is the sysctl that makes the kernel route packets of loopback addresses to and
// from the network.
const RouteLocalnetPath = "/proc/sys/net/ipv4/conf/all/route_localnet"

// SetRouteLocalnet sets that sysctl, so that NodePorts can be on loopback addresses. Rules must
// keep packets from outside away from these addresses before. The sysctl is never reset, because
// others may rely on it.
func SetRouteLocalnet() error {
	if is, err := os.ReadFile(RouteLocalnetPath); err == nil && string(bytes.TrimSpace(is)) == "1" {
		return nil // a container without privileges can read the sysctl but not set it
	}
	if err := os.WriteFile(RouteLocalnetPath, []byte("1"), 0o644); err != nil {
		return fmt.Errorf("set the sysctl net.ipv4.conf.all.route_localnet to 1: %w", err)
	}
	return nil
}
