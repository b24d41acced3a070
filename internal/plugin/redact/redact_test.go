// These tests prove that secrets of all forms are left out of texts and objects, and that what a
// bug report is made for remains.
package redact

import (
	"encoding/base64"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

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
		"serviceAccountToken:\n  path: token\n  audience: slicecast", "imagePullSecrets:\n- name: registry",
		`slicecast_server_token_reviews_total{budget="known"} 5`, "slicecast_server_refused_total{reason=\"token_expired\"} 1",
		"https://registry.example:5000/v2", `{"nodeName":"node-1","tokenAudience":"slicecast"}`,
		"author: somebody", "images v1.2.3 registry.k8s.io/pause", "10.0.0.1.0123456789abcdef",
		"-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----",
	} {
		require.Equal(t, text, r.Text(text))
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
				{Name: "agent", Args: []string{"--node-name=kept", "also-kept", "--password=SEEDED", "--api-token", "SEEDED", "--token-file", "also-kept"}, Env: []corev1.EnvVar{{Name: "PLAIN", Value: "SEEDED-main"}}},
				{Name: "sidecar", Command: []string{"sh", "-c", "SEEDED"}},
			},
		},
	}
	text, err := yaml.Marshal(r.Pod(pod, "agent"))
	require.NoError(t, err)
	got := r.Text(string(text))
	require.NotContains(t, got, "SEEDED")
	for _, kept := range []string{"--node-name=kept", "name: PLAIN", "slicecast.io/config: kept", "name: sidecar"} {
		require.Contains(t, got, kept)
	}
	require.Equal(t, "the log says (left out)", r.Text("the log says SEEDED-main"))
	require.Contains(t, pod.Spec.Containers[0].Env[0].Value, "SEEDED", "the original is as it was")
}

// TestLongTexts checks that no text takes time that grows with the square of its length.
func TestLongTexts(t *testing.T) {
	r := &Redactor{}
	r.Know("from-the-environment")
	for _, part := range []string{"x", "token", "token=", "eyJ", "bearer ", "-----BEGIN PRIVATE KEY", "://", "a.", `"auth":"`, "authorization"} {
		began := time.Now()
		r.Text(strings.Repeat(part, 1<<17/len(part)))
		require.Less(t, time.Since(began), 20*time.Second, part)
	}
}

// FuzzText checks that no text keeps a value that the Redactor knows, and that nothing fails.
func FuzzText(f *testing.F) {
	f.Add("token: ", " -----BEGIN PRIVATE KEY")
	f.Fuzz(func(t *testing.T, before, after string) {
		r := &Redactor{}
		r.Know("SEEDED-VALUE")
		if strings.Contains(r.Text(before+"SEEDED-VALUE"+after), "SEEDED-VALUE") {
			t.Error("it is still there")
		}
	})
}
