package kubeproxy

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/controlplane"
	"github.com/slicecast/slicecast/loadtest/usage"
)

// slicecast is a subject; the other is kube-proxy.
const slicecast = "slicecast"

// clusterCIDR has the addresses of pods, for whom cluster IPs are not masqueraded.
const clusterCIDR = "10.180.0.0/16"

// process is one that runs on a host until the benchmark ends.
type process struct {
	*testenv.Cmd
	host *testenv.Host
	log  string
	end  func()
}

func start(b *testing.B, host *testenv.Host, name string, env []string, path string, args ...string) *process {
	b.Helper()
	p := &process{Cmd: host.Command(context.WithoutCancel(b.Context()), path, args...), host: host, log: filepath.Join(b.TempDir(), "log")}
	log, err := os.Create(p.log)
	require.NoError(b, err)
	defer log.Close()
	p.Env, p.Stdout, p.Stderr = append(os.Environ(), env...), log, log
	require.NoError(b, p.Start(), name)
	b.Cleanup(func() {
		if b.Failed() {
			text, _ := os.ReadFile(p.log)
			b.Logf("---- the end of the log of %s:\n%s", name, text[max(0, len(text)-4000):])
		}
		p.end()
	})
	p.end = sync.OnceFunc(func() {
		_ = p.Process.Signal(syscall.SIGTERM)
		_ = p.Wait()
	})
	return p
}

// awaitOK waits until a URL of the process answers.
func (p *process) awaitOK(b *testing.B, url string, timeout time.Duration) {
	b.Helper()
	client := http.Client{Transport: &http.Transport{DialContext: p.host.DialContext, DisableKeepAlives: true}}
	testenv.Eventually(b, timeout, func() error {
		request, err := http.NewRequestWithContext(b.Context(), http.MethodGet, url, nil)
		if err != nil {
			return err
		}
		response, err := client.Do(request)
		if err != nil {
			return err
		}
		defer response.Body.Close()
		if response.StatusCode != http.StatusOK {
			return fmt.Errorf("%s: %s", url, response.Status)
		}
		return nil
	})
}

// cpu gives the CPU time of the process and of the programs that it has run, once none runs any more.
func (p *process) cpu(b *testing.B) time.Duration {
	b.Helper()
	testenv.Eventually(b, programTimeout, func() error {
		stats, err := filepath.Glob("/proc/[0-9]*/stat")
		for _, stat := range stats {
			text, _ := os.ReadFile(stat) // it may have ended
			_, after, _ := strings.Cut(string(text), ") ")
			if fields := strings.Fields(after); len(fields) > 1 && fields[1] == strconv.Itoa(p.Process.Pid) {
				return fmt.Errorf("a program that process %d has started still runs: %s", p.Process.Pid, text)
			}
		}
		return err
	})
	spent, err := usage.FamilyCPUOf(p.Process.Pid)
	require.NoError(b, err)
	return spent.Total()
}

// startSubject starts who is measured on a node.
func (c *cluster) startSubject(b *testing.B, subject string, n *node) *process {
	b.Helper()
	if subject == "kube-proxy" {
		return c.startKubeProxy(b, n)
	}
	require.Equal(b, slicecast, subject, "-kubeproxy.subjects")
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

func (c *cluster) startKubeProxy(b *testing.B, n *node) *process {
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
		// Only the first network namespace may set these.
		"conntrack": map[string]any{"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
	})
	require.NoError(b, err)
	// It takes the commands without a variant in their names.
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
