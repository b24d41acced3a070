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

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/slicecast/slicecast/internal/ca"
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
	// ownNamespace is the namespace of the scenario in an API server that the run started.
	ownNamespace = "loadtest"
	// namePrefix is the prefix of node names if nodes share a server with real nodes. It keeps
	// names distinct, because the newest stream of a node ends the one before.
	namePrefix = "slicecast-loadtest-"
)

// stack is the set of processes and connections of a run.
type stack struct {
	options  *Options
	scenario *scenario.Scenario
	// lost cancels the run with the reason why a process has ended that should not have.
	lost context.CancelCauseFunc
	// said receives the output of child processes.
	said io.Writer

	// kubeconfig is the kubeconfig of the API server whose state is distributed, and kubeVersion
	// the version that it reports. Both are empty if there is no API server. etcdVersion is the
	// version of its etcd if the run started it.
	kubeconfig, kubeVersion, etcdVersion string

	own    *own              // nil if the run did not start an API server
	writer *apiserver.Writer // nil if the run does not write to an API server
	// process reads the CPU time of the API server of an existing cluster. It is nil if there is a
	// better source, or if untold says why it cannot be read.
	process rest.Interface
	untold  error

	authority *testca.CA
	cluster   *generate.Config // nil if the run does not make the changes
	plans     []generate.Plan
	servers   []*server // servers that hold the state themselves, not relays
	relays    []*server
	workers   []*child.Process
}

type server struct {
	*child.Process
	setup target.Setup
	// leaving is set before the server is killed or closed, so that its end is no error.
	leaving atomic.Bool
}

// start starts all processes. The nodes do not connect yet. If it fails, close ends what was
// started.
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
	case s.options.Peer == report.KubeAPIServer: // the nodes watch the API server
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

// besideOwn reports whether Slicecast's servers watch an API server that the run started.
func (s *stack) besideOwn() bool { return s.own != nil && s.options.Peer == report.Slicecast }

func (s *stack) namespace() string {
	if s.own != nil {
		return ownNamespace
	}
	return s.options.WriteNamespace
}

func (s *stack) proxy() string {
	if s.options.WriteNamespace != "" {
		return apiserver.PrivateProxy
	}
	return ""
}

// startAPI connects to the API server, which it starts if required, and prepares it for writes.
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
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	version, err := client.DiscoveryClient.ServerVersionWithContext(ctx)
	if err != nil {
		return fmt.Errorf("get the version of the API server %s: %w", config.Host, err)
	}
	s.kubeVersion = version.GitVersion
	if s.options.Peer == report.KubeAPIServer && s.own == nil && s.options.ServerPID == 0 {
		s.ask(ctx, client.CoreV1().RESTClient())
	}
	if s.options.writes() {
		if s.own == nil {
			slog.Warn("The cluster's own nodes receive the load test's EndpointSlices",
				"namespace", s.namespace(), "service-proxy-name", s.proxy())
		}
		s.writer, err = apiserver.NewWriter(ctx, config, s.namespace(), s.proxy(), s.scenario.Cluster())
	}
	return err
}

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
	if s.servers, err = s.startTier(ctx, root, s.authority.Server); err != nil {
		return err
	}
	setup.Servers = roots
	if s.scenario.Relays > 0 {
		relays, err := target.Addresses(s.scenario.Relays)
		if err != nil {
			return err
		}
		if s.relays, err = s.startTier(ctx, target.Setup{Upstream: roots, Servers: relays}, s.authority.Relay); err != nil {
			return err
		}
		setup.Servers = relays
	}
	return nil
}

// startTier starts a server at each address of a setup. Servers that were started are returned even
// if it fails.
func (s *stack) startTier(
	ctx context.Context, setup target.Setup, certificate func(names ...string) (tls.Certificate, error),
) (tier []*server, err error) {
	setup.ClientCA = s.authority.PEM()
	for _, address := range setup.Servers {
		c, err := certificate("127.0.0.1")
		if err != nil {
			return tier, err
		}
		if setup.Certificate, setup.PrivateKey, err = ca.EncodePEM(c); err != nil {
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
	one.Process, err = child.Start(ctx, "server", s.said, s.arguments(ServeCommand), (*target.Servant).Setup, one.setup)
	if err != nil {
		return err
	}
	go func() {
		if <-one.Ended(); !one.leaving.Load() {
			s.lost(fmt.Errorf("a server: %w", child.ErrEnded))
		}
	}()
	return nil
}

func (s *stack) startWorkers(ctx context.Context, setup worker.Setup) error {
	processes := (s.scenario.Nodes + s.options.PerWorker - 1) / s.options.PerWorker
	setup.Connecting = (s.scenario.Connecting + processes - 1) / processes // 0, for no limit, stays 0
	for i := range processes {
		setup.First = s.scenario.Nodes * i / processes
		setup.Count = s.scenario.Nodes*(i+1)/processes - setup.First
		w, err := child.Start(ctx, "worker", s.said, s.arguments(WorkCommand), (*worker.Worker).Setup, setup)
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

func (s *stack) all() []*server { return slices.Concat(s.relays, s.servers) }

func (s *stack) remove(one *server) {
	is := func(other *server) bool { return other == one }
	s.servers, s.relays = slices.DeleteFunc(s.servers, is), slices.DeleteFunc(s.relays, is)
}

// close ends all processes, those with nodes first.
func (s *stack) close() error {
	var errs []error
	for _, w := range s.workers {
		errs = append(errs, w.Close())
	}
	for _, one := range s.all() {
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
