// This test proves that requests to the API server are counted and measured as in the components of
// Kubernetes.
package kube

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"k8s.io/client-go/rest"

	"github.com/slicecast/slicecast/internal/model"
)

func TestClientMetrics(t *testing.T) {
	server := httptest.NewServer(http.NotFoundHandler())
	defer server.Close()
	r := prometheus.NewRegistry()
	RegisterClientMetrics(r)
	list, err := Slices(&rest.Config{Host: server.URL}, model.ServiceKey{Namespace: "a", Name: "b"})
	require.NoError(t, err)
	_, err = list(t.Context())
	require.Error(t, err)
	host := strings.TrimPrefix(server.URL, "http://")
	require.Equal(t, 1.0, testutil.ToFloat64(clientRequests.WithLabelValues("404", http.MethodGet, host)))
	families, err := r.Gather()
	require.NoError(t, err)
	require.Len(t, families, 2)
	require.Equal(t, "rest_client_request_duration_seconds", families[0].GetName())
	require.NotZero(t, families[0].GetMetric()[0].GetHistogram().GetSampleCount())
}
