// These tests prove that the final check compares each watcher with a list of the same version,
// finds a watcher that lost or kept an object, and says why there is no comparison. One test uses a
// real API server that changes all the time; the others use scripted ones.
package apiserver

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv/controlplane"
	"github.com/slicecast/slicecast/loadtest/fleet"
)

// TestCheckWhileAllChanges checks watchers while Services and slices of a real API server change
// without a pause. One API server streams lists, the other does not.
func TestCheckWhileAllChanges(t *testing.T) {
	for name, flags := range map[string][]string{"streamed lists": nil, "fetched lists": {"--feature-gates=WatchList=false"}} {
		t.Run(name, func(t *testing.T) {
			cp := controlplane.Start(t, controlplane.Options{APIServerFlags: flags})
			namespace := cp.Namespace(t)
			changing, end := context.WithCancel(t.Context())
			const writers = 4
			ended := make(chan error, writers)
			for i := range writers {
				services, slices := cp.Client().CoreV1().Services(namespace), cp.Client().DiscoveryV1().EndpointSlices(namespace)
				service, err := services.Create(t.Context(), &corev1.Service{
					ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("web-%d", i)}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}},
				}, metav1.CreateOptions{})
				require.NoError(t, err)
				changed := slice(fmt.Sprintf("changing-%d", i), "")
				changed.Namespace = namespace
				still := slice(fmt.Sprintf("still-%d", i), "")
				still.Namespace = namespace
				for _, s := range []*discoveryv1.EndpointSlice{changed, still} {
					_, err = slices.Create(t.Context(), s, metav1.CreateOptions{})
					require.NoError(t, err)
				}
				service.ResourceVersion = "" // update whatever version exists then
				go func() {
					for n := 0; ; n++ {
						service.Spec.Ports[0].Port = int32(80 + n%2)
						changed.Endpoints[0].Addresses[0] = fmt.Sprintf("10.1.2.%d", n%2)
						_, err := services.Update(changing, service, metav1.UpdateOptions{})
						if err == nil {
							_, err = slices.Update(changing, changed, metav1.UpdateOptions{})
						}
						if err != nil {
							ended <- err
							return
						}
					}
				}()
			}
			defer func() {
				end()
				for range writers {
					require.ErrorIs(t, <-ended, context.Canceled)
				}
			}()

			var members []*fleet.Member
			for i := range 3 {
				members = append(members, &fleet.Member{Index: i, Name: fmt.Sprintf("node-%d", i)})
			}
			w := starting(t, WatchOptions{Config: cp.AdminConfig(), Members: members, Logger: slog.New(slog.DiscardHandler)})
			requireSynced(t, w)
			fetched := w.Fetched.Load()
			patient, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			require.NoError(t, w.Check(patient))
			require.Equal(t, fetched, w.Fetched.Load(), "lists of the reference do not count")

			following, stop := context.WithCancel(t.Context())
			var running sync.WaitGroup
			holding, err := w.Holding(following, &running)
			require.NoError(t, err)
			require.Eventually(t, func() bool { return len(holding(members)) == len(members) }, time.Minute, 10*time.Millisecond)
			stop()
			running.Wait()

			lose(w, 1, model.Key{Kind: model.KindSlice, Namespace: namespace, Name: "still-2"})
			impatient, cancel := context.WithTimeout(t.Context(), 10*retryCheck)
			defer cancel()
			err = w.Check(impatient)
			require.ErrorIs(t, err, fleet.ErrDiverged)
			require.ErrorContains(t, err, "\n  watcher node-1: ")
		})
	}
}

// lose removes a slice from the state of a watcher.
func lose(w *Watchers, node int, key model.Key) {
	w.decoder.mu.Lock()
	number := w.decoder.numbers[key]
	w.decoder.mu.Unlock()
	s := w.all[node].streams[1]
	s.mu.Lock()
	defer s.mu.Unlock()
	s.digest -= s.held[number]
	s.held[number] = 0
}

// TestComparison compares a watcher that is ahead of the reference on each call, and a watcher that
// holds an additional slice.
func TestComparison(t *testing.T) {
	a := newAPI(t, map[string][]func(*answer){"services": {noServices}, "nodes": {noNodes}, "endpointslices": {noSlices}})
	w := watching(t, a)
	requireSynced(t, w)
	following, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	r, err := w.startReference(following, &running)
	require.NoError(t, err)
	require.Eventually(t, func() bool { return r.missing() == nil }, time.Minute, time.Millisecond)
	stop()
	running.Wait() // from here on, the test feeds events

	member, node, reference := w.Members[0], w.all[0].streams[1], r.streams[1]
	again := func() { r.nodes[0][1] = comparison{last: node.sight()} }
	changed := func(s *stream, resourceVersion string) {
		t.Helper()
		e, err := w.decoder.of(slice("web", resourceVersion))
		require.NoError(t, err)
		w.take(s, e)
	}
	changed(node, "2")
	again()
	require.False(t, r.holds(member), "the reference has not reached this state")
	changed(node, "3")
	require.False(t, r.holds(member))
	changed(node, "4")
	changed(reference, "2")
	require.True(t, r.holds(member), "the reference had the state of the first call")
	require.True(t, r.holds(member), "one match is enough")

	changed(reference, "3")
	changed(reference, "4")
	gone, err := w.decoder.of(slice("gone", "5"))
	require.NoError(t, err)
	w.take(node, gone)
	again()
	require.False(t, r.holds(member))
	changed(node, "6")
	changed(reference, "6")
	require.False(t, r.holds(member), "the watcher has an additional slice at the same version")
	changed(node, "7")
	changed(reference, "7")
	require.False(t, r.holds(member))

	reference.forget()
	lists, err := w.decoder.of(slice("gone", "5"))
	require.NoError(t, err)
	w.take(reference, lists)
	changed(reference, "7")
	require.False(t, r.holds(member), "an incomplete list is not a state")
	w.take(reference, &event{bookmark: true, complete: true, resourceVersion: "8"})
	require.True(t, r.holds(member))
}

// TestReferenceWithoutState uses API servers that do not answer the reference, that refuse its
// requests, or that break off its list.
func TestReferenceWithoutState(t *testing.T) {
	for want, answers := range map[string]func(*answer){
		"no complete list came in time": func(a *answer) { <-a.request.Context().Done() },
		"not today":                     func(a *answer) { http.Error(a, "not today", http.StatusForbidden) },
		"/apis/discovery.k8s.io/v1/endpointslices": func(a *answer) {
			a.send(watch.Added, slice("web", "2"))
			a.breakOff()
		},
	} {
		t.Run(want, func(t *testing.T) {
			a := newAPI(t, map[string][]func(*answer){"services": {noServices}, "nodes": {noNodes}, "endpointslices": {noSlices, answers}})
			w := watching(t, a)
			requireSynced(t, w)
			ctx, cancel := context.WithTimeout(t.Context(), 2*retryCheck)
			defer cancel()
			err := w.Check(ctx)
			require.ErrorIs(t, err, fleet.ErrDiverged)
			require.ErrorContains(t, err, want)
			require.ErrorContains(t, err, "1 watchers could not be compared")
			require.ErrorContains(t, err, "lets the kubeconfig's user list and watch")
			require.ErrorContains(t, err, "\n  watcher node-1: ")
		})
	}
}
