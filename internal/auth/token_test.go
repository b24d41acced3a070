// These tests prove which tokens of a real API server are accepted, for how long, and after which
// changes of Pods and keys, and that invented tokens do not starve those of nodes.
package auth

import (
	"context"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/keyutil"

	"github.com/slicecast/slicecast/internal/source/kube"
	"github.com/slicecast/slicecast/internal/testca"
	"github.com/slicecast/slicecast/internal/testenv/controlplane"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

const audience = "slicecast"

// stream is the request of agents and relays.
var stream = access{verb: "post", path: pb.DistributionService_Stream_FullMethodName}

// account is a ServiceAccount with a Pod on a node, in the real API server.
type account struct {
	t         *testing.T
	cluster   *controlplane.ControlPlane
	namespace string
	name      string
	pod       *corev1.Pod
}

func newAccount(t *testing.T, namespace, name, node string) *account {
	return newAccountOf(t, cluster, namespace, name, node)
}

func newAccountOf(t *testing.T, cluster *controlplane.ControlPlane, namespace, name, node string) *account {
	ctx, client := t.Context(), cluster.Client()
	_, err := client.CoreV1().ServiceAccounts(namespace).Create(ctx, &corev1.ServiceAccount{
		ObjectMeta: metav1.ObjectMeta{Name: name},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	a := &account{t: t, cluster: cluster, namespace: namespace, name: name}
	a.pod = a.podOn(node, name)
	return a
}

// podOn creates a Node and a Pod on it that uses the ServiceAccount.
func (a *account) podOn(node, name string) *corev1.Pod {
	t, ctx, client := a.t, a.t.Context(), a.cluster.Client()
	_, err := client.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}}, metav1.CreateOptions{})
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, client.CoreV1().Nodes().Delete(context.Background(), node, metav1.DeleteOptions{}))
	})
	pod, err := client.CoreV1().Pods(a.namespace).Create(ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PodSpec{
			NodeName: node, ServiceAccountName: a.name, Containers: []corev1.Container{{Name: "agent", Image: "agent"}},
		},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	return pod
}

// token requests a token as a kubelet does. If bound is set, it is bound to the Pod.
func (a *account) token(audience string, bound bool) string {
	a.t.Helper()
	if !bound {
		return a.tokenOf(nil, audience)
	}
	return a.tokenOf(a.pod, audience)
}

func (a *account) tokenOf(pod *corev1.Pod, audience string) string {
	a.t.Helper()
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{Audiences: []string{audience}}}
	if pod != nil {
		request.Spec.BoundObjectRef = &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: pod.Name, UID: pod.UID}
	}
	answer, err := a.cluster.Client().CoreV1().ServiceAccounts(a.namespace).CreateToken(a.t.Context(), a.name, request, metav1.CreateOptions{})
	require.NoError(a.t, err)
	return answer.Status.Token
}

// countingReviews counts reviews and reads of keys. It fails both while broken is set.
type countingReviews struct {
	ask    func(context.Context, *authenticationv1.TokenReview) (*authenticationv1.TokenReview, error)
	read   func(ctx context.Context, path string) ([]byte, error)
	count  atomic.Int32
	reads  atomic.Int32 // reads of the keys
	broken atomic.Bool
}

func (c *countingReviews) get(ctx context.Context, path string) ([]byte, error) {
	if path == keysPath {
		c.reads.Add(1)
	}
	if c.broken.Load() {
		return nil, errors.New("connection refused")
	}
	return c.read(ctx, path)
}

func (c *countingReviews) review(ctx context.Context, r *authenticationv1.TokenReview) (*authenticationv1.TokenReview, error) {
	c.count.Add(1)
	if c.broken.Load() {
		return nil, errors.New("connection refused")
	}
	return c.ask(ctx, r)
}

func newReviewer(namespace string) (*tokenReviewer, *countingReviews) {
	return reviewerOf(cluster, namespace)
}

func reviewerOf(cluster *controlplane.ControlPlane, namespace string) (*tokenReviewer, *countingReviews) {
	ask, err := kube.TokenReviews(cluster.AdminConfig())
	if err != nil {
		panic(err) // the test environment's own configuration
	}
	read, err := kube.Paths(cluster.AdminConfig())
	if err != nil {
		panic(err)
	}
	access, err := kube.AccessReviews(cluster.AdminConfig())
	if err != nil {
		panic(err)
	}
	reviews := &countingReviews{ask: ask, read: read}
	return newTokenReviewer(TokenOptions{
		Review: reviews.review, Access: access, Get: reviews.get, Audience: audience,
		Agents: []types.NamespacedName{{Namespace: namespace, Name: "agent"}},
		Relays: []types.NamespacedName{{Namespace: namespace, Name: "relay"}},
	}, func(string) bool { return false }, newReviewsCounter(nil, "server")), reviews
}

// TestIdentityExpires checks that an identity expires with its credentials.
func TestIdentityExpires(t *testing.T) {
	namespace := cluster.Namespace(t)
	reviewer, _ := newReviewer(namespace)
	token := newAccount(t, namespace, "agent", "token-until").token(audience, true)
	v, err := reviewer.review(t.Context(), token, stream)
	require.NoError(t, err)
	claims, err := reviewer.keys.verify(t.Context(), token)
	require.NoError(t, err)
	require.Equal(t, claims.Expiry.Time(), v.identity.Until)
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

// TestTokensOfAnEarlierIssuer checks that a server which starts after the API server's issuer has
// changed accepts what the API server accepts.
func TestTokensOfAnEarlierIssuer(t *testing.T) {
	const earlier = "https://earlier.example"
	dir := t.TempDir()
	cluster := controlplane.Start(t, controlplane.Options{Dir: dir, APIServerFlags: []string{"--service-account-issuer=" + earlier}})
	namespace := cluster.Namespace(t)
	now := newAccountOf(t, cluster, namespace, "agent", "node-a").token(audience, true)
	// The token as the API server issued it before.
	files, err := filepath.Glob(filepath.Join(dir, "*", "service-accounts.key"))
	require.NoError(t, err)
	more, err := filepath.Glob(filepath.Join(dir, "*", "*", "service-accounts.key"))
	require.NoError(t, err)
	files = append(files, more...)
	require.Len(t, files, 1)
	text, err := os.ReadFile(files[0])
	require.NoError(t, err)
	key, err := keyutil.ParsePrivateKeyPEM(text)
	require.NoError(t, err)
	parsed, err := jwt.ParseSigned(now, algorithms)
	require.NoError(t, err)
	of := func(issuer string) string {
		var c map[string]any
		require.NoError(t, parsed.UnsafeClaimsWithoutVerification(&c))
		c["iss"] = issuer
		header := parsed.Headers[0]
		return sign(t, jose.SignatureAlgorithm(header.Algorithm), key, header.KeyID, c)
	}
	reviewer, reviews := reviewerOf(cluster, namespace)
	for issuer, accepted := range map[string]bool{controlplane.Issuer: true, earlier: true, "https://other.example": false} {
		v, err := reviewer.review(t.Context(), of(issuer), stream)
		require.NoError(t, err)
		require.Equal(t, accepted, v.refusal == "", "%s: %s", issuer, v.refusal)
		require.Equal(t, accepted, v.identity.Node == "node-a", issuer)
	}
	require.Equal(t, int32(3), reviews.count.Load())
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
		reason  string
		message string
	}{
		{"the agent's", agent.token(audience, true), "token-a", codes.OK, "", ""},
		{"as another node", agent.token(audience, true), "token-b", codes.PermissionDenied, reasonOtherNode, `is node "token-a" and cannot be the agent of node "token-b"`},
		{"as an observer", agent.token(audience, true), "", codes.PermissionDenied, reasonObserver, "not allowed to observe"},
		{"bound to no Pod", agent.token(audience, false), "token-a", codes.PermissionDenied, reasonUnboundToken, "names no node"},
		{"for another audience", agent.token("somebody", true), "token-a", codes.Unauthenticated, reasonToken, `audience "slicecast"`},
		{"of another ServiceAccount", other.token(audience, true), "token-b", codes.PermissionDenied, reasonAccess,
			`:other" to post "/slicecast.v1.DistributionService/Stream"`},
		{"invented", "nonsense", "token-a", codes.Unauthenticated, reasonToken, "not valid"},
		{"with another signature", forged(agent.token(audience, true)), "token-a", codes.Unauthenticated, reasonToken, "signature"},
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
	require.EqualValues(t, 4, reviews.count.Load(), "only of those that pass")
}

// TestRelayTokens checks that a relay's token only allows a relay, whatever node it runs on, and
// need not be bound to a Pod.
func TestRelayTokens(t *testing.T) {
	namespace := cluster.Namespace(t)
	reviewer, _ := newReviewer(namespace)
	f := newFixture(t, reviewer)
	relay := newAccount(t, namespace, "relay", "relay-a")
	for _, bound := range []bool{true, false} {
		token, conn := relay.token(audience, bound), f.dial(f.ca.ClientTLS())
		require.NoError(t, f.helloAs(conn, token, pb.ClientKind_CLIENT_KIND_RELAY, ""))
		v, err := reviewer.review(t.Context(), token, stream)
		require.NoError(t, err)
		// The relays of a ServiceAccount are distinguished by their Pods.
		require.Equal(t, bound, strings.HasSuffix(v.identity.Name(), "/"+relay.pod.Name))
		require.Equal(t, codes.PermissionDenied, status.Code(f.hello(conn, token, "relay-a")))
		require.Equal(t, codes.PermissionDenied, status.Code(f.hello(conn, token, "")))
	}
	agent := newAccount(t, namespace, "agent", "relay-b").token(audience, true)
	err := f.helloAs(f.dial(f.ca.ClientTLS()), agent, pb.ClientKind_CLIENT_KIND_RELAY, "")
	require.Equal(t, codes.PermissionDenied, status.Code(err), "%v", err)
	require.Contains(t, status.Convert(err).Message(), "--relay-service-account")
}

// forged returns the token with a signature of the right form that does not match.
func forged(token string) string {
	signature := []byte(token[strings.LastIndexByte(token, '.')+1:])
	slices.Reverse(signature[:len(signature)-2])
	return token[:len(token)-len(signature)] + string(signature)
}

// TestStrangersDoNotStarveNodes lets strangers at many addresses present invented tokens of all
// kinds at once. Meanwhile every token of a node is reviewed, and no other token is.
func TestStrangersDoNotStarveNodes(t *testing.T) {
	const (
		strangers = 40
		streams   = 100 // per stranger, each with a token of its own
		nodes     = 4
		tokens    = 5 // per node
	)
	namespace := cluster.Namespace(t)
	reviewer, reviews := newReviewer(namespace)
	f := newFixture(t, reviewer)
	node := func(i int) string { return fmt.Sprintf("starve-%d", i) }
	agent := newAccount(t, namespace, "agent", node(0))
	var honest [nodes][tokens]string
	for i := range honest {
		pod := agent.pod
		if i > 0 {
			pod = agent.podOn(node(i), fmt.Sprintf("agent-%d", i))
		}
		for n := range honest[i] {
			honest[i][n] = agent.tokenOf(pod, audience)
		}
	}
	seen := agent.token(audience, true) // the content of a token and its key's ID are no secrets
	parts := strings.Split(seen, ".")
	header, err := base64.RawURLEncoding.DecodeString(parts[0])
	require.NoError(t, err)
	payload, err := base64.RawURLEncoding.DecodeString(parts[1])
	require.NoError(t, err)
	invent := func(kind int, id string) string {
		var says map[string]any
		require.NoError(t, json.Unmarshal(payload, &says))
		says["jti"] = id
		switch kind % 4 {
		case 0:
			return invented(t, "key-"+id, says)
		case 1:
			return unsigned(t, string(header), strings.Repeat("s", 64), says)
		case 2:
			return unsigned(t, `{"alg":"none"}`, "", says)
		default:
			return forged(seen)
		}
	}

	answered := make(chan struct{}, strangers*streams)
	for stranger := range strangers {
		// Each stranger has its own address.
		dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 1, byte(stranger+1))}}
		conn := f.dial(f.ca.ClientTLS(), grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
			return dialer.DialContext(ctx, "tcp", address)
		}))
		for stream := range streams {
			token := invent(stream, fmt.Sprintf("%d-%d", stranger, stream))
			go func() {
				code := status.Code(f.hello(conn, token, node(0)))
				if code != codes.Unauthenticated && code != codes.Unavailable {
					t.Errorf("stranger %d: %v", stranger, code)
				}
				answered <- struct{}{}
			}()
		}
	}
	for range strangers * streams / 4 {
		<-answered
	}
	for i := range honest {
		conn := f.dial(f.ca.ClientTLS())
		for _, token := range honest[i] {
			require.NoError(t, f.hello(conn, token, node(i)))
		}
	}
	for range strangers * streams * 3 / 4 {
		<-answered
	}
	require.EqualValues(t, nodes*tokens, reviews.count.Load())
}

// TestDeletedPod checks that the API server's knowledge counts, where a token does not have it.
func TestDeletedPod(t *testing.T) {
	namespace := cluster.Namespace(t)
	reviewer, reviews := newReviewer(namespace)
	agent := newAccount(t, namespace, "agent", "deleted-a")
	token := agent.token(audience, true)
	require.NoError(t, cluster.Client().CoreV1().Pods(namespace).Delete(t.Context(), agent.pod.Name, metav1.DeleteOptions{
		GracePeriodSeconds: new(int64),
	}))
	v, err := reviewer.review(t.Context(), token, stream)
	require.NoError(t, err)
	require.Equal(t, codes.Unauthenticated, v.code)
	require.Contains(t, v.refusal, "its Pod, Node or ServiceAccount may be gone")
	require.EqualValues(t, 1, reviews.count.Load())
}

// TestKeyRotation checks that a new signing key of the API server is accepted, and that a withdrawn
// key is not.
func TestKeyRotation(t *testing.T) {
	cluster := controlplane.Start(t, controlplane.Options{})
	namespace := cluster.Namespace(t)
	reviewer, reviews := reviewerOf(cluster, namespace)
	now := time.Now()
	reviewer.now = func() time.Time { return now }
	agent := newAccountOf(t, cluster, namespace, "agent", "rotation-a")
	review := func(token string) verdict {
		t.Helper()
		v, err := reviewer.review(t.Context(), token, stream)
		require.NoError(t, err)
		return v
	}
	rotate := func(keep bool) {
		t.Helper()
		require.NoError(t, cluster.APIServer.Kill())
		require.NoError(t, cluster.RotateServiceAccountKey(keep))
		require.NoError(t, cluster.APIServer.Start(t.Context()))
	}
	old, another := agent.token(audience, true), agent.token(audience, true)
	require.Empty(t, review(old).refusal)
	require.EqualValues(t, 1, reviews.reads.Load())

	rotate(true)
	now = now.Add(keysInterval)
	require.Empty(t, review(agent.token(audience, true)).refusal, "of the new key")
	require.EqualValues(t, 2, reviews.reads.Load())
	require.Empty(t, review(another).refusal, "of the old one")
	require.EqualValues(t, 2, reviews.reads.Load(), "which is published, too")
	require.EqualValues(t, 3, reviews.count.Load())

	rotate(false)
	now = now.Add(keysLife)
	require.Contains(t, review(old).refusal, "does not publish")
	require.EqualValues(t, 3, reviews.count.Load())
	now = now.Add(keysInterval)
	require.Empty(t, review(agent.token(audience, true)).refusal)

	// While the API server is down, a token is neither accepted nor rejected.
	another = agent.token(audience, true)
	require.NoError(t, cluster.APIServer.Kill())
	_, err := reviewer.review(t.Context(), another, stream)
	require.ErrorContains(t, err, "create a TokenReview")
	require.Contains(t, review(forged(another)).refusal, "signature")
	require.NoError(t, cluster.APIServer.Start(t.Context()))
	require.Empty(t, review(another).refusal)
}

func TestVerdictsAreCached(t *testing.T) {
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
	require.Contains(t, status.Convert(err).Message(), "tokens are not accepted without --flags-of-tokens")
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
