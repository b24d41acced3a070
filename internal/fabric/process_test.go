// These tests prove that clients resume on a server or relay that was killed and started again, and
// receive only what has changed. The servers run in processes of their own.
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
	"google.golang.org/grpc"

	"github.com/slicecast/slicecast/internal/tlsfiles"
	"github.com/slicecast/slicecast/internal/wire"
	"github.com/slicecast/slicecast/server/app"
)

// serveVariable is the environment variable that makes a process a server; its value is the
// directory of the certificates. upstreamVariable has the address of the server whose relay the
// process is. Without it, flipsVariable has the number of slices in which the served state differs
// from large.
const (
	serveVariable    = "SLICECAST_FABRIC_SERVE"
	upstreamVariable = "SLICECAST_FABRIC_UPSTREAM"
	flipsVariable    = "SLICECAST_FABRIC_FLIPS"
)

// serveProcess is the main function of a server's process. It writes the server's address, and then
// repeatedly the number of acknowledgements received.
func serveProcess() error {
	dir := os.Getenv(serveVariable)
	registry := prometheus.NewRegistry()
	config := app.Config{
		SourceKind: "test", BindAddress: "127.0.0.1:0", GracePeriod: time.Second,
		TLS:    &tlsfiles.Files{CA: dir + "/ca.crt", Certificate: dir + "/server.crt", PrivateKey: dir + "/server.key"},
		Logger: slog.New(slog.DiscardHandler), Registry: registry,
	}
	quietServer(&config)
	if err := feed(&config, dir); err != nil {
		return err
	}
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

// feed sets the source of the process's server.
func feed(config *app.Config, dir string) error {
	if address := os.Getenv(upstreamVariable); address != "" {
		files, err := tlsfiles.Follow(
			tlsfiles.Files{CA: dir + "/ca.crt", Certificate: dir + "/relay.crt", PrivateKey: dir + "/relay.key"}, config.Logger)
		if err != nil {
			return err
		}
		upstreamBy(address, grpc.WithTransportCredentials(files.ClientCredentials(wire.Protocol)))(config)
		return nil
	}
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
	config.Source = &watch{cluster: c}
	return nil
}

// process is a server in a process of its own.
type process struct {
	address string
	acks    atomic.Int64
	kill    func()
}

// startProcess starts a server in a process. variable and value select its source.
func startProcess(t *testing.T, variable string, value any) *process {
	t.Helper()
	command := exec.Command(os.Args[0])
	command.Env = append(os.Environ(), serveVariable+"="+identities.dir, fmt.Sprint(variable, "=", value))
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

// TestResumeOnARestartedServer kills the server, and restarts it after the cluster has changed.
func TestResumeOnARestartedServer(t *testing.T) {
	c := newLargeCluster(t)
	first := startProcess(t, flipsVariable, 0)
	r := newResumer(t, c, first.address)
	first.kill()
	second := startProcess(t, flipsVariable, 0)
	ready(t, c, second.address, second.acked)
	r.back("nothing has changed", second.address, second.acked, false)
	second.kill()
	c.flip(c.some(7))
	third := startProcess(t, flipsVariable, 7)
	ready(t, c, third.address, third.acked)
	r.back("the cluster has changed", third.address, third.acked, true)
}

// TestResumeOnARestartedRelay kills and restarts a relay. Its clients find the same digests there.
func TestResumeOnARestartedRelay(t *testing.T) {
	c := newLargeCluster(t)
	root := serve(t, &watch{cluster: c}, quietServer)
	relay := startProcess(t, upstreamVariable, root.address())
	r := newResumer(t, c, relay.address)
	for _, flips := range []int{0, 7} {
		relay.kill()
		c.flip(c.some(flips))
		relay = startProcess(t, upstreamVariable, root.address())
		ready(t, c, relay.address, relay.acked)
		r.back(fmt.Sprint(flips, " slices have changed"), relay.address, relay.acked, flips > 0)
	}
	require.Zero(t, root.metric(t, "slicecast_server_stream_starts_total", "resume"), "the relay held nothing, and agents did not come here")
}

func (p *process) acked() int { return int(p.acks.Load()) }
