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

// Outcome is what became of an attempt to reach a server.
type Outcome string

// The outcomes of an attempt.
const (
	// Answered: a server replied.
	Answered Outcome = "answered"
	// Refused: a TCP reset or an ICMP port unreachable came back, as from a closed port or iptables' REJECT, be it another
	// host's or the host's own.
	Refused Outcome = "refused"
	// TimedOut: nothing came back in time, as after iptables' DROP.
	TimedOut Outcome = "timed out"
	// Unreachable: another ICMP unreachable came back, or the host has no route.
	Unreachable Outcome = "unreachable"
	// Denied: the host's own netfilter dropped a datagram (EPERM). For TCP that is TimedOut.
	Denied Outcome = "denied"
	// Failed: anything else, such as a connection that was reset after it had been established; see the error.
	Failed Outcome = "failed"
)

// ProbeOptions changes how [Host.Probe] and [Host.Dial] connect. The zero value is good for most.
type ProbeOptions struct {
	// Source is the address and the port to connect from. Either may be zero: the kernel chooses, but the port for UDP, which no other
	// datagram of this process has come from lately.
	Source netip.AddrPort
	// Timeout is how long an attempt may take. 0 means one second. A test that expects TimedOut waits for it each time.
	Timeout time.Duration
}

// Result is what a probe saw.
type Result struct {
	Attempts []Attempt
}

// Attempt is one new connection.
type Attempt struct {
	Outcome Outcome
	// Reply is set if the outcome is Answered, else Err is.
	Reply Reply
	Err   error
}

// Probe makes n new connections or, for UDP, sends n datagrams from new sockets, one after the other, and says of each
// what became of it. It returns early only when ctx ends.
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

// Count is how many attempts had the outcome.
func (r Result) Count(outcome Outcome) int {
	count := 0
	for _, attempt := range r.Attempts {
		if attempt.Outcome == outcome {
			count++
		}
	}
	return count
}

// All tells whether there was an attempt, and all had the outcome.
func (r Result) All(outcome Outcome) bool {
	return len(r.Attempts) > 0 && r.Count(outcome) == len(r.Attempts)
}

// Backends counts the answers by the host that gave them.
func (r Result) Backends() map[string]int {
	counts := map[string]int{}
	for reply := range r.replies {
		counts[reply.Name]++
	}
	return counts
}

// Servers counts the answers by the destination that the server saw.
func (r Result) Servers() map[netip.AddrPort]int {
	counts := map[netip.AddrPort]int{}
	for reply := range r.replies {
		counts[reply.Server]++
	}
	return counts
}

// Clients are the different source addresses that the servers on a host saw, in order.
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

// String summarises the result in a line, for a failing test to show.
func (r Result) String() string {
	counts := map[string]int{}
	for _, attempt := range r.Attempts {
		what := fmt.Sprintf("%s by %s, which saw %s → %s", attempt.Outcome, attempt.Reply.Name, attempt.Reply.Client.Addr(), attempt.Reply.Server)
		if attempt.Outcome != Answered {
			cause := attempt.Err // without the ports, which differ
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

// Dial opens a connection to a server and leaves it open. ctx limits the dialing.
func (h *Host) Dial(ctx context.Context, proto Proto, dst netip.AddrPort, options ProbeOptions) (*Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, options.timeout())
	defer cancel()
	conn, err := h.dial(ctx, string(proto), dst, options.Source)
	if err != nil {
		return nil, err
	}
	if tcp, ok := conn.(*net.TCPConn); ok {
		// Close with a reset: no TIME_WAIT, the source port is free at once.
		if err := tcp.SetLinger(0); err != nil {
			return nil, errors.Join(err, conn.Close())
		}
	}
	return &Conn{conn: conn, lines: bufio.NewReaderSize(conn, 65536)}, nil
}

// LocalAddr is the source address and port.
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
		if reply.Echo == text { // else the late reply to an earlier datagram
			return reply, nil
		}
	}
}

// explain finds out whether sending was denied by the host's own REJECT, which says so in an ICMP error, or by its DROP.
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

// localErrorPatience is how long an ICMP error may take from the host to itself. Usually it is there at once.
const localErrorPatience = 100 * time.Millisecond

// Close ends the connection.
func (c *Conn) Close() {
	// The only error is that it is closed already.
	_ = c.conn.Close()
}
