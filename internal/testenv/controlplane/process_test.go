// These tests prove that the components of a control plane can be killed, stopped and paused
// without loss of data, and that nothing outlives a test that is killed.
package controlplane

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

type assertT = assert.CollectT

func TestKilledComponentsKeepTheirDataAndPort(t *testing.T) {
	namespace := shared.Namespace(t)
	configMaps := shared.Client().CoreV1().ConfigMaps(namespace)
	want, err := configMaps.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "kept"}}, metav1.CreateOptions{})
	require.NoError(t, err)

	require.NoError(t, shared.APIServer.Kill())
	require.False(t, shared.APIServer.Running())
	_, err = configMaps.Get(t.Context(), "kept", metav1.GetOptions{})
	require.Error(t, err)
	require.ErrorIs(t, shared.APIServer.Kill(), errNotRunning)

	require.NoError(t, shared.Etcd.Kill())
	require.NoError(t, shared.Etcd.Start(t.Context()))
	require.NoError(t, shared.APIServer.Start(t.Context()))
	require.Error(t, shared.APIServer.Start(t.Context()), "it is running already")

	got, err := configMaps.Get(t.Context(), "kept", metav1.GetOptions{})
	require.NoError(t, err)
	require.Equal(t, want, got)
}

func TestStopAndStart(t *testing.T) {
	require.NoError(t, shared.ControllerManager.Stop())
	require.False(t, shared.ControllerManager.Running())
	require.NoError(t, shared.ControllerManager.Start(t.Context()))
	require.True(t, shared.ControllerManager.Running())
}

func TestPausedComponentDoesNotAnswer(t *testing.T) {
	require.NoError(t, shared.APIServer.Pause())
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	_, err := shared.Client().CoreV1().Namespaces().Get(ctx, "default", metav1.GetOptions{})
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.True(t, shared.APIServer.Running())

	require.NoError(t, shared.APIServer.Resume())
	_, err = shared.Client().CoreV1().Namespaces().Get(t.Context(), "default", metav1.GetOptions{})
	require.NoError(t, err)
}

func TestFailedStartShowsTheLog(t *testing.T) {
	_, err := start(t.Context(), Options{APIServerFlags: []string{"--no-such-flag"}}, t.Logf)
	require.ErrorContains(t, err, "unknown flag: --no-such-flag")
}

// orphanMaker is the name of an environment variable. If it is set, the test binary runs
// makeOrphans.
const orphanMaker = "SLICECAST_TEST_MAKE_ORPHANS"

// makeOrphans starts a control plane, prints its directory and process IDs, and waits to be killed.
func makeOrphans() {
	cp, err := start(context.Background(), Options{}, func(string, ...any) {})
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println(cp.dir, cp.Etcd.cmd.Process.Pid, cp.APIServer.cmd.Process.Pid)
	select {}
}

func TestKilledTestLeavesNothing(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), orphanMaker+"=1")
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	line, err := bufio.NewReader(stdout).ReadString('\n')
	require.NoError(t, err)
	require.NoError(t, cmd.Process.Kill())
	require.Error(t, cmd.Wait())

	fields := strings.Fields(line)
	require.Len(t, fields, 3, line)
	for _, field := range fields[1:] {
		pid, err := strconv.Atoi(field)
		require.NoError(t, err)
		require.Eventually(t, func() bool { return gone(pid) }, patience, tick)
	}

	dir, lock, err := makeDir("")
	require.NoError(t, err)
	require.NoDirExists(t, fields[0])
	require.NoError(t, errors.Join(os.RemoveAll(dir), lock.Close()))
	require.DirExists(t, shared.dir, "the directory is in use")
}

// gone reports whether a process has ended, even if its parent has not waited for it yet.
func gone(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ESRCH) {
		return true
	}
	_, state, _ := strings.Cut(string(stat), ") ")
	return strings.HasPrefix(state, "Z")
}
