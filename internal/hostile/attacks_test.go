// This file holds the table of attacks and what each of them does: in the handshake, in HTTP/2, on
// streams, with tokens, and on the ports for health checks and metrics.
package hostile

import (
	"bytes"
	"crypto/elliptic"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
	"github.com/slicecast/slicecast/internal/testca"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// These are metrics of the server.
var (
	handshakeErrors = counter{"slicecast_server_handshake_errors_total", ""}
	ofRequests      = func(reason string) counter { return counter{"slicecast_server_refused_requests_total", reason} }
	ofConnections   = func(reason string) counter { return counter{"slicecast_server_refused_connections_total", reason} }
	ofCalls         = func(reason string) counter { return counter{"slicecast_server_refused_calls_total", reason} }
	ofPorts         = func(port string) counter { return counter{"slicecast_server_displaced_connections_total", port} }
	ofStreams       = func(name string) counter { return counter{"slicecast_server_" + name, ""} }
)

var (
	onGRPC, onEither = []string{grpcGo}, []string{neither}

	// These are the phases from one on.
	fromHello = []phase{beforeHello, beforeInSync, inSync, draining}
	fromOpen  = []phase{beforeInSync, inSync, draining}
	// A single message ends its stream while the server drains as it does otherwise.
	whileOpen = []phase{beforeInSync, inSync}

	tlsPorts, httpPorts = []port{metrics}, []port{metrics, healthChecks}
)

// attacks is the table of attacks, in the order of the first phase in which they are made. Those of
// a phase are in the order in which the server checks them.
var attacks = []attack{
	{name: "silent connections of one address", in: []phase{beforeTLS, draining}, on: onEither, also: httpPorts,
		bounds: "maxStrangersPerAddress bounded.Health bounded.Metrics", does: crowdOfOne, counted: ofConnections("address")},
	{name: "silent connections of many addresses", in: []phase{beforeTLS}, on: onEither, also: httpPorts,
		bounds: "maxStrangers bounded.Health bounded.Metrics", does: crowdOfMany, counted: ofConnections("strangers")},
	{name: "silence", in: []phase{beforeTLS}, on: onEither, also: httpPorts,
		bounds: "strangerTimeout bounded.Health bounded.Metrics", slow: true, does: silent, counted: ofConnections("timeout")},

	{name: "a ClientHello byte by byte", in: []phase{handshake, draining}, on: onEither, also: tlsPorts,
		bounds: "strangerTimeout bounded.Metrics", slow: true, does: slowHello, counted: ofConnections("timeout")},
	{name: "no TLS", in: []phase{handshake}, on: onEither, also: tlsPorts, does: notTLS, counted: handshakeErrors},
	{name: "a ClientHello without end", in: []phase{handshake}, on: onEither, also: tlsPorts,
		bounds: "maxUndelivered MaxHandshake", does: endlessHello, counted: handshakeErrors},
	{name: "handshakes that are given up", in: []phase{handshake}, on: onEither, also: tlsPorts,
		does: halfHandshakes, counted: handshakeErrors},
	{name: "a certificate of another CA", in: []phase{handshake}, on: both, also: tlsPorts,
		does: foreignCertificate, counted: ofConnections("certificate")},
	{name: "certificates that are expensive to verify", in: []phase{handshake}, on: both, also: tlsPorts, bounds: "maxChain",
		does: expensiveChains(50, false), counted: ofConnections("certificate")},
	{name: "as many certificates as are admitted", in: []phase{handshake}, on: both, also: tlsPorts, bounds: "maxChain",
		does: expensiveChains(5, false), counted: ofConnections("certificate")},
	{name: "expensive certificates after a node's", in: []phase{handshake}, on: both, also: tlsPorts, bounds: "maxChain",
		does: expensiveChains(50, true), counted: ofConnections("certificate")},
	{name: "an expensive agreement on a key", in: []phase{handshake}, on: both, also: tlsPorts, bounds: "curves",
		does: expensiveKeys, counted: handshakeErrors},
	{name: "long certificates that are held back", in: []phase{handshake}, on: both, also: tlsPorts,
		bounds: "maxUndelivered MaxHandshake", does: heldCertificates, counted: handshakeErrors},

	{name: "silence after TLS", in: []phase{beforeHello, draining}, on: both, bounds: "strangerTimeout", slow: true,
		does: silentAfterTLS, counted: ofConnections("timeout")},
	{name: "silence after SETTINGS", in: []phase{beforeHello, draining}, on: both, bounds: "strangerTimeout", slow: true,
		does: silentAfterSettings, counted: ofConnections("timeout")},
	{name: "calls without credentials", in: []phase{beforeHello}, on: both, also: tlsPorts, bounds: "maxRefusedCalls",
		does: refusedCalls(""), counted: ofRequests("no_credentials")},
	{name: "invented tokens", in: []phase{beforeHello}, on: both, also: tlsPorts, bounds: "maxRefusedCalls",
		does: refusedCalls(inventedToken()), counted: ofRequests("token")},
	{name: "long tokens", in: []phase{beforeHello}, on: both, also: tlsPorts, bounds: "maxHeaderBytes",
		does: longTokens(strings.Repeat("x", 40<<10))},
	{name: "a header block of empty frames", in: fromHello, on: both, bounds: "maxBlockFrames", does: framed(emptyContinuations)},
	{name: "a large header block", in: fromHello, on: both, bounds: "maxHeaderBytes", does: framed(largeBlock)},
	{name: "a slow header block", in: fromHello, on: both, bounds: "maxBlockTime", slow: true, does: framed(slowBlock)},
	{name: "many settings", in: fromHello, on: both, bounds: "maxSettings", does: framed(manySettings)},
	{name: "frames without messages", in: fromHello, on: both, bounds: "maxStrangerFrames maxFrames", does: framed(frames)},
	{name: "streams that are reset", in: fromHello, on: both, bounds: "maxStrangerFrames maxFrames", does: framed(rapidReset)},
	{name: "pings", in: fromHello, on: both, bounds: "minClientPing", does: framed(pings)},
	{name: "many streams", in: []phase{beforeHello}, on: both, bounds: "maxConcurrentStreams", does: manyStreams},
	{name: "no hello", in: []phase{beforeHello, draining}, on: both, bounds: "helloTimeout", slow: true, does: noHello},
	{name: "another message first", in: []phase{beforeHello}, on: both,
		does: says(codes.InvalidArgument, func(*attacker) *pb.StreamRequest { return ack(1) })},
	{name: "another node's name", in: []phase{beforeHello}, on: both, counted: ofRequests("other_node"),
		does: says(codes.PermissionDenied, func(*attacker) *pb.StreamRequest {
			return helloRequest(&pb.Hello{NodeName: "honest-1", Kind: pb.ClientKind_CLIENT_KIND_AGENT})
		})},
	{name: "another node's name, again and again", in: []phase{beforeHello}, on: both, bounds: "maxRefusedCalls",
		does: refusedHellos, counted: ofConnections("refused")},
	{name: "to be a relay", in: []phase{beforeHello}, on: both, counted: ofRequests("relay"),
		does: says(codes.PermissionDenied, func(*attacker) *pb.StreamRequest {
			return helloRequest(&pb.Hello{Kind: pb.ClientKind_CLIENT_KIND_RELAY})
		})},
	{name: "to observe", in: []phase{beforeHello}, on: both, counted: ofRequests("observer"),
		does: says(codes.PermissionDenied, func(*attacker) *pb.StreamRequest { return helloRequest(&pb.Hello{}) })},
	{name: "a long name", in: []phase{beforeHello}, on: both, bounds: "maxNodeName",
		does: says(codes.InvalidArgument, func(*attacker) *pb.StreamRequest {
			return helloRequest(&pb.Hello{NodeName: strings.Repeat("n", 254), Kind: pb.ClientKind_CLIENT_KIND_AGENT})
		})},
	{name: "positions in too many shards", in: []phase{beforeHello}, on: both,
		does: says(codes.InvalidArgument, func(a *attacker) *pb.StreamRequest {
			h := a.agent()
			h.Epoch, h.Sequences = 1, make([]uint64, 4097)
			return helloRequest(h)
		})},
	{name: "a large message", in: []phase{beforeHello}, on: both, bounds: "maxReceived",
		does: says(codes.ResourceExhausted, func(a *attacker) *pb.StreamRequest {
			h := a.agent()
			h.ClientVersion = strings.Repeat("v", 128<<10)
			return helloRequest(h)
		})},
	{name: "no protobuf", in: []phase{beforeHello}, on: both, does: notProtobuf},

	{name: "versions of the future", in: []phase{beforeInSync}, on: both, bounds: "MaxBehindWait",
		does: fromTheFuture, counted: counter{"slicecast_server_behind_waits_total", "gave_up"}},
	{name: "whole shards that are not taken", in: []phase{beforeInSync}, on: both, bounds: "coldShares turnCheck",
		longer: 2 * turnCheck, does: takesNothing, counted: ofStreams("admission_stalled_turns_total")},
	{name: "windows of one byte", in: []phase{beforeInSync, draining}, on: both, bounds: "maxFrames", does: smallWindows},
	{name: "two answers to a DigestQuery", in: []phase{beforeInSync}, on: both, does: asked(answersTwice)},
	{name: "two answers to a BucketQuery", in: []phase{beforeInSync}, on: both, does: asked(answersBucketsTwice)},
	{name: "wrong digests on stream after stream", in: []phase{beforeInSync}, on: both, bounds: "startsBurst coldShares",
		does: wrongOnNewStreams, counted: counter{"slicecast_server_stream_starts_total", "too_often"}},
	{name: "no answer", in: []phase{beforeInSync}, on: both, bounds: "bucketTimeout", slow: true, does: asked(answersNothing)},
	{name: "nothing is read", in: []phase{beforeInSync, draining}, on: both, bounds: "pingTimeout GracePeriod", slow: true,
		does: readsNothing},
	{name: "empty DATA", in: fromOpen, on: both, bounds: "maxFrames", does: framed(emptyData)},
	{name: "a second hello", in: whileOpen, on: both,
		does: sends(1, codes.InvalidArgument, func(int) *pb.StreamRequest { return helloRequest(&pb.Hello{}) })},
	{name: "messages", in: fromOpen, on: both, bounds: "messagesPerSecond",
		// On grpc-go, the frames of so many small messages may end the connection first.
		does: sends(8192+1000, codes.ResourceExhausted, func(int) *pb.StreamRequest { return ack(0) }, codes.Unavailable)},
	{name: "resyncs", in: fromOpen, on: both, bounds: "resyncsPerSecond", counted: ofStreams("resyncs_total"),
		does: sends(256+100, codes.ResourceExhausted, func(i int) *pb.StreamRequest {
			return resync(&pb.Resync{Shard: uint32(i % shards), Keys: []*pb.ObjectKey{{Kind: pb.ObjectKind_OBJECT_KIND_SLICE, Name: "x"}}})
		})},
	{name: "whole shards again and again", in: []phase{inSync, draining}, on: both, bounds: "resyncsPerSecond",
		counted: ofStreams("resyncs_total"), does: sends(256+100, codes.ResourceExhausted, func(i int) *pb.StreamRequest {
			return resync(&pb.Resync{Shard: uint32(i % shards)})
		})},
	{name: "buckets again and again", in: []phase{inSync, draining}, on: both, bounds: "resyncsPerSecond coldShares",
		counted: ofStreams("resyncs_total"),
		does:    sends(256+100, codes.ResourceExhausted, func(i int) *pb.StreamRequest { return wrongBuckets(uint32(i % shards)) })},
	{name: "resyncs on new streams", in: []phase{inSync}, on: both, bounds: "resyncsBurst", does: resyncsOnNewStreams},
	{name: "an answer to no question", in: whileOpen, on: both,
		does: sends(1, codes.InvalidArgument, func(int) *pb.StreamRequest { return digests() })},
	{name: "an Ack of many positions", in: whileOpen, on: both, bounds: "maxPositions",
		does: sends(1, codes.InvalidArgument, func(int) *pb.StreamRequest {
			positions := make([]*pb.ShardPosition, 4097)
			for i := range positions {
				positions[i] = &pb.ShardPosition{}
			}
			return &pb.StreamRequest{Message: &pb.StreamRequest_Ack{Ack: &pb.Ack{Positions: positions}}}
		})},
	{name: "a resync of many objects", in: whileOpen, on: both, bounds: "maxKeys",
		does: sends(1, codes.InvalidArgument, func(int) *pb.StreamRequest {
			r := &pb.Resync{}
			for range 1025 {
				r.Keys = append(r.Keys, &pb.ObjectKey{Kind: pb.ObjectKind_OBJECT_KIND_SLICE, Name: "x"})
			}
			return resync(r)
		})},
	{name: "a resync of no shard", in: whileOpen, on: both,
		does: sends(1, codes.InvalidArgument, func(int) *pb.StreamRequest { return resync(&pb.Resync{Shard: shards}) })},
	{name: "resyncs whose answers are not read", in: []phase{inSync, draining}, on: both, bounds: "maxWaiting", does: unreadResyncs},
	{name: "a relay's Ack of many nodes", in: whileOpen, on: both, bounds: "maxRelayNodes",
		does: asRelay(func(a *attacker, stream pb.DistributionService_StreamClient) error {
			return a.floods(stream, 1, func(int) *pb.StreamRequest {
				return &pb.StreamRequest{Message: &pb.StreamRequest_Ack{Ack: &pb.Ack{Nodes: 1<<20 + 1}}}
			}, codes.InvalidArgument)
		})},

	{name: "nacks", in: []phase{inSync}, on: both, bounds: "maxNacks", counted: ofStreams("dropped_nacks_total"),
		does: func(a *attacker) error {
			stream, err := a.opened()
			if err != nil {
				return err
			}
			return nacks(stream, 256+100, "")
		}},
	{name: "nacks of a relay's nodes", in: []phase{inSync}, on: both, bounds: "MaxRelayedNacks", counted: ofStreams("dropped_nacks_total"),
		does: asRelay(func(_ *attacker, stream pb.DistributionService_StreamClient) error {
			return nacks(stream, 1024+100, "node")
		})},
	{name: "streams of one node", in: []phase{inSync}, on: both, does: streamsOfOneNode, counted: ofStreams("replaced_streams_total")},
	{name: "connections of one node", in: []phase{inSync}, on: both, bounds: "maxNodeConnections",
		does: connectionsOfOneNode, counted: ofConnections("caller")},
	{name: "calls of one node", in: []phase{inSync}, on: onGRPC, bounds: "maxNodeCalls", does: callsOfOneNode, counted: ofCalls("calls")},
	{name: "connections of one user", in: []phase{inSync}, on: both, bounds: "maxUserConnections",
		does: connectionsOfOneUser, counted: ofCalls("connections")},
	{name: "an operator's questions", in: []phase{inSync}, on: onGRPC, does: questions, counted: ofRequests("observer")},

	{name: "it stays", in: []phase{draining}, on: both, bounds: "DrainWindow", does: stays},
}

const (
	// coldBytes bounds the bytes of whole shards in flight. Eight clients that accept no compressed
	// frames use all of it.
	coldBytes = 4 << 20
	// turnCheck is how long a client that accepts nothing keeps its part of coldBytes.
	turnCheck = 2 * time.Second
)

// crowdOfOne opens more connections that send nothing than one address may have, and crowdOfMany
// more than all may have. silent opens one.
func crowdOfOne(a *attacker) error {
	return a.crowd(a.port.perAddress+32, func(int) net.IP { return a.from })
}
func crowdOfMany(a *attacker) error {
	return a.crowd(a.port.total+64, func(i int) net.IP { return net.IPv4(127, 77, byte(i>>8), byte(i)) })
}

func silent(a *attacker) error {
	c, err := a.dial()
	if err != nil {
		return err
	}
	return a.closes(c)
}

// crowd opens connections that send nothing. The first one must end, for a newer one unless the
// server drains, and the others stay open. Probes are answered meanwhile.
func (a *attacker) crowd(n int, from func(int) net.IP) error {
	before := a.server.value(a.port.displaced)
	var first net.Conn
	for i := range n {
		c, err := a.dialFrom(from(i))
		if err != nil {
			return err
		}
		if first == nil {
			first = c
		}
	}
	a.begun()
	if err := a.closes(first); err != nil || a.phase == draining {
		return err
	}
	if a.port.displaced.name != "" && a.server.value(a.port.displaced) == before {
		return errors.New("no connection was displaced")
	}
	probe := http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: patience}
	r, err := probe.Get("http://" + a.server.Addresses().Healthz.String() + "/readyz")
	if err != nil {
		return err
	}
	defer r.Body.Close()
	if r.StatusCode != http.StatusOK {
		return fmt.Errorf("the probe of an honest client: %s", r.Status)
	}
	return nil
}

// clientHello is the beginning of a ClientHello: a record with a handshake message of 512 bytes.
var clientHello = []byte{22, 3, 1, 2, 4, 1, 0, 2, 0, 3, 3}

func slowHello(a *attacker) error {
	c, err := a.dial()
	if err != nil {
		return err
	}
	go func() {
		for i := 0; ; i++ {
			b := byte(0)
			if i < len(clientHello) {
				b = clientHello[i]
			}
			if _, err := c.Write([]byte{b}); err != nil {
				return
			}
			if i == 0 {
				a.begun()
			}
			select {
			case <-time.After(100 * time.Millisecond):
			case <-a.ctx.Done():
				return
			}
		}
	}()
	return a.closes(c)
}

func notTLS(a *attacker) error {
	c, err := a.dial()
	if err != nil {
		return err
	}
	_, _ = io.WriteString(c, "GET / HTTP/1.1\r\n\r\n") // the connection may have ended
	return a.closes(c)
}

func endlessHello(a *attacker) error {
	c, err := a.dial()
	if err != nil {
		return err
	}
	go func() {
		record := make([]byte, 5+16<<10)
		copy(record, []byte{22, 3, 1, 0x40, 0, 1, 0xff, 0xff, 0xff})
		for range 1024 {
			if _, err := c.Write(record); err != nil {
				return
			}
		}
	}()
	return a.closes(c)
}

// halfHandshakes makes the server compute its part of handshakes, and leaves.
func halfHandshakes(a *attacker) error {
	for range 50 {
		c, err := a.dial()
		if err != nil {
			return err
		}
		// It must fail.
		_ = tls.Client(&onceWritten{Conn: c}, tlsConfig(lean)).HandshakeContext(a.ctx)
		_ = c.Close()
	}
	return nil
}

// onceWritten passes on a single write.
type onceWritten struct {
	net.Conn
	done bool
}

// Write implements net.Conn.
func (o *onceWritten) Write(b []byte) (int, error) {
	if o.done {
		return 0, net.ErrClosed
	}
	o.done = true
	return o.Conn.Write(b)
}

func foreignCertificate(a *attacker) error {
	c, err := a.secure(must(identities.foreign.Node("honest-1")))
	if err != nil {
		return err // the client's handshake is done before the server has checked the certificate
	}
	return a.closes(c)
}

// expensiveChains repeats handshakes with long chains of certificates of P-521. The first
// certificate is a node's, or forged as the others are.
func expensiveChains(length int, node bool) func(*attacker) error {
	return func(a *attacker) error {
		var by *testca.CA
		if node {
			by = identities.ca
		}
		chain := must(testca.Forged(length, elliptic.P521(), a.node, by))
		config := tlsConfig(a.protocol)
		config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &chain, nil }
		return onMany(a, func() (net.Conn, error) {
			c, err := a.dial()
			if err == nil {
				// The client's part is done before the server has checked the certificates.
				_ = tls.Client(c, config).HandshakeContext(a.ctx)
			}
			return c, err
		}, a.closes)
	}
}

// expensiveKeys offers no key share but one of the curve P-521.
func expensiveKeys(a *attacker) error {
	config := tlsConfig(a.protocol)
	config.CurvePreferences = []tls.CurveID{tls.CurveP521}
	return onMany(a, func() (net.Conn, error) {
		c, err := a.dial()
		if err == nil && tls.Client(c, config).HandshakeContext(a.ctx) == nil {
			err = errors.New("the server agrees on a key of P-521")
		}
		return c, err
	}, a.closes)
}

func silentAfterTLS(a *attacker) error {
	c, err := a.secure(a.certificate()) // a certificate alone admits no one
	if err != nil {
		return err
	}
	a.begun()
	return a.closes(c)
}

func silentAfterSettings(a *attacker) error {
	c, err := a.http2(a.certificate())
	if err != nil {
		return err
	}
	a.begun()
	return c.attend().closes()
}

// manyConnections is the number of connections of an attack whose bound is per connection, and
// someConnections that on ports that pace handshakes.
const manyConnections, someConnections = 100, 16

// onMany makes an attack on each of many connections from one address. None of them may last so
// long that it is closed for its age.
func onMany[C any](a *attacker, connect func() (C, error), attack func(C) error) error {
	spared := ofConnections("timeout")
	before := a.server.value(spared)
	var all errgroup.Group
	turns := make(chan struct{}, 4) // the attacker's part of handshakes must not use up the CPUs
	connections := manyConnections
	if a.port.name != distribution.name {
		connections = someConnections
	}
	for range connections {
		all.Go(func() error {
			turns <- struct{}{}
			c, err := connect()
			<-turns
			if err != nil {
				return err
			}
			return attack(c)
		})
	}
	if err := all.Wait(); err != nil {
		return err
	}
	if n := a.server.value(spared) - before; n > 0 {
		return fmt.Errorf("%v of %d connections have met no bound but that of time", n, connections)
	}
	return nil
}

// heldCertificates sends certificates except for their end. The server holds them in memory
// meanwhile.
func heldCertificates(a *attacker) error {
	chain := a.certificate()
	for range 100 {
		chain.Certificate = append(chain.Certificate, make([]byte, 1000))
	}
	config := tlsConfig(a.protocol)
	config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &chain, nil }
	return onMany(a, func() (net.Conn, error) {
		c, err := a.dial()
		if err == nil {
			// The server may have closed it.
			_ = tls.Client(&heldBack{c, 90_000}, config).HandshakeContext(a.ctx)
		}
		return c, err
	}, a.closes)
}

// heldBack passes on the first left bytes and swallows the others.
type heldBack struct {
	net.Conn
	left int
}

// Write implements net.Conn.
func (h *heldBack) Write(b []byte) (int, error) {
	n := min(len(b), h.left)
	h.left -= n
	if _, err := h.Conn.Write(b[:n]); err != nil {
		return 0, err
	}
	return len(b), nil
}

// refusedCalls makes calls with a token, or without credentials, until the connections end. On the
// metrics port, it requests pages. The token may be signed with a key that the API server does not
// have. The server then spends no review on it, but the check of a signature.
func refusedCalls(token string) func(*attacker) error {
	refused := counter{"slicecast_server_refused_requests_total", ""}
	// most is how many calls may be refused, including calls in progress when a connection ends.
	const most = manyConnections * (2 + 16)
	return func(a *attacker) error {
		if a.port.name != distribution.name {
			return refusedPages(a, token)
		}
		before := a.server.value(refused)
		err := onMany(a, func() (*http2Client, error) { return a.http2() }, func(c *http2Client) error {
			c.attend()
			for id := uint32(1); c.call(id, token) == nil; id += 2 {
				select {
				case <-c.ended:
					return nil
				case s := <-c.statuses:
					if s == nil {
						return errors.New("a call without credentials was answered")
					}
				case <-time.After(patience):
					return fmt.Errorf("no answer within %v", patience)
				}
			}
			return c.closes()
		})
		if n := a.server.value(refused) - before; err == nil && n > most {
			err = fmt.Errorf("the server has answered %v calls, more than %d", n, most)
		}
		return errors.Join(err, a.noReview())
	}
}

// noReview returns an error if the server has asked the API server about a token.
func (a *attacker) noReview() error {
	if n := a.server.reviews.Load(); n > 0 {
		return fmt.Errorf("the API server was asked about %d tokens", n)
	}
	return nil
}

// refusedPages requests pages with a token. Each refusal must end the connection.
func refusedPages(a *attacker, token string) error {
	request := "GET /metrics HTTP/1.1\r\nHost: x\r\n"
	if token != "" {
		request += "Authorization: Bearer " + token + "\r\n"
	}
	err := onMany(a, func() (*tls.Conn, error) { return a.secure() }, func(c *tls.Conn) error {
		_, _ = io.WriteString(c, request+"\r\n") // the server may not read all of it
		if answer, _ := io.ReadAll(c); bytes.HasPrefix(answer, []byte("HTTP/1.1 2")) {
			return fmt.Errorf("it was answered: %s", answer)
		}
		return a.closes(c)
	})
	return errors.Join(err, a.noReview())
}

// refusedHellos opens streams as another node until the connection ends, which takes few of them.
func refusedHellos(a *attacker) error {
	c, err := a.http2(a.certificate())
	if err != nil {
		return err
	}
	c.attend()
	other := helloRequest(&pb.Hello{NodeName: "honest-1", Kind: pb.ClientKind_CLIENT_KIND_AGENT})
	const most = 20
	for i := range uint32(most) {
		if errors.Join(c.open(1+2*i), c.say(1+2*i, other)) != nil {
			return c.closes()
		}
		select {
		case <-c.ended:
			return nil
		case err := <-c.statuses:
			if err == nil {
				return errors.New("a stream as another node was served")
			}
		case <-time.After(patience):
			return fmt.Errorf("no answer within %v", patience)
		}
	}
	return fmt.Errorf("the server has refused %d streams of a connection", most)
}

// smallWindows accepts everything byte by byte. A window is only opened for the next byte.
func smallWindows(a *attacker) error {
	c, err := a.http2(a.certificate())
	if err != nil {
		return err
	}
	if err := errors.Join(c.framer.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0}),
		c.open(1), c.say(1, helloRequest(a.agent()))); err != nil {
		return err
	}
	c.attend()
	a.begun()
	return c.flood(100_000, func(int) error { return c.framer.WriteWindowUpdate(1, 1) })
}

// longTokens sends a token that exceeds the bound on headers. The client may get a status or be cut
// off.
func longTokens(token string) func(*attacker) error {
	return func(a *attacker) error {
		if a.port.name != distribution.name {
			return refusedPages(a, token)
		}
		conn, err := a.client()
		if err != nil {
			return err
		}
		return over(streamWith(a.ctx, conn, token),
			codes.Unauthenticated, codes.Internal, codes.Unavailable, codes.ResourceExhausted, codes.Unknown)
	}
}

// framed makes an attack with frames. In the phases before InSync, its stream 1 is open and has
// windows that are too small for the state; later on, the stream is in sync.
func framed(attack func(*http2Client) error) func(*attacker) error {
	return func(a *attacker) error {
		if a.phase == beforeHello {
			c, err := a.http2()
			if err != nil {
				return err
			}
			return attack(c.attend())
		}
		c, err := a.http2(a.certificate())
		if err != nil {
			return err
		}
		if a.phase != beforeInSync {
			err = c.write(func() error {
				const window = 16 << 20 // the state fits into it
				return errors.Join(c.framer.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: window}),
					c.framer.WriteWindowUpdate(0, window))
			})
		}
		if err := errors.Join(err, c.open(1), c.say(1, helloRequest(a.agent()))); err != nil {
			return err
		}
		if err := c.greeted(); err != nil {
			return err
		}
		a.begun()
		return attack(c)
	}
}

func emptyContinuations(c *http2Client) error {
	return c.flood(100_000, func(i int) error {
		if i == 0 {
			return c.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 101, BlockFragment: c.headers("")})
		}
		return c.framer.WriteContinuation(101, false, nil)
	})
}

func largeBlock(c *http2Client) error {
	return c.flood(1000, func(i int) error {
		// A name that never ends.
		fragment := append([]byte{0, 0x7f, 0xff, 0xff, 0xff, 0x0f}, make([]byte, 15<<10)...)
		if i == 0 {
			return c.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 101, BlockFragment: fragment})
		}
		return c.framer.WriteContinuation(101, false, fragment)
	})
}

func slowBlock(c *http2Client) error {
	err := c.write(func() error {
		return c.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 101, BlockFragment: c.headers("")})
	})
	if err != nil {
		return err
	}
	return c.closes()
}

func manySettings(c *http2Client) error {
	return c.flood(1, func(int) error { return c.framer.WriteSettings(make([]http2.Setting, 65)...) })
}

// frames sends all kinds of frames that request nothing.
func frames(c *http2Client) error {
	return c.flood(100_000, func(i int) error {
		switch i % 4 {
		case 0:
			return c.framer.WriteSettingsAck()
		case 1:
			return c.framer.WriteWindowUpdate(0, 1)
		case 2:
			return c.framer.WritePing(true, [8]byte{})
		default:
			return c.framer.WriteRawFrame(0x42, 0, 0, []byte("x"))
		}
	})
}

func rapidReset(c *http2Client) error {
	return c.flood(100_000, func(i int) error {
		id := uint32(101 + 2*i)
		return errors.Join(
			c.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: c.headers(""), EndHeaders: true}),
			c.framer.WriteRSTStream(id, http2.ErrCodeCancel))
	})
}

func pings(c *http2Client) error {
	err := c.flood(100_000, func(int) error { return c.framer.WritePing(false, [8]byte{}) })
	if err == nil && c.goAway != 0 && c.goAway != http2.ErrCodeEnhanceYourCalm {
		return fmt.Errorf("it was told %v", c.goAway)
	}
	return err
}

func emptyData(c *http2Client) error {
	return c.flood(100_000, func(int) error { return c.framer.WriteData(1, false, nil) })
}

// manyStreams opens more streams than a connection may have, and sends nothing on them.
func manyStreams(a *attacker) error {
	c, err := a.http2(a.certificate())
	if err != nil {
		return err
	}
	c.attend()
	for i := range uint32(17) {
		if err := c.open(1 + 2*i); err != nil {
			return err
		}
	}
	select {
	case err := <-c.statuses:
		var reset http2.StreamError
		if errors.As(err, &reset) && reset.Code == http2.ErrCodeRefusedStream {
			return nil
		}
		return requireCode(err, codes.ResourceExhausted)
	case <-time.After(patience):
		return errors.New("no stream is refused")
	}
}

func noHello(a *attacker) error {
	stream, err := a.stream(nil)
	if err != nil {
		return err
	}
	a.begun()
	return a.ends(stream, codes.InvalidArgument)
}

// says sends a first message, which must end the stream.
func says(want codes.Code, message func(*attacker) *pb.StreamRequest) func(*attacker) error {
	return func(a *attacker) error {
		stream, err := a.stream(nil)
		if err != nil {
			return err
		}
		_ = stream.Send(message(a)) // the stream's end says why
		return over(stream, want)
	}
}

func notProtobuf(a *attacker) error {
	c, err := a.http2(a.certificate())
	if err != nil {
		return err
	}
	if err := errors.Join(c.open(1), c.sayBytes(1, []byte{0xff, 0xff, 0xff})); err != nil {
		return err
	}
	return c.attend().ends(codes.InvalidArgument, codes.Internal)
}

func ack(shard uint32) *pb.StreamRequest {
	return &pb.StreamRequest{Message: &pb.StreamRequest_Ack{Ack: &pb.Ack{Positions: []*pb.ShardPosition{{Shard: shard}}}}}
}

func resync(r *pb.Resync) *pb.StreamRequest {
	return &pb.StreamRequest{Message: &pb.StreamRequest_Resync{Resync: r}}
}

// sends has messages follow hello, until the stream ends as it must.
func sends(most int, want codes.Code, message func(i int) *pb.StreamRequest, or ...codes.Code) func(*attacker) error {
	return func(a *attacker) error {
		stream, err := a.opened()
		if err != nil {
			return err
		}
		return a.floods(stream, most, message, append(or, want)...)
	}
}

// asRelay makes an attack on the stream of a relay.
func asRelay(attack func(*attacker, pb.DistributionService_StreamClient) error) func(*attacker) error {
	return func(a *attacker) error {
		certificate, err := identities.ca.Client(nodeName("relay"), "slicecast:relays")
		if err != nil {
			return err
		}
		stream, err := a.openedAs(&pb.Hello{Kind: pb.ClientKind_CLIENT_KIND_RELAY}, certificate)
		if err != nil {
			return err
		}
		return attack(a, stream)
	}
}

// fromTheFuture claims to have seen resource versions that nobody has. It is served in the end.
func fromTheFuture(a *attacker) error {
	h := a.agent()
	h.ResourceVersions = &pb.ResourceVersions{Services: 1 << 62, Slices: 1 << 62}
	stream, err := a.stream(h)
	if err != nil {
		return err
	}
	return until(stream, func(r *pb.StreamResponse) bool { return r.GetInSync() != nil })
}

// takesNothing requests everything as eight nodes, whose windows stay closed.
func takesNothing(a *attacker) error {
	for range 8 {
		one := newAttacker(a.ctx, a.server, a.way)
		a.later(one.end)
		c, err := one.http2(one.certificate())
		if err != nil {
			return err
		}
		err = errors.Join(c.framer.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1 << 10}),
			c.open(1), c.say(1, helloRequest(one.agent())))
		if err != nil {
			return err
		}
		c.attend()
	}
	return nil // the server's counter shows that they have lost their turns
}

// asked begins a stream of a client with state, so that the server asks for its digests.
func asked(attack func(pb.DistributionService_StreamClient) error) func(*attacker) error {
	return func(a *attacker) error {
		h := a.agent()
		h.Capabilities = []pb.Capability{pb.Capability_CAPABILITY_BUCKETS}
		h.Sequences, h.Digest = make([]uint64, shards), modeltest.Digests(1)
		stream, err := a.stream(h)
		if err != nil {
			return err
		}
		if err := until(stream, func(r *pb.StreamResponse) bool { return r.GetDigestQuery() != nil }); err != nil {
			return err
		}
		return attack(stream)
	}
}

// shards is the server's number of shards.
const shards = 64

// digests returns made-up digests of all shards.
func digests() *pb.StreamRequest {
	made := bytes.Repeat(modeltest.Digests(1), shards)
	return &pb.StreamRequest{Message: &pb.StreamRequest_Digests{Digests: &pb.Digests{Digests: made}}}
}

// wrongBuckets requests the buckets of a shard. Few enough of them differ that they are sent one by
// one: all that have objects, and some that have none.
func wrongBuckets(shard uint32) *pb.StreamRequest {
	digests := make([]byte, model.Buckets*model.HashSize)
	copy(digests, bytes.Repeat(modeltest.Digests(1), model.Buckets/4))
	return resync(&pb.Resync{Shard: shard, BucketDigests: digests})
}

// wrongOnNewStreams resumes with wrong digests, on stream after stream, and reads all that it is
// sent.
func wrongOnNewStreams(a *attacker) error {
	again := asked(func(stream pb.DistributionService_StreamClient) error {
		err := stream.Send(digests())
		if err != nil {
			return err
		}
		return until(stream, func(r *pb.StreamResponse) bool {
			for _, shard := range r.GetBucketQuery().GetShards() {
				if stream.Send(wrongBuckets(shard)) != nil {
					return false // the stream's end says why
				}
			}
			return r.GetInSync() != nil
		})
	})
	for {
		if err := again(a); err != nil {
			return requireCode(err, codes.ResourceExhausted)
		}
	}
}

func answersTwice(stream pb.DistributionService_StreamClient) error {
	if err := stream.Send(digests()); err != nil {
		return err
	}
	_ = stream.Send(digests()) // the stream's end has the result
	return over(stream, codes.InvalidArgument)
}

func answersBucketsTwice(stream pb.DistributionService_StreamClient) error {
	if err := stream.Send(digests()); err != nil {
		return err
	}
	var query *pb.BucketQuery
	err := until(stream, func(r *pb.StreamResponse) bool {
		query = r.GetBucketQuery()
		return query != nil
	})
	if err != nil {
		return err
	}
	for range 2 {
		// The stream's end has the result.
		_ = stream.Send(resync(&pb.Resync{Shard: query.GetShards()[0]}))
	}
	return over(stream, codes.InvalidArgument)
}

func answersNothing(stream pb.DistributionService_StreamClient) error {
	return over(stream, codes.DeadlineExceeded)
}

// resyncsOnNewStreams requests as much as a stream may at once, and continues on a new stream.
func resyncsOnNewStreams(a *attacker) error {
	const atOnce = 250
	again := func(int) *pb.StreamRequest {
		return resync(&pb.Resync{Keys: []*pb.ObjectKey{{Kind: pb.ObjectKind_OBJECT_KIND_SLICE, Name: "x"}}})
	}
	first, err := a.opened()
	if err != nil {
		return err
	}
	for i := range atOnce {
		if err := first.Send(again(i)); err != nil {
			return err
		}
	}
	// The answer comes once the server has read all of the requests.
	query := &pb.StreamRequest{Message: &pb.StreamRequest_DigestQuery{DigestQuery: &pb.DigestQuery{}}}
	if err := first.Send(query); err != nil {
		return err
	}
	if err := until(first, func(r *pb.StreamResponse) bool { return r.GetDigests() != nil }); err != nil {
		return err
	}
	second, err := a.opened()
	if err != nil {
		return err
	}
	return a.floods(second, atOnce, again, codes.ResourceExhausted)
}

// unreadResyncs requests buckets of every shard, and reads no answer while it may request more.
func unreadResyncs(a *attacker) error {
	stream, err := a.opened()
	if err != nil {
		return err
	}
	asked := make(chan struct{})
	go func() {
		defer close(asked)
		for i := range 400 { // more than may be requested in any case
			digests := make([]byte, model.Buckets*len(model.Digest{}))
			if stream.Send(resync(&pb.Resync{Shard: uint32(i % shards), BucketDigests: digests})) != nil {
				return // the stream's end says why
			}
		}
	}()
	select {
	case <-asked:
	// The server reads no more. The client has to read what was sent before the status.
	case <-time.After(500 * time.Millisecond):
	}
	err = a.ends(stream, codes.ResourceExhausted)
	<-asked
	return err
}

// nacks reports that many Services cannot be programmed, on a relay's node unless that is empty.
func nacks(stream pb.DistributionService_StreamClient, many int, node string) error {
	for i := range many {
		err := stream.Send(&pb.StreamRequest{Message: &pb.StreamRequest_Nack{Nack: &pb.Nack{
			Key: &pb.ObjectKey{Kind: pb.ObjectKind_OBJECT_KIND_SERVICE, Namespace: "default", Name: fmt.Sprint("none-", i)}, Reason: "no reason",
			NodeName: node,
		}}})
		if err != nil {
			return err
		}
	}
	return nil
}

func streamsOfOneNode(a *attacker) error {
	first, err := a.opened()
	if err != nil {
		return err
	}
	if _, err := a.opened(); err != nil {
		return err
	}
	return over(first, codes.Aborted, codes.Canceled, codes.Unavailable, codes.AlreadyExists)
}

// connectionsOfOneNode opens more connections with a call than a node may have. One of them must
// end for the last one.
func connectionsOfOneNode(a *attacker) error {
	const connections = 9
	ended := make(chan error, connections)
	for range connections {
		stream, err := a.stream(nil)
		if err != nil {
			return err
		}
		go func() { ended <- over(stream, codes.Unavailable) }()
	}
	return <-ended
}

func callsOfOneNode(a *attacker) error {
	conn, err := a.client(a.certificate())
	if err != nil {
		return err
	}
	other, err := a.client(a.certificate())
	if err != nil {
		return err
	}
	for i := range 17 {
		c := conn
		if i > 8 {
			c = other
		}
		watch, err := healthpb.NewHealthClient(c).Watch(a.ctx, &healthpb.HealthCheckRequest{})
		if err != nil {
			return err
		}
		if _, err := watch.Recv(); err != nil && i < 16 {
			return fmt.Errorf("call %d: %w", i, err)
		} else if i == 16 {
			return requireCode(err, codes.ResourceExhausted)
		}
	}
	return nil
}

func connectionsOfOneUser(a *attacker) error {
	observer := must(identities.ca.Client(nodeName("observer"), "slicecast:observers"))
	for i := range 257 {
		c, err := a.http2(observer)
		if err != nil {
			return err
		}
		if err := errors.Join(c.open(1), c.say(1, helloRequest(&pb.Hello{}))); err != nil {
			return err
		}
		if i == 256 {
			return c.attend().ends(codes.ResourceExhausted)
		}
		if err := c.greeted(); err != nil {
			return fmt.Errorf("connection %d: %w", i, err)
		}
	}
	return nil
}

// questions makes an operator's calls as a node.
func questions(a *attacker) error {
	conn, err := a.client(a.certificate())
	if err != nil {
		return err
	}
	_, err = pb.NewDebugServiceClient(conn).GetStatus(a.ctx, &pb.GetStatusRequest{})
	return requireCode(err, codes.PermissionDenied)
}

// readsNothing requests everything, and does not even read from its socket.
func readsNothing(a *attacker) error {
	c, err := a.http2(a.certificate())
	if err != nil {
		return err
	}
	if err := errors.Join(c.open(1), c.say(1, helloRequest(a.agent()))); err != nil {
		return err
	}
	a.begun()
	return closedUnread(c.conn)
}

// stays does not leave a server that drains until it must.
func stays(a *attacker) error {
	stream, err := a.opened()
	if err != nil {
		return err
	}
	return over(stream, codes.Unavailable)
}
