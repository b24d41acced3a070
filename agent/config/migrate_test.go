// These tests prove what becomes of kube-proxy's settings in each of its modes, what is reported as
// lost or noted, and which files are refused. The fuzz target proves that a migrated file can
// always be parsed.
package config

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/configfile"
)

const proxy = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"

// migrated returns the fields that a file becomes, as "field=value ...", and the lost fields and
// notes, by field.
func migrated(t *testing.T, content string) (fields string, lost, notes map[string]string) {
	t.Helper()
	m, err := Migrate([]byte(content))
	require.NoError(t, err)
	b, err := m.YAML()
	require.NoError(t, err)
	again, err := Parse(b)
	require.NoError(t, err, "%s", b)
	require.Equal(t, configfile.Settings(m.Agent), configfile.Settings(again), "%s", b)
	var all []string
	for _, s := range configfile.Settings(again) {
		all = append(all, s.Field+"="+strings.Join(s.Values, ","))
	}
	said := func(list []Note) map[string]string {
		out := map[string]string{}
		for _, n := range list {
			require.Contains(t, string(b), ": "+n.String()+".\n")
			out[n.Field] = n.Text
		}
		return out
	}
	return strings.Join(all, " "), said(m.Lost), said(m.Notes)
}

func TestMigrateKubeadmConfiguration(t *testing.T) {
	content, err := os.ReadFile("testdata/kubeadm.yaml")
	require.NoError(t, err)
	fields, lost, notes := migrated(t, string(content))
	require.Equal(t, "iptables.localhostNodePorts=true clusterCIDR=10.244.0.0/16,fd00:10:244::/56 nodePortAddresses=0.0.0.0/0,::/0 healthzBindAddress=0.0.0.0:10256", fields)
	require.Equal(t, map[string]string{"clientConnection.kubeconfig": reasons["clientConnection"]}, lost)
	require.Contains(t, notes["nodePortAddresses"], "all of the node's addresses in mode iptables")
	require.Contains(t, notes["mode"], "kube-proxy's default is iptables")
}

func TestMigrate(t *testing.T) {
	const localhost, all, health = "iptables.localhostNodePorts=true", "nodePortAddresses=0.0.0.0/0,::/0", "healthzBindAddress=0.0.0.0:10256"
	for name, c := range map[string]struct {
		content, fields string
		lost            string // the names of the lost fields
	}{
		"defaults":             {"", localhost + " " + all + " " + health, ""},
		"nothing on loopback":  {"iptables: {localhostNodePorts: false}", "iptables.localhostNodePorts=false " + all + " " + health, ""},
		"NodePorts restricted": {"nodePortAddresses: [192.168.0.0/24]", localhost + " nodePortAddresses=192.168.0.0/24 " + health, ""},
		"NodePorts primary":    {"nodePortAddresses: [primary]", localhost + " nodePortAddresses=primary " + health, ""},
		"mode nftables": {
			"mode: nftables\nnftables: {masqueradeBit: 3, masqueradeAll: true, minSyncPeriod: 5s, syncPeriod: 10s}\niptables: {masqueradeBit: 4, syncPeriod: 5s, localhostNodePorts: true}",
			"programmer=nftables iptables.masqueradeBit=3 iptables.masqueradeAll=true iptables.minSyncPeriod=5s " + health,
			"iptables.localhostNodePorts iptables.masqueradeBit iptables.syncPeriod nftables.syncPeriod",
		},
		"mode ipvs": {
			"mode: ipvs\nipvs: {scheduler: lc, strictARP: true, excludeCIDRs: [10.0.0.0/8], minSyncPeriod: 3s, syncPeriod: 30s, tcpTimeout: 15m, tcpFinTimeout: 0s, udpTimeout: 1500ms}\n" +
				"iptables: {masqueradeBit: 4, masqueradeAll: true, minSyncPeriod: 9s}",
			"programmer=ipvs iptables.masqueradeBit=4 iptables.masqueradeAll=true iptables.minSyncPeriod=3s " +
				"ipvs.scheduler=lc ipvs.strictARP=true ipvs.excludeCIDRs=10.0.0.0/8 ipvs.tcpTimeout=15m0s ipvs.udpTimeout=1s " + all + " " + health,
			"ipvs.syncPeriod iptables.minSyncPeriod",
		},
		"mode ipvs, another scheduler": {"mode: ipvs\nipvs: {scheduler: fo, excludeCIDRs: []}", "programmer=ipvs " + all + " " + health, "ipvs.scheduler"},
		"mode ipvs, nothing else":      {"mode: ipvs", "programmer=ipvs " + all + " " + health, ""},
		"another mode's section":       {"mode: iptables\nipvs: {scheduler: rr}", "programmer=iptables " + localhost + " " + all + " " + health, "ipvs.scheduler"},
		"iptables": {
			"iptables: {masqueradeBit: 0, masqueradeAll: true, minSyncPeriod: 1s, syncPeriod: 30s}",
			"iptables.masqueradeBit=0 iptables.masqueradeAll=true " + localhost + " iptables.minSyncPeriod=1s " + all + " " + health, "iptables.syncPeriod",
		},
		"node CIDR":        {"detectLocalMode: NodeCIDR\nclusterCIDR: 10.0.0.0/8", localhost + " detectLocalMode=NodeCIDR " + all + " " + health, "clusterCIDR"},
		"bridge":           {"detectLocalMode: BridgeInterface\ndetectLocal: {bridgeInterface: cni0, interfaceNamePrefix: x}", localhost + " detectLocalMode=BridgeInterface detectLocal.bridgeInterface=cni0 " + all + " " + health, "detectLocal.interfaceNamePrefix"},
		"interface prefix": {"detectLocalMode: InterfaceNamePrefix\ndetectLocal: {interfaceNamePrefix: veth}", localhost + " detectLocalMode=InterfaceNamePrefix detectLocal.interfaceNamePrefix=veth " + all + " " + health, ""},
		"conntrack": {
			"conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 2h, tcpCloseWaitTimeout: 0s, tcpBeLiberal: true, udpTimeout: 10s, udpStreamTimeout: 20s, new: 1}",
			localhost + " " + all + " conntrack.maxPerCore=0 conntrack.min=0 conntrack.tcpEstablishedTimeout=2h0m0s conntrack.tcpCloseWaitTimeout=0s " +
				"conntrack.tcpBeLiberal=true conntrack.udpTimeout=10s conntrack.udpStreamTimeout=20s " + health, "conntrack.new",
		},
		"parts of seconds": {
			"conntrack: {tcpEstablishedTimeout: 1500ms, udpTimeout: 900ms, udpStreamTimeout: 20s}",
			localhost + " " + all + " conntrack.tcpEstablishedTimeout=1s conntrack.udpStreamTimeout=20s " + health, "",
		},
		"more time than here": {
			"iptables: {minSyncPeriod: 2h, syncPeriod: 3h}",
			localhost + " iptables.syncPeriod=2h0m0s iptables.minSyncPeriod=2h0m0s " + all + " " + health, "iptables.syncPeriod",
		},
		"addresses": {
			"bindAddress: 192.168.0.2\nhealthzBindAddress: 127.0.0.1:1\nmetricsBindAddress: 0.0.0.0:2\nbindAddressHardFail: true",
			localhost + " " + all + " healthzBindAddress=127.0.0.1:1", "bindAddress bindAddressHardFail metricsBindAddress",
		},
		"health without a port": {"healthzBindAddress: '[::1]'", localhost + " " + all + " healthzBindAddress=[::1]:10256", ""},
		"over IPv6": {
			"bindAddress: '::'", localhost + " " + all + " healthzBindAddress=[::]:10256 metricsBindAddress=[::1]:10249", "",
		},
		"metrics on loopback":      {"metricsBindAddress: 127.0.0.1:2", localhost + " " + all + " " + health + " metricsBindAddress=127.0.0.1:2", ""},
		"metrics without a port":   {"metricsBindAddress: 127.0.0.1", localhost + " " + all + " " + health, ""},
		"metrics open to everyone": {"metricsBindAddress: 0.0.0.0", localhost + " " + all + " " + health, "metricsBindAddress"},
		"others": {
			"hostnameOverride: ' Node-1 '\nlogging: {format: json, verbosity: 4}\nfeatureGates: {A: true}\noomScoreAdj: -999\nconfigSyncPeriod: 15m\nenableProfiling: true\nsomething: {new: 1}",
			"nodeName=node-1 " + localhost + " " + all + " " + health + " enableProfiling=true logging.format=json",
			"configSyncPeriod featureGates.A logging.verbosity oomScoreAdj something",
		},
		"external IPs switched off": {
			"featureGates: {AllowServiceExternalIPs: false, ContextualLogging: false}",
			localhost + " " + all + " allowServiceExternalIPs=false " + health, "featureGates.ContextualLogging",
		},
		"external IPs allowed": {"featureGates: {AllowServiceExternalIPs: true}", localhost + " " + all + " " + health, ""},
		"explicit zeros": {
			"oomScoreAdj: 0\nenableProfiling: false\nnew: {on: false}\niptables: {new: 0, masqueradeAll: false}",
			localhost + " " + all + " " + health, "iptables.new new oomScoreAdj",
		},
	} {
		t.Run(name, func(t *testing.T) {
			fields, lost, _ := migrated(t, proxy+c.content)
			require.Equal(t, c.fields, fields)
			for _, field := range strings.Fields(c.lost) {
				require.NotEmpty(t, lost[field], field)
				delete(lost, field)
			}
			require.Empty(t, lost)
		})
	}
}

func TestPrimaryNodePortsAreNoted(t *testing.T) {
	for _, content := range []string{"mode: nftables", "mode: ipvs\nnodePortAddresses: [primary]", "mode: nftables\nnodePortAddresses: [127.0.0.0/8, primary]"} {
		_, _, notes := migrated(t, proxy+content)
		require.Contains(t, notes["nodePortAddresses"], "in which the Node has no address", content)
	}
	for _, content := range []string{"", "mode: nftables\nnodePortAddresses: [all]"} {
		_, _, notes := migrated(t, proxy+content)
		require.NotContains(t, notes["nodePortAddresses"], "in which the Node has no address", content)
	}
	// This syntax exists since Kubernetes 1.37.
	fields, lost, _ := migrated(t, proxy+"nodePortAddresses: [primary, localhost, 10.0.0.0/8]")
	require.Contains(t, fields, "nodePortAddresses=primary,localhost,10.0.0.0/8")
	require.Empty(t, lost)
}

func TestChangedDurationsAreNoted(t *testing.T) {
	_, _, notes := migrated(t, proxy+"mode: ipvs\nipvs: {udpTimeout: 1500ms}")
	require.Contains(t, notes["ipvs.udpTimeout"], "1s")
	_, _, notes = migrated(t, proxy+"conntrack: {tcpEstablishedTimeout: 1500ms, udpStreamTimeout: 20s}\niptables: {minSyncPeriod: 2h}")
	require.Contains(t, notes["conntrack.tcpEstablishedTimeout"], "1s")
	require.NotContains(t, notes, "conntrack.udpStreamTimeout")
	require.Contains(t, notes["iptables.syncPeriod"], "2h0m0s")
}

// TestMigratedNotes asserts that a note is one line, whatever the file contains.
func TestMigratedNotes(t *testing.T) {
	_, lost, _ := migrated(t, proxy+"? \"a\\nb: c\"\n: 1")
	require.Len(t, lost, 1)
}

func TestMigrateErrors(t *testing.T) {
	for content, says := range map[string]string{
		"apiVersion: slicecast.io/v1beta1\nkind: AgentConfiguration\n": "apiVersion: kubeproxy.config.k8s.io/v1alpha1",
		proxy + "mode: kernelspace":                                    "kernelspace",
		proxy + "mode: 3":                                              "mode",
		proxy + "---\nmode: nftables":                                  "more than one YAML document",
		proxy + "nodePortAddresses: yes":                               "nodePortAddresses",
	} {
		_, err := Migrate([]byte(content))
		require.ErrorContains(t, err, says)
	}
}

func FuzzMigrate(f *testing.F) {
	content, err := os.ReadFile("testdata/kubeadm.yaml")
	require.NoError(f, err)
	f.Add(content)
	f.Fuzz(func(t *testing.T, content []byte) {
		m, err := Migrate(content)
		if err != nil {
			return
		}
		b, err := m.YAML()
		require.NoError(t, err)
		_, err = Parse(b)
		require.NoError(t, err, "%s", b)
	})
}
