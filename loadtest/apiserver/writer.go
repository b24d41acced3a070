package apiserver

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/source"
	"github.com/slicecast/slicecast/loadtest/generate"
)

const (
	// PrivateProxy is the service-proxy-name of what is written to somebody's cluster: its own nodes program nothing for it.
	PrivateProxy = "slicecast-loadtest"
	managedBy    = "slicecast-loadtest"
	// labelManagedBy is on namespaces that a Writer has made (Kubernetes' "Recommended Labels").
	labelManagedBy = "app.kubernetes.io/managed-by"
	// atATime is how many requests are under way, as many as the EndpointSlice controller has workers, and more.
	atATime = 16
	// maxQueued bounds the changes that wait for a request.
	maxQueued = 1024
	// cleanUpTimeout is for the request that deletes the namespace.
	cleanUpTimeout = 30 * time.Second
	// removalTimeout is how long a cluster may take to remove all that was in a namespace: tens of thousands of objects, one by one.
	removalTimeout = 15 * time.Minute
	// removalLook is the pause between looks whether it has.
	removalLook = 500 * time.Millisecond
)

// Writer makes a scenario's Services and slices in a namespace of an API server, and changes them.
type Writer struct {
	client    kubernetes.Interface
	namespace string
	proxy     string
	cluster   *generate.Cluster
	owners    map[string]types.UID // of Services, by name
	made      sync.Map             // keys of slices that are there
	seed      maphash.Seed
}

// NewWriter makes a namespace, which must not be there yet, and what the configuration says in it; one that an earlier Writer has
// left to be removed is waited for. With a proxy all objects have that service-proxy-name. Close removes all, and so does a failure.
func NewWriter(ctx context.Context, config *rest.Config, namespace, proxy string, c generate.Config) (_ *Writer, err error) {
	config = rest.CopyConfig(config)
	config.QPS = -1 // the scenario has its own rates
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	c.Namespace = namespace
	w := &Writer{client: client, namespace: namespace, proxy: proxy, owners: make(map[string]types.UID), seed: maphash.MakeSeed()}
	if w.cluster, err = generate.New(c); err != nil {
		return nil, err
	}
	if err := w.makeNamespace(ctx); err != nil {
		return nil, fmt.Errorf("namespace %s: %w", namespace, err)
	}
	if err := w.fill(ctx); err != nil {
		return nil, errors.Join(err, w.Close())
	}
	return w, nil
}

// makeNamespace makes the namespace, as soon as what an earlier Writer has deleted is gone.
func (w *Writer) makeNamespace(ctx context.Context) error {
	namespaces := w.client.CoreV1().Namespaces()
	patient, cancel := context.WithTimeout(ctx, removalTimeout)
	defer cancel()
	for waiting := false; ; waiting = true {
		_, err := namespaces.Create(ctx, &corev1.Namespace{
			ObjectMeta: metav1.ObjectMeta{Name: w.namespace, Labels: map[string]string{labelManagedBy: managedBy}},
		}, metav1.CreateOptions{})
		if !apierrors.IsAlreadyExists(err) {
			return err
		}
		there, err := namespaces.Get(ctx, w.namespace, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
			continue // gone since
		case err != nil:
			return err
		case there.Labels[labelManagedBy] != managedBy:
			return errors.New("it is there already: name one that is not, as it is removed at the end")
		case there.DeletionTimestamp == nil:
			return errors.New("it is there already, of a run that goes on or was killed: wait for it, or delete the namespace")
		case !waiting:
			slog.Warn("The namespace of an earlier run is still being removed, and is waited for", "namespace", w.namespace)
		}
		select {
		case <-patient.Done():
			return fmt.Errorf("the namespace of an earlier run is still being removed; its status says what that waits for: %w", patient.Err())
		case <-time.After(removalLook):
		}
	}
}

// fill makes all objects.
func (w *Writer) fill(ctx context.Context) error {
	var mu sync.Mutex
	making, services := errgroup.WithContext(ctx)
	making.SetLimit(atATime)
	objects := w.cluster.Objects()
	for _, o := range objects {
		if o, ok := o.(*model.Service); ok {
			making.Go(func() error {
				made, err := w.client.CoreV1().Services(w.namespace).Create(services, w.service(o), metav1.CreateOptions{})
				if err != nil {
					return fmt.Errorf("make %s: %w", o.Key(), err)
				}
				mu.Lock()
				defer mu.Unlock()
				w.owners[o.Name] = made.UID
				return nil
			})
		}
	}
	if err := making.Wait(); err != nil {
		return err
	}
	making, ctx = errgroup.WithContext(ctx)
	making.SetLimit(atATime)
	for _, o := range objects {
		if o, ok := o.(*model.Slice); ok {
			making.Go(func() error { return w.write(ctx, generate.Change{Key: o.Key(), Slice: o}) })
		}
	}
	return making.Wait()
}

// Play carries a plan out, and tells how late the requests of its changes were. Changes of one slice are made one after the other.
func (w *Writer) Play(ctx context.Context, p generate.Plan) (generate.Lag, error) {
	writing, ctx := errgroup.WithContext(ctx)
	queues := make([]chan generate.Change, atATime)
	lags := make([]generate.Lags, atATime)
	for i := range queues {
		queues[i] = make(chan generate.Change, maxQueued)
		writing.Go(func() error {
			for c := range queues[i] {
				lags[i].Done(c.Due)
				if err := w.write(ctx, c); err != nil {
					return err
				}
			}
			return nil
		})
	}
	err := func() error {
		for c := range w.cluster.Play(p) {
			if err := generate.Await(ctx, c.Due); err != nil {
				return err
			}
			select {
			case queues[maphash.Comparable(w.seed, c.Key)%atATime] <- c:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		return nil
	}()
	for _, q := range queues {
		close(q)
	}
	if failed := writing.Wait(); failed != nil {
		err = failed // the cause
	}
	for _, l := range lags[1:] {
		lags[0].Merge(l)
	}
	return lags[0].Lag(), err
}

// write makes a change.
func (w *Writer) write(ctx context.Context, c generate.Change) (err error) {
	slices := w.client.DiscoveryV1().EndpointSlices(w.namespace)
	_, there := w.made.Load(c.Key)
	switch {
	case c.Removed:
		w.made.Delete(c.Key)
		err = slices.Delete(ctx, c.Key.Name, metav1.DeleteOptions{})
	case there:
		_, err = slices.Update(ctx, w.slice(c.Slice), metav1.UpdateOptions{})
	default:
		w.made.Store(c.Key, nil)
		_, err = slices.Create(ctx, w.slice(c.Slice), metav1.CreateOptions{})
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", c.Key, err)
	}
	return nil
}

// Close has the namespace removed with all that is in it. The cluster goes on with that by itself.
func (w *Writer) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), cleanUpTimeout)
	defer cancel()
	err := w.client.CoreV1().Namespaces().Delete(ctx, w.namespace, metav1.DeleteOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("remove the namespace %s; please do it yourself: %w", w.namespace, err)
	}
	return nil
}

func (w *Writer) labels(more map[string]string) map[string]string {
	if w.proxy != "" {
		more[source.LabelServiceProxyName] = w.proxy
	}
	return more
}

func (w *Writer) service(s *model.Service) *corev1.Service {
	out := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: s.Namespace, Name: s.Name, Labels: w.labels(map[string]string{"app": s.Name})}}
	for _, p := range s.Ports {
		out.Spec.Ports = append(out.Spec.Ports, corev1.ServicePort{Name: p.Name, Port: int32(p.Port), Protocol: corev1.ProtocolTCP})
	}
	return out
}

// slice makes the object with all that the EndpointSlice controller writes.
func (w *Writer) slice(s *model.Slice) *discoveryv1.EndpointSlice {
	out := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: s.Namespace, Name: s.Name, GenerateName: s.Service + "-",
			Labels: w.labels(map[string]string{discoveryv1.LabelServiceName: s.Service, discoveryv1.LabelManagedBy: managedBy, "app": s.Service}),
			OwnerReferences: []metav1.OwnerReference{{
				APIVersion: "v1", Kind: "Service", Name: s.Service, UID: w.owners[s.Service], Controller: new(true), BlockOwnerDeletion: new(true),
			}},
		},
		AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints:   []discoveryv1.Endpoint{},
	}
	if s.LastChangeTriggerTimeMS > 0 {
		out.Annotations = map[string]string{
			corev1.EndpointsLastChangeTriggerTime: time.UnixMilli(s.LastChangeTriggerTimeMS).UTC().Format(time.RFC3339Nano),
		}
	}
	for _, p := range s.Ports {
		out.Ports = append(out.Ports, discoveryv1.EndpointPort{Name: new(p.Name), Port: new(int32(p.Port)), Protocol: new(corev1.ProtocolTCP)})
	}
	for i := range s.Endpoints {
		e := &s.Endpoints[i]
		// What names a pod follows from its address, which no other one ever has.
		a := e.Address.As4()
		pod := fmt.Sprintf("%02x%02x%02x%02x", a[0], a[1], a[2], a[3])
		out.Endpoints = append(out.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{e.Address.String()},
			Conditions: discoveryv1.EndpointConditions{
				Ready: new(e.Conditions.Ready), Serving: new(e.Conditions.Serving), Terminating: new(e.Conditions.Terminating),
			},
			NodeName: new(e.NodeName), Zone: new(e.Zone),
			TargetRef: &corev1.ObjectReference{
				Kind: "Pod", Namespace: s.Namespace, Name: s.Service + "-7d4b9c6f58-" + pod[3:],
				UID: types.UID("0f1e2d3c-4b5a-4978-8695-" + pod + pod[:4]),
			},
		})
	}
	return out
}
