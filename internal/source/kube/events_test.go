// These tests prove that a real API server stores the Events, that several servers write one Event
// for the same warning, and that no Node can cause more Events than the limits allow.
package kube

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/slicecast/slicecast/internal/testenv/controlplane"
)

func TestEvents(t *testing.T) {
	control := controlplane.Start(t, controlplane.Options{})
	config := control.AdminConfig()
	var logged bytes.Buffer
	log := slog.New(slog.NewTextHandler(&logged, nil))
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	writers := make([]*Events, 2)
	for i := range writers {
		var err error
		writers[i], err = NewEvents(config, log)
		require.NoError(t, err)
		running.Go(func() { writers[i].Run(ctx) })
	}
	const message = "kube-proxy runs on this node: end it"
	long := strings.Repeat("x", 5000)
	for _, e := range writers {
		e.Warn("node-1", "KubeProxyRunning", message)
		e.Warn("node-1", "PodRangeMismatch", long)
	}
	var list *corev1.EventList
	require.Eventually(t, func() bool {
		var err error
		// kubectl describe node selects Events in this way.
		list, err = control.Client().CoreV1().Events("").List(ctx, metav1.ListOptions{
			FieldSelector: "involvedObject.kind=Node,involvedObject.name=node-1,involvedObject.uid=node-1",
		})
		return err == nil && len(list.Items) == 2
	}, time.Minute, 10*time.Millisecond)
	messages := map[string]string{}
	for _, e := range list.Items {
		require.Equal(t, corev1.EventTypeWarning, e.Type)
		require.Equal(t, "slicecast-agent", e.Source.Component)
		messages[e.Reason] = e.Message
	}
	require.Equal(t, map[string]string{"KubeProxyRunning": message, "PodRangeMismatch": long[:maxEventMessage]}, messages)
	for _, e := range writers { // the second one was told that the Event exists
		require.Eventually(t, func() bool { return len(e.queue) == 0 }, time.Minute, time.Millisecond)
	}
	cancel()
	running.Wait()
	require.Empty(t, logged.String())
}

func TestEventsThatAreNotAllowed(t *testing.T) {
	control := controlplane.Start(t, controlplane.Options{})
	config := rest.AnonymousClientConfig(control.AdminConfig())
	logged := make(chan string, 1)
	e, err := NewEvents(config, slog.New(slog.NewTextHandler(lines(logged), nil)))
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { e.Run(ctx) })
	e.Warn("node-1", "KubeProxyRunning", "it runs")
	require.Contains(t, <-logged, "allow this ServiceAccount to create events in the namespace default")
	cancel()
	running.Wait()
}

// lines is a writer that passes on each write.
type lines chan<- string

func (l lines) Write(b []byte) (int, error) {
	l <- string(b)
	return len(b), nil
}

// TestEventsInTime checks that the same warning is a new Event after a while.
func TestEventsInTime(t *testing.T) {
	start := time.Date(2026, 1, 2, 3, 10, 0, 0, time.UTC)
	name := func(at time.Time, message string) string {
		return newEvent("node-1", "KubeProxyRunning", message, metav1.NewTime(at)).Name
	}
	first := name(start, "it runs")
	require.Equal(t, first, name(start.Add(eventsWindow-time.Second), "it runs"))
	require.NotEqual(t, first, name(start.Add(eventsWindow), "it runs"))
	require.NotEqual(t, first, name(start, "it runs, too"))
}

// TestEventsAreBounded checks what is dropped if nothing is written: what one Node has in excess,
// and what exceeds the queue.
func TestEventsAreBounded(t *testing.T) {
	e, err := NewEvents(&rest.Config{}, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	for i := range 100 {
		e.Warn("flapping", "KubeProxyRunning", fmt.Sprint(i))
	}
	require.Len(t, e.queue, eventsAtOnce)
	for i := range 2 * eventsQueued {
		e.Warn(fmt.Sprint("node-", i), "KubeProxyRunning", "it runs")
	}
	require.Len(t, e.queue, eventsQueued)
}
