package worker

import (
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
	// garbagePercent has garbage collected less often than usual: the caches of thousands of nodes are long to scan.
	garbagePercent = 400
	// memoryShare of the machine is what all workers may take before they collect garbage whatever they were told.
	memoryShare = 2
	// look is the pause between looks for nodes that hold the state although they were not told of each change, and for what was written.
	look = 500 * time.Millisecond
)

// nodes are what a worker simulates.
type nodes interface {
	// Run connects all and keeps them connected until the context ends.
	Run(ctx context.Context)
	// Cut ends all connections. Up tells whether a node is in sync on a stream that has not broken, On, whether with this server.
	Cut()
	Up(m *fleet.Member) bool
	On(m *fleet.Member, server string) bool
	// Objects is how much the first node holds.
	Objects() (services, slices, endpoints int)
}

// Worker does what the run asks for. Its methods are net/rpc's.
type Worker struct {
	ctx context.Context // ends with the process
	log *slog.Logger

	setup    Setup
	identity identity
	cluster  *generate.Cluster // nil: the state is not generated
	group    *fleet.Group
	nodes    nodes
	// One of both is nodes.
	fleet    *fleet.Fleet
	watchers *apiserver.Watchers
	floor    *floor.Clients // nil until it is asked for
	running  sync.WaitGroup
	// quiet keeps nodes from telling that they lost a server that the run has killed.
	quiet *atomic.Bool
	// last is the time at which the last change that is expected is due.
	last time.Time
}

// Serve is the worker's process: it does what it reads from in, until that or the context ends.
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

// Setup makes the nodes.
func (w *Worker) Setup(s Setup, _ *struct{}) (err error) {
	if w.nodes != nil {
		return errors.New("the nodes are there already")
	}
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

// Run has the nodes connect.
func (w *Worker) Run(struct{}, *struct{}) error {
	w.running.Go(func() { w.nodes.Run(w.ctx) })
	return nil
}

// AwaitSync begins to wait for nodes, and lets them be silent: it is known why they come again.
func (w *Worker) AwaitSync(server string, nodes *int) error {
	w.quiet.Store(true)
	var awaited func(*fleet.Member) bool
	if server != "" {
		awaited = func(m *fleet.Member) bool { return w.nodes.On(m, server) }
	}
	*nodes = w.group.AwaitSync(awaited).Count()
	return nil
}

// Synced waits for them.
func (w *Worker) Synced(_ struct{}, c *Cold) error {
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

// Missing names a node that is waited for.
func (w *Worker) Missing(_ struct{}, name *string) error {
	*name = w.group.Sync().Missing()
	if window := w.group.Window(); *name == "" && window != nil {
		if behind := window.Behind(); len(behind) > 0 {
			*name = behind[0].Name
		}
	}
	return nil
}

// Cut ends all connections.
func (w *Worker) Cut(struct{}, *struct{}) error {
	w.nodes.Cut()
	return nil
}

// Expect opens a window.
func (w *Worker) Expect(p generate.Plan, _ *struct{}) error {
	var changes []generate.Change
	if w.cluster != nil {
		for c := range w.cluster.Play(p) {
			c.Slice = nil // the window goes by key and time
			changes = append(changes, c)
			w.last = c.Due
		}
	}
	w.group.Open(w.group.NewWindow(changes))
	return nil
}

// Received waits until nodes have got all that the window expects.
func (w *Worker) Received(_ struct{}, r *Received) error {
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

// delivered waits until each node has got each change, or holds the state after all of them.
func (w *Worker) delivered(window *fleet.Window) error {
	ctx, cancel := context.WithCancel(w.ctx)
	defer cancel()
	type watch struct {
		holding func([]*fleet.Member) []*fleet.Member
		err     error
	}
	var holding func([]*fleet.Member) []*fleet.Member // nil until it is needed, and there
	var watches chan watch
	looks := time.NewTicker(look)
	defer looks.Stop()
	for {
		select {
		case <-window.Delivered():
			return nil
		case <-w.ctx.Done():
			return w.ctx.Err()
		case now := <-looks.C:
			if now.Before(w.last.Add(time.Second)) || len(window.Behind()) == 0 {
				continue
			}
			if watches == nil {
				watches = make(chan watch, 1)
				w.running.Go(func() {
					holding, err := w.holding(ctx)
					watches <- watch{holding, err}
				})
			}
			if holding == nil {
				continue
			}
			for _, m := range holding(window.Behind()) {
				window.Finish(m, time.Now())
			}
		case started := <-watches:
			if started.err != nil {
				return started.err
			}
			holding = started.holding
		}
	}
}

// holding gives what tells which of some nodes hold the state after the last change, until the context ends.
func (w *Worker) holding(ctx context.Context) (func([]*fleet.Member) []*fleet.Member, error) {
	if w.watchers != nil {
		holding, done, err := w.watchers.Holding(ctx)
		if err == nil {
			w.running.Go(func() { <-done })
		}
		return holding, err
	}
	truth, err := w.truth(ctx)
	if err != nil {
		return nil, err
	}
	return w.fleet.Holding(truth), nil
}

// Sample tells how things stand.
func (w *Worker) Sample(_ struct{}, s *Sample) error {
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
		s.FetchedLists, s.CompressedWatches = w.watchers.Fetched(), w.watchers.Compressed()
	}
	return nil
}

// Collect turns the collection of garbage on or off.
func (w *Worker) Collect(on bool, _ *struct{}) error {
	if on {
		debug.SetGCPercent(garbagePercent)
		return nil
	}
	runtime.GC()
	debug.SetGCPercent(-1)
	return nil
}

// Check compares the nodes with the true state: what was generated, what the API server has, or what the running server tells one
// more stream. All must be there for that, also those that were in no change.
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

// truth gives what tells the state after the last change, also where others go on changing it. What follows it ends with the context.
func (w *Worker) truth(ctx context.Context) (func() fleet.Truth, error) {
	switch {
	case w.setup.Kubeconfig != "":
		mirror, done, err := apiserver.StartMirror(ctx, w.setup.Kubeconfig, w.setup.ServiceProxyName, w.log)
		if err != nil {
			return nil, err
		}
		w.running.Go(func() { <-done })
		for w.cluster != nil && !written(mirror.Objects(), w.cluster.Objects(), w.setup.Cluster.Namespace) {
			select {
			case <-ctx.Done():
				return nil, fmt.Errorf("the API server's watches do not bring what was written to the namespace %s; see that it answers, and that nobody else "+
					"writes there: %w", w.setup.Cluster.Namespace, ctx.Err())
			case <-time.After(look):
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
	reference, done, err := w.fleet.StartReference(ctx)
	if err != nil {
		return nil, err
	}
	w.running.Go(func() { <-done })
	return reference.Truth, nil
}

// written tells whether a state is as the run has left the namespace that it writes to, or newer: a watch may begin with an old list.
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

// triggerOf is when what led to a slice's state has happened; Services do not change.
func triggerOf(o model.Object) int64 {
	if s, ok := o.(*model.Slice); ok {
		return s.LastChangeTriggerTimeMS
	}
	return 0
}

// Floor connects raw clients.
func (w *Worker) Floor(address string, received *int64) (err error) {
	if w.floor != nil {
		return errors.New("the clients are there already")
	}
	configs := make([]*tls.Config, len(w.group.Members))
	for i, m := range w.group.Members {
		if configs[i], err = w.identity.tlsConfig(m.Name); err != nil {
			return err
		}
		configs[i].ServerName = "127.0.0.1" // as the address has it
	}
	atATime := w.setup.Connecting
	if atATime == 0 {
		atATime = len(configs)
	}
	if w.floor, err = floor.Dial(w.ctx, address, configs, atATime); err != nil {
		return err
	}
	*received = w.floor.Received()
	return nil
}

// FloorReceived waits until each raw client has got so many bytes.
func (w *Worker) FloorReceived(bytes int64, _ *struct{}) error { return w.floor.Await(w.ctx, bytes) }

// identity is what nodes know themselves and the servers by.
type identity struct {
	roots      *x509.CertPool // nil: plaintext
	serverName string
	// authority issues certificates of nodes; nil: all have one.
	authority   *testca.CA
	certificate tls.Certificate
	// protocols that nodes offer before "h2".
	protocols []string
}

func (i *identity) load(s Setup) (err error) {
	if s.Roots == nil {
		return nil
	}
	if s.CA == nil {
		if i.certificate, err = tls.X509KeyPair(s.Certificate, s.PrivateKey); err != nil {
			return fmt.Errorf("certificate of nodes: %w", err)
		}
	} else if i.authority, err = testca.Parse(s.CA, s.CAKey); err != nil {
		return fmt.Errorf("CA of nodes: %w", err)
	}
	i.roots, i.serverName = x509.NewCertPool(), s.ServerName
	if !i.roots.AppendCertsFromPEM(s.Roots) {
		return errors.New("CA of servers: there is no PEM certificate")
	}
	if !s.Scenario.GRPCGo {
		i.protocols = []string{wire.Protocol}
	}
	return nil
}

// tlsConfig gives a node a certificate.
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
