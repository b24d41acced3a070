// These tests prove that each request counts once, for the window in which it began and by its
// outcome, and that answers of the wrong Pods count as misrouted. A report fails for what is lost
// or misrouted when nothing is broken.
package chaos

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestTally(t *testing.T) {
	var first, second Window
	counts := &tally{}
	counts.window(&first.Counts, &first.Errors)
	early := counts.begin()
	for _, outcome := range []error{
		nil, nil, fmt.Errorf("way: %w", misroutedError{errors.New("wrong Pod")}), fmt.Errorf("dial: %w", syscall.ECONNREFUSED),
		fmt.Errorf("read: %w", os.ErrDeadlineExceeded), os.ErrDeadlineExceeded, syscall.EHOSTUNREACH, syscall.EHOSTUNREACH, syscall.EHOSTUNREACH,
	} {
		counts.begin()(outcome)
	}
	counts.window(&second.Counts, &second.Errors)
	counts.broken(errors.New("reset"))
	early(errors.New("late"))
	require.Equal(t, Counts{Requests: 10, Answered: 3, Refused: 1, TimedOut: 2, Failed: 4, Misrouted: 1}, counts.read(&first.Counts))
	require.Equal(t, 7, first.Counts.Lost())
	require.Len(t, first.Errors, maxFirsts)
	require.Equal(t, "way: wrong Pod", first.Errors[0])
	require.Equal(t, Counts{Broken: 1}, counts.read(&second.Counts))
	require.Equal(t, []string{"reset"}, second.Errors)
}

func TestMisrouted(t *testing.T) {
	l := &ledger{gone: map[string]time.Time{}}
	now := time.Now()
	late := now.Add(Grace + time.Millisecond)
	require.NoError(t, l.judge("web-1", "web-1-abc", late), "a Pod that no slice has named yet")
	require.ErrorAs(t, l.judge("web-1", "web-10-abc", now), new(misroutedError), "a Pod of another Service")
	require.ErrorAs(t, l.judge("web-1", "anchor-x", now), new(misroutedError), "a Pod of another Service")
	l.update(map[string]bool{"web-1-abc": true}, now.Add(-time.Hour))
	require.NoError(t, l.judge("web-1", "web-1-abc", late))
	l.update(nil, now)
	l.update(nil, now.Add(time.Hour)) // other endpoints change
	require.NoError(t, l.judge("web-1", "web-1-abc", now.Add(Grace)))
	require.ErrorAs(t, l.judge("web-1", "web-1-abc", late), new(misroutedError))
	l.update(map[string]bool{"web-1-abc": true}, late)
	require.NoError(t, l.judge("web-1", "web-1-abc", late), "a Pod that is ready again")
}

func TestReportFails(t *testing.T) {
	fine := func() *Report {
		r := &Report{Steps: []*StepResult{{Window: Window{Counts: Counts{Requests: 5, TimedOut: 5}}}}}
		r.Calm.Counts = Counts{Requests: 10, Answered: 10}
		return r
	}
	for name, c := range map[string]struct {
		breaks func(*Report)
		fails  bool
	}{
		"lost in a fault":         {func(*Report) {}, false},
		"misrouted in a fault":    {func(r *Report) { r.Steps[0].Counts.Misrouted = 1 }, false},
		"lost between faults":     {func(r *Report) { r.Quiet.Counts.Refused = 1 }, false},
		"misrouted between":       {func(r *Report) { r.Quiet.Counts.Misrouted = 1 }, true},
		"misrouted before all":    {func(r *Report) { r.Baseline.Counts.Misrouted = 1 }, true},
		"lost at the end":         {func(r *Report) { r.Calm.Counts.TimedOut = 1 }, true},
		"misrouted at the end":    {func(r *Report) { r.Calm.Counts.Misrouted = 1 }, true},
		"broken at the end":       {func(r *Report) { r.Calm.Counts.Broken = 1 }, true},
		"no request at the end":   {func(r *Report) { r.Calm.Counts = Counts{} }, true},
		"not converged in a step": {func(r *Report) { r.fail("not converged") }, true},
	} {
		r := fine()
		c.breaks(r)
		r.finish(time.Second)
		require.Equal(t, c.fails, len(r.Failures) > 0, "%s: %q", name, r.Failures)
	}
	sum := fine().Sum()
	require.Equal(t, Counts{Requests: 15, Answered: 10, TimedOut: 5}, sum)
}
