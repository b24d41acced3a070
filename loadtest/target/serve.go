package target

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"runtime"
	"runtime/debug"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"github.com/slicecast/slicecast/agent/client"
	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/internal/source/kube"
	"github.com/slicecast/slicecast/internal/tlsfiles"
	"github.com/slicecast/slicecast/internal/wire"
	"github.com/slicecast/slicecast/loadtest/child"
	"github.com/slicecast/slicecast/loadtest/floor"
	"github.com/slicecast/slicecast/loadtest/generate"
	"github.com/slicecast/slicecast/loadtest/report"
	"github.com/slicecast/slicecast/loadtest/usage"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
	serverapp "github.com/slicecast/slicecast/server/app"
)

// gracePeriod limits the wait for streams at the end of the process. Their nodes have ended by then
// or are about to.
const gracePeriod = 5 * time.Second

// Serve runs the server's process. It answers the calls that it reads from in until in or the
// context ends.
func Serve(ctx context.Context, in io.Reader, out io.WriteCloser, logger *slog.Logger) error {
	s := &Servant{log: logger, registry: daemon.NewRegistry(), ended: make(chan error, 1)}
	err := child.Serve(ctx, in, out, func(ctx context.Context) any { s.ctx = ctx; return s })
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.floor != nil {
		s.floor.Close()
	}
	if s.running {
		err = errors.Join(err, <-s.ended)
	}
	return err
}

// Servant answers the parent's calls. Its exported methods are called through net/rpc.
type Servant struct {
	ctx      context.Context // ends with the process
	log      *slog.Logger
	registry *prometheus.Registry
	setup    Setup
	source   *generate.Source // nil if the state is not generated
	ended    chan error       // receives the result of the server

	mu      sync.Mutex // guards the fields below
	running bool
	floor   *floor.Server // nil before Listen
}

// Setup starts the server.
func (s *Servant) Setup(setup Setup, _ *child.None) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.setup = setup
	config, err := s.config()
	if err != nil {
		return err
	}
	server, err := serverapp.New(config)
	if err != nil {
		return err
	}
	s.running = true
	go func() {
		err := server.Run(s.ctx)
		if s.ctx.Err() == nil {
			s.log.Error("Server ended", "err", err)
			os.Exit(1) // so that the parent notices at once
		}
		s.ended <- err
	}()
	return nil
}

// config returns the configuration that slicecast-server would derive from its flags, except for
// the source of the state and the location of files.
func (s *Servant) config() (c serverapp.Config, err error) {
	var files tlsfiles.Files
	for path, content := range map[*string][]byte{
		&files.Certificate: s.setup.Certificate, &files.PrivateKey: s.setup.PrivateKey, &files.CA: s.setup.ClientCA,
	} {
		if *path, err = memoryFile(content); err != nil {
			return c, fmt.Errorf("write TLS files: %w", err)
		}
	}
	c = serverapp.Config{
		TLS: &files, BindAddress: s.setup.Address, GracePeriod: gracePeriod, Logger: s.log, Registry: s.registry,
	}
	for _, address := range s.setup.Servers {
		c.Servers = append(c.Servers, &pb.Server{Address: address})
	}
	switch {
	case s.setup.Cluster != nil:
		cluster, err := generate.New(*s.setup.Cluster)
		if err != nil {
			return c, err
		}
		s.source = generate.NewSource(cluster, s.setup.Plans...)
		c.Source = s.source
	case len(s.setup.Upstream) > 0:
		followed, err := tlsfiles.Follow(files, s.log)
		if err != nil {
			return c, err
		}
		c.Upstream = &client.Options{
			Servers: client.Static(s.setup.Upstream...), Version: daemon.Version(), Logger: s.log, Registerer: s.registry,
			DialOptions: []grpc.DialOption{grpc.WithTransportCredentials(followed.ClientCredentials(wire.Protocol))},
		}
	default:
		api, err := kube.Config(s.setup.Kubeconfig)
		if err != nil {
			return c, err
		}
		c.Source, err = kube.New(kube.Options{
			Config: api, ServiceProxyName: s.setup.ServiceProxyName, Log: s.log, Metrics: s.registry,
		})
		return c, err
	}
	return c, nil
}

// memoryFile creates a file that no other process sees and that vanishes with this process.
func memoryFile(content []byte) (path string, err error) {
	fd, err := unix.MemfdCreate("slicecast-loadtest", unix.MFD_CLOEXEC)
	if err != nil {
		return "", err
	}
	path = fmt.Sprintf("/proc/self/fd/%d", fd)
	return path, os.WriteFile(path, content, 0)
}

// Play queues a plan, to be carried out after those before it.
func (s *Servant) Play(p generate.Plan, _ *child.None) error {
	if s.source == nil {
		return errors.New("the state is not generated, so plans cannot be carried out")
	}
	return s.source.Play(s.ctx, p)
}

// Played waits until one more plan of Play has been carried out, and returns how late its changes
// were made.
func (s *Servant) Played(_ child.None, lag *generate.Lag) (err error) {
	*lag, err = s.source.Played(s.ctx)
	return err
}

// Memory waits until the process has its state, collects garbage, and returns the memory that is
// still in use.
func (s *Servant) Memory(_ child.None, m *report.Memory) error {
	if err := s.awaitPublished(); err != nil {
		return err
	}
	for range 4 { // each collection halves stacks at most, and pools empty after two
		debug.FreeOSMemory()
	}
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)
	process, err := usage.MemoryOf(os.Getpid())
	*m = report.Memory{
		Heap: int64(stats.HeapAlloc), Stacks: int64(stats.StackInuse), Resident: process.Resident, Anonymous: process.Anonymous,
	}
	return err
}

// Listen starts a floor.Server, and returns its address.
func (s *Servant) Listen(_ child.None, address *string) error {
	config, err := s.setup.tlsConfig()
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.floor, err = floor.Listen(config); err != nil {
		return err
	}
	*address = s.floor.Address()
	return nil
}

// Write writes to all connections of the floor server, after Listen.
func (s *Servant) Write(w floor.Writes, lag *generate.Lag) (err error) {
	s.mu.Lock()
	f := s.floor
	s.mu.Unlock()
	*lag, err = f.Write(s.ctx, w)
	return err
}

// tlsConfig returns the TLS configuration that is equivalent to that of the server.
func (s *Setup) tlsConfig() (*tls.Config, error) {
	certificate, err := tls.X509KeyPair(s.Certificate, s.PrivateKey)
	if err != nil {
		return nil, err
	}
	clients := x509.NewCertPool()
	if !clients.AppendCertsFromPEM(s.ClientCA) {
		return nil, errors.New("the CA for clients has no PEM certificate")
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{certificate},
		ClientAuth: tls.VerifyClientCertIfGiven, ClientCAs: clients,
	}, nil
}

// awaitPublished waits until the server has published its initial state. The first publication
// contains all of it.
func (s *Servant) awaitPublished() error {
	retry := time.NewTicker(10 * time.Millisecond)
	defer retry.Stop()
	for {
		families, err := s.registry.Gather()
		if err != nil {
			return err
		}
		for _, f := range families {
			if f.GetName() == "slicecast_server_publish_duration_seconds" && f.GetMetric()[0].GetHistogram().GetSampleCount() > 0 {
				return nil
			}
		}
		select {
		case <-retry.C:
		case <-s.ctx.Done():
			return s.ctx.Err()
		}
	}
}
