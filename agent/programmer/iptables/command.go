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

// runner runs a program: the seam at which tests watch and fail what goes to the kernel.
type runner func(ctx context.Context, stdin []byte, name string, args ...string) (stdout []byte, err error)

// runCommand is the real runner. Its error holds what the program said.
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

// commandError: the program ran and failed.
type commandError struct {
	name string
	exit error
	said string
}

func (e *commandError) Error() string { return fmt.Sprintf("%s: %v: %s", e.name, e.exit, e.said) }

func (e *commandError) Unwrap() error { return e.exit }

// locked tells that another program held the xtables lock for too long, so that the rules were not looked at.
func locked(err error) bool { return strings.Contains(err.Error(), "xtables lock") }

// lockAdvice adds what to do about that, if that is the error.
func lockAdvice(err error) error {
	if locked(err) {
		return fmt.Errorf("%w; find and stop the program that keeps /run/xtables.lock locked", err)
	}
	return err
}

// unsupported tells that the kernel lacks what the program needs. The legacy variant says "Table does not exist" or
// "iptables who?" then, where the module is not loaded and can't be from here, and asks whether it need be.
func (e *commandError) unsupported() bool {
	return strings.Contains(e.said, "not supported") || strings.Contains(e.said, "do you need to insmod?")
}

// rejectedError: iptables-restore or the kernel did not accept the rules.
type rejectedError struct {
	command *commandError
	line    string // the offending line, if iptables-restore named one
}

func (e *rejectedError) Error() string {
	if e.line == "" {
		return e.command.Error()
	}
	return fmt.Sprintf("%v: the line is %q", e.command, e.line)
}

func (e *rejectedError) Unwrap() error { return e.command }

var lineNumber = regexp.MustCompile(`line:? (\d+)`)

// restoreError turns the error of an iptables-restore of input into one that says more.
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
