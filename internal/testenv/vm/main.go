package vm

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/vm/spec"
)

// insideVariable is set in the machine.
const insideVariable = "SLICECAST_TESTENV_VM"

// Main is the whole body of a TestMain whose tests are to run in the machine: there it is [testenv.Main]. The functions
// in before run first, on the host, where there is a network to fetch things from.
func Main(m *testing.M, before ...func() error) {
	if os.Getenv(insideVariable) != "" {
		testenv.Main(m)
	}
	for _, f := range before {
		if err := f(); err != nil {
			exit(err)
		}
	}
	code, err := runSelf()
	if err != nil {
		exit(err)
	}
	os.Exit(code)
}

func exit(err error) {
	fmt.Fprintf(os.Stderr, "testenv/vm: %v\n", err)
	os.Exit(1)
}

// patience is what boot and shutdown may add to the tests' time. The go command waits for a minute.
const patience = 40 * time.Second

// runSelf runs the tests of the working directory's package in the machine, as those of this process were asked for.
func runSelf() (int, error) {
	ctx := context.Background()
	temp, err := os.MkdirTemp("", "slicecast-vm-")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(temp) //nolint:errcheck // temporary files
	m, err := newMachine(ctx, temp)
	if err != nil {
		return 0, err
	}
	run, err := testRun(ctx, filepath.Join(temp, "tests"), ".", insideFlags(os.Args[1:]))
	if err != nil {
		return 0, err
	}
	if limit := timeout(os.Args[1:]); limit > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, limit+patience)
		defer cancel()
	}
	results, err := m.run(ctx, os.Stdout, os.Stderr, nil, run)
	if err != nil {
		return 0, err
	}
	if results[0].Error != "" {
		return 0, fmt.Errorf("run the tests in the virtual machine: %s", results[0].Error)
	}
	return results[0].Code, nil
}

// testRun builds a package's tests as binary and says how to run them in the machine.
func testRun(ctx context.Context, binary, pkg string, flags []string) (spec.Run, error) {
	dir, err := filepath.Abs(pkg)
	if err != nil {
		return spec.Run{}, err
	}
	if err := goBuild(ctx, "test", "-c", "-o", binary, pkg); err != nil {
		return spec.Run{}, err
	}
	env := slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "PATH=") })
	env = append(env, insideVariable+"=1", "PATH="+modprobePath+":"+os.Getenv("PATH"))
	return spec.Run{Program: binary, Args: flags, Dir: dir, Env: env}, nil
}

// modprobePath is where the guest program has its modprobe.
const modprobePath = spec.KeptAt + "/bin"

// insideFlags leaves out the flags that ask for files, which would be lost, and those of a build that is not used.
func insideFlags(args []string) []string {
	return slices.DeleteFunc(slices.Clone(args), func(arg string) bool {
		name, _, _ := strings.Cut(arg, "=")
		switch name {
		case "-test.testlogfile", "-test.coverprofile", "-test.gocoverdir", "-test.outputdir", "-test.cpuprofile", "-test.memprofile",
			"-test.blockprofile", "-test.mutexprofile", "-test.trace":
			return true
		}
		return false
	})
}

// timeout gives the time that tests may take; 0: any.
func timeout(args []string) time.Duration {
	for _, arg := range args {
		if value, ok := strings.CutPrefix(arg, "-test.timeout="); ok {
			if d, err := time.ParseDuration(value); err == nil {
				return d
			}
		}
	}
	return 0
}
