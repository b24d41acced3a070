// These tests prove that Cleanup removes what kube-proxy leaves in a real kernel, in both variants
// of iptables, that the rules of others stay, and that it refuses to run beside a kube-proxy.
package kubeproxy

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/internal/testenv"
)

// cleanupVariable makes the test binary run Cleanup in the namespace that it is started in.
const cleanupVariable = "SLICECAST_TEST_CLEANUP"

func TestMain(m *testing.M) {
	if os.Getenv(cleanupVariable) != "" {
		if err := Cleanup(context.Background()); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	testenv.Main(m)
}

func cleanup(t *testing.T, host *testenv.Host) error {
	t.Helper()
	c := host.Command(t.Context(), "/proc/self/exe")
	c.Env = append(os.Environ(), cleanupVariable+"=1")
	out, err := c.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}

// mixed contains rules of kube-proxy, of a kubelet and of others.
const mixed = `*mangle
:KUBE-IPTABLES-HINT - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
:KUBE-PROXY-CANARY - [0:0]
COMMIT
*nat
:KUBE-KUBELET-CANARY - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-SEP-AAAAAAAAAAAAAAAA - [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-SVC-AAAAAAAAAAAAAAAA - [0:0]
:KUBE-SVC-OTHERS - [0:0]
:KUBE-SVCX - [0:0]
:OTHER - [0:0]
-A PREROUTING -m comment --comment "kubernetes -j service \" portals" -j KUBE-SERVICES
-A PREROUTING -m comment --comment "-j KUBE-SERVICES" -j OTHER
-A OTHER -p tcp -g KUBE-SVC-AAAAAAAAAAAAAAAA
-A KUBE-SERVICES -d 10.96.0.1/32 -j KUBE-SVC-AAAAAAAAAAAAAAAA
-A KUBE-SEP-AAAAAAAAAAAAAAAA -j KUBE-MARK-MASQ
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
COMMIT
*filter
:KUBE-FIREWALL - [0:0]
:KUBE-FORWARD - [0:0]
-A INPUT -j KUBE-FIREWALL
-A FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD
-A KUBE-FIREWALL ! -s 127.0.0.0/8 -d 127.0.0.0/8 -j DROP
-A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT
COMMIT
`

const kept = `*mangle
:KUBE-IPTABLES-HINT - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
COMMIT
*nat
:KUBE-KUBELET-CANARY - [0:0]
:KUBE-SVC-OTHERS - [0:0]
:KUBE-SVCX - [0:0]
:OTHER - [0:0]
-A PREROUTING -m comment --comment "-j KUBE-SERVICES" -j OTHER
COMMIT
*filter
:KUBE-FIREWALL - [0:0]
-A INPUT -j KUBE-FIREWALL
-A KUBE-FIREWALL ! -s 127.0.0.0/8 -d 127.0.0.0/8 -j DROP
COMMIT
`

// saved returns the rules, without comments and the kernel's built-in chains.
func saved(t *testing.T, host *testenv.Host, variant string) string {
	t.Helper()
	var b strings.Builder
	for _, table := range []string{"mangle", "nat", "filter"} {
		out, err := host.Run(t.Context(), "iptables-"+variant+"-save", "-t", table)
		require.NoError(t, err)
		for line := range strings.Lines(out) {
			if strings.HasPrefix(line, ":") {
				name, _, _ := strings.Cut(line[1:], " ")
				if strings.ToUpper(name) == name && !strings.Contains(name, "-") && name != "OTHER" {
					continue
				}
				line = ":" + name + " - [0:0]\n"
			}
			if !strings.HasPrefix(line, "#") {
				b.WriteString(line)
			}
		}
	}
	return b.String()
}

func TestCleanupKeepsTheRulesOfOthers(t *testing.T) {
	for _, variant := range []string{"nft", "legacy"} {
		t.Run(variant, func(t *testing.T) {
			host := testenv.NewNetwork(t).AddNode("a").Host
			restore := host.Command(t.Context(), "iptables-"+variant+"-restore")
			restore.Stdin = strings.NewReader(mixed)
			out, err := restore.CombinedOutput()
			require.NoError(t, err, "%s", out)
			for _, table := range []string{"ip kube-proxy", "ip6 kube-proxy", "inet kube-proxy", "ip other"} {
				_, err := host.Run(t.Context(), "nft", append([]string{"add", "table"}, strings.Fields(table)...)...)
				require.NoError(t, err)
			}
			for range 2 { // the second time, there is nothing to do
				require.NoError(t, cleanup(t, host))
				require.Equal(t, kept, saved(t, host, variant))
				tables, err := host.Run(t.Context(), "nft", "list", "tables")
				require.NoError(t, err)
				require.NotContains(t, tables, "table ip kube-proxy\n")
				require.NotContains(t, tables, "table ip6 kube-proxy\n")
				require.Contains(t, tables, "table inet kube-proxy\n")
				require.Contains(t, tables, "table ip other\n")
			}
		})
	}
}

// TestCleanupBesideNativeRules asserts that kube-proxy's chains are removed from tables in which
// others have rules that iptables' programs print nothing of or fail at, and without programs as
// far as the kernel allows. What cannot be removed is an error.
func TestCleanupBesideNativeRules(t *testing.T) {
	load := func(host *testenv.Host, variant string) {
		restore := host.Command(t.Context(), "iptables-"+variant+"-restore")
		restore.Stdin = strings.NewReader(mixed)
		out, err := restore.CombinedOutput()
		require.NoError(t, err, "%s", out)
	}
	for _, rule := range []string{
		"nat OUTPUT tcp dport { 8443, 9443 } dnat to 10.1.1.1:443", "nat OTHER ip saddr 203.0.113.7 meta mark set 0x7",
		"filter FORWARD ip saddr 203.0.113.7 meta skuid 7 accept",
	} {
		host := testenv.NewNetwork(t).AddNode("a").Host
		list := func() (rules string) {
			for _, table := range []string{"mangle", "nat", "filter"} {
				out, err := host.Run(t.Context(), "nft", "list", "table", "ip", table)
				require.NoError(t, err)
				rules += out
			}
			return rules
		}
		load(host, "nft")
		_, err := host.Run(t.Context(), "iptables-nft", "-t", "nat", "-A", "OUTPUT", "-j", "OTHER")
		require.NoError(t, err)
		_, err = host.Run(t.Context(), "nft", "add", "rule", "ip", rule)
		require.NoError(t, err)
		require.NoError(t, cleanup(t, host))
		left := list()
		for _, chain := range []string{"KUBE-SERVICES", "KUBE-PROXY-CANARY", "KUBE-FORWARD", "KUBE-SVC-AAAAAAAAAAAAAAAA"} {
			require.NotContains(t, left, "chain "+chain)
			require.NotContains(t, left, "jump "+chain)
		}
		for _, other := range []string{"chain KUBE-KUBELET-CANARY", "chain KUBE-SVC-OTHERS", "chain KUBE-FIREWALL", "jump KUBE-FIREWALL", "jump OTHER"} {
			require.Contains(t, left, other)
		}
	}

	host := testenv.NewNetwork(t).AddNode("a").Host
	load(host, "legacy")
	path := os.Getenv("PATH")
	t.Setenv("PATH", t.TempDir())
	require.ErrorContains(t, cleanup(t, host), "install iptables-legacy")
	t.Setenv("PATH", path)
	require.NoError(t, cleanup(t, host))
	require.Equal(t, kept, saved(t, host, "legacy"))
}

func TestCleanupFailsWhileKubeProxyRuns(t *testing.T) {
	network := testenv.NewNetwork(t)
	a, b := network.AddNode("a").Host, network.AddNode("b").Host
	sleep, err := exec.LookPath("sleep")
	require.NoError(t, err)
	// A process has the name of its executable.
	program := filepath.Join(t.TempDir(), "kube-proxy")
	content, err := os.ReadFile(sleep)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(program, content, 0o700))
	proxy := a.Command(t.Context(), program, "1000")
	require.NoError(t, proxy.Start())
	require.ErrorContains(t, cleanup(t, a), fmt.Sprintf("kube-proxy runs on this node (process %d)", proxy.Process.Pid))
	require.NoError(t, cleanup(t, b), "it is another node's")
	require.NoError(t, proxy.Process.Kill())
	require.Error(t, proxy.Wait())
	require.NoError(t, cleanup(t, a))

	// A kube-proxy in another container is not visible as a process, but it answers requests.
	answers := func(address, path, program, answer string) (stop func()) {
		listener, err := a.Listen(t.Context(), "tcp4", address)
		require.NoError(t, err)
		mux := http.NewServeMux()
		mux.HandleFunc(path, func(w http.ResponseWriter, _ *http.Request) {
			if program != "" {
				w.Header().Set("Server", program)
			}
			w.WriteHeader(http.StatusServiceUnavailable)
			_, _ = io.WriteString(w, answer) // the client would notice an error
		})
		server := &http.Server{Handler: mux}
		served := make(chan error, 1)
		go func() { served <- server.Serve(listener) }()
		return func() {
			require.NoError(t, server.Close())
			require.ErrorIs(t, <-served, http.ErrServerClosed)
		}
	}
	const mode = "127.0.0.1:10249"
	stop := answers(mode, "/proxyMode", "", "nftables")
	require.ErrorContains(t, cleanup(t, a), "reports the mode nftables")
	stop()
	stop = answers(mode, "/proxyMode", daemon.AgentServer, "nftables")
	require.NoError(t, cleanup(t, a), "it is our agent")
	stop()
	stop = answers(mode, "/proxyMode", "", "something else")
	require.NoError(t, cleanup(t, a))
	stop()
	const health = "127.0.0.1:10256"
	const healthy = `{"lastUpdated":"2026-01-01T00:00:00Z","currentTime":"2026-01-01T00:00:01.5Z","nodeEligible":true,"healthy":false}`
	stop = answers(health, "/healthz", "", healthy)
	require.ErrorContains(t, cleanup(t, a), "127.0.0.1:10256/healthz answers like kube-proxy")
	stop()
	stop = answers(health, "/healthz", daemon.AgentServer, healthy)
	require.NoError(t, cleanup(t, a), "it is our agent")
	stop()
	stop = answers(health, "/healthz", "", "ok")
	require.NoError(t, cleanup(t, a))
	stop()
}
