// These tests prove that ServiceAccounts other than those of agents and relays may make exactly the
// requests that the RBAC of a real API server allows them, and that whoever has many of them does
// not keep others out.
package auth

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	channelzpb "google.golang.org/grpc/channelz/grpc_channelz_v1"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	reflectionpb "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"
	authorizationv1 "k8s.io/api/authorization/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/slicecast/slicecast/internal/source/kube"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// allow lets an account get and post the nonResourceURLs. The function that it returns withdraws
// that.
func (a *account) allow(urls ...string) (withdraw func()) {
	a.t.Helper()
	rbac, ctx := a.cluster.Client().RbacV1(), a.t.Context()
	meta := metav1.ObjectMeta{Name: a.namespace + "-" + a.name}
	_, err := rbac.ClusterRoles().Create(ctx, &rbacv1.ClusterRole{
		ObjectMeta: meta, Rules: []rbacv1.PolicyRule{{Verbs: []string{"get", "post"}, NonResourceURLs: urls}},
	}, metav1.CreateOptions{})
	require.NoError(a.t, err)
	_, err = rbac.ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
		ObjectMeta: meta, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: meta.Name},
		Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: a.namespace, Name: a.name}},
	}, metav1.CreateOptions{})
	require.NoError(a.t, err)
	return func() {
		require.NoError(a.t, rbac.ClusterRoleBindings().Delete(ctx, meta.Name, metav1.DeleteOptions{}))
		require.NoError(a.t, rbac.ClusterRoles().Delete(ctx, meta.Name, metav1.DeleteOptions{}))
	}
}

func TestOtherServiceAccounts(t *testing.T) {
	namespace := cluster.Namespace(t)
	reviewer, reviews := newReviewer(namespace)
	now := time.Now()
	reviewer.now = func() time.Time { return now }
	f := newFixture(t, reviewer)
	viewer := newAccount(t, namespace, "viewer", "access-a")
	withdraw := viewer.allow("/grpc.reflection.v1.ServerReflection/*", "/metrics")
	token, conn := viewer.token(audience, false), f.dial(f.ca.ClientTLS())
	ctx := metadata.AppendToOutgoingContext(t.Context(), "authorization", "Bearer "+token)
	reflect := func() error {
		s, err := reflectionpb.NewServerReflectionClient(conn).ServerReflectionInfo(ctx)
		require.NoError(t, err)
		require.NoError(t, s.CloseSend())
		if _, err = s.Recv(); errors.Is(err, io.EOF) {
			return nil
		}
		return err
	}
	page := f.auth.Observers(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	get := func(path string) int {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil)
		r.Header.Set("Authorization", "Bearer "+token)
		w := httptest.NewRecorder()
		page.ServeHTTP(w, r)
		return w.Code
	}

	for range 3 {
		require.NoError(t, reflect())
		require.Equal(t, http.StatusOK, get("/metrics"))
	}
	require.EqualValues(t, 2, reviews.count.Load(), "one for each kind of request")

	// Nothing else is allowed, also not what any node may do.
	for name, err := range map[string]error{
		"channelz": func() error {
			_, err := channelzpb.NewChannelzClient(conn).GetServers(ctx, &channelzpb.GetServersRequest{})
			return err
		}(),
		"health": func() error {
			_, err := healthpb.NewHealthClient(conn).Check(ctx, &healthpb.HealthCheckRequest{})
			return err
		}(),
		"a node":      f.hello(conn, token, "access-a"),
		"an observer": f.hello(conn, token, ""),
		"a relay":     f.helloAs(conn, token, pb.ClientKind_CLIENT_KIND_RELAY, ""),
	} {
		require.Equal(t, codes.PermissionDenied, status.Code(err), "%s: %v", name, err)
		require.Contains(t, status.Convert(err).Message(), "system:serviceaccount:"+namespace+":viewer", name)
	}
	require.Equal(t, http.StatusForbidden, get("/debug"))
	require.Equal(t, 6.0, f.refused(reasonAccess))

	withdraw()
	require.NoError(t, reflect(), "for as long as a verdict lasts")
	now = now.Add(verdictLife + time.Second)
	require.Eventually(t, func() bool { // the API server's authorizer follows RBAC through a watch
		now = now.Add(verdictLife)
		return status.Code(reflect()) == codes.PermissionDenied
	}, time.Minute, 10*time.Millisecond)
}

// TestStreamsOfOtherServiceAccounts checks that the right to the method of streams makes an
// observer, and no node or relay.
func TestStreamsOfOtherServiceAccounts(t *testing.T) {
	namespace := cluster.Namespace(t)
	reviewer, _ := newReviewer(namespace)
	f := newFixture(t, reviewer)
	observer := newAccount(t, namespace, "observer", "access-b")
	defer observer.allow(pb.DistributionService_Stream_FullMethodName)()
	token, conn := observer.token(audience, true), f.dial(f.ca.ClientTLS())
	require.NoError(t, f.hello(conn, token, ""))
	require.Equal(t, codes.PermissionDenied, status.Code(f.hello(conn, token, "access-b")))
	require.Equal(t, codes.PermissionDenied, status.Code(f.helloAs(conn, token, pb.ClientKind_CLIENT_KIND_RELAY, "")))
}

// TestAccessIsNotKnown checks that nobody is refused for good because the server may not ask.
func TestAccessIsNotKnown(t *testing.T) {
	namespace := cluster.Namespace(t)
	reviewer, _ := newReviewer(namespace)
	var err error
	reviewer.options.Access, err = kube.AccessReviews(cluster.ConfigFor("nobody"))
	require.NoError(t, err)
	f := newFixture(t, reviewer)
	viewer := newAccount(t, namespace, "viewer", "access-c")
	err = f.hello(f.dial(f.ca.ClientTLS()), viewer.token(audience, true), "")
	require.Equal(t, codes.Unavailable, status.Code(err), "%v", err)
	require.ErrorContains(t, err, "allow this server to create subjectaccessreviews")
	require.Equal(t, 1.0, f.refused(reasonReview))
}

// TestBudgetOfOthers checks that the ServiceAccounts of a namespace, of which there may be any
// number, only use up their namespace's share, and all namespaces together only their budget.
func TestBudgetOfOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSigner(t)
		r := s.reviewer()
		n := 0
		try := func(namespace string) verdict {
			t.Helper()
			n++
			v, err := r.review(t.Context(), s.token(changed(good(""), map[string]any{
				"sub": fmt.Sprintf("system:serviceaccount:%s:account-%d", namespace, n), "kubernetes.io": nil,
			})), access{verb: "get", path: "/metrics"})
			require.NoError(t, err)
			return v
		}
		for i := range 2 * reviewsOfNamespaceBurst {
			v := try("hostile")
			require.Equal(t, i < reviewsOfNamespaceBurst, v.refusal == "", i)
			require.Equal(t, i < reviewsOfNamespaceBurst, v.identity.Observer, i)
			require.Equal(t, i >= reviewsOfNamespaceBurst, v.retry > 0, i)
		}
		require.Equal(t, reviewsOfNamespaceBurst, s.reviews)
		require.Len(t, s.asked, reviewsOfNamespaceBurst)
		require.Equal(t, &authorizationv1.NonResourceAttributes{Verb: "get", Path: "/metrics"}, s.asked[0].NonResourceAttributes)
		require.Equal(t, "system:serviceaccount:hostile:account-1", s.asked[0].User)
		require.True(t, try("honest").identity.Observer)

		// Whoever comes back when told gets a review.
		<-time.After(try("hostile").retry)
		require.True(t, try("hostile").identity.Observer)

		// All of them together wait for their budget. Nodes and the servers' namespace do not.
		for i := range reviewsOfOthersBurst {
			require.Empty(t, try(fmt.Sprintf("hostile-%d", i)).refusal)
		}
		start := time.Now()
		require.Empty(t, try("one-more").refusal)
		require.Positive(t, time.Since(start))
		start = time.Now()
		require.True(t, try("ns").identity.Observer)
		require.Zero(t, time.Since(start))
		v, err := r.review(t.Context(), s.token(good("node-1")), stream)
		require.NoError(t, err)
		require.Empty(t, v.refusal)
		require.Zero(t, time.Since(start))

		for i := range namespaces {
			require.Empty(t, try(fmt.Sprintf("one-of-many-%d", i)).refusal)
		}
		require.Equal(t, namespaces, r.namespaces.Len())
	})
}

// TestListedObservers checks that a reviewer with a list of observers asks nothing about the tokens
// of others, and that one observer with many tokens leaves the reviews of the others.
func TestListedObservers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSigner(t)
		o := s.options()
		o.Access, o.Agents, o.Relays, o.ObserversFlag = nil, nil, nil, "--observers"
		o.Observers = []types.NamespacedName{{Namespace: "monitoring", Name: "a"}, {Namespace: "monitoring", Name: "b"}}
		o.Budget, o.Share = Limit{1. / 10, 8}, Limit{1. / 60, 2}
		r := newTokenReviewer(o, nil, newReviewsCounter(nil, "agent"))
		n := 0
		try := func(account string) verdict {
			t.Helper()
			n++
			v, err := r.review(t.Context(), s.token(changed(good("node-1"), map[string]any{
				"sub": "system:serviceaccount:" + account, "jti": fmt.Sprint(n),
			})), access{verb: "get", path: "/metrics"})
			require.NoError(t, err)
			return v
		}
		for range 1000 {
			for _, tenant := range []string{"tenant:a", "tenant:b", fmt.Sprintf("tenant-%d:a", n), "ns:agent", "monitoring:c"} {
				v := try(tenant)
				require.Equal(t, codes.PermissionDenied, v.code)
				require.Contains(t, v.refusal, "add it to --observers")
			}
		}
		require.Zero(t, s.reviews)
		for i := range 100 {
			v := try("monitoring:a")
			require.Equal(t, i < 2, v.identity.Observer, i)
			require.Equal(t, i >= 2, v.retry > 0, i)
		}
		require.Equal(t, 2, s.reviews)
		require.True(t, try("monitoring:b").identity.Observer)
		<-time.After(try("monitoring:a").retry)
		require.True(t, try("monitoring:a").identity.Observer)
		require.Empty(t, s.asked)
	})
}

// TestRetryAfter checks that HTTP clients are told when to come back if their namespace's share is
// used up.
func TestRetryAfter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSigner(t)
		a := New(Options{Program: "server", Logger: slog.New(slog.DiscardHandler), Registerer: prometheus.NewRegistry()})
		a.tokens = s.reviewer()
		page := a.Observers(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
		get := func(n int) *httptest.ResponseRecorder {
			request := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/metrics", http.NoBody)
			request.Header.Set("Authorization", "Bearer "+s.token(changed(good(""), map[string]any{
				"sub": fmt.Sprintf("system:serviceaccount:monitoring:account-%d", n), "kubernetes.io": nil,
			})))
			answer := httptest.NewRecorder()
			page.ServeHTTP(answer, request)
			return answer
		}
		for n := range reviewsOfNamespaceBurst {
			require.Equal(t, http.StatusOK, get(n).Code)
		}
		refused := get(reviewsOfNamespaceBurst)
		require.Equal(t, http.StatusTooManyRequests, refused.Code)
		seconds, err := strconv.Atoi(refused.Header().Get("Retry-After"))
		require.NoError(t, err)
		<-time.After(time.Duration(seconds) * time.Second)
		require.Equal(t, http.StatusOK, get(reviewsOfNamespaceBurst).Code)
	})
}
