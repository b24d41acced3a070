// This file is the API server: etcd, which holds the objects and remembers events until they are
// compacted, and API servers in front of it, which may be behind, silent, or gone.
package simulate

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// freshTime is how long an API server waits for its watch cache to reach a version.
const freshTime = 3 * time.Second

// bookmarkInterval is how often an API server tells a watch how far it has come.
const bookmarkInterval = time.Minute

// These are the resources, by the last part of their paths.
const services, endpointSlices, nodesResource, serviceCIDRs = "services", "endpointslices", "nodes", "servicecidrs"

var listKinds = map[string]metav1.TypeMeta{
	services:       {APIVersion: "v1", Kind: "ServiceList"},
	endpointSlices: {APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSliceList"},
	nodesResource:  {APIVersion: "v1", Kind: "NodeList"},
	serviceCIDRs:   {APIVersion: "networking.k8s.io/v1", Kind: "ServiceCIDRList"},
}

var kinds = map[string]metav1.TypeMeta{
	services:       {APIVersion: "v1", Kind: "Service"},
	endpointSlices: {APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
	nodesResource:  {APIVersion: "v1", Kind: "Node"},
	serviceCIDRs:   {APIVersion: "networking.k8s.io/v1", Kind: "ServiceCIDR"},
}

// etcd holds the objects as JSON. Nothing that it has returned changes.
type etcd struct {
	mu      sync.Mutex // guards all fields
	version uint64
	objects map[string]map[string]json.RawMessage // by resource and name
	events  []event
	oldest  uint64 // watches from earlier versions have expired
	changed chan struct{}
}

type event struct {
	version  uint64
	resource string
	line     []byte // as watches send it
}

// backup is the state of etcd at one moment.
type backup struct {
	version uint64
	objects map[string]map[string]json.RawMessage
}

func newEtcd() *etcd {
	return &etcd{version: 100, oldest: 100, objects: make(map[string]map[string]json.RawMessage), changed: make(chan struct{})}
}

func (e *etcd) signalLocked() {
	close(e.changed)
	e.changed = make(chan struct{})
}

// put writes an object that encode returns for its version. A nil encode removes the object.
func (e *etcd) put(resource, name string, encode func(version uint64) any) {
	e.mu.Lock()
	defer e.mu.Unlock()
	all := e.objects[resource]
	if all == nil {
		all = make(map[string]json.RawMessage)
		e.objects[resource] = all
	}
	old, had := all[name]
	if encode == nil && !had {
		return
	}
	e.version++
	var kind string
	var object json.RawMessage
	switch {
	case encode == nil:
		delete(all, name)
		kind, object = "DELETED", withVersion(old, e.version)
	case had:
		kind, object = "MODIFIED", mustJSON(encode(e.version))
		all[name] = object
	default:
		kind, object = "ADDED", mustJSON(encode(e.version))
		all[name] = object
	}
	e.events = append(e.events, event{e.version, resource, watchLine(kind, object)})
	if len(e.events) > 4096 {
		e.oldest = e.events[2048].version
		e.events = slices.Clone(e.events[2048:])
	}
	e.signalLocked()
}

// withVersion returns an object with another resourceVersion, as the event of its removal has it.
func withVersion(object json.RawMessage, version uint64) json.RawMessage {
	var o map[string]any
	if err := json.Unmarshal(object, &o); err != nil {
		panic(err)
	}
	o["metadata"].(map[string]any)["resourceVersion"] = fmt.Sprint(version)
	return mustJSON(o)
}

func mustJSON(v any) json.RawMessage {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return b
}

func watchLine(kind string, object json.RawMessage) []byte {
	return fmt.Appendf(nil, "{\"type\":%q,\"object\":%s}\n", kind, object)
}

// compact forgets all events.
func (e *etcd) compact() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.version++
	e.oldest, e.events = e.version, nil
	e.signalLocked()
}

func (e *etcd) backup() *backup {
	e.mu.Lock()
	defer e.mu.Unlock()
	b := &backup{e.version, make(map[string]map[string]json.RawMessage)}
	for resource, all := range e.objects {
		b.objects[resource] = maps.Clone(all)
	}
	return b
}

// restore brings back an earlier state. With bump, the version goes on far above all earlier ones,
// as Kubernetes recommends. Otherwise it goes back, too.
func (e *etcd) restore(b *backup, bump bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for resource := range e.objects {
		e.objects[resource] = maps.Clone(b.objects[resource])
		if e.objects[resource] == nil {
			e.objects[resource] = make(map[string]json.RawMessage)
		}
	}
	if bump {
		e.version += 1_000_000
	} else {
		e.version = b.version
	}
	e.oldest, e.events = e.version, nil
	e.signalLocked()
}

// apiServer answers requests from etcd. It listens on a host of its own.
//
// Invariants:
//
//  1. A list is of one version, and at least as new as the resourceVersion that it is asked for,
//     except for stale lists, which only connections get that were open when staleness began.
//  2. A watch sends all events of its resource from its version on, in order, or ends.
//  3. While it is held, it answers from the state at which it was held, except that a list without
//     a resourceVersion is of etcd's present state.
type apiServer struct {
	etcd    *etcd
	address netip.AddrPort
	network *network

	process *process
	serving sync.WaitGroup

	mu   sync.Mutex // guards the fields below
	held *backup    // what its watch cache has while it is held; nil means what etcd has
	// stale is what lists answer over the connections up to staleUntil, if not nil: a load balancer
	// leads these to a replica that is behind.
	stale              *backup
	opened, staleUntil int
	// plain makes it refuse streamed lists, as API servers did before Kubernetes 1.34.
	plain bool
	// endless makes streamed lists lack the bookmark at their end.
	endless bool
	changed chan struct{}
	// broken ends the watches that are open.
	broken chan struct{}
	// closed is the process's end, which handlers wait for.
	closed chan struct{}
}

func (a *apiServer) start() {
	a.process = a.network.process(a.address.Addr().String())
	a.mu.Lock()
	a.changed, a.broken, a.closed = make(chan struct{}), make(chan struct{}), make(chan struct{})
	a.held, a.stale, a.endless = nil, nil, false
	a.mu.Unlock()
	l, server := a.process.listen(a.address), &http.Server{Handler: a, Protocols: overHTTP2(), ConnContext: a.number}
	a.serving.Go(func() { _ = server.Serve(l) })
}

// connectionKey is the key in a request's context of the number of its connection.
type connectionKey struct{}

// number numbers a connection.
func (a *apiServer) number(ctx context.Context, _ net.Conn) context.Context {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.opened++
	return context.WithValue(ctx, connectionKey{}, a.opened)
}

// overHTTP2 returns the protocols of API servers and their clients.
func overHTTP2() *http.Protocols {
	p := new(http.Protocols)
	p.SetUnencryptedHTTP2(true)
	return p
}

// newTransport returns what a process reaches API servers with. Like client-go's own transport, it
// finds within 45 s that a connection is dead, and tries for 30 s to connect.
func newTransport(p *process) *http.Transport {
	return &http.Transport{
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
			defer cancel()
			return p.dial(ctx, network, address)
		},
		Protocols: overHTTP2(),
		HTTP2:     &http.HTTP2Config{SendPingTimeout: 30 * time.Second, PingTimeout: 15 * time.Second},
	}
}

// kill ends the process. Its clients see resets.
func (a *apiServer) kill() {
	if a.process.hasEnded() {
		return
	}
	a.process.kill()
	close(a.closed)
	// Close would end the connections in no particular order, and they are broken already.
	a.serving.Wait()
}

func (a *apiServer) change(f func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	f()
	close(a.changed)
	a.changed = make(chan struct{})
}

// hold keeps its watch cache from seeing what happens from now on. It reports whether that has
// changed.
func (a *apiServer) hold(on bool) (changed bool) {
	now := a.etcd.backup()
	a.change(func() {
		if changed = on != (a.held != nil); !changed {
			return
		}
		if a.held = nil; on {
			a.held = now
		}
	})
	return changed
}

// breakWatches ends all open watches.
func (a *apiServer) breakWatches() {
	a.change(func() {
		close(a.broken)
		a.broken = make(chan struct{})
	})
}

// ServeHTTP implements http.Handler.
func (a *apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	resource := r.URL.Path[strings.LastIndexByte(r.URL.Path, '/')+1:]
	if listKinds[resource].Kind == "" || r.Method != http.MethodGet {
		refuse(w, failure(http.StatusNotFound, metav1.StatusReasonNotFound))
		return
	}
	w.Header().Set("Content-Type", "application/json")
	if query.Get("watch") == "" {
		a.list(w, r, resource)
		return
	}
	from, _ := strconv.ParseUint(query.Get("resourceVersion"), 10, 64)
	seconds, _ := strconv.Atoi(query.Get("timeoutSeconds"))
	a.watch(w, r, watchRequest{
		resource: resource, from: from, latest: query.Get("resourceVersion") == "", initial: query.Get("sendInitialEvents") == "true", lifetime: time.Duration(seconds) * time.Second,
	})
}

func failure(code int, reason metav1.StatusReason) *metav1.Status {
	return &metav1.Status{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"},
		Status:   metav1.StatusFailure, Code: int32(code), Reason: reason, Message: string(reason),
	}
}

func refuse(w http.ResponseWriter, s *metav1.Status) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(int(s.Code))
	_, _ = w.Write(mustJSON(s))
}

// tooLarge refuses a request for a resourceVersion that the API server has not reached.
func tooLarge(w http.ResponseWriter) {
	s := failure(http.StatusGatewayTimeout, metav1.StatusReasonTimeout)
	s.Details = &metav1.StatusDetails{Causes: []metav1.StatusCause{{Type: metav1.CauseTypeResourceVersionTooLarge}}}
	refuse(w, s)
}

// fresh waits until the watch cache has reached a version, and reports whether it has. An API
// server does not wait for longer than freshTime.
func (a *apiServer) fresh(r *http.Request, version uint64) bool {
	late := time.NewTimer(freshTime)
	defer late.Stop()
	for {
		a.etcd.mu.Lock()
		a.mu.Lock()
		at, moved, changed, closed := a.etcd.version, a.etcd.changed, a.changed, a.closed
		if a.held != nil {
			at = a.held.version
		}
		a.mu.Unlock()
		a.etcd.mu.Unlock()
		if at >= version {
			return true
		}
		select {
		case <-moved:
		case <-changed:
		case <-late.C:
			return false
		case <-closed:
			return false
		case <-r.Context().Done():
			return false
		}
	}
}

// latest returns etcd's version.
func (a *apiServer) latest() uint64 {
	a.etcd.mu.Lock()
	defer a.etcd.mu.Unlock()
	return a.etcd.version
}

// content returns what a list answers: what the watch cache has, or what etcd has.
func (a *apiServer) content(r *http.Request, resource string, cached bool) (objects []json.RawMessage, version uint64) {
	a.etcd.mu.Lock()
	defer a.etcd.mu.Unlock()
	a.mu.Lock()
	defer a.mu.Unlock()
	all, version := a.etcd.objects[resource], a.etcd.version
	if cached && a.held != nil {
		all, version = a.held.objects[resource], a.held.version
	}
	if a.stale != nil && r.Context().Value(connectionKey{}).(int) <= a.staleUntil {
		all, version = a.stale.objects[resource], a.stale.version
	}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		objects = append(objects, all[name])
	}
	return objects, version
}

// beStale makes lists over the present connections answer an earlier state, until it is nil.
func (a *apiServer) beStale(b *backup) {
	a.change(func() { a.stale, a.staleUntil = b, a.opened })
}

// beEndless makes streamed lists lack their end, or lets them have one. It reports whether that has
// changed.
func (a *apiServer) beEndless(on bool) (changed bool) {
	a.change(func() { changed, a.endless = a.endless != on, on })
	return changed
}

// list answers a list. One without a resourceVersion is of etcd's present state. If the watch cache
// does not reach that in time, the API server asks etcd.
func (a *apiServer) list(w http.ResponseWriter, r *http.Request, resource string) {
	version, limit := r.URL.Query().Get("resourceVersion"), r.URL.Query().Get("limit")
	wanted, _ := strconv.ParseUint(version, 10, 64)
	if version == "" {
		wanted = a.latest()
	}
	cached := a.fresh(r, wanted)
	objects, at := a.content(r, resource, cached || version != "")
	if version != "" && wanted > at {
		tooLarge(w)
		return
	}
	if limit == "1" && len(objects) > 1 { // only its version is wanted
		objects = objects[:1]
	}
	list := struct {
		metav1.TypeMeta `json:",inline"`
		metav1.ListMeta `json:"metadata"`
		Items           []json.RawMessage `json:"items"`
	}{listKinds[resource], metav1.ListMeta{ResourceVersion: fmt.Sprint(at)}, objects}
	if list.Items == nil {
		list.Items = []json.RawMessage{}
	}
	_, _ = w.Write(mustJSON(list))
}

type watchRequest struct {
	resource string
	from     uint64
	latest   bool // from etcd's present version, rather than from
	initial  bool
	lifetime time.Duration
}

func bookmark(resource string, version uint64, end bool) []byte {
	o := metav1.PartialObjectMetadata{TypeMeta: kinds[resource], ObjectMeta: metav1.ObjectMeta{ResourceVersion: fmt.Sprint(version)}}
	if end {
		o.Annotations = map[string]string{metav1.InitialEventsAnnotationKey: "true"}
	}
	return watchLine("BOOKMARK", mustJSON(o))
}

func (a *apiServer) watch(w http.ResponseWriter, r *http.Request, q watchRequest) {
	send := func(line []byte) { _, _ = w.Write(line) }
	a.mu.Lock()
	plain, endless, broken, closed := a.plain, a.endless, a.broken, a.closed
	a.mu.Unlock()
	if q.initial && plain {
		refuse(w, failure(http.StatusUnprocessableEntity, metav1.StatusReasonInvalid))
		return
	}
	if q.initial {
		if q.latest {
			q.from = a.latest()
		}
		if !a.fresh(r, q.from) {
			tooLarge(w)
			return
		}
		objects, version := a.content(r, q.resource, true)
		for _, o := range objects {
			send(watchLine("ADDED", o))
		}
		if !endless {
			send(bookmark(q.resource, version, true))
		}
		q.from = version
	}
	var end <-chan time.Time
	if q.lifetime > 0 {
		t := time.NewTimer(q.lifetime)
		defer t.Stop()
		end = t.C
	}
	beat := time.NewTicker(bookmarkInterval)
	defer beat.Stop()
	for {
		lines, at, changed, more, err := a.next(q)
		if err != nil {
			send(watchLine("ERROR", mustJSON(err)))
			return
		}
		q.from = at
		for _, line := range lines {
			send(line)
		}
		w.(http.Flusher).Flush()
		select {
		case <-r.Context().Done():
			return
		case <-closed:
			return
		case <-broken:
			return
		case <-end:
			return
		case <-changed:
		case <-more:
		case <-beat.C:
			send(bookmark(q.resource, q.from, false))
		}
	}
}

// next returns the events of a watch that are due, and the version that it has come to then.
func (a *apiServer) next(q watchRequest) (lines [][]byte, at uint64, changed, more <-chan struct{}, failed *metav1.Status) {
	e := a.etcd
	e.mu.Lock()
	defer e.mu.Unlock()
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case q.from > e.version: // silent until etcd has come there
		return nil, q.from, e.changed, a.changed, nil
	case a.held != nil && q.from >= a.held.version:
		// The watch cache knows of nothing newer, whatever etcd has forgotten.
		return nil, q.from, e.changed, a.changed, nil
	case q.from < e.oldest:
		return nil, 0, nil, nil, failure(http.StatusGone, metav1.StatusReasonExpired)
	}
	until := e.version
	if a.held != nil {
		until = min(until, a.held.version)
	}
	at = max(q.from, until)
	first, _ := slices.BinarySearchFunc(e.events, q.from+1, func(x event, v uint64) int {
		switch {
		case x.version < v:
			return -1
		case x.version > v:
			return 1
		}
		return 0
	})
	for _, x := range e.events[first:] {
		if x.version > until {
			break
		}
		if x.resource == q.resource {
			lines = append(lines, x.line)
		}
	}
	return lines, at, e.changed, a.changed, nil
}
