// Package simulate runs everything between an API server and the nodes' kernels in one process and
// in virtual time: client-go's reflectors, servers, relays and agents with their real code, while a
// seed draws faults. What must never happen is checked at each change of a kernel.
// docs/design/simulation.md describes it.
package simulate

import (
	"cmp"
	"flag"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"strings"
	"testing"
	"testing/cryptotest"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/source/kube"
	"github.com/slicecast/slicecast/internal/wire"
)

var (
	steps     = flag.Int("simulate.steps", 20_000, "number of steps of TestSimulate")
	seed      = flag.Uint64("simulate.seed", 0, "seed of the only episode; 0 means many episodes with other seeds")
	first     = flag.Uint64("simulate.first", 1, "seed of the first episode; the next one has the next seed")
	progress  = flag.Duration("simulate.progress", 10*time.Second, "how often progress is shown")
	verbose   = flag.Bool("simulate.verbose", false, "show everything that happens")
	shrinking = flag.Duration("simulate.shrink", time.Minute, "how long to search for a shorter history of a failure")
)

// episodeSteps is the number of steps of an episode, which is a cluster's life. Failures are as
// short as that, before they are made shorter.
const episodeSteps = 250

func TestMain(m *testing.M) {
	flag.Parse()
	kube.RouteLogs(slog.New(slog.DiscardHandler))
	// What is made at its first use must not be made in a bubble.
	if _, err := wire.Compress(make(wire.Frame, 4<<10)); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	runtime.GOMAXPROCS(1)
	os.Exit(m.Run())
}

// outcome is what an episode was like.
type outcome struct {
	violation string
	kind      string   // of the violation
	did       []string // what each step did
	events    []string // what happened; of a long episode only the end
	digest    uint64   // of everything that happened
	slowest   time.Duration
	virtual   time.Duration
}

// episode runs a schedule in a cluster that a seed draws.
func episode(t *testing.T, seed uint64, schedule []step, keepLogs bool) (out outcome) {
	directory := t.TempDir()
	cryptotest.SetGlobalRandom(t, seed)
	synctest.Test(t, func(*testing.T) {
		for range seed % 1024 { // with a deterministic runtime, each bubble begins with the same number
			rand.Uint64()
		}
		w := newWorld(rand.New(rand.NewPCG(seed, 1)), directory, keepLogs)
		for _, s := range schedule {
			out.did = append(out.did, w.take(s))
			if w.failed() != "" {
				break
			}
		}
		if w.failed() == "" {
			w.quiet()
		}
		w.end()
		out.violation, out.kind, out.digest, out.slowest = w.failed(), w.kind, w.digest, w.slowest
		out.virtual = time.Since(w.begin)
		out.events = w.observations
	})
	collect()
	return out
}

// collectAbove is the size of the heap, in bytes, above which garbage is collected between
// episodes. It is not collected in an episode, because that would change the order of goroutines.
const collectAbove = 192 << 20

func collect() {
	sample := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
	metrics.Read(sample)
	if sample[0].Value.Uint64() > collectAbove {
		runtime.GC()
	}
}

func drawn(seed uint64) []step { return draw(rand.New(rand.NewPCG(seed, 2)), episodeSteps) }

// TestSimulate runs as many episodes as the steps need, and reports the first that fails with its
// seed and a history as short as possible.
func TestSimulate(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	defer debug.SetMemoryLimit(debug.SetMemoryLimit(2 << 30))
	if *seed != 0 {
		report(t, *seed, episode(t, *seed, drawn(*seed), true))
		return
	}
	begin, shown := time.Now(), time.Now()
	var slowest, virtual time.Duration
	for n := 0; n*episodeSteps < *steps; n++ {
		s := *first + uint64(n)
		out := episode(t, s, drawn(s), false)
		if out.violation != "" {
			report(t, s, out)
			return
		}
		slowest, virtual = max(slowest, out.slowest), virtual+out.virtual
		if now := time.Now(); now.Sub(shown) >= *progress || (n+1)*episodeSteps >= *steps {
			shown = now
			fmt.Fprintf(os.Stderr, "simulate: %d of %d steps, seeds %d to %d, %v of the cluster's time in %v; settled within %v\n",
				(n+1)*episodeSteps, *steps, *first, s, virtual.Round(time.Hour), now.Sub(begin).Round(time.Second), slowest)
		}
	}
}

// TestSeed runs seeds twice. The steps must be the same: a seed has one schedule, and what a step
// does depends on the schedule alone. With a deterministic runtime, everything else is mostly the
// same, too, down to the order in which nodes are programmed and the numbers that clients draw.
func TestSeed(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	exact := deterministic(t)
	t.Logf("the runtime is deterministic: %v", exact)
	const seeds = 8
	same := 0
	for seed := *first; seed < *first+seeds; seed++ {
		a, b := episode(t, seed, drawn(seed), true), episode(t, seed, drawn(seed), true)
		require.Equal(t, a.did, b.did, "seed %d", seed)
		if a.digest == b.digest {
			same++
		} else if exact {
			t.Logf("seed %d: %s", seed, firstDifference(a.events, b.events))
		}
	}
	t.Logf("%d of %d seeds did the same twice", same, seeds)
	if exact {
		require.Positive(t, same)
	}
}

// firstDifference describes where two runs begin to differ.
func firstDifference(a, b []string) string {
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			return fmt.Sprintf("event %d differs:\n%s\n%s\nafter\n%s", i, a[i], b[i], strings.Join(a[max(0, i-5):i], "\n"))
		}
	}
	return fmt.Sprintf("%d and %d events", len(a), len(b))
}

// deterministic reports whether the runtime is that of the command deterministic.
func deterministic(t *testing.T) bool {
	var drawn [2]uint64
	for i := range drawn {
		synctest.Test(t, func(*testing.T) { drawn[i] = rand.Uint64() })
	}
	return drawn[0] == drawn[1]
}

// report fails the test if an episode failed, with the seed and the shortest history that fails.
func report(t *testing.T, seed uint64, out outcome) {
	if *verbose {
		fmt.Fprintln(os.Stderr, strings.Join(out.events, "\n"))
	}
	if out.violation == "" {
		return
	}
	schedule := drawn(seed)[:len(out.did)]
	again := episode(t, seed, schedule, true)
	if again.kind == out.kind {
		schedule, again = shrink(t, seed, schedule, again)
	}
	t.Fatalf("seed %d: %s\nTo see it again: make simulate SEED=%d\nA second run of the seed: %s\n\n"+
		"Its history, shrunk from %d steps to %d:\n%s\nThe last events:\n%s", seed, out.violation, seed,
		cmp.Or(again.violation, "no failure"), len(out.did), len(schedule), history(again.did), strings.Join(again.events[max(0, len(again.events)-80):], "\n"))
}

// shrink removes steps from a schedule as long as an invariant is still violated. It returns the
// shortest schedule found, and its outcome.
func shrink(t *testing.T, seed uint64, schedule []step, out outcome) ([]step, outcome) {
	deadline := time.Now().Add(*shrinking)
	for size := len(schedule) / 2; size > 0; {
		removed := false
		for from := 0; from < len(schedule) && time.Now().Before(deadline); {
			to := min(from+size, len(schedule))
			shorter := append(append([]step(nil), schedule[:from]...), schedule[to:]...)
			if again := episode(t, seed, shorter, true); again.kind == out.kind {
				schedule, out, removed = shorter[:len(again.did)], again, true
			} else {
				from = to
			}
		}
		if !removed || size > 1 {
			size /= 2
		}
		if time.Now().After(deadline) {
			break
		}
	}
	return schedule, out
}
