// This test proves that a request for a watch that nobody answers counts as a failure, although
// client-go returns no error.
package kube

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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
		_, err := r.openWatch(t.Context(), metav1.ListOptions{SendInitialEvents: &all})
		require.NoError(t, err)
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
