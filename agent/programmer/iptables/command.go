package iptables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
)

// runner runs a program. Tests replace it to observe what goes to the kernel and to make it fail.
type runner func(ctx context.Context, stdin []byte, name string, args ...string) (stdout []byte, err error)

// runCommand is the runner outside of tests. Its error contains what the program wrote to stderr.
func runCommand(ctx context.Context, stdin []byte, name string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stdin = bytes.NewReader(stdin)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	if ctx.Err() != nil {
		return nil, fmt.Errorf("%s: %w", name, context.Cause(ctx))
	}
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return nil, &commandError{name: name, exit: exit, said: strings.TrimSpace(stderr.String())}
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return stdout.Bytes(), nil
}

// commandError reports that a program ran and failed.
type commandError struct {
	name string
	exit error
	said string
}

func (e *commandError) Error() string { return fmt.Sprintf("%s: %v: %s", e.name, e.exit, e.said) }

func (e *commandError) Unwrap() error { return e.exit }

// locked reports whether another program held the xtables lock for too long. The rules were not
// looked at then.
func locked(err error) bool { return strings.Contains(err.Error(), "xtables lock") }

// lockAdvice adds advice to an error about the xtables lock, and returns other errors as they are.
func lockAdvice(err error) error {
	if locked(err) {
		return fmt.Errorf("%w; stop the program that holds /run/xtables.lock", err)
	}
	return err
}

// unsupported reports whether the program says that the kernel lacks something. That is what it
// says if the kernel has no such table, but also of a rule that the program does not know. If the
// kernel module is not loaded and cannot be loaded from here, the legacy variant says "Table does
// not exist" or "iptables who?", and asks whether insmod is needed.
func (e *commandError) unsupported() bool {
	return strings.Contains(e.said, "not supported") || strings.Contains(e.said, "do you need to insmod?")
}

// rejectedError reports that iptables-restore or the kernel refused the rules.
type rejectedError struct {
	command *commandError
	line    string // the line at fault, if iptables-restore named one
}

func (e *rejectedError) Error() string {
	if e.line == "" {
		return e.command.Error()
	}
	return fmt.Sprintf("%v: line %q", e.command, e.line)
}

func (e *rejectedError) Unwrap() error { return e.command }

var lineNumber = regexp.MustCompile(`line:? (\d+)`)

// restoreError turns the error of an iptables-restore with this input into one that says more.
func restoreError(err error, input []byte) error {
	var command *commandError
	if !errors.As(err, &command) {
		return err
	}
	if locked(err) {
		return lockAdvice(err)
	}
	rejected := &rejectedError{command: command}
	if m := lineNumber.FindStringSubmatch(command.said); m != nil {
		n, _ := strconv.Atoi(m[1])
		lines := bytes.SplitN(input, []byte("\n"), n+1)
		if n >= 1 && n < len(lines) && !bytes.Equal(lines[n-1], []byte("COMMIT")) {
			rejected.line = string(lines[n-1])
		}
	}
	return rejected
}
