// Package apiserver measures what a Kubernetes API server pays for distribution without Slicecast.
// It has nodes that watch the API server as kube-proxies do, and a writer that makes a scenario's
// changes as the EndpointSlice controller would. The writer can also feed Slicecast servers that
// watch a real API server.
package apiserver

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"path"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"

	"github.com/slicecast/slicecast/internal/source"
	"github.com/slicecast/slicecast/loadtest/fleet"
	"github.com/slicecast/slicecast/loadtest/generate"
)

const (
	// protocol is the name of HTTP/2 in TLS.
	protocol = "h2"
	// maxEvent is the maximum size of an event, in bytes. etcd rejects objects of more than 1.5
	// MiB.
	maxEvent = 4 << 20
	// readBuffer is the size of read buffers, in bytes. It is small because there are thousands of
	// connections. TLS has a buffer of its own.
	readBuffer = 4 << 10
	// maxList is the maximum size of a list, in bytes. The watcher holds the whole list in memory.
	maxList = 1 << 30
	// backoff is the minimum pause before a watch is reopened, as in reflectors. The maximum is
	// twice as long.
	backoff = 800 * time.Millisecond
)

// WatchOptions configure Watchers. All fields but ServiceProxyName and Connecting are required.
type WatchOptions struct {
	Config *rest.Config
	// ServiceProxyName is the value of the label that watched Services have. If it is empty,
	// Services without the label are watched.
	ServiceProxyName string
	// Members are the nodes. The Index of each is its position.
	Members []*fleet.Member
	// Connecting is the maximum number of nodes that are between connecting and their first state.
	// 0 means no limit.
	Connecting int
	Logger     *slog.Logger
}

// Watchers are nodes that watch Services, EndpointSlices and their own Node, in protobuf and with
// kube-proxy's selectors. Each node has a connection of its own. A watch starts with a streamed
// list; if the API server refuses to stream it, the node fetches it. Equal bytes are decoded once
// for all nodes, to leave the CPUs to the process that is measured.
//
// API servers of Kubernetes 1.37 and later compress watches that start with a streamed list
// (feature gate WatchListCompression). After 5 to 10 minutes they end such a watch, and the watch
// after it is not compressed. A node does not wait for that: it reopens a compressed watch as soon
// as it has the list, so that changes are measured in the state in which clusters are most of the
// time. A node has the state once the second watch is open.
type Watchers struct {
	fleet.Group
	options WatchOptions
	tls     *tls.Config
	base    *url.URL
	decoder *decoder
	all     []*watcher
	// Fetched is the number of lists that nodes have fetched because the API server refused to
	// stream them. Compressed is the number of streamed lists that nodes received compressed.
	Fetched, Compressed atomic.Int64
	refused             sync.Once // limits the log to the first refusal
	// complaints limits the log, because thousands of watches may fail in the same way.
	complaints rate.Sometimes
}

type watcher struct {
	*fleet.Member
	client    *http.Client
	transport *http.Transport
	streams   []*stream
	// pending is the number of streams that do not have the state yet.
	pending atomic.Int32
}

// stream is a watch of one resource.
//
// Invariants, whenever mu is not held:
//
//  1. digest is the sum of held, so equal digests mean equal objects at equal versions.
//  2. If resourceVersion is not empty, held is the complete state of that version.
//  3. had, if not nil, contains the digest of every complete state that the stream has had.
type stream struct {
	watcher *watcher
	path    string
	query   url.Values

	mu sync.Mutex // guards the fields below
	// resourceVersion is the version from which the watch continues: that of a complete list and
	// the events after it. If it is empty, the watch starts with a list.
	resourceVersion string
	synced          bool
	open            bool     // whether a watch is open
	held            []uint64 // versions of objects, by the number of the object
	digest          uint64   // sum of held
	failed          error    // error of the last watch; nil if it is open or has ended normally
	// had contains the digests of all complete states so far if the stream belongs to a reference.
	// It is nil for streams of nodes.
	had map[uint64]struct{}
}

// NewWatchers returns watchers that do not connect before Run.
func NewWatchers(o WatchOptions) (*Watchers, error) {
	w := &Watchers{Group: fleet.Group{Members: o.Members}, options: o, decoder: newDecoder(), complaints: rate.Sometimes{First: 1, Interval: 10 * time.Second}}
	var err error
	if w.base, _, err = rest.DefaultServerUrlFor(o.Config); err != nil {
		return nil, err
	}
	if w.tls, err = rest.TLSConfigFor(o.Config); err != nil {
		return nil, err
	}
	if w.tls == nil {
		return nil, fmt.Errorf("the API server %s does not use TLS: use an https address", o.Config.Host)
	}
	w.tls.NextProtos = []string{protocol}
	if w.tls.ServerName == "" {
		w.tls.ServerName = w.base.Hostname()
	}
	for _, m := range o.Members {
		n, err := w.newWatcher(m)
		if err != nil {
			return nil, err
		}
		w.all = append(w.all, n)
	}
	w.AwaitSync(nil)
	return w, nil
}

func (w *Watchers) newWatcher(m *fleet.Member) (*watcher, error) {
	n := &watcher{Member: m}
	n.transport = &http.Transport{
		DialTLSContext:    func(ctx context.Context, _, _ string) (net.Conn, error) { return n.dial(ctx, w) },
		ForceAttemptHTTP2: true, MaxConnsPerHost: 1, ReadBufferSize: readBuffer, WriteBufferSize: readBuffer,
	}
	transport, err := rest.HTTPWrappersForConfig(w.options.Config, n.transport)
	if err != nil {
		return nil, err
	}
	n.client = &http.Client{Transport: transport}
	n.streams = []*stream{
		{watcher: n, path: "/api/v1/services", query: selecting(source.SelectServices(w.options.ServiceProxyName))},
		{watcher: n, path: "/apis/discovery.k8s.io/v1/endpointslices", query: selecting(source.SelectEndpointSlices())},
		{watcher: n, path: "/api/v1/nodes", query: selecting(metav1.ListOptions{FieldSelector: "metadata.name=" + m.Name})},
	}
	n.pending.Store(int32(len(n.streams)))
	return n, nil
}

// selecting returns the selectors of list options as query parameters.
func selecting(o metav1.ListOptions) url.Values {
	out := url.Values{}
	for name, selector := range map[string]string{"labelSelector": o.LabelSelector, "fieldSelector": o.FieldSelector} {
		if selector != "" {
			out.Set(name, selector)
		}
	}
	return out
}

func (n *watcher) dial(ctx context.Context, w *Watchers) (net.Conn, error) {
	port := w.base.Port()
	if port == "" {
		port = "443"
	}
	raw, err := n.Dial(ctx, net.JoinHostPort(w.base.Hostname(), port))
	if err != nil {
		return nil, err
	}
	conn := tls.Client(raw, w.tls)
	if err := conn.HandshakeContext(ctx); err != nil {
		raw.Close()
		return nil, err
	}
	if conn.ConnectionState().NegotiatedProtocol != protocol {
		raw.Close()
		return nil, fmt.Errorf("the API server at %s does not support HTTP/2", w.base.Host)
	}
	n.Streams.Add(1)
	return conn, nil
}

// Run opens all watches and keeps them open until the context ends.
func (w *Watchers) Run(ctx context.Context) {
	var running sync.WaitGroup
	defer running.Wait()
	w.Connect(ctx, w.options.Connecting, func(m *fleet.Member) {
		for _, s := range w.all[m.Index].streams {
			running.Go(func() { w.follow(ctx, s) })
		}
	})
}

// Cut cuts all connections.
func (w *Watchers) Cut() {
	for _, n := range w.all {
		// All streams of the node reconnect, so all of them are awaited.
		n.pending.Store(int32(len(n.streams)))
		for _, s := range n.streams {
			s.mu.Lock()
			s.synced = false
			s.mu.Unlock()
		}
	}
	w.Group.Cut()
}

// Up reports whether all watches of a node are open and have the state.
func (w *Watchers) Up(m *fleet.Member) bool {
	for _, s := range w.all[m.Index].streams {
		s.mu.Lock()
		up := s.open && s.synced
		s.mu.Unlock()
		if !up {
			return false
		}
	}
	return true
}

// On returns true, because there is only one server.
func (w *Watchers) On(*fleet.Member, string) bool { return true }

// follow keeps a watch open. If the API server refuses to stream a list, follow fetches that list
// and asks for a streamed list the next time, like reflectors.
func (w *Watchers) follow(ctx context.Context, s *stream) {
	fetch := false
	for {
		err := w.watch(ctx, s, fetch)
		if ctx.Err() != nil {
			return
		}
		fetch = errors.Is(err, errNotStreamed)
		switch {
		case fetch:
			w.refused.Do(func() {
				w.options.Logger.Warn("API server refused to stream a list; fetching it (further refusals are not logged)",
					"node", s.watcher.Name, "path", s.path, "err", err)
			})
			continue
		case errors.Is(err, errCompressed):
			continue
		case !errors.Is(err, io.EOF): // io.EOF is the normal end of a watch
			s.mu.Lock()
			s.failed = err
			s.mu.Unlock()
			w.complaints.Do(func() {
				w.options.Logger.Warn("Watch failed; reopening it (similar errors are logged rarely)",
					"node", s.watcher.Name, "path", s.path, "err", err)
			})
		}
		_ = generate.Await(ctx, time.Now().Add(backoff+rand.N(backoff)))
	}
}

var (
	// errNotStreamed means that the API server refuses to stream a list.
	errNotStreamed = errors.New("the API server refuses to stream the list")
	// errCompressed ends a compressed watch once its list is complete.
	errCompressed = errors.New("the API server compresses this watch")
)

// refusal classifies an error that the API server returns instead of a streamed list or of the rest
// of one. Like reflectors, it wraps errNotStreamed for any API status, because API servers refuse
// with different ones; those on an old etcd use an internal error. It returns other errors
// unchanged: that the API server is busy, asks for a retry later, which client-go handles below
// reflectors, or has lost the version.
func refusal(err error) error {
	status := apierrors.APIStatus(nil)
	_, later := apierrors.SuggestsClientDelay(err)
	if !errors.As(err, &status) || later || apierrors.IsTooManyRequests(err) || apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
		return err
	}
	return fmt.Errorf("%w: %w", errNotStreamed, err)
}

// from returns the version from which the next watch continues. It is empty if the next watch
// starts with a list.
func (s *stream) from() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.resourceVersion
}

// watch opens a watch and reads it to its end. If it starts with a list, the list is streamed, or
// fetched if fetch is set.
func (w *Watchers) watch(ctx context.Context, s *stream, fetch bool) error {
	if s.from() == "" {
		// Objects of an interrupted list may be gone by now, and no event would say so.
		s.forget()
		if fetch {
			if err := w.list(ctx, s); err != nil {
				return err
			}
		}
	}
	from := s.from()
	query := url.Values{"watch": {"true"}, "allowWatchBookmarks": {"true"}}
	if from == "" {
		query.Set("sendInitialEvents", "true")
		query.Set("resourceVersionMatch", string(metav1.ResourceVersionMatchNotOlderThan))
	}
	query.Set("resourceVersion", from)
	response, err := w.get(ctx, s, query, runtime.ContentTypeProtobuf+";stream=watch")
	if err != nil && from == "" {
		err = refusal(err)
	}
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.Uncompressed && s.had == nil {
		w.Compressed.Add(1)
	}
	s.setOpen(true)
	defer s.setOpen(false)
	if from != "" {
		w.synced(s) // the watch continues from the state that it holds
	}
	return w.read(s, response)
}

// read reads the events of a watch to its end, or to the end of its list if the watch is
// compressed.
func (w *Watchers) read(s *stream, response *http.Response) error {
	r := bufio.NewReaderSize(response.Body, readBuffer)
	var length [4]byte // length prefix of an event
	var frame []byte
	for {
		if _, err := io.ReadFull(r, length[:]); err != nil {
			return err
		}
		n := int(binary.BigEndian.Uint32(length[:]))
		if n > maxEvent {
			return fmt.Errorf("an event has %d bytes, which is too large", n)
		}
		if cap(frame) < n {
			frame = make([]byte, n)
		}
		frame = frame[:n]
		if _, err := io.ReadFull(r, frame); err != nil {
			return err
		}
		s.watcher.Messages.Add(int64(n))
		e, err := w.decoder.event(frame)
		if err != nil && s.from() == "" {
			err = refusal(err)
		}
		if err != nil {
			s.forget()
			return err
		}
		w.take(s, e)
		switch {
		case e.complete && response.Uncompressed:
			return errCompressed
		case e.complete:
			w.synced(s)
		}
	}
}

func (s *stream) setOpen(open bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open, s.failed = open, nil
}

func (s *stream) forget() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.resourceVersion = ""
	clear(s.held)
	s.digest = 0
}

// list fetches all objects in one response. Nodes accept what the API server has in its cache; a
// reference requires the latest state.
func (w *Watchers) list(ctx context.Context, s *stream) error {
	query := url.Values{}
	if s.had == nil {
		query.Set("resourceVersion", "0")
	}
	response, err := w.get(ctx, s, query, runtime.ContentTypeProtobuf)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	content, err := io.ReadAll(io.LimitReader(response.Body, maxList))
	if err != nil {
		return err
	}
	if s.had == nil {
		w.Fetched.Add(1)
	}
	s.watcher.Messages.Add(int64(len(content)))
	l, err := w.decoder.list(content)
	if err != nil {
		return err
	}
	for _, e := range l.events {
		w.take(s, e)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.atLocked(l.resourceVersion)
	return nil
}

// get sends a request and returns the response, whose status is 200.
func (w *Watchers) get(ctx context.Context, s *stream, query url.Values, accept string) (*http.Response, error) {
	u := *w.base
	u.Path = strings.TrimSuffix(u.Path, "/") + s.path
	for name, values := range s.query {
		query[name] = values
	}
	u.RawQuery = query.Encode()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return nil, err
	}
	request.Header.Set("Accept", accept)
	request.Header.Set("User-Agent", "slicecast-loadtest")
	response, err := s.watcher.client.Do(request)
	if err != nil {
		return nil, err
	}
	if response.StatusCode != http.StatusOK {
		defer response.Body.Close()
		// The error of ReadAll does not matter: the message is what has arrived.
		said, _ := io.ReadAll(io.LimitReader(response.Body, readBuffer))
		if response.StatusCode == http.StatusGone {
			s.forget()
		}
		later, _ := strconv.Atoi(response.Header.Get("Retry-After"))
		return nil, apierrors.NewGenericServerResponse(response.StatusCode, "watch", schema.GroupResource{Resource: path.Base(s.path)}, "",
			strings.ToValidUTF8(string(said), "?"), later, true)
	}
	return response, nil
}

// take applies an event to a stream, and records the latency of a change.
func (w *Watchers) take(s *stream, e *event) {
	now := time.Now()
	changed := s.apply(e)
	if window := w.Window(); window != nil && changed && s.had == nil {
		window.Object(s.watcher.Member, e.key, e.triggerMS, e.version == 0, now)
	}
}

func (s *stream) apply(e *event) (changed bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !e.bookmark {
		for len(s.held) <= e.number {
			s.held = append(s.held, 0)
		}
		changed = s.held[e.number] != e.version
		s.digest += e.version - s.held[e.number]
		s.held[e.number] = e.version
	}
	if e.complete || s.resourceVersion != "" {
		s.atLocked(e.resourceVersion)
	}
	return changed
}

// atLocked records that the stream holds the complete state of a version.
func (s *stream) atLocked(resourceVersion string) {
	s.resourceVersion = resourceVersion
	if s.had != nil {
		s.had[s.digest] = struct{}{}
	}
}

// synced records that a stream has the state.
func (w *Watchers) synced(s *stream) {
	s.mu.Lock()
	first := !s.synced
	s.synced = true
	s.mu.Unlock()
	if !first || s.had != nil || s.watcher.pending.Add(-1) > 0 {
		return
	}
	w.Reached(s.watcher.Member)
}
