// These tests prove that what is left out of an object counts in the metric while it lasts, and is
// logged once, and that tenants cannot fill the log this way.
package source

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/bounded"
	"github.com/slicecast/slicecast/internal/model"
)

func TestSkipsAreCountedWhileTheyLastAndLoggedOnce(t *testing.T) {
	var log bytes.Buffer
	registry := prometheus.NewRegistry()
	skips := NewSkips(slog.New(slog.NewTextHandler(&log, nil)), registry)
	count := func(kind, reason string) float64 {
		return testutil.ToFloat64(skips.gauge.WithLabelValues(kind, reason))
	}
	web := model.Key{Kind: model.KindService, Namespace: "default", Name: "web"}
	db := model.Key{Kind: model.KindService, Namespace: "default", Name: "db"}
	slice := model.Key{Kind: model.KindSlice, Namespace: "default", Name: "web-1"}
	bad := []Skip{{InvalidPort, "spec.ports[0].port", "0 is not within 1 to 65535"}}

	for range 3 {
		skips.Set(web, bad)
	}
	require.Equal(t, 1.0, count("Service", "invalid_port"))
	require.Equal(t, 1, strings.Count(log.String(), "\n"), log.String())
	for _, want := range []string{"Service default/web", "spec.ports[0].port", "invalid_port", "0 is not within"} {
		require.Contains(t, log.String(), want)
	}

	skips.Set(web, []Skip{{Headless, "spec.clusterIP", "is None"}})
	require.Equal(t, 0.0, count("Service", "invalid_port"))
	require.Equal(t, 1.0, count("Service", "headless"))
	require.Equal(t, 1, strings.Count(log.String(), "\n"), "what is normal is for debugging only")

	skips.Set(slice, []Skip{{FQDN, "addressType", "is FQDN"}})
	skips.Replace(map[model.Key][]Skip{db: bad}, model.KindService)
	require.Equal(t, 0.0, count("Service", "headless"))
	require.Equal(t, 1.0, count("Service", "invalid_port"))
	require.Equal(t, 1.0, count("EndpointSlice", "fqdn"), "another kind")
	skips.Set(db, nil)
	require.Equal(t, 0.0, count("Service", "invalid_port"))

	skips.Set(model.Key{Kind: model.KindServiceCIDR, Name: allServiceCIDRs}, []Skip{{TooMany, "spec.cidrs", "too many"}})
	skips.Replace(nil, model.KindServiceCIDR)
	require.Equal(t, 1.0, count("ServiceCIDR", "too_many"), "Replace does not concern all ServiceCIDRs together")
}

// TestATenantDoesNotFillTheLog asserts that an object which is invalid over and over costs no line
// each time, and does not keep the objects of others out of the log.
func TestATenantDoesNotFillTheLog(t *testing.T) {
	var log bytes.Buffer
	skips := NewSkips(slog.New(slog.NewTextHandler(&log, nil)), prometheus.NewRegistry())
	bad := []Skip{{InvalidPort, "spec.ports[0].port", "0 is not within 1 to 65535"}}
	for range 100 {
		web := model.Key{Kind: model.KindService, Namespace: "tenant", Name: "web"}
		skips.Set(web, bad)
		skips.Set(web, nil)
	}
	skips.Set(model.Key{Kind: model.KindService, Namespace: "other", Name: "web"}, bad)
	require.Equal(t, bounded.LinesOfNamespaceAtOnce, strings.Count(log.String(), "Service tenant/web"))
	require.Equal(t, 1, strings.Count(log.String(), "Service other/web"))
}
