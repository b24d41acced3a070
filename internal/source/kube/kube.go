// Package kube is the source that watches a Kubernetes API server. It converts each object as it
// arrives and passes it to the sink. Only converted objects stay in memory, even while a long list
// arrives.
package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/source"
)

// Options configures a Source. All fields except ServiceProxyName are required.
type Options struct {
	Config *rest.Config // see the function Config
	// ServiceProxyName is the value of the label service.kubernetes.io/service-proxy-name of the
	// Services to serve. If it is empty, Services without the label are served.
	ServiceProxyName string
	Log              *slog.Logger
	Metrics          prometheus.Registerer
}

// Source watches the Services, EndpointSlices, Nodes and ServiceCIDRs of a cluster. Its user must
// be allowed to list and watch them in all namespaces. Clusters before Kubernetes 1.33 have no
// ServiceCIDRs. A Source that may not see them treats the cluster as if it had none.
type Source struct {
	client    *http.Client
	resources []*resource
	skips     *source.Skips
}

var _ source.Source = (*Source)(nil)

// New returns a Source. It sends no request yet.
func New(o Options) (*Source, error) {
	client, err := rest.HTTPClientFor(o.Config)
	if err != nil {
		return nil, fmt.Errorf("client for the API server %s: %w; correct the kubeconfig's cluster and user", o.Config.Host, err)
	}
	shared := shared{
		converter: source.NewConverter(o.ServiceProxyName),
		skips:     source.NewSkips(o.Log, o.Metrics),
		metrics:   newMetrics(o.Metrics),
	}
	add := func(kind model.Kind, group schema.GroupVersion, plural string, example metav1.Object, selected metav1.ListOptions) *resource {
		apart, errApart := rest.HTTPClientFor(ofItsOwn(o.Config))
		r := &resource{shared: shared, kind: kind, example: example, log: o.Log.With("kind", kind.String()), apart: apart}
		requests := func(over *http.Client) *cache.ListWatch {
			getter, errGroup := newClient(o.Config, group, over)
			err = errors.Join(err, errGroup)
			return cache.NewFilteredListWatchFromClient(getter, plural, metav1.NamespaceAll, func(lo *metav1.ListOptions) {
				lo.LabelSelector, lo.FieldSelector = selected.LabelSelector, selected.FieldSelector
			})
		}
		if err = errors.Join(err, errApart); err == nil {
			r.server, r.other = requests(client), requests(apart)
		}
		r.touch() // an API server that is never reached must be seen, too
		return r
	}
	cidrs := add(model.KindServiceCIDR, networkingv1.SchemeGroupVersion, "servicecidrs", &networkingv1.ServiceCIDR{}, metav1.ListOptions{})
	cidrs.optional = true
	s := &Source{client: client, skips: shared.skips, resources: []*resource{
		add(model.KindService, corev1.SchemeGroupVersion, "services", &corev1.Service{}, source.SelectServices(o.ServiceProxyName)),
		add(model.KindSlice, discoveryv1.SchemeGroupVersion, "endpointslices", &discoveryv1.EndpointSlice{}, source.SelectEndpointSlices()),
		add(model.KindNode, corev1.SchemeGroupVersion, "nodes", &corev1.Node{}, metav1.ListOptions{}),
		cidrs,
	}}
	if err != nil {
		return nil, err
	}
	return s, nil
}

// ofItsOwn returns a configuration whose client shares no connection with those of others.
// client-go gives configurations with the same credentials the same connections, unless they dial
// by themselves.
func ofItsOwn(config *rest.Config) *rest.Config {
	config = rest.CopyConfig(config)
	if t, ok := config.Transport.(*http.Transport); ok {
		config.Transport = t.Clone()
	} else if config.Transport == nil && config.Dial == nil {
		config.Dial = (&net.Dialer{Timeout: 30 * time.Second, KeepAlive: 30 * time.Second}).DialContext
	}
	return config
}

// Stale returns since when the Source may have missed changes, and why. The time is zero if the API
// server answers.
func (s *Source) Stale() (since time.Time, why string) {
	for _, r := range s.resources {
		if at, reason := r.contact.stale(time.Now()); !at.IsZero() && (since.IsZero() || at.Before(since)) {
			since, why = at, r.kind.String()+": "+reason
		}
	}
	return since, why
}

// LastEvent returns when something last came from the API server, of Services or EndpointSlices,
// whichever is longer ago. It is zero until both have come.
func (s *Source) LastEvent() (last time.Time) {
	for _, r := range s.resources {
		if r.kind != model.KindService && r.kind != model.KindSlice {
			continue
		}
		at := r.contact.last()
		if at.IsZero() {
			return at
		}
		if last.IsZero() || at.Before(last) {
			last = at
		}
	}
	return last
}

// Run implements source.Source. It retries after any failure.
func (s *Source) Run(ctx context.Context, sink source.Sink) error {
	defer func() {
		s.client.CloseIdleConnections()
		for _, r := range s.resources {
			r.apart.CloseIdleConnections()
		}
	}()
	sink = source.WithServiceCIDRs(sink, s.skips)
	var missing atomic.Int32
	missing.Store(int32(len(s.resources)))
	synced := func() {
		if missing.Add(-1) == 0 {
			sink.Synced()
		}
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	for _, r := range s.resources {
		wg.Go(func() { r.run(ctx, sink, synced) })
	}
	return nil
}
