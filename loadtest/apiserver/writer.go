package apiserver

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
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
	// PrivateProxy is the service-proxy-name of what is written to somebody's cluster: its real nodes do not see it.
	PrivateProxy = "slicecast-loadtest"
	managedBy    = "slicecast-loadtest"
	// atATime is how many requests are under way, as many as the EndpointSlice controller has workers, and more.
	atATime = 16
	// maxQueued bounds the changes that wait for a request.
	maxQueued = 1024
	// cleanUpTimeout is for the deletion of the namespace.
	cleanUpTimeout = 30 * time.Second
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

// NewWriter makes a namespace, which must not be there yet, and what the configuration says in it. With a proxy all objects have
// that service-proxy-name. Close removes all, and so does a failure.
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
	_, err = client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		return nil, fmt.Errorf("the namespace %s is there already: name one that is not, as it is removed at the end", namespace)
	}
	if err != nil {
		return nil, fmt.Errorf("namespace %s: %w", namespace, err)
	}
	if err := w.fill(ctx); err != nil {
		return nil, errors.Join(err, w.Close())
	}
	return w, nil
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

// Play carries a plan out, and tells how late its changes were begun with. Changes of one slice are made one after the other.
func (w *Writer) Play(ctx context.Context, p generate.Plan) (generate.Lag, error) {
	writing, ctx := errgroup.WithContext(ctx)
	queues := make([]chan generate.Change, atATime)
	for i := range queues {
		queues[i] = make(chan generate.Change, maxQueued)
		writing.Go(func() error {
			for c := range queues[i] {
				if err := w.write(ctx, c); err != nil {
					return err
				}
			}
			return nil
		})
	}
	var lags generate.Lags
	err := func() error {
		for c := range w.cluster.Play(p) {
			if err := lags.Await(ctx, c.Due); err != nil {
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
	return lags.Lag(), err
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

// Close removes the namespace with all that is in it.
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
