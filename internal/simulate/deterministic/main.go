// Command deterministic makes Go's scheduler deterministic for goroutines in a bubble of
// testing/synctest, so that a seed of internal/simulate repeats a run. It copies a few files of the
// standard library, changes them, and writes a file for go build's flag -overlay. Only binaries
// that are built with this flag differ, and in these only goroutines in bubbles.
//
// In a bubble, the runtime draws at random which ready case of a select runs, and in which order
// timers of the same instant fire. These numbers, and those of math/rand, come from a state that
// each bubble begins with. Maps are iterated from their beginning. A goroutine that yields goes to
// the end of the processor's own queue. The runtime's monitor takes the processor from a goroutine
// that has run for 10 ms, or whose system call lasts; it leaves those in bubbles alone. With
// GOMAXPROCS=1, what remains is the order of large maps whose keys are pointers.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
)

// edit replaces a text that a file has exactly once.
type edit struct{ file, old, new string }

var edits = []edit{
	{"runtime/synctest.go", "type synctestBubble struct {\n", "type synctestBubble struct {\n\tdraws   uint64 // state of draw\n"},
	{"runtime/synctest.go", "// changegstatus is called when the non-lock status of a g changes.\n", `// draw returns the next number of the bubble (wyrand).
//
//go:nosplit
func (bubble *synctestBubble) draw() uint64 {
	bubble.draws += 0xa0761d6478bd642f
	hi, lo := math.Mul64(bubble.draws, bubble.draws^0xe7037ed1a0b428db)
	return hi ^ lo
}

// changegstatus is called when the non-lock status of a g changes.
`},
	{"runtime/synctest.go", "\t\"internal/runtime/atomic\"\n", "\t\"internal/runtime/atomic\"\n\t\"internal/runtime/math\"\n"},
	// The seeds and the order of maps do not depend on how many maps there were before.
	{"runtime/rand.go", "func rand() uint64 {\n", "func rand() uint64 {\n\tif getg().bubble != nil {\n\t\treturn 0xe7037ed1a0b428db\n\t}\n"},
	{"runtime/rand.go", "//go:linkname maps_rand internal/runtime/maps.rand\n", `//go:linkname randOfBubble
func randOfBubble() uint64 {
	if bubble := getg().bubble; bubble != nil {
		return bubble.draw()
	}
	return rand()
}

//go:linkname maps_rand internal/runtime/maps.rand
`},
	{"math/rand/rand.go", "//go:linkname runtime_rand runtime.rand\n", "//go:linkname runtime_rand runtime.randOfBubble\n"},
	{"math/rand/v2/rand.go", "//go:linkname runtime_rand runtime.rand\n", "//go:linkname runtime_rand runtime.randOfBubble\n"},
	// Keys of maps are hashed with random numbers of the process.
	{"runtime/rand.go", "\tglobalRand.state.Init(*seed)\n", "\tclear(seed[:])\n\tglobalRand.state.Init(*seed)\n"},
	{"runtime/select.go", "\t\tj := cheaprandn(uint32(norder + 1))\n", `		j := uint32(0)
		if gp.bubble != nil {
			j = uint32(gp.bubble.draw()>>32) % uint32(norder+1)
		} else {
			j = cheaprandn(uint32(norder + 1))
		}
`},
	{"runtime/time.go", "\t\t\tt.rand = cheaprand()\n", "\t\t\tt.rand = uint32(getg().bubble.draw())\n"},
	// A mutex changes its mode after a waiter's millisecond.
	{"runtime/sema.go", "func internal_sync_nanotime() int64 {\n", `func internal_sync_nanotime() int64 {
	if bubble := getg().bubble; bubble != nil {
		return bubble.now
	}
`},
	// The queue of all processors is looked at only once in a while.
	{"runtime/proc.go", "\tif preempted && sched.gcwaiting.Load() {\n\t\t// If preempted for STW", `	if gp.bubble != nil {
		runqput(pp, gp, false)
	} else if preempted && sched.gcwaiting.Load() {
		// If preempted for STW`},
	// The monitor takes the processor from nobody in a process whose preemption is turned off.
	{"runtime/proc.go", "func retake(now int64) uint32 {\n", "func retake(now int64) uint32 {\n\tif debug.asyncpreemptoff != 0 {\n\t\treturn 0\n\t}\n"},
	// Threads have their stacks in the heap. When one is needed depends on how fast others are, so
	// that process begins with more of them than it will need.
	{"runtime/proc.go", "\t// Lock the main goroutine onto this, the main OS thread,\n\t// during initialization.", `	if debug.asyncpreemptoff != 0 {
		systemstack(func() {
			for i := int32(1); i <= 8; i++ {
				newm(idleThread, nil, -1)
				for idle := int32(0); idle < i; {
					lock(&sched.lock)
					idle = sched.nmidle
					unlock(&sched.lock)
					osyield()
				}
			}
		})
	}

	// Lock the main goroutine onto this, the main OS thread,
	// during initialization.`},
	{"runtime/proc.go", "func mspinning() {\n", "func idleThread() {\n\tstopm()\n\tschedule()\n}\n\nfunc mspinning() {\n"},
}

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: deterministic DIRECTORY")
		os.Exit(2)
	}
	if err := run(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "deterministic:", err)
		os.Exit(1)
	}
}

// goSource returns the directory of the standard library's source.
func goSource() (string, error) {
	root, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		return "", fmt.Errorf("go env GOROOT: %w", err)
	}
	return filepath.Join(strings.TrimSpace(string(root)), "src"), nil
}

// run writes the changed files and overlay.json to a directory.
func run(directory string) error {
	directory, err := filepath.Abs(directory)
	if err != nil {
		return err
	}
	source, err := goSource()
	if err != nil {
		return err
	}
	content := make(map[string]string)
	for _, e := range edits {
		if content[e.file] == "" {
			b, err := os.ReadFile(filepath.Join(source, e.file))
			if err != nil {
				return err
			}
			content[e.file] = string(b)
		}
		if n := strings.Count(content[e.file], e.old); n != 1 {
			return fmt.Errorf("%s of %s has %d times what is to be replaced, adapt this command to it:\n%s",
				e.file, runtime.Version(), n, e.old)
		}
		content[e.file] = strings.Replace(content[e.file], e.old, e.new, 1)
	}
	overlay := struct{ Replace map[string]string }{make(map[string]string)}
	if err := os.MkdirAll(directory, 0o755); err != nil {
		return err
	}
	for file, text := range content {
		to := filepath.Join(directory, strings.ReplaceAll(file, "/", "-"))
		if err := os.WriteFile(to, []byte(text), 0o644); err != nil {
			return err
		}
		overlay.Replace[filepath.Join(source, file)] = to
	}
	b, err := json.MarshalIndent(overlay, "", "\t")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(directory, "overlay.json"), b, 0o644)
}
