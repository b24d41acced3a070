// These tests prove that a bug report has what it names and names what it lacks, that no secret is
// in it wherever secrets can be, that it has bounds, and that an interrupt leaves nothing.
package plugin

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/slicecast/slicecast/agent/config"
	"github.com/slicecast/slicecast/internal/plugin/redact"
	"github.com/slicecast/slicecast/internal/plugin/redact/redacttest"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
	"github.com/slicecast/slicecast/server/app"
)

// unpack returns the files of an archive, by their paths in its folder.
func unpack(t *testing.T, packed io.Reader) map[string]string {
	t.Helper()
	zip, err := gzip.NewReader(packed)
	require.NoError(t, err)
	files := make(map[string]string)
	for archive := tar.NewReader(zip); ; {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		require.NoError(t, err)
		require.True(t, filepath.IsLocal(h.Name), h.Name)
		require.Regexp(t, `^slicecast-bugreport-`, h.Name)
		content, err := io.ReadAll(archive)
		require.NoError(t, err)
		_, path, _ := strings.Cut(h.Name, "/")
		require.NotContains(t, files, path)
		files[path] = string(content)
	}
}

// requireIndex requires that the index names all files, and only these.
func requireIndex(t *testing.T, files map[string]string) {
	t.Helper()
	var linked []string
	for _, m := range regexp.MustCompile(`href="([^"#]+)"`).FindAllStringSubmatch(files["index.html"], -1) {
		linked = append(linked, m[1])
	}
	var held []string
	for path := range files {
		if path != "index.html" {
			held = append(held, path)
		}
	}
	require.ElementsMatch(t, held, linked)
	require.NotContains(t, files["index.html"], "<script")
}

// seed is in every secret that the tests put anywhere.
const seed = "SEEDED"

// seeded is a token as API servers make them.
const seeded = "eyJhbGciOiJSUzI1NiJ9.SEEDED.SEEDED"

// seedPod puts secrets into a Pod.
func seedPod(p *corev1.Pod) {
	p.Annotations = map[string]string{"kubectl.kubernetes.io/last-applied-configuration": "SEEDED-applied", "vendor.example/key": "SEEDED-vendor",
		"vault.vendor.example/agent-inject-token": "SEEDED-annotation"}
	c := &p.Spec.Containers[0]
	c.Env = []corev1.EnvVar{{Name: "PLAIN_VARIABLE", Value: "SEEDED-environment"}, {Name: "HTTPS_PROXY", Value: "http://user:SEEDED-proxy@proxy.example:3128"}}
	c.Args = append(c.Args, "--vendor-token=SEEDED-flag", "--vendor-password", "SEEDED-word")
	sidecar := *c.DeepCopy()
	sidecar.Name, sidecar.Ports, sidecar.Args = "vendor", nil, []string{"--token=SEEDED-sidecar", "--password", "SEEDED-word"}
	p.Spec.Containers = append(p.Spec.Containers, sidecar)
	p.Spec.ImagePullSecrets = []corev1.LocalObjectReference{{Name: "pull"}}
}

const seededLog = "level=INFO msg=Started\nlevel=WARN msg=refused authorization=\"Bearer SEEDED.abc\"\n" +
	"the environment has SEEDED-environment\n-----BEGIN EC PRIVATE KEY-----\nSEEDED\n-----END EC PRIVATE KEY-----\n" +
	"GET https://user:SEEDED@registry.example/ token " + seeded + "\nthe proxy refused SEEDED-proxy, and the vault SEEDED-annotation\n" +
	"found AKIASEEDEDSEEDEDSEED\nrun [vendor --password SEEDED-word]\nlevel=INFO msg=Ready\n"

// seedCluster puts secrets into objects beside the Pods, and returns the private key of the
// servers.
func (e *environment) seedCluster() (key string) {
	e.Helper()
	client := plane.Client().CoreV1()
	pull := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: "pull"}, Type: corev1.SecretTypeDockerConfigJson,
		Data: map[string][]byte{corev1.DockerConfigJsonKey: []byte(`{"auths":{"registry.example":{"auth":"SEEDED-pull"}}}`)},
	}
	_, err := client.Secrets(serverNamespace).Create(e.Context(), pull, metav1.CreateOptions{})
	require.NoError(e, err)
	e.Cleanup(func() {
		require.NoError(e, client.Secrets(serverNamespace).Delete(context.Background(), "pull", metav1.DeleteOptions{}))
	})
	config := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "slicecast-config"}, Data: map[string]string{
		"agent.yaml": "programmer: auto\nvendor: {password: SEEDED-config}\n", "kubeconfig": "users: [{user: {token: SEEDED-kubeconfig}}]",
	}}
	_, err = client.ConfigMaps(agentNamespace).Create(e.Context(), config, metav1.CreateOptions{})
	require.NoError(e, err)
	e.Cleanup(func() {
		require.NoError(e, client.ConfigMaps(agentNamespace).Delete(context.Background(), config.Name, metav1.DeleteOptions{}))
	})
	event := &corev1.Event{
		ObjectMeta: metav1.ObjectMeta{Name: "pulled", Namespace: agentNamespace}, Reason: "Pulled", Message: "pulled with password=SEEDED-event",
		InvolvedObject: corev1.ObjectReference{Kind: "Pod", Name: "agent-node-a", Namespace: agentNamespace}, Type: "Normal",
	}
	_, err = client.Events(agentNamespace).Create(e.Context(), event, metav1.CreateOptions{})
	require.NoError(e, err)
	e.Cleanup(func() {
		require.NoError(e, client.Events(agentNamespace).Delete(context.Background(), event.Name, metav1.DeleteOptions{}))
	})
	own, err := client.Secrets(serverNamespace).Get(e.Context(), "slicecast-server-tls", metav1.GetOptions{})
	require.NoError(e, err)
	for _, content := range own.Data {
		if strings.Contains(string(content), "PRIVATE KEY") {
			key += string(content)
		}
	}
	require.NotEmpty(e, key)
	return key
}

// inspects answers slicecast-agent in an agent's Pod.
func inspects(command []string) (string, error) {
	switch strings.Join(command, " ") {
	case "slicecast-agent status --shards --output=json":
		return `{"status": {"nodeName": "node-a", "lastError": "authorization: Bearer SEEDED-status"}}`, nil
	case "slicecast-agent inspect":
		var out strings.Builder
		for _, p := range []inspected{
			{Name: "rules/nftables.txt", Content: "table ip slicecast { comment \"token=SEEDED-rule\" }"},
			{Name: "kernel/version.txt", Content: "Linux 6.12.1"},
			{Name: "agent/metrics.txt", Content: `slicecast_agent_up{auth="SEEDED-label"} 1`},
			{Name: "agent/flagz.txt", Content: "vendor-token=" + seeded},
			{Name: "../../../outside", Content: "x"},
			{Name: "rules/ipvs.txt", Error: "permission denied"},
		} {
			line, err := json.Marshal(p)
			if err != nil {
				return "", err
			}
			out.Write(append(line, '\n'))
		}
		return out.String() + `{"name": "kernel/half`, errors.New("the command did not end in time")
	}
	return "", fmt.Errorf("no such command: %q", command)
}

func TestBugreport(t *testing.T) {
	e := newEnvironment(t)
	e.change = seedPod
	e.server("server-0")
	e.agent("node-a", e.server("server-1"))
	e.kubelet.Log(serverNamespace, "server-1", "server", seededLog)
	key := e.seedCluster()
	// node-0 has the only kubelet, so the agent of node-a is where it is.
	e.pod(agentNamespace, "agent-node-0", "slicecast-agent", "agent", "node-0", nil, corev1.PodRunning)
	e.kubelet.Log(agentNamespace, "agent-node-0", "agent", seededLog)
	e.kubelet.Exec(agentNamespace, "agent-node-0", inspects)
	e.eventually(fine, []string{"node-a  programmed"}, "nodes", "node-a")

	admin := plane.AdminConfig()
	target := filepath.Join(t.TempDir(), "report.tar.gz")
	r := runAs(t.Context(), plane.Kubeconfig(t, admin), "bugreport", "--output="+target, "--sample=2", "--seed=7")
	// One part cannot be read, and nobody runs commands on node-a.
	require.Equal(t, incomplete, r.code, r.errors)
	require.Empty(t, r.out)
	require.Contains(t, r.errors, "Wrote "+target)
	require.Contains(t, r.errors, "2 of 2 nodes: those in trouble first, then random ones (--seed=7).")
	info, err := os.Stat(target)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), info.Mode().Perm())
	packed, err := os.ReadFile(target)
	require.NoError(t, err)
	files := unpack(t, bytes.NewReader(packed))
	requireIndex(t, files)
	for path, text := range map[string]string{
		"fleet/status.txt": "serving", "fleet/nodes.json": `"node-a"`, "fleet/changes.txt": "change", "fleet/check.txt": "clock",
		"servers/slicecast-system/server-1/status.json":   `"serverName"`,
		"servers/slicecast-system/server-1/clients.jsonl": `"node-a"`,
		"servers/slicecast-system/server-0/shards.json":   `"digest"`,
		"servers/slicecast-system/server-1/shards.json":   `"digest"`,
		"servers/slicecast-system/server-1/metrics.txt":   "slicecast_server_streams",
		"servers/slicecast-system/server-1/pod.yaml":      "--tls-secret=slicecast-system/slicecast-server-tls",
		"servers/slicecast-system/server-1/log.txt":       "msg=Ready",
		"nodes/node-0/status.json":                        `"nodeName"`,
		"nodes/node-0/rules/nftables.txt":                 "table ip slicecast",
		"nodes/node-0/kernel/version.txt":                 "Linux 6.12.1",
		"nodes/node-0/other/~2e.~2f..~2f..~2foutside":     "x",
		"nodes/node-0/log.txt":                            "msg=Started",
		"cluster/nodes.yaml":                              "kernelVersion",
		"cluster/slicecast-agents/config.yaml":            "programmer: auto",
		"cluster/slicecast-agents/events.yaml":            "Pulled Pod/agent-node-a",
	} {
		require.Contains(t, files[path], text, path)
	}
	// What a maintainer needs is still there.
	for path, facts := range map[string][]string{
		"servers/slicecast-system/server-1/pod.yaml": {
			"name: server-1", "namespace: slicecast-system", "nodeName: node-0", "phase: Running", "image: none", "name: HTTPS_PROXY", "name: vendor",
			"--vendor-token=(left out)", "containerPort: 8472", "serviceAccountName: slicecast-server", "app.kubernetes.io/component: server",
		},
		"cluster/nodes.yaml":                   {"name: node-0", "addresses:", "type: InternalIP", "taints:", "kubeletVersion", "kernelVersion: 6.12.1"},
		"cluster/slicecast-agents/config.yaml": {"name: slicecast-config", "resourceVersion: ", "vendor: (left out)"},
		"cluster/slicecast-agents/events.yaml": {"Normal Pulled Pod/agent-node-a, 1 times"},
		"nodes/node-0/log.txt":                 {"level=WARN msg=refused", "the proxy refused (left out)", "GET https://(left out)@registry.example/"},
		"nodes/node-0/status.json":             {`"nodeName":"node-a"`},
		"fleet/check.txt":                      {"server"},
	} {
		for _, fact := range facts {
			require.Contains(t, files[path], fact, path)
		}
	}
	require.Contains(t, files["index.html"], "Node node-0: rules/ipvs.txt: <span class=\"note\">permission denied")
	require.Contains(t, files["index.html"], "did not end in time", "what it had printed is there nevertheless")
	for path, content := range files {
		require.NotContains(t, content, seed, path)
		require.NotRegexp(t, `eyJ[\w-]+\.eyJ`, content, path)
		for _, secret := range []string{key, string(admin.KeyData)} {
			lines := strings.Split(strings.TrimSpace(secret), "\n")
			for _, line := range append(lines[1:len(lines)-1], base64.StdEncoding.EncodeToString([]byte(secret))) {
				if !strings.HasPrefix(line, "-----") {
					require.NotContains(t, content, line, path)
				}
			}
		}
	}

	// To standard output, of chosen nodes.
	r = runAs(t.Context(), plane.Kubeconfig(t, admin), "bugreport", "--output=-", "--nodes=node-0,node-z")
	require.Equal(t, incomplete, r.code, r.errors)
	files = unpack(t, strings.NewReader(r.out))
	requireIndex(t, files)
	require.Contains(t, files, "nodes/node-0/status.json")
	require.NotContains(t, files, "nodes/node-a/pod.yaml")
	require.Contains(t, files["index.html"], "Node node-z: agent: <span class=\"note\">no Pod of an agent is on the node")
}

// TestBugreportForms checks that no secret is in any file of a bug report, whatever its form and
// whatever the file is made from, and that what is around the secrets is still there.
func TestBugreportForms(t *testing.T) {
	forms := redacttest.Forms(t)
	text, lines := redacttest.Join(forms)
	var some []redacttest.Form // for objects, whose size is limited
	for i, f := range forms {
		if i%25 == 0 && !f.Open {
			some = append(some, f)
		}
	}
	fewer, _ := redacttest.Join(some)
	e := newEnvironment(t)
	e.change = func(p *corev1.Pod) {
		p.Spec.Containers[0].Args = append(p.Spec.Containers[0].Args, "--vendor="+fewer)
		p.Annotations = map[string]string{"vendor.example/settings": fewer, "slicecast.io/vendor": fewer}
	}
	e.server("server-0")
	e.kubelet.Log(serverNamespace, "server-0", "server", text)
	e.pod(agentNamespace, "agent-node-0", "slicecast-agent", "agent", "node-0", nil, corev1.PodRunning)
	e.kubelet.Log(agentNamespace, "agent-node-0", "agent", text)
	e.kubelet.Exec(agentNamespace, "agent-node-0", func(command []string) (string, error) {
		if command[1] == "status" {
			status, err := json.Marshal(map[string]any{"status": map[string]any{"nodeName": "node-0", "lastError": text}})
			return string(status), err
		}
		var out bytes.Buffer
		for _, name := range []string{"rules/nftables.txt", "rules/iptables.txt", "rules/ipvs.txt", "kernel/sysctls.txt", "agent/metrics.txt", "agent/flagz.txt", "agent/configz.txt"} {
			if err := json.NewEncoder(&out).Encode(inspected{Name: name, Content: text}); err != nil {
				return "", err
			}
		}
		return out.String(), errors.New(fewer)
	})
	config := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "slicecast-config"}, Data: map[string]string{"agent.yaml": fewer, "apiServerHost": fewer, "vendor": fewer}}
	_, err := plane.Client().CoreV1().ConfigMaps(agentNamespace).Create(t.Context(), config, metav1.CreateOptions{})
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, plane.Client().CoreV1().ConfigMaps(agentNamespace).Delete(context.Background(), config.Name, metav1.DeleteOptions{}))
	})
	for i, f := range some {
		event := &corev1.Event{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("seeded-", i), Namespace: agentNamespace}, Reason: "Seeded", Message: f.Text,
			InvolvedObject: corev1.ObjectReference{Kind: "Pod", Name: "agent-node-0", Namespace: agentNamespace},
		}
		_, err := plane.Client().CoreV1().Events(agentNamespace).Create(t.Context(), event, metav1.CreateOptions{})
		require.NoError(t, err)
		t.Cleanup(func() {
			require.NoError(t, plane.Client().CoreV1().Events(agentNamespace).Delete(context.Background(), event.Name, metav1.DeleteOptions{}))
		})
	}
	r := runAs(t.Context(), plane.Kubeconfig(t, plane.AdminConfig()), "bugreport", "--output=-", "--nodes=node-0")
	require.Equal(t, incomplete, r.code, r.errors)
	files := unpack(t, strings.NewReader(r.out))
	for path, content := range files {
		require.Empty(t, redacttest.Left(content, forms...), path)
	}
	for _, path := range []string{
		"servers/slicecast-system/server-0/log.txt", "nodes/node-0/log.txt", "nodes/node-0/rules/nftables.txt", "nodes/node-0/kernel/sysctls.txt",
		"nodes/node-0/agent/metrics.txt", "nodes/node-0/status.json",
	} {
		for _, line := range lines {
			require.Contains(t, files[path], line, path)
		}
	}
	for path, kept := range map[string]string{
		"cluster/slicecast-agents/config.yaml": "  agent.yaml: (left out)\n  apiServerHost: (left out)\n  vendor: (left out)\n", "cluster/slicecast-agents/events.yaml": "Seeded Pod/agent-node-0", "nodes/node-0/pod.yaml": "--vendor=(left out)",
		"servers/slicecast-system/server-0/pod.yaml": "--vendor=(left out)", "index.html": "msg=Line",
	} {
		require.Contains(t, files[path], kept, path)
	}
}

// TestOwnSettings checks that a bug report keeps all flags and settings of servers and agents, and
// no others.
func TestOwnSettings(t *testing.T) {
	flags, fields := []string{"init-only"}, []string{"apiVersion", "kind"}
	fs := pflag.NewFlagSet("", pflag.ContinueOnError)
	(&app.Options{}).AddFlags(fs)
	fs.VisitAll(func(f *pflag.Flag) { flags = append(flags, f.Name) })
	var visit func(reflect.Type)
	visit = func(of reflect.Type) {
		for of.Kind() == reflect.Pointer {
			of = of.Elem()
		}
		if of.Kind() != reflect.Struct {
			return
		}
		for f := range of.Fields() {
			if flag, ok := f.Tag.Lookup("flag"); ok && !slices.Contains(flags, flag) {
				flags = append(flags, flag)
			}
			if name, _, _ := strings.Cut(f.Tag.Get("json"), ","); name != "" && !slices.Contains(fields, name) {
				fields = append(fields, name)
			}
			visit(f.Type)
		}
	}
	visit(reflect.TypeFor[config.Agent]())
	require.ElementsMatch(t, flags, redact.OwnFlags)
	require.ElementsMatch(t, fields, redact.OwnFields)
}

// TestBugreportWithoutRights checks that what a user may not have is named, beside what the roles
// of the chart allow.
func TestBugreportWithoutRights(t *testing.T) {
	e := newEnvironment(t)
	e.agent("node-a", e.server("server-1"))
	e.eventually(fine, nil, "nodes", "node-a")
	r := e.run("bugreport", "--output=-")
	require.Equal(t, incomplete, r.code, r.errors)
	require.Contains(t, r.errors, "missing or incomplete: index.html says which and why")
	files := unpack(t, strings.NewReader(r.out))
	requireIndex(t, files)
	require.Contains(t, files["servers/slicecast-system/server-1/metrics.txt"], "slicecast_server_streams")
	require.Contains(t, files["nodes/node-a/pod.yaml"], "nodeName: node-a")
	for _, right := range []string{`resource &#34;pods/log&#34;`, `resource &#34;pods/exec&#34;`, "docs/kubectl.md says which rights are needed", "deployments.apps is forbidden"} {
		require.Contains(t, files["index.html"], right)
	}
	nobody := runAs(t.Context(), plane.Kubeconfig(t, plane.ConfigFor("nobody")), "bugreport", "--output=-")
	require.Equal(t, incomplete, nobody.code)
	files = unpack(t, strings.NewReader(nobody.out))
	requireIndex(t, files)
	require.Contains(t, files["index.html"], "Fleet: servers: <span class=\"note\">find the servers: pods is forbidden")
}

// TestBugreportInterrupted checks that Ctrl-C leaves no half archive, unless the user wants it.
func TestBugreportInterrupted(t *testing.T) {
	e := newEnvironment(t)
	e.server("server-1") // it publishes the CAs
	e.caFile(serverNamespace, "slicecast-ca")
	e.pod(serverNamespace, "silent", "slicecast-server", "server", "node-0", serverArgs(), corev1.PodRunning)
	for _, partial := range []bool{false, true} {
		accepted := make(chan struct{})
		e.kubelet.Serve(serverNamespace, "silent", 8472, e.signaling(accepted))
		ctx, interrupt := context.WithCancel(t.Context())
		go func() {
			<-accepted
			interrupt()
		}()
		dir := t.TempDir()
		r := runAs(ctx, e.kubeconfig, "bugreport", "--timeout=5m", "--output="+filepath.Join(dir, "report"), fmt.Sprintf("--partial=%v", partial))
		require.Equal(t, incomplete, r.code, r.errors)
		held, err := os.ReadDir(dir)
		require.NoError(t, err)
		if !partial {
			require.Empty(t, held)
			require.Contains(t, r.errors, "nothing was written")
			continue
		}
		require.Len(t, held, 1)
		packed, err := os.Open(filepath.Join(dir, "report"))
		require.NoError(t, err)
		files := unpack(t, packed)
		require.NoError(t, packed.Close())
		requireIndex(t, files)
		require.Contains(t, files["index.html"], "This report is incomplete, because it was interrupted.")
	}
	for args, says := range map[string]string{
		"--sample=-1": "--sample is -1", "--since=0s": "--since is 0s", "--output=/nowhere/x": "choose a folder",
		"--output=/tmp": "--output is the folder /tmp: name a file in it", "--nodes=a --sample=1": "none of the others can be",
	} {
		r := e.run(append([]string{"bugreport"}, strings.Fields(args)...)...)
		require.Equal(t, incomplete, r.code)
		require.Contains(t, r.errors, says)
	}
}

func TestSample(t *testing.T) {
	programmedNode := func(name string, a *pb.AgentStatus) node { return node{Node: name, State: programmed, agent: a} }
	nodes := []node{
		programmedNode("fine-1", nil), programmedNode("warns", &pb.AgentStatus{Warnings: []*pb.AgentWarning{{}}}),
		programmedNode("nacks", &pb.AgentStatus{Errors: []*pb.AgentError{{}}}), {Node: "lost", State: notConnected},
	}
	for i := range 100 {
		nodes = append(nodes, programmedNode(fmt.Sprint("more-", i), nil))
	}
	b := &bugreport{sample: 6, seed: 3}
	chosen, text := b.choose(nodes)
	require.Contains(t, text, "6 of 104 nodes")
	require.Contains(t, text, "--seed=3")
	require.Equal(t, []sampledNode{
		{"lost", notConnected, becauseBehind}, {"nacks", programmed, becauseErrors}, {"warns", programmed, becauseWarning},
	}, chosen[:3])
	require.Len(t, chosen, 6)
	require.Equal(t, becauseRandom, chosen[3].Why)
	again, _ := b.choose(nodes)
	require.Equal(t, chosen, again)
	b.seed = 4
	other, _ := b.choose(nodes)
	require.NotEqual(t, chosen, other)
	b.seed = 0
	_, text = b.choose(nodes)
	require.Regexp(t, `--seed=[1-9]\d*`, text)
	b.sample = 0
	chosen, _ = b.choose(nodes)
	require.Empty(t, chosen)
}

// TestArchive checks the bounds of an archive, and that names from elsewhere are only text in it.
func TestArchive(t *testing.T) {
	var out bytes.Buffer
	a := newArchive(&out, "slicecast-bugreport-x", &redact.Redactor{})
	a.left = maxReportPart + 30
	hostile := `Node "><script>alert(1)</script>`
	a.begin(hostile)
	a.add(hostile, fileName(`"><script>/../x`), `<img src=x onerror=alert(1)>`, []byte("content"), nil)
	a.add("g", "long", "long", bytes.Repeat([]byte("x"), maxReportPart+1), nil)
	a.add("g", "rest", "rest", bytes.Repeat([]byte("y"), 100), errors.New("also <b>"))
	a.add("g", "more", "more", []byte("z"), nil)
	a.add("g", "none", "none", nil, errors.New("token: SEEDED"))
	a.add("g", "empty", "empty", nil, nil)
	require.Equal(t, 4, a.missing())
	require.NoError(t, a.finish(reportIndex{Sampled: "<script>", Nodes: []sampledNode{{Name: "<script>"}}}))
	files := unpack(t, &out)
	requireIndex(t, files)
	require.Len(t, files, 4)
	require.Len(t, files["long"], maxReportPart)
	require.Equal(t, strings.Repeat("y", 23), files["rest"])
	index := files["index.html"]
	for _, text := range []string{
		"also &lt;b&gt;; cut off, because it is too long", "g: more: <span class=\"note\">the archive has 256 MiB already", "token: (left out)",
	} {
		require.Contains(t, index, text)
	}
	require.NotContains(t, index, "<img")
	for name, want := range map[string]string{"node-1.example": "node-1.example", "..": "~2e.", "a/b": "a~2fb", "A_b": "A_b", "é": "~c3~a9", "": ""} {
		require.Equal(t, want, fileName(name))
	}
	long := strings.Repeat("x", 1000)
	require.Len(t, fileName(long), 200)
	names := map[string]bool{}
	for _, name := range []string{long, long + "x", long[:200], long[:199] + "/", long[:199] + "~", fileName(long)} {
		names[fileName(name)] = true
	}
	require.Len(t, names, 6, "each long name has a file of its own")

	full := errors.New("full")
	a = newArchive(failing{full}, "x", &redact.Redactor{})
	require.ErrorIs(t, a.finish(reportIndex{}), full)
}

// failing fails every write.
type failing struct{ err error }

// Write implements io.Writer.
func (f failing) Write([]byte) (int, error) { return 0, f.err }

func TestReadInspected(t *testing.T) {
	parts, err := readInspected([]byte(`{"name":"a/b","content":"x"}` + "\n" + `{"name":"a/b","content":"again"}` + "\nusage"))
	require.ErrorContains(t, err, "of another version")
	require.Equal(t, []inspected{{Name: "a/b", Content: "x"}}, parts)
	parts, err = readInspected([]byte(`{"name":"a/b","content":"x"}` + "\n" + `{"name":"c","content":"half of i`))
	require.ErrorContains(t, err, "cut off")
	require.Equal(t, []inspected{{Name: "a/b", Content: "x"}}, parts)
	var many strings.Builder
	for i := range maxInspectedParts + 1 {
		fmt.Fprintf(&many, `{"name":"%d"}`, i)
	}
	_, err = readInspected([]byte(many.String()))
	require.ErrorContains(t, err, "more than 100 parts")

	// A node cannot give its parts the names of what the API server has said of it.
	for name, want := range map[string]string{
		"rules/nftables.txt": "rules/nftables.txt", "agent/../../pod.yaml": "agent/~2e.~2f..~2fpod.yaml", "pod.yaml": "other/pod.yaml",
		"log.txt/x": "other/log.txt~2fx", "/pod.yaml": "other/~2fpod.yaml", "": "other/", "other/x": "other/other~2fx",
	} {
		require.Equal(t, want, inspected{Name: name}.path())
	}
}

// TestEvents checks that Events are in the order of their times.
func TestEvents(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	lines := eventLines([]corev1.Event{
		{Reason: "Second", EventTime: metav1.NewMicroTime(now.Add(time.Second)), Message: "m\n", InvolvedObject: corev1.ObjectReference{Kind: "Pod", Name: "p"}},
		{Reason: "First", LastTimestamp: metav1.NewTime(now), Count: 3},
	})
	require.Equal(t, []string{"2026-01-02T03:04:05Z  First /, 3 times", "2026-01-02T03:04:06Z  Second Pod/p, 1 times"}, lines)
}
