package apiserver

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"log/slog"
	"slices"
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
	// PrivateProxy is the service-proxy-name of objects that are written to an existing cluster.
	// The cluster's own nodes program nothing for them.
	PrivateProxy = "slicecast-loadtest"
	managedBy    = "slicecast-loadtest"
	// labelManagedBy is a label of namespaces that a Writer has created. It is one of Kubernetes'
	// recommended labels.
	labelManagedBy = "app.kubernetes.io/managed-by"
	// atATime is the number of concurrent requests. It is larger than the number of workers of the
	// EndpointSlice controller.
	atATime = 16
	// maxQueued is the maximum number of changes that wait for each of these requests.
	maxQueued = 1024
	// cleanUpTimeout limits the request that deletes the namespace.
	cleanUpTimeout = 30 * time.Second
	// removalTimeout limits the wait for the cluster to remove all objects in a namespace. It
	// removes tens of thousands of objects one by one.
	removalTimeout = 15 * time.Minute
	// removalLook is the pause between checks whether the namespace is gone.
	removalLook = 500 * time.Millisecond
)

// Writer writes a scenario's Services and slices to a namespace of an API server, and changes them.
type Writer struct {
	client    kubernetes.Interface
	namespace string
	proxy     string
	cluster   *generate.Cluster
	owners    map[string]types.UID // UIDs of Services, by name
	made      sync.Map             // keys of existing slices
	seed      maphash.Seed
}

// NewWriter creates a namespace and writes the state of the configuration to it. The namespace must
// not exist, unless the cluster is still removing it after an earlier run; NewWriter then waits. If
// proxy is not empty, it is the service-proxy-name of all objects. Close deletes the namespace, and
// so does NewWriter if it fails.
func NewWriter(ctx context.Context, config *rest.Config, namespace, proxy string, c generate.Config) (_ *Writer, err error) {
	config = rest.CopyConfig(config)
	config.QPS = -1 // the scenario sets the rate
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
		return nil, fmt.Errorf("create the namespace %s: %w", namespace, err)
	}
	if err := w.fill(ctx); err != nil {
		return nil, errors.Join(err, w.Close())
	}
	return w, nil
}

// makeNamespace creates the namespace. It waits until an earlier namespace that is being deleted is
// gone.
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
			continue // it has gone in the meantime
		case err != nil:
			return err
		case there.Labels[labelManagedBy] != managedBy:
			return errors.New("it already exists: use a name that does not exist, because the namespace is removed at the end")
		case there.DeletionTimestamp == nil:
			return errors.New("it already exists, from a run that is still running or was killed: wait for that run, or delete the namespace")
		case !waiting:
			slog.Warn("Waiting for the cluster to remove the namespace of an earlier run", "namespace", w.namespace)
		}
		select {
		case <-patient.Done():
			return fmt.Errorf("the cluster is still removing the namespace of an earlier run, see its status for the reason: %w", patient.Err())
		case <-time.After(removalLook):
		}
	}
}

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
					return fmt.Errorf("create %s: %w", o.Key(), err)
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

// Play carries out a plan, and returns how late the requests of its changes started. Changes of the
// same slice are made one after the other.
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
		err = failed // the cause of a canceled context
	}
	return slices.Concat(lags...).Lag(), err
}

func (w *Writer) write(ctx context.Context, c generate.Change) (err error) {
	endpointSlices := w.client.DiscoveryV1().EndpointSlices(w.namespace)
	_, there := w.made.Load(c.Key)
	switch {
	case c.Removed:
		w.made.Delete(c.Key)
		err = endpointSlices.Delete(ctx, c.Key.Name, metav1.DeleteOptions{})
	case there:
		_, err = endpointSlices.Update(ctx, w.slice(c.Slice), metav1.UpdateOptions{})
	default:
		w.made.Store(c.Key, nil)
		_, err = endpointSlices.Create(ctx, w.slice(c.Slice), metav1.CreateOptions{})
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", c.Key, err)
	}
	return nil
}

// Close deletes the namespace with all objects in it. It does not wait until the cluster has
// removed them.
func (w *Writer) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), cleanUpTimeout)
	defer cancel()
	err := w.client.CoreV1().Namespaces().Delete(ctx, w.namespace, metav1.DeleteOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("delete the namespace %s: %w; delete it manually", w.namespace, err)
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

// slice returns the object with all fields that the EndpointSlice controller sets.
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
		// The pod's name and UID follow from its address, which is unique over the whole run.
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
