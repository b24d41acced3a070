package upstream

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/cluster"
)

const (
	// balancerPeriod is the time between two health checks of the nodes, as of a quick cloud.
	balancerPeriod = 500 * time.Millisecond
	// healthTimeout bounds the time of a health check.
	healthTimeout = 5 * time.Second
	// proxyHealthPort is where a node says whether its proxy works.
	proxyHealthPort = 10256
	// finalizer keeps a Service until its load balancer is gone. Upstream's tests expect this name.
	finalizer = "service.kubernetes.io/load-balancer-cleanup"
)

// balancer is the load balancer of the tests. It assigns addresses to Services of type
// LoadBalancer. On the tests' host, it routes each address to the nodes that pass the Service's
// health check.
type balancer struct {
	cluster *cluster.Cluster
	client  *testenv.Client
	http    *http.Client

	next   map[corev1.IPFamily]netip.Addr // the next address to assign
	owned  map[types.UID][]netip.Addr     // the addresses of Services
	routed map[netip.Addr][]string        // the names of the nodes to which an address is routed
}

func newBalancer(c *cluster.Cluster, client *testenv.Client) *balancer {
	return &balancer{
		cluster: c, client: client,
		http: &http.Client{Timeout: healthTimeout, Transport: &http.Transport{DisableKeepAlives: true}},
		next: map[corev1.IPFamily]netip.Addr{
			// A range for benchmarks of networks. Each Service gets a new address.
			corev1.IPv4Protocol: netip.MustParseAddr("198.18.0.1"),
			corev1.IPv6Protocol: netip.MustParseAddr("2001:db8:1b::1"),
		},
		owned: map[types.UID][]netip.Addr{}, routed: map[netip.Addr][]string{},
	}
}

// run serves Services until the end of ctx.
func (b *balancer) run(ctx context.Context) {
	for ctx.Err() == nil {
		if err := b.balance(ctx); err != nil && ctx.Err() == nil && !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
			slog.Warn("Load balancers are not current; trying again", "err", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(balancerPeriod):
		}
	}
}

// balance makes the load balancers what the Services and the health of the nodes ask for.
func (b *balancer) balance(ctx context.Context) error {
	all := b.cluster.Client.CoreV1().Services(metav1.NamespaceAll)
	services, err := all.List(ctx, metav1.ListOptions{ResourceVersion: "0"})
	if err != nil {
		return err
	}
	var errs []error
	for i := range services.Items {
		service := &services.Items[i]
		balanced := service.Spec.Type == corev1.ServiceTypeLoadBalancer && service.Spec.LoadBalancerClass == nil
		switch {
		case balanced && service.DeletionTimestamp == nil:
			errs = append(errs, b.provide(ctx, service))
		case slices.Contains(service.Finalizers, finalizer):
			errs = append(errs, b.release(ctx, service))
		}
	}
	return errors.Join(errs...)
}

// provide makes a load balancer for a Service: the finalizer, addresses, routes and the status.
func (b *balancer) provide(ctx context.Context, service *corev1.Service) error {
	services := b.cluster.Client.CoreV1().Services(service.Namespace)
	if !slices.Contains(service.Finalizers, finalizer) {
		service.Finalizers = append(service.Finalizers, finalizer)
		_, err := services.Update(ctx, service, metav1.UpdateOptions{})
		return err // the next round does the rest
	}
	nodes, err := b.healthy(ctx, service)
	if err != nil {
		return err
	}
	var ingress []corev1.LoadBalancerIngress
	for _, addr := range b.addresses(service) {
		if err := b.route(addr, nodes); err != nil {
			return err
		}
		ingress = append(ingress, corev1.LoadBalancerIngress{IP: addr.String()})
	}
	same := func(a, b corev1.LoadBalancerIngress) bool { return a.IP == b.IP }
	if slices.EqualFunc(service.Status.LoadBalancer.Ingress, ingress, same) {
		return nil
	}
	service.Status.LoadBalancer.Ingress = ingress
	_, err = services.UpdateStatus(ctx, service, metav1.UpdateOptions{})
	return err
}

// release removes the load balancer of a Service that is deleted or has another type now.
func (b *balancer) release(ctx context.Context, service *corev1.Service) error {
	for _, addr := range b.owned[service.UID] {
		if err := b.route(addr, nil); err != nil {
			return err
		}
	}
	delete(b.owned, service.UID)
	services := b.cluster.Client.CoreV1().Services(service.Namespace)
	if len(service.Status.LoadBalancer.Ingress) > 0 {
		service.Status.LoadBalancer.Ingress = nil
		updated, err := services.UpdateStatus(ctx, service, metav1.UpdateOptions{})
		if err != nil {
			return err
		}
		service = updated
	}
	service.Finalizers = slices.DeleteFunc(service.Finalizers, func(name string) bool { return name == finalizer })
	_, err := services.Update(ctx, service, metav1.UpdateOptions{})
	return err
}

// addresses returns the addresses of a Service, one of each of its families. It assigns those that
// are missing.
func (b *balancer) addresses(service *corev1.Service) []netip.Addr {
	var all []netip.Addr
	for _, family := range service.Spec.IPFamilies {
		owned := b.owned[service.UID]
		ipv6 := family == corev1.IPv6Protocol
		i := slices.IndexFunc(owned, func(addr netip.Addr) bool { return addr.Is6() == ipv6 })
		if i < 0 {
			i = len(owned)
			b.owned[service.UID] = append(owned, b.next[family])
			b.next[family] = b.next[family].Next()
		}
		all = append(all, b.owned[service.UID][i])
	}
	return all
}

// healthy returns the nodes that pass the health check of a Service. A node without an answer is an
// error, because a slow machine is no reason to change routes. If the Service asks for session
// affinity, healthy returns one node, because nodes know only the sessions that they have seen.
func (b *balancer) healthy(ctx context.Context, service *corev1.Service) ([]*testenv.Node, error) {
	port := proxyHealthPort
	if service.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal {
		port = int(service.Spec.HealthCheckNodePort)
	}
	var nodes []*testenv.Node
	for _, node := range b.cluster.Nodes {
		url := fmt.Sprintf("http://%s/healthz", net.JoinHostPort(node.IPv4.String(), strconv.Itoa(port)))
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
		if err != nil {
			return nil, err
		}
		response, err := b.http.Do(request)
		if errors.Is(err, syscall.ECONNREFUSED) {
			continue
		}
		if err != nil {
			return nil, err
		}
		response.Body.Close()
		if response.StatusCode == http.StatusOK {
			nodes = append(nodes, node.Node)
		}
	}
	if service.Spec.SessionAffinity == corev1.ServiceAffinityClientIP && len(nodes) > 1 {
		nodes = nodes[:1]
	}
	return nodes, nil
}

// route routes an address to nodes, unless it is routed to them already.
func (b *balancer) route(addr netip.Addr, nodes []*testenv.Node) error {
	names := []string{}
	for _, node := range nodes {
		names = append(names, node.Name)
	}
	if routed, ok := b.routed[addr]; ok && slices.Equal(routed, names) {
		return nil
	}
	if err := b.client.RouteAcross(nodes, netip.PrefixFrom(addr, addr.BitLen())); err != nil {
		return err
	}
	b.routed[addr] = names
	return nil
}
