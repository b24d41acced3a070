package target

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"runtime"
	"runtime/debug"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/internal/tlsfiles"
	"github.com/slicecast/slicecast/loadtest/floor"
	"github.com/slicecast/slicecast/loadtest/generate"
	serverapp "github.com/slicecast/slicecast/server/app"
)

// gracePeriod is for streams that are still there when the process ends: their nodes have ended too, or are about to.
const gracePeriod = 5 * time.Second

// Serve is the server's process: it does what it reads from in, until that or the context ends.
func Serve(ctx context.Context, in io.Reader, out io.Writer, logger *slog.Logger) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	requests, answers := json.NewDecoder(in), json.NewEncoder(out)
	var first request
	if err := requests.Decode(&first); err != nil {
		return fmt.Errorf("control input: %w", err)
	}
	if first.Setup == nil {
		return errors.New("control input: the first line must hold setup")
	}
	registry := daemon.NewRegistry()
	server, source, err := newServer(first.Setup, logger, registry)
	if err != nil {
		return errors.Join(err, answers.Encode(answer{Error: err.Error()}))
	}
	ended := make(chan error, 1)
	go func() { ended <- server.Run(ctx) }()
	if err := answers.Encode(answer{Address: server.Addresses().GRPC.String()}); err != nil {
		cancel()
		return errors.Join(err, <-ended)
	}
	input := make(chan error, 1)
	go func() {
		input <- (&servant{setup: first.Setup, source: source, metrics: registry}).obey(ctx, requests, answers)
	}()
	select {
	case err := <-ended:
		return err
	case err := <-input:
		cancel()
		return errors.Join(err, <-ended)
	}
}

// newServer makes the server as slicecast-server does without flags, but for where its state comes from and where it
// listens.
func newServer(s *Setup, logger *slog.Logger, registry *prometheus.Registry) (*serverapp.Server, *generate.Source, error) {
	var files tlsfiles.Files
	for path, content := range map[*string][]byte{
		&files.Certificate: s.Certificate, &files.PrivateKey: s.PrivateKey, &files.CA: s.ClientCA,
	} {
		var err error
		if *path, err = memoryFile(content); err != nil {
			return nil, nil, fmt.Errorf("TLS files: %w", err)
		}
	}
	cluster, err := generate.New(s.Cluster)
	if err != nil {
		return nil, nil, err
	}
	for _, c := range cluster.Changes(generate.Plan{Start: time.Now(), Count: s.Changed, Rate: float64(time.Second)}) {
		cluster.Make(c)
	}
	source := generate.NewSource(cluster)
	address := s.Address
	if address == "" {
		if address, err = freeAddress(); err != nil {
			return nil, nil, err
		}
	}
	server, err := serverapp.New(serverapp.Config{
		Source: source, TLS: &files, BindAddress: address, GracePeriod: gracePeriod,
		Logger: logger, Registry: registry,
	})
	return server, source, err
}

// freeAddress finds a port of loopback outside the kernel's range for outgoing connections, so that no node takes it while
// the server is away.
func freeAddress() (address string, err error) {
	for range 100 {
		address = fmt.Sprintf("127.0.0.1:%d", 20000+rand.IntN(10000))
		var l net.Listener
		if l, err = net.Listen("tcp", address); err == nil {
			return address, l.Close()
		}
	}
	return "", fmt.Errorf("there is no free port: %w", err)
}

// memoryFile makes a file that no other process sees and that is gone with this one, however it ends.
func memoryFile(content []byte) (path string, err error) {
	fd, err := unix.MemfdCreate("slicecast-loadtest", unix.MFD_CLOEXEC)
	if err != nil {
		return "", err
	}
	path = fmt.Sprintf("/proc/self/fd/%d", fd)
	return path, os.WriteFile(path, content, 0)
}

// servant does what the parent asks for beside serving.
type servant struct {
	setup   *Setup
	source  *generate.Source
	metrics prometheus.Gatherer
	floor   *floor.Server // nil until it is asked for
}

// obey does what further requests say, until there are none.
func (s *servant) obey(ctx context.Context, requests *json.Decoder, answers *json.Encoder) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// The input's end is noticed during a churn too. Reading can't be interrupted, so this goroutine may outlive the call;
	// the process then ends.
	read := make(chan request)
	var readErr error // readable when read is closed
	go func() {
		defer cancel()
		defer close(read)
		for {
			var r request
			if readErr = requests.Decode(&r); readErr != nil {
				return
			}
			select {
			case read <- r:
			case <-ctx.Done():
				return
			}
		}
	}()
	defer func() {
		if s.floor != nil {
			s.floor.Close()
		}
	}()
	for r := range read {
		a, err := s.do(ctx, r)
		switch {
		case ctx.Err() != nil:
			continue // the input's end, and with it everything's
		case err != nil:
			a = answer{Error: err.Error()}
		}
		if err := answers.Encode(a); err != nil {
			return fmt.Errorf("control output: %w", err)
		}
	}
	if readErr == nil || errors.Is(readErr, io.EOF) {
		return nil
	}
	return fmt.Errorf("control input: %w", readErr)
}

func (s *servant) do(ctx context.Context, r request) (a answer, err error) {
	var lag generate.Lag
	switch {
	case r.Churn != nil:
		lag, err = s.source.Churn(ctx, *r.Churn)
		return answer{Lag: &lag}, err
	case r.Memory != nil:
		if err := s.awaitPublished(ctx); err != nil {
			return a, err
		}
		return answer{Memory: countMemory()}, nil
	case r.Listen != nil && s.floor == nil:
		config, err := s.setup.tlsConfig()
		if err != nil {
			return a, err
		}
		if s.floor, err = floor.Listen(config); err != nil {
			return a, err
		}
		return answer{Address: s.floor.Address()}, nil
	case r.Write != nil && s.floor != nil:
		lag, err = s.floor.Write(ctx, *r.Write)
		return answer{Lag: &lag}, err
	}
	return a, errors.New("control input: a line that holds nothing to do")
}

// tlsConfig is what the server's own comes to.
func (s *Setup) tlsConfig() (*tls.Config, error) {
	certificate, err := tls.X509KeyPair(s.Certificate, s.PrivateKey)
	if err != nil {
		return nil, err
	}
	clients := x509.NewCertPool()
	if !clients.AppendCertsFromPEM(s.ClientCA) {
		return nil, errors.New("there is no CA certificate for clients")
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{certificate},
		ClientAuth: tls.VerifyClientCertIfGiven, ClientCAs: clients,
	}, nil
}

// awaitPublished waits for the server to have published the state that it was set up with: its first publish holds all of it.
func (s *servant) awaitPublished(ctx context.Context) error {
	retry := time.NewTicker(10 * time.Millisecond)
	defer retry.Stop()
	for {
		families, err := s.metrics.Gather()
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
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func countMemory() *Memory {
	for range 4 { // stacks shrink by half each time, and pools empty in two steps
		debug.FreeOSMemory()
	}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return &Memory{Heap: int64(m.HeapAlloc), Stacks: int64(m.StackInuse)}
}
