// Command mutations puts bugs into a copy of the tree, one at a time, and reports which of the
// simulation and the tests notices each. It fails if one goes unnoticed. The copy is removed at the
// end; the tree itself stays as it is.
//
// A bug is a scripted edit of list.go. The result is in the table of docs/design/simulation.md.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// timeout bounds one run of tests.
const timeout = 10 * time.Minute

func main() {
	only := flag.String("only", "", "try only mutations whose name contains this text")
	steps := flag.Int("steps", 20_000, "steps of the simulation")
	simulation := flag.Bool("simulation", true, "run the simulation before the tests")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
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
	copied, err := os.MkdirTemp("", "slicecast-mutations-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(copied)) }()
	if err := copyTree(ctx, tree, copied); err != nil {
		return err
	}
	// A test that fails without a bug would seem to catch all of them.
	if by, err := (mutation{tests: packages(only)}).notices(ctx, copied, steps, simulation); err != nil || by != "" {
		return errors.Join(err, fmt.Errorf("without a bug: %s", by))
	}
	missed := 0
	for i, m := range mutations {
		if !strings.Contains(m.name, only) {
			continue
		}
		begin := time.Now()
		by, err := m.try(ctx, copied, steps, simulation)
		if err != nil {
			return fmt.Errorf("%s: %w", m.name, err)
		}
		if by == "" {
			by = "nothing"
			missed++
		}
		fmt.Printf("| %d | %s | `%s` | %s |\n", i+1, m.name, m.file, by)
		fmt.Fprintf(os.Stderr, "mutations: %d of %d took %v\n", i+1, len(mutations), time.Since(begin).Round(time.Second))
	}
	if missed > 0 {
		return fmt.Errorf("%d went unnoticed", missed)
	}
	return nil
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

// try puts the bug into the copy, and returns what notices it. Afterwards the copy is as before.
func (m mutation) try(ctx context.Context, copied string, steps int, simulation bool) (by string, err error) {
	path := filepath.Join(copied, m.file)
	before, err := os.ReadFile(path)
	if err != nil {
		return "", err
	}
	after, err := m.apply(string(before))
	if err != nil {
		return "", err
	}
	if err := os.WriteFile(path, []byte(after), 0o644); err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, os.WriteFile(path, before, 0o644)) }()
	return m.notices(ctx, copied, steps, simulation)
}

// packages returns the packages with tests for mutations whose names contain a text.
func packages(only string) (all []string) {
	for _, m := range mutations {
		if strings.Contains(m.name, only) {
			all = append(all, m.tests...)
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// notices returns what fails in the copy: the simulation or a test. It is empty if nothing does.
func (m mutation) notices(ctx context.Context, copied string, steps int, simulation bool) (by string, err error) {
	if simulation {
		out, failed := test(ctx, copied, "-run", "^TestSimulate$", "./internal/simulate",
			fmt.Sprint("-simulate.steps=", steps), "-simulate.shrink=0s")
		if strings.Contains(out, "[build failed]") {
			return "", fmt.Errorf("it does not compile:\n%s", out)
		}
		if failed {
			return "simulation: " + reason(out), ctx.Err()
		}
	}
	for _, p := range m.tests {
		if out, failed := test(ctx, copied, "-race", p); failed {
			return p + ": " + reason(out), ctx.Err()
		}
	}
	return "", ctx.Err()
}

// test runs go test, and reports whether it failed.
func test(ctx context.Context, directory string, args ...string) (out string, failed bool) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	b, err := command(ctx, directory, append([]string{"test", "-vet=off", "-count=1", "-timeout=8m"}, args...)...).CombinedOutput()
	return string(b), err != nil
}

func command(ctx context.Context, directory string, args ...string) *exec.Cmd {
	c := exec.CommandContext(ctx, "go", args...)
	c.Dir = directory
	return c
}

// reason returns what a failed test says in one short line: the violated invariant, or the name of
// the test.
func reason(out string) string {
	for line := range strings.Lines(out) {
		line = strings.TrimSpace(line)
		if i := strings.Index(line, "seed "); i >= 0 && strings.Contains(line, "_test.go:") {
			return shorten(line[i:])
		}
		for _, prefix := range []string{"--- FAIL: ", "panic: ", "fatal error: ", "WARNING: DATA RACE"} {
			if strings.HasPrefix(line, prefix) && !strings.HasPrefix(line, "--- FAIL: TestSimulate") {
				name, _, _ := strings.Cut(strings.TrimPrefix(line, "--- FAIL: "), " (")
				return shorten(name)
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
