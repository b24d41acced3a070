// Package worker is a process with nodes of a load test. A run has one, or several where one process may not have as many
// files open. It simulates its share of the nodes, measures them, and compares them with the true state, which it works out for
// itself; the run adds up what its workers tell.
package worker

import (
	"context"
	"io"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/slicecast/slicecast/loadtest/child"
	"github.com/slicecast/slicecast/loadtest/fleet"
	"github.com/slicecast/slicecast/loadtest/generate"
	"github.com/slicecast/slicecast/loadtest/scenario"
)

// Setup says what nodes a worker has, and what they connect to.
type Setup struct {
	Scenario scenario.Scenario
	// First and Count are the numbers of the nodes. NamePrefix is before the names of all.
	First, Count int
	NamePrefix   string
	// Connecting is how many nodes of the worker connect at a time; 0: all.
	Connecting int

	// Servers are addresses of Slicecast servers; none: the nodes watch the API server of Kubeconfig, as kube-proxies do.
	Servers []string
	// Roots have issued the certificates of servers, CA and CAKey issue those of nodes, or all nodes show one Certificate; all in
	// PEM. Without Roots all is in plaintext.
	Roots, CA, CAKey, Certificate, PrivateKey []byte
	// ServerName that the servers' certificates must have; empty: the host of the address.
	ServerName string

	// Cluster is there if the state follows from it and from the plans.
	Cluster *generate.Config
	// Kubeconfig names the API server that the state comes from, if there is one: it then has the truth. ServiceProxyName is
	// slicecast-server's.
	Kubeconfig       string
	ServiceProxyName string
}

// Cold is how nodes came to the state.
type Cold struct {
	Nodes []fleet.Synced
	// What the first node holds.
	Services, Slices, Endpoints int
	// ServerVersions are what Slicecast's servers tell of themselves.
	ServerVersions []string
}

// Received is what nodes got of a plan, or in a time.
type Received struct {
	// Latencies of ordinary nodes and of slow ones, in microseconds.
	Latencies, Slow *hdrhistogram.Snapshot
	// Convergence is fleet.Window's.
	Convergence [3][]int64
	// Changes that each node had to get; Objects that all of them got in fact.
	Changes int
	Objects int64
}

// Sample is how things stand in a worker.
type Sample struct {
	// Up nodes are in sync now, on a stream that has not broken.
	Up int
	// Applied, Owed and Planned are the window's Progress; without changes that are expected, Applied is objects.
	Applied, Owed, Planned int64
	// Recent are the latencies of what was applied since the last sample.
	Recent *hdrhistogram.Snapshot
	// Traffic since the start, in bytes below TLS.
	ReceivedBytes, SentBytes int64
	// Reconnects is fleet.Group's.
	Reconnects int64
	// FetchedLists is Fetched of an API server's Watchers.
	FetchedLists int64
	// CompressedWatches is Compressed of an API server's Watchers.
	CompressedWatches int64
}

// Checked is the outcome of comparing nodes with the true state.
type Checked struct {
	Shards int
	// Wrong says what is wrong; empty: nothing.
	Wrong string
}

// Process is a worker, seen by the run.
type Process struct{ *child.Process }

// Start starts a worker: this very program with other arguments, which has to call Serve then. The nodes do not connect yet.
// What it says on standard error is written to said.
func Start(ctx context.Context, said io.Writer, arguments []string, setup Setup) (*Process, error) {
	c, err := child.Start("worker", said, arguments...)
	if err != nil {
		return nil, err
	}
	p := &Process{c}
	if err := p.Call(ctx, "Setup", setup, &struct{}{}); err != nil {
		_ = p.Kill() // it has said what is wrong
		return nil, err
	}
	return p, nil
}

// Run has the nodes connect.
func (p *Process) Run(ctx context.Context) error { return p.Call(ctx, "Run", struct{}{}, &struct{}{}) }

// AwaitSync begins to wait for nodes to come to the state on a new stream: those that are on the server with this address, or, if it is
// empty, all. It tells how many these are.
func (p *Process) AwaitSync(ctx context.Context, server string) (nodes int, err error) {
	err = p.Call(ctx, "AwaitSync", server, &nodes)
	return nodes, err
}

// Synced returns when the nodes that are waited for have come to the state.
func (p *Process) Synced(ctx context.Context) (c Cold, err error) {
	err = p.Call(ctx, "Synced", struct{}{}, &c)
	return c, err
}

// Cut ends all connections.
func (p *Process) Cut(ctx context.Context) error { return p.Call(ctx, "Cut", struct{}{}, &struct{}{}) }

// Expect opens a window for the changes of a plan; nil: for whatever comes.
func (p *Process) Expect(ctx context.Context, plan *generate.Plan) error {
	if plan == nil {
		plan = &generate.Plan{Kind: generate.None}
	}
	return p.Call(ctx, "Expect", *plan, &struct{}{})
}

// Received returns when all nodes have received all changes that are expected; where none are, at once.
func (p *Process) Received(ctx context.Context) (r Received, err error) {
	err = p.Call(ctx, "Received", struct{}{}, &r)
	return r, err
}

// Sample tells how things stand.
func (p *Process) Sample(ctx context.Context) (s Sample, err error) {
	err = p.Call(ctx, "Sample", struct{}{}, &s)
	return s, err
}

// Collect has garbage collected now, and from then on when there is no other way, or, if it is on, as usual: each of a
// thousand nodes would else wait for what is collected of the others, as nodes with a machine of their own do not.
func (p *Process) Collect(ctx context.Context, on bool) error {
	return p.Call(ctx, "Collect", on, &struct{}{})
}

// Check waits for nodes that are away and compares all with the true state, for at most so long.
func (p *Process) Check(ctx context.Context, timeout time.Duration) (c Checked, err error) {
	err = p.Call(ctx, "Check", timeout, &c)
	return c, err
}

// Missing names a node that is waited for; empty: there is none.
func (p *Process) Missing(ctx context.Context) (name string, err error) {
	err = p.Call(ctx, "Missing", struct{}{}, &name)
	return name, err
}

// Floor connects as many clients to a floor.Server as there are nodes, and tells what they received until they were there.
func (p *Process) Floor(ctx context.Context, address string) (received int64, err error) {
	err = p.Call(ctx, "Floor", address, &received)
	return received, err
}

// FloorReceived returns when each of them has got so many bytes.
func (p *Process) FloorReceived(ctx context.Context, bytes int64) error {
	return p.Call(ctx, "FloorReceived", bytes, &struct{}{})
}
