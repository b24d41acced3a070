// This file runs real servers and relays in the test's process, and reads their metrics and logs.
package fabric

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"

	"github.com/slicecast/slicecast/agent/client"
	"github.com/slicecast/slicecast/internal/logtest"
	"github.com/slicecast/slicecast/internal/proxytest"
	"github.com/slicecast/slicecast/internal/source"
	"github.com/slicecast/slicecast/server/app"
)

const (
	// patience bounds waits for events that take milliseconds on an idle machine.
	patience = 60 * time.Second
	tick     = 2 * time.Millisecond
)

// server is a slicecast-server that runs in this process.
type server struct {
	*app.Server
	registry *prometheus.Registry
	logs     *logtest.Buffer
	stop     func()
}

// serve runs a server until the test ends or stop is called.
func serve(t proxytest.T, s source.Source, set ...func(*app.Config)) *server {
	t.Helper()
	r := &server{registry: prometheus.NewRegistry(), logs: &logtest.Buffer{}}
	c := app.Config{
		Source: s, SourceKind: "test", TLS: &identities.server, BindAddress: "127.0.0.1:0",
		HeartbeatInterval: time.Second, DrainWindow: 20 * time.Millisecond, GracePeriod: 200 * time.Millisecond,
		Logger: slog.New(slog.NewTextHandler(r.logs, nil)), Registry: r.registry,
	}
	for _, f := range set {
		f(&c)
	}
	var err error
	r.Server, err = app.New(c)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- r.Run(ctx) }()
	r.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("the server ended: %v", err)
		}
	})
	t.Cleanup(r.stop)
	return r
}

func (s *server) address() string { return s.Addresses().GRPC.String() }

// upstreamOf returns a setting that makes a server the relay of the server at an address.
func upstreamOf(address string) func(*app.Config) {
	return upstreamBy(address, (&traffic{}).dialOptions(relay)...)
}

func upstreamBy(address string, dial ...grpc.DialOption) func(*app.Config) {
	return func(c *app.Config) {
		c.Upstream = &client.Options{
			Servers: client.Static(address), DialOptions: dial, MaxBackoff: 20 * time.Millisecond,
			Logger: c.Logger, Registerer: c.Registry,
		}
	}
}

// metric returns the value of a counter or gauge. With labels, it is the value for these label
// values, and otherwise the sum of all.
func (s *server) metric(t require.TestingT, name string, labels ...string) float64 {
	value, err := metric(s.registry, name, labels...)
	require.NoError(t, err)
	return value
}

func metric(registry *prometheus.Registry, name string, labels ...string) (sum float64, err error) {
	families, err := registry.Gather()
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			var values []string
			for _, l := range m.GetLabel() {
				values = append(values, l.GetValue())
			}
			if len(labels) == 0 || slices.Equal(values, labels) {
				sum += m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return sum, err
}
