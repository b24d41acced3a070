// Command mutations puts bugs into a copy of the tree, one at a time, and reports which of the
// simulation and the tests notices each. It fails if one goes unnoticed, if the seed that the
// simulation names does not violate the same invariant again in another process, or if the test
// that fails does so without the bug. The copy is removed at the end.
//
// A bug is a scripted edit of list.go. The results go to the table of docs/design/simulation.md,
// where bugs that were not tried keep their rows.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"
)

// timeout bounds one command, and testTimeout the tests of one package.
const timeout, testTimeout = 25 * time.Minute, 20 * time.Minute

func main() {
	only := flag.String("only", "", "try only mutations whose name contains this text")
	steps := flag.Int("steps", 20_000, "steps of the simulation")
	simulation := flag.Bool("simulation", true, "run the simulation before the tests")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, *only, *steps, *simulation)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "mutations:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, only string, steps int, simulation bool) (err error) {
	tree, err := os.Getwd()
	if err != nil {
		return err
	}
	var chosen []int
	for i, m := range mutations {
		if strings.Contains(m.name, only) {
			chosen = append(chosen, i)
		}
	}
	work, err := os.MkdirTemp("", "slicecast-mutations-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(work)) }()
	// The command go leaves its files when it is terminated.
	if err := os.Setenv("GOTMPDIR", work); err != nil {
		return err
	}
	l := lab{copied: filepath.Join(work, "tree"), overlay: filepath.Join(work, "overlay"), binary: filepath.Join(work, "simulate.test"), steps: steps, simulation: simulation}
	if err := copyTree(ctx, tree, l.copied); err != nil {
		return err
	}
	if out, err := command(ctx, l.copied, "go", "run", "./internal/simulate/deterministic", l.overlay).CombinedOutput(); err != nil {
		return fmt.Errorf("%w\n%s", err, out)
	}
	// A simulation that fails without a bug would seem to catch all of them.
	begin := time.Now()
	if l.simulation {
		switch by, err := l.simulate(ctx); {
		case err != nil:
			return fmt.Errorf("without a bug: %w", err)
		case by != nil:
			return fmt.Errorf("without a bug: %s, seed %s", by.by, by.seed)
		}
		fmt.Fprintf(os.Stderr, "mutations: the simulation does not fail without a bug, after %v\n", time.Since(begin).Round(time.Second))
	}
	results, missed := make(map[string]result), 0
	for n, i := range chosen {
		m, began := mutations[i], time.Now()
		r, err := l.try(ctx, m)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil { // the others are tried nevertheless
			fmt.Fprintf(os.Stderr, "mutations: %s: %v\n", m.name, err)
			missed++
			continue
		}
		if r == nil {
			r = &result{by: "nothing"}
			missed++
		}
		r.took = time.Since(began)
		results[m.name] = *r
		fmt.Println(r.row(i))
		fmt.Fprintf(os.Stderr, "mutations: %d of %d, after %v\n", n+1, len(chosen), time.Since(begin).Round(time.Second))
		if err := writeTable(filepath.Join(tree, page), results); err != nil {
			return err
		}
	}
	if missed > 0 {
		return fmt.Errorf("%d went unnoticed, or could not be tried as said above", missed)
	}
	return nil
}

// result is what noticed a bug.
type result struct {
	by   string
	seed string // of the simulation; empty if a test noticed the bug
	took time.Duration
}

func (r result) row(i int) string {
	return fmt.Sprintf("| %d | %s | %s | %s | %.0f |", i+1, mutations[i].name, r.by, r.seed, r.took.Seconds())
}

// page has the table of results, from the line header to the next empty line.
const page, header = "docs/design/simulation.md", "| | bug | caught by | seed | seconds |"

// writeTable puts results into the table of a page. Other rows stay if they are of a known bug.
func writeTable(path string, results map[string]result) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	before, rest, ok := strings.Cut(string(b), header+"\n")
	if !ok {
		return fmt.Errorf("%s has no table that begins with %s", path, header)
	}
	old, after, _ := strings.Cut(rest, "\n\n")
	rows := []string{header, "| --- | --- | --- | --- | --- |"}
	for i, m := range mutations {
		row := fmt.Sprintf("| %d | %s | not tried | | |", i+1, m.name)
		if r, ok := results[m.name]; ok {
			row = r.row(i)
		} else {
			for line := range strings.Lines(old) {
				if cells := strings.SplitN(strings.TrimSpace(line), "|", 4); len(cells) == 4 && strings.TrimSpace(cells[2]) == m.name {
					row = fmt.Sprintf("| %d | %s |%s", i+1, m.name, cells[3])
				}
			}
		}
		rows = append(rows, row)
	}
	text := before + strings.Join(rows, "\n") + "\n"
	if after != "" {
		text += "\n" + after
	}
	return os.WriteFile(path, []byte(text), 0o644)
}

// copyTree copies the files of the work tree that git knows, as they are now.
func copyTree(ctx context.Context, from, to string) error {
	list, err := exec.CommandContext(ctx, "git", "-C", from, "ls-files", "-z", "--cached", "--others", "--exclude-standard").Output()
	if err != nil {
		return fmt.Errorf("git ls-files: %w", err)
	}
	for _, name := range strings.Split(strings.TrimRight(string(list), "\x00"), "\x00") {
		info, err := os.Stat(filepath.Join(from, name))
		if errors.Is(err, fs.ErrNotExist) {
			continue // removed, and not committed yet
		}
		b, readErr := os.ReadFile(filepath.Join(from, name))
		if err = errors.Join(err, readErr); err == nil {
			err = os.MkdirAll(filepath.Dir(filepath.Join(to, name)), 0o755)
		}
		if err == nil {
			err = os.WriteFile(filepath.Join(to, name), b, info.Mode().Perm()) // tests run scripts
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// apply returns the content of the mutation's file with the bug.
func (m mutation) apply(content string) (string, error) {
	if n := strings.Count(content, m.old); n != 1 {
		return "", fmt.Errorf("%s has %d times what is to be replaced: adapt list.go to it", m.file, n)
	}
	return strings.Replace(content, m.old, m.new, 1), nil
}

// lab is where bugs are tried.
type lab struct {
	copied, overlay, binary string
	steps                   int
	simulation              bool // whether the simulation runs before the tests
}

// try puts the bug into the copy, and returns what notices it. Afterwards the copy is as before,
// and a test that has noticed the bug passes.
func (l lab) try(ctx context.Context, m mutation) (by *result, err error) {
	path := filepath.Join(l.copied, m.file)
	before, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	after, err := m.apply(string(before))
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(path, []byte(after), 0o644); err != nil {
		return nil, err
	}
	by, again, err := l.notices(ctx, m.tests)
	if err := errors.Join(err, os.WriteFile(path, before, 0o644)); err != nil || again == nil {
		return by, err
	}
	if out, failed := output(ctx, l.copied, "go", again...); failed {
		return nil, fmt.Errorf("%s, but it fails without the bug, too:\n%s", by.by, out)
	}
	return by, ctx.Err()
}

// notices returns what fails in the copy: the simulation or a test. It returns nil if nothing does.
// again has the arguments of the command go that runs the test again; nil if the simulation fails.
// Races are looked for if nothing else fails, because that takes some times longer.
func (l lab) notices(ctx context.Context, tests []string) (by *result, again []string, err error) {
	if l.simulation {
		if by, err = l.simulate(ctx); by != nil || err != nil {
			return by, nil, err
		}
	}
	for _, race := range []string{"-race=false", "-race"} {
		for _, p := range tests {
			out, failed := output(ctx, l.copied, "go", "test", "-vet=off", "-count=1", "-timeout="+testTimeout.String(), race, p)
			switch {
			case ctx.Err() != nil:
				return nil, nil, ctx.Err()
			case !failed:
				continue
			case strings.Contains(out, "[build failed]"):
				return nil, nil, fmt.Errorf("it does not compile:\n%s", out)
			}
			name := reason(out)
			again = []string{"test", "-vet=off", "-timeout=" + testTimeout.String(), race, p}
			if isTest.MatchString(name) {
				again = append(again, "-run=^"+name+"$")
			}
			return &result{by: fmt.Sprintf("`%s`, %s", shorten(name), p)}, again, nil
		}
	}
	return nil, nil, ctx.Err()
}

// simulate runs the simulation with a deterministic runtime. If it fails, it runs the seed again.
func (l lab) simulate(ctx context.Context) (by *result, err error) {
	out, failed := output(ctx, l.copied, "go", "test", "-overlay="+filepath.Join(l.overlay, "overlay.json"), "-vet=off", "-c",
		"-o="+l.binary, "./internal/simulate")
	if failed {
		return nil, cmp.Or(ctx.Err(), fmt.Errorf("it does not compile:\n%s", out))
	}
	directory := filepath.Join(l.copied, "internal/simulate")
	simulate := func(what string) (out string, failed bool) {
		return output(ctx, directory, l.binary, "-test.run=^TestSimulate$", "-simulate.shrink=0s", what)
	}
	if out, failed = simulate(fmt.Sprint("-simulate.steps=", l.steps)); !failed {
		return nil, ctx.Err()
	}
	first := violation.FindStringSubmatch(out)
	if first == nil {
		return nil, fmt.Errorf("the simulation fails without a seed:\n%s", out)
	}
	again, _ := simulate("-simulate.seed=" + first[1])
	if second := violation.FindStringSubmatch(again); second == nil || second[0] != first[0] {
		return nil, fmt.Errorf("seed %s does not fail again in the same way:\n%s\n%s", first[1], out, again)
	}
	return &result{by: "simulation: " + shorten(first[2]), seed: first[1]}, ctx.Err()
}

// isTest matches names of test functions.
var isTest = regexp.MustCompile(`^(Test|Fuzz|Example)\w*$`)

// violation finds the seed and the invariant in the output of the simulation.
var violation = regexp.MustCompile(`(?m)_test\.go:\d+: seed (\d+): (.*)$`)

// output runs a command, and reports whether it failed.
func output(ctx context.Context, directory, name string, args ...string) (out string, failed bool) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	b, err := command(ctx, directory, name, args...).CombinedOutput()
	return string(b), err != nil
}

// command returns a command that is terminated with all its processes when ctx is done, so that no
// test goes on in the copy.
func command(ctx context.Context, directory, name string, args ...string) *exec.Cmd {
	c := exec.CommandContext(ctx, name, args...)
	c.Dir = directory
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	c.Cancel = func() error { return syscall.Kill(-c.Process.Pid, syscall.SIGTERM) }
	return c
}

// reason returns the name of the test that failed, or what else ended the tests.
func reason(out string) string {
	for line := range strings.Lines(out) {
		line = strings.TrimSpace(line)
		for _, prefix := range []string{"--- FAIL: ", "panic: ", "fatal error: ", "WARNING: DATA RACE"} {
			if strings.HasPrefix(line, prefix) {
				name, _, _ := strings.Cut(strings.TrimPrefix(line, "--- FAIL: "), " (")
				return name
			}
		}
	}
	return "it fails"
}

// shorten keeps a line short enough for a table.
func shorten(line string) string {
	line = strings.ReplaceAll(line, "|", "/")
	if len(line) > 90 {
		return strings.ToValidUTF8(line[:90], "") + "…"
	}
	return line
}
