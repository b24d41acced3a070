// Command mutationtesting changes a package in one place at a time and reports the changes that the
// package's own tests do not notice: the survivors. It fails if a survivor is not in the file of
// explained ones, or if an entry of that file no longer survives.
//
// The package is compiled once, with all mutants: an environment variable chooses the one that is
// active, so a mutant costs no more than running the tests. What changes is listed with the type
// mutation. Constants are not changed, nor code that is generated.
//
// Random tests that use rapid draw from a fixed seed, so that the result is the same each time.
//
// Usage: mutationtesting [-only text] <file of explained survivors> <package folder>...
package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"go.yaml.in/yaml/v3"
)

// activeVariable is the environment variable with the number of the active mutant.
const activeVariable = "SLICECAST_MUTANT"

func main() {
	only := flag.String("only", "", "try only mutants whose line in the report contains this text")
	flag.Usage = func() {
		fmt.Fprintln(flag.CommandLine.Output(), "usage: mutationtesting [-only text] <file of explained survivors> <package folder>...")
		flag.PrintDefaults()
	}
	flag.Parse()
	if flag.NArg() < 2 {
		flag.Usage()
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Stdout, *only, flag.Arg(0), flag.Args()[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "mutationtesting:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, w io.Writer, only, explainedFile string, folders []string) error {
	known, err := loadExplained(explainedFile)
	if err != nil {
		return err
	}
	findings := 0
	for _, folder := range folders {
		folder = filepath.ToSlash(filepath.Clean(folder))
		outcomes, err := try(ctx, folder, only)
		if err != nil {
			return fmt.Errorf("%s: %w", folder, err)
		}
		findings += report(w, folder, outcomes, known, only == "")
	}
	if findings > 0 {
		return fmt.Errorf("%d findings: kill a survivor with a test, remove code that nobody needs, or explain it in %s", findings, explainedFile)
	}
	return nil
}

// explained has the survivors that are accepted, by file and mutation, and says why.
type explained map[string]map[mutation]string

// loadExplained reads the file of explained survivors. Every entry needs a reason.
func loadExplained(file string) (explained, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var entries map[string][]struct {
		mutation `yaml:",inline"`
		Why      string `yaml:"why"`
	}
	decoder := yaml.NewDecoder(bytes.NewReader(text))
	decoder.KnownFields(true)
	if err := decoder.Decode(&entries); err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	known := make(explained)
	for path, list := range entries {
		known[path] = make(map[mutation]string)
		for _, e := range list {
			if strings.TrimSpace(e.Why) == "" {
				return nil, fmt.Errorf("%s: %s: %s: say why no test can notice it", file, path, e.mutation)
			}
			if _, twice := known[path][e.mutation]; twice {
				return nil, fmt.Errorf("%s: %s: %s is there twice", file, path, e.mutation)
			}
			known[path][e.mutation] = e.Why
		}
	}
	return known, nil
}

// outcome is what became of a mutant.
type outcome struct {
	mutant
	status string
}

// The statuses of mutants that were tried.
const (
	killed   = "killed by a test"
	limited  = "killed by a limit"
	survived = "survived"
)

// report writes the survivors of a package, and a summary. It returns how many findings there are:
// survivors that nobody has explained, and, if all mutants were tried, explanations of mutations
// that do not survive.
func report(w io.Writer, folder string, outcomes []outcome, known explained, all bool) (findings int) {
	count := make(map[string]int)
	survivors := make(map[string]map[mutation]bool)
	for _, o := range outcomes {
		count[o.status]++
		if o.status != survived {
			continue
		}
		if survivors[o.file] == nil {
			survivors[o.file] = make(map[mutation]bool)
		}
		survivors[o.file][o.mutation] = true
		if why, ok := known[o.file][o.mutation]; ok {
			count["explained"]++
			fmt.Fprintf(w, "explained: %s\n\t%s\n", o.mutant, strings.TrimSpace(why))
			continue
		}
		findings++
		fmt.Fprintf(w, "survived: %s\n", o.mutant)
	}
	var stale []string
	for file, list := range known {
		for m := range list {
			if all && filepath.ToSlash(filepath.Dir(file)) == folder && !survivors[file][m] {
				stale = append(stale, fmt.Sprintf("explained, but does not survive: %s: %s", file, m))
			}
		}
	}
	slices.Sort(stale)
	for _, s := range stale {
		fmt.Fprintln(w, s)
	}
	findings += len(stale)
	fmt.Fprintf(w, "%s: %d mutants: %d killed by a test, %d by a limit, %d survived, of which %d are explained\n",
		folder, len(outcomes), count[killed], count[limited], count[survived], count["explained"])
	return findings
}

// lab is where the mutants of a package are tried.
type lab struct {
	folder, binary string
	random         bool   // whether the tests have the flags of rapid
	parts          []part // run one after the other, until a mutant is killed
}

// part is some of the tests.
type part struct {
	flags []string // choose the tests
	// cpu limits the CPU time, in seconds. An endless loop exceeds it on a busy machine, too.
	cpu     int
	timeout time.Duration // for deadlocks
}

// try tries the mutants of the package in a folder.
func try(ctx context.Context, folder, only string) (outcomes []outcome, err error) {
	p, err := instrument(folder)
	if err != nil {
		return nil, err
	}
	work, err := os.MkdirTemp("", "slicecast-mutation-testing-")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(work)) }()
	l := lab{folder: folder, binary: filepath.Join(work, "tests")}
	if err := p.build(ctx, folder, work, l.binary); err != nil {
		return nil, err
	}
	if l.random, err = importsRapid(folder); err != nil {
		return nil, err
	}
	if err := l.divide(ctx); err != nil {
		return nil, err
	}
	var numbers []int
	for i, m := range p.mutants {
		if strings.Contains(m.String(), only) {
			numbers = append(numbers, i+1)
		}
	}
	statuses, err := l.tryAll(ctx, numbers)
	if err != nil {
		return nil, err
	}
	for i, n := range numbers {
		outcomes = append(outcomes, outcome{p.mutants[n-1], statuses[i]})
	}
	return outcomes, nil
}

// tryAll tries mutants, as many at a time as there are processors, and returns their statuses.
func (l *lab) tryAll(ctx context.Context, numbers []int) ([]string, error) {
	statuses, errs := make([]string, len(numbers)), make([]error, len(numbers))
	next := make(chan int)
	var done, alive atomic.Int64
	var wg sync.WaitGroup
	for range runtime.NumCPU() {
		wg.Go(func() {
			for i := range next {
				statuses[i], errs[i] = l.try(ctx, numbers[i])
				done.Add(1)
				if statuses[i] == survived {
					alive.Add(1)
				}
			}
		})
	}
	began, reported := time.Now(), time.Now()
	for i := range numbers {
		if ctx.Err() != nil {
			break
		}
		if time.Since(reported) > 15*time.Second {
			reported = time.Now()
			fmt.Fprintf(os.Stderr, "%s: %d of %d mutants after %v, %d survived\n",
				l.folder, done.Load(), len(numbers), time.Since(began).Round(time.Second), alive.Load())
		}
		next <- i
	}
	close(next)
	wg.Wait()
	return statuses, cmp.Or(ctx.Err(), errors.Join(errs...))
}

// divide runs the tests without a mutant, and divides them into parts with limits. Most mutants are
// killed by a quick test, so the quick tests are the first part.
func (l *lab) divide(ctx context.Context) error {
	measure := func(flags ...string) (part, []byte, error) {
		cmd, began := l.command(ctx, 0, part{flags, 600, 10 * time.Minute}, "-test.v"), time.Now()
		out, err := cmd.CombinedOutput()
		if err != nil {
			return part{}, nil, fmt.Errorf("the tests fail without a mutant: %w\n%s", err, out)
		}
		used := cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
		return part{flags, 2 + int(4*used.Seconds()), time.Minute + 4*time.Since(began)}, out, nil
	}
	all, out, err := measure()
	if err != nil {
		return err
	}
	l.parts = []part{all}
	if slow := slowTests(out); slow != "" {
		quick, _, err := measure("-test.skip=" + slow)
		if err != nil {
			return err
		}
		all.flags = []string{"-test.run=" + slow}
		l.parts = []part{quick, all}
	}
	return nil
}

// slowTests returns a pattern of the tests that need more than a tenth of the time of all, from the
// output of -test.v.
func slowTests(out []byte) string {
	seconds, all := make(map[string]float64), 0.0
	for _, match := range passed.FindAllSubmatch(out, -1) {
		n, _ := strconv.ParseFloat(string(match[2]), 64) // the expression admits numbers only
		seconds[string(match[1])] = n
		all += n
	}
	var slow []string
	for name, n := range seconds {
		if n > all/10 {
			slow = append(slow, name)
		}
	}
	if len(slow) == 0 {
		return ""
	}
	slices.Sort(slow)
	return "^(" + strings.Join(slow, "|") + ")$"
}

// passed matches the line of a test that is no subtest.
var passed = regexp.MustCompile(`(?m)^--- PASS: (\w+) \(([0-9.]+)s\)$`)

// try runs the tests with a mutant and returns its status.
func (l *lab) try(ctx context.Context, number int) (string, error) {
	for _, p := range l.parts {
		err := l.command(ctx, number, p).Run()
		var exit *exec.ExitError
		switch {
		case ctx.Err() != nil:
			return "", ctx.Err()
		case err == nil:
			continue
		case !errors.As(err, &exit):
			return "", err
		case exit.ExitCode() < 0: // ended by a signal
			return limited, nil
		}
		return killed, nil
	}
	return survived, nil
}

// command returns the command that runs a part of the tests with a mutant. Number 0 is no mutant.
func (l *lab) command(ctx context.Context, number int, p part, flags ...string) *exec.Cmd {
	args := []string{"-c", fmt.Sprintf(`ulimit -t %d && ulimit -v %d && exec "$@"`, p.cpu, memory), "sh", l.binary, "-test.failfast", "-test.timeout=" + p.timeout.String()}
	if l.random {
		args = append(args, "-rapid.seed=1", "-rapid.shrinktime=0s", "-rapid.nofailfile")
	}
	cmd := exec.CommandContext(ctx, "sh", slices.Concat(args, p.flags, flags)...)
	cmd.Dir = l.folder
	cmd.Env = append(os.Environ(), activeVariable+"="+strconv.Itoa(number))
	return cmd
}

// memory bounds the address space of the tests, in KiB. Some mutants allocate without end.
const memory = 3 << 20

// build writes the package's files into work and compiles the tests with them.
func (p *instrumented) build(ctx context.Context, folder, work, binary string) error {
	overlay := struct{ Replace map[string]string }{make(map[string]string)}
	for path, text := range p.files {
		file := filepath.Join(work, filepath.Base(path))
		overlay.Replace[path] = file
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			return err
		}
	}
	text, err := json.Marshal(overlay)
	if err != nil {
		return err
	}
	file := filepath.Join(work, "overlay.json")
	if err := os.WriteFile(file, text, 0o644); err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "go", "test", "-c", "-vet=off", "-overlay="+file, "-o", binary, "./"+folder)
	cmd.Env = append(os.Environ(), "GOTMPDIR="+work) // where go leaves its files when it is killed
	if out, err := cmd.CombinedOutput(); err != nil {
		return cmp.Or(ctx.Err(), fmt.Errorf("the package with its mutants does not compile: %w\n%s", err, out))
	}
	return nil
}

// importsRapid reports whether a test file of the folder imports rapid, whose flags the test binary
// then has.
func importsRapid(folder string) (bool, error) {
	files, err := filepath.Glob(filepath.Join(folder, "*_test.go"))
	for _, file := range files {
		text, readErr := os.ReadFile(file)
		if readErr != nil {
			return false, readErr
		}
		if bytes.Contains(text, []byte(`"pgregory.net/rapid"`)) {
			return true, nil
		}
	}
	return false, err
}
