package testenv

import (
	"context"
	"fmt"
	"time"
)

// WaitFor calls condition repeatedly until it returns nil. If ctx ends first, WaitFor returns the
// last error of condition.
func WaitFor(ctx context.Context, condition func() error) error {
	return WaitForEvery(ctx, 10*time.Millisecond, condition)
}

// WaitForEvery is WaitFor with an interval of its own, for conditions that cost something.
func WaitForEvery(ctx context.Context, interval time.Duration, condition func() error) error {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		err := condition()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w; last: %w", context.Cause(ctx), err)
		case <-ticker.C:
		}
	}
}

// Eventually calls [WaitFor] with a time limit. The test fails if condition does not return nil in
// time.
func Eventually(t TB, timeout time.Duration, condition func() error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	if err := WaitFor(ctx, condition); err != nil {
		t.Fatalf("not within %v: %v", timeout, err)
	}
}

// AwaitGrowth waits until each count has grown by two. If it counts attempts that follow one
// another, at least one of these two began after the call. The test fails if a count does not grow
// in time.
func AwaitGrowth[K comparable](t TB, timeout time.Duration, counts func() map[K]int) {
	t.Helper()
	before := counts()
	Eventually(t, timeout, func() error {
		for key, n := range counts() {
			if n < before[key]+2 {
				return fmt.Errorf("%v: %d since the call", key, n-before[key])
			}
		}
		return nil
	})
}
