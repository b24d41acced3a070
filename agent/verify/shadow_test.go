// These tests prove that a shadow changes nothing in the kernel, and that it reports a difference
// once it has lasted, and its end.
package verify

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/view"
)

func TestShadow(t *testing.T) {
	t.Parallel()
	node := newNode(t)
	state := exampleState(node)
	s := NewShadow(ShadowOptions{Settle: 100 * time.Millisecond, Period: time.Hour, Logger: slog.New(slog.DiscardHandler)})
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	running.Go(func() {
		_ = node.Do(func() error { s.Run(ctx); return nil })
	})
	await := func(contains string) {
		t.Helper()
		require.Eventually(t, func() bool {
			reason := s.Reason()
			return contains == "" && reason == "" || contains != "" && strings.Contains(reason, contains)
		}, 30*time.Second, 10*time.Millisecond)
	}
	require.Empty(t, s.Reason(), "without a state, nothing is compared")
	require.NoError(t, s.Replace(t.Context(), state))
	await("is not translated")
	out, err := node.Run(t.Context(), "nft", "list", "ruleset")
	require.NoError(t, err)
	require.Empty(t, out, "a shadow programs nothing")

	replaceNFT(t, node, state)
	await("")

	// A change that whatever programs the kernel has not made.
	for id, p := range state.Ports {
		if id.Service.Name == "web" {
			changed := *p
			changed.Cluster = view.NewBackends(p.Cluster.List()[:2]...)
			require.NoError(t, s.Apply(t.Context(), []view.Change{{Before: p, After: &changed}}))
			await("shop/web")
			require.NoError(t, s.Apply(t.Context(), []view.Change{{Before: &changed, After: p}}))
			await("")
			break
		}
	}
	require.NoError(t, s.Cleanup(t.Context()))
}

func TestShadowIgnoresWhatEndsSoon(t *testing.T) {
	t.Parallel()
	s := NewShadow(ShadowOptions{Settle: time.Second, Logger: slog.New(slog.DiscardHandler)})
	d := func(found string) Result {
		return Result{Differences: []Difference{{Service: "a", Frontend: "b", Wanted: "w", Found: found}}}
	}
	now, since := time.Now(), map[about]time.Time{}
	s.note(d("x"), since, now)
	require.Empty(t, s.Reason())
	s.note(Result{}, since, now.Add(time.Second))
	s.note(d("x"), since, now.Add(2*time.Second))
	require.Empty(t, s.Reason(), "it has begun anew")
	s.note(d("y"), since, now.Add(3*time.Second))
	require.Contains(t, s.Reason(), "but y")
	s.note(Result{Unjudged: []string{"rule 7"}}, since, now.Add(4*time.Second))
	require.Equal(t, "not everything can be judged: rule 7", s.Reason())
}

// TestShadowThatCannotCompare checks that a shadow without a result does not look like one without
// differences.
func TestShadowThatCannotCompare(t *testing.T) {
	t.Parallel()
	s := NewShadow(ShadowOptions{Logger: slog.New(slog.DiscardHandler)})
	unjudged := func() float64 { return testutil.ToFloat64(s.unjudged) }
	s.failed(errors.New("no permission"))
	require.Equal(t, "the kernel cannot be compared with what it should do: no permission", s.Reason())
	require.Equal(t, 1.0, unjudged())
	s.note(Result{}, map[about]time.Time{}, time.Now())
	require.Empty(t, s.Reason())
	require.Zero(t, unjudged())
}
