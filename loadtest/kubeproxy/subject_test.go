// This file starts the measured programs, slicecast-agent and kube-proxy, and reads the CPU time of
// each with its children, whose exactness a test proves.
package kubeproxy

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/command"
	"github.com/slicecast/slicecast/internal/testenv/controlplane"
	"github.com/slicecast/slicecast/loadtest/usage"
)

// slicecast is one of the subjects. The other one is kube-proxy.
const slicecast = "slicecast"

// clusterCIDR contains the addresses of pods. Their connections to cluster IPs are not masqueraded.
const clusterCIDR = "10.180.0.0/16"

// start starts a command that runs on a host until the benchmark ends.
func start(b *testing.B, host *testenv.Host, name string, env []string, path string, args ...string) *command.Command {
	b.Helper()
	c := command.New(b, host, name)
	require.NoError(b, c.Start(env, path, args...))
	return c
}

// familyCPU waits until no program that a process has started is running. It returns the CPU time
// of the process and of those programs.
func familyCPU(b *testing.B, p *command.Command) time.Duration {
	b.Helper()
	testenv.Eventually(b, programTimeout, func() error {
		stats, err := filepath.Glob("/proc/[0-9]*/stat")
		for _, stat := range stats {
			text, _ := os.ReadFile(stat) // the process may have ended
			_, after, _ := strings.Cut(string(text), ") ")
			if fields := strings.Fields(after); len(fields) > 1 && fields[1] == strconv.Itoa(p.Pid()) {
				return fmt.Errorf("a child of process %d is still running: %s", p.Pid(), text)
			}
		}
		return err
	})
	return familyCPUOf(b, p.Pid())
}

// familyCPUOf returns the CPU time that a process and those of its children that have ended have
// used so far.
func familyCPUOf(t testing.TB, pid int) (spent time.Duration) {
	t.Helper()
	own, err := usage.CPUOf(pid)
	require.NoError(t, err)
	user, system := own.Split()
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	require.NoError(t, err)
	// The fields after the command's name in parentheses; see proc_pid_stat(5).
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	const cutime, cstime, tick = 16 - 3, 17 - 3, 10 * time.Millisecond
	for _, field := range []string{fields[cutime], fields[cstime]} {
		ticks, err := strconv.ParseInt(field, 10, 64)
		require.NoError(t, err)
		spent += time.Duration(ticks) * tick
	}
	return user + system + spent
}

func TestFamilyUsage(t *testing.T) {
	before := familyCPUOf(t, os.Getpid())
	child := exec.CommandContext(t.Context(), "sh", "-c", "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done")
	require.NoError(t, child.Run())
	spent := child.ProcessState.UserTime() + child.ProcessState.SystemTime()
	require.Greater(t, familyCPUOf(t, os.Getpid())-before, spent/2)
}

// startSubject starts the program to measure on a node.
func (c *cluster) startSubject(b *testing.B, subject string, n *node) *command.Command {
	b.Helper()
	if subject == "kube-proxy" {
		return c.startKubeProxy(b, n)
	}
	require.Equal(b, slicecast, subject, "unknown program in -kubeproxy.subjects")
	identity := c.control.ConfigFor("system:node:"+n.Name, "system:nodes")
	mode, _, _ := strings.Cut(n.mode, "-")
	flags := []string{
		"--node-name=" + n.Name, "--programmer=" + mode, "--cluster-cidr=" + clusterCIDR, "--healthz-bind-address=127.0.0.1:10256",
		fmt.Sprintf("--servers=%s:%d", c.network.World.IPv4, serverPort), "--ca-file=" + c.ca,
		"--client-cert-file=" + c.write(b, n.Name+".crt", identity.CertData), "--client-key-file=" + c.write(b, n.Name+".key", identity.KeyData),
	}
	if n.iptables != "" {
		flags = append(flags, "--iptables-variant="+n.iptables)
	}
	return start(b, n.Host, "slicecast-agent", nil, filepath.Join(os.Getenv(buildDirVariable), "agent"), flags...)
}

func (c *cluster) startKubeProxy(b *testing.B, n *node) *command.Command {
	b.Helper()
	binary, err := controlplane.KubernetesBinary(b.Context(), "kube-proxy")
	require.NoError(b, err)
	mode, _, _ := strings.Cut(n.mode, "-")
	config, err := json.Marshal(map[string]any{
		"apiVersion":       "kubeproxy.config.k8s.io/v1alpha1",
		"kind":             "KubeProxyConfiguration",
		"mode":             mode,
		"hostnameOverride": n.Name,
		"clientConnection": map[string]any{"kubeconfig": c.control.Kubeconfig(b, c.control.AdminConfig())},
		"detectLocalMode":  "ClusterCIDR",
		"clusterCIDR":      clusterCIDR,
		// Only processes in the initial network namespace may set these.
		"conntrack": map[string]any{"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
	})
	require.NoError(b, err)
	// kube-proxy uses the commands without a variant in their names.
	commands := b.TempDir()
	for _, family := range []string{"iptables", "ip6tables"} {
		for _, what := range []string{"", "-save", "-restore"} {
			if n.iptables == "" {
				break
			}
			path, err := exec.LookPath(family + "-" + n.iptables + what)
			require.NoError(b, err)
			require.NoError(b, os.Symlink(path, filepath.Join(commands, family+what)))
		}
	}
	env := []string{"PATH=" + strings.Join([]string{commands, os.Getenv("PATH")}, string(filepath.ListSeparator))}
	return start(b, n.Host, "kube-proxy", env, binary, "--config="+c.write(b, n.Name+".config", config), "--v=2")
}
