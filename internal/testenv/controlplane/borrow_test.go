// This test proves that a control plane that another process lends through a socket works like
// one's own, for one user at a time.
package controlplane

import (
	"io"
	"net"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
)

// TestLent requires that a control plane reached through a socket works like one's own, for one
// user at a time.
func TestLent(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "api")
	listener, err := net.Listen("unix", socket)
	require.NoError(t, err)
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			near, err := listener.Accept()
			if err != nil {
				return
			}
			serving.Go(func() {
				defer near.Close()
				far, err := net.Dial("tcp", shared.endpoint.String())
				if err != nil {
					return
				}
				var back sync.WaitGroup
				back.Go(func() { _, _ = io.Copy(near, far) })
				_, _ = io.Copy(far, near)
				_ = far.Close()
				back.Wait()
			})
		}
	})
	t.Cleanup(func() {
		require.NoError(t, listener.Close())
		serving.Wait()
	})
	t.Setenv(LentVariable, Lend([]*ControlPlane{shared}, func(port uint16) string {
		require.Equal(t, shared.Port(), port)
		return socket
	}))
	for _, who := range []string{"first", "second"} {
		t.Run(who, func(t *testing.T) {
			cp := Start(t, Options{})
			require.NotEqual(t, shared.URL(), cp.URL())
			config, err := clientcmd.BuildConfigFromFlags("", cp.Kubeconfig(t, cp.AdminConfig()))
			require.NoError(t, err)
			client, err := kubernetes.NewForConfig(config)
			require.NoError(t, err)
			_, err = client.CoreV1().Namespaces().Get(t.Context(), cp.Namespace(t), metav1.GetOptions{})
			require.NoError(t, err)
			_, err = start(t.Context(), Options{}, t.Logf)
			require.ErrorContains(t, err, "all lent control planes are in use")
		})
	}
	_, err = start(t.Context(), Options{Controllers: true}, t.Logf)
	require.ErrorContains(t, err, "no controllers")
}
