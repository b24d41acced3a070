// These tests prove that several servers, with a real kube-apiserver, share one CA and one
// certificate, publish what clients must trust, and come back from every loss.
package certificates

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/slicecast/slicecast/internal/source/kube"
	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/controlplane"
)

func TestMain(m *testing.M) {
	testenv.Main(m, func() error {
		_, err := controlplane.KubernetesBinary(context.Background(), "kube-apiserver")
		return err
	})
}

// replicas are the servers of one Deployment, with one clock.
type replicas struct {
	t       *testing.T
	client  kubernetes.Interface
	mu      sync.Mutex
	now     time.Time // guarded by mu
	servers []*Manager
}

func startReplicas(t *testing.T, n int) *replicas {
	cp := controlplane.Start(t, controlplane.Options{})
	r := &replicas{t: t, client: cp.Client(), now: time.Now()}
	for _, namespace := range []string{"servers", "agents"} {
		_, err := r.client.CoreV1().Namespaces().Create(t.Context(),
			&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, metav1.CreateOptions{})
		require.NoError(t, err)
	}
	for range n {
		core, err := kube.Core(cp.AdminConfig())
		require.NoError(t, err)
		r.servers = append(r.servers, New(Options{
			Client: core, Secret: types.NamespacedName{Namespace: "servers", Name: "tls"},
			ConfigMaps: []types.NamespacedName{{Namespace: "servers", Name: "ca"}, {Namespace: "agents", Name: "ca"}},
			Names:      []string{serverName}, Now: r.clock, Log: slog.New(slog.DiscardHandler),
		}))
	}
	return r
}

func (r *replicas) clock() time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.now
}

// look lets all servers look at once, after some time. It requires that all of them use what the
// Secret has and clients accept, and returns the Secret.
func (r *replicas) look(after time.Duration) *corev1.Secret {
	r.t.Helper()
	r.mu.Lock()
	r.now = r.now.Add(after)
	r.mu.Unlock()
	for range 2 { // the second time, each server sees what the others have written
		var all errgroup.Group
		for _, m := range r.servers {
			all.Go(func() error { return m.look(r.t.Context()) })
		}
		require.NoError(r.t, all.Wait())
	}
	secret, err := r.client.CoreV1().Secrets("servers").Get(r.t.Context(), "tls", metav1.GetOptions{})
	require.NoError(r.t, err)
	for _, m := range r.servers {
		content, err := m.Content()
		require.NoError(r.t, err)
		require.Equal(r.t, secret.Data[corev1.TLSCertKey], content.Certificate)
		require.Equal(r.t, secret.Data[corev1.TLSPrivateKeyKey], content.PrivateKey)
		require.Equal(r.t, secret.Data[caBundleKey], content.CA)
		for _, of := range m.ConfigMaps {
			bundle, err := r.client.CoreV1().ConfigMaps(of.Namespace).Get(r.t.Context(), of.Name, metav1.GetOptions{})
			require.NoError(r.t, err)
			require.Equal(r.t, map[string]string{caBundleKey: string(content.CA)}, bundle.Data)
		}
	}
	verify(r.t, secret.Data, secret.Data[caBundleKey], r.clock())
	return secret
}

func TestReplicas(t *testing.T) {
	r := startReplicas(t, 5)
	_, err := r.servers[0].Content()
	require.ErrorContains(t, err, "no certificate from the Secret servers/tls yet")
	first := r.look(0)
	require.Equal(t, first.ResourceVersion, r.look(day).ResourceVersion, "nothing is due")

	second := r.look(servingLife - servingRenewal)
	require.NotEqual(t, first.Data[corev1.TLSCertKey], second.Data[corev1.TLSCertKey])
	require.Equal(t, first.Data[caBundleKey], second.Data[caBundleKey])
	require.Equal(t, second.ResourceVersion, r.look(0).ResourceVersion)

	secrets, bundles := r.client.CoreV1().Secrets("servers"), r.client.CoreV1().ConfigMaps("agents")
	require.NoError(t, bundles.Delete(t.Context(), "ca", metav1.DeleteOptions{}))
	require.Equal(t, second.ResourceVersion, r.look(0).ResourceVersion)
	require.NoError(t, secrets.Delete(t.Context(), "tls", metav1.DeleteOptions{}))
	third := r.look(0)
	require.NotEqual(t, second.Data[caKeyKey], third.Data[caKeyKey])

	// What somebody breaks is mended.
	broken := third.DeepCopy()
	broken.Data[caKeyKey] = []byte("x")
	_, err = secrets.Update(t.Context(), broken, metav1.UpdateOptions{})
	require.NoError(t, err)
	fourth := r.look(0)
	require.Contains(t, string(fourth.Data[caBundleKey]), string(third.Data[caBundleKey]))
}

// TestRun starts all servers at once, like a new Deployment.
func TestRun(t *testing.T) {
	r := startReplicas(t, 3)
	ctx, stop := context.WithCancel(t.Context())
	var all sync.WaitGroup
	for _, m := range r.servers {
		all.Go(func() { m.Run(ctx) })
	}
	require.Eventually(t, func() bool {
		seen := map[string]bool{}
		for _, m := range r.servers {
			content, err := m.Content()
			seen[fmt.Sprint(string(content.Certificate), err)] = true
		}
		_, err := r.servers[0].Content()
		return len(seen) == 1 && err == nil
	}, time.Minute, 10*time.Millisecond)
	stop()
	all.Wait()
}
