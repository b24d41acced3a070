package daemon

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
)

// ListenSocket listens on a unix socket that only the current user can open. It replaces the socket
// of a process that has ended.
func ListenSocket(path string) (_ net.Listener, err error) {
	switch info, err := os.Lstat(path); {
	case errors.Is(err, os.ErrNotExist):
	case err != nil:
		return nil, err
	case info.Mode().Type() != os.ModeSocket:
		return nil, fmt.Errorf("%s exists and is not a socket: remove it, or use another path", path)
	default:
		if conn, err := net.Dial("unix", path); err == nil {
			_ = conn.Close()
			return nil, fmt.Errorf("another process serves on %s: stop it, or use another path", path)
		}
	}
	// Until its mode is restricted, the socket is in a directory that no other user can enter.
	dir, err := os.MkdirTemp(filepath.Dir(path), ".slicecast-")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	private := filepath.Join(dir, "s")
	unix, err := net.ListenUnix("unix", &net.UnixAddr{Name: private, Net: "unix"})
	if err != nil {
		return nil, err
	}
	unix.SetUnlinkOnClose(false)
	if err := errors.Join(os.Chmod(private, 0o600), os.Rename(private, path)); err != nil {
		return nil, errors.Join(err, unix.Close())
	}
	return &socket{unix, path}, nil
}

// socket is a listener that removes its file when it is closed.
type socket struct {
	net.Listener
	path string
}

// Addr implements net.Listener.
func (s *socket) Addr() net.Addr { return &net.UnixAddr{Name: s.path, Net: "unix"} }

// Close implements net.Listener.
func (s *socket) Close() error {
	err := os.Remove(s.path)
	if errors.Is(err, os.ErrNotExist) {
		err = nil
	}
	return errors.Join(err, s.Listener.Close())
}
