package daemon

import (
	"errors"
	"fmt"
	"net"
	"syscall"
)

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
