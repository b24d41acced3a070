package app

import (
	"context"
	"log/slog"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/slicecast/slicecast/internal/daemon"
)

// serveRetry is the first back-off before a failed attempt to serve is repeated.
const serveRetry = time.Second

// services are what the agent serves beside programming the kernel. Nothing that fails there ends
// the agent. It is logged, counted, and a warning of the node until it works.
type services struct {
	logger   *slog.Logger
	failures *prometheus.CounterVec

	mu     sync.Mutex       // guards failed
	failed map[string]error // the last error of each flag whose service does not work
}

func newServices(logger *slog.Logger, registerer prometheus.Registerer) *services {
	return &services{logger: logger, failed: make(map[string]error), failures: promauto.With(registerer).NewCounterVec(
		prometheus.CounterOpts{
			Namespace: "slicecast", Subsystem: "agent", Name: "serve_errors_total",
			Help: "Number of failed attempts to serve metrics over TLS or the status, by flag: " +
				"secure-metrics-bind-address or status-socket.",
		}, []string{"flag"})}
}

// serve serves on the listener that open opens, until ctx ends.
func (s *services) serve(
	ctx context.Context, flag string, open func() (net.Listener, error), serve func(context.Context, net.Listener) error,
) {
	failures := s.failures.WithLabelValues(flag)
	daemon.ServeAgain(ctx, serveRetry, open, serve, func(err error) {
		s.mu.Lock()
		defer s.mu.Unlock()
		before := s.failed[flag]
		if err == nil {
			if before != nil {
				s.logger.Info("Serving again", "flag", "--"+flag)
			}
			delete(s.failed, flag)
			return
		}
		failures.Inc()
		if before == nil || before.Error() != err.Error() {
			s.logger.Warn("Cannot serve, trying again; the node is programmed all the same", "flag", "--"+flag, "err", err)
		}
		s.failed[flag] = err
	})
}

// problem says what does not work. It is empty if everything does.
func (s *services) problem() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []string
	for _, flag := range slices.Sorted(maps.Keys(s.failed)) {
		out = append(out, s.failed[flag].Error()) // which names the flag
	}
	return strings.Join(out, "; ")
}
