package vm

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/testenv/vm/spec"
)

// Suite is a package's tests, for Test.
type Suite struct {
	// Dir is the package's folder, from the repository's root.
	Dir string
	// Flags are for its tests, e.g. "-test.run=^TestReplace$".
	Flags []string
	// Env is what they have in their environment besides this process's own.
	Env []string
	// Ports are TCP ports of this machine's loopback address that the tests, and others' in the same boot, reach at Socket.
	Ports []uint16
}

// Socket is where tests in the machine reach a port of a Suite: a unix socket, as tests may have network namespaces of their own.
func Socket(port uint16) string { return spec.Socket(port) }

// Test runs other packages' tests in the machine, in one boot and one suite after the other, and reports each of them as a
// subtest of t. They need not know: their testenv.Main isolates them inside as it does outside.
func Test(t *testing.T, suites ...Suite) {
	t.Helper()
	ctx := t.Context()
	root, err := repositoryRoot()
	require.NoError(t, err)
	m, err := newMachine(ctx, t.TempDir())
	require.NoError(t, err)
	var runs []spec.Run
	var ports []uint16
	for i, s := range suites {
		flags := append([]string{"-test.v=test2json", "-test.paniconexit0"}, s.Flags...)
		run, err := testRun(ctx, filepath.Join(m.temp, fmt.Sprintf("tests%d", i)), filepath.Join(root, s.Dir), flags)
		require.NoError(t, err)
		run.Env = append(run.Env, s.Env...)
		runs, ports = append(runs, run), append(ports, s.Ports...)
	}
	var stdout, stderr bytes.Buffer
	results, err := m.run(ctx, &stdout, &stderr, ports, runs...)
	require.NoError(t, err, "%s\n%s", &stdout, &stderr)
	outputs := strings.Split(stdout.String(), spec.NextRun)
	for i, r := range results {
		t.Run(suites[i].Dir, func(t *testing.T) {
			all, err := parseEvents(outputs[i])
			require.NoError(t, err)
			all.report(t)
			if r.Code != 0 || r.Error != "" {
				t.Errorf("exit code %d %s; standard error of all suites:\n%s", r.Code, r.Error, &stderr)
			}
		})
	}
}

// outcome is what became of a test, or of a whole suite.
type outcome struct {
	name   string // the last part
	action string // pass, fail or skip; empty if it did not end
	output strings.Builder
	tests  []*outcome
	// benchmark: only its failure is told.
	benchmark bool
}

// parseEvents reads what a test binary wrote with -test.v=test2json.
func parseEvents(output string) (*outcome, error) {
	cmd := exec.Command("go", "tool", "test2json")
	cmd.Stdin = strings.NewReader(output)
	events, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go tool test2json: %w", err)
	}
	all := &outcome{}
	for d := json.NewDecoder(bytes.NewReader(events)); ; {
		var event struct{ Action, Test, Output string }
		if err := d.Decode(&event); errors.Is(err, io.EOF) {
			return all, nil
		} else if err != nil {
			return nil, fmt.Errorf("read the events of a test: %w", err)
		}
		o := all
		if event.Test != "" {
			for name := range strings.SplitSeq(event.Test, "/") {
				o = o.test(name)
				o.benchmark = strings.HasPrefix(event.Test, "Benchmark")
			}
		}
		switch event.Action {
		case "pass", "fail", "skip":
			o.action = event.Action
		case "output":
			o.output.WriteString(event.Output)
		}
	}
}

// test gives the test of a name, in the order in which they came.
func (o *outcome) test(name string) *outcome {
	if i := slices.IndexFunc(o.tests, func(t *outcome) bool { return t.name == name }); i >= 0 {
		return o.tests[i]
	}
	t := &outcome{name: name}
	o.tests = append(o.tests, t)
	return t
}

// report makes t and its subtests end as o did.
func (o *outcome) report(t *testing.T) {
	for _, test := range o.tests {
		t.Run(test.name, test.report)
	}
	switch {
	case o.action == "skip":
		t.Skip(o.output.String())
	case o.action == "pass", o.action == "" && o.benchmark:
		t.Log(o.output.String())
	default:
		t.Errorf("%s", &o.output)
	}
}
