// This file has the processes that send packets and answer them while a program loads its rules.
// They have the highest ordinary priority, and no garbage collector that would stop them.
package kubeproxy

import (
	"cmp"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"runtime"
	"runtime/debug"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/internal/testenv"
)

const (
	// probeArgument makes this binary a prober.
	probeArgument = "probe"
	// lost is how long an answer may take before the packet counts as lost.
	lost = time.Second
	// overdue is how late an answer may be before it is counted.
	overdue = 5 * time.Millisecond
)

// probing is what a prober does until its standard input ends.
type probing struct {
	// Echo are the UDP addresses and ports at which it answers with what it receives.
	Echo []netip.AddrPort
	// Flows are what it sends. After true, once it is ready, its output has one [result] for each.
	Flows []flow
}

// flow is a packet in each millisecond, and the wait for its answer.
type flow struct {
	Name string
	To   netip.AddrPort
	// Connects is whether each packet is a new TCP connection. Otherwise, all are of one UDP flow.
	Connects bool
}

// result is what happened to the packets of a flow.
type result struct {
	Sent, Lost int
	// Over is the number of answers that were overdue by more than 5 ms.
	Over int
	// Longest is the longest time from when a packet was due until its answer.
	Longest time.Duration
	// Why is the first error by which a packet was lost.
	Why string
}

// startProber starts a prober in a host. stop ends it and returns its results; otherwise, the end
// of the host ends it.
func startProber(b *testing.B, host *testenv.Host, p probing) (stop func() []result) {
	b.Helper()
	setting, err := json.Marshal(p)
	require.NoError(b, err)
	self, err := os.Executable()
	require.NoError(b, err)
	cmd := host.Command(context.WithoutCancel(b.Context()), "nice", "--adjustment=-20", self, probeArgument, string(setting))
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(b, err)
	out, err := cmd.StdoutPipe()
	require.NoError(b, err)
	require.NoError(b, cmd.Start())
	answers := json.NewDecoder(out)
	var ready bool
	require.NoError(b, answers.Decode(&ready))
	return func() (results []result) {
		b.Helper()
		require.NoError(b, in.Close())
		require.NoError(b, answers.Decode(&results))
		require.NoError(b, cmd.Wait())
		return results
	}
}

// probe is a prober. It returns an exit code.
func probe(setting string) int {
	var p probing
	if err := json.Unmarshal([]byte(setting), &p); err != nil {
		fmt.Fprintln(os.Stderr, "prober:", err)
		return 1
	}
	debug.SetGCPercent(-1)
	runtime.GOMAXPROCS(len(p.Flows) + len(p.Echo) + 3) // no thread waits for another one
	done := make(chan struct{})
	results, errs := make([]result, len(p.Flows)), make([]error, len(p.Flows)+len(p.Echo))
	var running sync.WaitGroup
	for i, at := range p.Echo {
		socket, err := bind(at)
		if err != nil {
			fmt.Fprintln(os.Stderr, "prober:", err)
			return 1
		}
		go func() { errs[len(p.Flows)+i] = echo(socket) }()
	}
	out := json.NewEncoder(os.Stdout)
	_ = out.Encode(true) // the last one fails, too
	for i, f := range p.Flows {
		running.Go(func() { results[i], errs[i] = f.run(done) })
	}
	_, _ = io.Copy(io.Discard, os.Stdin)
	close(done)
	running.Wait()
	if err := errors.Join(append(errs, out.Encode(results))...); err != nil {
		fmt.Fprintln(os.Stderr, "prober:", err)
		return 1
	}
	return 0
}

// run sends until done is closed.
func (f flow) run(done <-chan struct{}) (r result, err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	send := func() error { return connect(f.To, lost) }
	if !f.Connects {
		socket, err := dialUDP(f.To, lost)
		if err != nil {
			return r, err
		}
		defer func() { _ = unix.Close(socket) }()
		send = func() error { return ask(socket, uint64(r.Sent)) }
	}
	for due := time.Now(); ; due = due.Add(time.Millisecond) {
		select {
		case <-done:
			return r, nil
		default:
		}
		if late := time.Since(due); late > time.Millisecond {
			due = due.Add(late) // what was due meanwhile was waiting, too, and is not sent
		} else if late < 0 {
			pause := unix.NsecToTimespec(-late.Nanoseconds())
			_ = unix.Nanosleep(&pause, nil) // an interruption only makes it shorter
		}
		r.Sent++
		err := send()
		took := time.Since(due)
		r.Longest = max(r.Longest, took)
		if took > overdue {
			r.Over++
		}
		if err != nil {
			r.Lost++
			r.Why = cmp.Or(r.Why, err.Error())
		}
	}
}

// dialUDP returns a UDP socket whose peer is at an address and port, and whose reads end after a
// timeout.
func dialUDP(to netip.AddrPort, timeout time.Duration) (socket int, err error) {
	socket, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	limit := unix.NsecToTimeval(timeout.Nanoseconds())
	err = errors.Join(
		unix.Connect(socket, &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())}),
		unix.SetsockoptTimeval(socket, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit))
	if err != nil {
		_ = unix.Close(socket)
		return 0, err
	}
	return socket, nil
}

// ask sends a number and waits for its echo. Echoes of earlier numbers are too late.
func ask(socket int, number uint64) error {
	message := binary.BigEndian.AppendUint64(nil, number)
	if _, err := unix.Write(socket, message); err != nil {
		return err
	}
	for {
		n, err := unix.Read(socket, message)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return err
		case n == 8 && binary.BigEndian.Uint64(message) == number:
			return nil
		}
	}
}

// bind returns a UDP socket with an address and port.
func bind(at netip.AddrPort) (socket int, err error) {
	socket, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	return socket, unix.Bind(socket, &unix.SockaddrInet4{Addr: at.Addr().As4(), Port: int(at.Port())})
}

// echo answers UDP packets with their own content.
func echo(socket int) error {
	runtime.LockOSThread()
	for message := make([]byte, 64); ; {
		n, from, err := unix.Recvfrom(socket, message, 0)
		if err == nil {
			err = unix.Sendto(socket, message[:n], 0, from)
		}
		if err != nil && !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}
