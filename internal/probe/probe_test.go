// These tests prove that servers answer by TCP and UDP with their name and the client's address.
// Clients tell refused, unanswered and answered attempts apart. Plans end with the input, and
// plans, names, connections, their times and answers by UDP are bounded.
package probe

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/bounded"
	"github.com/slicecast/slicecast/internal/bounded/boundedtest"
)

// start runs a server until the test ends, and returns its first port and the port of /ready.
func start(t *testing.T, ports int) (port, health int) {
	t.Helper()
	port, health = 28080, 28078
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- Server{Name: "a", Port: port, Ports: ports, HealthPort: health, Logger: slog.New(slog.DiscardHandler)}.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-done)
	})
	require.Eventually(t, func() bool { return readiness(t, health) == http.StatusOK }, time.Minute, 10*time.Millisecond)
	return port, health
}

// readiness returns the status of /ready, or 0 if there is no answer.
func readiness(t *testing.T, port int) int {
	t.Helper()
	response, err := http.Get(fmt.Sprintf("http://127.0.0.1:%d/ready", port))
	if err != nil {
		return 0
	}
	defer response.Body.Close()
	return response.StatusCode
}

// run carries out plans and returns the results.
func run(t *testing.T, plans ...Plan) (results []Result) {
	t.Helper()
	in, err := json.Marshal(plans)
	require.NoError(t, err)
	var out bytes.Buffer
	require.NoError(t, Run(t.Context(), bytes.NewReader(in), &out))
	for decoder := json.NewDecoder(&out); decoder.More(); {
		var r Result
		require.NoError(t, decoder.Decode(&r))
		results = append(results, r)
	}
	return results
}

func TestOutcomes(t *testing.T) {
	port, health := start(t, 2)
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer silent.Close()
	server, second := fmt.Sprintf("127.0.0.1:%d", port), fmt.Sprintf("127.0.0.1:%d", port+1)
	nobody := fmt.Sprintf("127.0.0.1:%d", port+2)
	byPlan := map[int][]Result{}
	for _, r := range run(t,
		Plan{Network: "tcp", Address: server, Attempts: 20, Parallel: 4, Timeout: time.Minute},
		Plan{Network: "udp", Address: second, Attempts: 3, Timeout: time.Minute},
		Plan{Network: "tcp", Address: server, Attempts: 3, Keep: true, Timeout: time.Minute},
		Plan{Network: "tcp", Address: nobody, Attempts: 1, Timeout: time.Minute},
		Plan{Network: "udp", Address: nobody, Attempts: 1, Timeout: time.Minute},
		Plan{Network: "tcp", Address: silent.Addr().String(), Attempts: 1, Timeout: 50 * time.Millisecond},
		Plan{Network: "tcp", Address: nobody, Attempts: 1000, MaxFailures: 2, Timeout: time.Minute},
		Plan{Network: "lookup", Address: "localhost:1", Attempts: 1, Timeout: time.Minute},
	) {
		byPlan[r.Plan] = append(byPlan[r.Plan], r)
	}
	for plan, count := range []int{20, 3, 3} {
		require.Len(t, byPlan[plan], count)
		for _, r := range byPlan[plan] {
			require.Positive(t, r.Began)
			require.Positive(t, r.Took)
			r.Began, r.Took = 0, 0
			require.Equal(t, Result{Plan: plan, Outcome: Answered, Server: "a", Client: "127.0.0.1"}, r)
		}
	}
	require.Equal(t, Refused, byPlan[3][0].Outcome, byPlan[3][0].Error)
	require.Equal(t, Refused, byPlan[4][0].Outcome, byPlan[4][0].Error)
	require.Equal(t, TimedOut, byPlan[5][0].Outcome, byPlan[5][0].Error)
	require.GreaterOrEqual(t, byPlan[5][0].Took, 50*time.Millisecond)
	require.Len(t, byPlan[6], 2)
	require.Contains(t, byPlan[7][0].Addresses, "127.0.0.1")

	require.NoError(t, SetReady(t.Context(), false))
	require.Equal(t, http.StatusServiceUnavailable, readiness(t, health))
	require.NoError(t, SetReady(t.Context(), true))
	require.Equal(t, http.StatusOK, readiness(t, health))

	// A short request by UDP has no answer, which would be longer. The next one has.
	conn, err := net.Dial("udp", server)
	require.NoError(t, err)
	defer conn.Close()
	// Nor has what another server would answer.
	for _, request := range [][]byte{[]byte(question), answer("server", conn.LocalAddr()), filled(question)} {
		_, err = conn.Write(request)
		require.NoError(t, err)
	}
	require.NoError(t, conn.SetDeadline(time.Now().Add(time.Minute)))
	got := make([]byte, 2*requestSize)
	n, err := conn.Read(got)
	require.NoError(t, err)
	require.Equal(t, requestSize, n)
	require.NoError(t, conn.SetDeadline(time.Now().Add(20*time.Millisecond)))
	_, err = conn.Read(got)
	require.Error(t, err, "another request has an answer, too")
}

// TestPlansEndWithTheInput runs a plan without end.
func TestPlansEndWithTheInput(t *testing.T) {
	port, _ := start(t, 1)
	in, plans := io.Pipe()
	results, out := io.Pipe()
	done := make(chan error, 1)
	go func() {
		err := Run(t.Context(), in, out)
		_ = out.Close()
		done <- err
	}()
	require.NoError(t, json.NewEncoder(plans).Encode([]Plan{
		{Network: "tcp", Address: fmt.Sprintf("127.0.0.1:%d", port), Interval: time.Millisecond, Timeout: time.Minute},
	}))
	decoder := json.NewDecoder(results)
	for range 10 {
		var r Result
		require.NoError(t, decoder.Decode(&r))
		require.Equal(t, Answered, r.Outcome, r.Error)
	}
	require.NoError(t, plans.Close())
	_, err := io.Copy(io.Discard, results)
	require.NoError(t, err)
	require.NoError(t, <-done)
}

// TestLateResults checks that what has begun when the input ends is reported nevertheless.
func TestLateResults(t *testing.T) {
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer silent.Close()
	in, plans := io.Pipe()
	var out bytes.Buffer
	done := make(chan error, 1)
	go func() { done <- Run(t.Context(), in, &out) }()
	require.NoError(t, json.NewEncoder(plans).Encode([]Plan{{Network: "tcp", Address: silent.Addr().String(), Interval: time.Hour, Timeout: 100 * time.Millisecond}}))
	conn, err := silent.Accept() // it has begun
	require.NoError(t, err)
	defer conn.Close()
	require.NoError(t, plans.Close())
	require.NoError(t, <-done)
	require.Contains(t, out.String(), `"outcome":"timed out"`)
}

// TestAtOnce checks that plans do not begin more attempts at once than are admitted, in all.
func TestAtOnce(t *testing.T) {
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer silent.Close()
	var mu sync.Mutex
	open, most := 0, 0
	go func() {
		for {
			conn, err := silent.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			open++
			most = max(most, open)
			mu.Unlock()
			go func() {
				_, _ = io.Copy(io.Discard, conn) // until the client gives up
				mu.Lock()
				open--
				mu.Unlock()
				_ = conn.Close()
			}()
		}
	}()
	plan := Plan{Network: "tcp", Address: silent.Addr().String(), Attempts: 8, Parallel: 8, Timeout: 50 * time.Millisecond}
	require.Len(t, run(t, plan, plan, plan, plan), 32)
	mu.Lock()
	defer mu.Unlock()
	require.GreaterOrEqual(t, most, maxAtOnce/2)
	// The end of a connection may be noticed after the next one has begun.
	require.LessOrEqual(t, most, 2*maxAtOnce)
}

func TestBounds(t *testing.T) {
	for want, in := range map[string]string{
		"read the plans":      "x",
		"use tcp, udp":        `[{"network":"sctp","timeout":1}]`,
		"attempts is 20001":   `[{"network":"tcp","attempts":20001,"timeout":1}]`,
		"parallel is 65":      `[{"network":"tcp","attempts":1,"parallel":65,"timeout":1}]`,
		"timeout is 0s":       `[{"network":"tcp","attempts":1}]`,
		"interval is missing": `[{"network":"tcp","timeout":1}]`,
		"exclude each other":  `[{"network":"tcp","attempts":1,"timeout":1,"keep":true,"parallel":2}]`,
		"there are 257 plans": "[" + strings.Repeat("{},", maxPlans) + "{}]",
		"unexpected EOF":      `[{"network":"` + strings.Repeat("x", maxPlansSize) + `"}]`,
	} {
		require.ErrorContains(t, Run(t.Context(), strings.NewReader(in), io.Discard), want)
	}
	for want, s := range map[string]Server{
		"the name is":             {Name: "a b", Port: 1, Ports: 1},
		"the number of ports is":  {Name: "a", Port: 1, Ports: 257},
		"the first port is 65535": {Name: "a", Port: 65535, Ports: 2},
	} {
		require.ErrorContains(t, s.Run(t.Context()), want)
	}
}

// TestCrowds asserts that a server's ports keep a bounded number of connections of clients that
// stop in any phase of a request, and answer others meanwhile.
func TestCrowds(t *testing.T) {
	port, health := start(t, 2)
	client := netip.MustParseAddr("127.0.0.2")
	crowd := func(port int) *boundedtest.Crowd { return boundedtest.NewCrowd(t, fmt.Sprintf("127.0.0.1:%d", port)) }
	first, second, probes := crowd(port), crowd(port+1), crowd(health)
	for i := range 400 {
		first.Join(client, []string{"", question, string(filled(question))}[i%3])
		second.Join(client, []string{"", question, string(filled(question))}[i%3])
		probes.Join(client, []string{"", "GET /ready HTTP/1.1\r\nhost: x", "POST /ready HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n"}[i%3])
		if i%200 == 199 {
			for _, r := range run(t,
				Plan{Network: "tcp", Address: fmt.Sprintf("127.0.0.1:%d", port), Attempts: 1, Timeout: time.Minute},
				Plan{Network: "tcp", Address: fmt.Sprintf("127.0.0.1:%d", port+1), Attempts: 1, Timeout: time.Minute},
			) {
				require.Equal(t, Answered, r.Outcome, r.Error)
			}
			require.Equal(t, http.StatusOK, readiness(t, health))
			require.LessOrEqual(t, first.Held()+second.Held(), requests.PerAddress+2, "the plans have another address")
			require.LessOrEqual(t, probes.Held(), bounded.Health.PerAddress+1)
		}
	}
	require.NotZero(t, first.Held()+second.Held())
}

// TestTimes asserts that a connection ends if its client sends nothing, sends a request too slowly,
// or does not read the answers.
func TestTimes(t *testing.T) {
	const short = 50 * time.Millisecond
	for name, test := range map[string]struct {
		limits bounded.Limits
		client func(net.Conn)
	}{
		"nothing": {bounded.Limits{Read: time.Hour, Write: time.Hour, Idle: short}, func(net.Conn) {}},
		"nothing more": {bounded.Limits{Read: time.Hour, Write: time.Hour, Idle: short}, func(c net.Conn) {
			_, err := c.Write(filled(question))
			require.NoError(t, err)
			_, err = io.ReadFull(c, make([]byte, requestSize))
			require.NoError(t, err)
		}},
		"byte by byte": {bounded.Limits{Read: short, Write: time.Hour, Idle: time.Hour}, func(c net.Conn) {
			for range requestSize - 1 {
				if _, err := c.Write([]byte{' '}); err != nil {
					return
				}
				<-time.After(short / 10)
			}
		}},
		"requests only": {bounded.Limits{Read: time.Hour, Write: short, Idle: time.Hour}, func(c net.Conn) {
			_, _ = c.Write(filled(question))
		}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				client, server := net.Pipe()
				began := time.Now()
				took := make(chan time.Duration, 1)
				go func() {
					serveConn(server, "a", test.limits)
					took <- time.Since(began)
					_ = server.Close() // a pipe's error is always nil
				}()
				test.client(client)
				require.Equal(t, short, <-took)
			})
		})
	}
}
