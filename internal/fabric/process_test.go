package fabric

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"strconv"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/tlsfiles"
	"github.com/slicecast/slicecast/server/app"
)

// serveVariable holds the directory of the certificates in the environment of a process that is a server. flipsVariable holds
// in how many slices the state that it serves differs from large.
const (
	serveVariable = "SLICECAST_FABRIC_SERVE"
	flipsVariable = "SLICECAST_FABRIC_FLIPS"
)

// serveProcess is the server's process: it writes its address, and then how many acknowledgements have come, again and again.
func serveProcess() error {
	dir := os.Getenv(serveVariable)
	flips, err := strconv.Atoi(os.Getenv(flipsVariable))
	if err != nil {
		return err
	}
	objects, err := large()
	if err != nil {
		return err
	}
	c := newCluster(objects...)
	c.flip(c.some(flips))
	registry := prometheus.NewRegistry()
	config := app.Config{
		Source: &watch{cluster: c}, SourceKind: "test", BindAddress: "127.0.0.1:0", GracePeriod: time.Second,
		TLS:    &tlsfiles.Files{CA: dir + "/ca.crt", Certificate: dir + "/server.crt", PrivateKey: dir + "/server.key"},
		Logger: slog.New(slog.DiscardHandler), Registry: registry,
	}
	quietServer(&config)
	s, err := app.New(config)
	if err != nil {
		return err
	}
	fmt.Println(s.Addresses().GRPC)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		defer cancel()
		for range time.Tick(10 * time.Millisecond) {
			acks, err := metric(registry, "slicecast_server_acks_total")
			if err != nil {
				return
			}
			if _, err := fmt.Println(acks); err != nil {
				return // the test has ended
			}
		}
	}()
	return s.Run(ctx)
}

// process is a server in a process of its own.
type process struct {
	address string
	acks    atomic.Int64
	kill    func()
}

func startProcess(t *testing.T, flips int) *process {
	t.Helper()
	command := exec.Command(os.Args[0])
	command.Env = append(os.Environ(), serveVariable+"="+identities.dir, fmt.Sprint(flipsVariable, "=", flips))
	command.Stderr = os.Stderr
	output, err := command.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, command.Start())
	p := &process{}
	lines := bufio.NewScanner(output)
	require.True(t, lines.Scan(), "the server's process says nothing")
	p.address = lines.Text()
	read := make(chan struct{})
	go func() {
		defer close(read)
		for lines.Scan() {
			if n, err := strconv.ParseFloat(lines.Text(), 64); err == nil {
				p.acks.Store(int64(n))
			}
		}
	}()
	killed := false
	p.kill = func() {
		if killed {
			return
		}
		killed = true
		require.NoError(t, command.Process.Signal(syscall.SIGKILL))
		<-read
		var exit *exec.ExitError
		require.True(t, errors.As(command.Wait(), &exit))
	}
	t.Cleanup(p.kill)
	return p
}

// The server is killed, and comes back with what the cluster has become.
func TestResumeOnARestartedServer(t *testing.T) {
	c := newLargeCluster(t)
	first := startProcess(t, 0)
	r := newResumer(t, c, first.address)
	first.kill()
	second := startProcess(t, 0)
	ready(t, c, second.address, second.acked)
	r.back("nothing has changed", second.address, second.acked, false)
	second.kill()
	c.flip(c.some(7))
	third := startProcess(t, 7)
	ready(t, c, third.address, third.acked)
	r.back("the cluster has changed", third.address, third.acked, true)
}

func (p *process) acked() int { return int(p.acks.Load()) }
