// This test proves that a violation is reported with its seed, that the seed violates the same
// invariant in a second run, and that its history is made as short as it can be.
package simulate

import (
	"fmt"
	"runtime/debug"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestReport plants a violation in the steps that restore etcd. These do so only if it was backed
// up before, so the shortest history has two steps.
func TestReport(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	defer func(before time.Duration) { *shrinking = before }(*shrinking)
	*shrinking = 10 * time.Minute
	o := order{Seed: 1, Planted: true}
	for !restores(o.schedule()) {
		o.Seed++
	}
	out := run(t, o)
	require.Equal(t, "planted: %s", out.Kind)
	text := describe(t, o, out)
	lines := strings.Split(text, "\n")
	require.Contains(t, lines[0], fmt.Sprintf("seed %d: planted: etcd is restored", o.Seed))
	require.Contains(t, lines[1], fmt.Sprintf("make simulate SEED=%d", o.Seed))
	require.Equal(t, !deterministic(t), strings.Contains(lines[1], "need not fail"), lines[1])
	require.Contains(t, lines[2], "A second run of the seed: planted: etcd is restored")
	require.Contains(t, lines[4], fmt.Sprintf("shrunk from %d steps, of which %d were faults, to 2:", len(out.Did), out.Faults))
	require.Contains(t, lines[5], "0 etcd is backed up")
	require.Contains(t, lines[6], "1 etcd is restored")
	require.Empty(t, lines[7])
	require.Contains(t, text, "VIOLATION: planted: etcd is restored")
}

// restores reports whether a schedule restores etcd after it has backed it up.
func restores(schedule []step) bool {
	backed := false
	for _, s := range schedule {
		switch actions[s.kind].name {
		case backUpEtcd:
			backed = true
		case restoreEtcd:
			if backed {
				return true
			}
		}
	}
	return false
}
