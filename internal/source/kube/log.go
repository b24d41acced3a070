package kube

import (
	"context"
	"log/slog"

	"k8s.io/klog/v2"
)

// RouteLogs sends what client-go logs, by klog, to the logger: errors as warnings, since client-go retries, and the rest
// for debugging only. It is for a process's start, before any client runs, as klog is one for the whole process.
func RouteLogs(log *slog.Logger) {
	klog.SetSlogLogger(slog.New(quietHandler{log.Handler()}))
}

// leastVerbose is klog's V(4): above it come the headers and bodies of requests.
const leastVerbose = slog.Level(-4)

type quietHandler struct{ slog.Handler }

func quieter(l slog.Level) slog.Level {
	if l >= slog.LevelError {
		return slog.LevelWarn
	}
	return slog.LevelDebug
}

func (h quietHandler) Enabled(ctx context.Context, l slog.Level) bool {
	return l >= leastVerbose && h.Handler.Enabled(ctx, quieter(l))
}

func (h quietHandler) Handle(ctx context.Context, r slog.Record) error {
	r.Level = quieter(r.Level)
	return h.Handler.Handle(ctx, r)
}

func (h quietHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return quietHandler{h.Handler.WithAttrs(attrs)}
}

func (h quietHandler) WithGroup(name string) slog.Handler {
	return quietHandler{h.Handler.WithGroup(name)}
}
