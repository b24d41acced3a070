package auth

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	authenticationclient "k8s.io/client-go/kubernetes/typed/authentication/v1"
)

const audience = "slicecast"

// account is a ServiceAccount with a Pod that uses it on a node, in the real API server.
type account struct {
	t         *testing.T
	namespace string
	name      string
	pod       *corev1.Pod
}

func newAccount(t *testing.T, namespace, name, node string) *account {
	ctx, client := t.Context(), cluster.Client()
	_, err := client.CoreV1().ServiceAccounts(namespace).Create(ctx, &corev1.ServiceAccount{
		ObjectMeta: metav1.ObjectMeta{Name: name},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	_, err = client.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}}, metav1.CreateOptions{})
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, client.CoreV1().Nodes().Delete(context.Background(), node, metav1.DeleteOptions{}))
	})
	pod, err := client.CoreV1().Pods(namespace).Create(ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PodSpec{
			NodeName: node, ServiceAccountName: name, Containers: []corev1.Container{{Name: "agent", Image: "agent"}},
		},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	return &account{t, namespace, name, pod}
}

// token asks for one as a kubelet does, bound to the Pod if it is to be.
func (a *account) token(audience string, bound bool) string {
	a.t.Helper()
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{Audiences: []string{audience}}}
	if bound {
		request.Spec.BoundObjectRef = &authenticationv1.BoundObjectReference{
			Kind: "Pod", APIVersion: "v1", Name: a.pod.Name, UID: a.pod.UID,
		}
	}
	answer, err := cluster.Client().CoreV1().ServiceAccounts(a.namespace).CreateToken(a.t.Context(), a.name, request, metav1.CreateOptions{})
	require.NoError(a.t, err)
	return answer.Status.Token
}

// countingReviews counts the reviews, and fails them while it is broken.
type countingReviews struct {
	authenticationclient.TokenReviewInterface
	count  atomic.Int32
	broken atomic.Bool
}

func (c *countingReviews) Create(
	ctx context.Context, r *authenticationv1.TokenReview, o metav1.CreateOptions,
) (*authenticationv1.TokenReview, error) {
	c.count.Add(1)
	if c.broken.Load() {
		return nil, errors.New("connection refused")
	}
	return c.TokenReviewInterface.Create(ctx, r, o)
}

func newReviewer(namespace string) (*TokenReviewer, *countingReviews) {
	reviews := &countingReviews{TokenReviewInterface: cluster.Client().AuthenticationV1().TokenReviews()}
	return NewTokenReviewer(TokenOptions{
		Reviews: reviews, Audience: audience,
		ServiceAccounts: []types.NamespacedName{{Namespace: namespace, Name: "agent"}},
	}), reviews
}

func TestTokens(t *testing.T) {
	namespace := cluster.Namespace(t)
	reviewer, _ := newReviewer(namespace)
	f := newFixture(t, reviewer)
	agent, other := newAccount(t, namespace, "agent", "token-a"), newAccount(t, namespace, "other", "token-b")
	for _, test := range []struct {
		name    string
		token   string
		node    string
		want    codes.Code
		reason  reason
		message string
	}{
		{"the agent's", agent.token(audience, true), "token-a", codes.OK, "", ""},
		{"as another node", agent.token(audience, true), "token-b", codes.PermissionDenied, reasonOtherNode, `is node "token-a", not "token-b"`},
		{"as an observer", agent.token(audience, true), "", codes.PermissionDenied, reasonObserver, "not allowed to observe"},
		{"bound to no Pod", agent.token(audience, false), "token-a", codes.PermissionDenied, reasonUnboundToken, "names no node"},
		{"for another audience", agent.token("somebody", true), "token-a", codes.Unauthenticated, reasonToken, `audience "slicecast"`},
		{"of another ServiceAccount", other.token(audience, true), "token-b", codes.PermissionDenied, reasonServiceAccount,
			"--agent-service-account=" + namespace + "/other"},
		{"invented", "nonsense", "token-a", codes.Unauthenticated, reasonToken, "not valid"},
	} {
		t.Run(test.name, func(t *testing.T) {
			before := 0.0
			if test.reason != "" {
				before = f.refused(test.reason)
			}
			err := f.hello(f.dial(f.ca.ClientTLS()), test.token, test.node)
			require.Equal(t, test.want, status.Code(err), "%v", err)
			require.Contains(t, status.Convert(err).Message(), test.message)
			if test.reason != "" {
				require.Equal(t, before+1, f.refused(test.reason))
			}
			require.NotContains(t, f.logs.String(), test.token, "tokens are never logged")
		})
	}
}

func TestAnswersAreKeptForAWhile(t *testing.T) {
	namespace := cluster.Namespace(t)
	reviewer, reviews := newReviewer(namespace)
	now := time.Now()
	reviewer.now = func() time.Time { return now }
	f := newFixture(t, reviewer)
	conn := f.dial(f.ca.ClientTLS())
	token := newAccount(t, namespace, "agent", "cache-a").token(audience, true)

	for range 3 {
		require.NoError(t, f.hello(conn, token, "cache-a"))
	}
	require.EqualValues(t, 1, reviews.count.Load())

	now = now.Add(verdictLife)
	reviews.broken.Store(true)
	err := f.hello(conn, token, "cache-a")
	require.Equal(t, codes.Unavailable, status.Code(err), "%v", err)
	require.Equal(t, 1.0, f.refused(reasonReview))

	reviews.broken.Store(false)
	require.NoError(t, f.hello(conn, token, "cache-a"), "a failure is not kept")
	require.EqualValues(t, 3, reviews.count.Load())
}

func TestTokenWithoutReviewer(t *testing.T) {
	f := newFixture(t, nil)
	err := f.hello(f.dial(f.ca.ClientTLS()), "token", "a")
	require.Equal(t, codes.Unauthenticated, status.Code(err))
	require.Contains(t, status.Convert(err).Message(), "--agent-service-account")
}

func TestBearerToken(t *testing.T) {
	for header, want := range map[string]string{"Bearer x": "x", "bearer  x": "x", "Basic x": "", "Bearer": "", "Bearer ": "", "": ""} {
		token, ok := bearerToken(header)
		if want == "" {
			require.False(t, ok, header)
			continue
		}
		require.True(t, ok, header)
		require.Equal(t, want, token, header)
	}
}
