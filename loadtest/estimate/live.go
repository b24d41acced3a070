package estimate

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/pager"
	watchtools "k8s.io/client-go/tools/watch"

	"github.com/slicecast/slicecast/internal/source"
)

// cluster is a live cluster. It is only read.
type cluster struct {
	services, slices *cache.ListWatch
	client           kubernetes.Interface
	metadata         metadata.Interface
	// servicesAt and slicesAt are the resource versions of the lists.
	servicesAt, slicesAt string
}

func newCluster(config *rest.Config, serviceProxyName string) (*cluster, error) {
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("create a client for the API server %s: %w", config.Host, err)
	}
	m, err := metadata.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("create a client for the API server %s: %w", config.Host, err)
	}
	listWatch := func(c cache.Getter, resource string, selected metav1.ListOptions) *cache.ListWatch {
		return cache.NewFilteredListWatchFromClient(c, resource, metav1.NamespaceAll, func(o *metav1.ListOptions) {
			o.LabelSelector, o.FieldSelector = selected.LabelSelector, selected.FieldSelector
		})
	}
	return &cluster{
		services: listWatch(client.CoreV1().RESTClient(), "services", source.SelectServices(serviceProxyName)),
		slices:   listWatch(client.DiscoveryV1().RESTClient(), "endpointslices", source.SelectEndpointSlices()),
		client:   client, metadata: m,
	}, nil
}

func (l *cluster) list(ctx context.Context, c *count) (err error) {
	if l.servicesAt, err = each(ctx, l.services, c.begin); err != nil {
		return fmt.Errorf("list Services: %w", err)
	}
	if l.slicesAt, err = each(ctx, l.slices, c.begin); err != nil {
		return fmt.Errorf("list EndpointSlices: %w", err)
	}
	return nil
}

// each passes the objects of a list to a function, page by page. It returns the resource version of
// the list.
func each(ctx context.Context, from *cache.ListWatch, take func(object) error) (resourceVersion string, err error) {
	p := pager.New(func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
		list, err := from.ListWithContextFunc(ctx, o)
		if err != nil {
			return nil, err
		}
		if l, ok := list.(metav1.ListInterface); ok {
			resourceVersion = l.GetResourceVersion()
		}
		return list, nil
	})
	err = p.EachListItem(ctx, metav1.ListOptions{}, func(o runtime.Object) error { return take(o.(object)) })
	return resourceVersion, err
}

// nodes returns the number of nodes. It reads only their metadata.
func (l *cluster) nodes(ctx context.Context) (n int, err error) {
	resource := l.metadata.Resource(corev1.SchemeGroupVersion.WithResource("nodes"))
	p := pager.New(func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return resource.List(ctx, o) })
	err = p.EachListItem(ctx, metav1.ListOptions{}, func(runtime.Object) error { n++; return nil })
	if err != nil {
		return 0, fmt.Errorf("count nodes: %w", err)
	}
	return n, nil
}

// apiServers returns the number of API servers: that of the endpoints of the Service
// default/kubernetes.
func (l *cluster) apiServers(ctx context.Context) (int, error) {
	const name = "kubernetes"
	list, err := l.client.DiscoveryV1().EndpointSlices(metav1.NamespaceDefault).List(ctx, metav1.ListOptions{
		LabelSelector: discoveryv1.LabelServiceName + "=" + name,
	})
	if err != nil {
		return 0, fmt.Errorf("count API servers: %w", err)
	}
	most := 0 // the slices may be of two address families
	for i := range list.Items {
		most = max(most, len(list.Items[i].Endpoints))
	}
	return max(most, 1), nil
}

// interrupted says that a user has interrupted the watch.
const interrupted = "it was interrupted"

// worthwhile is the time after which a failed watch still leaves a useful estimate.
const worthwhile = time.Minute

// follow counts events for a time. seen is called with the number of events so far. Events before
// the watch was cut short count, and cut then says why; otherwise cut is empty.
func (l *cluster) follow(ctx context.Context, c *count, d time.Duration, seen func(int)) (cut string, err error) {
	services, err := watchtools.NewRetryWatcherWithContext(ctx, l.servicesAt, l.services)
	if err != nil {
		return "", fmt.Errorf("watch Services: %w", err)
	}
	defer func() {
		services.Stop()
		<-services.Done()
	}()
	endpointSlices, err := watchtools.NewRetryWatcherWithContext(ctx, l.slicesAt, l.slices)
	if err != nil {
		return "", fmt.Errorf("watch EndpointSlices: %w", err)
	}
	defer func() {
		endpointSlices.Stop()
		<-endpointSlices.Done()
	}()
	start := time.Now()
	defer func() { c.seconds = time.Since(start).Seconds() }()
	end := time.NewTimer(d)
	defer end.Stop()
	for events := 1; ; events++ {
		var e watch.Event
		var open bool
		select {
		case <-ctx.Done():
			return interrupted, nil
		case <-end.C:
			return "", nil
		case e, open = <-services.ResultChan():
		case e, open = <-endpointSlices.ResultChan():
		}
		var failed error
		switch {
		case ctx.Err() != nil: // the end of the context also ends the watches
			return interrupted, nil
		case !open:
			failed = errors.New("a watch has ended: the API server cannot continue from its version")
		case e.Type == watch.Error:
			failed = fmt.Errorf("a watch has failed: %w", apierrors.FromObject(e.Object))
		}
		if failed != nil && time.Since(start) < worthwhile {
			return "", failed
		}
		if failed != nil {
			return failed.Error(), nil
		}
		o, ok := e.Object.(object)
		if e.Type == watch.Bookmark || !ok {
			continue
		}
		if err := c.event(e.Type, o); err != nil {
			return "", err
		}
		seen(events)
	}
}
