// These tests prove that the API server's clock is known as well as its answers tell it, and that
// it is never late because they have whole seconds only.
package kube

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestClock(t *testing.T) {
	second := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	at := second.Add
	type answer struct{ sent, date, received time.Time }
	for name, test := range map[string]struct {
		answers []answer
		want    time.Duration
	}{
		"equal, at the end of a second": {
			[]answer{{at(990 * time.Millisecond), second, at(999 * time.Millisecond)}}, 0,
		},
		"equal, over the end of a second": {
			[]answer{{at(990 * time.Millisecond), at(time.Second), at(1010 * time.Millisecond)}}, 0,
		},
		"ahead": {
			[]answer{{at(0), at(10 * time.Second), at(100 * time.Millisecond)}}, 9900 * time.Millisecond,
		},
		"ahead, and a later answer tells more": {
			[]answer{
				{at(500 * time.Millisecond), at(10 * time.Second), at(600 * time.Millisecond)},
				{at(2 * time.Second), at(12 * time.Second), at(2010 * time.Millisecond)},
			}, 9990 * time.Millisecond,
		},
		"behind": {
			[]answer{{at(0), at(-10 * time.Second), at(100 * time.Millisecond)}}, -9 * time.Second,
		},
		"a slow answer tells nothing new": {
			[]answer{
				{at(0), at(10 * time.Second), at(0)},
				{at(time.Second), at(11 * time.Second), at(time.Minute)},
			}, 10 * time.Second,
		},
		"mended": {
			[]answer{{at(0), at(10 * time.Second), at(0)}, {at(time.Second), at(time.Second), at(time.Second)}}, time.Second,
		},
	} {
		t.Run(name, func(t *testing.T) {
			var c serverClock
			for _, a := range test.answers {
				c.observe(a.sent, a.date, a.received)
			}
			require.Equal(t, test.want, c.ahead())
		})
	}
}

// TestClockIsNotLate draws answers of servers whose clock is right. What such a server has just
// issued must be valid at once.
func TestClockIsNotLate(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	var c serverClock
	sent := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for range 10_000 {
		sent = sent.Add(time.Duration(r.Int64N(int64(time.Minute))))
		answered := sent.Add(time.Duration(r.Int64N(int64(time.Second))))
		received := answered.Add(time.Duration(r.Int64N(int64(time.Second))))
		c.observe(sent, answered.Truncate(time.Second), received)
		require.Zero(t, c.ahead())
	}
}
