// These tests prove that the source follows an API server through expired watches, cut lists,
// refused requests and a state that goes back in time, without a removal that did not happen. The
// API server is a fake that fails on request; real_test.go uses a real one.
package kube

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/source"
	"github.com/slicecast/slicecast/internal/source/sourcetest"
)

const patience = 30 * time.Second

type running struct {
	*sourcetest.Recorder
	source   *Source
	stop     func() // stops the source and waits for its end
	registry *prometheus.Registry
	log      words
}

// words is what a source has logged.
type words struct {
	mu   sync.Mutex // guards text
	text strings.Builder
}

// Write implements io.Writer.
func (w *words) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.text.Write(p)
}

func (w *words) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.text.String()
}

// start runs a source until the test ends.
func start(t *testing.T, config *rest.Config) *running {
	t.Helper()
	registry := prometheus.NewRegistry()
	r := &running{Recorder: sourcetest.New(), registry: registry}
	var err error
	r.source, err = New(Options{
		Config: config, Log: slog.New(slog.NewTextHandler(io.MultiWriter(t.Output(), &r.log), nil)), Metrics: registry,
	})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.source.Run(ctx, r.Recorder) }()
	stopped := false
	r.stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		select {
		case err := <-done:
			require.NoError(t, err)
		case <-time.After(patience):
			require.FailNow(t, "the source does not stop")
		}
	}
	t.Cleanup(r.stop)
	return r
}

func (r *running) metrics() *metrics { return r.source.resources[0].metrics }

func (r *running) awaitSynced(t *testing.T) {
	t.Helper()
	eventually(t, "the first sync", r.IsSynced)
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	require.Eventually(t, ok, patience, 5*time.Millisecond, what)
}

func service(name string) *corev1.Service {
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeClusterIP, ClusterIP: "10.96.0.10", ClusterIPs: []string{"10.96.0.10"},
			Ports: []corev1.ServicePort{{Protocol: corev1.ProtocolTCP, Port: 80}},
		},
	}
}

func slice(name string) *discoveryv1.EndpointSlice {
	return &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "default", Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: "web"}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{"10.0.0.1"}}},
	}
}

func serviceKey(name string) model.Key {
	return model.Key{Kind: model.KindService, Namespace: "default", Name: name}
}

var allKinds = []model.Kind{model.KindService, model.KindSlice, model.KindNode}

func TestListsAndFollows(t *testing.T) {
	a := newAPI(t)
	a.put(service("web"))
	a.put(slice("web-1"))
	a.put(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1"}})
	r := start(t, a.config())
	r.awaitSynced(t)
	require.Equal(t, []string{"Service default/web", "EndpointSlice default/web-1", "Node n1"}, r.Keys(allKinds...))
	r.Changes()

	a.put(service("db"))
	eventually(t, "an added Service", func() bool { return r.Get(serviceKey("db")) != nil })
	a.delete(service("db"))
	eventually(t, "a deleted Service", func() bool { return r.Get(serviceKey("db")) == nil })
	require.Equal(t, uint64(105), r.Highest())

	for name, change := range map[string]func(*corev1.Service){
		"ExternalName": func(s *corev1.Service) { s.Spec = corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName} },
		"headless":     func(s *corev1.Service) { s.Spec.ClusterIP, s.Spec.ClusterIPs = "None", []string{"None"} },
		"other proxy":  func(s *corev1.Service) { s.Labels = map[string]string{source.LabelServiceProxyName: "other"} },
	} {
		s := service("web")
		change(s)
		a.put(s)
		eventually(t, name+" removes what was held", func() bool { return r.Get(serviceKey("web")) == nil })
		a.put(service("web"))
		eventually(t, "no longer "+name, func() bool { return r.Get(serviceKey("web")) != nil })
	}

	services := a.seen(isServices)
	require.NotEmpty(t, services)
	require.Equal(t, "!service.kubernetes.io/service-proxy-name", services[0].FormValue("labelSelector"))
	require.Equal(t, "spec.clusterIP!=None", services[0].FormValue("fieldSelector"))
	require.Equal(t, 1.0, testutil.ToFloat64(r.metrics().lists.WithLabelValues("Service")))
	require.InDelta(t, time.Now().Unix(), testutil.ToFloat64(r.metrics().lastEvent.WithLabelValues("Service")), 60)
}

func TestServesTheNamedProxy(t *testing.T) {
	a := newAPI(t)
	s, err := New(Options{
		Config: a.config(), ServiceProxyName: "mine", Log: slog.New(slog.DiscardHandler), Metrics: prometheus.NewRegistry(),
	})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	sink := sourcetest.New()
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx, sink) }()
	eventually(t, "the first sync", sink.IsSynced)
	cancel()
	require.NoError(t, <-done)
	require.Equal(t, "service.kubernetes.io/service-proxy-name=mine", a.seen(isServices)[0].FormValue("labelSelector"))
	require.Equal(t, "!service.kubernetes.io/headless", a.seen(func(r *http.Request) bool {
		return strings.HasSuffix(r.URL.Path, "/endpointslices")
	})[0].FormValue("labelSelector"))
}

// noStreams is a fault that makes the API server refuse to stream lists.
func noStreams(w http.ResponseWriter, r *http.Request) bool {
	return isStream(r) && refuse(w, http.StatusUnprocessableEntity, metav1.StatusReasonInvalid)
}

func TestPagedListsWhereListsAreNotStreamed(t *testing.T) {
	a := newAPI(t)
	for i := range 1201 {
		a.put(service(fmt.Sprintf("s%04d", i)))
	}
	a.fail(noStreams)
	r := start(t, a.config())
	r.awaitSynced(t)
	require.Len(t, r.Keys(model.KindService), 1201)
	a.put(service("web"))
	eventually(t, "an added Service", func() bool { return r.Get(serviceKey("web")) != nil })
	lists := a.seen(func(r *http.Request) bool { return isServices(r) && !isWatch(r) && r.FormValue("limit") != "1" })
	require.Len(t, lists, 3)
	require.Empty(t, lists[0].FormValue("resourceVersion"), "the first list must be of the present")
}

func TestExpiredWatchIsReplacedByAListWithoutAWrongRemoval(t *testing.T) {
	for name, fault := range map[string]func(http.ResponseWriter, *http.Request) bool{"streamed": nil, "paged": noStreams} {
		t.Run(name, func(t *testing.T) {
			a := newAPI(t)
			a.fail(fault)
			a.put(service("stays"))
			a.put(service("goes"))
			r := start(t, a.config())
			r.awaitSynced(t)
			r.Changes()

			a.fail(func(w http.ResponseWriter, r *http.Request) bool {
				return refuse(w, 503, metav1.StatusReasonServiceUnavailable)
			})
			a.CloseClientConnections()
			errors := r.metrics().errors.WithLabelValues("Service", "watch")
			eventually(t, "failed requests", func() bool { return testutil.ToFloat64(errors) > 0 })
			a.delete(service("goes"))
			a.put(service("comes"))
			a.compact()
			require.Empty(t, r.Changes(), "nothing changes while the API server fails")
			a.fail(fault)

			eventually(t, "the list", func() bool { return r.Replaced(model.KindService) == 2 && r.Get(serviceKey("comes")) != nil })
			require.Equal(t, []string{"add Service default/comes", "remove Service default/goes"}, r.Changes())
		})
	}
}

func TestExpiryInTheMiddleOfAWatch(t *testing.T) {
	a := newAPI(t)
	a.put(service("web"))
	r := start(t, a.config())
	r.awaitSynced(t)
	r.Changes()
	a.compact()
	a.CloseClientConnections()
	eventually(t, "a new list", func() bool { return r.Replaced(model.KindService) == 2 })
	a.put(service("db"))
	eventually(t, "an added Service", func() bool { return r.Get(serviceKey("db")) != nil })
	require.Equal(t, []string{"add Service default/db"}, r.Changes())
}

func TestDroppedConnectionResumesTheWatch(t *testing.T) {
	a := newAPI(t)
	a.put(service("web"))
	r := start(t, a.config())
	r.awaitSynced(t)
	for i := range 5 {
		a.CloseClientConnections()
		name := fmt.Sprintf("s%d", i)
		a.put(service(name))
		a.delete(service("s0"))
		eventually(t, "a Service added meanwhile", func() bool { return r.Get(serviceKey(name)) != nil || name == "s0" })
	}
	eventually(t, "all of it", func() bool {
		return strings.Join(r.Keys(model.KindService), " ") == "Service default/s1 Service default/s2 Service default/s3 Service default/s4 Service default/web"
	})
	require.NotContains(t, r.Changes(), "remove Service default/web")
}

// TestCutLists checks lists that end too early, in every way that HTTP allows.
func TestCutLists(t *testing.T) {
	for name, cut := range map[string]func(w http.ResponseWriter, r *http.Request) bool{
		"in a page": func(w http.ResponseWriter, r *http.Request) bool {
			w.Header().Set("Content-Type", "application/json")
			_, _ = w.Write([]byte(`{"apiVersion":"v1","kind":"ServiceList","metadata":{"resourceVersion":"100000"},"items":[`))
			w.(http.Flusher).Flush()
			panic(http.ErrAbortHandler)
		},
		"at a second page": func(w http.ResponseWriter, r *http.Request) bool {
			return r.FormValue("continue") != "" && refuse(w, 500, metav1.StatusReasonInternalError)
		},
		"length not reached": func(w http.ResponseWriter, r *http.Request) bool {
			w.Header().Set("Content-Type", "application/json")
			body := `{"apiVersion":"v1","kind":"ServiceList","metadata":{"resourceVersion":"100000"},"items":[]}`
			w.Header().Set("Content-Length", fmt.Sprint(len(body)+10))
			_, _ = w.Write([]byte(body))
			return true
		},
		"another kind": func(w http.ResponseWriter, r *http.Request) bool {
			w.Header().Set("Content-Type", "application/json")
			_, _ = w.Write([]byte(`{"apiVersion":"v1","kind":"Status","status":"Success","metadata":{"resourceVersion":"100000"}}`))
			return true
		},
		"no kind": func(w http.ResponseWriter, r *http.Request) bool {
			w.Header().Set("Content-Type", "application/json")
			_, _ = w.Write([]byte(`{}`))
			return true
		},
		"empty, without a version": func(w http.ResponseWriter, r *http.Request) bool {
			w.Header().Set("Content-Type", "application/json")
			_, _ = w.Write([]byte(`{"apiVersion":"v1","kind":"ServiceList","metadata":{},"items":[]}`))
			return true
		},
	} {
		t.Run(name, func(t *testing.T) {
			a := newAPI(t)
			a.fail(noStreams)
			for i := range 501 {
				a.put(service(fmt.Sprintf("s%04d", i)))
			}
			r := start(t, a.config())
			r.awaitSynced(t)
			r.Changes()

			var cuts atomic.Int32
			a.fail(func(w http.ResponseWriter, r *http.Request) bool {
				if noStreams(w, r) {
					return true
				}
				if isServices(r) && !isWatch(r) {
					if r.FormValue("resourceVersion") != "" {
						// The request is not for the cache, so the list comes in pages.
						return refuse(w, http.StatusGone, metav1.StatusReasonExpired)
					}
					cuts.Add(1) // before the answer, as some cuts do not return
					return cut(w, r)
				}
				return false
			})
			a.compact()
			a.CloseClientConnections()
			eventually(t, "cut lists", func() bool { return cuts.Load() >= 3 })
			require.Empty(t, r.Changes())
			require.Equal(t, 1, r.Replaced(model.KindService))

			a.put(service("web"))
			a.fail(noStreams)
			eventually(t, "a whole list", func() bool { return r.Get(serviceKey("web")) != nil })
			require.Equal(t, []string{"add Service default/web"}, r.Changes())
		})
	}
}

func TestPartialStreamedList(t *testing.T) {
	a := newAPI(t)
	a.put(service("a"))
	a.put(service("b"))
	r := start(t, a.config())
	r.awaitSynced(t)
	r.Changes()

	var partial atomic.Int32
	a.fail(func(w http.ResponseWriter, r *http.Request) bool {
		if !isServices(r) {
			return false
		}
		if !isStream(r) { // lists in pages, which follow a stream that ended too early
			if isWatch(r) {
				return false
			}
			partial.Add(1)
			return refuse(w, 500, metav1.StatusReasonInternalError)
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = fmt.Fprintf(w, `{"type":"ADDED","object":{"apiVersion":"v1","kind":"Service","metadata":{"name":"a","namespace":"default","resourceVersion":"101"}}}`+"\n")
		w.(http.Flusher).Flush()
		partial.Add(1)
		if partial.Load()%2 == 0 {
			return true // an orderly end, without the bookmark
		}
		panic(http.ErrAbortHandler)
	})
	a.compact()
	a.CloseClientConnections()
	eventually(t, "partial lists", func() bool { return partial.Load() >= 4 })
	require.Empty(t, r.Changes())
	require.Equal(t, 1, r.Replaced(model.KindService))
	a.fail(nil)
	eventually(t, "a whole list", func() bool { return r.Replaced(model.KindService) == 2 })
	require.Empty(t, r.Changes())
}

// TestItIsNotKnownHowFarTheServerIs checks an API server whose watches go on while etcd does not
// answer, so that it cannot report its resourceVersion. The API server returns an error, or no
// answer at all.
func TestItIsNotKnownHowFarTheServerIs(t *testing.T) {
	before := askTime
	askTime = 500 * time.Millisecond
	t.Cleanup(func() { askTime = before })
	for name, answer := range map[string]func(http.ResponseWriter, *http.Request) bool{
		"error": func(w http.ResponseWriter, _ *http.Request) bool {
			return refuse(w, http.StatusGatewayTimeout, metav1.StatusReasonTimeout)
		},
		"silent": func(_ http.ResponseWriter, r *http.Request) bool { <-r.Context().Done(); return true },
	} {
		t.Run(name, func(t *testing.T) {
			a := newAPI(t)
			r := start(t, a.config())
			r.awaitSynced(t)
			a.put(service("web")) // a watch that ends early without any event counts as bad
			eventually(t, "a Service", func() bool { return r.Get(serviceKey("web")) != nil })
			isAsked := func(r *http.Request) bool { return isServices(r) && r.FormValue("limit") == "1" }
			a.fail(func(w http.ResponseWriter, r *http.Request) bool {
				return isServices(r) && !isWatch(r) && r.FormValue("resourceVersion") == "" && answer(w, r)
			})
			a.CloseClientConnections()
			eventually(t, "a question", func() bool { return len(a.seen(isAsked)) > 0 })
			a.put(service("db"))
			eventually(t, "an added Service", func() bool { return r.Get(serviceKey("db")) != nil })
			require.Equal(t, 1, r.Replaced(model.KindService), "no list was needed")
		})
	}
}

// TestStateGoesBackInTime checks an etcd that was restored from a backup. The source follows it
// when other connections lead to no newer state.
func TestStateGoesBackInTime(t *testing.T) {
	a := newAPI(t)
	for i := range 10 {
		a.put(service(fmt.Sprintf("s%d", i)))
	}
	r := start(t, a.config())
	r.awaitSynced(t)
	a.restore(50)
	a.put(service("old"))
	a.CloseClientConnections()
	eventually(t, "the restored state", func() bool {
		return strings.Join(r.Keys(model.KindService), " ") == "Service default/old"
	})
	require.Positive(t, testutil.ToFloat64(r.metrics().errors.WithLabelValues("Service", "replace")), "the first list is refused")
	a.put(service("new"))
	eventually(t, "changes after it", func() bool { return r.Get(serviceKey("new")) != nil })
}

// TestStateGoesBackWhileAWatchIsRequested checks an etcd that is restored after the API server has
// said how far it is, and before it accepts the watch: client-go repeats a request for a watch
// whose connection ends, for ten seconds. The other watch goes on after a list.
func TestStateGoesBackWhileAWatchIsRequested(t *testing.T) {
	for name, plain := range map[string]bool{"after an event": false, "after a list": true} {
		t.Run(name, func(t *testing.T) {
			a := newAPI(t)
			for i := range 10 {
				a.put(service(fmt.Sprintf("s%d", i)))
			}
			var restored atomic.Bool
			restore := func(w http.ResponseWriter, r *http.Request) bool {
				if plain && noStreams(w, r) {
					return true
				}
				if !isServices(r) || !isWatch(r) || isStream(r) || !restored.CompareAndSwap(false, true) {
					return false
				}
				a.restore(50)
				a.put(service("old"))
				panic(http.ErrAbortHandler)
			}
			if plain {
				a.fail(restore)
			}
			r := start(t, a.config())
			r.awaitSynced(t)
			if !plain {
				a.put(service("web")) // a watch that ends early without any event counts as bad
				eventually(t, "a Service", func() bool { return r.Get(serviceKey("web")) != nil })
				a.fail(restore)
				a.CloseClientConnections()
			}
			eventually(t, "the restored state", func() bool {
				return strings.Join(r.Keys(model.KindService), " ") == "Service default/old"
			})
			a.put(service("new"))
			eventually(t, "changes after it", func() bool { return r.Get(serviceKey("new")) != nil })
		})
	}
}

func TestOneOldAnswerIsNotBelieved(t *testing.T) {
	a := newAPI(t)
	for i := range 10 {
		a.put(service(fmt.Sprintf("s%d", i)))
	}
	r := start(t, a.config())
	r.awaitSynced(t)
	r.Changes()
	var old atomic.Int32
	a.fail(func(w http.ResponseWriter, r *http.Request) bool {
		if isServices(r) && isStream(r) && old.Add(1) == 1 {
			w.Header().Set("Content-Type", "application/json")
			_, _ = fmt.Fprintf(w, `{"type":"BOOKMARK","object":{"apiVersion":"v1","kind":"Service","metadata":{"resourceVersion":"7","annotations":{"k8s.io/initial-events-end":"true"}}}}`+"\n")
			w.(http.Flusher).Flush()
			<-r.Context().Done()
			return true
		}
		return false
	})
	a.compact()
	a.CloseClientConnections()
	eventually(t, "a good list", func() bool { return r.Replaced(model.KindService) == 2 })
	require.Empty(t, r.Changes())
	require.Equal(t, 1.0, testutil.ToFloat64(r.metrics().errors.WithLabelValues("Service", "replace")))
}

// TestOldAnswersOfOneConnection checks an API server that is behind, to which a load balancer leads
// the source's connection. However often it answers, it is not believed while another connection
// leads to newer state, and that one is followed.
func TestOldAnswersOfOneConnection(t *testing.T) {
	for name, streams := range map[string]bool{"streamed": true, "paged": false} {
		t.Run(name, func(t *testing.T) {
			a := newAPI(t)
			for i := range 10 {
				a.put(service(fmt.Sprintf("s%d", i)))
			}
			if !streams {
				a.fail(noStreams)
			}
			r := start(t, a.overHTTP2(t))
			r.awaitSynced(t)
			r.Changes()
			var behind sync.Map // the connections that lead to it
			for _, q := range a.seen(isServices) {
				behind.Store(q.RemoteAddr, true)
			}
			var old atomic.Int32
			a.fail(func(w http.ResponseWriter, q *http.Request) bool {
				_, is := behind.Load(q.RemoteAddr)
				switch {
				case !is || !isServices(q) || isStream(q) && !streams:
					return isStream(q) && !streams && noStreams(w, q)
				case isStream(q):
					w.Header().Set("Content-Type", "application/json")
					_, _ = fmt.Fprintf(w, `{"type":"BOOKMARK","object":{"apiVersion":"v1","kind":"Service","metadata":{"resourceVersion":"7","annotations":{"k8s.io/initial-events-end":"true"}}}}`+"\n")
					w.(http.Flusher).Flush()
					old.Add(1)
					<-q.Context().Done()
				case isWatch(q):
					refuse(w, http.StatusGone, metav1.StatusReasonExpired)
				default:
					w.Header().Set("Content-Type", "application/json")
					_, _ = w.Write([]byte(`{"apiVersion":"v1","kind":"ServiceList","metadata":{"resourceVersion":"7"},"items":[]}`))
					old.Add(1)
				}
				return true
			})
			a.expire()
			eventually(t, "an old list", func() bool { return old.Load() > 0 })
			eventually(t, "a good list", func() bool { return r.Replaced(model.KindService) == 2 })
			require.Empty(t, r.Changes())
			a.put(service("new"))
			eventually(t, "changes after it", func() bool { return r.Get(serviceKey("new")) != nil })
			eventually(t, "freshness", func() bool { since, _ := r.source.Stale(); return since.IsZero() })
		})
	}
}

func TestNotSyncedBeforeEveryKindIs(t *testing.T) {
	a := newAPI(t)
	a.put(service("web"))
	a.fail(func(w http.ResponseWriter, r *http.Request) bool {
		return strings.HasSuffix(r.URL.Path, "/nodes") && refuse(w, 403, metav1.StatusReasonForbidden)
	})
	r := start(t, a.config())
	errors := r.metrics().errors.WithLabelValues("Node", "list")
	eventually(t, "two refusals", func() bool { return testutil.ToFloat64(errors) >= 2 && r.Get(serviceKey("web")) != nil })
	require.False(t, r.IsSynced())
	a.fail(nil)
	r.awaitSynced(t)
}

func TestStopsWhileTheServerIsDown(t *testing.T) {
	a := newAPI(t)
	r := start(t, a.config())
	r.awaitSynced(t)
	a.CloseClientConnections()
	a.Close()
	a.CloseClientConnections()
	errors := r.metrics().errors.WithLabelValues("Service", "watch")
	eventually(t, "failed requests", func() bool { return testutil.ToFloat64(errors) >= 3 })
	r.stop()

	r = start(t, a.config()) // the same if it was down from the start
	errors = r.metrics().errors.WithLabelValues("Service", "watch")
	eventually(t, "failed requests", func() bool { return testutil.ToFloat64(errors) >= 4 })
	r.stop()
	require.False(t, r.IsSynced())
}

// TestTheStartCountsAsAnEvent proves that an API server that was never reached is seen in the same
// metric as one that was lost.
func TestTheStartCountsAsAnEvent(t *testing.T) {
	begin := time.Now().Unix()
	s, err := New(Options{Config: &rest.Config{Host: "https://127.0.0.1:1"}, Log: slog.New(slog.DiscardHandler), Metrics: prometheus.NewRegistry()})
	require.NoError(t, err)
	last := s.resources[0].metrics.lastEvent
	for _, kind := range []string{"Service", "EndpointSlice", "Node", "ServiceCIDR"} {
		require.InDelta(t, begin, testutil.ToFloat64(last.WithLabelValues(kind)), 60, kind)
	}
	require.Equal(t, 4, testutil.CollectAndCount(last))
}
