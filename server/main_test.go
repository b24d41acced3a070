// These tests prove how the command ends on a first and a second signal, and that wrong flags are
// reported. The server is a process of its own.
package main

import (
	"bufio"
	"encoding/json"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// asServer makes this test binary the command.
const asServer = "SLICECAST_TEST_AS_SERVER"

func TestMain(m *testing.M) {
	if os.Getenv(asServer) != "" {
		main()
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// process is a server in a process of its own, with what it logs.
type process struct {
	t    *testing.T
	cmd  *exec.Cmd
	logs *bufio.Scanner
}

type logLine struct{ Msg, For, Address string }

func startProcess(t *testing.T, args ...string) *process {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", args...)
	cmd.Env = append(os.Environ(), asServer+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	stderr, err := cmd.StderrPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	return &process{t, cmd, bufio.NewScanner(stderr)}
}

// until reads the log up to a line with that message.
func (p *process) until(message string) logLine {
	p.t.Helper()
	for p.logs.Scan() {
		var line logLine
		require.NoError(p.t, json.Unmarshal(p.logs.Bytes(), &line), p.logs.Text())
		if line.Msg == message {
			return line
		}
	}
	require.Fail(p.t, "the log ended", "before %q", message)
	return logLine{}
}

// serving starts a server on an empty directory and opens a stream.
func serving(t *testing.T, args ...string) (*process, pb.DistributionService_StreamClient) {
	t.Helper()
	p := startProcess(t, append([]string{
		"--source=file", "--manifests=" + t.TempDir(), "--bind-address=127.0.0.1:0", "--insecure-plaintext", "--log-format=json",
	}, args...)...)
	address := p.until("Listening").Address
	p.until("Synced with the source, serving")
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close()) })
	stream, err := pb.NewDistributionServiceClient(conn).Stream(t.Context())
	require.NoError(t, err)
	require.NoError(t, stream.Send(&pb.StreamRequest{Message: &pb.StreamRequest_Hello{Hello: &pb.Hello{NodeName: "a"}}}))
	welcome, err := stream.Recv()
	require.NoError(t, err)
	require.NotNil(t, welcome.GetWelcome())
	return p, stream
}

func TestSIGTERMDrainsAndExitsWith0(t *testing.T) {
	p, stream := serving(t, "--drain-window=100ms")
	require.NoError(t, p.cmd.Process.Signal(syscall.SIGTERM))
	for drained := false; !drained; {
		m, err := stream.Recv()
		require.NoError(t, err)
		drained = m.GetDrain() != nil
	}
	p.until("Server stopped")
	require.NoError(t, p.cmd.Wait())
}

func TestSecondSignalEndsTheServerAtOnce(t *testing.T) {
	p, _ := serving(t, "--drain-window=1h", "--shutdown-grace-period=1h")
	require.NoError(t, p.cmd.Process.Signal(syscall.SIGTERM))
	p.until("Draining")
	// The first signal may still be handled. So send more of them until one has ended the process.
	ended := make(chan error, 1)
	go func() { ended <- p.cmd.Wait() }()
	var err error
	require.Eventually(t, func() bool {
		select {
		case err = <-ended:
			return true
		default:
			_ = p.cmd.Process.Signal(syscall.SIGTERM) // fails once the process has ended
			return false
		}
	}, 30*time.Second, 10*time.Millisecond)
	var exit *exec.ExitError
	require.ErrorAs(t, err, &exit)
	require.Equal(t, syscall.SIGTERM, exit.Sys().(syscall.WaitStatus).Signal())
}

func TestInvalidFlagsAreReported(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "--source=file")
	cmd.Env = append(os.Environ(), asServer+"=1")
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	require.ErrorAs(t, err, &exit)
	require.Equal(t, 1, exit.ExitCode())
	require.Contains(t, string(out), "slicecast-server: --source=file requires --manifests: set it to a directory")
}

func TestVersion(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "--version")
	cmd.Env = append(os.Environ(), asServer+"=1")
	out, err := cmd.Output()
	require.NoError(t, err)
	require.Regexp(t, `^slicecast-server \S+\ncommit: \S+\nGo: go1\S+\nplatform: linux/\S+\n$`, string(out))
}
