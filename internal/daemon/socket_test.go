package daemon

import (
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestSocketIsForThisUserOnly(t *testing.T) {
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
	require.Empty(t, entries, "nothing is left behind")
}

func TestSocketOfAServerThatWasKilledIsReplaced(t *testing.T) {
	path := filepath.Join(t.TempDir(), "debug.sock")
	dead, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	require.NoError(t, err)
	dead.SetUnlinkOnClose(false)
	require.NoError(t, dead.Close())

	l, err := ListenSocket(path)
	require.NoError(t, err)
	require.NoError(t, l.Close())
}

func TestSocketReplacesNothingElse(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(path, []byte("precious"), 0o600))
	_, err := ListenSocket(path)
	require.ErrorContains(t, err, "is no socket")
	require.FileExists(t, path)
}
