package kube

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"log/slog"
	"strings"
	"time"

	lru "github.com/hashicorp/golang-lru/v2"
	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
)

// eventsNamespace is where the Events of cluster-scoped objects such as Nodes are.
const eventsNamespace = metav1.NamespaceDefault

// These bound what Events cost the API server, whatever nodes report. An Event that exceeds a bound
// is dropped.
const (
	// eventsPerSecond is the rate at which Events of all Nodes are written.
	eventsPerSecond = 10
	// eventsQueued is the number of Events that wait for that.
	eventsQueued = 1024
	// A Node may have eventsAtOnce Events, and then one in each eventsInterval.
	eventsAtOnce, eventsInterval = 4, time.Minute
	// eventsNodes is the number of Nodes whose Events are counted.
	eventsNodes = 16 << 10
	// eventTimeout bounds the time to write an Event.
	eventTimeout = 10 * time.Second
	// An Event that says the same as another one in this window is not written.
	eventsWindow = 10 * time.Minute
	// maxEventMessage is what the API server admits, in bytes.
	maxEventMessage = 1024
)

// Events writes Events about Nodes. An Event that cannot be written is dropped, because whatever it
// is about is in the status and the metrics, too.
type Events struct {
	log     *slog.Logger
	client  rest.Interface
	queue   chan *corev1.Event
	allowed *lru.Cache[string, *rate.Limiter] // by Node; safe for concurrent use
	dropped rate.Sometimes
}

// NewEvents returns Events, which Run writes.
func NewEvents(config *rest.Config, log *slog.Logger) (*Events, error) {
	client, err := newClient(config, corev1.SchemeGroupVersion, nil)
	if err != nil {
		return nil, err
	}
	e := &Events{
		log: log, client: client, queue: make(chan *corev1.Event, eventsQueued),
		dropped: rate.Sometimes{Interval: time.Minute},
	}
	// An error is returned only for sizes below 1.
	e.allowed, _ = lru.New[string, *rate.Limiter](eventsNodes)
	return e, nil
}

// Warn writes an Event of type Warning about a Node, once for the same reason and message within
// eventsWindow. It returns at once.
func (e *Events) Warn(node, reason, message string) {
	limit, known := e.allowed.Get(node)
	if !known {
		limit = rate.NewLimiter(rate.Every(eventsInterval), eventsAtOnce)
		e.allowed.Add(node, limit)
	}
	if !limit.Allow() {
		e.drop(node, "too many Events about this Node")
		return
	}
	select {
	case e.queue <- newEvent(node, reason, message, metav1.Now()):
	default:
		e.drop(node, "too many Events are waiting")
	}
}

func (e *Events) drop(node, reason string) {
	e.dropped.Do(func() {
		e.log.Warn("Events were dropped; the status command shows all warnings", "node", node, "reason", reason)
	})
}

// newEvent returns an Event whose name depends on what it says and on the window that it is in. All
// servers that are told the same therefore write the same Event.
func newEvent(node, reason, message string, now metav1.Time) *corev1.Event {
	message = strings.ToValidUTF8(message[:min(len(message), maxEventMessage)], "")
	hash := sha256.Sum256(fmt.Appendf(nil, "%d %s %s", now.Truncate(eventsWindow).Unix(), reason, message))
	return &corev1.Event{
		ObjectMeta: metav1.ObjectMeta{Name: node + "." + hex.EncodeToString(hash[:8]), Namespace: eventsNamespace},
		// The UID is the name, as in the kubelet's Events, which kubectl describe looks for.
		InvolvedObject: corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: node, UID: types.UID(node)},
		Type:           corev1.EventTypeWarning, Reason: reason, Message: message, Count: 1,
		FirstTimestamp: now, LastTimestamp: now,
		Source: corev1.EventSource{Component: "slicecast-agent", Host: node},
	}
}

// Run writes Events until ctx ends.
func (e *Events) Run(ctx context.Context) {
	pace := rate.NewLimiter(eventsPerSecond, 1)
	refused := rate.Sometimes{Interval: time.Minute}
	for {
		select {
		case <-ctx.Done():
			return
		case event := <-e.queue:
			if pace.Wait(ctx) != nil {
				return
			}
			if err := e.write(ctx, event); err != nil && !apierrors.IsAlreadyExists(err) && ctx.Err() == nil {
				refused.Do(func() {
					e.log.Warn("Cannot write an Event; allow this ServiceAccount to create events in the namespace "+
						eventsNamespace, "node", event.InvolvedObject.Name, "reason", event.Reason, "err", err)
				})
			}
		}
	}
}

func (e *Events) write(ctx context.Context, event *corev1.Event) error {
	ctx, cancel := context.WithTimeout(ctx, eventTimeout)
	defer cancel()
	return e.client.Post().Namespace(event.Namespace).Resource("events").Body(event).Do(ctx).Error()
}
