// This test proves that servers, relays and agents are upgraded and downgraded in any order, from
// and to an earlier commit that is built for it, and that no connection fails meanwhile.
package adopt

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/slicecast/slicecast/internal/configfile"
	"github.com/slicecast/slicecast/internal/testenv/cluster"
	"github.com/slicecast/slicecast/internal/testenv/previous"
	"github.com/slicecast/slicecast/internal/testenv/repository"
)

var from = flag.String("adopt.from", "",
	"earlier commit that is upgraded from; if empty, the release before this one, or "+lastLanding+" if there is none")

// lastLanding is the last commit before images, the chart and the servers' own certificates.
const lastLanding = "1dd51ae"

// previousVariable holds the folder of the earlier commit's programs.
const previousVariable = "SLICECAST_ADOPT_PREVIOUS"

func init() {
	paths["upgrade"] = upgrade
}

// buildPrevious builds the earlier commit if a chosen path needs it.
func buildPrevious() error {
	if !slices.Contains(chosenPaths(), "upgrade") {
		return nil
	}
	root, err := repository.Root()
	if err != nil {
		return err
	}
	commit := *from
	if commit == "" {
		if commit, err = previous.Release(context.Background(), root); err != nil {
			return err
		}
		commit = cmp.Or(commit, lastLanding)
	}
	bin, err := previous.Build(context.Background(), root, commit)
	if err != nil {
		return fmt.Errorf("-adopt.from: %w", err)
	}
	return os.Setenv(previousVariable, bin)
}

// version is one of the versions that take turns.
type version struct {
	name, tag string
	tlsSecret bool // whether its servers have the flag --tls-secret
	// configuration is the apiVersion of the file that its agents read.
	configuration string
}

// part is what has one version at a time. Its manifest is that of this tree, with the images of a
// version.
type part struct {
	namespace, rollout string
	manifest           func(version) string
}

// upgrade lets two versions take turns for each part.
func upgrade(t *testing.T) {
	w := start(t, cluster.Options{Nodes: 2, Proxy: cluster.Slicecast}, 2)
	bin := os.Getenv(previousVariable)
	images := filepath.Join(t.TempDir(), "images.tar")
	earlier := version{name: "previous", tag: "previous"}
	built := cluster.SlicecastImages(bin, earlier.tag)
	require.NoError(t, cluster.WriteImages(t.Context(), images, built...))
	require.NoError(t, w.Import(t.Context(), images))
	help, err := exec.CommandContext(t.Context(), filepath.Join(bin, "slicecast-server"), "--help").CombinedOutput()
	require.NoError(t, err, string(help))
	earlier.tlsSecret = strings.Contains(string(help), "--tls-secret")
	earlier.configuration = configurationOf(t, filepath.Join(bin, "slicecast-agent"))
	current := version{name: "current", tag: cluster.OwnTag, tlsSecret: true, configuration: configfile.APIVersion}

	parts := w.parts()
	for _, name := range []string{"servers", "relays", "agents"} {
		w.turn(parts[name], current)
	}
	l := w.load()
	for _, turn := range []struct {
		to    version
		order []string
	}{
		{earlier, []string{"servers", "agents", "relays"}},
		{current, []string{"agents", "servers", "relays"}},
		{earlier, []string{"agents", "relays", "servers"}},
		{current, []string{"relays", "agents", "servers"}},
	} {
		for _, name := range turn.order {
			began := time.Now()
			w.turn(parts[name], turn.to)
			w.requireFollows("")
			l.requireSome()
			w.logf("%s have the %s version after %s", name, turn.to.name, time.Since(began).Round(time.Second))
		}
	}
	l.requireNoFailure("versions took turns")
}

// configurationOf returns the apiVersion of the file that an agent reads. Agents name it when they
// refuse a file.
func configurationOf(t *testing.T, agent string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "agent.yaml")
	require.NoError(t, os.WriteFile(file, []byte("kind: AgentConfiguration\n"), 0o600))
	out, err := exec.CommandContext(t.Context(), agent, "--config="+file).CombinedOutput()
	require.Error(t, err)
	_, hint, found := strings.Cut(string(out), "use apiVersion: ")
	require.True(t, found, string(out))
	return strings.Fields(hint)[0]
}

// turn moves a part to a version, and waits until its pods are ready.
func (w *walk) turn(p part, to version) {
	w.t.Helper()
	w.apply(p.manifest(to))
	w.rollout(p.namespace, p.rollout)
}

// document returns a document of a manifest, with replacements: pairs of an old text, which the
// document must have, and a new one.
func document(t *testing.T, manifest, kind, name string, replacements ...string) string {
	t.Helper()
	documents := strings.Split("\n"+manifest, "\n---")
	i := slices.IndexFunc(documents, func(d string) bool {
		return strings.Contains(d, "\nkind: "+kind+"\n") && strings.Contains(d, "\n  name: "+name+"\n")
	})
	require.GreaterOrEqual(t, i, 0, "%s %s", kind, name)
	found := documents[i]
	for pair := range slices.Chunk(replacements, 2) {
		require.Contains(t, found, pair[0])
		found = strings.ReplaceAll(found, pair[0], pair[1])
	}
	return found
}

// tlsFiles are replacements in the Deployment of servers, which then have the certificate of the
// Secret slicecast-server-tls as files.
var tlsFiles = []string{
	"        - --tls-secret=slicecast-system/slicecast-server-tls\n", "",
	"        - --ca-config-map=slicecast-system/slicecast-ca\n", "",
	"        - --ca-config-map=slicecast-agents/slicecast-ca\n", `        - --tls-cert-file=/run/slicecast/tls/tls.crt
        - --tls-private-key-file=/run/slicecast/tls/tls.key
        - --client-ca-file=/run/slicecast/tls/ca.crt
`,
	"volumeMounts:\n", "volumeMounts:\n        - {name: tls, mountPath: /run/slicecast/tls, readOnly: true}\n",
	"\n      volumes:\n", "\n      volumes:\n      - {name: tls, secret: {secretName: slicecast-server-tls}}\n",
}

// parts are servers, relays and agents. Agents are served by relays, and relays by servers. Relays
// name each other to agents, which would otherwise first try the servers that they had before. They
// have the servers' certificate as files, and so have the servers of a version that could not share
// a Secret yet.
func (w *walk) parts() map[string]part {
	w.t.Helper()
	const server, relay = "slicecast-server", "slicecast-relay"
	manifest := w.manifest("kubernetes")
	service, err := w.Client.CoreV1().Services(cluster.ServerNamespace).Get(w.t.Context(), server, metav1.GetOptions{})
	require.NoError(w.t, err)
	upstream := strings.Join([]string{
		"- --source=upstream", "- --upstream-servers=" + service.Spec.ClusterIP + ":8472",
		"- --upstream-server-name=slicecast-server.slicecast-system.svc",
		"- --upstream-ca-file=/run/slicecast/tls/ca.crt",
		"- --upstream-token-file=/run/slicecast/upstream/token",
	}, "\n        ")
	const token = `
      - name: upstream
        projected:
          sources: [{serviceAccountToken: {path: token, audience: slicecast, expirationSeconds: 3600}}]
`
	named := []string{
		"\n  name: " + server + "\n", "\n  name: " + relay + "\n",
		"app.kubernetes.io/name: " + server, "app.kubernetes.io/name: " + relay,
	}
	tagged := func(v version) []string { return []string{":" + cluster.OwnTag + "\n", ":" + v.tag + "\n"} }
	return map[string]part{
		"servers": {cluster.ServerNamespace, "deployment/" + server, func(v version) string {
			edits := append(tagged(v), "- --source=kube",
				"- --source=kube\n        - --relay-service-account=slicecast-system/"+server)
			if !v.tlsSecret {
				edits = append(edits, tlsFiles...)
			}
			return document(w.t, manifest, "Deployment", server, edits...)
		}},
		"relays": {cluster.ServerNamespace, "deployment/" + relay, func(v version) string {
			deployment := document(w.t, manifest, "Deployment", server, slices.Concat(tagged(v), named, tlsFiles, []string{
				"- --source=kube", upstream,
				"--server-service=slicecast-system/" + server + "\n", "--server-service=slicecast-system/" + relay + "\n",
				"volumeMounts:\n", "volumeMounts:\n" +
					"        - {name: upstream, mountPath: /run/slicecast/upstream, readOnly: true}\n",
				"\n      volumes:\n", "\n      volumes:" + token,
			})...)
			return document(w.t, manifest, "Service", server, named...) + "\n---\n" + deployment
		}},
		"agents": {cluster.AgentNamespace, "daemonset/slicecast-agent", func(v version) string {
			settings, configMap := w.settings(v)
			return configMap + "\n---\n" + document(w.t, manifest, "DaemonSet", "slicecast-agent", append(tagged(v),
				"slicecast-config\n", settings+"\n",
				"--server-service=slicecast-system/"+server, "--server-service=slicecast-system/"+relay,
				"        - --ca-config-map=slicecast-agents/slicecast-ca\n", "", // earlier versions lack it
				"audience: slicecast\n", "audience: slicecast-relay\n")...)
		}},
	}
}

// settings returns a ConfigMap with the agents' settings in the form that a version reads.
func (w *walk) settings(v version) (name, manifest string) {
	w.t.Helper()
	current, err := w.Client.CoreV1().ConfigMaps(cluster.AgentNamespace).Get(w.t.Context(), "slicecast-config", metav1.GetOptions{})
	require.NoError(w.t, err)
	out := corev1.ConfigMap{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMap"},
		ObjectMeta: metav1.ObjectMeta{Name: "slicecast-config-" + v.name, Namespace: cluster.AgentNamespace},
		Data:       maps.Clone(current.Data),
	}
	require.Contains(w.t, out.Data["agent.yaml"], configfile.APIVersion)
	out.Data["agent.yaml"] = strings.Replace(out.Data["agent.yaml"], configfile.APIVersion, v.configuration, 1)
	text, err := yaml.Marshal(out)
	require.NoError(w.t, err)
	return out.Name, string(text)
}
