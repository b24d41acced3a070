// These tests prove that watchers ask as kube-proxy does, and hold the right state after
// interrupted, refused and unsupported lists. The API servers are scripted.
package apiserver

import (
	"compress/gzip"
	"context"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/slicecast/slicecast/loadtest/fleet"
)

// watching starts a watcher that ends with the test.
func watching(t *testing.T, a *api) *Watchers { return logging(t, a, io.Discard) }

// logging starts a watcher that ends with the test, and logs to a writer.
func logging(t *testing.T, a *api, log io.Writer) *Watchers {
	return starting(t, WatchOptions{
		Config: a.config(), Members: []*fleet.Member{{Name: "node-1"}}, Logger: slog.New(slog.NewTextHandler(log, nil)),
	})
}

func starting(t *testing.T, o WatchOptions) *Watchers {
	w, err := NewWatchers(o)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		w.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-ended
		for _, n := range w.all {
			n.transport.CloseIdleConnections()
		}
	})
	return w
}

func requireSynced(t *testing.T, w *Watchers) {
	t.Helper()
	select {
	case <-w.Sync().Done():
	case <-time.After(time.Minute):
		require.Fail(t, "the watcher is not in sync")
	}
}

// TestInterruptedList interrupts a watch in the middle of its list, by an error event, and after
// the list is complete.
func TestInterruptedList(t *testing.T) {
	interrupted := make(chan struct{})
	a := newAPI(t, map[string][]func(*answer){
		"services": {noServices}, "nodes": {noNodes},
		"endpointslices": {
			func(a *answer) {
				a.send(watch.Added, slice("gone-meanwhile", "2"))
				a.send(watch.Added, slice("web", "3"))
				a.breakOff()
			},
			func(a *answer) {
				a.send(watch.Added, slice("gone-meanwhile", "2"))
				a.send(watch.Error, &metav1.Status{Status: metav1.StatusFailure, Code: http.StatusGone, Reason: metav1.StatusReasonExpired})
			},
			func(a *answer) {
				a.send(watch.Added, slice("web", "3"))
				a.complete(&discoveryv1.EndpointSlice{}, "10")
				select {
				case <-interrupted:
				case <-a.request.Context().Done():
				}
				a.send(watch.Modified, slice("web", "11"))
				a.breakOff()
			},
			func(a *answer) { a.stay() },
		},
	})
	w := watching(t, a)
	requireSynced(t, w)
	_, slices, _ := w.Objects()
	require.Equal(t, 1, slices, "an object that was removed between two watches is still held")

	close(interrupted)
	const requests = 4
	require.Eventually(t, func() bool { return len(a.seen("endpointslices")) == requests }, time.Minute, 10*time.Millisecond)
	for i, want := range []struct{ streams, from string }{{"true", ""}, {"true", ""}, {"true", ""}, {"", "11"}} {
		query := a.seen("endpointslices")[i]
		require.Equal(t, want.streams, query.Get("sendInitialEvents"), i)
		require.Equal(t, want.from, query.Get("resourceVersion"), i)
	}
	_, slices, _ = w.Objects()
	require.Equal(t, 1, slices)
}

// zipped compresses a response.
type zipped struct {
	http.ResponseWriter
	gzip *gzip.Writer
}

func (z zipped) Write(b []byte) (int, error) { return z.gzip.Write(b) }

// Flush implements http.Flusher.
func (z zipped) Flush() {
	_ = z.gzip.Flush() // clients retry after an error
	z.ResponseWriter.(http.Flusher).Flush()
}

// TestCompressedWatch uses an API server that compresses a watch that begins with a list. Once it
// has the list, the watcher reopens the watch.
func TestCompressedWatch(t *testing.T) {
	change := make(chan struct{})
	a := newAPI(t, map[string][]func(*answer){
		"services": {noServices}, "nodes": {noNodes},
		"endpointslices": {
			func(a *answer) {
				a.Header().Set("Content-Encoding", "gzip")
				a.ResponseWriter = zipped{a.ResponseWriter, gzip.NewWriter(a.ResponseWriter)}
				a.send(watch.Added, slice("web", "3"))
				a.complete(&discoveryv1.EndpointSlice{}, "10")
				a.stay()
			},
			func(a *answer) {
				a.ResponseWriter.(http.Flusher).Flush()
				select {
				case <-change:
					a.send(watch.Modified, slice("web", "11"))
				case <-a.request.Context().Done():
				}
				a.stay()
			},
		},
	})
	w := watching(t, a)
	requireSynced(t, w)
	require.EqualValues(t, 1, w.Compressed.Load())
	queries := a.seen("endpointslices")
	require.Len(t, queries, 2, "the node had the state before the second watch")
	require.Equal(t, "true", queries[0].Get("sendInitialEvents"))
	require.Empty(t, queries[1].Get("sendInitialEvents"))
	require.Equal(t, "10", queries[1].Get("resourceVersion"))
	close(change)
	slices := w.all[0].streams[1]
	require.Eventually(t, func() bool { return slices.sight().version == 11 }, time.Minute, 10*time.Millisecond)
	require.Len(t, a.seen("endpointslices"), 2)
}

// TestWatchesAsKubeProxy compares the queries with the selectors of kube-proxy 1.37.
func TestWatchesAsKubeProxy(t *testing.T) {
	a := newAPI(t, map[string][]func(*answer){"services": {noServices}, "nodes": {noNodes}, "endpointslices": {noSlices}})
	requireSynced(t, watching(t, a))
	for resource, want := range map[string]struct{ labels, fields string }{
		"services":       {"!service.kubernetes.io/service-proxy-name", "spec.clusterIP!=None"},
		"endpointslices": {"!service.kubernetes.io/headless", ""},
		"nodes":          {"", "metadata.name=node-1"},
	} {
		query := a.seen(resource)[0]
		require.Equal(t, want.labels, query.Get("labelSelector"), resource)
		require.Equal(t, want.fields, query.Get("fieldSelector"), resource)
	}
}

// TestBusyServer checks that a busy API server is asked again for a streamed list.
func TestBusyServer(t *testing.T) {
	a := newAPI(t, map[string][]func(*answer){
		"services": {func(a *answer) { http.Error(a, "busy", http.StatusTooManyRequests) }, noServices}, "nodes": {noNodes},
		"endpointslices": {func(a *answer) {
			a.Header().Set("Retry-After", "1")
			http.Error(a, "starting", http.StatusServiceUnavailable)
		}, noSlices},
	})
	w := watching(t, a)
	requireSynced(t, w)
	for _, resource := range []string{"services", "endpointslices"} {
		require.Equal(t, "true", a.seen(resource)[1].Get("sendInitialEvents"), resource)
	}
	require.Zero(t, w.Fetched.Load())
}

// TestRefusalOfOneList uses an API server that fails to stream one list, and streams the next one.
func TestRefusalOfOneList(t *testing.T) {
	a := newAPI(t, map[string][]func(*answer){
		"services": {noServices}, "nodes": {noNodes},
		"endpointslices": {
			func(a *answer) {
				a.send(watch.Added, slice("gone-meanwhile", "2"))
				a.send(watch.Error, &metav1.Status{Status: metav1.StatusFailure, Code: http.StatusInternalServerError, Reason: metav1.StatusReasonInternalError})
			},
			func(a *answer) {
				a.list(&discoveryv1.EndpointSliceList{ListMeta: metav1.ListMeta{ResourceVersion: "7"}})
			},
			func(a *answer) { http.Error(a, "too old", http.StatusGone) },
			noSlices,
		},
	})
	w := watching(t, a)
	requireSynced(t, w)
	const requests = 4
	require.Eventually(t, func() bool { return len(a.seen("endpointslices")) == requests }, time.Minute, 10*time.Millisecond)
	for i, want := range []struct{ watch, streams, from string }{{"true", "true", ""}, {"", "", "0"}, {"true", "", "7"}, {"true", "true", ""}} {
		query := a.seen("endpointslices")[i]
		require.Equal(t, want.watch, query.Get("watch"), i)
		require.Equal(t, want.streams, query.Get("sendInitialEvents"), i)
		require.Equal(t, want.from, query.Get("resourceVersion"), i)
	}
	require.EqualValues(t, 1, w.Fetched.Load())
}

// TestListsThatAreNotStreamed uses API servers that refuse to stream lists: with an HTTP status, or
// with an error event in the stream.
func TestListsThatAreNotStreamed(t *testing.T) {
	for name, refuse := range map[string]func(*answer){
		"status": func(a *answer) { http.Error(a, "no such thing", http.StatusUnprocessableEntity) },
		"event": func(a *answer) {
			a.send(watch.Error, &metav1.Status{Status: metav1.StatusFailure, Code: http.StatusInternalServerError, Reason: metav1.StatusReasonInternalError})
		},
	} {
		t.Run(name, func(t *testing.T) {
			serve := func(list runtime.Object) []func(*answer) {
				return []func(*answer){func(a *answer) {
					query := a.request.URL.Query()
					switch {
					case query.Get("sendInitialEvents") != "":
						refuse(a)
					case query.Get("watch") == "":
						a.list(list)
					default:
						a.stay()
					}
				}}
			}
			at := metav1.ListMeta{ResourceVersion: "7"}
			a := newAPI(t, map[string][]func(*answer){
				"services":       serve(&corev1.ServiceList{ListMeta: at}),
				"nodes":          serve(&corev1.NodeList{ListMeta: at}),
				"endpointslices": serve(&discoveryv1.EndpointSliceList{ListMeta: at, Items: []discoveryv1.EndpointSlice{*slice("web", "3")}}),
			})
			var log strings.Builder
			w := logging(t, a, &log)
			requireSynced(t, w)
			require.Equal(t, 1, strings.Count(log.String(), "refused to stream a list"), "%s", &log)
			_, slices, _ := w.Objects()
			require.Equal(t, 1, slices)
			all := a.seen("endpointslices")
			require.Equal(t, "7", all[len(all)-1].Get("resourceVersion"))
			require.EqualValues(t, 3, w.Fetched.Load())
		})
	}
}
