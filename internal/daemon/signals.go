package daemon

import (
	"context"
	"os"
	"os/signal"
	"syscall"
)

// SignalContext returns a context that ends with the first SIGINT or SIGTERM, or one of more. A
// second signal has its default effect and ends the process at once. stop ends the context and
// restores the default effect of the signals.
func SignalContext(parent context.Context, more ...os.Signal) (ctx context.Context, stop context.CancelFunc) {
	ctx, stop = signal.NotifyContext(parent, append(more, os.Interrupt, syscall.SIGTERM)...)
	context.AfterFunc(ctx, stop)
	return ctx, stop
}
