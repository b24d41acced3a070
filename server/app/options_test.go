// These tests prove which flags are accepted, and that all that is wrong is reported at once. The
// configuration file sets the same options, and docs/configuration.md lists all flags with their
// fields and defaults. A server without a certificate starts and says why it is not ready.
package app

import (
	"crypto/tls"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/slicecast/slicecast/internal/configfile/configfiletest"
	"github.com/slicecast/slicecast/internal/tlsfiles"
)

func parse(t *testing.T, args ...string) *Options {
	t.Helper()
	o := &Options{}
	fs := pflag.NewFlagSet("slicecast-server", pflag.ContinueOnError)
	o.AddFlags(fs)
	require.NoError(t, fs.Parse(args))
	return o
}

func TestOptionsAreValidated(t *testing.T) {
	plain := []string{"--insecure-plaintext"}
	files := []string{"--tls-cert-file=c", "--tls-private-key-file=k"}
	tokens := []string{"--agent-service-account=a/b"}
	secret := []string{"--tls-secret=a/b", "--ca-config-map=a/c", "--ca-config-map=d/e", "--server-service=a/s"}
	for _, test := range []struct {
		name string
		args [][]string // an empty string means that the arguments are valid
		want string     // "": valid
	}{
		{"plaintext", [][]string{plain}, ""},
		{"client CA", [][]string{files, {"--client-ca-file=ca"}}, ""},
		{"tokens", [][]string{files, {"--agent-service-account=a/b", "--agent-service-account=c/d", "--token-audience=x"}}, ""},
		{"relays' tokens", [][]string{files, {"--relay-service-account=a/b", "--token-audience=x"}}, ""},
		{"file source", [][]string{plain, {"--source=file", "--manifests=d"}}, ""},
		{"file source with tokens", [][]string{files,
			{"--source=file", "--manifests=d", "--kubeconfig=k", "--agent-service-account=a/b"}}, ""},

		{"certificates of its own", [][]string{secret, tokens}, ""},
		{"certificates of its own for relays only", [][]string{secret, {"--relay-service-account=a/b"}}, ""},
		{"certificates of its own without the API server as source", [][]string{secret, tokens,
			{"--source=upstream", "--upstream-servers=a:1", "--upstream-insecure-plaintext", "--kubeconfig=k"}}, ""},

		{"no TLS", nil, "set --tls-secret, or --tls-cert-file and --tls-private-key-file"},
		{"two certificates", [][]string{secret, tokens, files}, "--tls-secret excludes --tls-cert-file"},
		{"a certificate and half of one", [][]string{secret, tokens, {"--tls-private-key-file=k"}}, "--tls-secret excludes"},
		{"client CA of its own and a file", [][]string{secret, tokens, {"--client-ca-file=ca"}}, "and --client-ca-file: remove it"},
		{"plaintext with a Secret", [][]string{plain, secret}, "remove it, or remove --tls-secret"},
		{"nobody could come in by a Secret", [][]string{secret}, "no agent can authenticate: set --agent-service-account"},
		{"Secret without a name", [][]string{tokens, {"--tls-secret=b", "--server-service=a/s"}}, `--tls-secret is "b": use namespace/name`},
		{"ConfigMap without a name", [][]string{secret, tokens, {"--ca-config-map=x"}}, `--ca-config-map is "x": use namespace/name`},
		{"Secret without a Service", [][]string{tokens, {"--tls-secret=a/b", "--ca-config-map=a/c"}}, "--tls-secret requires --server-service"},
		{"Secret without a ConfigMap", [][]string{tokens, {"--tls-secret=a/b", "--server-service=a/s"}}, "--tls-secret requires --ca-config-map"},
		{"ConfigMap without a Secret", [][]string{files, tokens, {"--ca-config-map=a/c"}}, "--ca-config-map requires --tls-secret"},
		{"no key", [][]string{{"--tls-cert-file=c"}}, "--tls-cert-file and --tls-private-key-file must be set together"},
		{"nobody could come in", [][]string{files}, "set --client-ca-file"},
		{"plaintext with certificate", [][]string{plain, files}, "remove it, or remove --tls-cert-file, --tls-private-key-file"},
		{"plaintext with client CA", [][]string{plain, {"--client-ca-file=ca"}}, "remove it, or remove --client-ca-file"},
		{"plaintext with tokens", [][]string{plain, {"--agent-service-account=a/b"}}, "remove it, or remove --agent-service-account"},
		{"audience without tokens", [][]string{files, {"--client-ca-file=ca", "--token-audience=x"}}, "--token-audience requires --agent-service-account"},
		{"account without namespace", [][]string{files, {"--agent-service-account=b"}}, `--agent-service-account is "b": use namespace/name`},
		{"relay's account without namespace", [][]string{files, {"--relay-service-account=b"}}, `--relay-service-account is "b": use namespace/name`},
		{"plaintext with relays' tokens", [][]string{plain, {"--relay-service-account=a/b"}}, "remove it, or remove --relay-service-account"},
		{"account with too much", [][]string{files, {"--agent-service-account=a/b/c"}}, "use namespace/name"},
		{"unknown source", [][]string{plain, {"--source=etcd"}}, `--source is "etcd": use kube, file or upstream`},
		{"relay", [][]string{plain, {"--source=upstream", "--upstream-servers=a:1", "--upstream-insecure-plaintext"}}, ""},
		{"relay with TLS", [][]string{plain, {"--source=upstream", "--upstream-servers=a:1,b:2", "--upstream-ca-file=c", "--upstream-token-file=t"}}, ""},
		{"relay of nobody", [][]string{plain, {"--source=upstream", "--upstream-insecure-plaintext"}}, "requires --upstream-servers"},
		{"relay of half an address", [][]string{plain, {"--source=upstream", "--upstream-servers=a", "--upstream-insecure-plaintext"}}, "--upstream-servers"},
		{"relay without CA", [][]string{plain, {"--source=upstream", "--upstream-servers=a:1", "--upstream-token-file=t"}}, "--upstream-ca-file is not set"},
		{"relay without a name", [][]string{plain, {"--source=upstream", "--upstream-servers=a:1", "--upstream-ca-file=c"}}, "no credentials for the servers"},
		{"relay with half a certificate", [][]string{plain, {"--source=upstream", "--upstream-servers=a:1", "--upstream-ca-file=c", "--upstream-client-cert-file=x"}}, "must be set together"},
		{"relay in plaintext with TLS", [][]string{plain, {"--source=upstream", "--upstream-servers=a:1", "--upstream-ca-file=c", "--upstream-insecure-plaintext"}}, "excludes"},
		{"name that is no label", [][]string{plain, {"--service-proxy-name=a,b=c"}}, `--service-proxy-name: "a,b=c" is not a valid label value`},
		{"relay that selects", [][]string{plain, {"--source=upstream", "--upstream-servers=a:1", "--upstream-insecure-plaintext", "--service-proxy-name=x"}}, "--service-proxy-name"},
		{"no relay with upstream flags", [][]string{plain, {"--upstream-servers=a:1"}}, "require --source=upstream"},
		{"replicas", [][]string{plain, {"--advertise-servers=a:1,b:2"}}, ""},
		{"replicas' Service", [][]string{plain, {"--server-service=a/b"}}, ""},
		{"replicas twice", [][]string{plain, {"--advertise-servers=a:1", "--server-service=a/b"}}, "remove one of them"},
		{"half an address of a replica", [][]string{plain, {"--advertise-servers=a"}}, "--advertise-servers"},
		{"half a Service", [][]string{plain, {"--server-service=b"}}, `--server-service is "b"`},
		{"no wait", [][]string{plain, {"--max-behind-wait=0"}}, "--max-behind-wait is 0s"},
		{"nothing cold", [][]string{plain, {"--max-cold-sync-bytes=0"}}, "--max-cold-sync-bytes is 0"},
		{"file source without directory", [][]string{plain, {"--source=file"}}, "--source=file requires --manifests"},
		{"directory without file source", [][]string{plain, {"--manifests=d"}}, "--manifests requires --source=file"},
		{"file source with idle kubeconfig", [][]string{plain, {"--source=file", "--manifests=d", "--kubeconfig=k"}}, "--kubeconfig requires"},
		{"file source with tokens, no API server", [][]string{files,
			{"--source=file", "--manifests=d", "--agent-service-account=a/b"}}, "set --kubeconfig"},
		{"relay with idle kubeconfig", [][]string{plain,
			{"--source=upstream", "--upstream-servers=a:1", "--upstream-insecure-plaintext", "--kubeconfig=k"}}, "--kubeconfig requires"},
		{"relay with tokens", [][]string{files,
			{"--source=upstream", "--upstream-servers=a:1", "--upstream-insecure-plaintext", "--agent-service-account=a/b"}}, ""},
		{"no shards", [][]string{plain, {"--shards=0"}}, "--shards is 0"},
		{"no tombstones", [][]string{plain, {"--tombstones=0"}}, "--tombstones is 0"},
		{"no heartbeat", [][]string{plain, {"--heartbeat-interval=0"}}, "--heartbeat-interval is 0s"},
		{"rare heartbeats", [][]string{plain, {"--heartbeat-interval=10m"}}, "use at most 5m"},
		{"no drain window", [][]string{plain, {"--drain-window=0"}}, "--drain-window is 0s"},
		{"grace shorter than drain", [][]string{plain, {"--drain-window=1m"}}, "--shutdown-grace-period is 10s, less than --drain-window"},
	} {
		t.Run(test.name, func(t *testing.T) {
			var args []string
			for _, a := range test.args {
				args = append(args, a...)
			}
			err := parse(t, args...).validate()
			if test.want == "" {
				require.NoError(t, err)
				return
			}
			require.ErrorContains(t, err, test.want)
		})
	}
}

func TestValidateReportsEveryError(t *testing.T) {
	err := parse(t, "--source=etcd", "--shards=0").validate()
	for _, want := range []string{"--source", "--shards", "--tls-cert-file"} {
		require.ErrorContains(t, err, want)
	}
}

func TestKubeconfigIsRequired(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	for name, args := range map[string][]string{
		"kube source": {"--insecure-plaintext"},
		"file source with certificates of its own": {"--source=file", "--manifests=.", "--tls-secret=a/b", "--ca-config-map=a/c",
			"--server-service=a/s", "--relay-service-account=a/b"},
		"relay with agents' tokens": {"--source=upstream", "--upstream-servers=a:1", "--upstream-insecure-plaintext",
			"--tls-cert-file=c", "--tls-private-key-file=k", "--agent-service-account=a/b"},
		"relay with relays' tokens": {"--source=upstream", "--upstream-servers=a:1", "--upstream-insecure-plaintext",
			"--tls-cert-file=c", "--tls-private-key-file=k", "--relay-service-account=a/b"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := parse(t, args...).Complete(slog.Default())
			require.ErrorContains(t, err, "--kubeconfig")
		})
	}
}

// TestCertificates checks what the flags for certificates of the servers' own mean.
func TestCertificates(t *testing.T) {
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	require.NoError(t, clientcmd.WriteToFile(clientcmdapi.Config{
		Clusters: map[string]*clientcmdapi.Cluster{"c": {Server: "https://127.0.0.1:1"}},
		Contexts: map[string]*clientcmdapi.Context{"c": {Cluster: "c"}}, CurrentContext: "c",
	}, kubeconfig))
	c, err := parse(t, "--kubeconfig="+kubeconfig, "--tls-secret=a/b", "--ca-config-map=a/c", "--ca-config-map=d/e",
		"--server-service=f/g", "--agent-service-account=h/i").Complete(slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	require.Nil(t, c.TLS)
	require.Equal(t, types.NamespacedName{Namespace: "a", Name: "b"}, c.Certificates.Secret)
	require.Equal(t, []types.NamespacedName{{Namespace: "a", Name: "c"}, {Namespace: "d", Name: "e"}}, c.Certificates.ConfigMaps)
	require.Equal(t, []string{"g.f.svc"}, c.Certificates.Names)
	require.WithinDuration(t, time.Now(), c.Certificates.Now(), time.Minute)
	require.WithinDuration(t, time.Now(), c.Now(), time.Minute) // nil without certificates of its own

	c.Source, c.BindAddress, c.HealthzBindAddress, c.DrainWindow = nil, "127.0.0.1:0", "127.0.0.1:0", time.Millisecond
	r := start(t, c)
	close(r.source.synced)
	require.Eventually(t, func() bool {
		return strings.HasPrefix(r.readyz(), `503 no certificate yet: read Secret a/b: Get "https://127.0.0.1:1/`)
	}, deadline, time.Millisecond)
	_, err = (&tls.Dialer{Config: &tls.Config{InsecureSkipVerify: true}}).DialContext(t.Context(), "tcp", r.Addresses().GRPC.String())
	require.Error(t, err, "there is nothing to serve with")
}

// TestFlagsFieldsAndDocumentation checks that each flag, except for those about the file and --v,
// has a field in the configuration file, and that docs/configuration.md has both in one row, with
// the default.
func TestFlagsFieldsAndDocumentation(t *testing.T) {
	const path = "../../docs/configuration.md"
	page, err := os.ReadFile(path)
	require.NoError(t, err)
	_, section, found := strings.Cut(string(page), "\n## The server\n")
	require.True(t, found)
	rows := strings.Split(section, "\n")
	fs := pflag.NewFlagSet(t.Name(), pflag.ContinueOnError)
	new(Options).AddFlags(fs)
	fields := configfiletest.EveryFlagHasAField[serverConfiguration](t, fs, path, "config", "v")
	fs.VisitAll(func(f *pflag.Flag) {
		row := slices.IndexFunc(rows, func(row string) bool {
			cells := strings.Split(row, "|")
			return len(cells) > 4 && strings.Contains(cells[1], "`--"+f.Name+"`")
		})
		require.GreaterOrEqual(t, row, 0, f.Name)
		cells := strings.Split(rows[row], "|")
		if field := fields[f.Name]; field != "" {
			require.Contains(t, cells[2], "`"+field+"`", f.Name)
		}
		switch f.DefValue {
		case "", "[]":
		default:
			require.Contains(t, strings.Split(strings.TrimSpace(cells[3]), ", "), f.DefValue, f.Name)
		}
	})
}

// TestExampleForSystemd reads the example with which deploy/README.md starts.
func TestExampleForSystemd(t *testing.T) {
	o := &Options{}
	fs := pflag.NewFlagSet(t.Name(), pflag.ContinueOnError)
	o.AddFlags(fs)
	require.NoError(t, fs.Parse([]string{"--config=../../deploy/systemd/server.yaml"}))
	require.NoError(t, o.file.Read(fileKind, &serverConfiguration{}, fs))
	require.NoError(t, o.validate())
	require.Equal(t, []string{"relay-1.example.com:8472", "relay-2.example.com:8472"}, o.advertiseServers)
}

// TestConfigFile sets options by a file, overrides one of them, and looks at how errors name them.
func TestConfigFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "server.yaml")
	read := func(content string, args ...string) (*Options, error) {
		require.NoError(t, os.WriteFile(path, []byte("apiVersion: slicecast.io/v1beta1\nkind: ServerConfiguration\n"+content), 0o600))
		o := &Options{}
		fs := pflag.NewFlagSet(t.Name(), pflag.ContinueOnError)
		o.AddFlags(fs)
		require.NoError(t, fs.Parse(append(args, "--config="+path)))
		return o, o.file.Read(fileKind, &serverConfiguration{}, fs)
	}
	o, err := read(`
source: upstream
upstream: {servers: [a:1, b:2], caFile: ca, tokenFile: t}
tls: {certFile: c, privateKeyFile: k}
authentication: {clientCAFile: ca, agentServiceAccounts: [a/b, c/d]}
shards: 128
tombstones: 10
maxColdSyncBytes: 5000000000
heartbeatInterval: 20s
logging: {level: debug}
`, "--tombstones=11")
	require.NoError(t, err)
	require.NoError(t, o.validate())
	require.Equal(t, sourceUpstream, o.SourceKind)
	require.Equal(t, []string{"a:1", "b:2"}, o.upstream.servers)
	require.Equal(t, "t", o.upstream.TokenFile)
	require.Equal(t, tlsfiles.Files{Certificate: "c", PrivateKey: "k", CA: "ca"}, o.files)
	require.Equal(t, []string{"a/b", "c/d"}, o.agentAccounts)
	require.EqualValues(t, 128, o.Shards)
	require.Equal(t, 11, o.Tombstones, "the flag wins")
	require.EqualValues(t, 5_000_000_000, o.MaxColdSyncBytes)
	require.Equal(t, 20*time.Second, o.HeartbeatInterval)
	require.Equal(t, 5*time.Second, o.DrainWindow, "the default")
	require.Equal(t, "debug", o.log.Level)

	_, err = read("shards: -1")
	require.ErrorContains(t, err, "--config="+path+": shards: ")
	_, err = read("tls: {keyFile: k}")
	require.ErrorContains(t, err, `unknown field "tls.keyFile"`)

	run := func(content string, args ...string) error {
		_, err := read(content)
		require.NoError(t, err)
		c := NewCommand()
		c.SetArgs(append(args, "--config="+path))
		return c.ExecuteContext(t.Context())
	}
	require.EqualError(t, run("source: file\ntls: {insecurePlaintext: true}"),
		"--config="+path+": source=file requires --manifests: set it to a directory")
	require.ErrorContains(t, run("shards: 3\ntls: {insecurePlaintext: true}", "--source=file", "--manifests="+t.TempDir()), "3")
	require.ErrorContains(t, run("logging: {level: loud}", "--insecure-plaintext"), `: logging.level is "loud"`)
}
