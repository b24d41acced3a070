// Command performance makes docs/performance.md and its chart of the reports that are checked in; given a directory, such as
// bin/bench, and names of reports, it first takes these from there. It runs in the module's root.
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
		return errors.New("give a directory with reports and their names, such as bin/bench steady-1000, or nothing")
	}
	if len(args) > 1 {
		if err := take(args[0], args[1:]); err != nil {
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

// take takes reports from a directory, without what makes them large. Others that are checked in stay.
func take(directory string, names []string) error {
	commands := performance.Commands()
	for _, name := range names {
		i := slices.IndexFunc(commands, func(c performance.Command) bool { return c.Name == name })
		if i < 0 {
			return fmt.Errorf("no command of make bench makes a report %s", name)
		}
		c := commands[i]
		content, err := os.ReadFile(filepath.Join(directory, c.File()))
		if err == nil && !c.Bench() {
			content, err = trimmed(content)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", c.File(), err)
		}
		if err := os.WriteFile(filepath.Join(performance.Directory, c.File()), content, 0o644); err != nil {
			return err
		}
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
