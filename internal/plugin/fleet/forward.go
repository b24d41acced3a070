package fleet

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	portforwardapi "k8s.io/apimachinery/pkg/util/portforward"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/transport/websocket"
	"k8s.io/klog/v2"
	"k8s.io/streaming/pkg/httpstream"
	"k8s.io/streaming/pkg/httpstream/spdy"
)

// pingPeriod is how often the connection to the API server is checked, as kubectl does it.
const pingPeriod = portforward.PingPeriod

// forward connects to a port of a Pod through the API server. Unlike client-go's PortForwarder it
// listens on no port of this machine, to which others could connect.
func forward(ctx context.Context, config *rest.Config, namespace, pod string, port int) (net.Conn, error) {
	base, _, err := rest.DefaultServerUrlFor(config)
	if err != nil {
		return nil, fmt.Errorf("the API server's address: %w", err)
	}
	target := base.JoinPath("api/v1/namespaces", namespace, "pods", pod, "portforward")
	streams, err := overWebSocket(ctx, config, target)
	if httpstream.IsUpgradeFailure(err) || httpstream.IsHTTPSProxyError(err) {
		// API servers before Kubernetes 1.30, and some proxies, have no WebSockets here.
		first := err
		if streams, err = overSPDY(ctx, config, target); err != nil {
			err = fmt.Errorf("%w; over SPDY: %w", first, err)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("port-forward: %w", err)
	}
	c, err := open(streams, port)
	if err != nil {
		_ = streams.Close() // the first error says more
		return nil, fmt.Errorf("port-forward: %w", err)
	}
	return c, nil
}

func overWebSocket(ctx context.Context, config *rest.Config, to *url.URL) (httpstream.Connection, error) {
	transport, holder, err := websocket.RoundTripperFor(config)
	if err != nil {
		return nil, err
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, to.String(), http.NoBody)
	if err != nil {
		return nil, err
	}
	conn, err := websocket.Negotiate(transport, holder, r, portforwardapi.WebsocketsSPDYTunnelingPortForwardV1)
	if err != nil {
		return nil, err
	}
	tunnel := portforward.NewTunnelingConnectionWithLogger(klog.FromContext(ctx), conn)
	return spdy.NewClientConnectionWithPings(tunnel, pingPeriod)
}

func overSPDY(ctx context.Context, config *rest.Config, to *url.URL) (httpstream.Connection, error) {
	tlsConfig, err := rest.TLSConfigFor(config)
	if err != nil {
		return nil, err
	}
	upgrader, err := spdy.NewRoundTripperWithConfig(spdy.RoundTripperConfig{
		TLS: tlsConfig, Proxier: config.Proxy, PingPeriod: pingPeriod,
	})
	if err != nil {
		return nil, err
	}
	transport, err := rest.HTTPWrappersForConfig(config, upgrader)
	if err != nil {
		return nil, err
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, to.String(), http.NoBody)
	if err != nil {
		return nil, err
	}
	r.Header.Set(httpstream.HeaderProtocolVersion, portforward.PortForwardProtocolV1Name)
	response, err := (&http.Client{Transport: transport}).Do(r)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	return upgrader.NewConnection(response)
}

// open opens a connection to a port. The kubelet reports on a stream of its own why it cannot
// connect.
func open(streams httpstream.Connection, port int) (net.Conn, error) {
	header := http.Header{}
	header.Set(corev1.PortHeader, strconv.Itoa(port))
	header.Set(corev1.PortForwardRequestIDHeader, "0")
	header.Set(corev1.StreamType, corev1.StreamTypeError)
	failure, err := streams.CreateStream(header)
	if err != nil {
		return nil, err
	}
	if err := failure.Close(); err != nil { // only the kubelet writes to it
		return nil, err
	}
	header.Set(corev1.StreamType, corev1.StreamTypeData)
	data, err := streams.CreateStream(header)
	if err != nil {
		return nil, err
	}
	c := &forwarded{streams: streams, data: data, failed: make(chan struct{})}
	go func() {
		defer close(c.failed)
		text, err := io.ReadAll(io.LimitReader(failure, maxFailure))
		if err == nil && len(text) > 0 {
			c.failure = errors.New(strings.TrimSpace(string(text)))
		}
	}()
	return c, nil
}

// maxFailure bounds what a kubelet says of why it cannot connect, in bytes.
const maxFailure = 4 << 10

// forwarded is a connection to a port of a Pod. It has no deadlines: its user closes it instead.
type forwarded struct {
	streams httpstream.Connection
	data    httpstream.Stream
	// failed is closed when failure is set, to nil if the connection ends without one.
	failed  chan struct{}
	failure error
}

// Read implements net.Conn. Its error says why the kubelet could not connect.
func (c *forwarded) Read(p []byte) (int, error) {
	n, err := c.data.Read(p)
	if err != nil {
		select {
		case <-c.failed:
			if c.failure != nil {
				err = c.failure
			}
		case <-c.streams.CloseChan():
		}
	}
	return n, err
}

// Write implements net.Conn.
func (c *forwarded) Write(p []byte) (int, error) { return c.data.Write(p) }

// Close implements net.Conn.
func (c *forwarded) Close() error {
	_ = c.data.Reset() // closing the connection does the same, in the end
	return c.streams.Close()
}

// LocalAddr implements net.Conn.
func (c *forwarded) LocalAddr() net.Addr { return address{} }

// RemoteAddr implements net.Conn.
func (c *forwarded) RemoteAddr() net.Addr { return address{} }

// SetDeadline implements net.Conn.
func (c *forwarded) SetDeadline(time.Time) error { return nil }

// SetReadDeadline implements net.Conn.
func (c *forwarded) SetReadDeadline(time.Time) error { return nil }

// SetWriteDeadline implements net.Conn.
func (c *forwarded) SetWriteDeadline(time.Time) error { return nil }

// address is the address of both ends of a forwarded connection.
type address struct{}

// Network implements net.Addr.
func (address) Network() string { return "port-forward" }

// String implements net.Addr.
func (address) String() string { return "port-forward" }
