package probe

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/slicecast/slicecast/internal/bounded"
)

// maxPorts bounds the ports of a server.
const maxPorts = 256

// requests has the limits of the connections to all ports for requests together. One address has
// room for the clients of several nodes behind a network address translation.
var requests = bounded.Limits{Total: 1024, PerAddress: 512, Read: 5 * time.Second, Write: 5 * time.Second, Idle: time.Minute}

// controlAddress is where a server is told whether it is ready. Only its own Pod reaches it.
const controlAddress = "127.0.0.1:8079"

// Server answers requests and says whether it is ready.
type Server struct {
	// Name is the name in answers.
	Name string
	// Port is the first port, for TCP and UDP. Ports is the number of ports.
	Port, Ports int
	// HealthPort is the port of /ready, for the kubelet.
	HealthPort int
	// Logger is the log. It is required.
	Logger *slog.Logger
}

func (s Server) validate() error {
	switch {
	case s.Name == "" || len(s.Name) > maxName || strings.ContainsAny(s.Name, " \t\r\n"):
		return fmt.Errorf("the name is %.200q: use 1 to %d characters without blanks", s.Name, maxName)
	case s.Ports < 1 || s.Ports > maxPorts:
		return fmt.Errorf("the number of ports is %d: use 1 to %d", s.Ports, maxPorts)
	case s.Port < 1 || s.Port+s.Ports-1 > 65535:
		return fmt.Errorf("the first port is %d: use a port that leaves room for %d", s.Port, s.Ports)
	}
	return nil
}

// Run serves until ctx ends, and then returns nil.
func (s Server) Run(ctx context.Context) error {
	if err := s.validate(); err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	if err := s.start(ctx, group); err != nil {
		group.Go(func() error { return err }) // which ends what has started
	}
	return group.Wait()
}

// start listens on all ports, and serves in the group until ctx ends.
func (s Server) start(ctx context.Context, group *errgroup.Group) error {
	displaced := bounded.NewDisplaced(nil, "agent") // nobody scrapes it
	open := bounded.NewPort("probe", requests, s.Logger, displaced)
	for port := s.Port; port < s.Port+s.Ports; port++ {
		if err := s.serve(ctx, group, open, port); err != nil {
			return err
		}
	}
	var unready atomic.Bool
	health, control := http.NewServeMux(), http.NewServeMux()
	health.HandleFunc("GET /ready", func(w http.ResponseWriter, _ *http.Request) {
		if unready.Load() {
			http.Error(w, "not ready, as a scenario wants it", http.StatusServiceUnavailable)
		}
	})
	control.HandleFunc("PUT /ready/{ready}", func(_ http.ResponseWriter, r *http.Request) {
		unready.Store(r.PathValue("ready") != "true")
	})
	for address, handler := range map[string]http.Handler{fmt.Sprintf(":%d", s.HealthPort): health, controlAddress: control} {
		listener, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
		if err != nil {
			return err
		}
		port := bounded.NewPort("health", bounded.Health, s.Logger, displaced)
		group.Go(func() error { return port.Serve(ctx, listener, nil, handler) })
	}
	return nil
}

// serve answers requests to a port, by TCP within the limits of open and by UDP.
func (s Server) serve(ctx context.Context, group *errgroup.Group, open *bounded.Port, port int) error {
	var config net.ListenConfig
	address := fmt.Sprintf(":%d", port)
	listener, err := config.Listen(ctx, "tcp", address)
	if err != nil {
		return err
	}
	listener = open.Listener(listener)
	context.AfterFunc(ctx, func() { _ = listener.Close() })
	group.Go(func() error {
		var all sync.WaitGroup
		defer all.Wait()
		for {
			conn, err := listener.Accept()
			if err != nil {
				return unlessDone(ctx, err)
			}
			all.Go(func() {
				stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
				serveConn(conn, s.Name, requests)
				stop()
				_ = conn.Close()
			})
		}
	})
	packets, err := config.ListenPacket(ctx, "udp", address)
	if err != nil {
		return err
	}
	context.AfterFunc(ctx, func() { _ = packets.Close() })
	group.Go(func() error {
		request := make([]byte, requestSize)
		for {
			n, client, err := packets.ReadFrom(request)
			if errors.Is(err, net.ErrClosed) {
				return unlessDone(ctx, err)
			}
			if err != nil {
				continue // an ICMP error about an earlier answer
			}
			// No answer is longer than its request, and no answer is a request: two servers would
			// answer each other for ever.
			if n < requestSize || !bytes.HasPrefix(request, []byte(question)) {
				continue
			}
			_, _ = packets.WriteTo(answer(s.Name, client), client)
		}
	})
	return nil
}

// unlessDone returns an error, or nil if ctx has ended, which closes what has failed.
func unlessDone(ctx context.Context, err error) error {
	if ctx.Err() == nil {
		return err
	}
	return nil
}

// SetReady reports to the server in the same Pod whether it is ready.
func SetReady(ctx context.Context, ready bool) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodPut, fmt.Sprintf("http://%s/ready/%t", controlAddress, ready), http.NoBody)
	if err != nil {
		return err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return fmt.Errorf("the server of this Pod: %w", err)
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("the server of this Pod answers %s", response.Status)
	}
	return nil
}
