// TestNew proves that New reports what a kernel lacks, on threads for which a real kernel refuses
// it.
package nftables

import (
	"bytes"
	"context"
	"log/slog"
	"runtime"
	"sync"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/internal/testenv"
)

// TestNew asserts that New reports what is missing.
func TestNew(t *testing.T) {
	t.Parallel()
	_, err := New(Options{MasqueradeMark: 3})
	require.ErrorContains(t, err, "use a single bit")
	node := testenv.NewNetwork(t).AddNode("a")
	require.NoError(t, node.Do(func() error { // on a thread of its own
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var all [2]unix.CapUserData
		require.NoError(t, unix.Capget(&header, &all[0]))
		without := all
		without[0].Effective &^= 1 << unix.CAP_NET_ADMIN
		require.NoError(t, unix.Capset(&header, &without[0]))
		_, err := New(Options{})
		require.ErrorIs(t, err, unix.EPERM)
		require.ErrorContains(t, err, "CAP_NET_ADMIN")
		return unix.Capset(&header, &all[0])
	}))
	// The node has the IP family, but not everything that it needs: an object of another kind is in
	// the way.
	_, err = node.Run(t.Context(), "nft", "add table ip6 slicecast-check; add chain ip6 slicecast-check prerouting { type filter hook prerouting priority 0; }")
	require.NoError(t, err)
	require.NoError(t, node.Do(func() error {
		_, err := New(Options{})
		require.ErrorContains(t, err, "nftables for IPv6")
		require.ErrorContains(t, err, "or another programmer")
		require.ErrorContains(t, err, "nft modules nat, masq, fib, ct, numgen and reject")
		return nil
	}))
	// The node lacks the IP family.
	var log bytes.Buffer
	var p *Programmer
	var wait sync.WaitGroup
	wait.Go(func() {
		runtime.LockOSThread() // never unlocked, so the thread ends with the goroutine
		err = node.Do(func() (err error) {
			if err = withoutIPv6(); err == nil {
				p, err = New(Options{Log: slog.New(slog.NewTextHandler(&log, nil))})
			}
			return err
		})
	})
	wait.Wait()
	require.NoError(t, err)
	defer p.Close()
	require.Len(t, p.families, 1)
	require.Contains(t, log.String(), "does not support an IP family")
	require.Contains(t, log.String(), "family=IPv6")
	_, err = node.Run(t.Context(), "nft", "delete table ip6 slicecast-check")
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, newInHost(t, node.Host, Options{}).Replace(ctx, newState()), context.Canceled)
}

// withoutIPv6 makes the kernel answer this thread like one without IPv6, as long as the thread
// lives.
func withoutIPv6() error {
	const number, firstArgument = 0, 16 // offsets in struct seccomp_data
	filter, err := bpf.Assemble([]bpf.Instruction{
		bpf.LoadAbsolute{Off: number, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.SYS_SOCKET, SkipTrue: 3},
		bpf.LoadAbsolute{Off: firstArgument, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.AF_INET6, SkipTrue: 1},
		bpf.RetConstant{Val: unix.SECCOMP_RET_ERRNO | uint32(unix.EAFNOSUPPORT)},
		bpf.RetConstant{Val: unix.SECCOMP_RET_ALLOW},
	})
	if err != nil {
		return err
	}
	program := make([]unix.SockFilter, len(filter))
	for i, f := range filter {
		program[i] = unix.SockFilter{Code: f.Op, Jt: f.Jt, Jf: f.Jf, K: f.K}
	}
	sock := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	return unix.Prctl(unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&sock)), 0, 0)
}
