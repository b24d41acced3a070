// These tests prove that the units work. systemd finds no fault in them and counts little exposure.
// A systemd of the tests runs a server and an agent with the units' users, privileges and view of
// files. The agent programs a Service with each programmer, and comes back after a crash.
package systemd

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"sigs.k8s.io/yaml"

	"github.com/slicecast/slicecast/agent/config"
	"github.com/slicecast/slicecast/internal/testca"
	"github.com/slicecast/slicecast/internal/testenv"
)

const (
	agentUnit  = "slicecast-agent.service"
	serverUnit = "slicecast-server.service"
)

// TestUnits runs a server and an agent, both as units.
func TestUnits(t *testing.T) {
	network := testenv.NewNetwork(t)
	node := network.AddNode("node-1")
	server, client := node.AddPod("server"), node.AddPod("client")
	server.Serve(testenv.TCP, 8080)
	configure(t, testenv.WebManifest(server.IPv4), node.PodCIDR4.String())
	m := start(t, node)
	reached := func() {
		t.Helper()
		result := client.Probe(t.Context(), testenv.TCP, testenv.WebService, 3, testenv.ProbeOptions{})
		require.Equal(t, map[string]int{"server": 3}, result.Backends(), result)
	}
	// The threshold is in tenths of the points that systemd counts. What a programmer of the kernel
	// needs costs points, too.
	for unit, threshold := range map[string]string{agentUnit: "22", serverUnit: "16"} {
		out, err := m.run(t.Context(), "systemd-analyze", "verify", "--man=no", "/etc/systemd/system/"+unit)
		require.NoError(t, err, out)
		require.Empty(t, out)
		out, err = m.run(t.Context(), "systemd-analyze", "security", "--offline=yes", "--no-pager", "--threshold="+threshold,
			"/etc/systemd/system/"+unit)
		require.NoError(t, err, out)
	}

	m.startUnit(t, serverUnit)
	m.requireConfined(t, serverUnit, 0)
	pid := m.main(t, serverUnit)
	require.NotEqual(t, "0", strings.Fields(status(t, pid, "Uid"))[1])
	require.Error(t, m.touch(t.Context(), pid, "/etc/slicecast-server/new"))

	for _, programmer := range []string{"nftables", "iptables-nft", "iptables-legacy"} {
		t.Run(programmer, func(t *testing.T) {
			name, variant, _ := strings.Cut(programmer, "-")
			_, err := m.run(t.Context(), "sed", "-i", "-e", "s/^programmer:.*/programmer: "+name+"/", "/etc/slicecast/agent.yaml")
			require.NoError(t, err)
			if variant != "" {
				_, err := m.run(t.Context(), "sed", "-i", "-e", "/^iptables:/d", "-e", "$aiptables: {variant: "+variant+"}", "/etc/slicecast/agent.yaml")
				require.NoError(t, err)
			}
			m.startUnit(t, agentUnit)
			reached()
			m.requireConfined(t, agentUnit, 1<<unix.CAP_NET_ADMIN|1<<unix.CAP_NET_RAW)
			out, err := m.run(t.Context(), "slicecast-agent", "status", "--status-socket=/run/slicecast/agent.sock")
			require.NoError(t, err)
			require.Contains(t, out, name)
			_, err = m.systemctl(t.Context(), "stop", agentUnit)
			require.NoError(t, err)
			reached() // without an agent
		})
	}

	t.Run("crash", func(t *testing.T) { m.crash(t) })
	reached()
	t.Run("installation", func(t *testing.T) { m.reinstall(t, reached) })
}

// crash starts the agent, looks at its view of files, kills it again and again, and requires that
// it comes back each time.
func (m *machine) crash(t *testing.T) {
	m.startUnit(t, agentUnit)
	before := m.main(t, agentUnit)
	require.NoError(t, m.touch(t.Context(), before, "/var/lib/slicecast/new"))
	require.NoError(t, m.touch(t.Context(), before, "/run/xtables.lock"))
	for _, path := range []string{"/etc/slicecast/new", "/usr/new", "/run/new", "/var/lib/new", "/proc/sys/net/ipv4/ip_forward"} {
		require.Error(t, m.touch(t.Context(), before, path), path)
	}
	for restarts := 1; restarts <= crashes; restarts++ {
		_, err := m.systemctl(t.Context(), "kill", "--signal=KILL", agentUnit)
		require.NoError(t, err)
		want := fmt.Sprintf("NRestarts=%d\nActiveState=active\nSubState=running\n", restarts)
		testenv.Eventually(t, patience, func() error {
			out, err := m.systemctl(t.Context(), "show", "--property=NRestarts,ActiveState,SubState", agentUnit)
			if err == nil && !strings.Contains(out, want) {
				err = fmt.Errorf("not restarted yet: %s", out)
			}
			return err
		})
	}
	m.awaitReady(t, agentUnit)
	require.NotEqual(t, before, m.main(t, agentUnit))
}

// crashes is more than systemd would allow by default before it gives up.
const crashes = 6

// ready has the addresses at which the programs say that they are ready.
var ready = map[string]string{agentUnit: "http://127.0.0.1:8475/readyz", serverUnit: "http://127.0.0.1:8473/readyz"}

// startUnit starts a unit and waits until its program is ready.
func (m *machine) startUnit(t *testing.T, unit string) {
	t.Helper()
	if _, err := m.systemctl(t.Context(), "start", unit); err != nil {
		out, _ := m.systemctl(t.Context(), "status", "--no-pager", "--full", unit)
		t.Fatalf("start %s: %v\n%s", unit, err, out)
	}
	m.awaitReady(t, unit)
}

func (m *machine) awaitReady(t *testing.T, unit string) {
	t.Helper()
	transport := &http.Transport{DialContext: m.node.DialContext}
	defer transport.CloseIdleConnections()
	testenv.Eventually(t, patience, func() error {
		response, err := (&http.Client{Transport: transport}).Get(ready[unit])
		if err != nil {
			return err
		}
		defer response.Body.Close()
		if response.StatusCode != http.StatusOK {
			return fmt.Errorf("%s: %s", ready[unit], response.Status)
		}
		return nil
	})
}

// requireConfined requires that a unit's program has no capabilities but the given ones, cannot get
// others, and runs with a filter of system calls.
func (m *machine) requireConfined(t *testing.T, unit string, bounding uint64) {
	t.Helper()
	pid := m.main(t, unit)
	require.Equal(t, bounding, capabilities(t, pid, "CapBnd"))
	require.Equal(t, bounding, capabilities(t, pid, "CapEff"))
	require.Equal(t, "1", status(t, pid, "NoNewPrivs"))
	require.Equal(t, "2", status(t, pid, "Seccomp"))
}

// configure writes the settings of the machine from the examples: with the paths of the examples,
// but for a server that reads manifests.
func configure(t *testing.T, objects, clusterCIDR string) {
	t.Helper()
	agentDir, serverDir := filepath.Join(dir, "etc/slicecast"), filepath.Join(dir, "etc/slicecast-server")
	require.NoError(t, os.MkdirAll(agentDir, 0o700))
	require.NoError(t, os.MkdirAll(filepath.Join(serverDir, "manifests"), 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(serverDir, "manifests/web.yaml"), []byte(objects), 0o600))

	ca, err := testca.New()
	require.NoError(t, err)
	for _, to := range []string{agentDir, serverDir} {
		_, err := ca.WriteCA(to)
		require.NoError(t, err)
	}
	certificate, err := ca.Server("slicecast-server.slicecast-system.svc")
	require.NoError(t, err)
	_, _, err = testca.Write(serverDir, "tls", certificate)
	require.NoError(t, err)
	certificate, err = ca.Node("node-1")
	require.NoError(t, err)
	_, _, err = testca.Write(agentDir, "agent", certificate)
	require.NoError(t, err)

	replace := strings.NewReplacer("slicecast.example.com:8472", "127.0.0.1:8472", "10.244.0.0/16", clusterCIDR,
		"[relay-1.example.com:8472, relay-2.example.com:8472]", "[127.0.0.1:8472]")
	copyFile(t, filepath.Join(agentDir, "agent.yaml"), "agent.yaml", replace.Replace)
	example, err := os.ReadFile("agent.yaml")
	require.NoError(t, err)
	_, err = config.Parse(example)
	require.NoError(t, err)
	copyFile(t, filepath.Join(serverDir, "server.yaml"), "server.yaml", func(text string) string {
		var settings map[string]any
		require.NoError(t, yaml.UnmarshalStrict([]byte(replace.Replace(text)), &settings))
		delete(settings, "upstream")
		settings["source"], settings["manifests"] = "file", "/etc/slicecast-server/manifests"
		changed, err := yaml.Marshal(settings)
		require.NoError(t, err)
		return string(changed)
	})
}
