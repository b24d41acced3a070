// TestHoursOfExpiredWatches proves that watches which expire again and again, for hours, do not
// lead to a storm of lists (kubernetes/kubernetes#85342). The hours pass in virtual time, so the
// API server is called without a network.
package kube

import (
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptrace"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"

	"github.com/slicecast/slicecast/internal/source/sourcetest"
)

func TestHoursOfExpiredWatches(t *testing.T) {
	b, p := backoff, listPause
	backoff.Duration, backoff.Cap, listPause = productionBackoff.Duration, productionBackoff.Cap, productionListPause
	t.Cleanup(func() { backoff, listPause = b, p })
	for name, streams := range map[string]bool{"streamed": true, "paged": false} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := &api{rv: 100, objects: map[string]map[string]runtime.Object{}, changed: make(chan struct{})}
				a.put(service("web"))
				isList := func(r *http.Request) bool {
					return isServices(r) && isWatch(r) == streams && isStream(r) == streams && r.FormValue("limit") != "1"
				}
				begin := time.Now()
				// Every watch ends as soon as the list that it follows is complete.
				a.fail(func(w http.ResponseWriter, q *http.Request) bool {
					switch {
					case isStream(q) && !streams:
						return noStreams(w, q)
					case isStream(q):
						ctx, cancel := context.WithCancel(q.Context())
						cancel()
						a.watch(w, q.WithContext(ctx))
						return true
					case isWatch(q):
						return refuse(w, http.StatusGone, metav1.StatusReasonExpired)
					}
					return false
				})
				r := start(t, &rest.Config{Host: "http://api", QPS: 1000, Burst: 1000, Transport: direct{handler: a}})
				<-time.After(time.Minute)
				minute := len(a.seen(isList))
				<-time.After(2 * time.Hour)
				hours := len(a.seen(isList)) - minute
				require.True(t, r.IsSynced())
				t.Logf("%d lists in the first minute, %d in the next two hours", minute, hours)
				require.Positive(t, hours, "the source must go on trying")
				require.LessOrEqual(t, minute, 15)
				require.LessOrEqual(t, hours, 2*60*2, "more than two lists a minute")

				// It follows again soon after the API server is well.
				a.fail(nil)
				a.put(service("db"))
				for r.Get(serviceKey("db")) == nil {
					require.Less(t, time.Since(begin), 2*time.Hour+3*time.Minute)
					<-time.After(time.Second)
				}
			})
		})
	}
}

// TestPauseBeginsWithTheList checks that the time for which a list was followed counts as a part of
// the pause before the next one, and that the source is stale only while it follows nothing.
func TestPauseBeginsWithTheList(t *testing.T) {
	b, p := backoff, listPause
	backoff.Duration, backoff.Cap, listPause = productionBackoff.Duration, productionBackoff.Cap, productionListPause
	t.Cleanup(func() { backoff, listPause = b, p })
	synctest.Test(t, func(t *testing.T) {
		a := &api{rv: 100, objects: map[string]map[string]runtime.Object{}, changed: make(chan struct{})}
		a.put(service("web"))
		const followed = 25 * time.Second
		a.fail(func(w http.ResponseWriter, q *http.Request) bool {
			switch {
			case !isServices(q):
				return false
			case isStream(q):
				ctx, cancel := context.WithTimeout(q.Context(), followed)
				defer cancel()
				a.watch(w, q.WithContext(ctx))
				return true
			case isWatch(q): // no watch can be resumed
				return refuse(w, http.StatusGone, metav1.StatusReasonExpired)
			}
			return false
		})
		r := start(t, &rest.Config{Host: "http://api", QPS: 1000, Burst: 1000, Transport: direct{handler: a}})
		defer r.stop()
		<-time.After(10 * time.Minute) // the pause has grown to its bound
		const long = time.Hour
		isList := func(q *http.Request) bool { return isServices(q) && isStream(q) }
		before := len(a.seen(isList))
		stale, fresh := 0, 0
		for begin := time.Now(); time.Since(begin) < long; <-time.After(time.Second) {
			if since, why := r.source.resources[0].contact.stale(time.Now()); since.IsZero() {
				fresh++
			} else {
				stale++
				require.Contains(t, why, "watches end soon after their lists")
			}
		}
		lists := len(a.seen(isList)) - before
		t.Logf("%d lists, stale for %d of %d seconds", lists, stale, stale+fresh)
		// From list to list, it is at least 30 seconds, and at most 45 and the back-off of 7.5. On
		// average, it is less than if the pause began at the end of the watch.
		require.Greater(t, lists, int(long/(followed+productionListPause)))
		require.LessOrEqual(t, lists, int(long/productionListPause))
		require.Positive(t, stale)
		require.Greater(t, fresh, stale)
	})
}

// TestAListAfterADoubtNeedNotWait checks that a list from the past causes no pause, so that the
// source follows a cluster that went back in time as soon as it knows.
func TestAListAfterADoubtNeedNotWait(t *testing.T) {
	registry := prometheus.NewRegistry()
	s, err := New(Options{Config: &rest.Config{Host: "http://api"}, Log: slog.New(slog.DiscardHandler), Metrics: registry})
	require.NoError(t, err)
	r := s.resources[0]
	r.sink, r.synced, r.highest = sourcetest.New(), func() {}, 100
	require.ErrorContains(t, r.Replace(nil, "50"), "older than")
	require.Zero(t, r.listEnd)
	require.True(t, r.doubted)
	r.highest = 50 // as confirm sets it
	require.NoError(t, r.Replace(nil, "50"))
	require.NotZero(t, r.listEnd)
	r.listEnd = time.Time{}
	require.ErrorContains(t, r.Replace(nil, "x"), "invalid resourceVersion")
	require.NotZero(t, r.listEnd, "such a list costs as much as others")
}

// direct is a transport that calls a handler, without a network.
type direct struct {
	handler http.Handler
	// connection returns the connection of a request that is answered. nil means that there is none.
	connection func() net.Conn
}

// RoundTrip implements [http.RoundTripper].
func (d direct) RoundTrip(r *http.Request) (*http.Response, error) {
	ctx, cancel := context.WithCancel(r.Context())
	reader, writer := io.Pipe()
	w := &directWriter{header: http.Header{}, body: writer, started: make(chan struct{}), code: http.StatusOK}
	go func() {
		d.handler.ServeHTTP(w, r.Clone(ctx))
		w.Flush()
		_ = writer.Close()
	}()
	stop := context.AfterFunc(ctx, func() { _ = writer.CloseWithError(context.Canceled) })
	select {
	case <-w.started:
	case <-ctx.Done():
		cancel()
		return nil, ctx.Err()
	}
	if trace := httptrace.ContextClientTrace(ctx); trace != nil && trace.GotConn != nil && d.connection != nil {
		trace.GotConn(httptrace.GotConnInfo{Conn: d.connection()})
	}
	return &http.Response{
		StatusCode: w.code, Status: http.StatusText(w.code), Header: w.header, Request: r, ContentLength: -1,
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Body: directBody{reader, func() { cancel(); stop() }},
	}, nil
}

// directBody is the body of an answer. Closing it ends the request.
type directBody struct {
	*io.PipeReader
	end func()
}

func (b directBody) Close() error {
	b.end()
	return b.PipeReader.Close()
}

type directWriter struct {
	header  http.Header
	body    io.Writer
	once    sync.Once
	started chan struct{}
	code    int // written before started is closed
}

func (w *directWriter) Header() http.Header { return w.header }

func (w *directWriter) WriteHeader(code int) {
	w.once.Do(func() {
		w.code = code
		close(w.started)
	})
}

func (w *directWriter) Write(p []byte) (int, error) {
	w.WriteHeader(http.StatusOK)
	return w.body.Write(p)
}

// Flush implements [http.Flusher].
func (w *directWriter) Flush() { w.WriteHeader(http.StatusOK) }
