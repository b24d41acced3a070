package daemon

import (
	"context"
	"errors"
	"fmt"
	"net"
	"syscall"
	"time"
)

// maxRetry bounds the back-off of ServeAgain.
const maxRetry = 10 * time.Second

// ServeAgain opens a listener and serves on it until ctx ends, so that what fails there does not
// end the process. After a failure it does both again, with a back-off that begins with retry. It
// calls report with each failure, and with nil each time the listener is open.
func ServeAgain(
	ctx context.Context, retry time.Duration, open func() (net.Listener, error),
	serve func(context.Context, net.Listener) error, report func(error),
) {
	var wait time.Duration
	for {
		l, err := open()
		if err == nil {
			report(nil)
			wait = 0
			err = serve(ctx, l)
		}
		if err == nil || ctx.Err() != nil {
			return
		}
		report(err)
		wait = min(max(2*wait, retry), maxRetry)
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
	}
}

// Listen listens on address, the value of a flag. Its errors name the flag and say what to do.
func Listen(flag, address string) (net.Listener, error) {
	l, err := net.Listen("tcp", address)
	switch {
	case err == nil:
		return l, nil
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, fmt.Errorf("--%s: another process listens on %s: stop it, or use another address", flag, address)
	default:
		return nil, fmt.Errorf("--%s: %w: use an address of this machine and a port, such as 127.0.0.1:8080, or "+
			":8080 for all addresses", flag, err)
	}
}
