// Package target is a server that a load test is run against, as a process of its own whose CPU time and memory can be told
// apart from the nodes': slicecast-server's own parts (server/app), fed with generated state, by a cluster, or by other
// servers. Beside them it has a floor.Server.
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

// Setup says what to serve, and with what certificates, all in PEM. Of the first three fields one says where the state is from.
type Setup struct {
	// Cluster is generated, and changed by Plans, those that follow included.
	Cluster *generate.Config
	Plans   []generate.Plan
	// Kubeconfig names the API server that is watched.
	Kubeconfig string
	// Upstream are the addresses of the servers whose relay this is.
	Upstream []string

	// ServiceProxyName is slicecast-server's.
	ServiceProxyName string
	// Address to serve on.
	Address string
	// Servers are the addresses that nodes are told of.
	Servers []string
	// Certificate also shows a relay to its upstream servers, which ClientCA has issued, too.
	Certificate, PrivateKey, ClientCA []byte
}

// Memory is what the server's process has in use, without garbage, in bytes.
type Memory struct {
	Heap, Stacks int64
}

// Process is a running server's, seen by its parent.
type Process struct {
	*child.Process
	// Address that it serves gRPC on.
	Address string
}

// Start starts the server: this very program with other arguments, which has to call Serve then. It returns when the server
// listens. What it says on standard error is written to said.
func Start(ctx context.Context, said io.Writer, arguments []string, setup Setup) (*Process, error) {
	p, err := child.Start("server", said, arguments...)
	if err != nil {
		return nil, err
	}
	if err := p.Call(ctx, "Setup", setup, &struct{}{}); err != nil {
		_ = p.Kill() // it has said what is wrong
		return nil, err
	}
	return &Process{p, setup.Address}, nil
}

// Play has one more plan carried out, after those before it.
func (p *Process) Play(ctx context.Context, plan generate.Plan) error {
	return p.Call(ctx, "Play", plan, &struct{}{})
}

// Played waits until one more plan has been carried out, and tells how late its changes were made.
func (p *Process) Played(ctx context.Context) (lag generate.Lag, err error) {
	err = p.Call(ctx, "Played", struct{}{}, &lag)
	return lag, err
}

// Memory has the process collect its garbage, and counts what is left, when its state is there.
func (p *Process) Memory(ctx context.Context) (m Memory, err error) {
	err = p.Call(ctx, "Memory", struct{}{}, &m)
	return m, err
}

// Listen has the process listen as a floor.Server, and gives its address.
func (p *Process) Listen(ctx context.Context) (address string, err error) {
	err = p.Call(ctx, "Listen", struct{}{}, &address)
	return address, err
}

// Write has the floor.Server write.
func (p *Process) Write(ctx context.Context, w floor.Writes) (lag generate.Lag, err error) {
	err = p.Call(ctx, "Write", w, &lag)
	return lag, err
}

// Addresses finds ports of loopback outside the kernel's range for outgoing connections, so that no node takes one while a
// server is away.
func Addresses(n int) (out []string, err error) {
	for range 100 * n {
		if len(out) == n {
			return out, nil
		}
		address := fmt.Sprintf("127.0.0.1:%d", 20000+rand.IntN(10000))
		var l net.Listener
		if l, err = net.Listen("tcp", address); err == nil && !slices.Contains(out, address) {
			out = append(out, address)
			err = l.Close()
		}
	}
	return nil, fmt.Errorf("there is no free port: %w", err)
}
