// These tests prove that a caller is told in time that the server cannot reach the API server, and
// what to do about it.
package auth

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	authenticationv1 "k8s.io/api/authentication/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// pluginTimeout is the default of kubectl slicecast's --timeout.
const pluginTimeout = 10 * time.Second

// TestSilentAPIServer checks the answer to a caller while packets to the API server are dropped:
// with and without the keys that were read before.
func TestSilentAPIServer(t *testing.T) {
	for name, known := range map[string]bool{"keys are known": true, "keys must be read": false} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newSigner(t)
				r := s.reviewer()
				a := New(Options{
					Program: "server", Diagnosis: "kubectl -n ns exec server-0 -- slicecast-server status",
					Logger: slog.New(slog.DiscardHandler), Registerer: prometheus.NewRegistry(),
				})
				a.tokens = r
				ask := func(node string) error {
					ctx := metadata.NewIncomingContext(t.Context(), metadata.Pairs("authorization", "Bearer "+s.token(good(node))))
					_, err := a.Credentials(ctx, stream.path)
					return err
				}
				if known {
					require.NoError(t, ask("node-1"))
					<-time.After(keysLife + time.Second) // they are to be read again
				}
				r.options.Review = func(ctx context.Context, _ *authenticationv1.TokenReview) (*authenticationv1.TokenReview, error) {
					<-ctx.Done()
					return nil, ctx.Err()
				}
				r.keys.get = func(ctx context.Context, _ string) ([]byte, error) {
					<-ctx.Done()
					return nil, ctx.Err()
				}
				for range 3 {
					begin := time.Now()
					err := ask("node-2")
					require.LessOrEqual(t, time.Since(begin), pluginTimeout/2+time.Second)
					require.Equal(t, codes.Unavailable, status.Code(err), "%v", err)
					require.ErrorContains(t, err, "this server cannot reach the API server to have the token reviewed")
					require.ErrorContains(t, err, "no answer within 5s")
					require.ErrorContains(t, err, "kubectl -n ns exec server-0 -- slicecast-server status")
					<-time.After(time.Minute)
				}
			})
		})
	}
}

// TestSilentKeys checks that tokens are reviewed although newer keys do not come.
func TestSilentKeys(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSigner(t)
		r := s.reviewer()
		review := func(node string) {
			t.Helper()
			v, err := r.review(t.Context(), s.token(good(node)), stream)
			require.NoError(t, err)
			require.Empty(t, v.refusal)
		}
		review("node-1")
		<-time.After(keysLife + time.Second) // they are to be read again
		r.keys.get = func(ctx context.Context, _ string) ([]byte, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		}
		begin := time.Now()
		review("node-2")
		require.Equal(t, refreshTimeout, time.Since(begin))
		<-time.After(keysTimeout) // the read ends
	})
}

// TestBusyBudget checks that a review whose turn would come too late to be answered has none.
func TestBusyBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSigner(t)
		r := s.reviewer()
		slow := reviewTimeout - budgetTimeout - time.Millisecond
		review := r.options.Review
		r.options.Review = func(ctx context.Context, tr *authenticationv1.TokenReview) (*authenticationv1.TokenReview, error) {
			<-time.After(slow)
			return review(ctx, tr)
		}
		var all sync.WaitGroup
		for i := range 2 * (reviewsOfUnknownBurst + reviewsOfUnknown*int(reviewTimeout/time.Second)) {
			token := s.token(good(fmt.Sprintf("unknown-%d", i)))
			all.Go(func() {
				v, err := r.review(t.Context(), token, stream)
				if err != nil {
					t.Error(err)
				}
				if v.refusal != "" && v.reason != reasonTooManyReviews {
					t.Error(v.refusal)
				}
			})
		}
		all.Wait()
	})
}

// TestRefusedReview checks that an API server that answers is not said to be out of reach.
func TestRefusedReview(t *testing.T) {
	a := &Auth{options: Options{Program: "server", Diagnosis: "command"}}
	resource := schema.GroupResource{Resource: "tokenreviews"}
	answered := a.unreviewed(apierrors.NewForbidden(resource, "", errors.New("not allowed")))
	require.Contains(t, answered, "the API server did not review the token")
	require.NotContains(t, answered, "command")
	require.Contains(t, a.unreviewed(errors.New("connection refused")), "connection refused")
}
