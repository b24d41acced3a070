// Package target runs a server for a load test in a process of its own, so that its CPU time and
// memory can be measured separately from those of the nodes. The process runs the parts of
// slicecast-server (server/app) with state that is generated, comes from a cluster, or comes from
// other servers. It can also run a floor.Server.
package target

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"slices"

	"github.com/slicecast/slicecast/loadtest/child"
	"github.com/slicecast/slicecast/loadtest/floor"
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

// Memory is the memory of the server's process after garbage collection, in bytes.
type Memory struct {
	Heap, Stacks int64
}

// Process is the parent's handle on a server process.
type Process struct {
	*child.Process
	// Address is the address on which it serves gRPC.
	Address string
}

// Start starts a server process: this program with the given arguments, which must lead to a call
// of Serve. It returns once the server is set up. The standard error of the process is copied to
// said.
func Start(ctx context.Context, said io.Writer, arguments []string, setup Setup) (*Process, error) {
	p, err := child.Start("server", said, arguments...)
	if err != nil {
		return nil, err
	}
	if err := p.Call(ctx, "Setup", setup, &struct{}{}); err != nil {
		_ = p.Kill() // the error of the call says more
		return nil, err
	}
	return &Process{p, setup.Address}, nil
}

// Play queues a plan, to be carried out after those before it.
func (p *Process) Play(ctx context.Context, plan generate.Plan) error {
	return p.Call(ctx, "Play", plan, &struct{}{})
}

// Played waits until one more plan has been carried out, and returns how late its changes were
// made.
func (p *Process) Played(ctx context.Context) (lag generate.Lag, err error) {
	err = p.Call(ctx, "Played", struct{}{}, &lag)
	return lag, err
}

// Memory waits until the process has its state, collects garbage, and returns the memory that is
// still in use.
func (p *Process) Memory(ctx context.Context) (m Memory, err error) {
	err = p.Call(ctx, "Memory", struct{}{}, &m)
	return m, err
}

// Listen starts a floor.Server in the process, and returns its address.
func (p *Process) Listen(ctx context.Context) (address string, err error) {
	err = p.Call(ctx, "Listen", struct{}{}, &address)
	return address, err
}

// Write makes the floor.Server write.
func (p *Process) Write(ctx context.Context, w floor.Writes) (lag generate.Lag, err error) {
	err = p.Call(ctx, "Write", w, &lag)
	return lag, err
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
