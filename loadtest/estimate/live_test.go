// These tests prove that the computed sizes of events and lists are those that a real API server
// sends, and that only events that nodes receive count.
package estimate

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"

	"github.com/slicecast/slicecast/internal/source"
	"github.com/slicecast/slicecast/internal/testenv/controlplane"
	"github.com/slicecast/slicecast/loadtest/progress"
)

// TestCluster estimates from a real API server, and compares the computed sizes of events with what
// the API server sends.
func TestCluster(t *testing.T) {
	cp := controlplane.Start(t, controlplane.Options{})
	client := cp.Client()
	ctx := t.Context()
	for i := range 3 {
		_, err := client.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("node-%d", i)}}, metav1.CreateOptions{})
		require.NoError(t, err)
	}
	services, endpointSlices := client.CoreV1().Services("default"), client.DiscoveryV1().EndpointSlices("default")
	service, err := services.Create(ctx, &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "web"}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	s := slice(100)
	s.Labels[source.LabelServiceProxyName] = "another" // kube-proxy ignores this label on slices
	s, err = endpointSlices.Create(ctx, s, metav1.CreateOptions{})
	require.NoError(t, err)

	// The API server creates its own Service. It has no endpoints, because loopback addresses are
	// not allowed as endpoints.
	require.Eventually(t, func() bool {
		_, err := services.Get(ctx, "kubernetes", metav1.GetOptions{})
		return err == nil
	}, time.Minute, 10*time.Millisecond)

	config := cp.ConfigFor("somebody", "system:masters")
	l, err := newCluster(config, "")
	require.NoError(t, err)
	nodes, err := l.nodes(ctx)
	require.NoError(t, err)
	require.Equal(t, 3, nodes)
	apiServers, err := l.apiServers(ctx)
	require.NoError(t, err)
	require.Equal(t, 1, apiServers)
	c, err := newCount("")
	require.NoError(t, err)
	require.NoError(t, l.list(ctx, c))
	require.NoError(t, c.begun())

	// Make two flips, change a label that no node needs, and delete a Service.
	const slicesEvents, servicesEvents = 3, 1
	sent := rawWatch(t, config, "/apis/discovery.k8s.io/v1/endpointslices", source.SelectEndpointSlices(), l.slicesAt, slicesEvents)
	sentServices := rawWatch(t, config, "/api/v1/services", source.SelectServices(""), l.servicesAt, servicesEvents)
	for i := range 2 {
		s.Endpoints[i].Conditions.Ready = new(false)
		s, err = endpointSlices.Update(ctx, s, metav1.UpdateOptions{})
		require.NoError(t, err)
	}
	s.Labels["team"] = "a"
	_, err = endpointSlices.Update(ctx, s, metav1.UpdateOptions{})
	require.NoError(t, err)
	require.NoError(t, services.Delete(ctx, service.Name, metav1.DeleteOptions{}))

	following, stop := context.WithTimeout(ctx, time.Minute)
	defer stop()
	cut, err := l.follow(following, c, time.Hour, func(events int) {
		if events == slicesEvents+servicesEvents {
			stop()
		}
	})
	require.NoError(t, err)
	require.Equal(t, interrupted, cut)
	require.Positive(t, c.seconds)
	require.Equal(t, slicesEvents, c.slices.events)
	require.Equal(t, servicesEvents, c.services.events)
	require.Equal(t, <-sent, c.slices.today, "the size differs from what the API server sends")
	require.Equal(t, <-sentServices, c.services.today)
	require.Equal(t, 2, c.slices.updates)
	require.Less(t, c.slices.slicecast, 2*200)
	require.Equal(t, 1, c.services.updates)

	// A whole estimate, without any events.
	e, err := Run(ctx, Options{Kubeconfig: cp.Kubeconfig(t, config), Watch: 10 * time.Millisecond, Servers: 2}, progress.New(new(bytes.Buffer)))
	require.NoError(t, err)
	require.EqualValues(t, 3, value(t, e, "nodes"))
	require.EqualValues(t, 100, value(t, e, "endpoints"))

	// Events before an interruption count.
	watching, interrupt := context.WithCancel(ctx)
	view := progress.New(&until{want: "watching the cluster", do: interrupt})
	shown := make(chan struct{})
	go func() {
		defer close(shown)
		view.Run(watching)
	}()
	e, err = Run(watching, Options{Kubeconfig: cp.Kubeconfig(t, config), Watch: time.Hour, Servers: 2}, view)
	<-shown
	require.NoError(t, err)
	require.Less(t, value(t, e, "seconds"), 3600.)
	require.Contains(t, e.Assumptions[0], "of the requested 1h0m0s: it was interrupted")
}

// TestServiceProxyName changes a Service of Slicecast and one of another proxy. Nodes receive only
// the first.
func TestServiceProxyName(t *testing.T) {
	const name = "slicecast"
	cp := controlplane.Start(t, controlplane.Options{})
	ctx := t.Context()
	services := cp.Client().CoreV1().Services("default")
	create := func(s *corev1.Service) *corev1.Service {
		s.Spec.Ports = []corev1.ServicePort{{Port: 80}}
		s, err := services.Create(ctx, s, metav1.CreateOptions{})
		require.NoError(t, err)
		return s
	}
	others := create(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "others"}})
	own := create(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "own", Labels: map[string]string{source.LabelServiceProxyName: name}}})

	config := cp.ConfigFor("somebody", "system:masters")
	l, err := newCluster(config, name)
	require.NoError(t, err)
	c, err := newCount(name)
	require.NoError(t, err)
	require.NoError(t, l.list(ctx, c))
	require.NoError(t, c.begun())
	sent := rawWatch(t, config, "/api/v1/services", source.SelectServices(name), l.servicesAt, 1)
	for _, s := range []*corev1.Service{others, own} {
		s.Spec.Ports[0].Port = 81
		_, err := services.Update(ctx, s, metav1.UpdateOptions{})
		require.NoError(t, err)
	}
	following, stop := context.WithTimeout(ctx, time.Minute)
	defer stop()
	_, err = l.follow(following, c, time.Hour, func(int) { stop() })
	require.NoError(t, err)
	require.Equal(t, 1, c.services.events)
	require.Equal(t, <-sent, c.services.today)
	require.Equal(t, 1, c.services.updates)

	e, err := Run(ctx, Options{
		Kubeconfig: cp.Kubeconfig(t, config), ServiceProxyName: name, Watch: 10 * time.Millisecond, Nodes: 1, Servers: 1,
	}, progress.New(new(bytes.Buffer)))
	require.NoError(t, err)
	require.EqualValues(t, 1, value(t, e, "services"))
}

// until is an io.Writer that calls do once want is written to it.
type until struct {
	want string
	do   func()
}

// Write implements io.Writer.
func (u *until) Write(b []byte) (int, error) {
	if strings.Contains(string(b), u.want) {
		u.do()
	}
	return len(b), nil
}

// rawWatch starts a watch, and returns a channel for the size below TLS of a number of its events.
// It counts the bytes that arrive.
func rawWatch(t *testing.T, config *rest.Config, path string, selected metav1.ListOptions, resourceVersion string, events int) <-chan int {
	t.Helper()
	client, err := rest.HTTPClientFor(config)
	require.NoError(t, err)
	query := url.Values{
		"watch": {"true"}, "labelSelector": {selected.LabelSelector}, "fieldSelector": {selected.FieldSelector}, "resourceVersion": {resourceVersion},
	}
	ctx, cancel := context.WithCancel(context.Background())
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, config.Host+path+"?"+query.Encode(), nil)
	require.NoError(t, err)
	request.Header.Set("Accept", runtime.ContentTypeProtobuf+";stream=watch")
	response, err := client.Do(request) //nolint:bodyclose // closed at the end of the test
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, response.StatusCode)
	sum, ended := make(chan int, 1), make(chan struct{})
	go func() {
		defer close(ended)
		total := 0
		for range events {
			var length [watchPrefix]byte
			if _, err := io.ReadFull(response.Body, length[:]); err != nil {
				return
			}
			n := int(binary.BigEndian.Uint32(length[:]))
			if _, err := io.CopyN(io.Discard, response.Body, int64(n)); err != nil {
				return
			}
			total += onConnection(n + watchPrefix)
		}
		sum <- total
	}()
	t.Cleanup(func() {
		cancel()
		<-ended
		_ = response.Body.Close()
		client.CloseIdleConnections()
	})
	return sum
}
