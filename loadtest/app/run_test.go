package app

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
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
		err := NewCommand().ExecuteContext(ctx)
		stop()
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
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

	require.Equal(t, jsonFields, fieldsOf(t, out.Bytes()), "the schema changed: fields may be added to it, else it needs a new name")
	d := json.NewDecoder(&out)
	d.DisallowUnknownFields()
	var r report.Report
	require.NoError(t, d.Decode(&r))

	require.Equal(t, report.Schema, r.Schema)
	require.Equal(t, report.Check{Nodes: 20, Shards: 64, OK: true}, r.Check)
	require.Equal(t, 42, r.ColdSync.Services)
	require.Equal(t, 40+2*12, r.ColdSync.Slices)
	require.Equal(t, 4800, r.ColdSync.Endpoints)
	require.EqualValues(t, 20, r.ColdSync.Node.Count)
	require.Greater(t, r.ColdSync.BytesPerNode, 4800.*2, "an endpoint has an address, a node and a zone, compressed")

	require.Equal(t, 100, r.Churn.Changes)
	require.EqualValues(t, 20*100, r.Churn.NodeUpdates)
	require.EqualValues(t, 20*100, r.Churn.Latency.Count, "each change is measured on each node, once")
	require.Greater(t, r.Churn.Latency.P50, 0.)
	require.LessOrEqual(t, r.Churn.Latency.P50, r.Churn.Latency.P99)
	require.LessOrEqual(t, r.Churn.Latency.P99, r.Churn.Latency.Max*1.001, "to the histogram's three digits")
	require.Greater(t, r.Churn.ReceivedBytesPerNodeUpdate, 50.)
	require.Less(t, r.Churn.ReceivedBytesPerNodeUpdate, 400., "deltas, and not slices")
	require.Greater(t, r.Churn.ServerCPUMicrosPerNodeUpdate.Total, 0.)
	require.Zero(t, r.Churn.Reconnects)

	require.Greater(t, r.ServerMemory.State.Heap, int64(4800*100), "an endpoint is a structure of some size")
	require.Greater(t, r.ServerMemory.Connected.Heap, r.ServerMemory.State.Heap)
	require.Greater(t, r.ServerMemory.BytesPerNode, 1000.)
	require.Equal(t, int64(math.Round(r.ColdSync.BytesPerNode)), r.Floor.Cold.MessageBytes)
	require.EqualValues(t, 20, r.Floor.Cold.Writes)
	require.EqualValues(t, 20*100, r.Floor.Churn.Writes)
	require.Greater(t, r.Floor.HandshakeBytes, 500.)
	require.EqualValues(t, 20, r.Restart.Node.Count)
	require.Less(t, r.Restart.MessageBytesPerNode, 600., "positions and the like: nothing has changed")
	require.Greater(t, r.Restart.BytesPerNode, r.Floor.HandshakeBytes)
	require.Greater(t, r.Server.PeakBytes, int64(1<<20))
	require.Contains(t, progress.String(), "churn: ")
}

// jsonFields are the paths in a report that has everything.
var jsonFields = []string{
	"check.nodes", "check.ok", "check.shards",
	"churn.changes", "churn.latency.count", "churn.latency.maxMillis", "churn.latency.p50Millis", "churn.latency.p99Millis",
	"churn.nodeUpdates", "churn.receivedBytes", "churn.receivedBytesPerNodeUpdate", "churn.reconnects", "churn.seconds",
	"churn.sentBytes", "churn.sentBytesPerNodeUpdate", "churn.serverCPUMicrosPerNodeUpdate.system",
	"churn.serverCPUMicrosPerNodeUpdate.total", "churn.serverCPUMicrosPerNodeUpdate.user", "churn.sourceLag.maxMillis",
	"churn.sourceLag.p99Millis",
	"client.churnCores", "client.coldSyncCores", "client.peakBytes", "client.residentBytes",
	"coldSync.allSeconds", "coldSync.bytesPerNode", "coldSync.endpoints", "coldSync.messageBytesPerNode",
	"coldSync.node.count", "coldSync.node.maxMillis", "coldSync.node.p50Millis", "coldSync.node.p99Millis",
	"coldSync.serverCPUMicrosPerNode.system", "coldSync.serverCPUMicrosPerNode.total",
	"coldSync.serverCPUMicrosPerNode.user", "coldSync.serverPeakBytes", "coldSync.services", "coldSync.slices",
	"floor.churn.lag.maxMillis", "floor.churn.lag.p99Millis", "floor.churn.messageBytes", "floor.churn.seconds",
	"floor.churn.serverCPUMicrosPerWrite.system", "floor.churn.serverCPUMicrosPerWrite.total",
	"floor.churn.serverCPUMicrosPerWrite.user", "floor.churn.writes", "floor.cold.lag.maxMillis", "floor.cold.lag.p99Millis",
	"floor.cold.messageBytes", "floor.cold.seconds", "floor.cold.serverCPUMicrosPerWrite.system",
	"floor.cold.serverCPUMicrosPerWrite.total", "floor.cold.serverCPUMicrosPerWrite.user", "floor.cold.writes",
	"floor.handshakeBytes", "floor.handshakeCPUMicros.system", "floor.handshakeCPUMicros.total",
	"floor.handshakeCPUMicros.user",
	"machine.cpu", "machine.cpus", "machine.go", "machine.kernel", "machine.memoryBytes",
	"notes",
	"parameters.churnPerSecond", "parameters.connecting", "parameters.durationSeconds",
	"parameters.endpointsPerLargeService", "parameters.endpointsPerService", "parameters.grpcGo", "parameters.largeServices", "parameters.nodes",
	"parameters.seed", "parameters.services", "parameters.warmUpSeconds",
	"restart.allSeconds", "restart.bytesPerNode", "restart.downSeconds", "restart.maxBytes", "restart.messageBytesPerNode",
	"restart.node.count", "restart.node.maxMillis", "restart.node.p50Millis", "restart.node.p99Millis",
	"restart.serverCPUMicrosPerNode.system", "restart.serverCPUMicrosPerNode.total", "restart.serverCPUMicrosPerNode.user",
	"restart.serverPeakBytes",
	"schema",
	"server.churnCores", "server.coldSyncCores", "server.peakBytes", "server.residentBytes",
	"serverMemory.bytesPerNode", "serverMemory.connected.heapBytes", "serverMemory.connected.residentBytes",
	"serverMemory.connected.stackBytes", "serverMemory.residentBytesPerNode", "serverMemory.state.heapBytes",
	"serverMemory.state.residentBytes", "serverMemory.state.stackBytes",
	"start",
	"version",
}

func fieldsOf(t *testing.T, b []byte) []string {
	var root map[string]any
	require.NoError(t, json.Unmarshal(b, &root))
	var out []string
	var walk func(prefix string, m map[string]any)
	walk = func(prefix string, m map[string]any) {
		for name, v := range m {
			if inner, ok := v.(map[string]any); ok {
				walk(prefix+name+".", inner)
			} else {
				out = append(out, prefix+name)
			}
		}
	}
	walk("", root)
	slices.Sort(out)
	return out
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
	require.Contains(t, out.String(), "node-updates    0 in")
	require.Contains(t, out.String(), "served by grpc-go")
	require.Contains(t, out.String(), "received for a handshake")

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
	for b := make([]byte, 1024); !strings.Contains(seen.String(), "churn:"); {
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
