// These tests prove that Nodes carry the ranges of the ServiceCIDRs, and that the source syncs
// without these where the API server lacks or refuses them, but not before it has answered. The API
// server is a fake.
package kube

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/source/sourcetest"
)

func serviceCIDR(name string, cidrs ...string) *networkingv1.ServiceCIDR {
	return &networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: networkingv1.ServiceCIDRSpec{CIDRs: cidrs}}
}

func node(name string) *corev1.Node { return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}} }

// ranges returns the service CIDRs that the sink's Node has.
func ranges(r *sourcetest.Recorder, name string) string {
	n, ok := r.Get(model.Key{Kind: model.KindNode, Name: name}).(*model.Node)
	if !ok {
		return "no Node"
	}
	return fmt.Sprint(n.ServiceCIDRs)
}

func isServiceCIDRs(r *http.Request) bool { return strings.HasSuffix(r.URL.Path, "/servicecidrs") }

func TestNodesHaveTheServiceCIDRs(t *testing.T) {
	a := newAPI(t)
	a.put(serviceCIDR("kubernetes", "10.96.0.0/16", "fd00:10:96::/112"))
	a.put(node("n1"))
	r := start(t, a.config())
	r.awaitSynced(t)
	require.Equal(t, "[10.96.0.0/16 fd00:10:96::/112]", ranges(r.Recorder, "n1"), "from the start")
	r.Changes()
	is := func(what, want string) {
		t.Helper()
		eventually(t, what, func() bool { return ranges(r.Recorder, "n1") == want && ranges(r.Recorder, "n2") == want })
	}

	a.put(node("n2"))
	is("a Node that comes later", "[10.96.0.0/16 fd00:10:96::/112]")
	a.put(serviceCIDR("more", "10.64.0.0/16"))
	is("another ServiceCIDR", "[10.64.0.0/16 10.96.0.0/16 fd00:10:96::/112]")
	require.ElementsMatch(t, []string{"add Node n2", "change Node n1", "change Node n2"}, r.Changes())

	// A ServiceCIDR that is being deleted or not ready counts, as in kube-proxy.
	leaving := serviceCIDR("more", "10.64.0.0/16")
	now := metav1.Now()
	leaving.DeletionTimestamp = &now
	leaving.Status.Conditions = []metav1.Condition{{Type: networkingv1.ServiceCIDRConditionReady, Status: metav1.ConditionFalse}}
	a.put(leaving)
	a.put(serviceCIDR("same", "10.64.0.0/16"))
	a.put(serviceCIDR("bad", "10.0.0.0", "192.168.0.0/24"))
	is("one that is invalid in part", "[10.64.0.0/16 10.96.0.0/16 192.168.0.0/24 fd00:10:96::/112]")
	require.ElementsMatch(t, []string{"change Node n1", "change Node n2"}, r.Changes(), "the others changed nothing")
	a.delete(serviceCIDR("bad"))
	a.delete(leaving)
	is("one that two ServiceCIDRs had", "[10.64.0.0/16 10.96.0.0/16 fd00:10:96::/112]")
	a.delete(serviceCIDR("same"))
	is("one that is gone", "[10.96.0.0/16 fd00:10:96::/112]")

	// Lists show what happens while watches have expired.
	a.fail(func(w http.ResponseWriter, r *http.Request) bool {
		return refuse(w, 503, metav1.StatusReasonServiceUnavailable)
	})
	a.CloseClientConnections()
	a.delete(serviceCIDR("kubernetes"))
	a.put(serviceCIDR("new", "10.97.0.0/16"))
	a.delete(node("n2"))
	a.put(node("n3"))
	a.compact()
	a.fail(nil)
	eventually(t, "the lists", func() bool {
		return ranges(r.Recorder, "n1") == "[10.97.0.0/16]" && ranges(r.Recorder, "n2") == "no Node" && ranges(r.Recorder, "n3") == "[10.97.0.0/16]"
	})
}

func TestSyncsWithoutServiceCIDRs(t *testing.T) {
	for name, c := range map[string]struct {
		code   int
		reason metav1.StatusReason
		log    string // must be logged once
		errors float64
	}{
		"before Kubernetes 1.33": {404, metav1.StatusReasonNotFound, "level=INFO msg=\"API server has no ServiceCIDRs", 0},
		"without the right":      {403, metav1.StatusReasonForbidden, "level=WARN msg=\"Not allowed to list ServiceCIDRs, continuing without them: agents do not learn the ranges of cluster IPs; allow list and watch of servicecidrs.networking.k8s.io", 0},
		"with another error":     {500, metav1.StatusReasonInternalError, "Request to the API server failed", 1},
	} {
		t.Run(name, func(t *testing.T) {
			a := newAPI(t)
			a.put(node("n1"))
			a.put(serviceCIDR("kubernetes", "10.96.0.0/16"))
			var asked atomic.Int32
			a.fail(func(w http.ResponseWriter, r *http.Request) bool {
				if !isServiceCIDRs(r) {
					return false
				}
				asked.Add(1)
				return refuse(w, c.code, c.reason)
			})
			// The handler writes one record at a time, and the test reads it after the source has
			// ended.
			var log bytes.Buffer
			s, err := New(Options{Config: a.config(), Log: slog.New(slog.NewTextHandler(&log, nil)), Metrics: prometheus.NewRegistry()})
			require.NoError(t, err)
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			sink := sourcetest.New()
			done := make(chan error, 1)
			go func() { done <- s.Run(ctx, sink) }()
			eventually(t, "the first sync", sink.IsSynced)
			eventually(t, "more attempts", func() bool { return asked.Load() >= 6 })
			require.Equal(t, "[]", ranges(sink, "n1"))
			kinds := 3 // an alert on old events must not wait for those of ServiceCIDRs
			if c.errors > 0 {
				kinds = 4
			}
			require.Equal(t, kinds, testutil.CollectAndCount(s.resources[0].metrics.lastEvent))

			a.fail(nil)
			eventually(t, "ServiceCIDRs once they can be seen", func() bool { return ranges(sink, "n1") == "[10.96.0.0/16]" })
			require.Equal(t, 4, testutil.CollectAndCount(s.resources[0].metrics.lastEvent))
			cancel()
			require.NoError(t, <-done)
			require.Equal(t, 1, strings.Count(log.String(), c.log), log.String())
			errors := testutil.ToFloat64(s.resources[0].metrics.errors.WithLabelValues("ServiceCIDR", "list"))
			require.Equal(t, c.errors > 0, errors > 0)
		})
	}
}

// TestSyncWaitsForAnAnswerAboutServiceCIDRs checks that a server does not sync before the API
// server has answered whether there are ServiceCIDRs. With a guess, nodes might be programmed
// twice.
func TestSyncWaitsForAnAnswerAboutServiceCIDRs(t *testing.T) {
	a := newAPI(t)
	a.put(node("n1"))
	a.put(serviceCIDR("kubernetes", "10.96.0.0/16"))
	var asked atomic.Int32
	a.fail(func(w http.ResponseWriter, r *http.Request) bool {
		if !isServiceCIDRs(r) {
			return false
		}
		asked.Add(1)
		panic(http.ErrAbortHandler)
	})
	r := start(t, a.config())
	eventually(t, "attempts", func() bool { return asked.Load() >= 4 && r.Replaced(model.KindNode) == 1 })
	require.False(t, r.IsSynced())
	a.fail(nil)
	r.awaitSynced(t)
	require.Equal(t, "[10.96.0.0/16]", ranges(r.Recorder, "n1"))
}
