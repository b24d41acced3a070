// These tests prove that a cluster leaves nothing on the machine when its program is killed, and
// that a start removes what is left when the watcher was killed, too. The cluster is a real one, in
// a process of its own.
package cluster

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/testenv"
)

func TestKilled(t *testing.T) {
	before := traces(t)
	victim := exec.CommandContext(t.Context(), "/proc/self/exe")
	victim.Env = append(os.Environ(), victimVariable+"=1")
	victim.Stderr = os.Stderr
	stdout, err := victim.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, victim.Start())
	lines := bufio.NewScanner(stdout)
	var name string // of the victim's folder and cgroups
	for lines.Scan() && lines.Text() != victimSays {
		t.Log(lines.Text())
		name = lines.Text()
	}
	require.Equal(t, victimSays, lines.Text())
	during := traces(t)
	require.Greater(t, len(during), len(before)+20, "a cluster has many traces")

	require.NoError(t, victim.Process.Kill())
	require.Error(t, victim.Wait())
	testenv.Eventually(t, cgroupPatience, func() error {
		for _, trace := range traces(t) {
			// Other programs may have clusters meanwhile, which share the cgroups' and temporary folders.
			if others := strings.Contains(trace, dirPrefix) && !strings.Contains(trace, name); !others && !slices.Contains(before, trace) {
				return fmt.Errorf("left: %s", trace)
			}
		}
		return nil
	})
}

// traces returns what clusters have on the machine: processes, namespaces, mounts of this
// namespace, cgroups and folders.
func traces(t *testing.T) []string {
	t.Helper()
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	require.NoError(t, err)
	all := strings.Split(strings.TrimSpace(string(mounts)), "\n")
	hierarchies, err := cgroupHierarchies()
	require.NoError(t, err)
	for _, hierarchy := range hierarchies {
		all = append(all, glob(t, filepath.Join(hierarchy, dirPrefix+"*", "*"))...)
		all = append(all, glob(t, filepath.Join(hierarchy, dirPrefix+"*"))...)
	}
	all = append(all, glob(t, filepath.Join(os.TempDir(), dirPrefix+"*"))...)
	for _, process := range glob(t, "/proc/[0-9]*") {
		command, err := os.ReadFile(filepath.Join(process, "cmdline"))
		if err != nil {
			continue // it has just ended
		}
		all = append(all, process+" "+string(command))
		for _, kind := range []string{"net", "mnt", "pid", "uts", "ipc"} {
			if namespace, err := os.Readlink(filepath.Join(process, "ns", kind)); err == nil && !slices.Contains(all, namespace) {
				all = append(all, namespace)
			}
		}
	}
	return all
}

func glob(t *testing.T, pattern string) []string {
	t.Helper()
	paths, err := filepath.Glob(pattern)
	require.NoError(t, err)
	return paths
}

func TestStale(t *testing.T) {
	dir, err := makeDir()
	require.NoError(t, err)
	lock, err := lockDir(dir)
	require.NoError(t, err)
	group := filepath.Base(dir)
	require.NoError(t, createCgroup(group+"/node-1"))
	hierarchies, err := cgroupHierarchies()
	require.NoError(t, err)

	removeStale()
	require.DirExists(t, dir, "its owner lives")
	require.NoError(t, lock.Close())
	removeStale()
	require.NoDirExists(t, dir)
	for _, hierarchy := range hierarchies {
		require.NoDirExists(t, filepath.Join(hierarchy, group))
	}
}
