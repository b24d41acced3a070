// This test proves that the source follows a cluster whose real etcd was put back to a copy of its
// data, although the API server accepts watches from lost resourceVersions in silence.
package kube

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/slicecast/slicecast/internal/testenv/controlplane"
)

// TestEtcdRestoredFromABackup puts a real etcd back to a copy of its data. The cluster then has the
// objects of the copy. Its API server silently accepts watches from resourceVersions that are lost.
func TestEtcdRestoredFromABackup(t *testing.T) {
	cp := controlplane.Start(t, controlplane.Options{})
	ctx := context.Background()
	client := cp.Client()
	create := func(name string) {
		s := service(name)
		s.Spec.ClusterIP, s.Spec.ClusterIPs = "", nil
		_, err := client.CoreV1().Services("default").Create(ctx, s, metav1.CreateOptions{})
		require.NoError(t, err)
	}
	create("old")
	config, err := Config(cp.Kubeconfig(t, cp.AdminConfig()))
	require.NoError(t, err)
	r := start(t, config)
	r.awaitSynced(t)

	backup, err := cp.BackUpEtcd(ctx)
	require.NoError(t, err)
	for i := range 200 {
		create(fmt.Sprintf("s%d", i))
	}
	eventually(t, "all before", func() bool { return r.Get(serviceKey("s199")) != nil })

	require.NoError(t, cp.RestoreEtcd(ctx, backup))
	create("after")
	require.Eventually(t, func() bool { return r.Get(serviceKey("after")) != nil && r.Get(serviceKey("s199")) == nil }, 3*time.Minute, 50*time.Millisecond, "what the backup has, and what came after")
	require.NotNil(t, r.Get(serviceKey("old")))
}
