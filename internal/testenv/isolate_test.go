// These tests prove that a test binary runs in namespaces of its own, with root or without, and
// that signals reach it and nothing outlives it. The programs are this binary, run again.
package testenv_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/testenv"
)

// programVariable names the program that this binary runs instead of the tests. Tests run such
// programs to see how they end.
const programVariable = "TESTENV_TEST_PROGRAM"

// program is the testenv.TB of an ordinary program.
type program struct{ cleanups []func() }

func (p *program) Helper() {}

func (p *program) Cleanup(f func()) { p.cleanups = append(p.cleanups, f) }

func (p *program) Fatalf(format string, args ...any) {
	fmt.Fprintf(os.Stderr, format+"\n", args...)
	os.Exit(9)
}

var programs = map[string]func(*testing.M){
	"not-isolated": func(*testing.M) { testenv.NewNetwork(&program{}) },
	"isolated": func(*testing.M) {
		testenv.Isolate(func() error {
			fmt.Println("before, as process", os.Getpid())
			return nil
		})
		entries, err := os.ReadDir("/run")
		fmt.Println("arguments", os.Args[1:], "uid", os.Getuid(), "parent", os.Getppid(), "run", len(entries), err)
		var p program
		network := testenv.NewNetwork(&p)
		node := network.AddNode("node")
		pod := node.AddPod("pod")
		pod.Serve(testenv.TCP, 8080)
		for _, iptables := range []string{"iptables-nft", "iptables-legacy"} {
			if _, err := node.Run(context.Background(), iptables, "-t", "nat", "-A", "PREROUTING", "-j", "ACCEPT"); err != nil {
				p.Fatalf("%v", err)
			}
		}
		fmt.Println(node.Probe(context.Background(), testenv.TCP, netip.AddrPortFrom(pod.IPv6, 8080), 1, testenv.ProbeOptions{}))
		network.Close()
		os.Exit(7)
	},
	"without-namespaces": func(*testing.M) {
		if err := os.WriteFile("/proc/sys/user/max_net_namespaces", []byte("0"), 0); err != nil {
			fmt.Println(err)
			os.Exit(9)
		}
		testenv.Isolate()
	},
	"setup-fails": func(*testing.M) {
		testenv.Isolate(func() error { return errors.New("no such image") })
	},
	"waits": func(*testing.M) {
		testenv.Isolate()
		signals := make(chan os.Signal, 2)
		signal.Notify(signals, syscall.SIGTERM)
		node := testenv.NewNetwork(&program{}).AddNode("node")
		// One child, and one orphan in a session of its own.
		if err := node.Command(context.Background(), "sleep", "1000").Start(); err != nil {
			os.Exit(9)
		}
		if err := node.Command(context.Background(), "sh", "-c", "setsid sleep 1000 &").Run(); err != nil {
			os.Exit(9)
		}
		fmt.Println("ready")
		<-signals
		os.Exit(3)
	},
	"killed": func(*testing.M) {
		testenv.Isolate()
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	},
	"leaks": func(m *testing.M) {
		go func() { select {} }()
		testenv.Main(m)
	},
}

func TestMain(m *testing.M) {
	if run, ok := programs[os.Getenv(programVariable)]; ok {
		run(m)
		return
	}
	testenv.Main(m)
}

// command prepares this binary to run as another program. The path in /proc is executable for every
// user.
func command(t *testing.T, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", args...)
	cmd.Env = append(os.Environ(), programVariable+"="+name)
	return cmd
}

func exitCode(t *testing.T, err error) int {
	if err == nil {
		return 0
	}
	var exit *exec.ExitError
	require.ErrorAs(t, err, &exit)
	return exit.ExitCode()
}

func TestNetworkRequiresIsolation(t *testing.T) {
	output, err := command(t, "not-isolated").CombinedOutput()
	require.Equal(t, 9, exitCode(t, err), "%s", output)
	require.Contains(t, string(output), "call testenv.Main")
}

func TestIsolatedProgramIsTheSameProgram(t *testing.T) {
	cmd := command(t, "isolated", "-a", "b")
	output, err := cmd.CombinedOutput()
	require.Equal(t, 7, exitCode(t, err), "%s", output)
	require.Equal(t, 1, strings.Count(string(output), "before"), "%s", output)
	require.Contains(t, string(output), fmt.Sprintln("before, as process", cmd.Process.Pid))
	require.Contains(t, string(output), "arguments [-a b] uid 0 parent 1 run 0 <nil>")
	require.Contains(t, string(output), "1 answered by pod, which saw 2001:db8::1 → [fd00:10:180::1]:8080")
}

func TestIsolationWithoutRoot(t *testing.T) {
	cmd := command(t, "isolated")
	cmd.Dir = "/"
	ids, err := os.ReadFile("/proc/self/uid_map")
	require.NoError(t, err)
	// If the user namespace maps only this user, there is no other user to run as, and the whole
	// test run has no root anyway.
	if fields := strings.Fields(string(ids)); fields[2] != "1" {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	}
	output, err := cmd.CombinedOutput()
	if code := exitCode(t, err); code != 7 {
		require.Contains(t, string(output), "allows user namespaces to other users", "exit code %d", code)
		return
	}
	require.Contains(t, string(output), "uid 0 parent 1")
	require.Contains(t, string(output), "answered by pod")
}

func TestIsolationReportsWhatIsMissing(t *testing.T) {
	cmd := command(t, "without-namespaces")
	// The limit applies to the new user namespace, not to the machine.
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
	}
	output, err := cmd.CombinedOutput()
	require.Equal(t, 1, exitCode(t, err), "%s", output)
	require.Contains(t, string(output), "user.max_net_namespaces must not be 0")

	output, err = command(t, "setup-fails").CombinedOutput()
	require.Equal(t, 1, exitCode(t, err), "%s", output)
	require.Contains(t, string(output), "no such image")
}

// startWaiting starts the program that waits, and returns it with the IDs of its processes.
func startWaiting(t *testing.T) (*exec.Cmd, []int) {
	cmd := command(t, "waits")
	cmd.Stderr = os.Stderr
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	line, err := bufio.NewReader(stdout).ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "ready\n", line)
	family := descendants(t, cmd.Process.Pid)
	require.Len(t, family, 4, "want process 1, the program, its child and the orphan")
	return cmd, family
}

// descendants returns the IDs of all descendants of a process.
func descendants(t *testing.T, pid int) []int {
	files, err := filepath.Glob("/proc/[0-9]*/stat")
	require.NoError(t, err)
	var found []int
	for _, file := range files {
		content, err := os.ReadFile(file)
		if err != nil {
			continue // the process has ended
		}
		// The name in parentheses may contain any character. The state and the parent follow it.
		fields := bytes.Fields(content[bytes.LastIndexByte(content, ')')+1:])
		if parent, _ := strconv.Atoi(string(fields[1])); parent != pid || string(fields[0]) == "Z" {
			continue
		}
		child, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		require.NoError(t, err)
		found = append(append(found, child), descendants(t, child)...)
	}
	return found
}

func requireGone(t *testing.T, pids []int) {
	testenv.Eventually(t, 10*time.Second, func() error {
		for _, pid := range pids {
			if !errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) {
				return fmt.Errorf("process %d is still there", pid)
			}
		}
		return nil
	})
}

func TestSignalReachesIsolatedProgram(t *testing.T) {
	cmd, family := startWaiting(t)
	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	require.Equal(t, 3, exitCode(t, cmd.Wait()))
	requireGone(t, family)

	output, err := command(t, "killed").CombinedOutput()
	require.Equal(t, 128+int(syscall.SIGKILL), exitCode(t, err), "%s", output)
}

func TestNothingOutlivesAKilledProgram(t *testing.T) {
	cmd, family := startWaiting(t)
	require.NoError(t, cmd.Process.Kill())
	require.Error(t, cmd.Wait())
	// Process 1 of this test run is their parent now and reaps them.
	requireGone(t, family)
}

func TestMainFindsLeakedGoroutines(t *testing.T) {
	output, err := command(t, "leaks", "-test.run=^$").CombinedOutput()
	require.Equal(t, 1, exitCode(t, err), "%s", output)
	require.Contains(t, string(output), "goleak")
}
