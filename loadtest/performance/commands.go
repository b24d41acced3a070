package performance

import (
	_ "embed"
	"strings"
)

// commandList has a line for each report: its name, a colon and the command. make performance runs
// the commands.
//
//go:embed commands.txt
var commandList string

// Command is a command that produces a report.
type Command struct{ Name, Command string }

// Bench reports whether the command is a Go benchmark rather than a load test.
func (c Command) Bench() bool { return strings.HasPrefix(c.Command, "go test ") }

// Cell returns the command as a cell of a Markdown table.
func (c Command) Cell() string { return "`" + strings.ReplaceAll(c.Command, "|", `\|`) + "`" }

// File returns the name of the report's file.
func (c Command) File() string {
	if c.Bench() {
		return c.Name + ".txt"
	}
	return c.Name + ".json"
}

// Commands returns the commands that make performance runs.
func Commands() (out []Command) {
	for line := range strings.Lines(commandList) {
		name, c, _ := strings.Cut(strings.TrimSpace(line), ": ")
		out = append(out, Command{name, c})
	}
	return out
}
