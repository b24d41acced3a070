// This test proves that an API server that is held back answers as a real one does whose watch
// cache is behind etcd: it lists what its cache has, and refuses versions that the cache lacks.
package simulate

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestHeldAPIServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		write := func(e *etcd) { // objects need no content here
			e.put(services, "svc-0", func(version uint64) any { return metav1.ObjectMeta{Name: "svc-0"} })
		}
		e := newEtcd()
		write(e)
		a := &apiServer{etcd: e, address: address("10.0.9.%d", 1, 6443), network: newNetwork()}
		a.start()
		defer a.kill()
		ask := func(query string) (code int, body string, took time.Duration) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute/2) // ends watches
			defer cancel()
			begin, w := time.Now(), httptest.NewRecorder()
			a.ServeHTTP(w, httptest.NewRequestWithContext(ctx, http.MethodGet, "/api/v1/services?"+query, nil))
			return w.Code, w.Body.String(), time.Since(begin)
		}
		version := func(body string) string {
			var list metav1.List
			require.NoError(t, json.Unmarshal([]byte(body), &list))
			return list.ResourceVersion
		}
		require.True(t, a.hold(true))
		require.False(t, a.hold(true))
		write(e)
		for _, c := range []struct {
			query, version string
			took           time.Duration
		}{
			{"resourceVersion=0", "101", 0},
			{"resourceVersion=101&resourceVersionMatch=NotOlderThan", "101", 0},
			{"", "102", freshTime}, // the API server asks etcd when its cache is late
		} {
			code, body, took := ask(c.query)
			require.Equal(t, http.StatusOK, code, c.query)
			require.Equal(t, c.version, version(body), c.query)
			require.Equal(t, c.took, took, c.query)
		}
		const streamed = "watch=true&sendInitialEvents=true&resourceVersion="
		for _, query := range []string{"resourceVersion=102&resourceVersionMatch=NotOlderThan", streamed + "102", streamed} {
			code, body, took := ask(query)
			require.Equal(t, http.StatusGatewayTimeout, code, query)
			require.Contains(t, body, metav1.CauseTypeResourceVersionTooLarge, query)
			require.Equal(t, freshTime, took, query)
		}
		// etcd's compaction does not concern the watch cache.
		e.compact()
		for _, query := range []string{"watch=true&resourceVersion=101", streamed + "0"} {
			code, body, _ := ask(query)
			require.Equal(t, http.StatusOK, code, query)
			require.NotContains(t, body, "ERROR", query)
			require.Equal(t, strings.Contains(query, "Initial"), strings.Contains(body, `"resourceVersion":"101"`), query)
		}
		require.True(t, a.hold(false))
		_, body, took := ask("resourceVersion=0")
		require.Equal(t, "103", version(body))
		require.Zero(t, took)
		_, body, _ = ask("watch=true&resourceVersion=101")
		require.Contains(t, body, metav1.StatusReasonExpired)
	})
}
