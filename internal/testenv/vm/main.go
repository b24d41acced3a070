package vm

import (
	"context"
	"flag"
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

// insideVariable is the name of an environment variable that is set in the machine.
const insideVariable = "SLICECAST_TESTENV_VM"

// Main is the whole body of a TestMain whose tests must run in the machine. In the machine it calls
// [testenv.Main]. The functions in before run first and on the host, where there is a network to
// fetch things from.
func Main(m *testing.M, before ...func() error) {
	if Inside() {
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

// patience is the time that boot and shutdown may add to the timeout of the tests. The go command
// waits for one minute before it kills a test binary that exceeds its timeout.
const patience = 40 * time.Second

// runSelf runs the tests of the package in the working directory in the machine, with the flags of
// this process, and returns their exit code.
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
	flag.Parse()
	if limit := flag.Lookup("test.timeout").Value.(flag.Getter).Get().(time.Duration); limit > 0 {
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

// Inside reports whether this process runs in the virtual machine.
func Inside() bool { return os.Getenv(insideVariable) != "" }

// testRun builds the tests of a package as binary and returns how to run them in the machine.
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

// modprobePath is the folder of the guest program's modprobe in the machine.
const modprobePath = spec.KeptAt + "/bin"

// insideFlags removes flags that ask for files, because the files would be lost, and flags about
// coverage, because the tests in the machine are built without it.
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
