// This file is a fake API server whose responses a test scripts, for interruptions that are rare in
// a real one.
package apiserver

import (
	"encoding/binary"
	"encoding/pem"
	"net/http"
	"net/http/httptest"
	"net/url"
	"path"
	"sync"
	"testing"

	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// api is a fake API server with scripted responses, such as interruptions that are rare in real
// ones.
type api struct {
	*httptest.Server
	t *testing.T
	// answers holds the responses to requests for each resource, in order. The last one is also the
	// response to all further requests.
	answers map[string][]func(*answer)

	mu      sync.Mutex // guards the fields below
	queries map[string][]url.Values
}

func newAPI(t *testing.T, answers map[string][]func(*answer)) *api {
	a := &api{t: t, answers: answers, queries: make(map[string][]url.Values)}
	a.Server = httptest.NewUnstartedServer(a)
	a.EnableHTTP2 = true
	a.StartTLS()
	t.Cleanup(func() {
		a.CloseClientConnections()
		a.Close()
	})
	return a
}

func (a *api) config() *rest.Config {
	roots := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.Certificate().Raw})
	return &rest.Config{Host: a.URL, TLSClientConfig: rest.TLSClientConfig{CAData: roots}, QPS: -1}
}

// seen returns the queries of all requests for a resource so far.
func (a *api) seen(resource string) []url.Values {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.queries[resource]
}

// ServeHTTP implements http.Handler.
func (a *api) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	resource := path.Base(r.URL.Path)
	a.mu.Lock()
	number := len(a.queries[resource])
	a.queries[resource] = append(a.queries[resource], r.URL.Query())
	a.mu.Unlock()
	all := a.answers[resource]
	if len(all) == 0 {
		http.Error(w, "unexpected resource", http.StatusNotFound)
		return
	}
	all[min(number, len(all)-1)](&answer{ResponseWriter: w, request: r, t: a.t})
}

// answer writes the response to one request.
type answer struct {
	http.ResponseWriter
	request *http.Request
	t       *testing.T
}

// encode encodes an object in protobuf, as an API server does.
func (a *answer) encode(o runtime.Object) []byte {
	kinds, _, err := scheme.Scheme.ObjectKinds(o)
	if err != nil {
		a.t.Error(err)
		return nil
	}
	o = o.DeepCopyObject()
	o.GetObjectKind().SetGroupVersionKind(kinds[0])
	raw, err := runtime.Encode(protobuf.NewSerializer(scheme.Scheme, scheme.Scheme), o)
	if err != nil {
		a.t.Error(err)
	}
	return raw
}

// list writes a list. Clients retry after an error.
func (a *answer) list(o runtime.Object) { _, _ = a.Write(a.encode(o)) }

// send writes a watch event in protobuf. Clients retry after an error.
func (a *answer) send(kind watch.EventType, o runtime.Object) {
	raw := a.encode(o)
	event, err := (&metav1.WatchEvent{Type: string(kind), Object: runtime.RawExtension{Raw: raw}}).Marshal()
	if err != nil {
		a.t.Error(err)
		return
	}
	_, _ = a.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(event))), event...))
	a.ResponseWriter.(http.Flusher).Flush()
}

// complete writes the bookmark that ends a streamed list.
func (a *answer) complete(o metav1.Object, resourceVersion string) {
	o.SetResourceVersion(resourceVersion)
	o.SetAnnotations(map[string]string{metav1.InitialEventsAnnotationKey: "true"})
	a.send(watch.Bookmark, o.(runtime.Object))
}

// stay keeps the watch open until the client closes it.
func (a *answer) stay() {
	a.ResponseWriter.(http.Flusher).Flush()
	<-a.request.Context().Done()
}

// breakOff ends the watch as if the connection broke.
func (*answer) breakOff() { panic(http.ErrAbortHandler) }

// empty returns the response for a resource without objects.
func empty(o func() metav1.Object) func(*answer) {
	return func(a *answer) {
		a.complete(o(), "1")
		a.stay()
	}
}

var (
	noServices = empty(func() metav1.Object { return &corev1.Service{} })
	noSlices   = empty(func() metav1.Object { return &discoveryv1.EndpointSlice{} })
	noNodes    = empty(func() metav1.Object { return &corev1.Node{} })
)

func slice(name, resourceVersion string) *discoveryv1.EndpointSlice {
	return &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "default", Name: name, ResourceVersion: resourceVersion},
		AddressType: discoveryv1.AddressTypeIPv4, Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.1.2.3"}}},
	}
}
