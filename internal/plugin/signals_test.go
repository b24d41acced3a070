// These tests prove that signals which end the command, other than that of Ctrl-C, do not leave a
// namespace behind either. The command is a process of its own.
package plugin

import (
	"io"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"
)

// TestEndedConnectivity checks that the namespace is removed if the terminal goes away, and if
// nobody reads the output any more.
func TestEndedConnectivity(t *testing.T) {
	(&environment{T: t}).nodeWith("busy", corev1.NodeSystemInfo{OperatingSystem: "linux"})
	program, err := os.Executable()
	require.NoError(t, err)
	// If the tests run under nohup, the command would inherit that SIGHUP is ignored, and heed that.
	caught := make(chan os.Signal, 1)
	signal.Notify(caught, syscall.SIGHUP)
	t.Cleanup(func() { signal.Stop(caught) })
	for name, end := range map[string]struct {
		signal syscall.Signal
		unread bool
	}{"SIGHUP": {syscall.SIGHUP, false}, "SIGPIPE": {syscall.SIGTERM, true}} {
		t.Run(name, func(t *testing.T) {
			f := newFront(t)
			kubeconfig := plane.Kubeconfig(t, &rest.Config{Host: f.address})
			c := exec.CommandContext(t.Context(), program, "connectivity", "--image=image", "--kubeconfig="+kubeconfig)
			c.Env = append(os.Environ(), commandVariable+"=1")
			read, write, err := os.Pipe()
			require.NoError(t, err)
			defer read.Close()
			c.Stdout, c.Stderr = write, write
			require.NoError(t, c.Start())
			require.NoError(t, write.Close())
			<-f.pods
			if end.unread {
				require.NoError(t, read.Close())
			}
			// After it, the command says that it removes the namespace.
			require.NoError(t, c.Process.Signal(end.signal))
			if !end.unread {
				said, err := io.ReadAll(read)
				require.NoError(t, err)
				require.Contains(t, string(said), "Removed the namespace slicecast-connectivity-")
			}
			var ended *exec.ExitError
			require.ErrorAs(t, c.Wait(), &ended)
			require.Equal(t, incomplete, ended.ExitCode(), ended)
			requireNoRuns(t)
		})
	}
}
