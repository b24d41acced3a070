// Package simulate runs everything between an API server and the nodes' kernels in one process and
// in virtual time: client-go's reflectors, servers, relays and agents with their real code, while a
// seed draws faults. What must never happen is checked at each change of a kernel.
// docs/design/simulation.md describes it.
package simulate

import (
	"flag"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"testing"
	"testing/cryptotest"
	"testing/synctest"
	"time"

	"github.com/slicecast/slicecast/internal/source/kube"
	"github.com/slicecast/slicecast/internal/wire"
)

var (
	steps    = flag.Int("simulate.steps", 20_000, "number of steps of TestSimulate")
	seed     = flag.Uint64("simulate.seed", 0, "seed of the only episode; 0 means many episodes with other seeds")
	first    = flag.Uint64("simulate.first", 1, "seed of the first episode; the next one has the next seed")
	progress = flag.Duration("simulate.progress", 10*time.Second, "how often progress is shown")
	verbose  = flag.Bool("simulate.verbose", false, "show everything that happens")
)

// episodeSteps is the number of steps of an episode, which is a cluster's life. Failures are as short
// as that, before they are made shorter.
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
	tail      string   // the last of everything that happened
	digest    uint64   // of everything that happened
	count     int
	slowest   time.Duration
	virtual   time.Duration
}

// episode runs a schedule in a cluster that a seed draws.
func episode(t *testing.T, seed uint64, schedule []step, keepLogs bool) (out outcome) {
	directory := t.TempDir()
	cryptotest.SetGlobalRandom(t, seed)
	synctest.Test(t, func(*testing.T) {
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
		out.violation, out.kind, out.digest, out.count, out.slowest = w.failed(), w.kind, w.digest, w.count, w.slowest
		out.virtual = time.Since(w.begin)
		out.tail = w.tail(80)
		if *verbose {
			out.tail = w.tail(keptObservations)
		}
	})
	collect()
	return out
}

// collectAbove is the size of the heap, in bytes, above which garbage is collected between episodes.
// It is not collected in an episode, because the collector would change the order of goroutines.
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

// report fails the test if an episode failed, with the seed and the shortest history that fails.
func report(t *testing.T, seed uint64, out outcome) {
	if *verbose {
		fmt.Fprintln(os.Stderr, out.tail)
	}
	if out.violation == "" {
		return
	}
	schedule, short := shrink(t, seed, drawn(seed)[:len(out.did)], out)
	t.Fatalf("seed %d: %s\nTo see it again: make simulate SEED=%d\n\nIts history, shrunk from %d steps to %d:\n%s\nThe last events:\n%s",
		seed, out.violation, seed, len(out.did), len(schedule), history(short.did), short.tail)
}

// shrinkTime bounds the search for a shorter history.
const shrinkTime = 60 * time.Second

// shrink removes steps from a schedule as long as an invariant is still violated. It returns the
// shortest schedule found, and its outcome.
func shrink(t *testing.T, seed uint64, schedule []step, out outcome) ([]step, outcome) {
	deadline := time.Now().Add(shrinkTime)
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
