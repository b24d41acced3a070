// These tests prove that a request that nobody answers counts as a failure, although client-go
// returns no error, or returns one much later.
package kube

import (
	"context"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
)

func TestUnansweredWatch(t *testing.T) {
	answer := watch.NewEmptyWatch()
	r := &resource{
		shared: shared{metrics: newMetrics(prometheus.NewRegistry())}, log: slog.New(slog.DiscardHandler),
		server: &cache.ListWatch{WatchFuncWithContext: func(context.Context, metav1.ListOptions) (watch.Interface, error) {
			return answer, nil
		}},
	}
	r.contact.succeed(time.Now())
	all := true
	open := func() {
		t.Helper()
		w, err := r.openWatch(t.Context(), metav1.ListOptions{SendInitialEvents: &all})
		require.NoError(t, err)
		w.Stop()
	}
	open()
	since, why := r.contact.stale(time.Now())
	require.False(t, since.IsZero())
	require.Equal(t, errNoWatch.Error(), why)
	open()
	again, _ := r.contact.stale(time.Now())
	require.Equal(t, since, again, "the first failure counts")
	answer = watch.NewFake()
	open()
	since, _ = r.contact.stale(time.Now())
	require.Zero(t, since)
}

// TestRequestThatHangs checks that the source does not wait until a request fails, which takes 30 s
// if packets to the API server are dropped.
func TestRequestThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hang := func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
		r := &resource{
			shared: shared{metrics: newMetrics(prometheus.NewRegistry())}, log: slog.New(slog.DiscardHandler),
			server: &cache.ListWatch{
				ListWithContextFunc: func(ctx context.Context, _ metav1.ListOptions) (runtime.Object, error) { return nil, hang(ctx) },
				WatchFuncWithContext: func(ctx context.Context, _ metav1.ListOptions) (watch.Interface, error) {
					return nil, hang(ctx)
				},
			},
		}
		all := true
		for name, request := range map[string]func(ctx context.Context) error{
			"list": func(ctx context.Context) error { _, err := r.list(ctx, metav1.ListOptions{}); return err },
			"watch": func(ctx context.Context) error {
				_, err := r.openWatch(ctx, metav1.ListOptions{SendInitialEvents: &all})
				return err
			},
		} {
			r.contact.succeed(time.Now())
			began := time.Now()
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error)
			go func() { done <- request(ctx) }()
			<-time.After(askOnce)
			since, why := r.contact.stale(time.Now())
			require.Zero(t, since, "%s: %s", name, why)
			<-time.After(time.Second)
			since, why = r.contact.stale(time.Now())
			require.Equal(t, began, since, name)
			require.Contains(t, why, "has not answered")
			cancel()
			require.Error(t, <-done)
			since, _ = r.contact.stale(time.Now())
			require.Zero(t, since, "%s: the request has ended", name)
		}
	})
}
