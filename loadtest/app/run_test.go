package app

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc"

	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/wire"
	"github.com/slicecast/slicecast/loadtest/report"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// TestMain lets the test binary be the command itself: runs start it as their server, and tests as a run to interrupt.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && (os.Args[1] == "run" || os.Args[1] == serveCommand) {
		ctx, stop := daemon.SignalContext(context.Background())
		code := Execute(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
		stop()
		os.Exit(code)
	}
	goleak.VerifyTestMain(m)
}

// options parses flags as the command does.
func options(t *testing.T, flags ...string) Options {
	var o Options
	fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
	o.AddFlags(fs)
	require.NoError(t, fs.Parse(flags))
	return o
}

func TestRun(t *testing.T) {
	o := options(t, "--nodes=20", "--services=40", "--endpoints=60", "--large-services=2", "--large-endpoints=1200",
		"--churn=50", "--duration=2s", "--warm-up=500ms", "--floor", "--restart", "--output=json")
	var out, progress bytes.Buffer
	require.NoError(t, Run(t.Context(), o, slog.New(slog.DiscardHandler), &out, &progress), "%s", &progress)

	r, err := report.Read(&out)
	require.NoError(t, err)
	require.Equal(t, report.Schema, r.Schema)
	require.Equal(t, report.Slicecast, r.Peer)
	require.True(t, r.OK())
	require.Len(t, r.Repeats, 1)
	first := r.Repeats[0]
	require.Equal(t, report.Check{Nodes: 20, Shards: 64, OK: true}, first.Check)
	require.Equal(t, report.State{Services: 42, Slices: 40 + 2*12, Endpoints: 4800}, first.State)
	require.Len(t, first.Phases, 4)
	cold, warmUp, changes, restart := first.Phases[0], first.Phases[1], first.Phases[2], first.Phases[3]

	require.Equal(t, report.ColdSync, cold.Kind)
	require.EqualValues(t, 20, cold.Latency.Count)
	require.Greater(t, cold.ReceivedBytes, int64(20*4800*2), "an endpoint has an address, a node and a zone, compressed")

	require.Equal(t, report.WarmUp, warmUp.Kind)
	require.Equal(t, report.Changes, changes.Kind)
	require.Equal(t, 100, changes.Changes)
	require.EqualValues(t, 20*100, changes.Updates)
	require.EqualValues(t, 20*100, changes.Latency.Count, "each change is measured on each node, once")
	require.Zero(t, changes.Reconnects)
	bytesPerUpdate := r.Summary["bytes-per-update"].Median
	require.Greater(t, bytesPerUpdate, 50.)
	require.Less(t, bytesPerUpdate, 400., "deltas, and not slices")
	require.Greater(t, changes.ServerCPU.Total(), 0.)

	require.Greater(t, first.ServerMemory.State.Heap, int64(4800*100), "an endpoint is a structure of some size")
	require.Greater(t, first.ServerMemory.Connected.Heap, first.ServerMemory.State.Heap)
	require.Greater(t, r.Summary["memory-per-node"].Median, 1000.)
	require.Equal(t, int64(math.Round(float64(cold.ReceivedBytes)/20)), first.Floor.Cold.MessageBytes)
	require.EqualValues(t, 20, first.Floor.Cold.Writes)
	require.EqualValues(t, 20*100, first.Floor.Churn.Writes)
	require.Greater(t, r.Summary["floor-handshake-bytes"].Median, 500.)

	require.Equal(t, report.Resync, restart.Kind)
	require.EqualValues(t, 20, restart.Latency.Count)
	require.Positive(t, restart.DownSeconds)
	require.Less(t, restart.MessageBytes, int64(20*600), "positions and the like: nothing has changed")
	require.Greater(t, r.Summary["resync-bytes-per-node"].Median, r.Summary["floor-handshake-bytes"].Median)
	require.Greater(t, first.ServerPeakBytes, int64(1<<20))
	require.Contains(t, progress.String(), "changes: ")
}

func TestIdleRun(t *testing.T) {
	o := options(t, "--nodes=2", "--services=3", "--endpoints=4", "--large-services=0", "--churn=0", "--duration=100ms", "--grpc-go",
		"--floor", "--output=json")
	var report, out bytes.Buffer
	require.NoError(t, Run(t.Context(), o, slog.New(slog.DiscardHandler), &report, new(bytes.Buffer)))
	file := filepath.Join(t.TempDir(), "report.json")
	require.NoError(t, os.WriteFile(file, report.Bytes(), 0o600))
	c := NewCommand()
	c.SetArgs([]string{"show", file, file})
	c.SetOut(&out)
	require.NoError(t, c.ExecuteContext(t.Context()))
	require.Contains(t, out.String(), "all 64 shards of all 2 nodes hold the true state")
	require.Contains(t, out.String(), "observed (changes): 0.1s, 0 updates")
	require.Contains(t, out.String(), "grpcGo=true")
	require.Contains(t, out.String(), "floor-handshake-bytes")

	require.NoError(t, os.WriteFile(file, []byte(`{"schema": "v0"}`), 0o600))
	require.ErrorContains(t, c.ExecuteContext(t.Context()), `its schema is "v0"`)
}

func TestOptionsSayWhatIsWrong(t *testing.T) {
	for flag, message := range map[string]string{
		"--nodes=0":                 "--nodes is 0",
		"--nodes=1000000000":        "use fewer, or raise the limit",
		"--services=0":              "0 services",
		"--endpoints=0":             "0 endpoints",
		"--large-endpoints=0":       "1 with 0: use at least 1 endpoint",
		"--churn=-1":                "--churn is -1",
		"--duration=0s":             "--duration is 0s",
		"--warm-up=-1s":             "--warm-up is -1s",
		"--connecting=0":            "--connecting is 0",
		"--timeout=0s":              "--timeout is 0s",
		"--output=yaml":             `--output is "yaml"`,
		"--server=localhost:1":      "--server needs --ca-file",
		"--server-pid=1":            "add --server",
		"--floor --server=x:1":      "leave --server out",
		"--restart --server=x:1":    "leave --server out",
		"--node-ca-cert-file=x.crt": "add --server",
	} {
		require.ErrorContains(t, Run(t.Context(), options(t, strings.Fields(flag)...), slog.Default(), nil, nil), message, flag)
	}
}

// oneShard serves every node one Service.
type oneShard struct {
	pb.UnimplementedDistributionServiceServer
	// service gives the one that a node gets.
	service func(node string) *model.Service
}

func (o *oneShard) Stream(g pb.DistributionService_StreamServer) error {
	hello, err := g.Recv()
	if err != nil {
		return err
	}
	for _, m := range []*pb.StreamResponse{
		{Message: &pb.StreamResponse_Welcome{Welcome: &pb.Welcome{Epoch: 1, ShardCount: 1}}},
		{Message: &pb.StreamResponse_ShardUpdate{ShardUpdate: wire.UpdateToProto(&model.Update{
			To: 1, Full: true, Services: []*model.Service{o.service(hello.GetHello().GetNodeName())},
		})}},
		{Message: &pb.StreamResponse_InSync{InSync: &pb.InSync{Sequences: []uint64{1}}}},
	} {
		if err := g.Send(m); err != nil {
			return err
		}
	}
	<-g.Context().Done()
	return nil
}

func TestDivergedNodeFailsTheRun(t *testing.T) {
	service := func(port uint16) *model.Service {
		return model.NewService(model.Service{
			Namespace: "default", Name: "web", Type: model.ClusterIP, Ports: []model.ServicePort{{Protocol: model.TCP, Port: port}},
		})
	}
	for name, wrong := range map[string]*model.Service{
		"other version":                   service(81),
		"other content, the same version": service(81).WithVersion(service(80).ContentVersion()),
	} {
		t.Run(name, func(t *testing.T) {
			listener, err := net.Listen("tcp", "127.0.0.1:0")
			require.NoError(t, err)
			server := grpc.NewServer()
			pb.RegisterDistributionServiceServer(server, &oneShard{service: func(node string) *model.Service {
				if node == "node-00003" {
					return wrong
				}
				return service(80)
			}})
			served := make(chan error, 1)
			go func() { served <- server.Serve(listener) }()
			defer func() {
				server.Stop()
				require.NoError(t, <-served)
			}()

			c := exec.CommandContext(t.Context(), os.Args[0], "run", "--nodes=5", "--duration=100ms", "--insecure-plaintext",
				"--server="+listener.Addr().String())
			var out, log bytes.Buffer
			c.Stdout, c.Stderr = &out, &log
			var exit *exec.ExitError
			require.ErrorAs(t, c.Run(), &exit)
			require.Equal(t, 1, exit.ExitCode())
			require.Contains(t, log.String(), "node node-00003, shard 0 at sequence 1")
			require.Contains(t, log.String(), "Service default/web")
			require.NotContains(t, log.String(), "node node-00002, ")
			require.Contains(t, out.String(), "FAILED", "the report is written all the same")
		})
	}
}

// interrupted starts a run that would last, waits until it churns, sends it a signal and waits for its end. It checks that
// the server's process and its files are then gone.
func interrupted(t *testing.T, s os.Signal) (exitCode int) {
	dir := t.TempDir()
	c := exec.CommandContext(t.Context(), os.Args[0], "run", "--nodes=5", "--services=10", "--endpoints=5", "--duration=1h")
	c.Env = append(os.Environ(), "TMPDIR="+dir)
	progress, err := c.StderrPipe()
	require.NoError(t, err)
	require.NoError(t, c.Start())
	var seen strings.Builder
	for b := make([]byte, 1024); !strings.Contains(seen.String(), "changes:"); {
		n, err := progress.Read(b)
		seen.Write(b[:n])
		require.NoError(t, err, "%s", &seen)
	}
	children := childrenOf(t, c.Process.Pid)
	require.Len(t, children, 1, "the server is a process of its own")

	require.NoError(t, c.Process.Signal(s))
	_ = c.Wait() // that it failed is what the caller looks at
	require.Eventually(t, func() bool { return !alive(children[0]) }, 30*time.Second, 10*time.Millisecond)
	left, err := filepath.Glob(filepath.Join(dir, "*"))
	require.NoError(t, err)
	require.Empty(t, left)
	return c.ProcessState.ExitCode()
}

func TestServerEndsWithKilledRun(t *testing.T) {
	require.Equal(t, -1, interrupted(t, syscall.SIGKILL))
}

func TestInterrupt(t *testing.T) {
	require.Equal(t, 1, interrupted(t, os.Interrupt))
}

func childrenOf(t *testing.T, pid int) (out []int) {
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	require.NoError(t, err)
	for _, task := range tasks {
		b, err := os.ReadFile(task)
		if errors.Is(err, os.ErrNotExist) {
			continue // the thread has ended
		}
		require.NoError(t, err)
		for _, s := range strings.Fields(string(b)) {
			child, err := strconv.Atoi(s)
			require.NoError(t, err)
			out = append(out, child)
		}
	}
	return out
}

// alive tells whether a process runs; one that has ended and that nobody has waited for does not.
func alive(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	after := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	return after[0] != "Z" && after[0] != "X"
}
