// These tests prove what a terminal shows of a run, at different widths, and what is printed where
// there is none.
package progress

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// screen returns the lines that a terminal shows after what was written to it. It understands only
// the sequence that the view uses.
func screen(t *testing.T, written string) []string {
	t.Helper()
	lines := []string{""}
	for written != "" {
		var count int
		switch {
		case strings.HasPrefix(written, "\x1b["):
			_, err := fmt.Sscanf(written, "\x1b[%dA\r\x1b[J", &count)
			require.NoError(t, err, "%q", written)
			require.Less(t, count, len(lines), "the cursor moved above the screen")
			lines = append(lines[:len(lines)-1-count], "")
			written = written[len(fmt.Sprintf("\x1b[%dA\r\x1b[J", count)):]
		case written[0] == '\n':
			lines, written = append(lines, ""), written[1:]
		default:
			lines[len(lines)-1] += written[:1]
			written = written[1:]
		}
	}
	require.Empty(t, lines[len(lines)-1])
	return lines[:len(lines)-1]
}

// play shows a run of five seconds. Nodes connect; then a thousand node-updates per second are sent
// and received.
func play(t *testing.T, v *View) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		v.Run(ctx)
	}()
	v.Set(func() Status { return Status{Phase: "nodes receive the state", NodesUp: 40, Nodes: 100} })
	<-time.After(1700 * time.Millisecond)
	start := time.Now()
	v.Set(func() Status {
		passed := int64(time.Since(start) / time.Millisecond)
		return Status{
			Phase: "changes", NodesUp: 100, Nodes: 100, Sent: passed, Received: max(0, passed-100), Planned: 10_000, Bytes: 110 * passed,
			P50: 12 * time.Millisecond, P99: 34 * time.Millisecond,
		}
	})
	<-time.After(2 * time.Second)
	fmt.Fprintln(v.Log(), "level=WARN msg=something")
	<-time.After(1500 * time.Millisecond)
	cancel()
	<-done
}

func TestTerminal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		v := New(&out)
		v.columns = func() int { return 70 }
		play(t, v)
		require.Equal(t, []string{
			"level=WARN msg=something",
			"    5s  changes",
			"        nodes    [##############################] 100 of 100 in sync",
			// This line fills the width of the terminal.
			"        updates  [##-----] 3300 sent, 3200 received of 10000, lag 100",
			"        rates    1000/s sent, 1000/s received, 107 KiB/s",
			"        latency  p50 12.0 ms, p99 34.0 ms",
		}, screen(t, out.String()))
	})
}

// TestNarrowTerminal uses a terminal that has room for only some bars and cuts off a line.
func TestNarrowTerminal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		v := New(&out)
		v.columns = func() int { return 50 }
		play(t, v)
		shown := screen(t, out.String())
		require.Equal(t, "        nodes    [###########] 100 of 100 in sync", shown[2])
		require.Equal(t, "        updates  3300 sent, 3200 received of 1000", shown[3])
	})
}

func TestPlainLines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		v := New(&out)
		play(t, v)
		require.Equal(t, []string{
			"    0s  nodes receive the state: nodes 40 of 100 in sync",
			"    2s  changes: nodes 100 of 100 in sync; updates 0 sent, 0 received of 10000, lag 0; latency p50 12.0 ms, p99 34.0 ms",
			"    3s  changes: nodes 100 of 100 in sync; updates 1300 sent, 1200 received of 10000, lag 100; " +
				"rates 1000/s sent, 923/s received, 107 KiB/s; latency p50 12.0 ms, p99 34.0 ms",
			"level=WARN msg=something",
		}, strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n"))
	})
}

func TestNothingToSay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		v := New(&out)
		v.columns = func() int { return 70 }
		v.Set(func() Status { return Status{Phase: "one"} })
		v.Set(nil)
		v.Set(func() Status { return Status{Phase: "two", Received: 3} })
		require.Equal(t, []string{"    0s  two", "        updates  3 received"}, screen(t, out.String()))
		v.Set(nil)
		require.Empty(t, screen(t, out.String()))
	})
}
