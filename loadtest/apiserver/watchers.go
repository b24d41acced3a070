// Package apiserver measures what a Kubernetes API server pays for what Slicecast does: nodes that watch it as kube-proxies do,
// and a writer that makes a scenario's changes in it as the EndpointSlice controller would. The writer also feeds Slicecast
// servers that watch a real API server.
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
)

const (
	// protocol is HTTP/2, by its name in TLS.
	protocol = "h2"
	// maxEvent bounds an event: etcd does not take objects of more than 1.5 MiB.
	maxEvent = 4 << 20
	// readBuffer is small because there are thousands; TLS has a buffer of its own.
	readBuffer = 4 << 10
	// maxList bounds a list, which the watcher holds as a whole.
	maxList = 1 << 30
	// backoff is the least pause before a watch is opened again, as reflectors have it, and twice that the longest.
	backoff = 800 * time.Millisecond
)

// WatchOptions set up Watchers. All but ServiceProxyName are required.
type WatchOptions struct {
	Config *rest.Config
	// ServiceProxyName is the label of the Services that are watched; empty: those without.
	ServiceProxyName string
	// Members are the nodes, by their Index.
	Members []*fleet.Member
	// Connecting is how many nodes at most are on their way to their first state at the same time; 0: all.
	Connecting int
	Logger     *slog.Logger
}

// Watchers are nodes that watch Services, EndpointSlices and their own Node, in protobuf, with kube-proxy's selectors, each over a
// connection of its own: first they stream a list, or, where the API server refuses that, fetch one. What they get is decoded
// once for all, so that the machine is left to who is measured.
type Watchers struct {
	fleet.Group
	options WatchOptions
	tls     *tls.Config
	wrap    func(http.RoundTripper) (http.RoundTripper, error)
	base    *url.URL
	decoder *decoder
	all     []*watcher
	// fetched counts the lists that were not streamed. The first refusal is logged.
	fetched atomic.Int64
	refused sync.Once
	// compressed counts the watches whose events were compressed.
	compressed atomic.Int64
	// complaints bounds what is logged of thousands of watches that fail in the same way.
	complaints rate.Sometimes
}

// watcher is a node.
type watcher struct {
	*fleet.Member
	client    *http.Client
	transport *http.Transport
	streams   []*stream
	// pending is how many streams have still to have the state.
	pending atomic.Int32
	// place is given back when they have.
	place chan struct{}

	mu   sync.Mutex // guards what follows
	conn net.Conn   // made last
}

// stream is a watch of one resource.
type stream struct {
	watcher *watcher
	path    string
	query   url.Values

	mu sync.Mutex // guards what follows
	// resourceVersion that the watch goes on from, of a list that was complete and what came after it; empty: the watch begins
	// with a list.
	resourceVersion string
	synced          bool
	open            bool     // a watch is
	held            []uint64 // versions of objects, by their number
	digest          uint64   // sum of held
	failed          error    // why the last watch ended, or was not opened; nil: it is open, or has ended as watches do
	// had are the digests of all complete states so far, of a reference. nil: the stream is a node's, which is fixed.
	had map[uint64]struct{}
}

// NewWatchers makes watchers. Run starts them.
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
		return nil, fmt.Errorf("the API server %s is not served with TLS: use an https address", o.Config.Host)
	}
	w.tls.NextProtos = []string{protocol}
	if w.tls.ServerName == "" {
		w.tls.ServerName = w.base.Hostname()
	}
	w.wrap = func(rt http.RoundTripper) (http.RoundTripper, error) { return rest.HTTPWrappersForConfig(o.Config, rt) }
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
	transport, err := w.wrap(n.transport)
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

// selecting gives the selectors of options as a query has them.
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
		return nil, fmt.Errorf("the API server at %s does not speak HTTP/2", w.base.Host)
	}
	n.mu.Lock()
	n.conn = raw
	n.mu.Unlock()
	n.Streams.Add(1)
	return conn, nil
}

// Run opens all watches and keeps them open until the context ends.
func (w *Watchers) Run(ctx context.Context) {
	var running sync.WaitGroup
	defer running.Wait()
	atATime := w.options.Connecting
	if atATime == 0 {
		atATime = len(w.all)
	}
	places := make(chan struct{}, atATime)
	for _, n := range w.all {
		select {
		case <-ctx.Done():
			return
		case places <- struct{}{}:
		}
		n.place, n.Started = places, time.Now()
		for _, s := range n.streams {
			running.Go(func() { w.follow(ctx, s) })
		}
	}
}

// Cut ends all connections.
func (w *Watchers) Cut() {
	for _, n := range w.all {
		// All streams come again, so all are waited for.
		n.pending.Store(int32(len(n.streams)))
		for _, s := range n.streams {
			s.mu.Lock()
			s.synced = false
			s.mu.Unlock()
		}
		n.mu.Lock()
		if n.conn != nil {
			n.conn.Close()
		}
		n.mu.Unlock()
	}
}

// Up tells whether all watches of a node are open and have brought the state.
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

// On is true: there is one server.
func (w *Watchers) On(*fleet.Member, string) bool { return true }

// Fetched is how many lists nodes have fetched as the API server refused to stream them.
func (w *Watchers) Fetched() int64 { return w.fetched.Load() }

// Compressed returns how many watches of nodes had compressed events. API servers of Kubernetes 1.37 and later compress watches that
// begin with a streamed list (feature gate WatchListCompression), and not the watches that follow once such a watch has ended.
func (w *Watchers) Compressed() int64 { return w.compressed.Load() }

// follow keeps a watch open. After a refusal one list is fetched, and the next one is to be streamed again, as reflectors have it.
func (w *Watchers) follow(ctx context.Context, s *stream) {
	fetch := false
	for {
		err := w.watch(ctx, s, fetch)
		if ctx.Err() != nil {
			return
		}
		if fetch = errors.Is(err, errNotStreamed); fetch {
			w.refused.Do(func() {
				w.options.Logger.Warn("the API server refuses to stream a list, which is fetched instead, as others may be", "node", s.watcher.Name, "path", s.path, "error", err)
			})
			continue
		}
		if !errors.Is(err, io.EOF) { // as watches end now and then
			s.mu.Lock()
			s.failed = err
			s.mu.Unlock()
			w.complaints.Do(func() {
				w.options.Logger.Warn("a watch has ended with an error, and is opened again, as others may be", "node", s.watcher.Name, "path", s.path, "error", err)
			})
		}
		pause := time.NewTimer(backoff + rand.N(backoff))
		select {
		case <-ctx.Done():
		case <-pause.C:
		}
		pause.Stop()
	}
}

// errNotStreamed is an API server's refusal to stream a list.
var errNotStreamed = errors.New("the API server does not stream the list")

// refusal gives what an error says that comes instead of a streamed list, or of the rest of one. Any status is errNotStreamed, as
// it is to reflectors: API servers refuse with different ones, those on an old etcd with an internal error. Not so if the API server
// has no time just now, asks to be asked later, which client-go does below reflectors, or has lost that version of the state.
func refusal(err error) error {
	status := apierrors.APIStatus(nil)
	_, later := apierrors.SuggestsClientDelay(err)
	if !errors.As(err, &status) || later || apierrors.IsTooManyRequests(err) || apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
		return err
	}
	return fmt.Errorf("%w: %w", errNotStreamed, err)
}

// begins tells whether the next watch begins with a list.
func (s *stream) begins() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.resourceVersion == ""
}

// watch opens a watch and reads it to its end. The list that it begins with, if it does, is streamed, or else fetched.
func (w *Watchers) watch(ctx context.Context, s *stream, fetch bool) error {
	if s.begins() {
		// What is left of a list that was interrupted may be gone by now, and nothing would say so.
		s.forget()
		if fetch {
			if err := w.list(ctx, s); err != nil {
				return err
			}
		}
	}
	s.mu.Lock()
	from := s.resourceVersion
	s.mu.Unlock()
	query := url.Values{"watch": {"true"}, "allowWatchBookmarks": {"true"}}
	if from == "" {
		query.Set("sendInitialEvents", "true")
		query.Set("resourceVersionMatch", string(metav1.ResourceVersionMatchNotOlderThan))
	}
	query.Set("resourceVersion", from)
	body, err := w.get(ctx, s, query, runtime.ContentTypeProtobuf+";stream=watch")
	if err != nil && from == "" {
		err = refusal(err)
	}
	if err != nil {
		return err
	}
	defer body.Close()
	s.setOpen(true)
	defer s.setOpen(false)
	if from != "" {
		w.synced(s) // it goes on from what it holds
	}
	r := bufio.NewReaderSize(body, readBuffer)
	var length [4]byte // an event comes after its length
	var frame []byte
	for {
		if _, err := io.ReadFull(r, length[:]); err != nil {
			return err
		}
		n := int(binary.BigEndian.Uint32(length[:]))
		if n > maxEvent {
			return fmt.Errorf("an event has %d bytes", n)
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
		if err != nil && s.begins() {
			err = refusal(err)
		}
		if err != nil {
			s.forget()
			return err
		}
		w.take(s, e)
	}
}

func (s *stream) setOpen(open bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open, s.failed = open, nil
}

// forget has the next watch begin with a list.
func (s *stream) forget() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.resourceVersion = ""
	clear(s.held)
	s.digest = 0
}

// list gets all objects at once: for a node as the API server has them at hand, for a reference as they are now.
func (w *Watchers) list(ctx context.Context, s *stream) error {
	query := url.Values{}
	if s.had == nil {
		query.Set("resourceVersion", "0")
	}
	body, err := w.get(ctx, s, query, runtime.ContentTypeProtobuf)
	if err != nil {
		return err
	}
	defer body.Close()
	content, err := io.ReadAll(io.LimitReader(body, maxList))
	if err != nil {
		return err
	}
	if s.had == nil {
		w.fetched.Add(1)
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

// get sends a request and gives the body of its answer.
func (w *Watchers) get(ctx context.Context, s *stream, query url.Values, accept string) (io.ReadCloser, error) {
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
		said, _ := io.ReadAll(io.LimitReader(response.Body, readBuffer)) // what has come of it
		if response.StatusCode == http.StatusGone {
			s.forget()
		}
		later, _ := strconv.Atoi(response.Header.Get("Retry-After"))
		return nil, apierrors.NewGenericServerResponse(response.StatusCode, "watch", schema.GroupResource{Resource: path.Base(s.path)}, "", strings.ToValidUTF8(string(said), "?"), later, true)
	}
	if response.Uncompressed && query.Has("watch") && s.had == nil {
		w.compressed.Add(1)
	}
	return response.Body, nil
}

// take takes note of an event.
func (w *Watchers) take(s *stream, e *event) {
	now := time.Now()
	if !e.bookmark {
		s.mu.Lock()
		for len(s.held) <= e.number {
			s.held = append(s.held, 0)
		}
		known := s.held[e.number] == e.version
		s.digest += e.version - s.held[e.number]
		s.held[e.number] = e.version
		s.advanceLocked(e)
		s.mu.Unlock()
		if window := w.Window(); window != nil && !known && s.had == nil {
			if e.version == 0 {
				window.Removed(s.watcher.Member, e.key, now)
			} else {
				window.Slice(s.watcher.Member, e.key, e.triggerMS, now)
			}
		}
		return
	}
	s.mu.Lock()
	s.advanceLocked(e)
	s.mu.Unlock()
	if e.complete {
		w.synced(s)
	}
}

// advanceLocked takes note of how far the watch has come, from when on its list is complete.
func (s *stream) advanceLocked(e *event) {
	if e.complete || s.resourceVersion != "" {
		s.atLocked(e.resourceVersion)
	}
}

// atLocked takes note that the stream holds all as of a version.
func (s *stream) atLocked(resourceVersion string) {
	s.resourceVersion = resourceVersion
	if s.had != nil {
		s.had[s.digest] = struct{}{}
	}
}

// synced takes note that a stream has the state.
func (w *Watchers) synced(s *stream) {
	s.mu.Lock()
	first := !s.synced
	s.synced = true
	s.mu.Unlock()
	if !first || s.had != nil || s.watcher.pending.Add(-1) > 0 {
		return
	}
	w.Reached(s.watcher.Member)
	s.watcher.mu.Lock()
	place := s.watcher.place
	s.watcher.place = nil
	s.watcher.mu.Unlock()
	if place != nil {
		<-place
	}
}
