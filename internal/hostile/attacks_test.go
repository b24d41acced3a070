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
	onGRPC   = []string{grpcGo}
	onEither = []string{neither}
)

// attacks is the table of attacks. Those of a phase are in the order in which the server checks
// them.
var attacks = []attack{
	{phase: beforeTLS, name: "silent connections of one address", on: onEither, bounds: "maxStrangersPerAddress",
		does: crowd(256+32, oneAddress), counted: ofConnections("address")},
	{phase: beforeTLS, name: "silent connections of many addresses", on: onEither, bounds: "maxStrangers",
		does: crowd(4096+64, manyAddresses), counted: ofConnections("strangers")},
	{phase: beforeTLS, name: "silence", on: onEither, bounds: "strangerTimeout", slow: true,
		does: crowd(1, oneAddress), counted: ofConnections("timeout")},
	{phase: beforeTLS, name: "a ClientHello byte by byte", on: onEither, bounds: "strangerTimeout", slow: true,
		does: slowHello, counted: ofConnections("timeout")},
	{phase: beforeTLS, name: "no TLS", on: onEither, does: notTLS, counted: handshakeErrors},
	{phase: beforeTLS, name: "a ClientHello without end", on: onEither, does: endlessHello, counted: handshakeErrors},
	{phase: beforeTLS, name: "handshakes that are given up", on: onEither, does: halfHandshakes, counted: handshakeErrors},
	{phase: beforeTLS, name: "a certificate of another CA", on: both, does: foreignCertificate, counted: ofConnections("certificate")},
	{phase: beforeTLS, name: "certificates that are expensive to verify", on: both, bounds: "maxChain",
		does: expensiveChains(50, false), counted: ofConnections("certificate")},
	{phase: beforeTLS, name: "as many certificates as are admitted", on: both, bounds: "maxChain",
		does: expensiveChains(5, false), counted: ofConnections("certificate")},
	{phase: beforeTLS, name: "expensive certificates after a node's", on: both, bounds: "maxChain",
		does: expensiveChains(50, true), counted: ofConnections("certificate")},
	{phase: beforeTLS, name: "an expensive agreement on a key", on: both, bounds: "curves", does: expensiveKeys, counted: handshakeErrors},
	{phase: beforeTLS, name: "long certificates that are held back", on: both, bounds: "maxUndelivered",
		does: heldCertificates, counted: handshakeErrors},

	{phase: beforeHello, name: "silence after TLS", on: both, bounds: "strangerTimeout", slow: true,
		does: silentAfterTLS, counted: ofConnections("timeout")},
	{phase: beforeHello, name: "silence after SETTINGS", on: both, bounds: "strangerTimeout", slow: true,
		does: silentAfterSettings, counted: ofConnections("timeout")},
	{phase: beforeHello, name: "calls without credentials", on: both, bounds: "maxRefusedCalls",
		does: refusedCalls(""), counted: ofRequests("no_credentials")},
	{phase: beforeHello, name: "invented tokens", on: both, bounds: "maxRefusedCalls",
		does: refusedCalls(inventedToken()), counted: ofRequests("token")},
	{phase: beforeHello, name: "long tokens", on: both, bounds: "maxHeaderBytes", does: longTokens},
	{phase: beforeHello, name: "a header block of empty frames", on: both, bounds: "maxBlockFrames", does: anonymous(emptyContinuations)},
	{phase: beforeHello, name: "a large header block", on: both, bounds: "maxHeaderBytes", does: anonymous(largeBlock)},
	{phase: beforeHello, name: "a slow header block", on: both, bounds: "maxBlockTime", slow: true, does: anonymous(slowBlock)},
	{phase: beforeHello, name: "many settings", on: both, bounds: "maxSettings", does: anonymous(manySettings)},
	{phase: beforeHello, name: "frames without messages", on: both, bounds: "maxStrangerFrames", does: anonymous(frames)},
	{phase: beforeHello, name: "streams that are reset", on: both, bounds: "maxStrangerFrames", does: anonymous(rapidReset)},
	{phase: beforeHello, name: "pings", on: both, bounds: "minClientPing", does: anonymous(pings)},
	{phase: beforeHello, name: "many streams", on: both, bounds: "maxConcurrentStreams", does: manyStreams},
	{phase: beforeHello, name: "no hello", on: both, bounds: "helloTimeout", slow: true, does: noHello},
	{phase: beforeHello, name: "another message first", on: both,
		does: says(codes.InvalidArgument, func(*attacker) *pb.StreamRequest { return ack(1) })},
	{phase: beforeHello, name: "another node's name", on: both, counted: ofRequests("other_node"),
		does: says(codes.PermissionDenied, func(*attacker) *pb.StreamRequest {
			return helloRequest(&pb.Hello{NodeName: "honest-1", Kind: pb.ClientKind_CLIENT_KIND_AGENT})
		})},
	{phase: beforeHello, name: "another node's name, again and again", on: both, bounds: "maxRefusedCalls",
		does: refusedHellos, counted: ofConnections("refused")},
	{phase: beforeHello, name: "to be a relay", on: both, counted: ofRequests("relay"),
		does: says(codes.PermissionDenied, func(*attacker) *pb.StreamRequest {
			return helloRequest(&pb.Hello{Kind: pb.ClientKind_CLIENT_KIND_RELAY})
		})},
	{phase: beforeHello, name: "to observe", on: both, counted: ofRequests("observer"),
		does: says(codes.PermissionDenied, func(*attacker) *pb.StreamRequest { return helloRequest(&pb.Hello{}) })},
	{phase: beforeHello, name: "a long name", on: both, bounds: "maxNodeName",
		does: says(codes.InvalidArgument, func(*attacker) *pb.StreamRequest {
			return helloRequest(&pb.Hello{NodeName: strings.Repeat("n", 254), Kind: pb.ClientKind_CLIENT_KIND_AGENT})
		})},
	{phase: beforeHello, name: "positions in too many shards", on: both,
		does: says(codes.InvalidArgument, func(a *attacker) *pb.StreamRequest {
			h := a.agent()
			h.Epoch, h.Sequences = 1, make([]uint64, 4097)
			return helloRequest(h)
		})},
	{phase: beforeHello, name: "a large message", on: both, bounds: "maxReceived",
		does: says(codes.ResourceExhausted, func(a *attacker) *pb.StreamRequest {
			h := a.agent()
			h.ClientVersion = strings.Repeat("v", 128<<10)
			return helloRequest(h)
		})},
	{phase: beforeHello, name: "no protobuf", on: both, does: notProtobuf},

	{phase: beforeInSync, name: "a second hello", on: both,
		does: says(codes.InvalidArgument, func(a *attacker) *pb.StreamRequest { return helloRequest(a.agent()) },
			func(a *attacker) *pb.StreamRequest { return helloRequest(a.agent()) })},
	{phase: beforeInSync, name: "versions of the future", on: both, bounds: "MaxBehindWait",
		does: fromTheFuture, counted: counter{"slicecast_server_behind_waits_total", "gave_up"}},

	{phase: beforeInSync, name: "whole shards that are not taken", on: both, bounds: "coldShares turnCheck", longer: 2 * turnCheck,
		does: takesNothing, counted: ofStreams("admission_stalled_turns_total")},
	{phase: beforeInSync, name: "two answers to a DigestQuery", on: both, does: asked(answersTwice)},
	{phase: beforeInSync, name: "two answers to a BucketQuery", on: both, does: asked(answersBucketsTwice)},
	{phase: beforeInSync, name: "wrong digests on stream after stream", on: both, bounds: "startsBurst coldShares",
		does: wrongOnNewStreams, counted: counter{"slicecast_server_stream_starts_total", "too_often"}},
	{phase: beforeInSync, name: "no answer", on: both, bounds: "bucketTimeout", slow: true, does: asked(answersNothing)},

	{phase: inSync, name: "messages", on: both, bounds: "messagesPerSecond",
		// On grpc-go, the frames of so many small messages may end the connection first.
		does: synced(8192+1000, codes.ResourceExhausted, func(int) *pb.StreamRequest { return ack(0) }, codes.Unavailable)},
	{phase: inSync, name: "resyncs", on: both, bounds: "resyncsPerSecond", counted: ofStreams("resyncs_total"),
		does: synced(256+100, codes.ResourceExhausted, func(i int) *pb.StreamRequest {
			return resync(&pb.Resync{Shard: uint32(i % shards), Keys: []*pb.ObjectKey{{Kind: pb.ObjectKind_OBJECT_KIND_SLICE, Name: "x"}}})
		})},
	{phase: inSync, name: "whole shards again and again", on: both, bounds: "resyncsPerSecond", counted: ofStreams("resyncs_total"),
		does: synced(256+100, codes.ResourceExhausted, func(i int) *pb.StreamRequest {
			return resync(&pb.Resync{Shard: uint32(i % shards)})
		})},
	{phase: inSync, name: "buckets again and again", on: both, bounds: "resyncsPerSecond coldShares", counted: ofStreams("resyncs_total"),
		does: synced(256+100, codes.ResourceExhausted, func(i int) *pb.StreamRequest { return wrongBuckets(uint32(i % shards)) })},
	{phase: inSync, name: "resyncs on new streams", on: both, bounds: "resyncsBurst", does: resyncsOnNewStreams},
	{phase: inSync, name: "an answer to no question", on: both,
		does: synced(1, codes.InvalidArgument, func(int) *pb.StreamRequest { return digests() })},
	{phase: inSync, name: "an Ack of many positions", on: both, bounds: "maxPositions",
		does: synced(1, codes.InvalidArgument, func(int) *pb.StreamRequest {
			positions := make([]*pb.ShardPosition, 4097)
			for i := range positions {
				positions[i] = &pb.ShardPosition{}
			}
			return &pb.StreamRequest{Message: &pb.StreamRequest_Ack{Ack: &pb.Ack{Positions: positions}}}
		})},
	{phase: inSync, name: "a resync of many objects", on: both, bounds: "maxKeys",
		does: synced(1, codes.InvalidArgument, func(int) *pb.StreamRequest {
			r := &pb.Resync{}
			for range 1025 {
				r.Keys = append(r.Keys, &pb.ObjectKey{Kind: pb.ObjectKind_OBJECT_KIND_SLICE, Name: "x"})
			}
			return resync(r)
		})},
	{phase: inSync, name: "a resync of no shard", on: both,
		does: synced(1, codes.InvalidArgument, func(int) *pb.StreamRequest { return resync(&pb.Resync{Shard: shards}) })},
	{phase: inSync, name: "resyncs whose answers are not read", on: both, bounds: "maxWaiting", does: unreadResyncs},
	{phase: inSync, name: "nacks", on: both, bounds: "maxNacks", does: nacks, counted: ofStreams("dropped_nacks_total")},
	{phase: inSync, name: "streams of one node", on: both, does: streamsOfOneNode, counted: ofStreams("replaced_streams_total")},
	{phase: inSync, name: "connections of one node", on: both, bounds: "maxNodeConnections",
		does: connectionsOfOneNode, counted: ofConnections("caller")},
	{phase: inSync, name: "calls of one node", on: onGRPC, bounds: "maxNodeCalls", does: callsOfOneNode, counted: ofCalls("calls")},
	{phase: inSync, name: "connections of one user", on: both, bounds: "maxUserConnections",
		does: connectionsOfOneUser, counted: ofCalls("connections")},
	{phase: inSync, name: "an operator's questions", on: onGRPC, does: questions, counted: ofRequests("observer")},
	{phase: inSync, name: "a header block of empty frames", on: both, bounds: "maxBlockFrames", does: known(emptyContinuations)},
	{phase: inSync, name: "a slow header block", on: both, bounds: "maxBlockTime", slow: true, does: known(slowBlock)},
	{phase: inSync, name: "frames without messages", on: both, bounds: "maxFrames", does: known(frames)},
	{phase: inSync, name: "streams that are reset", on: both, bounds: "maxFrames", does: known(rapidReset)},
	{phase: inSync, name: "pings", on: both, bounds: "minClientPing", does: known(pings)},
	{phase: inSync, name: "empty DATA", on: both, bounds: "maxFrames", does: known(emptyData)},
	{phase: inSync, name: "windows of one byte", on: both, bounds: "maxFrames", does: smallWindows},
	{phase: inSync, name: "nothing is read", on: both, bounds: "pingTimeout", slow: true, does: readsNothing},

	{phase: draining, name: "silent connections", on: onEither, does: whileDraining(crowd(64, manyAddresses))},
	{phase: draining, name: "silence after TLS", on: both, does: whileDraining(silentAfterTLS)},
	{phase: draining, name: "silence after SETTINGS", on: both, does: whileDraining(silentAfterSettings)},
	{phase: draining, name: "no hello", on: both, does: whileDraining(noHelloEnds)},
	{phase: draining, name: "it stays", on: both, bounds: "DrainWindow", does: whileDraining(stays)},
	{phase: draining, name: "nothing is read", on: both, bounds: "GracePeriod", does: whileDraining(readsNothing)},
	{phase: draining, name: "a header block of empty frames", on: both, bounds: "maxBlockFrames", does: whileDraining(known(emptyContinuations))},
	{phase: draining, name: "frames without messages", on: both, bounds: "maxFrames", does: whileDraining(known(frames))},
	{phase: draining, name: "messages", on: both, does: whileDraining(synced(8192+1000, codes.Unavailable, func(int) *pb.StreamRequest { return ack(0) }, codes.ResourceExhausted))},

	{phase: otherPorts, name: "silent connections to health checks", on: onEither, bounds: "bounded.Health",
		does: crowdOf(64+32, func(s *server) net.Addr { return s.Addresses().Healthz }), counted: ofPorts("health")},
	{phase: otherPorts, name: "certificates that are expensive to verify, to metrics", on: onEither, bounds: "maxChain",
		does: expensiveChainsTo(func(s *server) net.Addr { return s.Addresses().Metrics })},
	{phase: otherPorts, name: "silent connections to metrics", on: onEither, bounds: "bounded.Metrics",
		does: crowdOf(16+8, func(s *server) net.Addr { return s.Addresses().Metrics }), counted: ofPorts("metrics")},
}

const (
	// coldBytes bounds the bytes of whole shards in flight. Eight clients that accept no compressed
	// frames use all of it.
	coldBytes = 4 << 20
	// turnCheck is how long a client that accepts nothing keeps its part of coldBytes.
	turnCheck = 2 * time.Second
)

func oneAddress(a *attacker, _ int) net.IP    { return a.from }
func manyAddresses(_ *attacker, i int) net.IP { return net.IPv4(127, 77, byte(i>>8), byte(i)) }

// crowd opens connections that send nothing. The first one must end, and the others stay open.
func crowd(n int, from func(a *attacker, i int) net.IP) func(*attacker) error {
	return func(a *attacker) error {
		var first net.Conn
		for i := range n {
			c, err := a.dial(a.server.address(), from(a, i))
			if err != nil {
				return err
			}
			if first == nil {
				first = c
			}
		}
		a.begun()
		return a.closes(first)
	}
}

// crowdOf does the same to a port that serves HTTP. Honest clients must be answered meanwhile.
func crowdOf(n int, port func(*server) net.Addr) func(*attacker) error {
	return func(a *attacker) error {
		var first net.Conn
		for i := range n {
			c, err := a.dial(port(a.server).String(), a.from)
			if err != nil {
				return err
			}
			if i == 0 {
				first = c
			}
		}
		if err := a.closes(first); err != nil {
			return err
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
}

// clientHello is the beginning of a ClientHello: a record with a handshake message of 512 bytes.
var clientHello = []byte{22, 3, 1, 2, 4, 1, 0, 2, 0, 3, 3}

func slowHello(a *attacker) error {
	c, err := a.dial(a.server.address(), a.from)
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
	c, err := a.dial(a.server.address(), a.from)
	if err != nil {
		return err
	}
	_, _ = io.WriteString(c, "GET / HTTP/1.1\r\n\r\n") // the connection may have ended
	return a.closes(c)
}

func endlessHello(a *attacker) error {
	c, err := a.dial(a.server.address(), a.from)
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
		c, err := a.dial(a.server.address(), a.from)
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
			c, err := a.dial(a.server.address(), a.from)
			if err == nil {
				// The client's part is done before the server has checked the certificates.
				_ = tls.Client(c, config).HandshakeContext(a.ctx)
			}
			return c, err
		}, a.closes)
	}
}

// expensiveChainsTo makes such handshakes with another port.
func expensiveChainsTo(port func(*server) net.Addr) func(*attacker) error {
	return func(a *attacker) error {
		chain := must(testca.Forged(50, elliptic.P521(), a.node, nil))
		config := tlsConfig(neither)
		config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &chain, nil }
		for range 32 {
			c, err := a.dial(port(a.server).String(), a.from)
			if err != nil {
				return err
			}
			// As above.
			_ = tls.Client(c, config).HandshakeContext(a.ctx)
			if err := a.closes(c); err != nil {
				return err
			}
		}
		return nil
	}
}

// expensiveKeys offers no key share but one of the curve P-521.
func expensiveKeys(a *attacker) error {
	config := tlsConfig(a.protocol)
	config.CurvePreferences = []tls.CurveID{tls.CurveP521}
	return onMany(a, func() (net.Conn, error) {
		c, err := a.dial(a.server.address(), a.from)
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

// manyConnections is the number of connections of an attack whose bound is per connection.
const manyConnections = 100

// onMany makes an attack on each of many connections from one address. None of them may last so
// long that it is closed for its age.
func onMany[C any](a *attacker, connect func() (C, error), attack func(C) error) error {
	spared := ofConnections("timeout")
	before := a.server.value(spared)
	var all errgroup.Group
	turns := make(chan struct{}, 4) // the attacker's part of handshakes must not use up the CPUs
	for range manyConnections {
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
		return fmt.Errorf("%v of %d connections have met no bound but that of time", n, manyConnections)
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
		c, err := a.dial(a.server.address(), a.from)
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

// refusedCalls makes calls with a token, or without credentials, until the connections end. The
// token may be signed with a key that the API server does not have. The server then spends no
// review on it, but the check of a signature.
func refusedCalls(token string) func(*attacker) error {
	refused := counter{"slicecast_server_refused_requests_total", ""}
	// most is how many calls may be refused, including calls in progress when a connection ends.
	const most = manyConnections * (2 + 16)
	return func(a *attacker) error {
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
		if n := a.server.reviews.Load(); err == nil && n > 0 {
			err = fmt.Errorf("the API server was asked about %d tokens", n)
		}
		return err
	}
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
	return c.flood(100_000, func(int) error { return c.framer.WriteWindowUpdate(1, 1) })
}

// longTokens sends a token that exceeds the bound on headers. The client may get a status or be cut
// off.
func longTokens(a *attacker) error {
	conn, err := a.client()
	if err != nil {
		return err
	}
	return over(streamWith(a.ctx, conn, strings.Repeat("x", 40<<10)),
		codes.Unauthenticated, codes.Internal, codes.Unavailable, codes.ResourceExhausted, codes.Unknown)
}

// anonymous makes an attack on a connection whose client has not authenticated.
func anonymous(attack func(*http2Client, *attacker) error) func(*attacker) error {
	return func(a *attacker) error {
		c, err := a.http2()
		if err != nil {
			return err
		}
		return attack(c.attend(), a)
	}
}

// known makes an attack on a connection with stream 1 in sync.
func known(attack func(*http2Client, *attacker) error) func(*attacker) error {
	return func(a *attacker) error {
		c, err := a.http2(a.certificate())
		if err != nil {
			return err
		}
		// The state fits into its windows.
		err = c.write(func() error {
			const window = 16 << 20
			return errors.Join(c.framer.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: window}),
				c.framer.WriteWindowUpdate(0, window))
		})
		if err := errors.Join(err, c.open(1), c.say(1, helloRequest(a.agent()))); err != nil {
			return err
		}
		if err := c.greeted(); err != nil {
			return err
		}
		a.begun()
		return attack(c, a)
	}
}

func emptyContinuations(c *http2Client, _ *attacker) error {
	return c.flood(100_000, func(i int) error {
		if i == 0 {
			return c.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 101, BlockFragment: c.headers("")})
		}
		return c.framer.WriteContinuation(101, false, nil)
	})
}

func largeBlock(c *http2Client, _ *attacker) error {
	return c.flood(1000, func(i int) error {
		// A name that never ends.
		fragment := append([]byte{0, 0x7f, 0xff, 0xff, 0xff, 0x0f}, make([]byte, 15<<10)...)
		if i == 0 {
			return c.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 101, BlockFragment: fragment})
		}
		return c.framer.WriteContinuation(101, false, fragment)
	})
}

func slowBlock(c *http2Client, a *attacker) error {
	err := c.write(func() error {
		return c.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 101, BlockFragment: c.headers("")})
	})
	if err != nil {
		return err
	}
	return c.closes()
}

func manySettings(c *http2Client, _ *attacker) error {
	return c.flood(1, func(int) error { return c.framer.WriteSettings(make([]http2.Setting, 65)...) })
}

// frames sends all kinds of frames that request nothing.
func frames(c *http2Client, _ *attacker) error {
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

func rapidReset(c *http2Client, _ *attacker) error {
	return c.flood(100_000, func(i int) error {
		id := uint32(101 + 2*i)
		return errors.Join(
			c.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: c.headers(""), EndHeaders: true}),
			c.framer.WriteRSTStream(id, http2.ErrCodeCancel))
	})
}

func pings(c *http2Client, _ *attacker) error {
	err := c.flood(100_000, func(int) error { return c.framer.WritePing(false, [8]byte{}) })
	if err == nil && c.goAway != 0 && c.goAway != http2.ErrCodeEnhanceYourCalm {
		return fmt.Errorf("it was told %v", c.goAway)
	}
	return err
}

func emptyData(c *http2Client, _ *attacker) error {
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
	return over(stream, codes.InvalidArgument)
}

func noHelloEnds(a *attacker) error {
	stream, err := a.stream(nil)
	if err != nil {
		return err
	}
	a.begun()
	return over(stream, codes.Unavailable)
}

// says sends messages. The last one must end the stream.
func says(want codes.Code, messages ...func(*attacker) *pb.StreamRequest) func(*attacker) error {
	return func(a *attacker) error {
		stream, err := a.stream(nil)
		if err != nil {
			return err
		}
		for _, m := range messages {
			if stream.Send(m(a)) != nil {
				break // the stream's end says why
			}
		}
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

// synced sends messages on a stream that is in sync, until the stream ends as it must.
func synced(most int, want codes.Code, message func(i int) *pb.StreamRequest, or ...codes.Code) func(*attacker) error {
	return func(a *attacker) error {
		stream, err := a.synced()
		if err != nil {
			return err
		}
		return floods(stream, most, message, append(or, want)...)
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
		one := newAttacker(a.ctx, a.server, a.protocol)
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
	first, err := a.synced()
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
	second, err := a.synced()
	if err != nil {
		return err
	}
	return floods(second, atOnce, again, codes.ResourceExhausted)
}

// unreadResyncs requests buckets of every shard, and reads no answer while it may request more.
func unreadResyncs(a *attacker) error {
	stream, err := a.synced()
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
	err = over(stream, codes.ResourceExhausted)
	<-asked
	return err
}

func nacks(a *attacker) error {
	stream, err := a.synced()
	if err != nil {
		return err
	}
	for i := range 256 + 100 {
		err := stream.Send(&pb.StreamRequest{Message: &pb.StreamRequest_Nack{Nack: &pb.Nack{
			Key: &pb.ObjectKey{Kind: pb.ObjectKind_OBJECT_KIND_SERVICE, Namespace: "default", Name: fmt.Sprint("none-", i)}, Reason: "no reason",
		}}})
		if err != nil {
			return err
		}
	}
	return nil
}

func streamsOfOneNode(a *attacker) error {
	first, err := a.synced()
	if err != nil {
		return err
	}
	if _, err := a.synced(); err != nil {
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
	stream, err := a.synced()
	if err != nil {
		return err
	}
	return over(stream, codes.Unavailable)
}

// whileDraining makes the server drain once the attack has begun.
func whileDraining(attack func(*attacker) error) func(*attacker) error {
	return func(a *attacker) error {
		a.begun = a.server.drain
		return attack(a)
	}
}
