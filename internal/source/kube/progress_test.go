// These tests prove that what counts of an API server is progress: streamed lists without an end,
// watches that bring nothing new, and a state that goes back for seconds. Each is noticed in a
// stated time, is told as staleness and in the log, and costs no more than a list now and then. The
// API server is a fake that is called without a network, and the hours pass in virtual time.
package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	"github.com/slicecast/slicecast/internal/model"
)

// inVirtualTime runs a test with the production's times in a bubble.
func inVirtualTime(t *testing.T, test func(t *testing.T)) {
	t.Helper()
	b, p, c := backoff, listPause, confirmPause
	backoff.Duration, backoff.Cap, listPause, confirmPause = productionBackoff.Duration, productionBackoff.Cap, productionListPause, productionConfirmPause
	defer func() { backoff, listPause, confirmPause = b, p, c }()
	synctest.Test(t, func(t *testing.T) {
		t.Cleanup(func() { <-time.After(10 * time.Second) }) // handlers see the source's end that late
		test(t)
	})
}

// startWithout runs a source over a handler that is called without a network.
func startWithout(t *testing.T, handler http.Handler) *running {
	return start(t, &rest.Config{Host: "http://api", QPS: 1000, Burst: 1000, Transport: direct{handler: handler}})
}

func virtualAPI() *api {
	return &api{rv: 100, objects: map[string]map[string]runtime.Object{}, changed: make(chan struct{}), expired: make(chan struct{})}
}

// await returns how long it takes until something holds, which must happen in time.
func await(t *testing.T, what string, limit time.Duration, ok func() bool) time.Duration {
	t.Helper()
	begin := time.Now()
	for !ok() {
		require.LessOrEqual(t, time.Since(begin), limit, what)
		<-time.After(time.Second)
		synctest.Wait()
	}
	return time.Since(begin)
}

// TestStreamedListWithoutAnEnd checks API servers, or proxies before them, that accept a streamed
// list and never send the bookmark at its end (kubernetes/kubernetes#140890, derailed/k9s#4186), in
// each way in which the stream may go on.
func TestStreamedListWithoutAnEnd(t *testing.T) {
	for name, goOn := range map[string]func(q *http.Request, send func(kind string, object any)){
		"silent": func(q *http.Request, _ func(string, any)) { <-q.Context().Done() },
		"ends": func(q *http.Request, _ func(string, any)) {
			select {
			case <-q.Context().Done():
			case <-time.After(3 * time.Second):
			}
		},
		"objects for ever": func(q *http.Request, send func(string, any)) {
			for i := 0; q.Context().Err() == nil; i++ {
				s := service(fmt.Sprint("s", i%100))
				s.ResourceVersion = fmt.Sprint(200 + i)
				send("ADDED", s)
				<-time.After(time.Second)
			}
		},
		"changes and bookmarks for ever": func(q *http.Request, send func(string, any)) {
			for i := 0; q.Context().Err() == nil; i++ {
				s := service("a")
				s.ResourceVersion = fmt.Sprint(200 + i)
				send("MODIFIED", s)
				send("BOOKMARK", bookmark("services", uint64(200+i)))
				<-time.After(time.Second)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T) {
				a := virtualAPI()
				a.put(service("a"))
				endless := func(w http.ResponseWriter, q *http.Request) bool {
					if !isServices(q) || !isStream(q) {
						return false
					}
					w.(http.Flusher).Flush()
					send := func(kind string, object any) {
						_ = json.NewEncoder(w).Encode(map[string]any{"type": kind, "object": typed(object)})
					}
					s := service("a")
					s.ResourceVersion = "101"
					send("ADDED", s)
					goOn(q, send)
					return true
				}
				a.fail(endless)
				r := startWithout(t, a)
				took := await(t, "the first sync", streamTime+time.Minute, r.IsSynced)
				t.Logf("synced after %v", took)
				require.LessOrEqual(t, len(a.seen(func(q *http.Request) bool { return isServices(q) && isStream(q) })), 1)
				if name != "ends" {
					require.Contains(t, r.log.String(), "Streamed list makes no progress")
				}
				require.NotNil(t, r.Get(serviceKey("a")))

				// The same after the watch has expired: the source says that it is stale meanwhile.
				<-time.After(time.Minute)
				a.put(service("b"))
				await(t, "the change before", time.Second, func() bool { return r.Get(serviceKey("b")) != nil })
				a.expire()
				a.put(service("c"))
				services := &r.source.resources[0].contact
				if name == "silent" {
					await(t, "staleness", askOnce+2*time.Second, func() bool { since, _ := services.stale(time.Now()); return !since.IsZero() })
				}
				await(t, "the change", streamTime+time.Minute, func() bool { return r.Get(serviceKey("c")) != nil })
				await(t, "freshness", time.Second, func() bool { since, _ := services.stale(time.Now()); return since.IsZero() })
			})
		})
	}
}

// cached answers like an API server whose watch cache stands still: watches and lists of what was
// seen are of the cache, and lists of the present are of etcd.
type cached struct {
	etcd, cache *api
	well        atomic.Bool // the cache is no longer in use
}

// ServeHTTP implements http.Handler.
func (c *cached) ServeHTTP(w http.ResponseWriter, q *http.Request) {
	_ = q.ParseForm()
	if !c.well.Load() && (isWatch(q) || q.FormValue("resourceVersion") != "") {
		c.cache.ServeHTTP(w, q)
		return
	}
	c.etcd.ServeHTTP(w, q)
}

// TestWatchCacheThatStandsStill checks an API server whose watches bring bookmarks that repeat one
// resourceVersion for ever (kubernetes/kubernetes#97294).
func TestWatchCacheThatStandsStill(t *testing.T) {
	inVirtualTime(t, func(t *testing.T) {
		c := &cached{etcd: virtualAPI(), cache: virtualAPI()}
		c.etcd.beat, c.cache.beat = time.Minute, time.Minute
		for _, a := range []*api{c.etcd, c.cache} {
			a.put(service("a"))
			a.put(service("goes"))
		}
		r := startWithout(t, c)
		await(t, "the first sync", time.Second, r.IsSynced)
		services := &r.source.resources[0].contact
		stale := func() bool { since, _ := services.stale(time.Now()); return !since.IsZero() }

		// While nothing changes, nothing is missed, and lists are few.
		quiet := func(q *http.Request) bool { return isServices(q) && !isWatch(q) && q.FormValue("limit") != "1" }
		for range 3600 {
			<-time.After(time.Second)
			synctest.Wait()
			require.False(t, stale())
		}
		require.LessOrEqual(t, len(c.etcd.seen(quiet)), int(time.Hour/stillTime))
		require.NotContains(t, r.log.String(), "stands still")

		for _, change := range []struct {
			do   func()
			seen func() bool
		}{
			{func() { c.etcd.put(service("b")) }, func() bool { return r.Get(serviceKey("b")) != nil }},
			{func() { c.etcd.delete(service("goes")) }, func() bool { return r.Get(serviceKey("goes")) == nil }},
		} {
			change.do()
			t.Logf("known after %v", await(t, "the change", stillTime+openTime+time.Second, change.seen))
			require.True(t, stale(), "the watch still brings nothing")
			_, why := services.stale(time.Now())
			require.Contains(t, why, "stands still")
		}
		require.Contains(t, r.log.String(), "The API server's watch stands still")
		require.Positive(t, testutil.ToFloat64(r.metrics().errors.WithLabelValues("Service", "watch")))

		c.well.Store(true)
		await(t, "a watch that goes on", stillTime+openTime+time.Second, func() bool { return !stale() })
		c.etcd.put(service("d"))
		await(t, "the change", time.Second, func() bool { return r.Get(serviceKey("d")) != nil })
		require.False(t, stale())
	})
}

// TestBookmarksAreProgress checks that a watch is not replaced by lists if its bookmarks go on with
// the cluster's version, however long its kind does not change.
func TestBookmarksAreProgress(t *testing.T) {
	inVirtualTime(t, func(t *testing.T) {
		a := virtualAPI()
		a.beat = time.Minute
		a.put(service("a"))
		r := startWithout(t, a)
		await(t, "the first sync", time.Second, r.IsSynced)
		for i := range 240 {
			a.put(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n", Labels: map[string]string{"i": fmt.Sprint(i)}}})
			<-time.After(time.Minute)
			synctest.Wait()
			since, why := r.source.Stale()
			require.Zero(t, since, why)
		}
		require.Equal(t, 1, r.Replaced(model.KindService))
	})
}

// TestStateThatGoesBackForSeconds checks that an old state is followed only if it is still there
// some seconds later, and that the source says meanwhile that it is stale. It is so, too, if the
// restored API server streams lists without an end.
func TestStateThatGoesBackForSeconds(t *testing.T) {
	for _, c := range []struct {
		back    time.Duration
		endless bool
	}{
		{time.Second, false}, {confirmations * productionConfirmPause / 2, false}, {time.Hour, false}, {time.Hour, true},
	} {
		back := c.back
		t.Run(fmt.Sprintf("%v, streams without an end: %v", back, c.endless), func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T) {
				now, then := virtualAPI(), virtualAPI()
				for i := range 10 {
					now.put(service(fmt.Sprint("s", i)))
				}
				then.put(service("s0"))
				var old atomic.Bool
				handler := http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
					_ = q.ParseForm()
					switch {
					case old.Load() && isStream(q) && c.endless:
						w.(http.Flusher).Flush()
						<-q.Context().Done()
					case old.Load():
						then.ServeHTTP(w, q)
					default:
						now.ServeHTTP(w, q)
					}
				})
				r := startWithout(t, handler)
				await(t, "the first sync", time.Second, r.IsSynced)
				<-time.After(2 * time.Minute)
				r.Changes()
				old.Store(true)
				now.expire()
				services := &r.source.resources[0].contact
				begin := time.Now()
				await(t, "staleness", askOnce+2*time.Second, func() bool { since, _ := services.stale(time.Now()); return !since.IsZero() })
				if back == time.Hour {
					followed := await(t, "the restored state", streamPause+15*time.Second, func() bool { return len(r.Keys(model.KindService)) == 1 })
					require.GreaterOrEqual(t, followed, confirmations*productionConfirmPause-2*time.Second)
					require.Contains(t, r.log.String(), "Cluster state went back in time")
				} else {
					<-time.After(back - time.Since(begin))
					old.Store(false)
					await(t, "freshness", 15*time.Second, func() bool { since, _ := services.stale(time.Now()); return since.IsZero() })
					require.Empty(t, r.Changes())
				}
				since, why := services.stale(time.Now())
				require.Zero(t, since, why)
			})
		})
	}
}

// TestVersionsThatComeAgain checks an etcd that is restored from a backup, and has reached the
// resourceVersion that the source knows when that resumes its watch. Nothing in the API server's
// answers says that objects are others under these versions, so a list has to follow if there was
// time for a restore. If there was none, no list is needed.
func TestVersionsThatComeAgain(t *testing.T) {
	const refuses, loses, ends = "loses the connection and refuses requests", "loses the connection", "ends the watch"
	for _, c := range []struct {
		how   string
		down  time.Duration
		lists int
	}{{refuses, outage, 2}, {loses, outage, 2}, {loses, outage - time.Second, 1}, {ends, outage, 1}} {
		t.Run(fmt.Sprintf("it %s, for %v", c.how, c.down), func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T) {
				before, after := virtualAPI(), virtualAPI()
				before.beat, after.beat = time.Second, time.Second
				for i := range 10 {
					before.put(service(fmt.Sprint("lost", i)))
					after.put(service(fmt.Sprint("new", i)))
				}
				var now atomic.Pointer[http.HandlerFunc]
				// live lets an API server answer until end is called.
				live := func(a *api) (end func()) {
					life, end := context.WithCancel(context.Background())
					now.Store(ptr.To(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
						ctx, cancel := context.WithCancel(q.Context())
						defer cancel()
						defer context.AfterFunc(life, cancel)()
						a.ServeHTTP(w, q.WithContext(ctx))
					})))
					return end
				}
				end := live(before)
				var connection atomic.Pointer[net.TCPConn]
				connection.Store(new(net.TCPConn))
				r := start(t, &rest.Config{Host: "http://api", QPS: 1000, Burst: 1000, Transport: direct{
					http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) { (*now.Load())(w, q) }), func() net.Conn { return connection.Load() },
				}})
				await(t, "the first sync", time.Second, r.IsSynced)
				before.put(node("n"))
				after.put(node("n"))
				<-time.After(before.beat)
				synctest.Wait()

				up := make(chan struct{})
				now.Store(ptr.To(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
					if c.how == refuses {
						refuse(w, http.StatusTooManyRequests, metav1.StatusReasonTooManyRequests)
						return
					}
					<-up
					(*now.Load())(w, q)
				})))
				if c.how != ends {
					connection.Store(new(net.TCPConn))
				}
				end()
				<-time.After(c.down)
				synctest.Wait()
				if c.lists > 1 {
					before = after
				}
				end = live(before)
				defer end()
				close(up)
				await(t, "what there is", backoff.Cap+2*checkPause, func() bool {
					return len(r.Keys(model.KindService)) == 10 && r.Get(serviceKey("new0")) != nil == (before == after)
				})
				<-time.After(backoff.Cap + 2*checkPause)
				require.Equal(t, c.lists, r.Replaced(model.KindService))
				since, why := r.source.Stale()
				require.Zero(t, since, why)
			})
		})
	}
}

// TestRefusedListsAreStaleness checks that the source is stale from the first list that it does not
// believe to one that it does, although the API server answers each request between them. Clients
// are told only of staleness that lasts.
func TestRefusedListsAreStaleness(t *testing.T) {
	for name, list := range map[string]string{"old": `"7"`, "without a version": `""`} {
		t.Run(name, func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T) {
				a := virtualAPI()
				a.put(service("a"))
				r := startWithout(t, a)
				await(t, "the first sync", time.Second, r.IsSynced)
				a.fail(func(w http.ResponseWriter, q *http.Request) bool {
					switch {
					case !isServices(q):
						return false
					case isStream(q):
						return noStreams(w, q)
					case q.FormValue("limit") == "1":
						return refuse(w, http.StatusServiceUnavailable, metav1.StatusReasonServiceUnavailable)
					}
					_, _ = fmt.Fprintf(w, `{"apiVersion":"v1","kind":"ServiceList","metadata":{"resourceVersion":%s},"items":[]}`, list)
					return true
				})
				a.expire()
				services := &r.source.resources[0].contact
				var first time.Time
				await(t, "staleness", time.Second, func() bool { first, _ = services.stale(time.Now()); return !first.IsZero() })
				for range 120 {
					<-time.After(time.Second)
					synctest.Wait()
					since, _ := services.stale(time.Now())
					require.Equal(t, first, since)
				}
				a.fail(nil)
				await(t, "freshness", time.Minute, func() bool { since, _ := services.stale(time.Now()); return since.IsZero() })
				require.NotNil(t, r.Get(serviceKey("a")))
			})
		})
	}
}

// TestPagesThatRepeat checks an API server, or a proxy before it, that answers each page of a list
// with the first one. It must not be asked for ever.
func TestPagesThatRepeat(t *testing.T) {
	inVirtualTime(t, func(t *testing.T) {
		a := virtualAPI()
		a.put(service("a"))
		a.fail(func(w http.ResponseWriter, q *http.Request) bool {
			if noStreams(w, q) {
				return true
			}
			if !isServices(q) || isWatch(q) || q.FormValue("limit") == "1" {
				return false
			}
			w.Header().Set("Content-Type", "application/json")
			_, _ = w.Write([]byte(`{"apiVersion":"v1","kind":"ServiceList","metadata":{"resourceVersion":"101","continue":"x"},"items":[]}`))
			return true
		})
		r := startWithout(t, a)
		<-time.After(time.Minute)
		require.False(t, r.IsSynced())
		require.Contains(t, r.log.String(), "the same page again")
		require.LessOrEqual(t, len(a.seen(isServices)), 200)
		a.fail(nil)
		await(t, "the first sync", time.Minute, r.IsSynced)
	})
}

// TestRequestsThatNobodyAnswers checks that a request is made again if nobody ever answers it.
func TestRequestsThatNobodyAnswers(t *testing.T) {
	for name, streams := range map[string]bool{"list": false, "watch": true} {
		t.Run(name, func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T) {
				a := virtualAPI()
				var hung atomic.Int32
				a.fail(func(w http.ResponseWriter, q *http.Request) bool {
					switch {
					case isStream(q) && !streams:
						return noStreams(w, q)
					case isServices(q) && hung.Add(1) == 1:
						<-q.Context().Done()
						return true
					}
					return false
				})
				r := startWithout(t, a)
				await(t, "the first sync", listTime+10*time.Second, r.IsSynced)
			})
		})
	}
}
