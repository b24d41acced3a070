// This file holds the attacker's tools: connections of TCP, TLS and HTTP/2 whose every frame the
// attack chooses, and gRPC streams that can break any rule.
package hostile

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// attacker is one run of an attack.
type attacker struct {
	way
	ctx    context.Context
	server *server
	// node is the name of the node whose certificate the attacker has.
	node string
	// from is the source address of the attacker's connections.
	from net.IP
	// begun is called when the attacker has reached the attack's phase. If the server is to drain, it
	// returns once the server does.
	begun func()

	mu       sync.Mutex // guards cleanups
	cleanups []func()   // called in the end
}

// newAttacker returns an attacker with a node and an address that were not used before.
func newAttacker(ctx context.Context, s *server, w way) *attacker {
	n := names.Add(1)
	return &attacker{
		way: w, ctx: ctx, server: s, node: nodeName("hostile"), from: net.IPv4(127, 66, byte(n>>8), byte(n)), begun: func() {},
	}
}

// later registers a function that is called when the attack is over.
func (a *attacker) later(f func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.cleanups = append(a.cleanups, f)
}

// end releases what the attacker holds.
func (a *attacker) end() {
	a.mu.Lock()
	cleanups := a.cleanups
	a.cleanups = nil
	a.mu.Unlock()
	for _, f := range cleanups {
		f()
	}
}

// dial opens a TCP connection, which is closed when the attack is over.
func (a *attacker) dial() (net.Conn, error) { return a.dialFrom(a.from) }

func (a *attacker) dialFrom(from net.IP) (net.Conn, error) {
	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: from}}
	c, err := dialer.DialContext(a.ctx, "tcp", a.port.address(a.server).String())
	if err == nil {
		a.later(func() { _ = c.Close() }) // the server may have closed it
	}
	return c, err
}

// certificate returns the certificate of the attacker's node.
func (a *attacker) certificate() tls.Certificate { return identities.node(a.node) }

// secure opens a TLS connection.
func (a *attacker) secure(certificates ...tls.Certificate) (*tls.Conn, error) {
	raw, err := a.dial()
	if err != nil {
		return nil, err
	}
	c := tls.Client(raw, tlsConfig(a.protocol, certificates...))
	return c, c.HandshakeContext(a.ctx)
}

// http2Client is a client that sends and receives single frames of HTTP/2.
type http2Client struct {
	conn *tls.Conn

	mu     sync.Mutex // guards the fields below and writes
	framer *http2.Framer
	block  bytes.Buffer
	hpack  *hpack.Encoder

	// ended is closed at the end of the connection, if attend was called. goAway is then the reason
	// that the server sent, if any.
	ended  chan struct{}
	goAway http2.ErrCode
	// statuses receives the status of each stream that ends, or the code of its reset.
	statuses chan error
	// data is closed when the first message of a stream arrives.
	data chan struct{}
}

// http2 opens a connection and sends what every client sends first.
func (a *attacker) http2(certificates ...tls.Certificate) (*http2Client, error) {
	conn, err := a.secure(certificates...)
	if err != nil {
		return nil, err
	}
	c := &http2Client{
		conn: conn, framer: http2.NewFramer(conn, conn), ended: make(chan struct{}), statuses: make(chan error, 10_000), data: make(chan struct{}),
	}
	c.framer.AllowIllegalWrites = true
	c.framer.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	c.hpack = hpack.NewEncoder(&c.block)
	if _, err := io.WriteString(conn, http2.ClientPreface); err != nil {
		return nil, err
	}
	return c, c.framer.WriteSettings()
}

// attend starts to read what the server sends, and to answer as HTTP/2 requires.
func (c *http2Client) attend() *http2Client {
	go func() {
		defer close(c.ended)
		data := sync.OnceFunc(func() { close(c.data) })
		for {
			f, err := c.framer.ReadFrame()
			if err != nil {
				return
			}
			switch f := f.(type) {
			case *http2.SettingsFrame:
				if !f.IsAck() {
					// An error also ends the read.
					_ = c.write(func() error { return c.framer.WriteSettingsAck() })
				}
			case *http2.PingFrame:
				if !f.IsAck() {
					_ = c.write(func() error { return c.framer.WritePing(true, f.Data) })
				}
			case *http2.DataFrame:
				data()
			case *http2.GoAwayFrame:
				c.goAway = f.ErrCode
			case *http2.RSTStreamFrame:
				if f.ErrCode == http2.ErrCodeNo { // it follows a status
					continue
				}
				c.statuses <- http2.StreamError{StreamID: f.StreamID, Code: f.ErrCode}
			case *http2.MetaHeadersFrame:
				for _, field := range f.Fields {
					if field.Name == "grpc-status" {
						code, _ := strconv.Atoi(field.Value)
						c.statuses <- status.Error(codes.Code(code), "")
					}
				}
			}
		}
	}()
	return c
}

func (c *http2Client) write(f func() error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return f()
}

// headers returns the header block of a call, with a token unless it is empty.
func (c *http2Client) headers(token string) []byte {
	c.block.Reset()
	fields := [][2]string{
		{":method", "POST"}, {":scheme", "https"}, {":path", pb.DistributionService_Stream_FullMethodName}, {":authority", "127.0.0.1"},
		{"content-type", "application/grpc"}, {"te", "trailers"},
	}
	if token != "" {
		fields = append(fields, [2]string{"authorization", "Bearer " + token})
	}
	for _, f := range fields {
		// A write to memory cannot fail.
		_ = c.hpack.WriteField(hpack.HeaderField{Name: f[0], Value: f[1]})
	}
	return bytes.Clone(c.block.Bytes())
}

// open opens a stream.
func (c *http2Client) open(id uint32) error {
	return c.write(func() error {
		return c.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: c.headers(""), EndHeaders: true})
	})
}

// call opens a stream with a token, and sends nothing on it.
func (c *http2Client) call(id uint32, token string) error {
	return c.write(func() error {
		return c.framer.WriteHeaders(http2.HeadersFrameParam{
			StreamID: id, BlockFragment: c.headers(token), EndStream: true, EndHeaders: true,
		})
	})
}

// say sends a message on a stream.
func (c *http2Client) say(id uint32, m proto.Message) error {
	return c.sayBytes(id, must(proto.Marshal(m)))
}

func (c *http2Client) sayBytes(id uint32, message []byte) error {
	b := append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(message))), message...)
	return c.write(func() error { return c.framer.WriteData(id, false, b) })
}

// closes waits until the server has closed the connection.
func (a *attacker) closes(c net.Conn) error {
	// It fails on a closed connection, which is the required result.
	_ = c.SetReadDeadline(time.Now().Add(patience))
	_, err := io.Copy(io.Discard, c)
	var timeout net.Error
	if errors.As(err, &timeout) && timeout.Timeout() {
		return fmt.Errorf("the server does not end the connection within %v", patience)
	}
	return nil
}

// closedUnread waits until the server has closed a connection from which nothing is read. It asks
// the kernel.
func closedUnread(c *tls.Conn) error {
	raw, err := c.NetConn().(*net.TCPConn).SyscallConn()
	if err != nil {
		return err
	}
	const established = 1 // TCP_ESTABLISHED
	var info *unix.TCPInfo
	if !eventually(func() bool {
		control := raw.Control(func(fd uintptr) { info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO) })
		return control != nil || err != nil || info.State != established
	}) {
		return fmt.Errorf("the server does not end the connection within %v", patience)
	}
	return err
}

// closes waits until the server has closed a connection on which attend was called.
func (c *http2Client) closes() error {
	select {
	case <-c.ended:
		return nil
	case <-time.After(patience):
		return fmt.Errorf("the server does not end the connection within %v", patience)
	}
}

// flood writes until the server ends the connection. It fails if the server has not done so after
// most writes.
func (c *http2Client) flood(most int, send func(i int) error) error {
	for i := range most {
		select {
		case <-c.ended:
			return nil
		default:
		}
		if err := c.write(func() error { return send(i) }); err != nil {
			return c.closes()
		}
	}
	return c.closes()
}

// greeted calls attend, and waits for the first message.
func (c *http2Client) greeted() error {
	c.attend()
	select {
	case <-c.data:
		return nil
	case <-c.ended:
		return errors.New("the connection has ended")
	case <-time.After(patience):
		return fmt.Errorf("no message within %v", patience)
	}
}

// ends waits until a stream ends with one of the codes.
func (c *http2Client) ends(want ...codes.Code) error {
	select {
	case err := <-c.statuses:
		return requireCode(err, want...)
	case <-c.ended:
		return errors.New("the connection has ended, and not just the stream")
	case <-time.After(patience):
		return fmt.Errorf("the stream does not end within %v", patience)
	}
}

func requireCode(err error, want ...codes.Code) error {
	for _, code := range want {
		if err != nil && status.Code(err) == code {
			return nil
		}
	}
	return fmt.Errorf("ended with %w, not with %v", err, want)
}

// client returns a gRPC client. It never reads more of a stream than was asked for, except for a
// window of 64 KiB.
func (a *attacker) client(certificates ...tls.Certificate) (*grpc.ClientConn, error) {
	conn, err := grpc.NewClient(a.server.address(),
		grpc.WithTransportCredentials(credentials.NewTLS(tlsConfig(a.protocol, certificates...))),
		grpc.WithStaticStreamWindowSize(64<<10), grpc.WithStaticConnWindowSize(64<<10), grpc.WithDisableRetry(),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(1<<30)),
		grpc.WithContextDialer(func(ctx context.Context, to string) (net.Conn, error) {
			return (&net.Dialer{LocalAddr: &net.TCPAddr{IP: a.from}}).DialContext(ctx, "tcp", to)
		}))
	if err == nil {
		a.later(func() { _ = conn.Close() }) // only a second Close can fail
	}
	return conn, err
}

// stream opens a stream and sends hello, unless it is nil.
func (a *attacker) stream(hello *pb.Hello) (pb.DistributionService_StreamClient, error) {
	return a.streamAs(hello, a.certificate())
}

func (a *attacker) streamAs(hello *pb.Hello, certificates ...tls.Certificate) (pb.DistributionService_StreamClient, error) {
	conn, err := a.client(certificates...)
	if err != nil {
		return nil, err
	}
	stream, err := pb.NewDistributionServiceClient(conn).Stream(a.ctx)
	if err != nil || hello == nil {
		return stream, err
	}
	return stream, stream.Send(helloRequest(hello))
}

// agent returns the Hello of the attacker's node.
func (a *attacker) agent() *pb.Hello {
	return &pb.Hello{NodeName: a.node, Kind: pb.ClientKind_CLIENT_KIND_AGENT}
}

func helloRequest(h *pb.Hello) *pb.StreamRequest {
	return &pb.StreamRequest{Message: &pb.StreamRequest_Hello{Hello: h}}
}

// opened opens a stream, and reads it up to Welcome before InSync, and else up to InSync.
func (a *attacker) opened() (pb.DistributionService_StreamClient, error) {
	return a.openedAs(a.agent(), a.certificate())
}

func (a *attacker) openedAs(hello *pb.Hello, certificate tls.Certificate) (pb.DistributionService_StreamClient, error) {
	stream, err := a.streamAs(hello, certificate)
	if err != nil {
		return nil, err
	}
	err = until(stream, func(r *pb.StreamResponse) bool {
		return r.GetInSync() != nil || a.phase == beforeInSync && r.GetWelcome() != nil
	})
	a.begun()
	return stream, err
}

// until reads a stream up to a message.
func until(stream pb.DistributionService_StreamClient, found func(*pb.StreamResponse) bool) error {
	for {
		r, err := stream.Recv()
		if err != nil {
			return err
		}
		if found(r) {
			return nil
		}
	}
}

// ends reads a stream to its end, which must have one of the codes, or that of a server that drains
// if this one does.
func (a *attacker) ends(stream pb.DistributionService_StreamClient, want ...codes.Code) error {
	if a.phase == draining {
		want = append(want, codes.Unavailable)
	}
	return over(stream, want...)
}

// over reads a stream to its end, which must have one of the codes. In the middle of a message,
// server/h2 cannot send a status, so it resets the stream.
func over(stream pb.DistributionService_StreamClient, want ...codes.Code) error {
	err := until(stream, func(*pb.StreamResponse) bool { return false })
	if strings.Contains(err.Error(), "RST_STREAM with error code: INTERNAL_ERROR") {
		return nil
	}
	return requireCode(err, want...)
}

// floods sends a message most times, unless the stream ends before, which must have one of the
// codes.
func (a *attacker) floods(
	stream pb.DistributionService_StreamClient, most int, message func(i int) *pb.StreamRequest, want ...codes.Code,
) error {
	ended := make(chan error, 1)
	go func() { ended <- a.ends(stream, want...) }()
	for i := range most {
		if stream.Send(message(i)) != nil {
			break // the stream's end says why
		}
	}
	return <-ended
}
