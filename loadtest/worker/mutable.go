package worker

import (
	"context"
	"log/slog"
	"sync/atomic"
)

// mutable is a slog.Handler that drops warnings and lower levels while it is muted. The worker
// mutes it while thousands of nodes lose a server that the run kills.
type mutable struct {
	slog.Handler
	muted *atomic.Bool
}

// Enabled implements slog.Handler.
func (m mutable) Enabled(ctx context.Context, l slog.Level) bool {
	return (l > slog.LevelWarn || !m.muted.Load()) && m.Handler.Enabled(ctx, l)
}

// WithAttrs implements slog.Handler.
func (m mutable) WithAttrs(attrs []slog.Attr) slog.Handler {
	return mutable{m.Handler.WithAttrs(attrs), m.muted}
}

// WithGroup implements slog.Handler.
func (m mutable) WithGroup(name string) slog.Handler {
	return mutable{m.Handler.WithGroup(name), m.muted}
}
