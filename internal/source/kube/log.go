package kube

import (
	"context"
	"log/slog"

	"k8s.io/klog/v2"
)

// RouteLogs routes what client-go logs through klog to the logger. Errors become warnings, as
// client-go retries, and all else becomes debug output. RouteLogs must be called at the start of a
// process, before any client runs, as klog's logger is global.
func RouteLogs(log *slog.Logger) {
	klog.SetSlogLogger(slog.New(quietHandler{log.Handler()}))
}

// leastVerbose is klog's V(4). More verbose levels have the headers and bodies of requests.
const leastVerbose = slog.Level(-4)

type quietHandler struct{ slog.Handler }

func quieter(l slog.Level) slog.Level {
	if l >= slog.LevelError {
		return slog.LevelWarn
	}
	return slog.LevelDebug
}

// Enabled implements slog.Handler.
func (h quietHandler) Enabled(ctx context.Context, l slog.Level) bool {
	return l >= leastVerbose && h.Handler.Enabled(ctx, quieter(l))
}

// Handle implements slog.Handler.
func (h quietHandler) Handle(ctx context.Context, r slog.Record) error {
	r.Level = quieter(r.Level)
	return h.Handler.Handle(ctx, r)
}

// WithAttrs implements slog.Handler.
func (h quietHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return quietHandler{h.Handler.WithAttrs(attrs)}
}

// WithGroup implements slog.Handler.
func (h quietHandler) WithGroup(name string) slog.Handler {
	return quietHandler{h.Handler.WithGroup(name)}
}
