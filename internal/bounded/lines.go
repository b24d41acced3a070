package bounded

import (
	"log/slog"
	"sync"
	"time"

	lru "github.com/hashicorp/golang-lru/v2"
	"golang.org/x/time/rate"
)

// Tenants can change their objects so that each change is worth a line of the log. After
// LinesAtOnce lines there is one each LinesEvery. A namespace has a share of them, so that
// others are still heard of.
const (
	LinesAtOnce            = 50
	LinesEvery             = 10 * time.Second
	LinesOfNamespaceAtOnce = 10
	LinesOfNamespaceEvery  = time.Minute
	// maxNamespaces is of how many namespaces the share is remembered.
	maxNamespaces = 4096
)

// Lines bounds the lines of a log about objects of tenants. Several goroutines may use it.
type Lines struct {
	mu       sync.Mutex // guards the fields below
	all      *rate.Limiter
	of       *lru.Cache[string, *rate.Limiter] // by namespace
	unlogged int                               // lines that were left out since the last one
}

// NewLines returns a Lines.
func NewLines() *Lines {
	l := &Lines{all: rate.NewLimiter(rate.Every(LinesEvery), LinesAtOnce)}
	// An error is returned only for sizes below 1.
	l.of, _ = lru.New[string, *rate.Limiter](maxNamespaces)
	return l
}

// Logger returns the log for a line about an object of a namespace, or nil if the bound is reached.
// The first line after others that were left out has their number.
func (l *Lines) Logger(log *slog.Logger, namespace string) *slog.Logger {
	l.mu.Lock()
	defer l.mu.Unlock()
	share, known := l.of.Get(namespace)
	if !known {
		share = rate.NewLimiter(rate.Every(LinesOfNamespaceEvery), LinesOfNamespaceAtOnce)
		l.of.Add(namespace, share)
	}
	if !share.Allow() || !l.all.Allow() {
		l.unlogged++
		return nil
	}
	if l.unlogged > 0 {
		log = log.With("not_logged", l.unlogged)
		l.unlogged = 0
	}
	return log
}
