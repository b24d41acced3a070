// TestKubeProxy proves that the runner and the cases are right: a real kube-proxy passes every case
// in its modes.
package conformance

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/conformance/bugs"
	testcommand "github.com/slicecast/slicecast/internal/testenv/command"
	"github.com/slicecast/slicecast/internal/testenv/controlplane"
)

// TestKubeProxy proves that the runner and the cases are right: a real kube-proxy must pass every
// case.
func TestKubeProxy(t *testing.T) {
	t.Parallel()
	cases, _ := loadAll(t)
	eachVariant(t, *kubeProxies, func(t *testing.T, mode Mode, iptables string) {
		t.Parallel()
		s := newStage(t)
		k := newKubeProxy(t, s, mode, iptables)
		s.subject = k
		if *record == "" {
			s.play(t, cases, nil)
			return
		}
		s.recorder = &recorder{}
		known, err := bugs.Load()
		require.NoError(t, err)
		variant := strings.TrimSuffix(string(mode)+"-"+iptables, "-")
		names := bugs.CaseNames(known, variant)
		s.play(t, slices.DeleteFunc(slices.Clone(cases), func(c *Case) bool { return !slices.Contains(names, c.ID) }), nil)
		if *record == "-" {
			require.NoError(t, bugs.Print(os.Stdout, k.version, variant, s.recorder.outcomes))
			return
		}
		require.NoError(t, bugs.Write(*record, k.version, variant, s.recorder.outcomes))
	})
}

// kubeProxy is the subject that runs a real kube-proxy.
type kubeProxy struct {
	*testcommand.Command
	mode     Mode
	iptables string
	binary   string
	// version is that of the binary, such as 1.37.2.
	version    string
	kubeconfig string
	configFile string
	env        []string
	// featureGates differ from the defaults.
	featureGates map[string]bool
}

func newKubeProxy(t *testing.T, s *stage, mode Mode, iptables string) *kubeProxy {
	t.Helper()
	binary, err := controlplane.KubernetesBinary(t.Context(), "kube-proxy")
	require.NoError(t, err)
	k := &kubeProxy{
		Command: testcommand.New(t, s.node.Host, "kube-proxy"), mode: mode, iptables: iptables, binary: binary,
		kubeconfig: s.control.Kubeconfig(t, s.control.AdminConfig()), configFile: filepath.Join(t.TempDir(), "config"),
	}
	k.version = versionOf(t, binary)
	if iptables != "" {
		commands, err := iptablesCommands(t, iptables)
		require.NoError(t, err)
		k.env = []string{"PATH=" + commands + string(filepath.ListSeparator) + os.Getenv("PATH")}
	}
	return k
}

// versionOf returns the version of a kube-proxy, such as 1.37.2.
func versionOf(t *testing.T, binary string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), binary, "--version").Output()
	require.NoError(t, err)
	_, version, ok := strings.Cut(strings.TrimSpace(string(out)), "Kubernetes v")
	require.True(t, ok, "%s", out)
	return version
}

// minor returns the version without the number of the patch, such as 1.37.
func (k *kubeProxy) minor() string { return k.version[:strings.LastIndexByte(k.version, '.')] }

func (k *kubeProxy) Name() string {
	return strings.TrimSuffix(fmt.Sprintf("kube-proxy, %s %s", k.mode, k.iptables), " ")
}

func (k *kubeProxy) Mode() Mode { return k.mode }

func (k *kubeProxy) Reference() bool { return true }

func (k *kubeProxy) Flush(ctx context.Context, s *stage) error { return flush(ctx, s, k.iptables) }

func (k *kubeProxy) Start(s settings) error {
	config := map[string]any{
		"apiVersion":         "kubeproxy.config.k8s.io/v1alpha1",
		"kind":               "KubeProxyConfiguration",
		"mode":               k.mode,
		"hostnameOverride":   s.Node,
		"clientConnection":   map[string]any{"kubeconfig": k.kubeconfig, "qps": 1000, "burst": 1000},
		"healthzBindAddress": "0.0.0.0:10256",
		"nodePortAddresses":  s.NodePortAddresses,
		// Only the initial network namespace may change these settings.
		"conntrack": map[string]any{"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
		// Shorter than the defaults, so that kube-proxy sees changes at once and soon notices
		// flushed rules.
		string(k.mode): k.modeConfig(s),
	}
	if k.mode == IPVS {
		// In mode ipvs kube-proxy reads masqueradeAll from the settings of iptables.
		config[string(IPTables)] = map[string]any{"masqueradeAll": s.MasqueradeAll}
	}
	gates := map[string]bool{}
	maps.Copy(gates, k.featureGates)
	if s.NoExternalIPs {
		gates["AllowServiceExternalIPs"] = false
	}
	// 1.36 does not know this gate, and exits if it is set.
	if k.mode == NFTables && s.LocalhostNodePorts != nil && *s.LocalhostNodePorts && k.minor() != "1.36" {
		gates["KubeProxyNFTablesLocalhostNodePorts"] = true
	}
	config["featureGates"] = gates
	switch s.detectLocalMode() {
	case ClusterCIDR:
		config["detectLocalMode"] = ClusterCIDR
		config["clusterCIDR"] = strings.Join(s.clusterCIDRs(), ",")
	case NodeCIDR:
		config["detectLocalMode"] = NodeCIDR
	case InterfaceNamePrefix:
		config["detectLocalMode"] = InterfaceNamePrefix
		config["detectLocal"] = map[string]any{"interfaceNamePrefix": s.PodInterfacePrefix}
	}
	text, err := json.Marshal(config)
	if err != nil {
		return err
	}
	if err := os.WriteFile(k.configFile, text, 0o600); err != nil {
		return err
	}
	return k.Command.Start(k.env, k.binary, "--config="+k.configFile, "--v=2")
}

func (k *kubeProxy) modeConfig(s settings) map[string]any {
	config := map[string]any{"minSyncPeriod": "10ms", "syncPeriod": "5s"}
	if k.mode == IPVS {
		// Each time, kube-proxy runs a command for each of its ipsets. In the virtual machine, it would
		// do nothing else.
		config["syncPeriod"] = "30s"
		return config
	}
	config["masqueradeAll"] = s.MasqueradeAll
	if k.mode == IPTables && s.LocalhostNodePorts != nil {
		config["localhostNodePorts"] = *s.LocalhostNodePorts
	}
	return config
}
