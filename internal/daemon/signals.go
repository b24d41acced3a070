package daemon

import (
	"context"
	"os"
	"os/signal"
	"syscall"
)

// SignalContext gives a context that ends with the first SIGINT or SIGTERM. A second one ends the process at once, as a
// process ends that does not handle the signal. stop ends the context and gives the signals back.
func SignalContext(parent context.Context) (ctx context.Context, stop context.CancelFunc) {
	ctx, stop = signal.NotifyContext(parent, os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	return ctx, stop
}
