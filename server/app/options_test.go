package app

import (
	"log/slog"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"
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

		{"no TLS", nil, "add --tls-cert-file and --tls-private-key-file"},
		{"no key", [][]string{{"--tls-cert-file=c"}}, "--tls-cert-file is alone"},
		{"nobody could come in", [][]string{files}, "add --client-ca-file"},
		{"plaintext with certificate", [][]string{plain, files}, "leave out either it or --tls-cert-file, --tls-private-key-file"},
		{"plaintext with client CA", [][]string{plain, {"--client-ca-file=ca"}}, "leave out either it or --client-ca-file"},
		{"plaintext with tokens", [][]string{plain, {"--agent-service-account=a/b"}}, "leave out either it or --agent-service-account"},
		{"audience without tokens", [][]string{files, {"--client-ca-file=ca", "--token-audience=x"}}, "--token-audience is for tokens"},
		{"account without namespace", [][]string{files, {"--agent-service-account=b"}}, `--agent-service-account is "b": use NAMESPACE/NAME`},
		{"relay's account without namespace", [][]string{files, {"--relay-service-account=b"}}, `--relay-service-account is "b": use NAMESPACE/NAME`},
		{"plaintext with relays' tokens", [][]string{plain, {"--relay-service-account=a/b"}}, "leave out either it or --relay-service-account"},
		{"account with too much", [][]string{files, {"--agent-service-account=a/b/c"}}, "use NAMESPACE/NAME"},
		{"unknown source", [][]string{plain, {"--source=etcd"}}, `--source is "etcd": use kube, file or upstream`},
		{"relay", [][]string{plain, {"--source=upstream", "--upstream-servers=a:1", "--upstream-insecure-plaintext"}}, ""},
		{"relay with TLS", [][]string{plain, {"--source=upstream", "--upstream-servers=a:1,b:2", "--upstream-ca-file=c", "--upstream-token-file=t"}}, ""},
		{"relay of nobody", [][]string{plain, {"--source=upstream", "--upstream-insecure-plaintext"}}, "add --upstream-servers"},
		{"relay of half an address", [][]string{plain, {"--source=upstream", "--upstream-servers=a", "--upstream-insecure-plaintext"}}, "--upstream-servers"},
		{"relay without CA", [][]string{plain, {"--source=upstream", "--upstream-servers=a:1", "--upstream-token-file=t"}}, "--upstream-ca-file is missing"},
		{"relay without a name", [][]string{plain, {"--source=upstream", "--upstream-servers=a:1", "--upstream-ca-file=c"}}, "must know who this is"},
		{"relay with half a certificate", [][]string{plain, {"--source=upstream", "--upstream-servers=a:1", "--upstream-ca-file=c", "--upstream-client-cert-file=x"}}, "go together"},
		{"relay in plaintext with TLS", [][]string{plain, {"--source=upstream", "--upstream-servers=a:1", "--upstream-ca-file=c", "--upstream-insecure-plaintext"}}, "leave out either"},
		{"name that is no label", [][]string{plain, {"--service-proxy-name=a,b=c"}}, `--service-proxy-name is "a,b=c", which no label has`},
		{"relay that selects", [][]string{plain, {"--source=upstream", "--upstream-servers=a:1", "--upstream-insecure-plaintext", "--service-proxy-name=x"}}, "--service-proxy-name"},
		{"no relay with upstream flags", [][]string{plain, {"--upstream-servers=a:1"}}, "add --source=upstream"},
		{"replicas", [][]string{plain, {"--advertise-servers=a:1,b:2"}}, ""},
		{"replicas' Service", [][]string{plain, {"--server-service=a/b"}}, ""},
		{"replicas twice", [][]string{plain, {"--advertise-servers=a:1", "--server-service=a/b"}}, "use one of them"},
		{"half an address of a replica", [][]string{plain, {"--advertise-servers=a"}}, "--advertise-servers"},
		{"half a Service", [][]string{plain, {"--server-service=b"}}, `--server-service is "b"`},
		{"no wait", [][]string{plain, {"--max-behind-wait=0"}}, "--max-behind-wait is 0s"},
		{"nothing cold", [][]string{plain, {"--max-cold-sync-bytes=0"}}, "--max-cold-sync-bytes is 0"},
		{"file source without directory", [][]string{plain, {"--source=file"}}, "add --manifests=DIRECTORY"},
		{"directory without file source", [][]string{plain, {"--manifests=d"}}, "add --source=file"},
		{"file source with idle kubeconfig", [][]string{plain, {"--source=file", "--manifests=d", "--kubeconfig=k"}}, "--kubeconfig is for"},
		{"file source with tokens, no API server", [][]string{files,
			{"--source=file", "--manifests=d", "--agent-service-account=a/b"}}, "add --kubeconfig"},
		{"relay with idle kubeconfig", [][]string{plain,
			{"--source=upstream", "--upstream-servers=a:1", "--upstream-insecure-plaintext", "--kubeconfig=k"}}, "--kubeconfig is for"},
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

func TestAllThatIsWrongIsSaid(t *testing.T) {
	err := parse(t, "--source=etcd", "--shards=0").validate()
	for _, want := range []string{"--source", "--shards", "--tls-cert-file"} {
		require.ErrorContains(t, err, want)
	}
}

func TestWhatNeedsACluster(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	for name, args := range map[string][]string{
		"kube source": {"--insecure-plaintext"},
		"relay with agents' tokens": {"--source=upstream", "--upstream-servers=a:1", "--upstream-insecure-plaintext",
			"--tls-cert-file=c", "--tls-private-key-file=k", "--agent-service-account=a/b"},
		"relay with relays' tokens": {"--source=upstream", "--upstream-servers=a:1", "--upstream-insecure-plaintext",
			"--tls-cert-file=c", "--tls-private-key-file=k", "--relay-service-account=a/b"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := parse(t, args...).Config(slog.Default())
			require.ErrorContains(t, err, "--kubeconfig")
		})
	}
}

// TestPageHasAllFlags checks that docs/configuration.md has all flags with their defaults.
func TestPageHasAllFlags(t *testing.T) {
	page, err := os.ReadFile("../../docs/configuration.md")
	require.NoError(t, err)
	_, section, found := strings.Cut(string(page), "\n## The server\n")
	require.True(t, found)
	rows := strings.Split(section, "\n")
	fs := pflag.NewFlagSet(t.Name(), pflag.ContinueOnError)
	new(Options).AddFlags(fs)
	fs.VisitAll(func(f *pflag.Flag) {
		row := slices.IndexFunc(rows, func(row string) bool {
			flags, _, _ := strings.Cut(strings.TrimPrefix(row, "|"), "|")
			return strings.Contains(flags, "`--"+f.Name+"`")
		})
		require.GreaterOrEqual(t, row, 0, f.Name)
		switch f.DefValue {
		case "", "[]":
		default:
			cells := strings.Split(rows[row], "|")
			require.Contains(t, strings.Split(strings.TrimSpace(cells[2]), ", "), f.DefValue, f.Name)
		}
	})
}
