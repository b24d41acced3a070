// Command performance makes docs/performance.md and its chart of the reports that are checked in; given a directory, such as
// bin/bench, it first takes the reports that are there. It runs in the module's root.
package main

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

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
	if len(args) > 1 {
		return errors.New("give a directory with reports, or nothing")
	}
	if len(args) == 1 {
		if err := take(args[0]); err != nil {
			return err
		}
	}
	m, err := performance.Read(os.DirFS(performance.Directory))
	if err != nil {
		return err
	}
	for name, content := range map[string]func() (string, error){performance.PageFile: m.Page, performance.ChartFile: m.Chart} {
		text, err := content()
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// take takes a directory's reports, without what makes them large. What is checked in and not there stays: a bench may have been of
// some of them.
func take(directory string) error {
	taken := 0
	for _, c := range performance.Commands() {
		content, err := os.ReadFile(filepath.Join(directory, c.File()))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil && !c.Bench() {
			content, err = trimmed(content)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", c.File(), err)
		}
		if err := os.WriteFile(filepath.Join(performance.Directory, c.File()), content, 0o644); err != nil {
			return err
		}
		taken++
	}
	if taken == 0 {
		return fmt.Errorf("%s has none of the reports that make bench makes", directory)
	}
	return nil
}

func trimmed(content []byte) ([]byte, error) {
	r, err := report.Read(bytes.NewReader(content))
	if err != nil {
		return nil, err
	}
	if !r.OK() {
		return nil, errors.New("its check failed")
	}
	performance.Trim(r)
	var out bytes.Buffer
	err = r.WriteJSON(&out)
	return out.Bytes(), err
}
