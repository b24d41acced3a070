// These tests prove that runs with real servers, workers and relays measure what they play and end
// with the check of every node, and that wrong nodes, timeouts and signals are reported. Small
// versions of all shipped scenarios are played.
package app

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv/controlplane"
	"github.com/slicecast/slicecast/internal/wire"
	"github.com/slicecast/slicecast/loadtest/child"
	"github.com/slicecast/slicecast/loadtest/engine"
	"github.com/slicecast/slicecast/loadtest/report"
	"github.com/slicecast/slicecast/loadtest/report/reporttest"
	"github.com/slicecast/slicecast/loadtest/scenario"
	"github.com/slicecast/slicecast/loadtest/worker"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// TestMain lets the test binary act as the command. Runs start it as their servers and workers, and
// tests start it as a run to interrupt.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && slices.Contains([]string{"run", "apiserver", "compare", engine.ServeCommand, engine.WorkCommand}, os.Args[1]) {
		ctx, stop := SignalContext()
		code := Execute(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
		stop()
		os.Exit(code)
	}
	goleak.VerifyTestMain(m)
}

// small are flags that make a scenario small. Flags after them may override them.
var small = []string{"--nodes=6", "--services=10x5-60", "--changing=1x300", "--duration=1s", "--warm-up=200ms", "--at=300ms", "--grace=300ms"}

// options parses flags as the command for a peer does.
func options(t *testing.T, peer report.Peer, flags ...string) Options {
	o := Options{Options: engine.Options{Peer: peer}}
	fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
	o.AddFlags(fs)
	require.NoError(t, fs.Parse(flags))
	return o
}

// run runs the command for a peer, which must succeed, and returns its report.
func run(t *testing.T, peer report.Peer, flags ...string) *report.Report {
	t.Helper()
	var out, progress bytes.Buffer
	require.NoError(t, Run(t.Context(), options(t, peer, append(flags, "--output=json")...), &out, &progress), "%s", &progress)
	require.NoError(t, reporttest.Validate(out.Bytes()))
	r, err := report.Read(&out)
	require.NoError(t, err)
	require.Equal(t, peer, r.Peer)
	require.True(t, r.OK())
	return r
}

func TestRun(t *testing.T) {
	r := run(t, report.Slicecast, "--nodes=20", "--services=40x60", "--changing=2x1200", "--rate=50", "--duration=2s", "--warm-up=500ms", "--floor",
		"--repeats=2")
	require.Len(t, r.Repeats, 2)
	require.Equal(t, "steady", r.Scenario.Name)
	require.Equal(t, "2x1200", r.Scenario.Parameters["changing"])
	first := r.Repeats[0]
	require.Equal(t, report.Check{Nodes: 20, Shards: 64, OK: true}, first.Check)
	require.Equal(t, report.State{Services: 42, Slices: 40 + 2*12, Endpoints: 4800}, first.State)
	require.Len(t, first.Phases, 3)
	cold, warmUp, changes := first.Phases[0], first.Phases[1], first.Phases[2]

	require.Equal(t, report.ColdSync, cold.Kind)
	require.EqualValues(t, 20, cold.Latency.Count)
	require.Greater(t, cold.ReceivedBytes, int64(20*4800*2), "endpoints have addresses, nodes and zones, compressed")

	require.Equal(t, report.WarmUp, warmUp.Kind)
	require.Equal(t, 25, warmUp.Changes)
	require.Equal(t, report.Changes, changes.Kind)
	require.Equal(t, 100, changes.Changes)
	require.EqualValues(t, 20*100, changes.Updates)
	require.EqualValues(t, 20*100, changes.Latency.Count, "each change should be measured once on each node")
	require.EqualValues(t, 100, changes.Convergence.Nodes100.Count)
	require.InDelta(t, changes.Latency.Max, changes.Convergence.Nodes100.Max, 0.01*changes.Latency.Max, "histograms round both")
	require.Zero(t, changes.Reconnects)
	begin := first.Start.Add(time.Duration(changes.StartSeconds * float64(time.Second)))
	require.WithinDuration(t, begin.Round(time.Millisecond), begin, time.Microsecond, "the phase starts when the first change is due, in whole milliseconds")
	require.NotNil(t, changes.SourceLag)
	bytesPerUpdate := r.Summary["bytes-per-update"].Median
	require.Greater(t, bytesPerUpdate, 50.)
	require.Less(t, bytesPerUpdate, 400., "nodes should receive deltas, not whole slices")
	require.Greater(t, cold.ServerCPU.Total(), 0.)
	require.Greater(t, cold.ClientCPU.Total(), 0.)

	require.Greater(t, first.ServerMemory.State.Heap, int64(4800*100), "4800 endpoints need at least 100 bytes each")
	require.Greater(t, first.ServerMemory.Connected.Heap, first.ServerMemory.State.Heap)
	require.Greater(t, r.Summary["memory-per-node"].Median, 1000.)
	require.Equal(t, cold.ReceivedBytes/20, first.Floor.Cold.MessageBytes)
	require.EqualValues(t, 20, first.Floor.Cold.Writes)
	require.EqualValues(t, 20*100, first.Floor.Churn.Writes)
	require.Greater(t, r.Summary["floor-handshake-bytes"].Median, 500.)
	require.Greater(t, first.ServerPeakBytes, int64(1<<20))
	require.NotEmpty(t, first.Series)
	require.Equal(t, 20, first.Series[len(first.Series)-1].NodesUp)
}

// TestShippedScenarios plays a small version of each scenario that comes with the program.
func TestShippedScenarios(t *testing.T) {
	for name, c := range map[string]struct {
		flags   []string
		changes int // minimum
		resync  int // number of nodes
	}{
		"steady":          {changes: 5},
		"rolling-update":  {flags: []string{"--rate=300", "--arrivals=poisson"}, changes: 150},
		"headline":        {flags: []string{"--rate=300"}, changes: 150},
		"node-drain":      {flags: []string{"--changing=", "--rate=2"}, changes: 4},
		"scale-up":        {flags: []string{"--rate=500"}, changes: 12},
		"many-small":      {flags: []string{"--services=100x5", "--changing="}, changes: 20},
		"reconnect-storm": {changes: 5, resync: 6},
		"server-failover": {flags: []string{"--nodes=12"}, changes: 5, resync: 1},
		"slow-nodes":      {flags: []string{"--slow-percent=40", "--slow-delay=200ms"}, changes: 5},
		"cold-start":      {},
	} {
		t.Run(name, func(t *testing.T) {
			r := run(t, report.Slicecast, slices.Concat([]string{"--scenario=" + name}, small, c.flags)...)
			changes, resynced := 0, int64(0)
			for _, p := range r.Repeats[0].Phases {
				switch p.Kind {
				case report.Changes:
					changes += p.Changes
					if p.SlowLatency != nil {
						require.EqualValues(t, p.Updates, p.Latency.Count+p.SlowLatency.Count)
						require.EqualValues(t, 2*p.Changes, p.SlowLatency.Count, "two of six nodes are slow")
					} else {
						require.Equal(t, p.Updates, p.Latency.Count)
					}
				case report.Resync:
					resynced += p.Updates
					require.Equal(t, p.Updates, p.Latency.Count)
				}
			}
			require.GreaterOrEqual(t, changes, c.changes)
			require.GreaterOrEqual(t, resynced, int64(c.resync))
			require.Equal(t, name == "slow-nodes", r.Repeats[0].Phases[len(r.Repeats[0].Phases)-1].SlowLatency != nil)
		})
	}
}

// TestRelays serves nodes in several processes through relays, one of which is killed and
// restarted.
func TestRelays(t *testing.T) {
	r := run(t, report.Slicecast, slices.Concat(small, []string{
		"--nodes=15", "--nodes-per-process=7", "--servers=2", "--relays=2", "--event=restart", "--change=roll", "--rate=300",
	})...)
	require.Equal(t, 3, r.Processes)
	require.Equal(t, 15, r.Repeats[0].Check.Nodes)
	last := r.Repeats[0].Phases[len(r.Repeats[0].Phases)-1]
	require.Equal(t, last.Updates, last.Latency.Count)
	require.Equal(t, int64(15*last.Changes), last.Updates)
	resync := r.Repeats[0].Phases[len(r.Repeats[0].Phases)-2]
	require.Equal(t, report.Resync, resync.Kind)
	require.Positive(t, resync.DownSeconds)
	require.Less(t, resync.Updates, int64(15), "nodes of the other relay should not reconnect")
}

// TestRestart kills the only server and starts it again, with and without changes meanwhile.
func TestRestart(t *testing.T) {
	r := run(t, report.Slicecast, append(small, "--event=restart", "--rate=20", "--arrivals=poisson")...)
	require.EqualValues(t, 6, r.Repeats[0].Phases[2].Updates)
	changes := r.Repeats[0].Phases[3]
	require.EqualValues(t, 6*20, changes.Latency.Count)
	require.Greater(t, changes.Aside.ReceivedBytes, int64(6*1000), "each reconnect costs a TLS handshake")
	require.Less(t, changes.Aside.ReceivedBytes, changes.ReceivedBytes)
	require.Less(t, changes.Aside.ServerCPU.Total(), changes.ServerCPU.Total())
	require.Less(t, changes.Aside.Updates, changes.Updates, "updates before the event do not count")
	require.Contains(t, strings.Join(r.Repeats[0].Notes, "\n"), "bytes and CPU per node-update leave out the")

	r = run(t, report.Slicecast, append(small, "--event=restart", "--change=none")...)
	require.Len(t, r.Repeats[0].Phases, 2)
	require.Less(t, r.Repeats[0].Phases[1].MessageBytes, int64(6*600), "nothing has changed, so there are few messages")
	require.GreaterOrEqual(t, r.Repeats[0].Phases[1].StartSeconds-r.Repeats[0].Phases[0].StartSeconds-r.Repeats[0].Phases[0].Seconds, 0.3, "--at")
}

func TestIdleRun(t *testing.T) {
	var report, out bytes.Buffer
	flags := []string{"--nodes=2", "--services=3x4", "--changing=", "--change=none", "--grpc-go", "--floor", "--output=json"}
	require.NoError(t, Run(t.Context(), options(t, "slicecast", flags...), &report, new(bytes.Buffer)))
	file := filepath.Join(t.TempDir(), "report.json")
	require.NoError(t, os.WriteFile(file, report.Bytes(), 0o600))
	c := NewCommand()
	c.SetArgs([]string{"show", file, file})
	c.SetOut(&out)
	require.NoError(t, c.ExecuteContext(t.Context()))
	require.Contains(t, out.String(), "all 64 shards of all 2 nodes hold the true state")
	require.Contains(t, out.String(), "grpc-go=true")
	require.Contains(t, out.String(), "floor-handshake-bytes")
}

func TestInvalidOptions(t *testing.T) {
	for flags, message := range map[string]string{
		"--nodes=0":                         "nodes is 0",
		"--nodes=1000000000":                "nodes: use 1 to",
		"--nodes=900000":                    "use more relays, or raise the limit",
		"--scenario=nonsense":               `there is no scenario "nonsense"`,
		"--repeats=0":                       "--repeats is 0",
		"--nodes-per-process=0":             "--nodes-per-process is 0",
		"--timeout=0s":                      "--timeout is 0s",
		"--output=yaml":                     `--output is "yaml"`,
		"--server=localhost:1":              "--server needs --ca-file",
		"--server-pid=1":                    "add --server",
		"--floor --server=x:1":              "leave --server out",
		"--event=restart --server=x:1":      "leave --server out",
		"--relays=1 --server=x:1":           "leave --server out",
		"--node-ca-cert-file=x.crt":         "add --server",
		"--server=x:1 --kube-apiserver=own": "use one of them",
		"--write-namespace=x":               "add --kube-apiserver=KUBECONFIG",

		"--client-key-file=x.key":                               "add --server",
		"--server=localhost:1 --ca-file=x --client-cert-file=x": "--server needs --ca-file, and either",
		"--server=x:1 --ca-file=x --client-cert-file=x --client-key-file=x --node-ca-cert-file=x --node-ca-key-file=x": "--server needs --ca-file, and either",

		"--server=x:1 --scenario=steady --nodes=2 --rate=5": "--scenario, --rate: this run only observes and cannot choose the changes",
		"--kube-apiserver=x.kubeconfig --services=1x1":      "--services: this run only observes and cannot choose the changes",
	} {
		require.ErrorContains(t, Run(t.Context(), options(t, report.Slicecast, strings.Fields(flags)...), nil, nil), message, flags)
	}
	for flags, message := range map[string]string{
		"--event=restart --relays=0":               "an API server cannot be killed",
		"--kube-apiserver= ":                       "use a kubeconfig or own",
		"--kube-apiserver=own --write-namespace=x": "add --kube-apiserver=KUBECONFIG",

		"--relays=1":     "leave it out with an API server",
		"--servers=2":    "leave it out with an API server",
		"--floor":        "leave it out with an API server",
		"--grpc-go":      "leave it out with an API server",
		"--server-pid=1": "--server-pid requires a running API server",
		"--kube-apiserver=x.kubeconfig --warm-up=1s": "--warm-up: this run only observes and cannot choose the changes",
	} {
		require.ErrorContains(t, Run(t.Context(), options(t, report.KubeAPIServer, strings.Fields(flags)...), nil, nil), message, flags)
	}
}

// TestOwnNeedsBinaries checks that a missing etcd or kube-apiserver is reported before anything
// runs.
func TestOwnNeedsBinaries(t *testing.T) {
	t.Chdir(t.TempDir())
	for dir, message := range map[string]string{
		"":          "run there, after make setup, or set $SLICECAST_BINARIES to a folder that contains etcd and kube-apiserver",
		t.TempDir(): "$SLICECAST_BINARIES: ",
	} {
		t.Setenv(controlplane.BinariesVariable, dir)
		for _, arguments := range []string{"apiserver", "run --kube-apiserver=own", "compare", "compare --against=/proc/self/exe -- --kube-apiserver=own"} {
			code, _, errOut := execute(t, strings.Fields(arguments)...)
			require.Equal(t, exitUsage, code, arguments)
			require.Contains(t, errOut, "--kube-apiserver=own: ")
			require.Contains(t, errOut, message)
		}
	}
}

// oneShard is a server with one shard that serves one Service to every node.
type oneShard struct {
	pb.UnimplementedDistributionServiceServer
	// service returns the Service for a node. If it returns nil, the node gets no answer.
	service func(node string) *model.Service
	// away ends all streams once it is closed, and the server then refuses new ones. It may be nil.
	away chan struct{}
}

// serve starts the server and returns its address.
func (o *oneShard) serve(t *testing.T) string {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	server := grpc.NewServer()
	pb.RegisterDistributionServiceServer(server, o)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	t.Cleanup(func() {
		server.Stop()
		require.NoError(t, <-served)
	})
	return listener.Addr().String()
}

func webService(port uint16) *model.Service {
	return model.NewService(model.Service{
		Namespace: "default", Name: "web", Type: model.ClusterIP, Ports: []model.ServicePort{{Protocol: model.TCP, Port: port}},
	})
}

func (o *oneShard) Stream(g pb.DistributionService_StreamServer) error {
	hello, err := g.Recv()
	if err != nil {
		return err
	}
	service := o.service(hello.GetHello().GetNodeName())
	if service == nil {
		<-g.Context().Done()
		return nil
	}
	select {
	case <-o.away:
		return status.Error(codes.Unavailable, "away")
	default:
	}
	for _, m := range []*pb.StreamResponse{
		{Message: &pb.StreamResponse_Welcome{Welcome: &pb.Welcome{Epoch: 1, ShardCount: 1}}},
		{Message: &pb.StreamResponse_ShardUpdate{ShardUpdate: wire.UpdateToProto(&model.Update{
			To: 1, Full: true, Services: []*model.Service{service},
		})}},
		{Message: &pb.StreamResponse_InSync{InSync: &pb.InSync{Sequences: []uint64{1}}}},
	} {
		if err := g.Send(m); err != nil {
			return err
		}
	}
	select {
	case <-o.away:
	case <-g.Context().Done():
	}
	return status.Error(codes.Unavailable, "away")
}

// TestNodesThatLoseTheServer checks nodes that hold the true state but have lost their server.
func TestNodesThatLoseTheServer(t *testing.T) {
	server := &oneShard{service: func(string) *model.Service { return webService(80) }, away: make(chan struct{})}
	setup := worker.Setup{Scenario: scenario.Scenario{Nodes: 2}, Count: 2, Servers: []string{server.serve(t)}}
	w, err := child.Start(t.Context(), "worker", os.Stderr, []string{engine.WorkCommand}, (*worker.Worker).Setup, setup)
	require.NoError(t, err)
	defer func() { require.NoError(t, w.Close()) }()
	up := func() int {
		s, err := child.Call(t.Context(), w, (*worker.Worker).Sample, child.None{})
		require.NoError(t, err)
		return s.Up
	}
	require.Zero(t, up(), "no node has connected yet")
	_, err = child.Call(t.Context(), w, (*worker.Worker).Run, child.None{})
	require.NoError(t, err)
	_, err = child.Call(t.Context(), w, (*worker.Worker).Synced, child.None{})
	require.NoError(t, err)
	require.Equal(t, 2, up())
	close(server.away)
	require.Eventually(t, func() bool { return up() == 0 }, time.Minute, 10*time.Millisecond)
	checked, err := child.Call(t.Context(), w, (*worker.Worker).Check, 500*time.Millisecond)
	require.NoError(t, err)
	require.Contains(t, checked.Wrong, "2 nodes, one of them node-00000, are not connected any more")
}

func TestDivergedNodeFailsTheRun(t *testing.T) {
	server := &oneShard{service: func(node string) *model.Service {
		if node == "slicecast-loadtest-node-00003" { // --server adds the prefix
			return webService(81)
		}
		return webService(80)
	}}
	c := exec.CommandContext(t.Context(), os.Args[0], "run", "--nodes=5", "--duration=100ms", "--insecure-plaintext",
		"--server="+server.serve(t))
	var out, log bytes.Buffer
	c.Stdout, c.Stderr = &out, &log
	var exit *exec.ExitError
	require.ErrorAs(t, c.Run(), &exit)
	require.Equal(t, 1, exit.ExitCode())
	require.Contains(t, log.String(), "node slicecast-loadtest-node-00003, shard 0 at sequence 1")
	require.Contains(t, log.String(), "Service default/web")
	require.NotContains(t, log.String(), "node-00002, ")
	require.Contains(t, out.String(), "FAILED", "the report should be written even so")
}

// TestTimeoutKeepsTheReport uses a server that does not answer the second stream of a node.
func TestTimeoutKeepsTheReport(t *testing.T) {
	var mu sync.Mutex
	seen := make(map[string]bool)
	server := &oneShard{service: func(node string) *model.Service {
		mu.Lock()
		defer mu.Unlock()
		if seen[node] {
			return nil
		}
		seen[node] = true
		return webService(80)
	}}
	html := filepath.Join(t.TempDir(), "page.html")
	code, out, errOut := execute(t, "run", "--nodes=2", "--duration=100ms", "--insecure-plaintext", "--repeats=2", "--timeout=4s", "--output=json",
		"--require=p99<1ms", "--html="+html, "--server="+server.serve(t))
	require.Equal(t, exitFailed, code, errOut)
	require.Contains(t, errOut, "not all nodes are in sync")
	require.Contains(t, errOut, "objective p99<1ms: ")
	require.NoError(t, reporttest.Validate([]byte(out)))
	r, err := report.Read(strings.NewReader(out))
	require.NoError(t, err)
	require.Len(t, r.Repeats, 2)
	require.True(t, r.Repeats[0].Check.OK)
	require.False(t, r.Repeats[1].Check.OK)
	require.Contains(t, r.Repeats[1].Check.Error, ": timeout after 4s")
	require.Contains(t, r.Summary, "cold-p50")
	require.FileExists(t, html)
}

// interrupted starts a long run, waits until the state changes, sends it a signal and waits for its
// end. It checks that the processes and files of the run are then gone, and returns its exit code.
func interrupted(t *testing.T, s os.Signal) (exitCode int) {
	dir := t.TempDir()
	c := exec.CommandContext(t.Context(), os.Args[0], "run", "--nodes=5", "--services=10x5", "--changing=", "--duration=1h")
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
	require.Len(t, children, 2, "the server and the nodes should be separate processes")

	require.NoError(t, c.Process.Signal(s))
	_ = c.Wait() // the caller checks the exit code
	require.Eventually(t, func() bool { return !slices.ContainsFunc(children, alive) }, 30*time.Second, 10*time.Millisecond)
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

// alive reports whether a process is running. A zombie is not.
func alive(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	after := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	return after[0] != "Z" && after[0] != "X"
}
