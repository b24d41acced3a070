// Command screencast runs a program, records what it prints and when, and draws the recording as an
// animated SVG for README.md. It writes two files: NAME.cast, which asciinema can play, and
// NAME.svg.
package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"time"

	"github.com/slicecast/slicecast/internal/daemon"
)

func main() {
	ctx, stop := daemon.SignalContext(context.Background())
	err := run(ctx, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "screencast:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	const fixed = 2 // arguments before the program
	if len(args) <= fixed {
		return errors.New("usage: screencast <name of the files> <command line to show> <program> [<argument>...]")
	}
	r, err := record(ctx, exec.CommandContext(ctx, args[fixed], args[fixed+1:]...))
	if err != nil {
		return err
	}
	r.Command = args[1]
	content, err := r.encode()
	if err != nil {
		return err
	}
	return errors.Join(os.WriteFile(args[0]+".cast", content, 0o644), os.WriteFile(args[0]+".svg", r.draw(), 0o644))
}

// recording is what a program printed.
type recording struct {
	// Command is the command line that is shown before the lines.
	Command string
	Lines   []line
}

// line is a line of the output, without its end, and when it was printed, in seconds since the
// program was started.
type line struct {
	At   float64
	Text string
}

func record(ctx context.Context, program *exec.Cmd) (*recording, error) {
	var messages bytes.Buffer
	program.Stderr = &messages
	program.Cancel = func() error { return program.Process.Signal(os.Interrupt) }
	out, err := program.StdoutPipe()
	if err != nil {
		return nil, err
	}
	start := time.Now()
	if err := program.Start(); err != nil {
		return nil, err
	}
	r := &recording{}
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		r.Lines = append(r.Lines, line{float64(time.Since(start).Milliseconds()) / 1000, lines.Text()})
	}
	if err := errors.Join(lines.Err(), program.Wait(), ctx.Err()); err != nil {
		return nil, fmt.Errorf("%s: %w\n%s", program, err, &messages)
	}
	return r, nil
}

// header is the first line of a file in asciinema's format:
// https://docs.asciinema.org/manual/asciicast/v2/
type header struct {
	Version int    `json:"version"`
	Width   int    `json:"width"`
	Height  int    `json:"height"`
	Command string `json:"command"`
}

// output is the code of an event in which a program prints something.
const output = "o"

// encode returns the recording in asciinema's format.
func (r *recording) encode() ([]byte, error) {
	var out bytes.Buffer
	e := json.NewEncoder(&out)
	e.SetEscapeHTML(false)
	err := e.Encode(header{Version: 2, Width: r.columns(), Height: len(r.Lines) + 1, Command: r.Command})
	for _, l := range r.Lines {
		err = errors.Join(err, e.Encode([]any{l.At, output, l.Text + "\r\n"}))
	}
	return out.Bytes(), err
}
