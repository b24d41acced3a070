// These tests prove what the status command prints for a real server, over the debug socket, TLS
// and plaintext, for relays too, and that its errors say what to do.
package app

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/slicecast/slicecast/agent/client"
	"github.com/slicecast/slicecast/internal/auth/authtest"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
	"github.com/slicecast/slicecast/internal/show"
	"github.com/slicecast/slicecast/internal/testca"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// runStatus runs the status command.
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

// withWeb adds a Service to the server's store.
func (r *running) withWeb() {
	r.store.Upsert(modeltest.Web(), 1)
	r.store.Upsert(model.NewSlice(modeltest.WebSlice(2)), 2)
	r.sync()
	require.Eventually(r.t, func() bool { return r.store.Reached().Slices == 2 }, deadline, time.Millisecond)
}

func TestStatusByTheDebugSocket(t *testing.T) {
	c := testConfig(t)
	c.SourceKind = "kube"
	r := start(t, c)
	socket := "--debug-socket=" + c.DebugSocket
	out, err := runStatus(t, socket)
	require.NoError(t, err)
	require.Contains(t, out, ", not synced with its source yet\n")
	require.Regexp(t, `\nSource +kube\nState +0 Services, 0 slices, 0 endpoints in 64 shards, epoch [0-9a-f]{16}\nStreams +none; 0 nodes served\n`, out)
	require.Contains(t, out, "\n0 clients\n")

	r.withWeb()
	_, err = hello(t, dial(t, r.Addresses().GRPC.String(), nil), "node-a")
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		out, err = runStatus(t, socket)
		require.NoError(t, err)
		return strings.Contains(out, "1 node served")
	}, deadline, time.Millisecond)
	require.Contains(t, out, ", serving\n")
	require.Contains(t, out, "resource versions 1 (Services), 2 (EndpointSlices)")
	require.Contains(t, out, "1 Services, 1 slices, 2 endpoints")
	require.Contains(t, out, "1 agent; 1 node served")
	require.Regexp(t, `\n1 client\nNODE +KIND +STATE .*\nnode-a +agent +programming `, out)

	for _, filter := range []string{"--node=node-b", "--errors", "--lacks=default/other"} {
		out, err = runStatus(t, socket, filter)
		require.NoError(t, err)
		if filter == "--lacks=default/other" {
			require.Contains(t, out, "\nThe server has no Service default/other: check its name.")
			require.Contains(t, out, "\n1 client\n", "it has not said that it has programmed anything")
			continue
		}
		require.Contains(t, out, "\n0 clients\n")
	}
	out, err = runStatus(t, socket, "--lacks=default/web")
	require.NoError(t, err)
	require.NotContains(t, out, "check its name")
	out, err = runStatus(t, socket, "--shards", "--behind")
	require.NoError(t, err)
	require.Regexp(t, `\nShards\nSHARD +SEQUENCE +DIGEST +OBJECTS\n0 +\d+ +[0-9a-f]{16} +\d+\n`, out)
	require.Contains(t, out, "node-a")
}

func TestStatusOfAService(t *testing.T) {
	c := testConfig(t)
	start(t, c).withWeb()
	out, err := runStatus(t, "--debug-socket="+c.DebugSocket, "--service=default/web")
	require.NoError(t, err)
	require.Contains(t, out, "\nService    default/web, CLUSTER_IP, version ")
	require.Contains(t, out, "10.180.100.1")
	require.NotContains(t, out, "client")
	_, err = runStatus(t, "--debug-socket="+c.DebugSocket, "--service=default/webb")
	require.ErrorContains(t, err, "this server has no Service default/webb: it does not exist")
}

func TestStatusAsJSON(t *testing.T) {
	c := testConfig(t)
	r := start(t, c)
	r.withWeb()
	_, err := hello(t, dial(t, r.Addresses().GRPC.String(), nil), "node-a")
	require.NoError(t, err)
	get := func(args ...string) map[string]json.RawMessage {
		out, err := runStatus(t, append(args, "--debug-socket="+c.DebugSocket, "-o", "json")...)
		require.NoError(t, err)
		var fields map[string]json.RawMessage
		require.NoError(t, json.Unmarshal([]byte(out), &fields), out)
		return fields
	}
	fields := get("--shards")
	var status pb.GetStatusResponse
	require.NoError(t, protojson.Unmarshal(fields["status"], &status))
	require.Equal(t, r.store.Epoch(), status.GetEpoch())
	var list []json.RawMessage
	require.NoError(t, json.Unmarshal(fields["shards"], &list))
	require.Len(t, list, 64)
	require.NoError(t, json.Unmarshal(fields["agents"], &list))
	require.Len(t, list, 1)
	var agent pb.AgentStatus
	require.NoError(t, protojson.Unmarshal(list[0], &agent))
	require.Equal(t, "node-a", agent.GetNodeName())
	require.NotContains(t, fields, "service")

	var service pb.GetServiceResponse
	require.NoError(t, protojson.Unmarshal(get("--service=default/web")["service"], &service))
	require.Len(t, service.GetSlices(), 1)
}

func TestStatusOverTLS(t *testing.T) {
	c, ca := tlsConfig(t)
	r := start(t, c)
	r.withWeb()
	server := "--server=" + r.Addresses().GRPC.String()
	with := func(client tls.Certificate, name string) []string {
		cert, key, err := testca.Write(t.TempDir(), "client", client)
		require.NoError(t, err)
		return []string{
			server, "--server-name=" + name, "--ca-file=" + ca.File, "--client-cert-file=" + cert, "--client-key-file=" + key,
		}
	}
	out, err := runStatus(t, with(ca.Observer(), authtest.ServerName)...)
	require.NoError(t, err)
	require.Contains(t, out, "serving")
	_, err = runStatus(t, with(ca.Node("a"), authtest.ServerName)...)
	require.ErrorContains(t, err, "is not allowed to call /slicecast.v1.DebugService/GetStatus")
	_, err = runStatus(t, with(ca.Observer(), "elsewhere")...)
	require.ErrorContains(t, err, "no answer from "+r.Addresses().GRPC.String())
	require.ErrorContains(t, err, "elsewhere")
	require.ErrorContains(t, err, "check that the server runs there and accepts these credentials")
}

func TestStatusOfARelay(t *testing.T) {
	root := start(t, testConfig(t))
	root.withWeb()
	address := root.Addresses().GRPC.String()
	c := testConfig(t)
	c.SourceKind, c.Upstream = "upstream", &client.Options{
		Servers: client.Static(address), Logger: c.Logger, Registerer: c.Registry,
		DialOptions: []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())},
	}
	start(t, c)
	var out string
	require.Eventually(t, func() bool {
		var err error
		out, err = runStatus(t, "--debug-socket="+c.DebugSocket)
		require.NoError(t, err)
		return strings.Contains(out, ", serving\n") && strings.Contains(out, ", in sync for ")
	}, deadline, time.Millisecond)
	require.Regexp(t, `\nSource +upstream, resource versions .*, from \S+ at `+address+`, version \S+, in sync for \S+\n`, out)
	require.Contains(t, out, "1 Services, 1 slices, 2 endpoints")
	require.Eventually(t, func() bool {
		out, err := runStatus(t, "--debug-socket="+root.config.DebugSocket)
		require.NoError(t, err)
		return strings.Contains(out, "1 relay; 0 nodes served") && strings.Contains(out, "relay of 0")
	}, deadline, time.Millisecond)
}

func TestStatusInPlaintext(t *testing.T) {
	r := start(t, testConfig(t))
	out, err := runStatus(t, "--server="+r.Addresses().GRPC.String(), "--insecure-plaintext")
	require.NoError(t, err)
	require.Contains(t, out, "Server ")
}

func TestStatusErrorsSayWhatToDo(t *testing.T) {
	dir := t.TempDir()
	missing, dead := filepath.Join(dir, "missing.sock"), filepath.Join(dir, "dead.sock")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: dead, Net: "unix"})
	require.NoError(t, err)
	l.SetUnlinkOnClose(false)
	require.NoError(t, l.Close())
	for _, c := range []struct{ args, says string }{
		{"", "no server: set --debug-socket"},
		{"--debug-socket=" + missing, missing + ": no such file or directory; use the path that the server was started with"},
		{"--debug-socket=" + dead, "no answer from " + dead},
		{"--debug-socket=x --server=y", "--debug-socket excludes --server"},
		{"--debug-socket=x --ca-file=y", "--debug-socket excludes"},
		{"--server=y --ca-file=x --insecure-plaintext", "--insecure-plaintext excludes"},
		{"--server=y --ca-file=x", "set --ca-file, --client-cert-file and --client-key-file"},
		{"--server=y --ca-file=x --client-cert-file=x --client-key-file=x", "--ca-file, --client-cert-file, --client-key-file: "},
		{"--debug-socket=x --service=web", `--service is "web": use namespace/name`},
		{"--debug-socket=x --lacks=a/b/c", `--lacks is "a/b/c": use namespace/name`},
		{"--debug-socket=x --service=a/b --behind", "remove --lacks, --node, --behind and --errors"},
		{"--debug-socket=x -o wide", "use table, json or yaml"},
	} {
		_, err := runStatus(t, strings.Fields(c.args)...)
		require.ErrorContains(t, err, c.says, c.args)
	}
}

func TestStatusWatch(t *testing.T) {
	c := testConfig(t)
	start(t, c)
	ctx, cancel := context.WithCancel(t.Context())
	read, write, err := os.Pipe()
	require.NoError(t, err)
	command := NewCommand()
	command.SetArgs([]string{"status", "--watch", "--debug-socket=" + c.DebugSocket})
	command.SetOut(write)
	ended := make(chan error, 1)
	go func() { ended <- command.ExecuteContext(ctx) }()
	b := make([]byte, 1<<16)
	// The second report comes 2 s after the first.
	for seen := ""; strings.Count(seen, "Server ") < 2; {
		n, err := read.Read(b)
		require.NoError(t, err)
		seen += string(b[:n])
	}
	cancel()
	require.NoError(t, <-ended)
	require.NoError(t, write.Close())
	require.NoError(t, read.Close())
}

// TestStatusTables compares the tables with their expected text.
func TestStatusTables(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	ago := func(d time.Duration) *timestamppb.Timestamp { return timestamppb.New(now.Add(-d)) }
	open := &pb.Convergence{Shard: 7, Sequence: 99, PublishTime: ago(time.Minute), Nodes: 3000, Lacking: 2,
		TimeToHalf: durationpb.New(21 * time.Millisecond), TimeToMost: durationpb.New(150 * time.Millisecond),
		Last: []*pb.NodeTime{{NodeName: "relay 10.0.0.9:4242"}, {NodeName: "node-3", Time: durationpb.New(150 * time.Millisecond)}}}
	r := &statusReport{
		status: &pb.GetStatusResponse{
			Time: timestamppb.New(now), ServerName: "server-1", ServerVersion: "v1.2.3", Epoch: 0xabc, StartTime: ago(50 * time.Hour),
			Source: &pb.SourceStatus{Kind: "upstream", Synced: true, ResourceVersions: &pb.ResourceVersions{Services: 5, Slices: 6}},
			Size:   &pb.StateSize{Shards: 64, Services: 1000, Slices: 1050, Endpoints: 55000},
			Streams: []*pb.StreamCount{
				{Kind: pb.ClientKind_CLIENT_KIND_AGENT, Count: 2}, {Kind: pb.ClientKind_CLIENT_KIND_RELAY, Count: 1},
			},
			Nodes: 3000, Servers: []*pb.Server{{Address: "10.0.0.1:8472"}, {Address: "10.0.0.2:8472"}},
			Convergences: []*pb.Convergence{{
				Shard: 3, Sequence: 12, PublishTime: ago(1234 * time.Millisecond), Nodes: 3000, TimeToHalf: durationpb.New(8 * time.Millisecond),
				TimeToMost: durationpb.New(30 * time.Millisecond), TimeToAll: durationpb.New(45678 * time.Microsecond),
				Last: []*pb.NodeTime{{NodeName: "node-1", Time: durationpb.New(45678 * time.Microsecond)}},
			}},
			OpenConvergences: 1, OldestOpenConvergence: open,
			Warnings: []*pb.WarningCount{
				{Warning: pb.NodeWarning_NODE_WARNING_POD_RANGE_IPV4, Nodes: 2}, {Warning: pb.NodeWarning_NODE_WARNING_KUBE_PROXY, Nodes: 1},
			},
			Upstream: &pb.UpstreamStatus{Connected: true, Path: []uint64{1, 2}, Server: &pb.ServerConnection{
				Name: "server-0", Address: "10.1.0.1:8472", Version: "v1.2.2", Since: ago(time.Hour),
			}},
		},
		agents: []*pb.AgentStatus{
			{Kind: pb.ClientKind_CLIENT_KIND_RELAY, Nodes: 2998, Synced: true, Programmed: true, LagSequences: 1, Lag: durationpb.New(time.Minute),
				Since: ago(time.Hour), Address: "10.0.0.9:4242", ClientVersion: "v1.2.3", SentBytes: 12_345_678,
				Errors:    []*pb.AgentError{{}},
				Warnings:  []*pb.AgentWarning{{Warning: pb.NodeWarning_NODE_WARNING_POD_RANGE_IPV4, Reason: "outside", NodeName: "node-7", Time: ago(time.Second)}},
				LastError: &pb.AgentError{Object: "Service default/web", Reason: "no such table", NodeName: "node-7", Time: ago(time.Second)}},
			{NodeName: "node-1", Kind: pb.ClientKind_CLIENT_KIND_AGENT, Nodes: 1, Synced: true, Programmed: true, Since: ago(time.Second),
				Address: "10.0.0.3:4242", Programmer: "iptables", ClientVersion: "v1.2.3", SentBytes: 812,
				Warnings: []*pb.AgentWarning{{Warning: pb.NodeWarning_NODE_WARNING_KUBE_PROXY, Reason: "kube-proxy runs", Time: ago(time.Hour)}}},
			{Kind: pb.ClientKind_CLIENT_KIND_OBSERVER, Synced: true, Since: ago(0), Address: "@"},
			{NodeName: "node-2", Kind: pb.ClientKind_CLIENT_KIND_AGENT, Since: ago(time.Millisecond), Address: "10.0.0.4:4242"},
		},
	}
	require.Equal(t, strings.TrimPrefix(`
Server    server-1, version v1.2.3, up 2d2h0m0s, serving
Source    upstream, resource versions 5 (Services), 6 (EndpointSlices), from server-0 at 10.1.0.1:8472, version v1.2.2, in sync for 1h0m0s, 2 servers away from the root
State     1000 Services, 1050 slices, 55000 endpoints in 64 shards, epoch 0000000000000abc
Streams   2 agents, 1 relay; 3000 nodes served
Warnings  pod_range_ipv4 on 2 nodes, kube_proxy on 1 node
Servers   10.0.0.1:8472, 10.0.0.2:8472

Latest changes, and how long the nodes took to program them; not yet on all nodes: 1
AGE    SHARD  SEQUENCE  NODES  LACKING  50%   99%    100%    LAST
1.23s  3      12        3000   0        8ms   30ms   45.7ms  node-1 (45.7ms)
1m0s   7      99        3000   2        21ms  150ms  -       relay 10.0.0.9:4242 (lacks it), node-3 (150ms)

4 clients
NODE    KIND           STATE       LAG   BEHIND  SINCE   ADDRESS        PROGRAMMER  VERSION  SENT     ERRORS  LAST ERROR
-       relay of 2998  behind      1m0s  1       1h0m0s  10.0.0.9:4242  -           v1.2.3   12.3 MB  1       node-7, 1s ago, Service default/web: no such table
node-1  agent          programmed  -     -       1s      10.0.0.3:4242  iptables    v1.2.3   812 B    0       -
-       observer       synced      -     -       0s      @              -           -        0 B      0       -
node-2  agent          syncing     -     -       1ms     10.0.0.4:4242  -           -        0 B      0       -

Warnings
NODE    WARNING         SINCE   REASON
node-7  pod_range_ipv4  1s      outside
node-1  kube_proxy      1h0m0s  kube-proxy runs
`, "\n"), printed(t, r))

	r.service = &pb.GetServiceResponse{
		Shard: 3, Sequence: 12, ChangedSequence: 11,
		Service: &pb.Service{
			Namespace: "default", Name: "web", Version: []byte{0x1f, 14: 1}, Type: pb.ServiceType_SERVICE_TYPE_NODE_PORT,
			ClusterIps: []string{"10.96.0.1", "fd00::1"}, LoadBalancerIngress: []*pb.LoadBalancerIngress{{Ip: "192.0.2.1"}},
			Ports: []*pb.ServicePort{{Name: "http", Port: 80, NodePort: 30080, Protocol: pb.Protocol_PROTOCOL_TCP}, {Port: 53, Protocol: pb.Protocol_PROTOCOL_UDP}},
		},
		Slices: []*pb.Slice{
			{Namespace: "default", Name: "web-1", Version: []byte{0x2f, 14: 1}, AddressType: pb.AddressType_ADDRESS_TYPE_IPV4,
				Ports:                   []*pb.SlicePort{{Name: "http", Port: 8080, Protocol: pb.Protocol_PROTOCOL_TCP}},
				LastChangeTriggerTimeMs: now.Add(-90 * time.Second).UnixMilli(),
				Endpoints: []*pb.Endpoint{
					{Address: "10.0.0.1", Ready: true, Serving: true, NodeName: "node-1", Zone: "a", ZoneHints: []string{"a", "b"}},
					{Address: "10.0.0.2", Terminating: true},
				}},
			{Namespace: "default", Name: "web-2", AddressType: pb.AddressType_ADDRESS_TYPE_IPV6},
		},
	}
	_, service, _ := strings.Cut(printed(t, r), "(lacks it), node-3 (150ms)\n")
	require.Equal(t, `
Service    default/web, NODE_PORT, version 1f00000000000000
Addresses  10.96.0.1, fd00::1, 192.0.2.1
Ports      http 80/TCP (node port 30080), 53/UDP
Position   shard 3, last changed at sequence 11 of 12

EndpointSlice default/web-1, IPV4, ports http 8080/TCP, version 2f00000000000000, changed 1m30s ago
ADDRESS   READY  SERVING  TERMINATING  NODE    ZONE  HINTS
10.0.0.1  true   true     false        node-1  a     a,b
10.0.0.2  false  false    true         -       -     -

EndpointSlice default/web-2, IPV6, ports , version -
no endpoints
`, service)

	r.service.Service = nil
	r.service.Slices[0].Service = "web"
	r.status.Upstream.Server.StaleSince = ago(30 * time.Minute)
	require.Contains(t, printed(t, r), ", in sync for 1h0m0s, which may lack changes of the last 30m0s, 2 servers away")
	require.Contains(t, printed(t, r), "up 2d2h0m0s, stale\n")
	r.status.Upstream = &pb.UpstreamStatus{StaleSince: ago(time.Minute), LastError: "10.1.0.1:8472: connection refused"}
	r.status.Draining, r.status.Convergences = true, nil
	require.Contains(t, printed(t, r), "Service   default/web does not exist, but slices of it do\n")
	require.Contains(t, printed(t, r), ", not connected for 1m0s: 10.1.0.1:8472: connection refused\n")
	require.Contains(t, printed(t, r), ", draining\n")
}

func printed(t *testing.T, r show.Report) string {
	t.Helper()
	var out bytes.Buffer
	o := show.Options{Output: "table"}
	require.NoError(t, o.Run(t.Context(), &out, func(context.Context) (show.Report, error) { return r, nil }))
	return out.String()
}
