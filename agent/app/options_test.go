// These tests prove which combinations of flags an agent accepts, and that the error for any other
// names the flag.
package app

import (
	"log/slog"
	"net/netip"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/config"
)

func parse(t *testing.T, args ...string) Options {
	t.Helper()
	o, err := parseWithConfig(t, args...)
	require.NoError(t, err)
	return o
}

// parseWithConfig parses flags, and the configuration file that they name.
func parseWithConfig(t *testing.T, args ...string) (Options, error) {
	t.Helper()
	t.Setenv("NODE_NAME", "node-1")
	var o Options
	fs := pflag.NewFlagSet(t.Name(), pflag.ContinueOnError)
	o.AddFlags(fs)
	require.NoError(t, fs.Parse(args))
	if err := o.file.Read(config.Kind, &config.Agent{}, fs); err != nil {
		return o, err
	}
	require.NoError(t, o.complete())
	return o, nil
}

func TestValidOptions(t *testing.T) {
	for name, args := range map[string][]string{
		"token":           {"--servers=a:1,b:1", "--ca-file=ca", "--token-file=t"},
		"certificate":     {"--servers=a:1", "--ca-file=ca", "--client-cert-file=c", "--client-key-file=k"},
		"found by API":    {"--server-service=ns/server", "--ca-file=ca", "--token-file=t"},
		"CA by API":       {"--server-service=ns/server", "--ca-file=ca", "--ca-config-map=ns/ca", "--token-file=t"},
		"plaintext":       {"--servers=a:1", "--insecure-plaintext"},
		"checkpoint":      {"--servers=a:1", "--insecure-plaintext", "--checkpoint=c"},
		"standalone API":  {"--source=kube", "--cluster-cidr=10.0.0.0/8,fd00::/48"},
		"standalone file": {"--source=file", "--manifests=examples", "--programmer=printer"},
		"IPVS":            {"--source=kube", "--programmer=ipvs", "--programmer-fallback=false", "--ipvs-scheduler=mh", "--ipvs-tcp-timeout=15m"},
		"no periods":      {"--source=kube", "--iptables-sync-period=0", "--iptables-min-sync-period=2s"},
		"bridge":          {"--source=kube", "--detect-local-mode=BridgeInterface", "--pod-bridge-interface=cni0"},
		"health":          {"--source=kube", "--healthz-bind-address=127.0.0.1:1,:2,[::1]:3"},
		"metrics": {"--source=kube", "--secure-metrics-bind-address=:1", "--metrics-cert-file=c", "--metrics-key-file=k",
			"--metrics-client-ca-file=ca"},
		"metrics by token": {"--source=kube", "--secure-metrics-bind-address=:1", "--metrics-token-audience=a", "--metrics-service-accounts=a/b,c/d"},
		"pages":            {"--source=kube", "--metrics-bind-address=127.0.0.1:1,[::1]:2", "--pages=metrics,proxyMode", "--profiling"},
	} {
		t.Run(name, func(t *testing.T) {
			o := parse(t, args...)
			require.NoError(t, o.validate())
			require.Equal(t, "node-1", o.NodeName)
		})
	}
}

func TestNodePortKeywords(t *testing.T) {
	for value, want := range map[string]struct {
		primary bool
		cidrs   []string
	}{
		"primary": {true, nil}, "all": {false, []string{"0.0.0.0/0", "::/0"}}, "localhost,primary": {true, []string{"127.0.0.0/8", "::1/128"}},
		"primary,10.0.0.0/8": {true, []string{"10.0.0.0/8"}}, "10.0.0.0/8": {false, []string{"10.0.0.0/8"}},
	} {
		o := parse(t, "--source=kube", "--nodeport-addresses="+value)
		require.NoError(t, o.validate())
		v, err := o.Node.view("node-1")
		require.NoError(t, err)
		require.Equal(t, want.primary, v.NodePortPrimary, value)
		var cidrs []string
		for _, p := range v.NodePortAddresses {
			cidrs = append(cidrs, p.String())
		}
		require.Equal(t, want.cidrs, cidrs, value)
	}
}

// TestNodePortAddressesOfOneFamily checks that a list for one IP family has a warning on machines
// of both.
func TestNodePortAddressesOfOneFamily(t *testing.T) {
	addresses := func(texts ...string) (out []netip.Addr) {
		for _, text := range texts {
			out = append(out, netip.MustParseAddr(text))
		}
		return out
	}
	both := addresses("127.0.0.1", "::1", "192.0.2.1", "2001:db8::1")
	one := addresses("127.0.0.1", "::1", "192.0.2.1", "fe80::1")
	for _, c := range []struct {
		value     string
		addresses []netip.Addr
		says      string
	}{
		{"192.0.2.0/24", both, "family=IPv6"}, {"2001:db8::/32", both, "family=IPv4"}, {"2001:db8::/32", one, "family=IPv4"},
		{"192.0.2.0/24", one, ""}, {"192.0.2.0/24,::/0", both, ""}, {"192.0.2.0/24,primary", both, ""}, {"all", both, ""}, {"", both, ""},
	} {
		var log strings.Builder
		o := parse(t, "--source=kube", "--nodeport-addresses="+c.value)
		o.Node.warn(slog.New(slog.NewTextHandler(&log, nil)), c.addresses)
		if c.says == "" {
			require.Empty(t, log.String(), c.value)
			continue
		}
		require.Equal(t, 1, strings.Count(log.String(), "\n"), log.String())
		require.Contains(t, log.String(), c.says)
	}
}

// TestCIDRsAreParsedAsInKubeProxy covers spellings that a migrated configuration may contain.
func TestCIDRsAreParsedAsInKubeProxy(t *testing.T) {
	o := parse(t, "--source=kube", "--cluster-cidr=::ffff:10.0.0.0/104,fd00::1/48", "--nodeport-addresses=192.168.000.07/24")
	v, err := o.Node.view("node-1")
	require.NoError(t, err)
	require.Equal(t, []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00::/48")}, v.ClusterCIDRs)
	require.Equal(t, []netip.Prefix{netip.MustParsePrefix("192.168.0.0/24")}, v.NodePortAddresses)
}

func TestInvalidOptions(t *testing.T) {
	for name, c := range map[string]struct {
		args []string
		says string
	}{
		"nothing":             {nil, "set --servers or --server-service, or set --source"},
		"both ways":           {[]string{"--servers=a:1", "--server-service=a/b"}, "remove one of them"},
		"source with servers": {[]string{"--servers=a:1", "--source=kube", "--insecure-plaintext"}, "without servers"},
		"server":              {[]string{"--servers=a:1,b", "--insecure-plaintext"}, `--servers contains "b"`},
		"service":             {[]string{"--server-service=name", "--insecure-plaintext"}, "namespace/name"},
		"half a service":      {[]string{"--server-service=/name", "--insecure-plaintext"}, "namespace/name"},
		"ConfigMap":           {[]string{"--server-service=a/b", "--ca-file=c", "--token-file=t", "--ca-config-map=c"}, `--ca-config-map is "c"`},
		"ConfigMap, no file":  {[]string{"--server-service=a/b", "--insecure-plaintext", "--ca-config-map=a/c"}, "requires --server-service and --ca-file"},
		"ConfigMap, no API":   {[]string{"--servers=a:1", "--ca-file=c", "--token-file=t", "--ca-config-map=a/c"}, "requires --server-service and --ca-file"},
		"source":              {[]string{"--source=etcd"}, `--source is "etcd"`},
		"file without folder": {[]string{"--source=file"}, "--manifests"},
		"folder without file": {[]string{"--source=kube", "--manifests=x"}, "--source=file"},
		"no CA":               {[]string{"--servers=a:1", "--token-file=t"}, "--ca-file is not set"},
		"no identity":         {[]string{"--servers=a:1", "--ca-file=ca"}, "set --token-file, or --client-cert-file"},
		"half a certificate":  {[]string{"--servers=a:1", "--ca-file=ca", "--client-cert-file=c"}, "must be set together"},
		"plaintext and TLS":   {[]string{"--servers=a:1", "--ca-file=ca", "--insecure-plaintext"}, "excludes"},
		"TLS standalone":      {[]string{"--source=kube", "--ca-file=ca"}, "require --servers or --server-service"},
		"checkpoint alone":    {[]string{"--source=kube", "--checkpoint=c"}, "--checkpoint requires --servers or --server-service"},
		"kubeconfig":          {[]string{"--source=file", "--manifests=x", "--kubeconfig=k"}, "--kubeconfig requires"},
		"programmer":          {[]string{"--source=kube", "--programmer=magic"}, "use auto, nftables, iptables, ipvs, shadow or printer"},
		"scheduler":           {[]string{"--source=kube", "--ipvs-scheduler=best"}, "use one of rr, wrr,"},
		"IPVS timeout":        {[]string{"--source=kube", "--ipvs-udp-timeout=1500ms"}, "--ipvs-udp-timeout is 1.5s"},
		"no time to drain":    {[]string{"--source=kube", "--ipvs-drain-limit=0"}, "--ipvs-drain-limit is 0s"},
		"variant":             {[]string{"--source=kube", "--iptables-variant=old"}, "auto, nft or legacy"},
		"mark":                {[]string{"--source=kube", "--iptables-masquerade-bit=32"}, "0 to 31"},
		"CIDR":                {[]string{"--source=kube", "--cluster-cidr=10.0.0.0"}, "--cluster-cidr"},
		"health":              {[]string{"--source=kube", "--healthz-bind-address=127.0.0.1"}, "host:port"},
		"detection":           {[]string{"--source=kube", "--detect-local-mode=Guess"}, `--detect-local-mode is "Guess"`},
		"bridge missing":      {[]string{"--source=kube", "--detect-local-mode=BridgeInterface"}, "requires --pod-bridge-interface"},
		"bridge unused":       {[]string{"--source=kube", "--pod-bridge-interface=br0"}, "--pod-bridge-interface requires --detect-local-mode=BridgeInterface"},
		"prefix missing":      {[]string{"--source=kube", "--detect-local-mode=InterfaceNamePrefix"}, "requires --pod-interface-name-prefix"},
		"prefix too long":     {[]string{"--source=kube", "--detect-local-mode=InterfaceNamePrefix", "--pod-interface-name-prefix=0123456789abcdef"}, "15 characters"},
		"CIDR unused":         {[]string{"--source=kube", "--detect-local-mode=NodeCIDR", "--cluster-cidr=10.0.0.0/8"}, "--cluster-cidr requires"},
		"mapped too wide":     {[]string{"--source=kube", "--cluster-cidr=::ffff:10.0.0.0/8"}, `"::ffff:10.0.0.0/8" is not a CIDR`},
		"NodePorts":           {[]string{"--source=kube", "--nodeport-addresses=192.168.0.2"}, "--nodeport-addresses"},
		"no keyword":          {[]string{"--source=kube", "--nodeport-addresses=primary,secondary"}, `--nodeport-addresses: "secondary" is not a CIDR`},
		"negative period":     {[]string{"--source=kube", "--iptables-sync-period=-1s"}, "is negative"},
		"periods":             {[]string{"--source=kube", "--iptables-sync-period=1s", "--iptables-min-sync-period=2s"}, "longer than --iptables-sync-period"},
		"negative table":      {[]string{"--source=kube", "--conntrack-min=-1"}, "is negative"},
		"half seconds":        {[]string{"--source=kube", "--conntrack-udp-timeout=1500ms"}, "--conntrack-udp-timeout is 1.5s"},
		"pages for everyone":  {[]string{"--source=kube", "--metrics-bind-address=0.0.0.0:10249"}, "or --secure-metrics-bind-address"},
		"no such page":        {[]string{"--source=kube", "--pages=metrics,secrets"}, `--pages contains "secrets"`},
		"metrics for nobody":  {[]string{"--source=kube", "--secure-metrics-bind-address=:1"}, "requires --metrics-client-ca-file or"},
		"metrics, no key":     {[]string{"--source=kube", "--metrics-cert-file=a"}, "must be set together"},
		"metrics, no port":    {[]string{"--source=kube", "--metrics-token-audience=a", "--metrics-service-accounts=a/b"}, "require --secure-metrics-bind-address"},
		"metrics, no account": {[]string{"--source=kube", "--secure-metrics-bind-address=:1", "--metrics-token-audience=a"}, "must be set together"},
		"metrics, an account": {[]string{"--source=kube", "--metrics-service-accounts=prometheus"}, "use namespace/name"},
		"metrics, no name":    {[]string{"--source=kube", "--secure-metrics-bind-address=:1", "--metrics-client-ca-file=a"}, "requires --metrics-cert-file"},
	} {
		t.Run(name, func(t *testing.T) {
			o := parse(t, c.args...)
			require.ErrorContains(t, o.validate(), c.says)
		})
	}
}

// TestShadowOpensNoPortOfKubeProxy proves that a shadow leaves kube-proxy's ports to kube-proxy.
func TestShadowOpensNoPortOfKubeProxy(t *testing.T) {
	for programmer, healthz := range map[string][]string{"shadow": {"127.0.0.1:8475"}, "auto": {"127.0.0.1:8475", ":10256"}} {
		o := parse(t, "--source=kube", "--programmer="+programmer, "--healthz-bind-address=127.0.0.1:8475,:10256")
		require.NoError(t, o.complete())
		require.NoError(t, o.validate())
		require.Equal(t, healthz, o.HealthzAddresses)
		require.Equal(t, programmer == "shadow", len(o.MetricsAddresses) == 0)
		require.Equal(t, programmer == "shadow", o.programsNothing())
	}
}
