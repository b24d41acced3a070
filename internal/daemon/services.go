package daemon

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
)

// serveRetry is the first back-off before a failed attempt to serve is repeated.
const serveRetry = time.Second

// Services are what a program serves beside what it is for. Nothing that fails there ends the
// program. It is logged and counted until it works.
type Services struct {
	logger   *slog.Logger
	failures *prometheus.CounterVec

	mu     sync.Mutex       // guards failed
	failed map[string]error // the last error of each flag whose service does not work
}

// NewServices returns the services of a program: agent or server. help ends the description of the
// metric of failures, and lists the flags.
func NewServices(program, help string, logger *slog.Logger, registerer prometheus.Registerer) *Services {
	return &Services{logger: logger, failed: make(map[string]error), failures: promauto.With(registerer).NewCounterVec(
		prometheus.CounterOpts{
			Namespace: "slicecast", Subsystem: program, Name: "serve_errors_total",
			Help: "Number of failed attempts to serve " + help,
		}, []string{"flag"})}
}

// Serve serves on the listener that open opens, until ctx ends. flag is where it listens.
func (s *Services) Serve(
	ctx context.Context, flag string, open func() (net.Listener, error), serve func(context.Context, net.Listener) error,
) {
	failures := s.failures.WithLabelValues(flag)
	ServeAgain(ctx, serveRetry, open, serve, func(err error) {
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
			s.logger.Warn("Cannot serve, trying again; everything else works all the same", "flag", "--"+flag, "err", err)
		}
		s.failed[flag] = err
	})
}

// Problem says what does not work. It is empty if everything does.
func (s *Services) Problem() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []string
	for _, flag := range slices.Sorted(maps.Keys(s.failed)) {
		out = append(out, s.failed[flag].Error()) // which names the flag
	}
	return strings.Join(out, "; ")
}
