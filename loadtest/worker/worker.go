package worker

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"runtime"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/source/kube"
	"github.com/slicecast/slicecast/internal/testca"
	"github.com/slicecast/slicecast/internal/wire"
	"github.com/slicecast/slicecast/loadtest/apiserver"
	"github.com/slicecast/slicecast/loadtest/child"
	"github.com/slicecast/slicecast/loadtest/fleet"
	"github.com/slicecast/slicecast/loadtest/floor"
	"github.com/slicecast/slicecast/loadtest/generate"
	"github.com/slicecast/slicecast/loadtest/report"
	"github.com/slicecast/slicecast/loadtest/usage"
)

const (
	// garbagePercent makes garbage collection rarer than by default, because the caches of
	// thousands of nodes take long to scan.
	garbagePercent = 400
	// memoryShare is the divisor of the machine's memory that all workers together may use before
	// they collect garbage even if it is turned off.
	memoryShare = 2
	// look is the pause between checks for nodes that hold the state although they did not receive
	// each change, and for writes to arrive.
	look = 500 * time.Millisecond
)

// nodes are the nodes that a worker simulates.
type nodes interface {
	// Run connects all nodes and keeps them connected until the context ends.
	Run(ctx context.Context)
	// Cut cuts all connections. Up reports whether a node is in sync on a stream that has not
	// broken, and On reports whether it is on the given server.
	Cut()
	Up(m *fleet.Member) bool
	On(m *fleet.Member, server string) bool
	// Objects returns the numbers of objects on the first node.
	Objects() (services, slices, endpoints int)
}

// Worker answers the calls of the run. Its exported methods are called through net/rpc.
type Worker struct {
	ctx context.Context // ends with the process
	log *slog.Logger

	setup    Setup
	identity identity
	cluster  *generate.Cluster // nil if the run does not make the changes
	group    *fleet.Group
	nodes    nodes
	// nodes is one of these two. The other is nil.
	fleet    *fleet.Fleet
	watchers *apiserver.Watchers
	floor    *floor.Clients // nil before Floor
	running  sync.WaitGroup
	// quiet suppresses warnings of nodes that lose a server because the run kills it.
	quiet *atomic.Bool
	// last is the time at which the last expected change is due.
	last time.Time
}

// Serve runs the worker's process. It answers the calls that it reads from in until in or the
// context ends.
func Serve(ctx context.Context, in io.Reader, out io.WriteCloser, logger *slog.Logger) error {
	debug.SetGCPercent(garbagePercent)
	w := &Worker{quiet: new(atomic.Bool)}
	w.log = slog.New(mutable{logger.Handler(), w.quiet})
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	err := child.Serve(ctx, in, out, func(ctx context.Context) any { w.ctx = ctx; return w })
	cancel()
	if w.floor != nil {
		w.floor.Close()
	}
	w.running.Wait()
	return err
}

// Setup creates the nodes.
func (w *Worker) Setup(s Setup, _ *child.None) (err error) {
	w.setup = s
	machine, err := usage.ThisMachine()
	if err != nil {
		return err
	}
	debug.SetMemoryLimit(machine.Memory / memoryShare / int64(s.Scenario.Nodes) * int64(s.Count))
	if s.Cluster != nil {
		if w.cluster, err = generate.New(*s.Cluster); err != nil {
			return err
		}
	}
	members := make([]*fleet.Member, s.Count)
	for i := range members {
		number := s.First + i
		members[i] = &fleet.Member{Index: i, Name: s.NamePrefix + generate.NodeName(number)}
		if s.Scenario.Slow(number) {
			members[i].Delay = s.Scenario.SlowDelay
		}
	}
	if len(s.Servers) == 0 {
		config, err := kube.Config(s.Kubeconfig)
		if err != nil {
			return err
		}
		w.watchers, err = apiserver.NewWatchers(apiserver.WatchOptions{
			Config: config, ServiceProxyName: s.ServiceProxyName, Members: members, Connecting: s.Connecting, Logger: w.log,
		})
		if err != nil {
			return err
		}
		w.nodes, w.group = w.watchers, &w.watchers.Group
		return nil
	}
	if err := w.identity.load(s); err != nil {
		return err
	}
	w.fleet, err = fleet.New(fleet.Options{
		Servers: s.Servers, Members: members, Credentials: w.identity.credentials, Connecting: s.Connecting, Logger: w.log,
	})
	if err != nil {
		return err
	}
	w.nodes, w.group = w.fleet, &w.fleet.Group
	return nil
}

// Run makes the nodes connect.
func (w *Worker) Run(child.None, *child.None) error {
	w.running.Go(func() { w.nodes.Run(w.ctx) })
	return nil
}

// AwaitSync starts to wait until nodes are in sync on a new stream: those on the server with this
// address, or all nodes if the address is empty. It suppresses their warnings, because the run
// knows why they reconnect.
func (w *Worker) AwaitSync(server string, _ *child.None) error {
	w.quiet.Store(true)
	var awaited func(*fleet.Member) bool
	if server != "" {
		awaited = func(m *fleet.Member) bool { return w.nodes.On(m, server) }
	}
	w.group.AwaitSync(awaited)
	return nil
}

// Synced waits until the awaited nodes are in sync.
func (w *Worker) Synced(_ child.None, c *Cold) error {
	s := w.group.Sync()
	select {
	case <-s.Done():
	case <-w.ctx.Done():
		return w.ctx.Err()
	}
	w.quiet.Store(false)
	c.Nodes = s.Nodes()
	c.Services, c.Slices, c.Endpoints = w.nodes.Objects()
	if w.fleet != nil {
		c.ServerVersions = w.fleet.ServerVersions()
	}
	return nil
}

// Missing returns the name of an awaited node that is behind. It is empty if there is none.
func (w *Worker) Missing(_ child.None, name *string) error {
	*name = w.group.Sync().Missing()
	if window := w.group.Window(); *name == "" && window != nil {
		if behind := window.Behind(); len(behind) > 0 {
			*name = behind[0].Name
		}
	}
	return nil
}

// Cut cuts all connections.
func (w *Worker) Cut(child.None, *child.None) error {
	w.nodes.Cut()
	return nil
}

// Expect opens a window for the changes of a plan. If the run does not make the changes, the window
// is for any changes.
func (w *Worker) Expect(p generate.Plan, _ *child.None) error {
	var changes []generate.Change
	if w.cluster != nil {
		for c := range w.cluster.Play(p) {
			c.Slice = nil // the window uses only key and time
			changes = append(changes, c)
			w.last = c.Due
		}
	}
	w.group.Open(w.group.NewWindow(changes))
	return nil
}

// Received waits until all nodes have received all changes that the window expects. If it expects
// none, Received returns at once.
func (w *Worker) Received(_ child.None, r *Received) error {
	window := w.group.Window()
	_, _, all := window.Progress()
	if all > 0 {
		if err := w.delivered(window); err != nil {
			return err
		}
		r.Convergence = window.Convergence()
	}
	ordinary, slow := window.Latencies()
	r.Latencies, r.Slow = ordinary.Export(), slow.Export()
	r.Changes, r.Objects = int(all)/len(w.group.Members), window.Objects()
	return nil
}

// delivered waits until each node has received each change, or holds the state after all of them.
func (w *Worker) delivered(window *fleet.Window) error {
	ctx, cancel := context.WithCancelCause(w.ctx)
	defer cancel(nil)
	w.running.Go(func() { cancel(w.finish(ctx, window)) })
	select {
	case <-window.Delivered():
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// finish looks for nodes that hold the state after the last change although they did not receive
// each change, until the context ends. It gives nodes a second before the first look.
func (w *Worker) finish(ctx context.Context, window *fleet.Window) error {
	if err := generate.Await(ctx, w.last.Add(time.Second)); err != nil {
		return err
	}
	holding, err := w.holding(ctx)
	if err != nil {
		return err
	}
	for generate.Await(ctx, time.Now().Add(look)) == nil {
		for _, m := range holding(window.Behind()) {
			window.Finish(m, time.Now())
		}
	}
	return ctx.Err()
}

// holding returns a function that returns those of the given nodes that hold the state after the
// last change. The function works until the context ends.
func (w *Worker) holding(ctx context.Context) (func([]*fleet.Member) []*fleet.Member, error) {
	if w.watchers != nil {
		return w.watchers.Holding(ctx, &w.running)
	}
	truth, err := w.truth(ctx)
	if err != nil {
		return nil, err
	}
	return w.fleet.Holding(truth), nil
}

// Sample returns the current progress.
func (w *Worker) Sample(_ child.None, s *Sample) error {
	for _, m := range w.group.Members {
		if w.nodes.Up(m) {
			s.Up++
		}
	}
	recent := report.NewHistogram()
	if window := w.group.Window(); window != nil {
		s.Applied, s.Owed, s.Planned = window.Progress()
		if s.Planned == 0 {
			s.Applied = window.Objects()
		}
		recent = window.TakeRecent()
	}
	s.Recent = recent.Export()
	s.ReceivedBytes, s.SentBytes = w.group.Traffic()
	s.Reconnects = w.group.Reconnects()
	if w.watchers != nil {
		s.FetchedLists, s.CompressedLists = w.watchers.Fetched.Load(), w.watchers.Compressed.Load()
	}
	return nil
}

// Collect prepares the worker for changes if on is false: it computes the digests of its nodes, and
// collects garbage now, and from then on only under memory pressure. If on is true, it restores
// normal collection. Otherwise nodes would wait during the changes for the digests and the garbage
// of thousands of others, unlike nodes with a machine of their own.
func (w *Worker) Collect(on bool, _ *child.None) error {
	if on {
		debug.SetGCPercent(garbagePercent)
		return nil
	}
	if w.fleet != nil {
		w.fleet.ComputeDigests()
	}
	runtime.GC()
	debug.SetGCPercent(-1)
	return nil
}

// Check compares the nodes with the true state. That is what was generated, what the API server
// has, or what the running server sends on one more stream. All nodes must be up for this, even
// those that received no change. Waiting for them and the comparison together may take as long as
// the timeout.
func (w *Worker) Check(timeout time.Duration, c *Checked) error {
	ctx, cancel := context.WithTimeout(w.ctx, timeout)
	defer cancel()
	err := w.check(ctx, c)
	if errors.Is(err, fleet.ErrDiverged) {
		c.Wrong, err = err.Error(), nil
	}
	return err
}

func (w *Worker) check(ctx context.Context, c *Checked) error {
	if err := w.group.Stay(ctx, w.nodes.Up); err != nil {
		return err
	}
	if w.watchers != nil {
		return w.watchers.Check(ctx)
	}
	c.Shards = w.fleet.Shards()
	truth, err := w.truth(ctx)
	if err != nil {
		return err
	}
	return w.fleet.Check(ctx, truth)
}

// truth returns a function that returns the true state after the last change, even while others
// change it. Its source is followed until the context ends.
func (w *Worker) truth(ctx context.Context) (func() fleet.Truth, error) {
	switch {
	case w.setup.Kubeconfig != "":
		mirror, err := apiserver.StartMirror(ctx, &w.running, w.setup.Kubeconfig, w.setup.ServiceProxyName, w.log)
		if err != nil {
			return nil, err
		}
		for w.cluster != nil && !written(mirror.Objects(), w.cluster.Objects(), w.setup.Cluster.Namespace) {
			if err := generate.Await(ctx, time.Now().Add(look)); err != nil {
				return nil, fmt.Errorf("watches of the API server do not show the state that was written to the namespace %s: "+
					"check that it answers and that nothing else writes there: %w", w.setup.Cluster.Namespace, err)
			}
		}
		return func() fleet.Truth {
			truth := fleet.TruthOf(mirror.Objects(), w.fleet.Shards())
			truth.Moving = true
			return truth
		}, nil
	case w.cluster != nil:
		truth := fleet.TruthOf(w.cluster.Objects(), w.fleet.Shards())
		return func() fleet.Truth { return truth }, nil
	}
	return w.fleet.StartReference(ctx, &w.running)
}

// written reports whether a state includes all that the run has written to its namespace. A watch
// may start with a list that is older.
func written(state, left []model.Object, namespace string) bool {
	triggers := make(map[model.Key]int64)
	for _, o := range left {
		triggers[o.Key()] = triggerOf(o)
	}
	for _, o := range state {
		if o.Key().Namespace != namespace {
			continue
		}
		trigger, is := triggers[o.Key()]
		if !is || triggerOf(o) < trigger {
			return false
		}
		delete(triggers, o.Key())
	}
	return len(triggers) == 0
}

// triggerOf returns the last-change-trigger-time of a slice. Services do not change, so theirs is
// 0.
func triggerOf(o model.Object) int64 {
	if s, ok := o.(*model.Slice); ok {
		return s.LastChangeTriggerTimeMS
	}
	return 0
}

// Floor connects as many clients to a floor.Server as there are nodes. It returns the bytes that
// they received until they were connected.
func (w *Worker) Floor(address string, received *int64) (err error) {
	configs := make([]*tls.Config, len(w.group.Members))
	for i, m := range w.group.Members {
		if configs[i], err = w.identity.tlsConfig(m.Name); err != nil {
			return err
		}
		configs[i].ServerName = "127.0.0.1" // the host of the address
	}
	if w.floor, err = floor.Dial(w.ctx, address, configs, cmp.Or(w.setup.Connecting, len(configs))); err != nil {
		return err
	}
	*received = w.floor.Received()
	return nil
}

// FloorReceived waits until each raw client has received a number of bytes.
func (w *Worker) FloorReceived(bytes int64, _ *child.None) error { return w.floor.Await(w.ctx, bytes) }

type identity struct {
	roots      *x509.CertPool // nil for plaintext
	serverName string
	// authority issues the certificates of nodes. If it is nil, all nodes use certificate.
	authority   *testca.CA
	certificate tls.Certificate
	// protocols are the protocols that nodes offer in TLS before "h2".
	protocols []string
}

func (i *identity) load(s Setup) (err error) {
	if s.Roots == nil {
		return nil
	}
	if s.CA == nil {
		if i.certificate, err = tls.X509KeyPair(s.Certificate, s.PrivateKey); err != nil {
			return fmt.Errorf("load the certificate of nodes: %w", err)
		}
	} else if i.authority, err = testca.Parse(s.CA, s.CAKey); err != nil {
		return fmt.Errorf("load the CA of nodes: %w", err)
	}
	i.roots, i.serverName = x509.NewCertPool(), s.ServerName
	if !i.roots.AppendCertsFromPEM(s.Roots) {
		return errors.New("the CA of servers has no PEM certificate")
	}
	if !s.Scenario.GRPCGo {
		i.protocols = []string{wire.Protocol}
	}
	return nil
}

func (i *identity) tlsConfig(node string) (_ *tls.Config, err error) {
	certificate := i.certificate
	if i.authority != nil {
		if certificate, err = i.authority.Node(node); err != nil {
			return nil, err
		}
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS13, RootCAs: i.roots, ServerName: i.serverName, Certificates: []tls.Certificate{certificate},
		NextProtos: slices.Clone(i.protocols),
	}, nil
}

func (i *identity) credentials(node string) (credentials.TransportCredentials, error) {
	if i.roots == nil {
		return insecure.NewCredentials(), nil
	}
	config, err := i.tlsConfig(node)
	if err != nil {
		return nil, err
	}
	return credentials.NewTLS(config), nil
}
