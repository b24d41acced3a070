package testenv

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"
)

// Outcome is the result of an attempt to reach a server.
type Outcome string

// The outcomes of an attempt.
const (
	// Answered means that a server replied.
	Answered Outcome = "answered"
	// Refused means that a TCP reset or an ICMP port unreachable came back, from another host or
	// the host itself. A closed port and the REJECT of iptables cause this.
	Refused Outcome = "refused"
	// TimedOut means that nothing came back in time. The DROP of iptables causes this.
	TimedOut Outcome = "timed out"
	// Unreachable means that another ICMP unreachable came back, or that the host has no route.
	Unreachable Outcome = "unreachable"
	// Denied means that the host's own netfilter dropped a datagram (EPERM). For TCP the outcome is
	// TimedOut.
	Denied Outcome = "denied"
	// Failed means any other error, such as a reset of an established connection.
	Failed Outcome = "failed"
)

// ProbeOptions configure how [Host.Probe] and [Host.Dial] connect. The zero value suits most tests.
type ProbeOptions struct {
	// Source is the address and port to connect from. If either is zero, the kernel chooses it. An
	// exception is the port for UDP: this package chooses one that no datagram of this process has
	// come from recently.
	Source netip.AddrPort
	// Timeout bounds the duration of an attempt; 0 means one second. A probe waits that long for
	// each TimedOut.
	Timeout time.Duration
}

// Result is the result of a probe.
type Result struct {
	Attempts []Attempt
}

// Attempt is the result of one new connection.
type Attempt struct {
	Outcome Outcome
	// Reply is set if the outcome is Answered. Otherwise Err is set.
	Reply Reply
	Err   error
}

// Probe makes n new connections one after the other and returns the outcome of each. For UDP it
// sends n datagrams from new sockets. It makes fewer attempts only if ctx ends.
func (h *Host) Probe(ctx context.Context, proto Proto, dst netip.AddrPort, n int, options ProbeOptions) Result {
	var result Result
	for i := range n {
		reply, err := h.probeOnce(ctx, proto, dst, fmt.Sprintf("attempt %d", i), options)
		result.Attempts = append(result.Attempts, Attempt{Outcome: outcomeOf(err), Reply: reply, Err: err})
		if ctx.Err() != nil {
			break
		}
	}
	return result
}

func (h *Host) probeOnce(ctx context.Context, proto Proto, dst netip.AddrPort, text string, options ProbeOptions) (Reply, error) {
	ctx, cancel := context.WithTimeout(ctx, options.timeout())
	defer cancel()
	conn, err := h.Dial(ctx, proto, dst, options)
	if err != nil {
		return Reply{}, err
	}
	defer conn.Close()
	return conn.Echo(ctx, text)
}

func (o ProbeOptions) timeout() time.Duration {
	if o.Timeout == 0 {
		return time.Second
	}
	return o.Timeout
}

func outcomeOf(err error) Outcome {
	var timeout net.Error
	switch {
	case err == nil:
		return Answered
	case errors.Is(err, syscall.ECONNREFUSED):
		return Refused
	case errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH):
		return Unreachable
	case errors.Is(err, syscall.EPERM):
		return Denied
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded), errors.As(err, &timeout) && timeout.Timeout():
		return TimedOut
	default:
		return Failed
	}
}

// Count returns the number of attempts with the outcome.
func (r Result) Count(outcome Outcome) int {
	count := 0
	for _, attempt := range r.Attempts {
		if attempt.Outcome == outcome {
			count++
		}
	}
	return count
}

// All reports whether there was at least one attempt and every attempt had the outcome.
func (r Result) All(outcome Outcome) bool {
	return len(r.Attempts) > 0 && r.Count(outcome) == len(r.Attempts)
}

// Backends returns the number of answers by the name of the host that answered.
func (r Result) Backends() map[string]int {
	counts := map[string]int{}
	for reply := range r.replies {
		counts[reply.Name]++
	}
	return counts
}

// Servers returns the number of answers by the destination address that the server saw.
func (r Result) Servers() map[netip.AddrPort]int {
	counts := map[netip.AddrPort]int{}
	for reply := range r.replies {
		counts[reply.Server]++
	}
	return counts
}

// Clients returns the distinct source addresses that the servers on a host saw, in ascending order.
func (r Result) Clients(name string) []netip.Addr {
	seen := map[netip.Addr]bool{}
	for reply := range r.replies {
		if reply.Name == name {
			seen[reply.Client.Addr()] = true
		}
	}
	return slices.SortedFunc(maps.Keys(seen), netip.Addr.Compare)
}

func (r Result) replies(yield func(Reply) bool) {
	for _, attempt := range r.Attempts {
		if attempt.Outcome == Answered && !yield(attempt.Reply) {
			return
		}
	}
}

// String summarizes the result in one line, for messages of failing tests.
func (r Result) String() string {
	counts := map[string]int{}
	for _, attempt := range r.Attempts {
		what := fmt.Sprintf("%s by %s, which saw %s → %s", attempt.Outcome, attempt.Reply.Name, attempt.Reply.Client.Addr(), attempt.Reply.Server)
		if attempt.Outcome != Answered {
			// the innermost error, because the outer ones contain ports, which differ
			cause := attempt.Err
			for next := cause; next != nil; next = errors.Unwrap(cause) {
				cause = next
			}
			what = fmt.Sprintf("%s (%v)", attempt.Outcome, cause)
		}
		counts[what]++
	}
	var parts []string
	for _, what := range slices.Sorted(maps.Keys(counts)) {
		parts = append(parts, fmt.Sprintf("%d %s", counts[what], what))
	}
	return strings.Join(parts, "; ")
}

// Conn is an open connection to a [Server], or a connected UDP socket.
type Conn struct {
	conn  net.Conn
	lines *bufio.Reader
}

// Dial opens a connection to a server and leaves it open. ctx limits only the dialing.
func (h *Host) Dial(ctx context.Context, proto Proto, dst netip.AddrPort, options ProbeOptions) (*Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, options.timeout())
	defer cancel()
	conn, err := h.dial(ctx, string(proto), dst, options.Source)
	if err != nil {
		return nil, err
	}
	if tcp, ok := conn.(*net.TCPConn); ok {
		// Close with a reset, so that there is no TIME_WAIT and the source port is free at once.
		if err := tcp.SetLinger(0); err != nil {
			return nil, errors.Join(err, conn.Close())
		}
	}
	return &Conn{conn: conn, lines: bufio.NewReaderSize(conn, 65536)}, nil
}

// LocalAddr returns the source address and port.
func (c *Conn) LocalAddr() netip.AddrPort { return addrPort(c.conn.LocalAddr()) }

// Echo sends a line of text and returns the server's reply to it. ctx limits the wait.
func (c *Conn) Echo(ctx context.Context, text string) (Reply, error) {
	stop, err := limit(ctx, c.conn)
	if err != nil {
		return Reply{}, err
	}
	defer stop()
	if _, err := c.conn.Write([]byte(text + "\n")); err != nil {
		return Reply{}, c.explain(err)
	}
	for {
		line, err := c.lines.ReadBytes('\n')
		if err != nil {
			return Reply{}, err
		}
		var reply Reply
		if err := json.Unmarshal(bytes.TrimSpace(line), &reply); err != nil {
			return Reply{}, fmt.Errorf("not the reply of a testenv server: %q: %w", line, err)
		}
		if reply.Echo == text { // any other reply is a late one, to an earlier datagram
			return reply, nil
		}
	}
}

// explain finds out why sending was denied. The host's own REJECT also sends an ICMP error, its
// DROP does not.
func (c *Conn) explain(err error) error {
	if !errors.Is(err, syscall.EPERM) {
		return err
	}
	if deadlineErr := c.conn.SetReadDeadline(time.Now().Add(localErrorPatience)); deadlineErr != nil {
		return errors.Join(err, deadlineErr)
	}
	if _, readErr := c.lines.ReadByte(); errors.Is(readErr, syscall.ECONNREFUSED) {
		return readErr
	}
	return err
}

// localErrorPatience bounds the wait for an ICMP error from the host to itself, which is usually
// immediate.
const localErrorPatience = 100 * time.Millisecond

// Close closes the connection.
func (c *Conn) Close() {
	// The only possible error is that the connection is closed already.
	_ = c.conn.Close()
}
