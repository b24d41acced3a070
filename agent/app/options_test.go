package app

import (
	"testing"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"
)

func parse(t *testing.T, args ...string) Options {
	t.Helper()
	t.Setenv("NODE_NAME", "node-1")
	var o Options
	fs := pflag.NewFlagSet(t.Name(), pflag.ContinueOnError)
	o.AddFlags(fs)
	require.NoError(t, fs.Parse(args))
	require.NoError(t, o.complete())
	return o
}

func TestValidOptions(t *testing.T) {
	for name, args := range map[string][]string{
		"token":           {"--servers=a:1,b:1", "--ca-file=ca", "--token-file=t"},
		"certificate":     {"--servers=a:1", "--ca-file=ca", "--client-cert-file=c", "--client-key-file=k"},
		"found by API":    {"--server-service=ns/server", "--ca-file=ca", "--token-file=t"},
		"plaintext":       {"--servers=a:1", "--insecure-plaintext"},
		"checkpoint":      {"--servers=a:1", "--insecure-plaintext", "--checkpoint=c"},
		"standalone API":  {"--source=kube", "--cluster-cidr=10.0.0.0/8,fd00::/48"},
		"standalone file": {"--source=file", "--manifests=examples", "--programmer=printer"},
		"metrics": {"--source=kube", "--metrics-bind-address=:1", "--metrics-cert-file=c", "--metrics-key-file=k",
			"--metrics-client-ca-file=ca"},
	} {
		t.Run(name, func(t *testing.T) {
			o := parse(t, args...)
			require.NoError(t, o.validate())
			require.Equal(t, "node-1", o.NodeName)
		})
	}
}

func TestInvalidOptions(t *testing.T) {
	for name, c := range map[string]struct {
		args []string
		says string
	}{
		"nothing":             {nil, "--servers or --server-service, or --source"},
		"both ways":           {[]string{"--servers=a:1", "--server-service=a/b"}, "use one of them"},
		"source with servers": {[]string{"--servers=a:1", "--source=kube", "--insecure-plaintext"}, "without servers"},
		"server":              {[]string{"--servers=a:1,b", "--insecure-plaintext"}, `--servers has "b"`},
		"service":             {[]string{"--server-service=name", "--insecure-plaintext"}, "namespace/name"},
		"half a service":      {[]string{"--server-service=/name", "--insecure-plaintext"}, "namespace/name"},
		"source":              {[]string{"--source=etcd"}, `--source is "etcd"`},
		"file without folder": {[]string{"--source=file"}, "--manifests"},
		"folder without file": {[]string{"--source=kube", "--manifests=x"}, "--source=file"},
		"no CA":               {[]string{"--servers=a:1", "--token-file=t"}, "--ca-file is missing"},
		"no identity":         {[]string{"--servers=a:1", "--ca-file=ca"}, "--token-file, or --client-cert-file"},
		"half a certificate":  {[]string{"--servers=a:1", "--ca-file=ca", "--client-cert-file=c"}, "go together"},
		"plaintext and TLS":   {[]string{"--servers=a:1", "--ca-file=ca", "--insecure-plaintext"}, "excludes"},
		"TLS standalone":      {[]string{"--source=kube", "--ca-file=ca"}, "about servers"},
		"checkpoint alone":    {[]string{"--source=kube", "--checkpoint=c"}, "--checkpoint is for an agent with servers"},
		"kubeconfig":          {[]string{"--source=file", "--manifests=x", "--kubeconfig=k"}, "--kubeconfig is for"},
		"programmer":          {[]string{"--source=kube", "--programmer=magic"}, "use iptables or printer"},
		"variant":             {[]string{"--source=kube", "--iptables-variant=old"}, "auto, nft or legacy"},
		"mark":                {[]string{"--source=kube", "--iptables-masquerade-bit=32"}, "0 to 31"},
		"CIDR":                {[]string{"--source=kube", "--cluster-cidr=10.0.0.0"}, "--cluster-cidr"},
		"metrics without TLS": {[]string{"--source=kube", "--metrics-bind-address=:1"}, "go together"},
	} {
		t.Run(name, func(t *testing.T) {
			o := parse(t, c.args...)
			require.ErrorContains(t, o.validate(), c.says)
		})
	}
}
