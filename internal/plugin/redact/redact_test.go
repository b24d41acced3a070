// These tests prove that secrets of all forms are left out of texts and objects, and that what a
// bug report is made for remains.
package redact

import (
	"encoding/base64"
	"encoding/json"
	"net/url"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/slicecast/slicecast/internal/plugin/redact/redacttest"
)

// TestKeysBesideKnownKeys asserts that what is known of a key does not hide that another one is a
// key, however long the known one is.
func TestKeysBesideKnownKeys(t *testing.T) {
	for length := range 600 {
		var r Redactor
		r.Know("-----BEGIN EC PRIVATE KEY-----\n" + strings.Repeat("x", length) + "\n-----END EC PRIVATE KEY-----\n")
		got := r.Text("a\n-----BEGIN EC PRIVATE KEY-----\nSEEDED\n-----END EC PRIVATE KEY-----\nKEY-----\nb")
		require.NotContains(t, got, "SEEDED", length)
		require.Contains(t, got, "KEY-----\nb", "a piece of a known value is not looked for by itself")
	}
}

func TestText(t *testing.T) {
	r := &Redactor{}
	r.Know("from-the-environment", "two\nlines-of-it", "tiny")
	for _, text := range []string{
		"Authorization: Bearer SEEDED.abc-def",
		`authorization="Basic SEEDED=="`,
		`{"headers":{"Authorization":["Bearer SEEDED"]}}`,
		"request with bearer SEEDEDSEEDED failed",
		"Cookie: session=SEEDED; other=SEEDED",
		"-----BEGIN RSA PRIVATE KEY-----\nSEEDED\nSEEDED\n-----END RSA PRIVATE KEY-----",
		`{"key":"-----BEGIN PRIVATE KEY-----\nSEEDED\n-----END PRIVATE KEY-----\n"}`,
		"-----BEGIN EC PRIVATE KEY-----\nSEEDED cut off",
		"token: SEEDED",
		"token = 'SEEDED with blanks'",
		"  client-key-data: SEEDED=",
		"--password=SEEDED --token SEEDEDX=1 --api-key \"SEEDED\"",
		`{"password":"SEEDED \" SEEDED","a":1}`,
		`.dockerconfigjson: SEEDED`,
		`{"auths":{"registry.example":{"username":"u","auth":"SEEDED"}}}`,
		"https://user:SEEDED@registry.example/v2",
		"https://:SEEDED@registry.example/v2",
		"MY_SECRET=SEEDED", "aws_secret_access_key = SEEDED", "DB_PASSWD: SEEDED",
		"eyJhbGciOiJSUzI1NiJ9.SEEDED.SEEDED_-x",
		"join with seeded.0123456789abcdef now", "AUTH: SEEDED", "--auth=SEEDED",
		"sha256~SEEDEDSEEDEDSEEDEDSEEDED",
		`level=INFO msg=x token="SEEDED \" SEEDED" y=1`,
		`err="refused: {\"password\":\"SEEDED\"}"`,
		"--client-secret=SEEDED", "oidc-client-secret: SEEDED",
		// YAML, in which values go on in the following lines.
		"password: |\n  SEEDED\n  SEEDED two\n\n  SEEDED", "- password: >-\n    SEEDED\n    SEEDED", "password: |2+ # comment\n   SEEDED\n",
		"a:\n  password: |\r\n    SEEDED\r\n    SEEDED\r\n", "password:\n  SEEDED", "password: SEEDED with blanks\n  SEEDED",
		"password: # SEEDED", "\"password\": SEEDED two", "tokens:\n- SEEDED\n- SEEDED\n  SEEDED", "tokens:\n  - SEEDED",
		// Fields that name something below some names, and are secrets below others.
		"password:\n  key: SEEDED", "password:\n  items: SEEDED", "password:\n- name: SEEDED", "password:\n  name: SEEDED\n", "password:\n\n\n  key: SEEDED",
		"tokens:\n  path: SEEDED\n  audience: SEEDED", "a:\n  passwords:\n  - key: SEEDED\n    path: SEEDED", "secret:\n  key: SEEDED",
		"secret:\n  items: SEEDED", "secret:\n  items:\n  - SEEDED\n", "secret:\n  items:\n  - key: a b SEEDED", "secret:\n  data:\n    name: SEEDED",
		"secret:\n  items:\n  - key: a\n  key: SEEDED", "secret:\n  items:\n  - data:\n      key: SEEDED", "secret:\n  name: a\n    SEEDED\n",
		"secrets:\n- name: a\n  value: SEEDED\n  name: b", "serviceAccountToken:\n  key: SEEDED",
		`{"file":"password:\n  key: SEEDED\nb: c"}`, `{"file":"b: c\npassword:\n  SEEDED\nb: c"}`,
		// Secrets, whose fields may have any name.
		"apiVersion: v1\ndata:\n  a: SEEDED\nkind: Secret\nmetadata:\n  name: a\n", "kind: Secret\nstringData:\n  a: |\n    SEEDED\ntype: x\n",
		`{"kind":"Secret","data":{"a":"SEEDED"}}`, `{"a":"{\"kind\":\"Secret\",\"stringData\":{\"a\":\"SEEDED\"}}"}`,
		"kind: SecretList\nitems:\n- data:\n    a: SEEDED\n  metadata: {}", `{"a":"data:\n  a: SEEDED\nkind: Secret\n"}`,
		`{"a":"kind: Secret\nstringData:\n  a: SEEDED"}`, `{"a":"b: c\nauth: SEEDED two"}`,
		"credential:\n  user: a\n  value: SEEDED\n  name: |\n    SEEDED", "secret:\n  name: a\n  data:\n    key: a\n    value: SEEDED",
		"time=1 the file has password: |\n  SEEDED", `{"file":"a: b\npassword: |\n  SEEDED\n  SEEDED\n"}`, `{"file":"password: SEEDED two\nb: c"}`,
		strings.Repeat(" ", 300) + "password: SEEDED SEEDED",
		// Values that are cut off, or of several parts.
		`token: "SEEDED cut off`, `token: 'SEEDED cut off`, `{"token":"SEEDED \" cut off`, `tokens: [SEEDED, "SEE]DED SEEDED"]`,
		`{"tokens":["SEEDED","SEEDED"]}`, "{\"secret\": {\n\"value\": \"SEEDED\"\n}}", `err="{\"tokens\":[\"a]\",\"SEEDED\"]}"`, `password := "SEEDED"`,
		`"password" => "SEEDED"`, "user=a,password=SEE,DED;SEEDED", "password=SE,EDEDSEEDED,host=b", `err="{\"password\":\"a\\\"SEEDED\"}"`,
		"token == SEEDED", "password: 'it''s SEEDED' x",
		// URLs.
		"https://SEEDED@registry.example/v2", `"https:\/\/SEEDED@host\/"`, "git+ssh://SEEDED@host", "https://host/?access_token=SEEDED&x=SEEDED",
		"https://host/?X-Amz-Signature=SEEDED", "postgres://u:p@SEEDED@db", `dial "postgres://u:pa/SEEDED@db": invalid port`,
		"https://store/?sv=1&sig=SEEDED%3D", "DB_PASS=SEEDED", "pwd=SEEDED;x", "AccountKey=SEEDED==",
	} {
		got := r.Text(text)
		require.NotContains(t, strings.ToUpper(got), "SEEDED", text)
		require.Contains(t, got, LeftOut)
		require.Equal(t, got, r.Text(got), "it is left out once")
	}
	for _, value := range []string{"from-the-environment", base64.StdEncoding.EncodeToString([]byte("from-the-environment")), "lines-of-it"} {
		require.NotContains(t, r.Text("x"+value+"y"), value)
	}
	for _, text := range []string{
		"tiny", `time=2026-01-01T00:00:00Z level=WARN msg="Request to the API server failed" kind=Service err="connection refused"`,
		"--tls-secret=slicecast-system/slicecast-server-tls --token-audience=slicecast --token-file=/run/slicecast/token/token",
		"--agent-service-account=slicecast-agents/slicecast-agent", "automountServiceAccountToken: false", "secretName: slicecast-server-tls",
		`slicecast_server_token_reviews_total{budget="known"} 5`, "slicecast_server_refused_total{reason=\"token_expired\"} 1",
		"https://registry.example:5000/v2", `{"nodeName":"node-1","tokenAudience":"slicecast"}`,
		"author: somebody", "images v1.2.3 registry.k8s.io/pause", "10.0.0.1.0123456789abcdef",
		"-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----",
		"kind: ConfigMap\ndata:\n  a: b", `{"data":"a","kind":"SecretClass"}`,
		"automountServiceAccountToken: false\ncontainers:\n- args:\n  - --node-name=a", `"hasToken": true,`,
		"open /etc/x/tls.key: no such file or directory", "key=shop/web-7f9c6d5b4-x2x4z again", "labels:\n  key: node.kubernetes.io/not-ready", "topologyKey: kubernetes.io/hostname",
		`level=INFO msg="bypass" session=42 key=default/slicecast-server-858655bdcd-cpjjc`, "sessionAffinity: ClientIP", `"digest": "q83vEjRWeJq83vEjRWeJq83vEjRWeJq83vEjRWeJq80="`,
		"chain KUBE-SVC-TCOU7JCQXEZGVUNU and service-ULMVA6XW-ns1/svc1/tcp/p80", "uid: 6f1c7a3e-7a55-4d5b-9d1f-0a6f2d1c9b7e", "pkt_type pass, accept", "passes 3 of 4",
		"image: sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08", "epoch=3f9a8b7c6d5e4f3a", "code=Unavailable desc=x", "author=me key=value",
		"ghcr.io/slicecast/slicecast-agent@sha256:0123", "mail user@host about //x", "waiting for a token\n  at the server", "--token --node-name=a",
		// What programs, kernels and servers say.
		"time=2026-11-28T18:00:00.123Z level=INFO msg=\"Stream opened\" node=ip-10-0-3-17.eu-west-1.compute.internal peer=10.12.3.4:43122 shard=12 sequence=18446744073709551615",
		`level=ERROR msg="Cannot program" err="netlink: table ip slicecast: chain service-ULMVA6XW-ns1/svc1/tcp/p80: no such file or directory" after=1.5s`,
		"goroutine 17 [running]:\ngithub.com/slicecast/slicecast/server/fanout.(*Hub).run(0xc000123450, {0x1f2e3d4c, 0x12})\n\t/src/server/fanout/hub.go:123 +0x1a5",
		"-A KUBE-SERVICES -d 10.96.0.10/32 -p tcp -m comment --comment \"kube-system/kube-dns:dns-tcp cluster IP\" -m tcp --dport 53 -j KUBE-SVC-ERIFXISQEP7F7OF4",
		"/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_established: 86400\nnf_conntrack 180224 5 nf_nat,xt_conntrack - Live 0xffffffffc0a3b000",
		"# HELP slicecast_server_token_reviews_total Reviews of tokens.\n# TYPE slicecast_server_token_reviews_total counter\nslicecast_server_tokens{state=\"valid\"} 3",
		"eth0 mtu 1500 up|broadcast [10.12.3.4/24 fd00:10:12::4/64 fe80::42:acff:fe11:2/64]", "secrets \"slicecast-server-tls\" is forbidden: User \"x\" cannot get resource",
		"programmer=nftables programmer-fallback=true token-file=/run/slicecast/token/token cluster-cidr=10.244.0.0/16 tls-secret=slicecast-system/slicecast-server-tls",
		`{"digest":"q83vEjRWeJq83vEjRWeJq83vEjRWeJq83vEjRWeJq80=","resourceVersions":{"services":"991823"},"serverVersion":"v1.4.2-17-g0123abc"}`,
		"Back-off restarting failed container server in pod slicecast-server-858655bdcd-cpjjc_slicecast-system(6f1c7a3e-7a55-4d5b-9d1f-0a6f2d1c9b7e)",
	} {
		require.Equal(t, text, r.Text(text))
	}
}

// TestFacts checks that what one needs to find a problem is kept of objects, and messages are not.
func TestFacts(t *testing.T) {
	one := int32(1)
	for _, c := range []struct {
		object any
		facts  []string
	}{
		{&corev1.NodeList{Items: []corev1.Node{{
			ObjectMeta: metav1.ObjectMeta{Name: "node-1", Labels: map[string]string{"topology.kubernetes.io/zone": "a"}},
			Spec: corev1.NodeSpec{
				PodCIDRs: []string{"10.1.0.0/24"}, Unschedulable: true, Taints: []corev1.Taint{{Key: "dedicated", Value: "infra", Effect: "NoSchedule"}},
			},
			Status: corev1.NodeStatus{
				Addresses:  []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "192.0.2.1"}},
				Conditions: []corev1.NodeCondition{{Type: "Ready", Status: "False", Reason: "KubeletNotReady", Message: "SEEDED"}},
				NodeInfo: corev1.NodeSystemInfo{
					KernelVersion: "6.12.1", OSImage: "Debian 13", KubeletVersion: "v1.34.1", ContainerRuntimeVersion: "containerd://2.1", Architecture: "arm64",
				},
			},
		}}}, []string{
			"name: node-1", "zone: a", "- 10.1.0.0/24", "unschedulable: true", "key: dedicated", "value: infra", "address: 192.0.2.1", "type: InternalIP",
			"type: Ready", "reason: KubeletNotReady", "kernelVersion: 6.12.1", "osImage: Debian 13", "kubeletVersion: v1.34.1", "containerd://2.1", "arm64",
		}},
		{[]appsv1.Deployment{{
			ObjectMeta: metav1.ObjectMeta{Name: "slicecast-server", Generation: 7},
			Spec: appsv1.DeploymentSpec{Replicas: &one, Template: corev1.PodTemplateSpec{Spec: corev1.PodSpec{
				NodeSelector: map[string]string{"kubernetes.io/os": "linux"}, PriorityClassName: "system-cluster-critical",
				Tolerations: []corev1.Toleration{{Key: "dedicated", Operator: "Equal", Value: "infra"}},
				Containers: []corev1.Container{{
					Name: "server", Image: "ghcr.io/slicecast/slicecast-server:v1.4.2", Args: []string{"--shards=64", "--token-audience=slicecast"},
					Resources:      corev1.ResourceRequirements{Limits: corev1.ResourceList{"memory": resource.MustParse("1Gi")}},
					Env:            []corev1.EnvVar{{Name: "HOST", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "status.hostIP"}}}},
					ReadinessProbe: &corev1.Probe{PeriodSeconds: 2, ProbeHandler: corev1.ProbeHandler{Exec: &corev1.ExecAction{Command: []string{"SEEDED"}}}},
				}, {Name: "proxy", Args: []string{"--token=SEEDED"}}},
			}}},
			Status: appsv1.DeploymentStatus{Replicas: 3, ReadyReplicas: 2, UnavailableReplicas: 1},
		}}, []string{
			"generation: 7", "replicas: 1", "kubernetes.io/os: linux", "system-cluster-critical", "value: infra", "slicecast-server:v1.4.2", "--shards=64",
			"--token-audience=slicecast", "memory: 1Gi", "name: HOST", "fieldPath: status.hostIP", "periodSeconds: 2", "replicas: 3", "readyReplicas: 2",
			"unavailableReplicas: 1", "name: proxy",
		}},
		{&corev1.Pod{Status: corev1.PodStatus{
			Phase: "Running", PodIP: "10.1.0.7", HostIP: "192.0.2.1", Reason: "Evicted", Message: "SEEDED", ContainerStatuses: []corev1.ContainerStatus{{
				Name: "agent", RestartCount: 4, Image: "x", ImageID: "x@sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
				State:                corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff", Message: "SEEDED"}},
				LastTerminationState: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 137, Reason: "OOMKilled", Message: "SEEDED"}},
			}},
		}}, []string{
			"phase: Running", "podIP: 10.1.0.7", "hostIP: 192.0.2.1", "reason: Evicted", "restartCount: 4", "reason: CrashLoopBackOff", "exitCode: 137",
			"reason: OOMKilled", "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08", "message: (left out)",
		}},
		{&corev1.ConfigMap{Data: map[string]string{
			"apiServerHost": "api.example", "apiServerPort": "6443", "other": "SEEDED",
			"agent.yaml": "programmer: ipvs\nipvs: {scheduler: rr, vendor: SEEDED}\ntls: {tokenFile: /run/token}\nvendor: {a: SEEDED}\nconntrack: {min: 100000}\n",
		}}, []string{
			"apiServerHost: api.example", `apiServerPort: "6443"`, "programmer: ipvs", "scheduler: rr", "tokenFile: /run/token", "vendor: (left out)",
			"min: 100000", "other: (left out)",
		}},
	} {
		text, err := (&Redactor{}).YAML(c.object, "")
		require.NoError(t, err)
		require.NotContains(t, string(text), "SEEDED")
		for _, fact := range c.facts {
			require.Contains(t, string(text), fact)
		}
	}
}

func TestPod(t *testing.T) {
	r := &Redactor{}
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: "agent", Annotations: map[string]string{"kubectl.kubernetes.io/last-applied-configuration": "SEEDED", "slicecast.io/config": "kept"},
			ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "SEEDED"}},
		},
		Spec: corev1.PodSpec{
			InitContainers: []corev1.Container{{Name: "init", Args: []string{"SEEDED"}, Env: []corev1.EnvVar{{Name: "PLAIN", Value: "SEEDED-init"}}}},
			Containers: []corev1.Container{
				{Name: "agent", Command: []string{"slicecast-agent", "SEEDED"}, Args: []string{
					"--node-name=kept", "SEEDED", "--password=SEEDED", "--api-token", "SEEDED", "--token-file", "also-kept", "--vendor=SEEDED", "-xSEEDED",
				}, Env: []corev1.EnvVar{{Name: "PLAIN", Value: "SEEDED-main"}}},
				{Name: "sidecar", EnvFrom: []corev1.EnvFromSource{{SecretRef: &corev1.SecretEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: "from"}}}}, Command: []string{"sh", "-c", "SEEDED"}},
			},
			ImagePullSecrets: []corev1.LocalObjectReference{{Name: "registry"}},
			Volumes: []corev1.Volume{{Name: "tls", VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{
				SecretName: "slicecast", Items: []corev1.KeyToPath{{Key: "tls.key", Path: "tls.key"}},
			}}}, {Name: "token", VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{
				{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Audience: "slicecast", Path: "token"}},
			}}}}},
		},
	}
	text, err := r.YAML(pod, "agent")
	require.NoError(t, err)
	got := string(text)
	require.NotContains(t, got, "SEEDED")
	for _, kept := range []string{"--node-name=kept", "- slicecast-agent", "- also-kept", "--vendor=(left out)", "name: PLAIN", "slicecast.io/config: kept", "name: sidecar", "secretName: slicecast", "path: tls.key",
		"audience: slicecast", "- name: registry", "name: from"} {
		require.Contains(t, got, kept)
	}
	require.Equal(t, "the log says (left out)", r.Text("the log says SEEDED-main"))
	require.Contains(t, pod.Spec.Containers[0].Env[0].Value, "SEEDED", "the original is as it was")
}

// TestLongTexts checks that no text takes time that grows with the square of its length.
func TestLongTexts(t *testing.T) {
	r := &Redactor{}
	r.Know("from-the-environment")
	parts := []string{
		"x", "token", "token=", "eyJ", "bearer ", "-----BEGIN PRIVATE KEY", "://", "a.", `"auth":"`, "authorization", "token: |\n", "token: |\n ",
		"token:\n", "token: #", "token: |#", "token:\n- ", "token: [", `token: {"`, `token='`, `token="\`, `token=\"`, "token: \n\n", " token: x\n  ",
		"://@", "token:\n name: token:\n ", "token=,a", "from-the-environmen", "-token: ", `\ntoken: |\n `, "token:\n  - name: a\n",
		"key=", "key: ", "key:\n", "key: |\n", "key: [", `key\`, "key ", "keyA1", "LS0tLS1CRUdJTiBQUklWQVRFIEtFWS", "QUJDREVGR0hJSktMTU5PUFFSU1Q=\n", "A1b", "A1b_", "QQ==\n ", "-----END PRIVATE KEY-----",
		"-----END PRIVATE KEY", "ABCD\n", "ABCD\n-----END PRIVATE KEY", "<token>", "<token", "token%3D", "token value", `"token","value":`, "token,value", "curl -u ", "curl -u a:", "curl", ":x@tcp(", "x:@tcp", `"kty""d":"`, "gh", "ghp_", "glpat-",
		"hvs.", "hooks.slack.com/", "1234567890:AA", "8Q~",
	}
	for _, part := range parts {
		requireBounded(t, r, strings.Repeat(part, 1<<17/len(part)))
	}
	var growing strings.Builder // each quote has one more backslash before it than the last one
	for i := 0; growing.Len() < 1<<17; i++ {
		growing.WriteString("token=" + strings.Repeat(`\`, i) + `"`)
	}
	requireBounded(t, r, growing.String())
}

// maxCPU bounds the CPU time for any text of the tests. It is a hundred times what the text needs,
// and a small part of what it would need if the time grew with the square of its length.
const maxCPU = 20 * time.Second

// requireBounded requires that leaving secrets out of a text takes limited CPU time, and memory in
// proportion to the length of the text.
func requireBounded(t *testing.T, r *Redactor, text string) {
	t.Helper()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	began := cpu(t)
	out := r.Text(text)
	took := cpu(t) - began
	runtime.ReadMemStats(&after)
	require.Less(t, took, maxCPU, "%.40q", text)
	require.LessOrEqual(t, len(out), 12*len(text)+64, "%.40q", text)
	if !raceDetector { // pools drop their content under it
		require.LessOrEqual(t, after.TotalAlloc-before.TotalAlloc, uint64(64*len(text)+1<<20), "%.40q", text)
	}
}

// cpu returns the CPU time of the process.
func cpu(t *testing.T) time.Duration {
	t.Helper()
	var used unix.Rusage
	require.NoError(t, unix.Getrusage(unix.RUSAGE_SELF, &used))
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}

// TestKnownForms checks that a value is found in the forms in which programs print it.
func TestKnownForms(t *testing.T) {
	const value = `pass "word" <&> ü/1`
	encode := func(s string) string { return base64.StdEncoding.EncodeToString([]byte(s)) }
	r := &Redactor{}
	r.Know(value, encode("decoded-from-the-environment"), base64.RawURLEncoding.EncodeToString([]byte("decoded, too: ?>?>")))
	escaped, err := json.Marshal(value)
	require.NoError(t, err)
	for _, form := range []string{
		value, url.QueryEscape(value), url.PathEscape(value), string(escaped), strconv.Quote(value), encode(value), encode(value + "\n")[:26],
		"decoded-from-the-environment", encode("decoded-from-the-environment"), "decoded, too: ?>?>",
	} {
		require.NotContains(t, r.Text("x "+form+" y"), strings.Trim(form, `"`))
	}
	// What is around it in something encoded shifts it.
	for _, before := range []string{"u:", "us:", "use:", "user:"} {
		got := r.Text("auth is " + encode(before+value+", and more"))
		require.Contains(t, got, LeftOut)
		left, _, _ := strings.Cut(strings.TrimPrefix(got, "auth is "), LeftOut)
		require.LessOrEqual(t, len(left), 8, got)
	}
	long := strings.Repeat("0123456789abcdef", 1000)
	r.Know(long)
	require.NotContains(t, r.Text("x "+long+" y"), "abcdef")
	require.Equal(t, "password", r.Text("password"), "words that could be base64 are not")
}

// TestMeta checks that values of annotations are left out, and that those that are likely secrets
// are found elsewhere, too.
func TestMeta(t *testing.T) {
	r := &Redactor{}
	_, err := r.YAML(&metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{
		"vendor.example/token": "SEEDED-token", "vendor.example/blob": base64.StdEncoding.EncodeToString([]byte("SEEDED in base64")), "prometheus.io/path": "/metrics",
	}}}, "")
	require.NoError(t, err)
	require.Equal(t, "(left out) and (left out), at /metrics", r.Text("SEEDED-token and SEEDED in base64, at /metrics"))
}

// FuzzText checks that no text keeps a value that the Redactor knows, or that is where passwords
// are, and that time and memory are bounded, whatever the text repeats.
func FuzzText(f *testing.F) {
	f.Add("token: ", " -----BEGIN PRIVATE KEY")
	f.Add("token: [", "]")
	f.Add("a: \"", "\n\n")
	f.Add("password:\n- ", "")
	f.Fuzz(func(t *testing.T, before, after string) {
		r := &Redactor{}
		r.Know("SEEDED-VALUE")
		if strings.Contains(r.Text(before+"SEEDED-VALUE"+after), "SEEDED-VALUE") {
			t.Error("it is still there")
		}
		for _, place := range []string{"\npassword: SEEDED", "\npassword: |\n  a\n\n  SEEDED", "\npassword:\n  SEEDED", "\n--password=SEEDED", "\npassword: \"a SEEDED"} {
			if strings.Contains(r.Text(before+place), "SEEDED") {
				t.Errorf("%q has the value after %q", r.Text(before+place), before)
			}
		}
		if unit := before + after; unit != "" && len(unit) < 1<<10 {
			requireBounded(t, r, strings.Repeat(unit, 1<<16/len(unit)))
		}
	})
}

// TestForms checks that nothing is left of secrets in the forms in which programs print them: in
// texts, and in JSON and YAML that have such a text.
func TestForms(t *testing.T) {
	r := &Redactor{}
	for _, form := range redacttest.Forms(t) {
		object := map[string]any{"items": []string{"a text that is so long that YAML goes on in another line, and " + form.Text}}
		inJSON, err := json.Marshal(object)
		require.NoError(t, err)
		inYAML, err := r.YAML(object, "")
		require.NoError(t, err)
		for _, got := range []string{r.Text(form.Text), r.Text(string(inJSON)), r.Text(string(inYAML))} {
			require.Empty(t, redacttest.Left(got, form), "%q became %q", form.Text, got)
		}
		once := r.Text(form.Text)
		require.Equal(t, once, r.Text(once))
	}
}

// TestFormsTogether checks that what is between secrets remains.
func TestFormsTogether(t *testing.T) {
	forms := redacttest.Forms(t)
	text, lines := redacttest.Join(forms)
	got := (&Redactor{}).Text(text)
	require.Empty(t, redacttest.Left(got, forms...))
	for _, line := range lines {
		if !strings.Contains(got, line+"\n") {
			t.Errorf("%q is missing", line)
		}
	}
}

// TestEncodedInAPath checks texts in base64 that come after other characters of base64.
func TestEncodedInAPath(t *testing.T) {
	r := &Redactor{}
	encoded := base64.StdEncoding.EncodeToString([]byte("apiVersion: v1\npassword: hunter-abcdef\nb: c\n"))
	for _, before := range []string{"", "url=/v1/config/", "url=/config/", "--set-", "a_", "/a/b/c/d-e/"} {
		got := r.Text(before + encoded + "?x=y")
		require.Contains(t, got, LeftOut+"?x=y")
		require.Less(t, len(got), len(before)+len(LeftOut)+8)
	}
	const harmless = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/web-x7k2p12345678901234"
	require.Equal(t, harmless, r.Text(harmless))
}
