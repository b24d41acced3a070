// These tests prove that the source says since when it may have missed changes: while requests
// fail, while a list is refused, and when nothing has come for long.
package kube

import (
	"errors"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/slicecast/slicecast/internal/model"
)

func TestStale(t *testing.T) {
	api := newAPI(t)
	api.put(service("a"))
	r := start(t, api.config())
	r.awaitSynced(t)
	since, why := r.source.Stale()
	require.Zero(t, since, why)
	require.WithinDuration(t, time.Now(), r.source.LastEvent(), time.Minute)

	began := time.Now()
	api.fail(func(w http.ResponseWriter, r *http.Request) bool {
		return isServices(r) && refuse(w, http.StatusServiceUnavailable, metav1.StatusReasonServiceUnavailable)
	})
	api.CloseClientConnections()
	// The other kinds answer again at once.
	services := &r.source.resources[0].contact
	eventually(t, "the failure", func() bool { since, _ = services.stale(time.Now()); return !since.IsZero() })
	eventually(t, "the failure", func() bool {
		var at time.Time
		at, why = r.source.Stale()
		return at.Equal(since)
	})
	require.False(t, since.Before(began))
	require.Contains(t, why, "Service: ")
	first := since
	eventually(t, "another attempt", func() bool {
		return len(api.seen(isServices)) > 4
	})
	since, _ = services.stale(time.Now())
	require.Equal(t, first, since, "the first failure counts")
	last := r.source.LastEvent()
	require.False(t, last.After(services.last()), "what the other kinds hear does not count for it")

	api.fail(nil)
	eventually(t, "the recovery", func() bool { since, _ = r.source.Stale(); return since.IsZero() })
	eventually(t, "an event", func() bool { return r.source.LastEvent().After(last) })
}

// TestLastEventBeforeAll checks that the time is zero while a kind has not been heard of.
func TestLastEventBeforeAll(t *testing.T) {
	s := &Source{resources: []*resource{{kind: model.KindService}, {kind: model.KindNode}, {kind: model.KindSlice}}}
	now := time.Now()
	s.resources[0].contact.hear(now)
	require.Zero(t, s.LastEvent())
	s.resources[2].contact.hear(now.Add(-time.Second))
	require.Equal(t, now.Add(-time.Second), s.LastEvent())
}

func TestContact(t *testing.T) {
	var c contact
	now := time.Now()
	c.fail(now, errors.New("refused"))
	since, _ := c.stale(now.Add(time.Hour))
	require.Zero(t, since, "nothing was served before the first answer")
	c.succeed(now)
	since, _ = c.stale(now.Add(silence))
	require.Zero(t, since)
	since, why := c.stale(now.Add(silence + time.Second))
	require.Equal(t, now, since)
	require.Contains(t, why, "neither an event nor an answer")
	c.hear(now.Add(time.Minute))
	since, _ = c.stale(now.Add(silence + time.Second))
	require.Zero(t, since)
	c.fail(now.Add(2*time.Minute), errors.New("timeout"))
	c.fail(now.Add(3*time.Minute), errors.New("refused"))
	c.hear(now.Add(4 * time.Minute)) // an event of another watch does not undo it
	since, why = c.stale(now.Add(5 * time.Minute))
	require.Equal(t, now.Add(2*time.Minute), since)
	require.Equal(t, "refused", why)

	// A list that is not believed stays the last word until one is, whatever else is answered.
	c.succeed(now.Add(6 * time.Minute))
	c.refuse(now.Add(7*time.Minute), errors.New("too old"))
	c.refuse(now.Add(8*time.Minute), errors.New("too old"))
	c.succeed(now.Add(9 * time.Minute))
	since, why = c.stale(now.Add(10 * time.Minute))
	require.Equal(t, now.Add(7*time.Minute), since)
	require.Equal(t, "too old", why)
	require.False(t, c.complete(now.Add(11*time.Minute), false))
	since, _ = c.stale(now.Add(12 * time.Minute))
	require.Zero(t, since)
}
