// This test proves that a compaction of etcd makes it forget earlier revisions.
package controlplane

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestEtcdForgetsWhatWasCompacted(t *testing.T) {
	first := map[string]any{"key": "AA==", "revision": "2", "count_only": true}
	require.NoError(t, shared.etcd(t.Context(), "/v3/kv/range", first, nil))
	require.NoError(t, shared.CompactEtcd(t.Context()))
	err := shared.etcd(t.Context(), "/v3/kv/range", first, nil)
	require.ErrorContains(t, err, "compacted")
}
