package testenv

import (
	"context"
	"fmt"
	"time"
)

// WaitFor calls condition repeatedly until it returns nil. If ctx ends first, WaitFor returns the
// last error of condition.
func WaitFor(ctx context.Context, condition func() error) error {
	return waitFor(ctx, 10*time.Millisecond, condition)
}

func waitFor(ctx context.Context, interval time.Duration, condition func() error) error {
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
