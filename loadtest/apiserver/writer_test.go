// These tests prove that the wait of changes for earlier requests counts as the writer's lag, and
// which existing namespaces the writer accepts. The API server is client-go's fake, and the clock a
// bubble's.
package apiserver

import (
	"context"
	"hash/maphash"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/slicecast/slicecast/loadtest/generate"
)

// TestLagOfRequests checks that the wait of changes for earlier requests counts as lag of the
// writer, not as latency of the API server.
func TestLagOfRequests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const request, changes = 10 * time.Millisecond, 20
		cluster, err := generate.New(generate.Config{
			Nodes: 1, Services: []generate.Group{{Count: 1, Least: changes, Most: changes}}, Change: generate.Flip, Namespace: "test",
		})
		require.NoError(t, err)
		client := fake.NewClientset()
		client.PrependReactor("update", "endpointslices", func(clienttesting.Action) (bool, runtime.Object, error) {
			<-time.After(request)
			return false, nil, nil
		})
		w := &Writer{client: client, namespace: "test", cluster: cluster, owners: make(map[string]types.UID), seed: maphash.MakeSeed()}
		require.NoError(t, w.fill(t.Context()))

		lag, err := w.Play(t.Context(), generate.Plan{
			Kind: generate.Flip, Schedule: generate.Schedule{Start: time.Now(), Count: changes, Rate: 1000},
		})
		require.NoError(t, err)
		require.Equal(t, (changes-1)*(request-time.Millisecond), lag.Max, "all changes are of the same slice, and one is due in each millisecond")
	})
}

func TestExistingNamespace(t *testing.T) {
	const name = "loadtest"
	namespace := func(change func(*corev1.Namespace)) *Writer {
		n := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{labelManagedBy: managedBy}}}
		change(n)
		return &Writer{client: fake.NewClientset(n), namespace: name}
	}
	terminating := func(n *corev1.Namespace) { n.DeletionTimestamp = new(metav1.Now()) }

	somebodys := namespace(func(n *corev1.Namespace) { n.Labels = nil; terminating(n) })
	require.ErrorContains(t, somebodys.makeNamespace(t.Context()), "use a name that does not exist")
	left := namespace(func(*corev1.Namespace) {})
	require.ErrorContains(t, left.makeNamespace(t.Context()), "from a run that is still running or was killed")

	synctest.Test(t, func(t *testing.T) {
		const takes = 5 * time.Second
		removed := namespace(terminating)
		removal := time.AfterFunc(takes, func() {
			// If this fails, the test fails later.
			_ = removed.client.CoreV1().Namespaces().Delete(context.Background(), name, metav1.DeleteOptions{})
		})
		defer removal.Stop()
		start := time.Now()
		require.NoError(t, removed.makeNamespace(t.Context()))
		require.GreaterOrEqual(t, time.Since(start), takes)
		made, err := removed.client.CoreV1().Namespaces().Get(t.Context(), name, metav1.GetOptions{})
		require.NoError(t, err)
		require.Nil(t, made.DeletionTimestamp)

		impatient, cancel := context.WithTimeout(t.Context(), takes)
		defer cancel()
		require.ErrorContains(t, namespace(terminating).makeNamespace(impatient), "see its status for the reason")
	})
}
