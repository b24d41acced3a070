// This test proves that agents and relays are admitted by tokens of a real API server, and that
// reviews for known and unknown nodes have budgets of their own. The tokens that a relay receives
// are of no use at other servers.
package app

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/slicecast/slicecast/internal/auth/authtest"
	"github.com/slicecast/slicecast/internal/testenv/controlplane"
)

// tokens creates ServiceAccounts and their tokens in a real API server.
type tokens struct {
	t         *testing.T
	cluster   *controlplane.ControlPlane
	namespace string
}

func (k *tokens) account(name string) {
	k.t.Helper()
	_, err := k.cluster.Client().CoreV1().ServiceAccounts(k.namespace).Create(k.t.Context(), &corev1.ServiceAccount{
		ObjectMeta: metav1.ObjectMeta{Name: name},
	}, metav1.CreateOptions{})
	require.NoError(k.t, err)
}

// of returns a token of a ServiceAccount, bound to a new Pod on a node.
func (k *tokens) of(account, node, audience string) string {
	k.t.Helper()
	client := k.cluster.Client().CoreV1()
	pod, err := client.Pods(k.namespace).Create(k.t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{GenerateName: account + "-"},
		Spec: corev1.PodSpec{
			NodeName: node, ServiceAccountName: account, Containers: []corev1.Container{{Name: "c", Image: "none"}},
		},
	}, metav1.CreateOptions{})
	require.NoError(k.t, err)
	answer, err := client.ServiceAccounts(k.namespace).CreateToken(k.t.Context(), account, &authenticationv1.TokenRequest{
		Spec: authenticationv1.TokenRequestSpec{
			Audiences:      []string{audience},
			BoundObjectRef: &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: pod.Name, UID: pod.UID},
		},
	}, metav1.CreateOptions{})
	require.NoError(k.t, err)
	return answer.Status.Token
}

// helloWith is hello with a bearer token.
func helloWith(t *testing.T, token, address string, ca *authtest.CA, node string) error {
	t.Helper()
	ctx := metadata.AppendToOutgoingContext(t.Context(), "authorization", "Bearer "+token)
	_, err := helloIn(ctx, t, dial(t, address, ca.ClientTLS()), node)
	return err
}

// startOf runs a server with the given flags.
func startOf(t *testing.T, args ...string) *running {
	t.Helper()
	c, err := parse(t, args...).Complete(slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	r := startConfig(t, c)
	select {
	case <-r.store.WaitPublished():
	case <-time.After(deadline):
		t.Fatal("the server does not get in sync")
	}
	return r
}

// TestTokensOfARealAPIServer checks that agents are admitted by their tokens, and that those of
// Nodes that the server knows have a budget of their own. A compromised relay holds its agents'
// tokens, which no other server accepts.
func TestTokensOfARealAPIServer(t *testing.T) {
	k := &tokens{t: t, cluster: controlplane.Start(t, controlplane.Options{})}
	k.namespace = k.cluster.Namespace(t)
	_, err := k.cluster.Client().CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "known"}}, metav1.CreateOptions{})
	require.NoError(t, err)
	k.account("agent")
	k.account("relay")
	ca := authtest.NewCA(t)
	certificate, key := ca.Server()
	kubeconfig := k.cluster.Kubeconfig(t, k.cluster.AdminConfig())
	files := []string{
		"--bind-address=127.0.0.1:0", "--tls-cert-file=" + certificate, "--tls-private-key-file=" + key, "--client-ca-file=" + ca.File,
		"--kubeconfig=" + kubeconfig, "--agent-service-account=" + k.namespace + "/agent", "--drain-window=100ms",
	}

	root := startOf(t, append(files, "--source=kube", "--metrics-bind-address=127.0.0.1:0",
		"--relay-service-account="+k.namespace+"/relay")...)
	address := root.Addresses().GRPC.String()
	reviews := func() string {
		return get(t, ca.ClientTLS(ca.Observer()), "https://"+root.Addresses().Metrics.String()+"/metrics")
	}
	require.NoError(t, helloWith(t, k.of("agent", "known", "slicecast"), address, ca, "known"))
	require.Contains(t, reviews(), `slicecast_server_token_reviews_total{budget="known"} 1`)
	require.NoError(t, helloWith(t, k.of("agent", "unknown", "slicecast"), address, ca, "unknown"))
	require.Contains(t, reviews(), `slicecast_server_token_reviews_total{budget="known"} 1`)
	require.Contains(t, reviews(), `slicecast_server_token_reviews_total{budget="unknown"} 1`)

	tokenFile := filepath.Join(t.TempDir(), "token")
	require.NoError(t, os.WriteFile(tokenFile, []byte(k.of("relay", "known", "slicecast")), 0o600))
	relay := startOf(t, append(files, "--source=upstream", "--upstream-servers="+address, "--upstream-server-name="+authtest.ServerName,
		"--upstream-ca-file="+ca.File, "--upstream-token-file="+tokenFile)...)
	behind := k.of("agent", "known", "slicecast-relay")
	require.NoError(t, helloWith(t, behind, relay.Addresses().GRPC.String(), ca, "known"))
	err = helloWith(t, behind, address, ca, "known")
	require.Equal(t, codes.Unauthenticated, status.Code(err), "%v", err)
	require.ErrorContains(t, err, `the token is not valid for the audience "slicecast": it is for another audience`)
	err = helloWith(t, k.of("agent", "known", "slicecast"), relay.Addresses().GRPC.String(), ca, "known")
	require.Equal(t, codes.Unauthenticated, status.Code(err), "a relay does not ask for what would be good at its root: %v", err)
}
