// These tests prove that no run leaves its namespace behind, although the API server does not say
// whether it has created it, and what is said of a namespace that the API server cannot remove.
package plugin

import (
	"bytes"
	"context"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/slicecast/slicecast/internal/plugin/fleet"
)

// front is in front of the API server, and answers the creation of a namespace as a test wants it.
// It does what the namespace controller would.
type front struct {
	*testing.T
	address string
	// proxy passes a request on.
	proxy http.Handler
	// creates answers the creation of a namespace. nil passes it on.
	creates http.HandlerFunc
	// pods receives a value when a Pod is created, if there is room.
	pods chan struct{}
	// refuses means that namespaces cannot be deleted.
	refuses atomic.Bool
	deletes atomic.Int64
	// name is that of the namespace that is to be created when a request of any other kind comes.
	// Empty means none.
	name    atomic.Pointer[string]
	created chan error
}

func newFront(t *testing.T) *front {
	t.Helper()
	f := &front{T: t, pods: make(chan struct{}, 1), created: make(chan error, 1)}
	config := plane.AdminConfig()
	config.NextProtos = []string{"http/1.1"} // HTTP/2 has no upgrades, which commands in Pods need
	target, err := url.Parse(config.Host)
	require.NoError(t, err)
	proxy := httputil.NewSingleHostReverseProxy(target)
	proxy.Transport, err = rest.TransportFor(config)
	require.NoError(t, err)
	proxy.FlushInterval = -1 // watches
	proxy.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelInfo)
	f.proxy = proxy
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.Method == http.MethodPost && r.URL.Path == "/api/v1/namespaces" && f.creates != nil:
			f.creates(w, r)
			return
		case r.Method == http.MethodPost && strings.HasSuffix(r.URL.Path, "/pods"):
			select {
			case f.pods <- struct{}{}:
			default:
			}
		case r.Method == http.MethodDelete && f.refuses.Load():
			http.Error(w, "a finalizer stays", http.StatusForbidden)
			return
		}
		name := f.name.Swap(nil)
		if name != nil && r.Method != http.MethodDelete {
			go f.create(*name) // a watch that has begun must see it, too
			name = nil
		}
		proxy.ServeHTTP(w, r)
		if name != nil {
			f.create(*name)
		}
		if r.Method == http.MethodDelete {
			f.deletes.Add(1)
			f.finalize()
		}
	}))
	t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
	})
	f.address = server.URL
	return f
}

// create creates the namespace, late.
func (f *front) create(name string) {
	_, err := plane.Client().CoreV1().Namespaces().Create(context.Background(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
	f.created <- err
}

// finalize completes the removal of all namespaces of runs that are being deleted, and of the Pods
// in them.
func (f *front) finalize() {
	namespaces := plane.Client().CoreV1().Namespaces()
	all, err := namespaces.List(context.Background(), metav1.ListOptions{})
	if err != nil {
		f.Error(err)
		return
	}
	for _, n := range all.Items {
		if n.DeletionTimestamp == nil || len(n.Status.Conditions) > 0 {
			continue
		}
		if err := plane.Client().CoreV1().Pods(n.Name).DeleteCollection(context.Background(), metav1.DeleteOptions{GracePeriodSeconds: new(int64)}, metav1.ListOptions{}); err != nil {
			f.Error(err)
		}
		n.Spec.Finalizers = nil
		if _, err := namespaces.Finalize(context.Background(), &n, metav1.UpdateOptions{}); err != nil && !apierrors.IsNotFound(err) {
			f.Error(err)
		}
	}
}

// reach returns a fleet whose requests go to the front.
func (f *front) reach(timeout time.Duration) *fleet.Fleet {
	reached, err := fleet.New(fleet.Options{Config: &rest.Config{Host: f.address}, Namespace: fleet.DefaultNamespace, Timeout: timeout, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(f, err)
	f.Cleanup(reached.Close)
	return reached
}

// run returns a run whose requests go to the front, and what it says.
func (f *front) run() (*connectivityRun, *bytes.Buffer) {
	var said bytes.Buffer
	return newConnectivityRun(&connectivity{timeLimit: time.Minute, progress: progress{to: &said}}, f.reach(patience), nil, "image"), &said
}

// TestUncertainNamespace asserts that a namespace is removed although the API server creates it
// after the command has given up, or says that something has failed.
func TestUncertainNamespace(t *testing.T) {
	for name, late := range map[string]bool{"late": true, "failed": false} {
		t.Run(name, func(t *testing.T) {
			f := newFront(t)
			run, said := f.run()
			patient := run.fleet
			if late {
				run.fleet = f.reach(200 * time.Millisecond)
			}
			f.creates = func(w http.ResponseWriter, r *http.Request) {
				if late {
					// The server notices the client's end once the body is read.
					_, _ = httputil.DumpRequest(r, true)
					<-r.Context().Done()
					f.name.Store(&run.namespace)
					return
				}
				f.create(run.namespace)
				http.Error(w, "etcdserver: request timed out", http.StatusInternalServerError)
			}
			require.ErrorContains(t, run.create(t.Context()), "if it exists later, run kubectl slicecast connectivity --cleanup")
			run.fleet = patient
			require.NoError(t, run.removeNamespace(t.Context()))
			require.NoError(t, <-f.created)
			_, err := plane.Client().CoreV1().Namespaces().Get(t.Context(), run.namespace, metav1.GetOptions{})
			require.True(t, apierrors.IsNotFound(err), err)
			require.Contains(t, said.String(), "may be created yet")
		})
	}
}

// TestRefusedNamespace asserts that nothing is removed if the API server has refused to create it:
// a namespace of that name would be another's.
func TestRefusedNamespace(t *testing.T) {
	f := newFront(t)
	run, said := f.run()
	f.creates = func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "exists", http.StatusConflict) }
	require.ErrorContains(t, run.create(t.Context()), "which rights are needed")
	require.NoError(t, run.removeNamespace(t.Context()))
	require.Zero(t, f.deletes.Load())
	require.Empty(t, said.String())
}

// TestNamespaceThatStays asserts that a namespace which the API server cannot remove does not hold
// up other runs, and that the reason is said.
func TestNamespaceThatStays(t *testing.T) {
	f := newFront(t)
	run, said := f.run()
	namespaces := plane.Client().CoreV1().Namespaces()
	n, err := namespaces.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{
		Name: run.namespace, Labels: map[string]string{runLabel: run.id}, Annotations: map[string]string{expiresAnnotation: "2020-01-01T00:00:00Z"},
	}}, metav1.CreateOptions{})
	require.NoError(t, err)
	n.Status.Conditions = []corev1.NamespaceCondition{
		{Type: corev1.NamespaceDeletionDiscoveryFailure, Status: corev1.ConditionTrue, Reason: "DiscoveryFailed", Message: "unable to retrieve metrics.k8s.io/v1beta1"},
		{Type: corev1.NamespaceContentRemaining, Status: corev1.ConditionFalse, Reason: "ContentRemoved", Message: "fine"},
	}
	n, err = namespaces.UpdateStatus(t.Context(), n, metav1.UpdateOptions{})
	require.NoError(t, err)

	const why = "unable to retrieve metrics.k8s.io/v1beta1 (DiscoveryFailed)"
	limited, cancel := context.WithTimeout(t.Context(), 5*time.Second) // of which nearly all is spare
	defer cancel()
	_, err = removeLeft(limited, run.fleet, &run.connectivity.progress, true)
	require.EqualError(t, err, "remove the namespace "+run.namespace+": context deadline exceeded; the API server says why: "+why+"; mend that, and it goes by itself")
	removed, err := removeLeft(t.Context(), run.fleet, &run.connectivity.progress, false)
	require.NoError(t, err)
	require.Empty(t, removed)
	require.Contains(t, said.String(), "The namespace "+run.namespace+" of an earlier run is not gone yet: "+why)

	n, err = namespaces.Get(t.Context(), n.Name, metav1.GetOptions{})
	require.NoError(t, err)
	n.Spec.Finalizers = nil
	_, err = namespaces.Finalize(t.Context(), n, metav1.UpdateOptions{})
	require.NoError(t, err)
}

// requireNoRuns requires that nothing of a run is left.
func requireNoRuns(t *testing.T) {
	t.Helper()
	namespaces, err := plane.Client().CoreV1().Namespaces().List(t.Context(), metav1.ListOptions{LabelSelector: runLabel})
	require.NoError(t, err)
	require.Empty(t, namespaces.Items)
	pods, err := plane.Client().CoreV1().Pods("").List(t.Context(), metav1.ListOptions{LabelSelector: runLabel})
	require.NoError(t, err)
	require.Empty(t, pods.Items)
}

// TestUnpublishedImage asserts that a build without a version asks for an image, if no agent has
// one.
func TestUnpublishedImage(t *testing.T) {
	f := newFront(t)
	(&environment{T: t}).nodeWith("plain", corev1.NodeSystemInfo{OperatingSystem: "linux"})
	done := runAs(t.Context(), plane.Kubeconfig(t, &rest.Config{Host: f.address}), "connectivity")
	require.Equal(t, incomplete, done.code)
	require.Contains(t, done.errors, "this build has no version, so "+agentImage+" has no image of it: name an image of an agent that the nodes can pull (--image)")
	requireNoRuns(t)
}
