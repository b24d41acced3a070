// Package simulate runs everything between an API server and the nodes' kernels in one process and
// in virtual time: client-go's reflectors, servers, relays and agents with their real code, while a
// seed draws faults. What must never happen is checked at each change of a kernel.
// docs/design/simulation.md describes it.
package simulate

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"slices"
	"strings"
	"sync"
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

// order is what an episode is to do.
type order struct {
	Seed uint64
	// Steps are the indexes of the steps of the seed's schedule that are taken. nil means all.
	Steps []int
	// Planted means that a step that restores etcd violates an invariant. A test of the report needs
	// that.
	Planted bool
}

// outcome is what an episode was like.
type outcome struct {
	Violation string   // empty if there was none
	Kind      string   // of the violation, without names and numbers
	Did       []string // what each step did
	Events    []string // what happened; of a long episode only the end
	Digest    uint64   // of everything that happened
	Slowest   time.Duration
	Virtual   time.Duration
	Faults    int // steps that were faults and had an effect
}

// kindEnded is the kind of violation of an episode whose process has ended before its time.
const kindEnded = "the process ended"

// episode lets a schedule happen in a cluster that the seed draws. directory is for files.
func episode(t *testing.T, o order, directory string) (out outcome) {
	schedule := o.schedule()
	cryptotest.SetGlobalRandom(t, o.Seed)
	synctest.Test(t, func(*testing.T) {
		for range o.Seed % 1024 { // with a deterministic runtime, each bubble begins with the same number
			rand.Uint64()
		}
		w := newWorld(rand.New(rand.NewPCG(o.Seed, 1)), directory)
		for _, s := range schedule {
			did := w.take(s)
			out.Did = append(out.Did, did)
			if o.Planted && did != "" && actions[s.kind].name == restoreEtcd {
				w.violated("planted: %s", did)
			}
			if w.failed() != "" {
				break
			}
		}
		if w.failed() == "" {
			w.quiet()
		}
		w.end()
		out.Violation, out.Kind, out.Digest, out.Slowest = w.failed(), w.kind, w.digest, w.slowest
		out.Virtual, out.Faults = time.Since(w.begin), w.faults
		out.Events = w.observations
	})
	return out
}

// schedule returns the steps of an episode.
func (o order) schedule() []step {
	all := draw(rand.New(rand.NewPCG(o.Seed, 2)), episodeSteps)
	if o.Steps == nil {
		return all
	}
	chosen := make([]step, len(o.Steps))
	for i, at := range o.Steps {
		chosen[i] = all[at]
	}
	return chosen
}

// childVariable is the environment variable that makes TestSimulate carry out the order that it
// reads from its standard input, and write the outcome to file descriptor 3.
const childVariable = "SLICECAST_SIMULATE_EPISODE"

// childTimeout bounds the real time of an episode in a process of its own. It is some hundred times
// longer than usual.
const childTimeout = 2 * time.Minute

// run runs an episode. With a deterministic runtime it does so in a process of its own. There, what
// other episodes leave behind has no influence: caches, pools, and the addresses of objects, by
// which maps are ordered.
func run(t *testing.T, o order) outcome {
	if !deterministic(t) {
		out := episode(t, o, t.TempDir())
		collect()
		return out
	}
	var printed bytes.Buffer
	out, err := o.send(t.TempDir(), &printed)
	if err != nil {
		text := strings.TrimSpace(printed.String())
		first, _, _ := strings.Cut(text, "\n")
		return outcome{Violation: fmt.Sprintf("%s: %v: %s", kindEnded, err, first), Kind: kindEnded, Events: strings.Split(text, "\n")}
	}
	return out
}

// send lets another process carry out an order.
func (o order) send(directory string, printed io.Writer) (out outcome, err error) {
	in, err := json.Marshal(o)
	if err != nil {
		return out, err
	}
	reader, writer, err := os.Pipe()
	if err != nil {
		return out, err
	}
	defer func() { err = errors.Join(err, reader.Close()) }()
	child := exec.Command(os.Args[0], "-test.run=^TestSimulate$", "-test.timeout="+childTimeout.String())
	child.Dir, child.Stdin, child.ExtraFiles = directory, bytes.NewReader(in), []*os.File{writer}
	child.Stdout, child.Stderr = printed, printed
	// With one processor that is taken from nobody, and without collections of garbage, goroutines
	// run in the same order, and objects have the same addresses.
	child.Env = []string{"GOMAXPROCS=1", "GOGC=off", "GOMEMLIMIT=2GiB", "GODEBUG=asyncpreemptoff=1", childVariable + "=1"}
	err = errors.Join(child.Start(), writer.Close())
	if err != nil {
		return out, err
	}
	content, err := io.ReadAll(reader)
	if err = errors.Join(err, child.Wait()); err != nil {
		return out, err
	}
	return out, json.Unmarshal(content, &out)
}

// serve carries out the order of run.
func serve(t *testing.T) {
	var o order
	require.NoError(t, json.NewDecoder(os.Stdin).Decode(&o))
	out := episode(t, o, ".")
	answer := os.NewFile(3, "outcome")
	require.NoError(t, errors.Join(json.NewEncoder(answer).Encode(out), answer.Close()))
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

// TestSimulate runs as many episodes as the steps need, and reports the first that fails with its
// seed and a history as short as possible.
func TestSimulate(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	defer debug.SetMemoryLimit(debug.SetMemoryLimit(2 << 30))
	if os.Getenv(childVariable) != "" {
		serve(t)
		return
	}
	if *seed != 0 {
		report(t, order{Seed: *seed}, run(t, order{Seed: *seed}))
		return
	}
	workers := 1
	if deterministic(t) {
		workers = runtime.NumCPU()
	}
	now := time.Now()
	r := &runner{begin: now, shown: now, failed: make(map[uint64]outcome)}
	var all sync.WaitGroup
	for range workers {
		all.Go(func() { r.work(t) })
	}
	all.Wait()
	if len(r.failed) > 0 {
		s := slices.Min(slices.Collect(maps.Keys(r.failed)))
		report(t, order{Seed: s}, r.failed[s])
	}
}

// runner runs the episodes of TestSimulate until one fails.
type runner struct {
	begin time.Time

	mu               sync.Mutex // guards the fields below
	started, done    int
	faults           int // steps of the episodes that are done
	shown            time.Time
	slowest, virtual time.Duration
	failed           map[uint64]outcome
}

// next returns the seed of the next episode.
func (r *runner) next() (seed uint64, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.started*episodeSteps >= *steps || len(r.failed) > 0 {
		return 0, false
	}
	r.started++
	return *first + uint64(r.started-1), true
}

func (r *runner) work(t *testing.T) {
	for {
		s, ok := r.next()
		if !ok {
			return
		}
		r.finished(s, run(t, order{Seed: s}))
	}
}

// finished counts an episode, and shows the progress.
func (r *runner) finished(seed uint64, out outcome) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if out.Violation != "" {
		r.failed[seed] = out
		return
	}
	r.done++
	r.faults += out.Faults
	r.slowest, r.virtual = max(r.slowest, out.Slowest), r.virtual+out.Virtual
	if now := time.Now(); now.Sub(r.shown) >= *progress || r.done*episodeSteps >= *steps {
		r.shown = now
		fmt.Fprintf(os.Stderr, "simulate: %d of %d steps, of which %d were faults, seeds from %d, %v of the clusters' time in %v; settled within %v\n",
			r.done*episodeSteps, *steps, r.faults, *first, r.virtual.Round(time.Hour), now.Sub(r.begin).Round(time.Second), r.slowest)
	}
}

// TestSeed runs seeds twice. The steps must be the same: a seed has one schedule, and what a step
// does depends on the schedule alone. With a deterministic runtime, the whole histories must be the
// same, down to the order in which nodes are programmed and the numbers that clients draw.
func TestSeed(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	exact, seeds := deterministic(t), uint64(8)
	if exact {
		seeds = 40
	}
	t.Logf("the runtime is deterministic: %v", exact)
	for seed := *first; seed < *first+seeds; seed++ {
		a, b := run(t, order{Seed: seed}), run(t, order{Seed: seed})
		require.Equal(t, a.Did, b.Did, "seed %d", seed)
		if exact {
			require.Equal(t, a.Digest, b.Digest, "seed %d: %s", seed, firstDifference(a.Events, b.Events))
			require.Equal(t, a, b, "seed %d", seed)
		}
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

var detect struct {
	sync.Once
	deterministic bool
}

// deterministic reports whether the runtime is that of the command deterministic.
func deterministic(t *testing.T) bool {
	detect.Do(func() {
		var drawn [2]uint64
		for i := range drawn {
			synctest.Test(t, func(*testing.T) { drawn[i] = rand.Uint64() })
		}
		detect.deterministic = drawn[0] == drawn[1]
	})
	return detect.deterministic
}

// report fails the test if an episode failed.
func report(t *testing.T, o order, out outcome) {
	if *verbose {
		fmt.Fprintln(os.Stderr, strings.Join(out.Events, "\n"))
	}
	if out.Violation != "" {
		t.Fatal(describe(t, o, out))
	}
}

// describe returns the report on an episode that failed, with its seed, what a second run of the
// seed is like, and the shortest history that fails.
func describe(t *testing.T, o order, out outcome) string {
	how := fmt.Sprintf("To see it again: make simulate SEED=%d", o.Seed)
	if !deterministic(t) {
		how = fmt.Sprintf("The ordinary runtime does not repeat the order of goroutines, so another run of the seed need not fail. "+
			"It takes the same steps, and with a runtime that repeats that order: make simulate SEED=%d", o.Seed)
	}
	again := run(t, o)
	second, shortest := cmp.Or(again.Violation, "no failure"), again
	if again.Kind == out.Kind && out.Kind != kindEnded {
		for i := range again.Did {
			o.Steps = append(o.Steps, i)
		}
		o, shortest = shrink(t, o, again)
	}
	return fmt.Sprintf("seed %d: %s\n%s\nA second run of the seed: %s\n\n"+
		"Its history, shrunk from %d steps, of which %d were faults, to %d:\n%s\nThe last events:\n%s", o.Seed, out.Violation, how, second,
		len(out.Did), out.Faults, len(shortest.Did), history(shortest.Did), strings.Join(shortest.Events[max(0, len(shortest.Events)-80):], "\n"))
}

// shrink removes steps from an order as long as the same invariant is violated. It returns the
// shortest order found, and its outcome.
func shrink(t *testing.T, o order, out outcome) (order, outcome) {
	deadline := time.Now().Add(*shrinking)
	for size := len(o.Steps) / 2; size > 0; {
		removed := false
		for from := 0; from < len(o.Steps) && time.Now().Before(deadline); {
			to := min(from+size, len(o.Steps))
			// Steps must not be nil, which means all steps.
			shorter := o
			shorter.Steps = append(append([]int{}, o.Steps[:from]...), o.Steps[to:]...)
			if again := run(t, shorter); again.Kind == out.Kind {
				shorter.Steps = shorter.Steps[:len(again.Did)]
				o, out, removed = shorter, again, true
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
	return o, out
}
