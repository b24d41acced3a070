// These tests prove that CPU time and memory are read from the kernel, for a process and the
// machine.
package usage

import (
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestOwnUsage(t *testing.T) {
	before, err := CPUOf(os.Getpid())
	require.NoError(t, err)
	machineBefore, err := MachineCPU()
	require.NoError(t, err)
	var used CPU
	require.Eventually(t, func() bool {
		for range 1_000_000 { // enough work to show up in the accounting
			_ = os.Getpid()
		}
		now, err := CPUOf(os.Getpid())
		require.NoError(t, err)
		used = now.Sub(before)
		return used.total >= 50*time.Millisecond
	}, time.Minute, time.Millisecond)
	require.NotZero(t, used.total%tick, "the total should be finer than ticks, except for one case in ten million")
	user, system := used.Split()
	require.Equal(t, used.total, user+system)
	machine, err := MachineCPU()
	require.NoError(t, err)
	require.GreaterOrEqual(t, machine-machineBefore, 20*time.Millisecond)

	m, err := MemoryOf(os.Getpid())
	require.NoError(t, err)
	require.Greater(t, m.Resident, int64(1<<20))
	require.GreaterOrEqual(t, m.Peak, m.Resident)
	require.Greater(t, m.Resident, m.Anonymous)
	require.Positive(t, m.Anonymous)
}

func TestSplit(t *testing.T) {
	for _, c := range []struct{ used, user, system time.Duration }{
		{used: 3 * time.Millisecond},
		{used: 45 * time.Millisecond, user: 10 * time.Millisecond, system: 30 * time.Millisecond},
	} {
		used := CPU{total: c.used, user: c.user, system: c.system}
		user, system := used.Split()
		require.Equal(t, c.used, user+system)
		if c.user > 0 {
			require.Equal(t, c.used/4, user, "the total is divided in the proportion of the ticks")
		}
		require.Equal(t, 2*c.used, used.Add(used).total)
		require.Zero(t, used.Sub(used).total)
	}
}

func TestNoSuchProcess(t *testing.T) {
	_, err := CPUOf(0)
	require.ErrorIs(t, err, os.ErrNotExist)
	_, err = MemoryOf(0)
	require.ErrorIs(t, err, os.ErrNotExist)
}

func TestThisMachine(t *testing.T) {
	m, err := ThisMachine()
	require.NoError(t, err)
	require.Positive(t, m.CPUs)
	require.Greater(t, m.Memory, int64(1<<28))
	require.NotEmpty(t, m.Kernel)
	require.Positive(t, m.OpenFiles)
	require.Positive(t, m.Ports)
}
