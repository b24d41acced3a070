// These tests prove what the status command prints: for an agent of a real server, for a standalone
// agent, for a socket that nobody serves, and in tables with every field set.
package app

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/slicecast/slicecast/internal/show"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// runStatus runs the status command and returns its output.
func runStatus(t *testing.T, args ...string) (string, error) {
	t.Helper()
	var out bytes.Buffer
	c := NewCommand()
	c.SetArgs(append([]string{"status"}, args...))
	c.SetOut(&out)
	c.SetErr(io.Discard)
	err := c.ExecuteContext(t.Context())
	return out.String(), err
}

func TestStatus(t *testing.T) {
	dir, files := t.TempDir(), t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "web.yaml"), fmt.Appendf(nil, manifest, 8080), 0o600))
	address, stopServer := serveManifests(t, dir, nil)
	defer stopServer()
	socket := filepath.Join(files, "agent.sock")
	start(t, "--servers="+address, "--insecure-plaintext", "--programmer=printer", "--status-socket="+socket,
		"--checkpoint="+filepath.Join(files, "checkpoint"))
	var out string
	require.Eventually(t, func() bool {
		var err error
		out, err = runStatus(t, "--status-socket="+socket, "--shards")
		return err == nil && strings.Contains(out, "printer: 1 Service ports, programmed ") && !strings.Contains(out, "behind")
	}, 30*time.Second, 10*time.Millisecond)
	require.Contains(t, out, "of node node-1, version ")
	require.Contains(t, out, " at "+address+", version ")
	require.Contains(t, out, "1 Services, 1 slices, 1 endpoints in 64 shards")
	require.Regexp(t, `\nShards\nSHARD +SEQUENCE +PROGRAMMED +DIGEST\n0 +\d+ +\d+ +[0-9a-f]{16}\n`, out)

	out, err := runStatus(t, "--status-socket="+socket, "-o", "json")
	require.NoError(t, err)
	var fields struct{ Status json.RawMessage }
	require.NoError(t, json.Unmarshal([]byte(out), &fields))
	var got pb.AgentDebugServiceGetStatusResponse
	require.NoError(t, protojson.Unmarshal(fields.Status, &got))
	require.Equal(t, "node-1", got.GetNodeName())
	require.Equal(t, uint32(1), got.GetServicePorts())
	require.NotEmpty(t, got.GetServer().GetName())
}

func TestStatusStandalone(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "agent.sock")
	start(t, "--source=file", "--manifests="+t.TempDir(), "--programmer=printer", "--status-socket="+socket)
	require.Eventually(t, func() bool {
		out, err := runStatus(t, "--status-socket="+socket)
		return err == nil && strings.Contains(out, "printer: 0 Service ports, programmed ")
	}, 10*time.Second, 10*time.Millisecond)
	out, err := runStatus(t, "--status-socket="+socket)
	require.NoError(t, err)
	require.Regexp(t, `\nSource +file, standalone\n`, out)
	require.Regexp(t, `\nProgrammer +printer: --programmer=printer\n`, out)
}

func TestStatusErrorsSayWhatToDo(t *testing.T) {
	dir := t.TempDir()
	missing, dead := filepath.Join(dir, "missing.sock"), filepath.Join(dir, "dead.sock")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: dead, Net: "unix"})
	require.NoError(t, err)
	l.SetUnlinkOnClose(false)
	require.NoError(t, l.Close())
	for _, c := range []struct{ args, says string }{
		{"--status-socket=" + missing, missing + ": no such file or directory; use the path that the agent was started with"},
		{"--status-socket=" + dead, "no answer from " + dead},
		{"-o wide", "use table, json or yaml"},
	} {
		_, err := runStatus(t, strings.Fields(c.args)...)
		require.ErrorContains(t, err, c.says, c.args)
	}
}

// TestStatusOfAnAgentThatHangs checks what is said of an agent that accepts connections and answers
// nothing.
func TestStatusOfAnAgentThatHangs(t *testing.T) {
	err := unanswered(status.Error(codes.DeadlineExceeded, "context deadline exceeded"), "/run/agent.sock")
	require.EqualError(t, err, "the agent accepts connections at /run/agent.sock and does not answer: it hangs. Its log may say why, and "+
		"/debug/pprof/goroutine?debug=2 of its pages where; a restart ends that, and the kernel keeps its rules meanwhile")
	require.NoError(t, unanswered(nil, "x"))
}

// TestStatusTables compares the tables with what they should look like.
func TestStatusTables(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	ago := func(d time.Duration) *timestamppb.Timestamp { return timestamppb.New(now.Add(-d)) }
	r := &statusReport{AgentDebugServiceGetStatusResponse: &pb.AgentDebugServiceGetStatusResponse{
		Time: timestamppb.New(now), NodeName: "node-1", Version: "v1.2.3", Programmer: "iptables",
		ProgrammerReason: "--programmer=iptables", StartTime: ago(50 * time.Hour),
		Server:  &pb.ServerConnection{Name: "server-1", Address: "10.0.0.1:8472", Version: "v1.2.4", Since: ago(time.Hour)},
		Servers: []*pb.Server{{Address: "10.0.0.1:8472"}, {Address: "10.0.0.2:8472"}}, Epoch: 0xabc,
		ResourceVersions: &pb.ResourceVersions{Services: 5, Slices: 6},
		Size:             &pb.StateSize{Shards: 64, Services: 1000, Slices: 1050, Endpoints: 55000},
		LagSequences:     2, ServicePorts: 1100, ProgrammingTime: ago(1234 * time.Millisecond), ProgrammingDuration: durationpb.New(15600 * time.Microsecond),
		Failures: []*pb.ProgrammingFailure{{
			Service: &pb.ServiceName{Namespace: "default", Name: "web"}, Since: ago(time.Minute), Reason: "default/web:http/TCP/IPv4: no such set",
		}},
		CheckpointTime: ago(9 * time.Second),
		Warnings:       []*pb.AgentWarning{{Warning: pb.NodeWarning_NODE_WARNING_KUBE_PROXY, Time: ago(time.Hour), Reason: "kube-proxy runs"}},
	}}
	require.Equal(t, `
Agent       of node node-1, version v1.2.3, up 2d2h0m0s
Server      server-1 at 10.0.0.1:8472, version v1.2.4, in sync for 1h0m0s
Known       10.0.0.1:8472, 10.0.0.2:8472
State       1000 Services, 1050 slices, 55000 endpoints in 64 shards, epoch 0000000000000abc, resource versions 5 (Services), 6 (EndpointSlices)
Kernel      iptables: 1100 Service ports, programmed 1.23s ago in 15.6ms, 2 changes behind
Programmer  iptables: --programmer=iptables
Checkpoint  written 9s ago

Services that are not completely programmed: 1
SERVICE      SINCE  REASON
default/web  1m0s   default/web:http/TCP/IPv4: no such set

Warnings
WARNING     SINCE   REASON
kube_proxy  1h0m0s  kube-proxy runs
`, "\n"+printed(t, r))

	r.Server.StaleSince = ago(30 * time.Minute)
	require.Contains(t, printed(t, r), ", in sync for 1h0m0s; stale: it may lack changes of the last 30m0s\n")
	r.Server, r.StaleSince, r.LastError = nil, ago(time.Minute), "10.0.0.1:8472: connection refused"
	r.Failures, r.ByCheckpoint, r.ProgrammingError = nil, true, "nothing of IPv6 is programmed: out of memory"
	require.Contains(t, printed(t, r), "\nServer      none for 1m0s: 10.0.0.1:8472: connection refused\n")
	require.Contains(t, printed(t, r), "\nKernel      iptables: nothing of IPv6 is programmed: out of memory; tried 1.23s ago, from the checkpoint, which may be out of date, 2 changes behind\n")
	r.ProgrammingTime = nil
	require.Contains(t, printed(t, r), "iptables: kept as the last agent programmed it, because that may be later than the checkpoint, 2 changes behind\n")
	r.ByCheckpoint = false
	require.Contains(t, printed(t, r), "iptables: not programmed yet by this agent")
}

func printed(t *testing.T, r show.Report) string {
	t.Helper()
	var out bytes.Buffer
	o := show.Options{Output: "table"}
	require.NoError(t, o.Run(t.Context(), &out, func(context.Context) (show.Report, error) { return r, nil }))
	return out.String()
}
