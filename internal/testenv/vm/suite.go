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

	"github.com/slicecast/slicecast/internal/testenv/repository"
	"github.com/slicecast/slicecast/internal/testenv/vm/spec"
)

// Suite is the tests of one package, for Test.
type Suite struct {
	// Dir is the package's folder, relative to the root of the repository.
	Dir string
	// Flags are the flags for its tests, such as "-test.run=^TestReplace$".
	Flags []string
	// Env holds environment variables for its tests, in addition to those of this process.
	Env []string
	// Ports are TCP ports of this machine's loopback address. The tests, and all others in the same
	// boot, reach each of them at Socket.
	Ports []uint16
}

// Socket returns the path of the unix socket at which tests in the machine reach a port of a Suite.
// It is a unix socket because tests may have network namespaces of their own.
func Socket(port uint16) string { return spec.Socket(port) }

// Test runs the tests of other packages in the machine, in one boot and one suite after the other.
// It reports each suite as a subtest of t. The packages need no changes: their testenv.Main
// isolates them in the machine as it does on the host. Test returns the standard output of each
// suite.
func Test(t *testing.T, suites ...Suite) []string {
	t.Helper()
	ctx := t.Context()
	root, err := repository.Root()
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
	return outputs
}

// outcome is the result of a test or of a whole suite.
type outcome struct {
	name   string          // the last part of the test's name
	action string          // pass, fail or skip; empty if it did not end
	output strings.Builder // of the test itself, without its subtests
	tests  []*outcome
	// benchmark means that the test is a benchmark. test2json reports only the failure of a
	// benchmark.
	benchmark bool
}

// parseEvents parses the output of a test binary that ran with -test.v=test2json.
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
			return nil, fmt.Errorf("decode the events of a test: %w", err)
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

// test returns the subtest with the name. If there is none, it appends one.
func (o *outcome) test(name string) *outcome {
	if i := slices.IndexFunc(o.tests, func(t *outcome) bool { return t.name == name }); i >= 0 {
		return o.tests[i]
	}
	t := &outcome{name: name}
	o.tests = append(o.tests, t)
	return t
}

// report makes t and its subtests end with the outcomes in o.
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
