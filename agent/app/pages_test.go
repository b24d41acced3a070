// These tests prove that an agent serves kube-proxy's pages, that they show the settings in use and
// no secrets, and that they leave kube-proxy's port alone where a kube-proxy is meant to run.
package app

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/config"
	"github.com/slicecast/slicecast/agent/pages"
	"github.com/slicecast/slicecast/internal/configfile"
	"github.com/slicecast/slicecast/internal/testca"
)

// page returns the body of a page, or "" if there is no answer.
func page(t *testing.T, address, name string) string {
	t.Helper()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	r, err := client.Get("http://" + address + "/" + name)
	if err != nil {
		return ""
	}
	defer func() { require.NoError(t, r.Body.Close()) }()
	require.Equal(t, http.StatusOK, r.StatusCode, name)
	body, err := io.ReadAll(r.Body)
	require.NoError(t, err)
	return string(body)
}

func TestPagesOfAnAgent(t *testing.T) {
	const address = "127.0.0.1:10249" // the default
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "web.yaml"), fmt.Appendf(nil, manifest, 8080), 0o600))
	path := writeConfig(t, "clusterCIDR: 10.0.0.0/8,fd00::/48\niptables: {localhostNodePorts: false}\npages: [metrics, proxyMode, configz, flagz]")
	start(t, "--config="+path, "--source=file", "--manifests="+dir, "--programmer=printer", "--conntrack-udp-timeout=10s")
	require.Eventually(t, func() bool {
		return strings.Contains(page(t, address, "metrics"), "slicecast_agent_service_ports 1\n")
	}, 10*time.Second, 10*time.Millisecond)
	require.Equal(t, "printer", page(t, address, "proxyMode"))

	var groups map[string]*config.Agent
	require.NoError(t, json.Unmarshal([]byte(page(t, address, "configz")), &groups))
	c := groups["slicecast.io"]
	require.Equal(t, configfile.APIVersion, c.APIVersion)
	require.Equal(t, config.Kind, c.Kind)
	settings := map[string]string{}
	for _, s := range configfile.Settings(c) {
		settings[s.Field] = strings.Join(s.Values, ",")
	}
	for field, want := range map[string]string{
		"nodeName": "node-1", "source": "file", "clusterCIDR": "10.0.0.0/8,fd00::/48", "iptables.localhostNodePorts": "false",
		"conntrack.udpTimeout": "10s", "pages": "metrics,proxyMode,configz,flagz", "metricsBindAddress": address,
		"conntrack.maxPerCore": "32768", "conntrack.tcpBeLiberal": "false", "iptables.syncPeriod": "1h0m0s",
	} {
		require.Equal(t, want, settings[field], field)
	}
	for _, field := range []string{"servers", "checkpoint", "nodePortAddresses", "tls.tokenFile", "healthzBindAddress"} {
		require.NotContains(t, settings, field, "it has no value")
	}
	require.Contains(t, page(t, address, "flagz"), "\nconntrack-udp-timeout=10s\n")

	// The settings in use, as a file, make the same agent.
	body, err := json.Marshal(c)
	require.NoError(t, err)
	again := filepath.Join(t.TempDir(), "agent.yaml")
	require.NoError(t, os.WriteFile(again, body, 0o600))
	o := parse(t, "--config="+again)
	require.NoError(t, o.validate())
	require.Equal(t, configfile.Settings(c), configfile.Settings(config.FromFlags(o.flags)))
}

// TestPagesHaveNoSecrets asserts that no page has the content of a file with credentials, and that
// metrics do not tell the names of Services.
func TestPagesHaveNoSecrets(t *testing.T) {
	dir, names := t.TempDir(), strings.Join(pages.Names, ",")
	const token = "a-very-secret-token"
	tokenFile := filepath.Join(dir, "token")
	require.NoError(t, os.WriteFile(tokenFile, []byte(token), 0o600))
	ca, err := testca.New()
	require.NoError(t, err)
	caFile, err := ca.WriteCA(dir)
	require.NoError(t, err)
	serving, err := ca.Server("127.0.0.1")
	require.NoError(t, err)
	cert, key, err := testca.Write(dir, "metrics", serving)
	require.NoError(t, err)
	pem, err := os.ReadFile(key)
	require.NoError(t, err)
	secret := strings.Split(string(pem), "\n")[1]
	require.Greater(t, len(secret), 20)

	address := freeAddress(t)
	start(t, "--servers="+freeAddress(t), "--ca-file="+caFile, "--token-file="+tokenFile, "--programmer=printer", "--profiling",
		"--metrics-bind-address="+address, "--secure-metrics-bind-address="+freeAddress(t), "--metrics-cert-file="+cert,
		"--metrics-key-file="+key, "--metrics-client-ca-file="+caFile, "--pages="+names)
	require.Eventually(t, func() bool { return page(t, address, "healthz") != "" }, 10*time.Second, 10*time.Millisecond)
	for _, name := range append(pages.Names, "debug/pprof/", "debug/pprof/goroutine?debug=2") {
		body := page(t, address, name)
		require.NotEmpty(t, body, name)
		require.NotContains(t, body, token, name)
		require.NotContains(t, body, secret, name)
	}
	require.Contains(t, page(t, address, "flagz"), "token-file="+tokenFile, "the path is no secret")

	manifests := t.TempDir()
	named := strings.ReplaceAll(fmt.Sprintf(manifest, 8080), "web", "name-of-a-tenant")
	require.NoError(t, os.WriteFile(filepath.Join(manifests, "web.yaml"), []byte(named), 0o600))
	address = freeAddress(t)
	start(t, "--source=file", "--manifests="+manifests, "--programmer=printer", "--metrics-bind-address="+address)
	require.Eventually(t, func() bool {
		return strings.Contains(page(t, address, "metrics"), "slicecast_agent_service_ports 1\n")
	}, 10*time.Second, 10*time.Millisecond)
	for _, name := range pages.Names {
		require.NotContains(t, page(t, address, name), "name-of-a-tenant", name)
	}
}

// TestKubeProxysPortIsLeftToIt asserts that agents that are meant to run beside a kube-proxy serve
// its pages only where they are told to.
func TestKubeProxysPortIsLeftToIt(t *testing.T) {
	beside := writeConfig(t, "besideKubeProxy: true")
	explicit := writeConfig(t, "besideKubeProxy: true\nmetricsBindAddress: 127.0.0.1:10249")
	for want, lists := range map[string][][]string{
		"127.0.0.1:10249": {nil, {"--beside-kube-proxy", "--metrics-bind-address=127.0.0.1:10249"}, {"--config=" + explicit}},
		"127.0.0.1:1":     {{"--metrics-bind-address=127.0.0.1:1"}, {"--config=" + beside, "--metrics-bind-address=127.0.0.1:1"}},
		"":                {{"--beside-kube-proxy"}, {"--service-proxy-name=a"}, {"--config=" + beside}, {"--metrics-bind-address="}},
	} {
		for _, args := range lists {
			require.Equal(t, want, strings.Join(parse(t, append(args, "--source=kube")...).MetricsAddresses, ","), args)
		}
	}
}

// TestShadowsPages proves that a shadow says what it is, and that it exports no metrics of
// kube-proxy about programming, because it programs nothing.
func TestShadowsPages(t *testing.T) {
	address := freeAddress(t)
	start(t, "--source=file", "--manifests="+t.TempDir(), "--programmer=shadow", "--metrics-bind-address="+address)
	require.Eventually(t, func() bool {
		c, err := net.Dial("tcp", address)
		if err == nil {
			c.Close()
		}
		return err == nil
	}, 10*time.Second, 10*time.Millisecond)
	require.Equal(t, "shadow", page(t, address, "proxyMode"))
	metrics := page(t, address, "metrics")
	require.Contains(t, metrics, "slicecast_agent_shadow_differences")
	for _, name := range regexp.MustCompile(`(?m)^kubeproxy_\w+`).FindAllString(metrics, -1) {
		require.Regexp(t, "^kubeproxy_proxy_(healthz|livez)_total$", name, "the shadow's own pages")
	}
}
