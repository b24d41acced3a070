// Package probe serves and sends the packets of kubectl slicecast connectivity. A server answers
// each request with its name and the client's address. A client carries out plans and reports what
// became of each attempt. [Kernel] is the answer of another probe, of what the kernel can do.
//
// Servers are in Pods that anybody in the cluster can reach. So their connections, requests and
// answers are bounded in number, size and time, by package bounded, and an answer by UDP is never
// longer than its request.
package probe

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/slicecast/slicecast/internal/bounded"
)

const (
	// question is the beginning of each request.
	question = "who?"
	// requestSize is the length of each request and answer in bytes. Short ones are filled up with
	// blanks.
	requestSize = 256
	// maxName bounds the name of a server, so that an answer has room for an address.
	maxName = 128
	// maxPlans, maxAttempts and maxParallel bound what a client does.
	maxPlans, maxAttempts, maxParallel = 256, 20_000, 64
	// maxAtOnce bounds the attempts of all plans with an end together, so that they do not slow each
	// other and what is measured is the network.
	maxAtOnce = 4
	// maxPlansSize bounds the plans that a client reads, in bytes.
	maxPlansSize = 1 << 20
)

// Plan is a series of attempts to reach a server.
type Plan struct {
	// Network is tcp or udp, or lookup for resolving the host name in Address.
	Network string `json:"network"`
	// Address is that of the server, with its port.
	Address string `json:"address"`
	// Attempts is the number of attempts. 0 means until the client's input ends.
	Attempts int `json:"attempts,omitempty"`
	// Parallel is the number of attempts at the same time. 0 means one.
	Parallel int `json:"parallel,omitempty"`
	// Interval is the time between the starts of attempts. It is that of all attempts together.
	Interval time.Duration `json:"interval,omitempty"`
	// Timeout bounds each attempt.
	Timeout time.Duration `json:"timeout"`
	// MaxFailures ends the plan after so many attempts without an answer. 0 means that it does not.
	MaxFailures int `json:"maxFailures,omitempty"`
	// Keep makes all attempts on one connection. The plan ends when the connection breaks.
	Keep bool `json:"keep,omitempty"`
}

// Validate returns an error if a client refuses these plans.
func Validate(plans []Plan) error {
	if len(plans) > maxPlans {
		return fmt.Errorf("there are %d plans: use at most %d", len(plans), maxPlans)
	}
	for i, p := range plans {
		if err := p.validate(); err != nil {
			return fmt.Errorf("plan %d: %w", i, err)
		}
	}
	return nil
}

func (p Plan) validate() error {
	switch {
	case p.Network != "tcp" && p.Network != "udp" && p.Network != "lookup":
		return fmt.Errorf("network is %q: use tcp, udp or lookup", p.Network)
	case p.Attempts < 0 || p.Attempts > maxAttempts:
		return fmt.Errorf("attempts is %d: use 0 to %d", p.Attempts, maxAttempts)
	case p.Parallel < 0 || p.Parallel > maxParallel:
		return fmt.Errorf("parallel is %d: use 0 to %d", p.Parallel, maxParallel)
	case p.Timeout <= 0 || p.Timeout > time.Minute:
		return fmt.Errorf("timeout is %v: use a positive duration up to a minute", p.Timeout)
	case p.Attempts == 0 && p.Interval <= 0:
		return errors.New("interval is missing, which a plan without end needs")
	case p.Keep && p.Parallel > 1:
		return errors.New("parallel and keep exclude each other")
	}
	return nil
}

// Outcome is what became of an attempt.
type Outcome string

// The outcomes.
const (
	Answered Outcome = "answered"
	Refused  Outcome = "refused"
	TimedOut Outcome = "timed out"
	Failed   Outcome = "failed" // for another reason, which Error says
)

// Result is the outcome of an attempt.
type Result struct {
	// Plan is the index of the plan.
	Plan    int     `json:"plan"`
	Outcome Outcome `json:"outcome"`
	// Began is when the attempt began, counted from the begin of all plans.
	Began time.Duration `json:"began"`
	// Took is how long it was until the answer, or until the attempt failed.
	Took time.Duration `json:"took"`
	// Server is the name of the server that answered, and Client the address from which the request
	// came to it.
	Server string `json:"server,omitempty"`
	Client string `json:"client,omitempty"`
	// Addresses are those of a host name.
	Addresses []string `json:"addresses,omitempty"`
	Error     string   `json:"error,omitempty"`
}

// Run reads plans, a JSON array, carries them out at the same time, and writes each result as a
// line of JSON. Plans without end last until the input ends, and then only wait for attempts that
// have begun.
func Run(ctx context.Context, in io.Reader, out io.Writer) error {
	var plans []Plan
	decoder := json.NewDecoder(io.LimitReader(in, maxPlansSize))
	if err := decoder.Decode(&plans); err != nil {
		return fmt.Errorf("read the plans: %w", err)
	}
	if err := Validate(plans); err != nil {
		return err
	}
	endless := slices.ContainsFunc(plans, func(p Plan) bool { return p.Attempts == 0 })
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	more, end := context.WithCancel(ctx)
	defer end()
	if endless {
		// This goroutine may outlive Run by a read of the input.
		go func() {
			_, _ = io.Copy(io.Discard, in)
			end()
		}()
	}
	c := &client{cancel: cancel, began: time.Now(), atOnce: make(chan struct{}, maxAtOnce), encoder: json.NewEncoder(out)}
	var all sync.WaitGroup
	for i, p := range plans {
		all.Go(func() { c.carryOut(ctx, more, i, p) })
	}
	all.Wait()
	return c.err
}

// client carries out plans.
type client struct {
	cancel context.CancelFunc
	began  time.Time
	atOnce chan struct{} // has an element for each attempt that runs of a plan with an end

	mu      sync.Mutex // guards encoder and err
	encoder *json.Encoder
	err     error // the first error of the output
}

// report writes a result. If the output does not take it, all plans end.
func (c *client) report(r Result) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return
	}
	if err := c.encoder.Encode(r); err != nil {
		c.err = fmt.Errorf("write a result: %w", err)
		c.cancel()
	}
}

// carryOut carries out a plan. Attempts begin until more ends, and last until ctx ends.
func (c *client) carryOut(ctx, more context.Context, index int, p Plan) {
	var kept net.Conn
	defer func() {
		if kept != nil {
			_ = kept.Close()
		}
	}()
	slots := make(chan struct{}, max(p.Parallel, 1))
	var all sync.WaitGroup
	defer all.Wait()
	var failures atomic.Int64
	timer := time.NewTimer(0)
	defer timer.Stop()
	<-timer.C
	for n := 0; p.Attempts == 0 || n < p.Attempts; n++ {
		if n > 0 && p.Interval > 0 {
			timer.Reset(p.Interval)
			select {
			case <-timer.C:
			case <-more.Done():
				return
			}
		}
		select {
		case slots <- struct{}{}:
		case <-more.Done():
			return
		}
		if p.MaxFailures > 0 && failures.Load() >= int64(p.MaxFailures) {
			return
		}
		if p.Keep {
			began := time.Since(c.began)
			var r Result
			r, kept = attempt(ctx, p, kept)
			r.Plan, r.Began, r.Took = index, began, time.Since(c.began)-began
			if <-slots; ctx.Err() == nil {
				c.report(r)
			}
			if r.Outcome != Answered {
				return
			}
			continue
		}
		all.Go(func() {
			defer func() { <-slots }()
			if p.Attempts > 0 {
				select {
				case c.atOnce <- struct{}{}:
					defer func() { <-c.atOnce }()
				case <-ctx.Done():
					return
				}
			}
			began := time.Since(c.began)
			r, conn := attempt(ctx, p, nil)
			took := time.Since(c.began) - began
			if r.Outcome != Answered {
				failures.Add(1)
			}
			if conn != nil {
				_ = conn.Close()
			}
			if r.Plan, r.Began, r.Took = index, began, took; ctx.Err() == nil {
				c.report(r)
			}
		})
	}
}

// attempt sends a request, on conn unless that is nil, and receives the answer. It returns the
// connection that it used, which the caller must close.
func attempt(ctx context.Context, p Plan, conn net.Conn) (Result, net.Conn) {
	deadline := time.Now().Add(p.Timeout)
	limited, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	if p.Network == "lookup" {
		host, _, err := net.SplitHostPort(p.Address)
		if err != nil {
			return failure(err), nil
		}
		addresses, err := net.DefaultResolver.LookupHost(limited, host)
		if err != nil {
			return failure(err), nil
		}
		return Result{Outcome: Answered, Addresses: addresses}, nil
	}
	if conn == nil {
		var err error
		if conn, err = (&net.Dialer{}).DialContext(limited, p.Network, p.Address); err != nil {
			return failure(err), nil
		}
	}
	if err := conn.SetDeadline(deadline); err != nil {
		return failure(err), conn
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Now()) })
	defer stop()
	server, client, err := Ask(conn)
	if err != nil {
		return failure(err), conn
	}
	return Result{Outcome: Answered, Server: server, Client: client}, conn
}

// Ask sends a request on a connection to a server and receives the answer. It returns the name of
// the server, and the address from which the request came to it.
func Ask(conn net.Conn) (server, client string, err error) {
	if _, err := conn.Write(filled(question)); err != nil {
		return "", "", err
	}
	answer := make([]byte, requestSize)
	if conn.LocalAddr().Network() == "udp" {
		_, err = conn.Read(answer)
	} else {
		_, err = io.ReadFull(conn, answer)
	}
	if err != nil {
		return "", "", err
	}
	fields := strings.Fields(string(answer))
	if len(fields) != 2 {
		return "", "", fmt.Errorf("something else answers: %.40q", answer)
	}
	return fields[0], fields[1], nil
}

// failure returns the result of an attempt that failed.
func failure(err error) Result { return Result{Outcome: OutcomeOf(err), Error: err.Error()} }

// OutcomeOf returns the outcome of an attempt that failed with an error.
func OutcomeOf(err error) Outcome {
	var timeout interface{ Timeout() bool }
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return Refused
	case errors.Is(err, os.ErrDeadlineExceeded), errors.As(err, &timeout) && timeout.Timeout():
		return TimedOut
	}
	return Failed
}

// filled returns a text with blanks up to the length of requests and answers.
func filled(text string) []byte {
	out := bytes.Repeat([]byte{' '}, requestSize)
	copy(out, text)
	return out
}

// answer returns the answer of a server to a client.
func answer(name string, client net.Addr) []byte {
	host, _, err := net.SplitHostPort(client.String())
	if err != nil {
		host = client.String()
	}
	return filled(name + " " + cmp.Or(host, "unknown")) // no name contains a question mark
}

// serveConn answers the requests of a connection until one of the limits' times is over.
func serveConn(conn net.Conn, name string, limits bounded.Limits) {
	reader := bufio.NewReaderSize(conn, requestSize)
	request := make([]byte, requestSize)
	for {
		_ = conn.SetReadDeadline(time.Now().Add(limits.Idle)) // fails on closed ones, as Peek does
		if _, err := reader.Peek(1); err != nil {
			return
		}
		_ = conn.SetReadDeadline(time.Now().Add(limits.Read))
		if _, err := io.ReadFull(reader, request); err != nil {
			return
		}
		_ = conn.SetWriteDeadline(time.Now().Add(limits.Write))
		if _, err := conn.Write(answer(name, conn.RemoteAddr())); err != nil {
			return
		}
	}
}
