package auth

import (
	"context"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/slicecast/slicecast/internal/source/kube"
	"github.com/slicecast/slicecast/internal/testca"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
	"github.com/slicecast/slicecast/server/auth/jwt"
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
	ask    func(context.Context, *authenticationv1.TokenReview) (*authenticationv1.TokenReview, error)
	count  atomic.Int32
	broken atomic.Bool
}

func (c *countingReviews) review(ctx context.Context, r *authenticationv1.TokenReview) (*authenticationv1.TokenReview, error) {
	c.count.Add(1)
	if c.broken.Load() {
		return nil, errors.New("connection refused")
	}
	return c.ask(ctx, r)
}

func newReviewer(namespace string) (*TokenReviewer, *countingReviews) {
	ask, err := kube.TokenReviews(cluster.AdminConfig())
	if err != nil {
		panic(err) // the test environment's own configuration
	}
	reviews := &countingReviews{ask: ask}
	return NewTokenReviewer(TokenOptions{
		Review: reviews.review, Audience: audience,
		Agents: []types.NamespacedName{{Namespace: namespace, Name: "agent"}},
		Relays: []types.NamespacedName{{Namespace: namespace, Name: "relay"}},
	}), reviews
}

// An identity holds as long as what shows it.
func TestIdentityExpires(t *testing.T) {
	namespace := cluster.Namespace(t)
	reviewer, _ := newReviewer(namespace)
	token := newAccount(t, namespace, "agent", "token-until").token(audience, true)
	v, err := reviewer.review(t.Context(), token)
	require.NoError(t, err)
	claims, ok := jwt.Parse(token)
	require.True(t, ok)
	require.EqualValues(t, claims.Expires, v.identity.Until.Unix())
	require.WithinDuration(t, time.Now().Add(time.Hour), v.identity.Until, 10*time.Minute)

	ca, err := testca.New()
	require.NoError(t, err)
	pair, err := ca.Node("a")
	require.NoError(t, err)
	certificate, err := x509.ParseCertificate(pair.Certificate[0])
	require.NoError(t, err)
	i, ok := certificateIdentity(certificate)
	require.True(t, ok)
	require.Equal(t, certificate.NotAfter, i.Until)
}

func TestTokens(t *testing.T) {
	namespace := cluster.Namespace(t)
	reviewer, reviews := newReviewer(namespace)
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
			`--relay-service-account="` + namespace + `/other"`},
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
	require.EqualValues(t, 3, reviews.count.Load(), "only of those that say what they should")
}

// TestRelayTokens: a relay is a relay and nothing else, on whatever node it runs, and needs to be bound to none.
func TestRelayTokens(t *testing.T) {
	namespace := cluster.Namespace(t)
	reviewer, _ := newReviewer(namespace)
	f := newFixture(t, reviewer)
	relay := newAccount(t, namespace, "relay", "relay-a")
	for _, bound := range []bool{true, false} {
		token, conn := relay.token(audience, bound), f.dial(f.ca.ClientTLS())
		require.NoError(t, f.helloAs(conn, token, pb.ClientKind_CLIENT_KIND_RELAY, ""))
		require.Equal(t, codes.PermissionDenied, status.Code(f.hello(conn, token, "relay-a")))
		require.Equal(t, codes.PermissionDenied, status.Code(f.hello(conn, token, "")))
	}
	agent := newAccount(t, namespace, "agent", "relay-b").token(audience, true)
	err := f.helloAs(f.dial(f.ca.ClientTLS()), agent, pb.ClientKind_CLIENT_KIND_RELAY, "")
	require.Equal(t, codes.PermissionDenied, status.Code(err), "%v", err)
	require.Contains(t, status.Convert(err).Message(), "--relay-service-account")
}

// denying reviews say no to every token, and count.
type denying struct{ count int }

func (d *denying) review(context.Context, *authenticationv1.TokenReview) (*authenticationv1.TokenReview, error) {
	d.count++
	return &authenticationv1.TokenReview{}, nil
}

// invent makes a token that says what a good one does, but for what is changed; nobody has signed it.
func invent(t testing.TB, change func(c map[string]any)) string {
	t.Helper()
	c := map[string]any{
		"sub": "system:serviceaccount:ns:agent", "aud": []string{audience}, "exp": time.Now().Add(time.Hour).Unix(),
		"kubernetes.io": map[string]any{"namespace": "ns", "node": map[string]any{"name": "node-1", "uid": "u"}},
	}
	change(c)
	payload, err := json.Marshal(c)
	require.NoError(t, err)
	return "e30." + base64.RawURLEncoding.EncodeToString(payload) + ".c2lnbmF0dXJl"
}

func offline() (*TokenReviewer, *denying) {
	reviews := &denying{}
	return NewTokenReviewer(TokenOptions{
		Review: reviews.review, Audience: audience, Agents: []types.NamespacedName{{Namespace: "ns", Name: "agent"}},
	}), reviews
}

// TestTokensThatCannotBeGoodAreNotReviewed: what a token says of itself suffices to refuse it.
func TestTokensThatCannotBeGoodAreNotReviewed(t *testing.T) {
	reviewer, reviews := offline()
	for name, test := range map[string]struct {
		token  string
		reason reason
	}{
		"no JWT":           {"nonsense", reasonToken},
		"other audience":   {invent(t, func(c map[string]any) { c["aud"] = "somebody" }), reasonToken},
		"no audience":      {invent(t, func(c map[string]any) { delete(c, "aud") }), reasonToken},
		"expired":          {invent(t, func(c map[string]any) { c["exp"] = time.Now().Add(-2 * clockSkew).Unix() }), reasonToken},
		"no end":           {invent(t, func(c map[string]any) { delete(c, "exp") }), reasonToken},
		"somebody else's":  {invent(t, func(c map[string]any) { c["sub"] = "system:serviceaccount:ns:other" }), reasonServiceAccount},
		"bound to no node": {invent(t, func(c map[string]any) { delete(c, "kubernetes.io") }), reasonUnboundToken},
	} {
		v, err := reviewer.review(t.Context(), test.token)
		require.NoError(t, err)
		require.Equal(t, test.reason, v.reason, name)
		require.NotEmpty(t, v.refusal)
	}
	require.Zero(t, reviews.count)

	for name, token := range map[string]string{
		"one audience":      invent(t, func(c map[string]any) { c["aud"] = audience }),
		"just over the end": invent(t, func(c map[string]any) { c["exp"] = time.Now().Add(-clockSkew / 2).Unix() }),
	} {
		before := reviews.count
		v, err := reviewer.review(t.Context(), token)
		require.NoError(t, err)
		require.Equal(t, reasonToken, v.reason, name)
		require.Equal(t, before+1, reviews.count, "%s: the API server decides", name)
	}
}

// TestStrangersDoNotStarveNodes: who shows one invented token after the other uses up the share of its own address.
func TestStrangersDoNotStarveNodes(t *testing.T) {
	reviewer, reviews := offline()
	now := time.Now()
	reviewer.now = func() time.Time { return now }
	from := func(address string) context.Context {
		return peer.NewContext(t.Context(), &peer.Peer{Addr: net.TCPAddrFromAddrPort(netip.MustParseAddrPort(address))})
	}
	n := 0
	try := func(ctx context.Context) verdict {
		n++
		v, err := reviewer.review(ctx, invent(t, func(c map[string]any) { c["n"] = n }))
		require.NoError(t, err)
		return v
	}
	for i := range 1000 {
		v := try(from(fmt.Sprintf("192.0.2.1:%d", 1000+i)))
		if i < reviewsPerAddressBurst {
			require.Equal(t, reasonToken, v.reason, i)
			continue
		}
		require.Equal(t, reasonTooManyReviews, v.reason, i)
		require.Equal(t, codes.ResourceExhausted, v.code)
	}
	require.Equal(t, reviewsPerAddressBurst, reviews.count)
	for _, other := range []string{"192.0.2.2:1", "[2001:db8::1]:1"} {
		require.Equal(t, reasonToken, try(from(other)).reason)
	}
	require.Equal(t, reasonTooManyReviews, try(from("[::ffff:192.0.2.1]:1")).reason, "the same address")
	a := New(Options{Tokens: reviewer, Logger: slog.New(slog.DiscardHandler), Registerer: prometheus.NewRegistry()})
	_, err := a.identify(from("192.0.2.1:1"), nil, []string{"Bearer " + invent(t, func(c map[string]any) { c["n"] = "another" })})
	require.Equal(t, codes.ResourceExhausted, status.Code(err))
	require.ErrorContains(t, err, "try again in ")
	require.Len(t, status.Convert(err).Details(), 1)
	hint, ok := status.Convert(err).Details()[0].(*errdetails.RetryInfo)
	require.True(t, ok)
	require.GreaterOrEqual(t, hint.GetRetryDelay().AsDuration(), shareFills/2)
	require.Less(t, hint.GetRetryDelay().AsDuration(), 2*shareFills)
	now = now.Add(time.Second)
	require.Equal(t, reasonToken, try(from("192.0.2.1:1")).reason)
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
