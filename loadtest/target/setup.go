// Package target runs a server for a load test in a process of its own, so that its CPU time and
// memory can be measured separately from those of the nodes. The process runs the parts of
// slicecast-server (server/app) with state that is generated, comes from a cluster, or comes from
// other servers. It can also run a floor.Server.
package target

import (
	"fmt"
	"math/rand/v2"
	"net"
	"slices"

	"github.com/slicecast/slicecast/loadtest/generate"
)

// Setup configures a server. Certificates and keys are in PEM. Exactly one of Cluster, Kubeconfig
// and Upstream is set; it is the source of the state.
type Setup struct {
	// Cluster is the state to generate. Plans, and later calls of Play, change it.
	Cluster *generate.Config
	Plans   []generate.Plan
	// Kubeconfig is the kubeconfig of the API server to watch.
	Kubeconfig string
	// Upstream are the addresses of the upstream servers of a relay.
	Upstream []string

	// ServiceProxyName is slicecast-server's --service-proxy-name.
	ServiceProxyName string
	// Address is the address (host:port) to serve on.
	Address string
	// Servers are the addresses that the server announces to nodes.
	Servers []string
	// Certificate and PrivateKey identify the server to nodes, and a relay to its upstream servers.
	// ClientCA issued the certificates of nodes and upstream servers.
	Certificate, PrivateKey, ClientCA []byte
}

// Addresses returns n free loopback addresses. Their ports are outside the kernel's range for
// outgoing connections, so no node can take one while a server is away.
func Addresses(n int) (out []string, err error) {
	for range 100 * n {
		if len(out) == n {
			return out, nil
		}
		address := fmt.Sprintf("127.0.0.1:%d", 20000+rand.IntN(10000))
		if slices.Contains(out, address) {
			continue
		}
		var l net.Listener
		if l, err = net.Listen("tcp", address); err == nil {
			out = append(out, address)
			err = l.Close()
		}
	}
	return nil, fmt.Errorf("find %d free ports from 20000 to 29999, found %d: %w", n, len(out), err)
}
