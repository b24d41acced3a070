package engine

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"sync/atomic"

	"github.com/slicecast/slicecast/internal/source/kube"
	"github.com/slicecast/slicecast/internal/testca"
	"github.com/slicecast/slicecast/loadtest/apiserver"
	"github.com/slicecast/slicecast/loadtest/child"
	"github.com/slicecast/slicecast/loadtest/generate"
	"github.com/slicecast/slicecast/loadtest/report"
	"github.com/slicecast/slicecast/loadtest/scenario"
	"github.com/slicecast/slicecast/loadtest/target"
	"github.com/slicecast/slicecast/loadtest/worker"
)

const (
	// ownNamespace is where the scenario is in an API server of the run's own.
	ownNamespace = "loadtest"
	// namePrefix is before the names of nodes that share a server with real ones: the newest stream of a node ends the one before.
	namePrefix = "slicecast-loadtest-"
)

// stack is all that takes part in a run.
type stack struct {
	options  *Options
	scenario *scenario.Scenario
	// lost is told why a process has ended that should not.
	lost context.CancelCauseFunc
	// said takes what processes say.
	said io.Writer

	// kubeconfig of the API server whose state is distributed, and the version that it tells; empty: there is none. etcdVersion
	// is its etcd's if it is the run's own.
	kubeconfig, kubeVersion, etcdVersion string

	own    *own              // nil: it is somebody else's
	writer *apiserver.Writer // nil: nothing is written to it
	// process is asked for the API server's CPU time where nobody else can tell it; untold says why it cannot be.
	process *apiserver.Process
	untold  error

	authority *testca.CA
	cluster   *generate.Config // nil: the changes are not the run's
	plans     []generate.Plan
	servers   []*server // they have the state from the beginning of the chain
	relays    []*server
	workers   []*worker.Process
}

// server is a process of the run's own that serves Slicecast.
type server struct {
	*target.Process
	setup target.Setup
	// leaving: it is going to be killed, or the run is over.
	leaving atomic.Bool
}

// start starts everything; the nodes do not connect yet. What was started is there even if it fails.
func (s *stack) start(ctx context.Context) error {
	if s.options.KubeAPIServer != "" {
		if err := s.startAPI(ctx); err != nil {
			return err
		}
	}
	setup := worker.Setup{Scenario: *s.scenario, Kubeconfig: s.kubeconfig, ServiceProxyName: s.proxy()}
	if s.options.writes() {
		c := s.scenario.Cluster()
		if s.writer != nil {
			c.Namespace = s.namespace()
		}
		s.cluster, setup.Cluster = &c, &c
	}
	switch {
	case s.options.Peer == report.KubeAPIServer: // the nodes watch it
	case s.options.Server != "":
		if err := s.observe(&setup); err != nil {
			return err
		}
	default:
		if err := s.startServers(ctx, &setup); err != nil {
			return err
		}
	}
	return s.startWorkers(ctx, setup)
}

// besideOwn tells whether Slicecast's servers watch an API server of the run's own.
func (s *stack) besideOwn() bool { return s.own != nil && s.options.Peer == report.Slicecast }

// namespace that the scenario is in.
func (s *stack) namespace() string {
	if s.own != nil {
		return ownNamespace
	}
	return s.options.WriteNamespace
}

// proxy is the service-proxy-name of what is distributed.
func (s *stack) proxy() string {
	if s.options.WriteNamespace != "" {
		return apiserver.PrivateProxy
	}
	return ""
}

// startAPI starts an API server, if it is to be the run's own, and what is written there.
func (s *stack) startAPI(ctx context.Context) (err error) {
	s.kubeconfig = s.options.KubeAPIServer
	if s.kubeconfig == Own {
		if s.own, err = startOwn(ctx); err != nil {
			return err
		}
		s.kubeconfig = s.own.kubeconfig
		if s.etcdVersion, err = s.own.control.EtcdVersion(ctx); err != nil {
			return err
		}
	}
	config, err := kube.Config(s.kubeconfig)
	if err != nil {
		return err
	}
	if s.kubeVersion, err = apiserver.Version(ctx, config); err != nil {
		return err
	}
	if s.options.Peer == report.KubeAPIServer && s.own == nil && s.options.ServerPID == 0 {
		if err := s.ask(ctx, config); err != nil {
			return err
		}
	}
	if s.options.writes() {
		if s.own == nil {
			slog.Warn("What is written reaches the cluster's own nodes: kube-proxies, and Slicecast's servers and agents, get all EndpointSlices, "+
				"and pass over only the Services", "namespace", s.namespace(), "service-proxy-name", s.proxy())
		}
		s.writer, err = apiserver.NewWriter(ctx, config, s.namespace(), s.proxy(), s.scenario.Cluster())
	}
	return err
}

// observe has nodes connect to a running server.
func (s *stack) observe(setup *worker.Setup) (err error) {
	o := s.options
	setup.Servers, setup.NamePrefix = []string{o.Server}, namePrefix
	if o.InsecurePlaintext {
		return nil
	}
	setup.ServerName = o.ServerName
	for into, file := range map[*[]byte]string{
		&setup.Roots: o.CAFile, &setup.CA: o.NodeCACertFile, &setup.CAKey: o.NodeCAKeyFile,
		&setup.Certificate: o.ClientCertFile, &setup.PrivateKey: o.ClientKeyFile,
	} {
		if file == "" {
			continue
		}
		if *into, err = os.ReadFile(file); err != nil {
			return fmt.Errorf("%s: %w", tlsFlags, err)
		}
	}
	return nil
}

// startServers starts servers, and relays.
func (s *stack) startServers(ctx context.Context, setup *worker.Setup) (err error) {
	if s.authority, err = testca.New(); err != nil {
		return err
	}
	setup.CA, setup.Roots = s.authority.PEM(), s.authority.PEM()
	if setup.CAKey, err = s.authority.KeyPEM(); err != nil {
		return err
	}
	roots, err := target.Addresses(s.scenario.Servers)
	if err != nil {
		return err
	}
	root := target.Setup{Cluster: s.cluster, Servers: roots, Kubeconfig: s.kubeconfig, ServiceProxyName: s.proxy()}
	if s.kubeconfig != "" {
		root.Cluster = nil
	}
	if s.servers, err = s.startTier(ctx, root, func() (tls.Certificate, error) { return s.authority.Server("127.0.0.1") }); err != nil {
		return err
	}
	setup.Servers = roots
	if s.scenario.Relays > 0 {
		relays, err := target.Addresses(s.scenario.Relays)
		if err != nil {
			return err
		}
		s.relays, err = s.startTier(ctx, target.Setup{Upstream: roots, Servers: relays}, func() (tls.Certificate, error) {
			return s.authority.Relay("127.0.0.1")
		})
		if err != nil {
			return err
		}
		setup.Servers = relays
	}
	return nil
}

// startTier starts servers at all addresses of a setup.
func (s *stack) startTier(ctx context.Context, setup target.Setup, certificate func() (tls.Certificate, error)) (tier []*server, err error) {
	setup.ClientCA = s.authority.PEM()
	for _, address := range setup.Servers {
		c, err := certificate()
		if err != nil {
			return tier, err
		}
		if setup.Certificate, setup.PrivateKey, err = testca.EncodePEM(c); err != nil {
			return tier, err
		}
		setup.Address = address
		one := &server{setup: setup}
		if err := s.startServer(ctx, one); err != nil {
			return tier, err
		}
		tier = append(tier, one)
	}
	return tier, nil
}

func (s *stack) startServer(ctx context.Context, one *server) (err error) {
	if one.setup.Cluster != nil {
		one.setup.Plans = s.plans
	}
	p, err := target.Start(ctx, s.said, s.arguments(ServeCommand), one.setup)
	if err != nil {
		return err
	}
	one.Process = p
	go func() {
		if <-p.Ended(); !one.leaving.Load() {
			s.lost(fmt.Errorf("a server: %w", child.ErrEnded))
		}
	}()
	return nil
}

// startWorkers starts the processes with nodes.
func (s *stack) startWorkers(ctx context.Context, setup worker.Setup) error {
	processes := (s.scenario.Nodes + s.options.PerWorker - 1) / s.options.PerWorker
	for i := range processes {
		setup.First = s.scenario.Nodes * i / processes
		setup.Count = s.scenario.Nodes*(i+1)/processes - setup.First
		if setup.Connecting = (s.scenario.Connecting + processes - 1) / processes; s.scenario.Connecting == 0 {
			setup.Connecting = 0
		}
		w, err := worker.Start(ctx, s.said, s.arguments(WorkCommand), setup)
		if err != nil {
			return err
		}
		s.workers = append(s.workers, w)
	}
	return nil
}

func (s *stack) arguments(command string) []string {
	return []string{command, "--log-level=" + s.options.Log.Level, "--log-format=" + s.options.Log.Format}
}

// all lists the servers of the run's own.
func (s *stack) all() []*server { return slices.Concat(s.servers, s.relays) }

// remove forgets a server that was killed.
func (s *stack) remove(one *server) {
	not := func(other *server) bool { return other == one }
	s.servers = slices.DeleteFunc(s.servers, not)
	s.relays = slices.DeleteFunc(s.relays, not)
}

// close ends everything, nodes first.
func (s *stack) close() (err error) {
	var errs []error
	for _, w := range s.workers {
		errs = append(errs, w.Close())
	}
	for _, one := range slices.Concat(s.relays, s.servers) {
		one.leaving.Store(true)
		errs = append(errs, one.Close())
	}
	if s.writer != nil && s.own == nil {
		errs = append(errs, s.writer.Close())
	}
	if s.own != nil {
		errs = append(errs, s.own.close())
	}
	return errors.Join(errs...)
}
