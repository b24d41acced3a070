// This test proves that the example program, as it is built, follows one Service of a real hub and
// no others.
package main

import (
	"bufio"
	"context"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/source"
	serverapp "github.com/slicecast/slicecast/server/app"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// cluster is a source for which the test writes objects. It passes its sink to the test.
type cluster chan source.Sink

func (c cluster) Run(ctx context.Context, sink source.Sink) error {
	sink.Synced()
	c <- sink
	<-ctx.Done()
	return nil
}

// TestGateway builds the program and requires that it follows one Service and no others.
func TestGateway(t *testing.T) {
	directory := t.TempDir()
	gateway := filepath.Join(directory, "gateway")
	out, err := exec.CommandContext(t.Context(), "go", "build", "-o", gateway, ".").CombinedOutput()
	require.NoError(t, err, "%s", out)

	socket, from := filepath.Join(directory, "socket"), make(cluster, 1)
	server, err := serverapp.New(serverapp.Config{
		Source: from, BindAddress: "127.0.0.1:0", DebugSocket: socket, HeartbeatInterval: time.Second, DrainWindow: time.Millisecond,
		GracePeriod: time.Minute, Logger: slog.New(slog.DiscardHandler), Registry: daemon.NewRegistry(),
	})
	require.NoError(t, err)
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- server.Run(ctx) }()
	defer func() {
		stop()
		require.NoError(t, <-ended)
	}()
	sink := <-from

	command := exec.CommandContext(t.Context(), gateway, "-server=unix://"+socket, "-service=default/web")
	command.Stderr = os.Stderr
	stdout, err := command.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, command.Start())
	lines := bufio.NewReader(stdout)
	leadsTo := func(want string, addresses ...string) {
		t.Helper()
		for _, service := range []string{"other", "web"} {
			s := model.Slice{
				Namespace: "default", Name: service, Service: service, Family: model.IPv4,
				Ports: []model.SlicePort{{Port: 8080, Protocol: model.TCP}},
			}
			for _, address := range addresses {
				s.Endpoints = append(s.Endpoints, model.Endpoint{Address: netip.MustParseAddr(address), Conditions: model.Conditions{Ready: true}})
			}
			sink.Upsert(model.NewSlice(s), 0)
		}
		line, err := lines.ReadString('\n')
		require.NoError(t, err)
		require.Equal(t, "default/web leads to "+want+"\n", line)
	}
	leadsTo("[10.0.0.1:8080]", "10.0.0.1")
	leadsTo("[10.0.0.1:8080 10.0.0.2:8080]", "10.0.0.1", "10.0.0.2")
	leadsTo("[]")

	require.NoError(t, command.Process.Signal(os.Interrupt))
	rest, err := io.ReadAll(lines)
	require.NoError(t, err)
	require.Empty(t, rest)
	require.NoError(t, command.Wait())
}
