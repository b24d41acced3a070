// Command performance generates docs/performance.md, the pages behind it, their chart and the
// sample of a report's page from the reports that are checked in. Given a directory, such as
// bin/bench, and names of reports, it first copies these reports from there. It runs in the root of
// the module.
package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/slicecast/slicecast/loadtest/performance"
	"github.com/slicecast/slicecast/loadtest/report"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "performance:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) == 1 {
		return errors.New("usage: performance [<directory> <name of a report>...], such as performance bin/bench steady-1000")
	}
	taken := map[string][]byte{}
	if len(args) > 1 {
		var err error
		if taken, err = take(args[0], args[1:]); err != nil {
			return err
		}
	}
	// Write nothing before the page is generated. Then all reports that are checked in come from
	// one machine.
	all, err := os.MkdirTemp("", "performance-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(all) }()
	if err := os.CopyFS(all, os.DirFS(performance.Directory)); err != nil {
		return err
	}
	if err := write(all, taken); err != nil {
		return err
	}
	m, err := performance.Read(os.DirFS(all))
	if err != nil {
		return err
	}
	made, err := m.Files()
	if err != nil {
		return err
	}
	if err := errors.Join(write(performance.Directory, taken), write(".", made)); err != nil {
		return err
	}
	return sample(args)
}

// sample writes the page of the sample report. If that report is among those to copy, sample first
// copies it, too, but does not trim it.
func sample(args []string) error {
	from := performance.SampleReport
	if len(args) > 1 && slices.Contains(args[1:], performance.Sample) {
		from = filepath.Join(args[0], performance.Sample+".json")
	}
	content, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	page, err := performance.PageOf(content)
	if err != nil {
		return fmt.Errorf("%s: %w", from, err)
	}
	return write(".", map[string]string{performance.SampleReport: string(content), performance.SamplePage: page})
}

func write[T []byte | string](directory string, files map[string]T) error {
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(directory, name), []byte(content), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// take reads reports from a directory and trims what makes them large.
func take(directory string, names []string) (map[string][]byte, error) {
	commands := performance.Commands()
	taken := map[string][]byte{}
	for _, name := range names {
		i := slices.IndexFunc(commands, func(c performance.Command) bool { return c.Name == name })
		if i < 0 {
			return nil, fmt.Errorf("no command of make performance writes a report named %s", name)
		}
		c := commands[i]
		content, err := os.ReadFile(filepath.Join(directory, c.File()))
		if err == nil && !c.Bench() {
			content, err = trimmed(content)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", c.File(), err)
		}
		taken[c.File()] = content
	}
	return taken, nil
}

func trimmed(content []byte) ([]byte, error) {
	r, err := report.Read(bytes.NewReader(content))
	if err != nil {
		return nil, err
	}
	if !r.OK() {
		return nil, errors.New("the check of the report failed")
	}
	performance.Trim(r)
	var out bytes.Buffer
	err = report.WriteJSON(&out, r)
	return out.Bytes(), err
}
