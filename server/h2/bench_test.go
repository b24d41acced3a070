// BenchmarkFanout measures the CPU time of a send to many TLS connections, beside a plain TLS write
// and grpc-go. TestMemoryOfIdleConnections proves a bound on the memory of an idle connection. The
// clients run in a process of their own.
package h2

import (
	"bufio"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc"

	"github.com/slicecast/slicecast/internal/testca"
	"github.com/slicecast/slicecast/internal/wire"
)

// clientsEnv makes the test's executable hold connections until its standard input ends. Its value
// is <address> <protocol> <number> <CA's certificate> <its key>. A separate process keeps the
// clients' CPU time and memory out of the server's.
const clientsEnv = "SLICECAST_H2_CLIENTS"

// holdClients is the main function of that process.
func holdClients(arguments string) error {
	var address, protocol, certFile, keyFile string
	var n int
	if _, err := fmt.Sscan(arguments, &address, &protocol, &n, &certFile, &keyFile); err != nil {
		return err
	}
	ca, err := testca.Load(certFile, keyFile)
	if err != nil {
		return err
	}
	for i := range n {
		node, err := ca.Node(fmt.Sprint("node-", i))
		if err != nil {
			return err
		}
		c, err := tls.Dial("tcp", address, &tls.Config{
			RootCAs: ca.Pool(), Certificates: []tls.Certificate{node}, NextProtos: []string{protocol}, ServerName: "127.0.0.1",
			MinVersion: tls.VersionTLS13,
		})
		if err != nil {
			return err
		}
		if err := greet(c); err != nil {
			return err
		}
		go io.Copy(io.Discard, c.NetConn()) //nolint:errcheck // it ends when the process does
	}
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// greet opens a stream with the largest possible windows.
func greet(c io.Writer) error {
	b := bufio.NewWriter(c)
	if _, err := b.WriteString(http2.ClientPreface); err != nil {
		return err
	}
	f := http2.NewFramer(b, nil)
	if err := f.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: maxWindow}); err != nil {
		return err
	}
	if err := f.WriteWindowUpdate(0, maxWindow-initialWindow); err != nil {
		return err
	}
	if err := f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, EndHeaders: true, BlockFragment: requestHeaders(testPath)}); err != nil {
		return err
	}
	return b.Flush()
}

func requestHeaders(path string, more ...hpack.HeaderField) []byte {
	return encodeHeaders(append([]hpack.HeaderField{
		{Name: ":method", Value: "POST"}, {Name: ":scheme", Value: "https"}, {Name: ":path", Value: path},
		{Name: ":authority", Value: "127.0.0.1"}, {Name: "content-type", Value: "application/grpc"}, {Name: "te", Value: "trailers"},
	}, more...))
}

// clients starts a process that holds n connections to the fixture.
func (f *fixture) clients(address, protocol string, n int) {
	f.t.Helper()
	dir := f.t.TempDir()
	certFile, err := f.ca.WriteCA(dir)
	require.NoError(f.t, err)
	keyFile := filepath.Join(dir, "ca.key")
	key, err := f.ca.KeyPEM()
	require.NoError(f.t, err)
	require.NoError(f.t, os.WriteFile(keyFile, key, 0o600))
	command := exec.Command(os.Args[0])
	command.Env = append(os.Environ(), fmt.Sprintf("%s=%s %s %d %s %s", clientsEnv, address, protocol, n, certFile, keyFile))
	command.Stderr = os.Stderr
	in, err := command.StdinPipe()
	require.NoError(f.t, err)
	require.NoError(f.t, command.Start())
	f.t.Cleanup(func() {
		require.NoError(f.t, in.Close())
		require.NoError(f.t, command.Wait())
	})
}

const (
	benchmarkConns = 500
	benchmarkSize  = 100
	// benchmarkRound is long enough for everything that a round causes.
	benchmarkRound = 50 * time.Millisecond
)

func cpuTime(b *testing.B) time.Duration {
	var u syscall.Rusage
	require.NoError(b, syscall.Getrusage(syscall.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkFanout sends a message of 100 bytes to 500 TLS connections twenty times a second. It
// reports the CPU time of the sending process per send (cpu-ns/send) for a plain TLS write, for
// TrySend and for grpc-go.
func BenchmarkFanout(b *testing.B) {
	frame := make(wire.Frame, benchmarkSize)
	run := func(b *testing.B, send func(i int)) {
		for i := range benchmarkConns { // what happens only once
			send(i)
		}
		runtime.GC()
		b.ReportAllocs()
		before := cpuTime(b)
		b.ResetTimer()
		rounds := time.NewTicker(benchmarkRound)
		defer rounds.Stop()
		for i := range b.N {
			if i%benchmarkConns == 0 {
				<-rounds.C
			}
			send(i % benchmarkConns)
		}
		b.StopTimer()
		b.ReportMetric(float64(cpuTime(b)-before)/float64(b.N), "cpu-ns/send")
	}
	b.Run("raw TLS", func(b *testing.B) {
		f := start(b, until)
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(b, err)
		defer l.Close()
		f.clients(l.Addr().String(), Protocol, benchmarkConns)
		var conns []*tls.Conn
		for range benchmarkConns {
			c, err := l.Accept()
			require.NoError(b, err)
			config := f.inner.Clone()
			config.NextProtos, config.DynamicRecordSizingDisabled = []string{Protocol}, true
			secure := tls.Server(c, config)
			require.NoError(b, secure.Handshake())
			conns = append(conns, secure)
		}
		message := make([]byte, 9+messagePrefix+benchmarkSize)
		run(b, func(i int) {
			_, err := conns[i].Write(message)
			require.NoError(b, err)
		})
		for _, c := range conns {
			require.NoError(b, c.Close())
		}
	})
	b.Run("TrySend", func(b *testing.B) {
		streams := make(chan *Stream, benchmarkConns)
		f := start(b, func(s *session) error { streams <- s.Stream; return until(s) })
		f.clients(f.address, Protocol, benchmarkConns)
		var all []*Stream
		for range benchmarkConns {
			all = append(all, <-streams)
		}
		refused := 0
		run(b, func(i int) {
			sent, err := all[i].TrySend(frame)
			if err == nil && !sent {
				refused++
				err = all[i].Send(frame)
			}
			require.NoError(b, err)
		})
		b.ReportMetric(float64(refused)/float64(b.N), "refused/send")
	})
	b.Run("grpc-go", func(b *testing.B) {
		streams := make(chan grpc.ServerStream, benchmarkConns)
		f := start(b, until)
		server := grpc.NewServer(grpc.Creds(Credentials()), grpc.ForceServerCodecV2(bytesCodec{}),
			grpc.StaticStreamWindowSize(128<<10), grpc.StaticConnWindowSize(128<<10), grpc.ReadBufferSize(4<<10),
			grpc.UnknownServiceHandler(func(_ any, s grpc.ServerStream) error {
				connection, ctx := ConnectionOf(s.Context())
				if err := connection.Enter(ctx, as(Caller{})); err != nil {
					return err
				}
				streams <- s
				<-ctx.Done()
				return nil
			}))
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(b, err)
		mux := NewMux(f.muxOptions(l, patience))
		defer func() { require.NoError(b, mux.Close()) }()
		go mux.Serve()              //nolint:errcheck // a benchmark
		go server.Serve(mux.GRPC()) //nolint:errcheck // a benchmark
		defer server.Stop()
		f.clients(l.Addr().String(), "h2", benchmarkConns)
		var all []grpc.ServerStream
		for range benchmarkConns {
			all = append(all, <-streams)
		}
		run(b, func(i int) { require.NoError(b, all[i].SendMsg([]byte(frame))) })
	})
}

// TestMemoryOfIdleConnections measures an idle connection after one sent message, including the
// memory of crypto/tls and of the runtime.
func TestMemoryOfIdleConnections(t *testing.T) {
	const n = 500
	streams := make(chan *Stream, n)
	f := start(t, func(s *session) error { streams <- s.Stream; return until(s) })
	before := memory()
	f.clients(f.address, Protocol, n)
	for range n {
		require.NoError(t, (<-streams).Send(make(wire.Frame, 100)))
	}
	each := (memory() - before) / n
	t.Logf("%d bytes for a connection", each)
	require.Less(t, each, int64(40<<10))
}

// memory returns the bytes of heap and stacks in use.
func memory() int64 {
	for range 4 { // stacks shrink by half each time, and pools empty in two steps
		runtime.GC()
	}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc + m.StackInuse)
}
