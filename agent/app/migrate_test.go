// This test proves that the agent accepts whatever becomes of a configuration that kube-proxy
// accepts. Configurations are drawn at random, and kube-proxy's own validation judges them.
package app

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/slicecast/slicecast/agent/config"
)

// TestMigratedConfigurationsAreValid asserts that every configuration that kube-proxy accepts is
// migrated to one that the agent accepts.
func TestMigratedConfigurationsAreValid(t *testing.T) {
	path := filepath.Join(t.TempDir(), "agent.yaml")
	some := func(list ...any) *rapid.Generator[any] { return rapid.SampledFrom(list) }
	duration := func(longest time.Duration) *rapid.Generator[any] {
		return rapid.Map(rapid.Int64Range(0, int64(longest)), func(n int64) any { return time.Duration(n).String() })
	}
	count := rapid.Map(rapid.IntRange(0, 1000), func(n int) any { return n })
	yesOrNo := some(false, true)
	mode := map[string]*rapid.Generator[any]{
		"masqueradeBit": rapid.Map(rapid.IntRange(0, 31), func(n int) any { return n }), "masqueradeAll": yesOrNo,
		"minSyncPeriod": duration(5 * time.Hour), "syncPeriod": some("0s", "5h", "6h"),
	}
	section := func(of map[string]*rapid.Generator[any]) *rapid.Generator[any] {
		return rapid.Custom(func(t *rapid.T) any { return drawSome(t, of) })
	}
	iptables := maps.Clone(mode)
	iptables["localhostNodePorts"] = yesOrNo
	ipvs := map[string]*rapid.Generator[any]{
		"minSyncPeriod": mode["minSyncPeriod"], "syncPeriod": mode["syncPeriod"], "strictARP": yesOrNo, "excludeCIDRs": some([]string{}, []string{"10.0.0.0/8", "fd00::/8"}),
		"scheduler": some("", "rr", "wlc", "mh", "fo"), "tcpTimeout": duration(time.Hour), "tcpFinTimeout": duration(3 * time.Second), "udpTimeout": duration(3 * time.Second),
	}
	fields := map[string]*rapid.Generator[any]{
		"mode": some("", "iptables", "ipvs", "nftables"), "iptables": section(iptables), "ipvs": section(ipvs), "nftables": section(mode),
		"detectLocalMode": some("", "ClusterCIDR", "NodeCIDR", "BridgeInterface", "InterfaceNamePrefix"),
		"clusterCIDR":     some("", "10.0.0.0/8", "10.0.0.0/8,fd00::/48"), "hostnameOverride": some("", " Node-1 "),
		"bindAddress": some("", "::", "0.0.0.0", "192.168.0.2"), "healthzBindAddress": some("", "0.0.0.0", "::1", "[::1]:1", ":10256", "127.0.0.1:2"),
		"nodePortAddresses": some([]string{}, []string{"primary"}, []string{"192.168.0.7/24", "::/0"}),
		"conntrack": section(map[string]*rapid.Generator[any]{
			"maxPerCore": count, "min": count, "tcpBeLiberal": yesOrNo, "tcpEstablishedTimeout": duration(time.Hour),
			"tcpCloseWaitTimeout": duration(3 * time.Second), "udpTimeout": duration(3 * time.Second), "udpStreamTimeout": duration(time.Hour),
		}),
		"logging": section(map[string]*rapid.Generator[any]{"format": some("text", "json")}),
	}
	rapid.Check(t, func(rt *rapid.T) {
		in := drawSome(rt, fields)
		in["apiVersion"], in["kind"] = "kubeproxy.config.k8s.io/v1alpha1", "KubeProxyConfiguration"
		// kube-proxy requires these fields with some values of detectLocalMode.
		in["detectLocal"] = map[string]any{"bridgeInterface": "cni0", "interfaceNamePrefix": "veth"}
		content, err := json.Marshal(in)
		require.NoError(rt, err)
		m, err := config.Migrate(content)
		require.NoError(rt, err)
		file, err := m.YAML()
		require.NoError(rt, err)
		require.NoError(rt, os.WriteFile(path, file, 0o600))
		o, err := parseWithConfig(t, "--config="+path, "--source=kube")
		require.NoError(rt, err, "%s", file)
		require.NoError(rt, o.validate(), "%s", file)
	})
}

// drawSome draws some of the fields.
func drawSome(t *rapid.T, fields map[string]*rapid.Generator[any]) map[string]any {
	out := map[string]any{}
	for _, name := range slices.Sorted(maps.Keys(fields)) {
		if drawn := fields[name].Draw(t, name); rapid.Bool().Draw(t, fmt.Sprint("has ", name)) {
			out[name] = drawn
		}
	}
	return out
}
