// These tests prove that the configuration file and the flags set the same options, that none is
// missing from either, and that the command that converts kube-proxy's configuration writes a file
// that the agent accepts.
package app

import (
	"bytes"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/config"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/configfile/configfiletest"
)

const configHead = "apiVersion: slicecast.io/v1beta1\nkind: AgentConfiguration\n"

// writeConfig writes a configuration file and returns its path.
func writeConfig(t *testing.T, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "agent.yaml")
	require.NoError(t, os.WriteFile(path, []byte(configHead+content), 0o600))
	return path
}

func TestConfigFile(t *testing.T) {
	path := writeConfig(t, `
nodeName: from-file
source: kube
clusterCIDR: 10.0.0.0/8,fd00::/48
nodePortAddresses: [192.168.0.0/24, "2001:db8::/64"]
iptables: {masqueradeBit: 3, masqueradeAll: true, localhostNodePorts: false, minSyncPeriod: 2s, syncPeriod: 0s}
conntrack: {maxPerCore: 0, tcpEstablishedTimeout: 2h, tcpBeLiberal: true}
healthzBindAddress: 127.0.0.1:1,:2
logging: {level: warn}
`)
	o := parse(t, "--config="+path)
	require.NoError(t, o.validate())
	require.Equal(t, "from-file", o.NodeName, "the environment gives the default only")
	require.Equal(t, "kube", o.Source)
	require.Equal(t, []string{"127.0.0.1:1", ":2"}, o.HealthzAddresses)
	require.Equal(t, "warn", o.Log.Level)
	require.Equal(t, 3, o.Node.MasqueradeBit)
	require.Equal(t, 2*time.Second, o.Node.MinSyncPeriod)
	require.Zero(t, o.Node.SyncPeriod)
	require.Zero(t, o.Node.Conntrack.MaxPerCore)
	require.Equal(t, 2*time.Hour, o.Node.Conntrack.TCPEstablishedTimeout)
	require.Equal(t, time.Hour, o.Node.Conntrack.TCPCloseWaitTimeout, "the default")
	require.True(t, o.Node.Conntrack.TCPBeLiberal)
	v, err := o.Node.view("n")
	require.NoError(t, err)
	no := false
	require.Equal(t, view.Options{
		NodeName: "n", DetectLocal: view.ByClusterCIDR, MasqueradeAll: true, LocalhostNodePorts: &no,
		ClusterCIDRs:      []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00::/48")},
		NodePortAddresses: []netip.Prefix{netip.MustParsePrefix("192.168.0.0/24"), netip.MustParsePrefix("2001:db8::/64")},
	}, v)

	o = parse(t, "--config="+path, "--node-name=from-flag", "--cluster-cidr=10.1.0.0/16", "--nodeport-addresses=primary",
		"--iptables-localhost-nodeports", "--iptables-min-sync-period=0", "--healthz-bind-address=:3")
	require.NoError(t, o.validate())
	require.Equal(t, "from-flag", o.NodeName)
	require.Equal(t, []string{"10.1.0.0/16"}, o.Node.ClusterCIDRs)
	require.Equal(t, []string{":3"}, o.HealthzAddresses)
	require.True(t, *o.Node.LocalhostNodePorts)
	require.Zero(t, o.Node.MinSyncPeriod)
	v, err = o.Node.view("n")
	require.NoError(t, err)
	require.True(t, v.NodePortPrimary)
	require.Empty(t, v.NodePortAddresses)
}

func TestConfigFileErrors(t *testing.T) {
	_, err := parseWithConfig(t, "--config=/nowhere/agent.yaml")
	require.ErrorContains(t, err, "--config: open /nowhere/agent.yaml")
	for content, says := range map[string]string{
		"iptables: {masqueradebit: 3}":                `unknown field "iptables.masqueradebit"`,
		`clusterCIDR: '"'`:                            "clusterCIDR: ",
		"nodeName: a\nnodeName: b":                    `"nodeName" already set`,
		"conntrack: {tcpEstablishedTimeout: forever}": "forever",
	} {
		path := writeConfig(t, content)
		_, err := parseWithConfig(t, "--config="+path)
		require.ErrorContains(t, err, says)
		require.ErrorContains(t, err, "--config="+path)
	}
	path := writeConfig(t, "source: kube\niptables: {masqueradeBit: 32}\ndetectLocalMode: BridgeInterface")
	o := parse(t, "--config="+path)
	err = o.file.Named(o.validate())
	require.ErrorContains(t, err, "iptables.masqueradeBit is 32")
	require.ErrorContains(t, err, "detectLocalMode=BridgeInterface requires --pod-bridge-interface")
	require.ErrorContains(t, Run(t.Context(), o, slog.New(slog.DiscardHandler), &bytes.Buffer{}), "--config="+path+": ")
	o = parse(t, "--config="+path, "--iptables-masquerade-bit=33", "--detect-local-mode=NodeCIDR")
	require.EqualError(t, o.file.Named(o.validate()), "--iptables-masquerade-bit is 33: use 0 to 31", "the file is not to blame")
}

// TestEveryFlagHasAField asserts that each flag has a field in the configuration file, except for
// the flags about files and --init-only, and that each field belongs to a flag.
func TestEveryFlagHasAField(t *testing.T) {
	var o Options
	fs := pflag.NewFlagSet(t.Name(), pflag.ContinueOnError)
	o.AddFlags(fs)
	// The last one sets --log-level.
	configfiletest.EveryFlagHasAField[config.Agent](t, fs, "../../docs/configuration.md", "config", "migrate-config", "init-only", "v")
}

func TestMigrateConfig(t *testing.T) {
	content, err := os.ReadFile("../config/testdata/kubeadm.yaml")
	require.NoError(t, err)
	path := filepath.Join(t.TempDir(), "config.conf")
	require.NoError(t, os.WriteFile(path, content, 0o600))
	run := func(arg string) (out, user string, err error) {
		var o, e bytes.Buffer
		c := NewCommand()
		c.SetArgs([]string{"--migrate-config=" + arg})
		c.SetIn(bytes.NewReader(content))
		c.SetOut(&o)
		c.SetErr(&e)
		err = c.ExecuteContext(t.Context())
		return o.String(), e.String(), err
	}
	out, user, err := run(path)
	require.NoError(t, err)
	require.Contains(t, user, "not carried over: clientConnection.kubeconfig: ")
	require.Contains(t, out, "# Not carried over: clientConnection.kubeconfig: ")
	require.Contains(t, out, "\nclusterCIDR: 10.244.0.0/16,fd00:10:244::/56\n")
	same, _, err := run("-")
	require.NoError(t, err)
	require.Equal(t, out, same)

	migrated := filepath.Join(t.TempDir(), "agent.yaml")
	require.NoError(t, os.WriteFile(migrated, []byte(out), 0o600))
	o := parse(t, "--config="+migrated, "--server-service=a/b", "--ca-file=ca", "--token-file=t")
	require.NoError(t, o.validate())
	o = parse(t, "--config="+migrated)
	require.ErrorContains(t, o.validate(), "no source of Services")

	_, _, err = run(filepath.Join(t.TempDir(), "none"))
	require.ErrorContains(t, err, "--migrate-config")
	content = []byte("kind: Pod")
	_, _, err = run("-")
	require.ErrorContains(t, err, "kind: KubeProxyConfiguration")
}
