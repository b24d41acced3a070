// This file is an API server in memory, which fails in ways in which a real one fails too seldom
// for a test.
package kube

import (
	"encoding/json"
	"encoding/pem"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
)

// api is an API server that keeps its objects in memory. Tests make it fail in ways that a real one
// fails too seldom.
type api struct {
	*httptest.Server

	mu      sync.Mutex
	rv      uint64
	oldest  uint64 // watches from earlier resourceVersions have expired
	objects map[string]map[string]runtime.Object
	events  []event
	changed chan struct{}
	// fault, if set, may answer a request instead of the API server.
	fault    func(w http.ResponseWriter, r *http.Request) bool
	requests []*http.Request
	// beat is the time between two bookmarks of a watch; 0 means that there are none.
	beat    time.Duration
	expired chan struct{} // closed when open watches end
}

type event struct {
	rv       uint64
	resource string
	kind     string
	object   runtime.Object
}

func newAPI(t *testing.T) *api {
	a := &api{rv: 100, objects: map[string]map[string]runtime.Object{}, changed: make(chan struct{}), expired: make(chan struct{})}
	a.Server = httptest.NewServer(a)
	t.Cleanup(func() {
		a.CloseClientConnections()
		a.Close()
	})
	return a
}

// overHTTP2 serves the API over TLS and HTTP/2, where all requests of a client share a connection.
func (a *api) overHTTP2(t *testing.T) *rest.Config {
	s := httptest.NewUnstartedServer(a)
	s.EnableHTTP2 = true
	s.StartTLS()
	t.Cleanup(func() {
		s.CloseClientConnections()
		s.Close()
	})
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})
	return &rest.Config{Host: s.URL, QPS: 1000, Burst: 1000, TLSClientConfig: rest.TLSClientConfig{CAData: ca}}
}

func (a *api) config() *rest.Config { return &rest.Config{Host: a.URL, QPS: 1000, Burst: 1000} }

func resourceOf(o runtime.Object) string {
	switch o.(type) {
	case *corev1.Service:
		return "services"
	case *discoveryv1.EndpointSlice:
		return "endpointslices"
	case *networkingv1.ServiceCIDR:
		return "servicecidrs"
	}
	return "nodes"
}

// put adds or changes an object.
func (a *api) put(o runtime.Object) {
	a.mu.Lock()
	defer a.mu.Unlock()
	o = o.DeepCopyObject()
	m, resource := o.(metav1.Object), resourceOf(o)
	kind := "MODIFIED"
	key := m.GetNamespace() + "/" + m.GetName()
	if a.objects[resource] == nil {
		a.objects[resource] = map[string]runtime.Object{}
	}
	if a.objects[resource][key] == nil {
		kind = "ADDED"
	}
	a.happened(kind, o)
	a.objects[resource][key] = o
}

func (a *api) delete(o runtime.Object) {
	a.mu.Lock()
	defer a.mu.Unlock()
	o = o.DeepCopyObject()
	m := o.(metav1.Object)
	delete(a.objects[resourceOf(o)], m.GetNamespace()+"/"+m.GetName())
	a.happened("DELETED", o)
}

func (a *api) happened(kind string, o runtime.Object) {
	a.rv++
	o.(metav1.Object).SetResourceVersion(fmt.Sprint(a.rv))
	a.events = append(a.events, event{a.rv, resourceOf(o), kind, o})
	close(a.changed)
	a.changed = make(chan struct{})
}

// compact makes all watches from the past expire.
func (a *api) compact() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.rv++
	a.oldest = a.rv
}

// expire ends all watches, which cannot be resumed.
func (a *api) expire() {
	a.compact()
	a.mu.Lock()
	defer a.mu.Unlock()
	close(a.expired)
	a.expired = make(chan struct{})
}

// restore puts the API server back to an earlier resourceVersion, without objects.
func (a *api) restore(rv uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.rv, a.oldest, a.objects, a.events = rv, rv, map[string]map[string]runtime.Object{}, nil
}

func (a *api) fail(f func(w http.ResponseWriter, r *http.Request) bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.fault = f
}

// seen returns the requests so far for which want returns true.
func (a *api) seen(want func(*http.Request) bool) []*http.Request {
	a.mu.Lock()
	defer a.mu.Unlock()
	var rs []*http.Request
	for _, r := range a.requests {
		if want(r) {
			rs = append(rs, r)
		}
	}
	return rs
}

func isWatch(r *http.Request) bool    { return r.FormValue("watch") == "true" }
func isStream(r *http.Request) bool   { return r.FormValue("sendInitialEvents") == "true" }
func isServices(r *http.Request) bool { return strings.HasSuffix(r.URL.Path, "/services") }

func refuse(w http.ResponseWriter, code int, reason metav1.StatusReason) bool {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(status(code, reason))
	return true
}

func status(code int, reason metav1.StatusReason) *metav1.Status {
	return &metav1.Status{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"},
		Status:   metav1.StatusFailure, Code: int32(code), Reason: reason, Message: string(reason),
	}
}

func (a *api) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	_ = r.ParseForm()
	a.mu.Lock()
	a.requests = append(a.requests, r)
	fault := a.fault
	a.mu.Unlock()
	if fault != nil && fault(w, r) {
		return
	}
	if isWatch(r) {
		a.watch(w, r)
	} else {
		a.list(w, r)
	}
}

type listed struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata"`
	Items           []runtime.Object `json:"items"`
}

var listKinds = map[string]metav1.TypeMeta{
	"services":       {APIVersion: "v1", Kind: "ServiceList"},
	"endpointslices": {APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSliceList"},
	"nodes":          {APIVersion: "v1", Kind: "NodeList"},
	"servicecidrs":   {APIVersion: "networking.k8s.io/v1", Kind: "ServiceCIDRList"},
}

func lastSegment(path string) string { return path[strings.LastIndexByte(path, '/')+1:] }

// list answers in pages if asked to. A page's token is the number of objects before it.
func (a *api) list(w http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	defer a.mu.Unlock()
	resource := lastSegment(r.URL.Path)
	if rv, _ := strconv.ParseUint(r.FormValue("resourceVersion"), 10, 64); rv > a.rv {
		s := status(http.StatusGatewayTimeout, metav1.StatusReasonTimeout)
		s.Details = &metav1.StatusDetails{Causes: []metav1.StatusCause{{Type: metav1.CauseTypeResourceVersionTooLarge}}}
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusGatewayTimeout)
		_ = json.NewEncoder(w).Encode(s)
		return
	}
	l := listed{TypeMeta: listKinds[resource], ListMeta: metav1.ListMeta{ResourceVersion: fmt.Sprint(a.rv)}, Items: []runtime.Object{}}
	for _, key := range slices.Sorted(maps.Keys(a.objects[resource])) {
		l.Items = append(l.Items, a.objects[resource][key])
	}
	skip, _ := strconv.Atoi(r.FormValue("continue"))
	l.Items = l.Items[min(skip, len(l.Items)):]
	if limit, _ := strconv.Atoi(r.FormValue("limit")); limit > 0 && len(l.Items) > limit {
		l.Items, l.Continue = l.Items[:limit], fmt.Sprint(skip+limit)
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(l)
}

func (a *api) watch(w http.ResponseWriter, r *http.Request) {
	resource := lastSegment(r.URL.Path)
	from, _ := strconv.ParseUint(r.FormValue("resourceVersion"), 10, 64)
	w.Header().Set("Content-Type", "application/json")
	send := func(kind string, object any) {
		_ = json.NewEncoder(w).Encode(map[string]any{"type": kind, "object": typed(object)})
		w.(http.Flusher).Flush()
	}

	w.(http.Flusher).Flush() // a watch that is accepted is answered at once
	var beat <-chan time.Time
	a.mu.Lock()
	expired := a.expired
	if a.beat > 0 {
		ticker := time.NewTicker(a.beat)
		defer ticker.Stop()
		beat = ticker.C
	}
	switch {
	case from > 0 && from < a.oldest:
		a.mu.Unlock()
		send("ERROR", status(http.StatusGone, metav1.StatusReasonExpired))
		return
	case isStream(r):
		from = a.rv
		for _, key := range slices.Sorted(maps.Keys(a.objects[resource])) {
			send("ADDED", a.objects[resource][key])
		}
		b := bookmark(resource, from)
		b.(metav1.Object).SetAnnotations(map[string]string{metav1.InitialEventsAnnotationKey: "true"})
		send("BOOKMARK", b)
	}
	for {
		for _, e := range a.events {
			if e.rv > from && e.resource == resource {
				from = e.rv
				send(e.kind, e.object)
			}
		}
		changed := a.changed
		a.mu.Unlock()
		select {
		case <-r.Context().Done():
			return
		case <-changed:
		case <-expired:
			send("ERROR", status(http.StatusGone, metav1.StatusReasonExpired))
			return
		case <-beat:
			a.mu.Lock()
			send("BOOKMARK", bookmark(resource, a.rv))
			a.mu.Unlock()
		}
		a.mu.Lock()
	}
}

func bookmark(resource string, rv uint64) runtime.Object {
	meta := metav1.ObjectMeta{ResourceVersion: fmt.Sprint(rv)}
	switch resource {
	case "services":
		return &corev1.Service{ObjectMeta: meta}
	case "endpointslices":
		return &discoveryv1.EndpointSlice{ObjectMeta: meta}
	case "servicecidrs":
		return &networkingv1.ServiceCIDR{ObjectMeta: meta}
	}
	return &corev1.Node{ObjectMeta: meta}
}

// typed sets the kind, which decoders of events need.
func typed(o any) any {
	switch o := o.(type) {
	case *corev1.Service:
		o.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Service"}
	case *discoveryv1.EndpointSlice:
		o.TypeMeta = metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"}
	case *networkingv1.ServiceCIDR:
		o.TypeMeta = metav1.TypeMeta{APIVersion: "networking.k8s.io/v1", Kind: "ServiceCIDR"}
	case *corev1.Node:
		o.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Node"}
	}
	return o
}
