// These tests prove that only this user can open a debug socket, that the socket of a killed
// process is replaced, and that no other file is.
package daemon

import (
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestSocketIsPrivate(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "debug.sock")
	l, err := ListenSocket(path)
	require.NoError(t, err)
	info, err := os.Stat(path)
	require.NoError(t, err)
	require.Equal(t, os.ModeSocket|0o600, info.Mode())
	conn, err := net.Dial("unix", path)
	require.NoError(t, err)
	require.NoError(t, conn.Close())

	_, err = ListenSocket(path)
	require.ErrorContains(t, err, "another process serves")

	require.NoError(t, l.Close())
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, entries, "files are left behind")
}

func TestSocketOfAKilledProcessIsReplaced(t *testing.T) {
	path := filepath.Join(t.TempDir(), "debug.sock")
	dead, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	require.NoError(t, err)
	dead.SetUnlinkOnClose(false)
	require.NoError(t, dead.Close())

	l, err := ListenSocket(path)
	require.NoError(t, err)
	require.NoError(t, l.Close())
}

func TestOtherFilesAreNotReplaced(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(path, []byte("precious"), 0o600))
	_, err := ListenSocket(path)
	require.ErrorContains(t, err, "is not a socket")
	require.FileExists(t, path)
}
