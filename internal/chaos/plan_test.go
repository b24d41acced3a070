// These tests prove that a plan follows from its seed alone, that each fault has its turn before
// any comes again, that faults do not overlap, and that the churn changes only what exists.
package chaos

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func plan(t *testing.T, seed uint64, duration time.Duration, faults ...string) Plan {
	t.Helper()
	p, err := NewPlan(seed, duration, faults...)
	require.NoError(t, err)
	return p
}

func TestPlanFollowsFromItsSeed(t *testing.T) {
	one := plan(t, 1, time.Hour)
	require.Equal(t, one, plan(t, 1, time.Hour))
	other := plan(t, 2, time.Hour)
	require.NotEqual(t, one.Steps, other.Steps)
	require.NotEqual(t, one.Changes, other.Changes)
	require.Equal(t, one.Changes, plan(t, 1, time.Hour, "cut").Changes, "the churn depends on the choice of faults")
}

func TestEachFaultHasItsTurn(t *testing.T) {
	for _, duration := range []time.Duration{minSlot, 15 * time.Minute, time.Hour, 4 * time.Hour} {
		counts, end := map[string]int{}, time.Duration(0)
		steps := plan(t, 7, duration).Steps
		require.NotEmpty(t, steps, duration)
		for _, s := range steps {
			counts[s.Fault]++
			require.GreaterOrEqual(t, s.At, end, "%s begins before the fault before it ends", s.Fault)
			require.Positive(t, s.Lasts)
			end = s.At + s.Lasts
		}
		require.LessOrEqual(t, end, duration)
		if duration >= 15*time.Minute {
			most, least := 0, len(steps)
			for i := range Faults {
				most, least = max(most, counts[Faults[i].Name]), min(least, counts[Faults[i].Name])
			}
			assert.Positive(t, least, "%s: a fault has no turn: %v", duration, counts)
			assert.LessOrEqual(t, most-least, 1, "%s: %v", duration, counts)
		}
	}
}

func TestChurnChangesWhatExists(t *testing.T) {
	papers, gone, seen := map[int]bool{}, map[int]bool{}, map[Action]int{}
	last := time.Duration(-1)
	for _, c := range plan(t, 3, 4*time.Hour).Changes {
		seen[c.Action]++
		require.Greater(t, c.At, last)
		last = c.At
		switch c.Action {
		case Scale, Roll:
			require.Less(t, c.Object, deployments-1, "the last Deployment changes")
		case Create:
			require.False(t, papers[c.Object] || gone[c.Object], "a name comes back")
			papers[c.Object] = true
		case Move:
			require.True(t, papers[c.Object])
		case Delete:
			require.True(t, papers[c.Object])
			delete(papers, c.Object)
			gone[c.Object] = true
		}
		require.LessOrEqual(t, len(papers), maxPaper)
	}
	require.Len(t, seen, 5)
}

func TestPlanRefuses(t *testing.T) {
	_, err := NewPlan(1, time.Hour, "cut", "earthquake")
	require.ErrorContains(t, err, "earthquake")
	_, err = NewPlan(1, time.Second)
	require.ErrorContains(t, err, "at least")
}
