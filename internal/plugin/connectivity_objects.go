package plugin

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/tools/cache"

	"github.com/slicecast/slicecast/internal/plugin/fleet"
)

const (
	// roleLabel and indexLabel are on the Pods: what they are for, and the number of their node.
	roleLabel, indexLabel = "slicecast.io/role", "slicecast.io/index"

	roleServer   = "server"   // is a backend of most Services
	roleClient   = "client"   // is no backend
	roleChanging = "changing" // is a backend that turns unready
	roleHost     = "host"     // is a client in the network of its node

	// manyPorts is the number of ports of each server, and so of backends for each server.
	manyPorts = 32
	firstPort = 8080
	// probeHealthPort is that of /ready.
	probeHealthPort = 8078
	// changers is the number of Pods that turn unready in turn.
	changers = 2
)

// connectivityRun is a run: its namespace, and the Pods and Services in it.
type connectivityRun struct {
	*connectivity
	*temporaryNamespace
	nodes []chosenNode
	image string

	// pods are the Pods by their names, as they were when all were ready.
	pods map[string]*corev1.Pod
	// services are the Services by their names, as the API server has created them.
	services map[string]*corev1.Service
}

func newConnectivityRun(x *connectivity, f *fleet.Fleet, nodes []chosenNode, image string) *connectivityRun {
	return &connectivityRun{
		connectivity: x, temporaryNamespace: newTemporaryNamespace(f, &x.progress), nodes: nodes, image: image,
		pods: map[string]*corev1.Pod{}, services: map[string]*corev1.Service{},
	}
}

// create creates everything, and waits until all Pods and endpoints are ready.
func (r *connectivityRun) create(ctx context.Context) error {
	level := "restricted"
	if r.hostNet {
		level = "privileged" // the baseline forbids the network of the node
	}
	if err := r.createNamespace(ctx, level, r.lifetime()); err != nil {
		return err
	}
	core := r.fleet.Client().CoreV1()
	var all errgroup.Group
	all.SetLimit(8)
	for _, p := range r.podsWanted() {
		all.Go(func() error {
			if _, err := core.Pods(r.namespace).Create(ctx, p, metav1.CreateOptions{}); err != nil {
				return fmt.Errorf("create the Pod %s: %w", p.Name, err)
			}
			return nil
		})
	}
	created := make([]*corev1.Service, len(r.servicesWanted()))
	for i, s := range r.servicesWanted() {
		all.Go(func() (err error) {
			if created[i], err = core.Services(r.namespace).Create(ctx, s, metav1.CreateOptions{}); err != nil {
				return fmt.Errorf("create the Service %s: %w", s.Name, err)
			}
			return nil
		})
	}
	if err := all.Wait(); err != nil {
		return err
	}
	for _, s := range created {
		r.services[s.Name] = s
	}
	if err := r.awaitPods(ctx); err != nil {
		return err
	}
	if err := r.createMany(ctx); err != nil {
		return err
	}
	servers, ready := len(r.nodes), r.endpoints
	for service, count := range map[string]int{"all": servers, "affinity": servers, "headless": servers, "node-port": servers, "first": 1, "local": 1, "node-port-local": 1, "changing": changers} {
		if err := ready(ctx, service, func(n map[string]bool) bool { return len(n) == count && allTrue(n) }); err != nil {
			return fmt.Errorf("wait for the endpoints of the Service %s: %w", service, err)
		}
	}
	return nil
}

// lifetime is how long Pods may run.
func (r *connectivityRun) lifetime() time.Duration { return r.timeLimit + cleanupTime + time.Minute }

func podName(role string, index int) string { return role + "-" + strconv.Itoa(index) }

// podsWanted returns the Pods of the run.
func (r *connectivityRun) podsWanted() (pods []*corev1.Pod) {
	for i := range r.nodes {
		pods = append(pods, r.newPod(roleServer, i, i), r.newPod(roleClient, i, i))
		if r.hostNet {
			pods = append(pods, r.newPod(roleHost, i, i))
		}
	}
	for i := range changers {
		pods = append(pods, r.newPod(roleChanging, i, i%len(r.nodes)))
	}
	return pods
}

func (r *connectivityRun) newPod(role string, index, node int) *corev1.Pod {
	name := podName(role, index)
	// A Pod in the network of its node must not take ports there.
	command := []string{"slicecast-agent", "probe", "wait"}
	if role != roleHost {
		command = []string{"slicecast-agent", "probe", "serve", "--name=" + name, fmt.Sprintf("--port=%d", firstPort), fmt.Sprintf("--ports=%d", manyPorts), fmt.Sprintf("--health-port=%d", probeHealthPort)}
	}
	p := r.temporaryNamespace.newPod(name, r.nodes[node].name, r.image, r.lifetime(), command...)
	p.Labels[roleLabel], p.Labels[indexLabel] = role, strconv.Itoa(index)
	p.Spec.HostNetwork = role == roleHost
	p.Spec.SecurityContext.RunAsNonRoot, p.Spec.SecurityContext.RunAsUser = new(true), new(int64(65532))
	if role != roleHost {
		p.Spec.Containers[0].ReadinessProbe = &corev1.Probe{
			ProbeHandler:  corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/ready", Port: intstr.FromInt32(probeHealthPort)}},
			PeriodSeconds: 1, FailureThreshold: 1, TimeoutSeconds: 5,
		}
	}
	return p
}

// servicesWanted returns the Services of the run.
func (r *connectivityRun) servicesWanted() []*corev1.Service {
	servers := map[string]string{roleLabel: roleServer}
	first := map[string]string{roleLabel: roleServer, indexLabel: "0"}
	local := corev1.ServiceInternalTrafficPolicyLocal
	return []*corev1.Service{
		r.newService("all", servers, nil),
		r.newService("first", first, nil),
		r.newService("none", map[string]string{roleLabel: "nobody"}, nil),
		r.newService("local", first, func(s *corev1.ServiceSpec) { s.InternalTrafficPolicy = &local }),
		r.newService("affinity", servers, func(s *corev1.ServiceSpec) { s.SessionAffinity = corev1.ServiceAffinityClientIP }),
		r.newService("headless", servers, func(s *corev1.ServiceSpec) { s.ClusterIP = corev1.ClusterIPNone }),
		r.newService("node-port", servers, func(s *corev1.ServiceSpec) { s.Type = corev1.ServiceTypeNodePort }),
		r.newService("node-port-local", first, func(s *corev1.ServiceSpec) {
			s.Type, s.ExternalTrafficPolicy = corev1.ServiceTypeNodePort, corev1.ServiceExternalTrafficPolicyLocal
		}),
		r.newService("many", nil, nil),
		r.newService("changing", map[string]string{roleLabel: roleChanging}, nil),
	}
}

func (r *connectivityRun) newService(name string, selector map[string]string, change func(*corev1.ServiceSpec)) *corev1.Service {
	families := corev1.IPFamilyPolicyPreferDualStack
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{runLabel: r.id}},
		Spec: corev1.ServiceSpec{Selector: selector, IPFamilyPolicy: &families, Ports: []corev1.ServicePort{
			{Name: "tcp", Protocol: corev1.ProtocolTCP, Port: 80, TargetPort: intstr.FromInt32(firstPort)},
			{Name: "udp", Protocol: corev1.ProtocolUDP, Port: 80, TargetPort: intstr.FromInt32(firstPort)},
		}},
	}
	if change != nil {
		change(&s.Spec)
	}
	return s
}

// createMany creates the slices of the Service many, which has each port of each server as an
// endpoint.
func (r *connectivityRun) createMany(ctx context.Context) error {
	var all errgroup.Group
	all.SetLimit(8)
	for _, family := range r.services["many"].Spec.IPFamilies {
		var endpoints []discoveryv1.Endpoint
		for i := range r.nodes {
			if ip := podAddress(r.pods[podName(roleServer, i)], family); ip != "" {
				endpoints = append(endpoints, discoveryv1.Endpoint{Addresses: []string{ip}, NodeName: &r.nodes[i].name})
			}
		}
		for n := range manyPorts {
			ports := make([]discoveryv1.EndpointPort, 0, 2)
			for _, p := range []struct {
				name     string
				protocol corev1.Protocol
			}{{"tcp", corev1.ProtocolTCP}, {"udp", corev1.ProtocolUDP}} {
				port := int32(firstPort + n)
				ports = append(ports, discoveryv1.EndpointPort{Name: &p.name, Protocol: &p.protocol, Port: &port})
			}
			slice := &discoveryv1.EndpointSlice{
				ObjectMeta: metav1.ObjectMeta{
					Name:   fmt.Sprintf("many-%s-%d", strings.ToLower(string(family)), n),
					Labels: map[string]string{runLabel: r.id, discoveryv1.LabelServiceName: "many", discoveryv1.LabelManagedBy: "kubectl-slicecast"},
				},
				AddressType: discoveryv1.AddressType(family), Endpoints: endpoints, Ports: ports,
			}
			all.Go(func() error {
				_, err := r.fleet.Client().DiscoveryV1().EndpointSlices(r.namespace).Create(ctx, slice, metav1.CreateOptions{})
				if err != nil {
					return fmt.Errorf("create an EndpointSlice: %w", err)
				}
				return nil
			})
		}
	}
	return all.Wait()
}

// podAddress returns the address of a Pod of a family, or an empty string.
func podAddress(pod *corev1.Pod, family corev1.IPFamily) string {
	if pod == nil {
		return ""
	}
	for _, ip := range pod.Status.PodIPs {
		if strings.Contains(ip.IP, ":") == (family == corev1.IPv6Protocol) {
			return ip.IP
		}
	}
	return ""
}

// awaitPods waits until all Pods are ready. A Pod that has ended never will be.
func (r *connectivityRun) awaitPods(ctx context.Context) error {
	want := len(r.podsWanted())
	var pending []string
	var ended error
	err := awaitObjects(ctx, podsOf(r.fleet, r.namespace), func(pods map[string]*corev1.Pod) bool {
		pending = pending[:0]
		for name, p := range pods {
			switch {
			case p.Status.Phase == corev1.PodFailed || p.Status.Phase == corev1.PodSucceeded:
				ended = fmt.Errorf("the Pod %s on %s has ended (%s %s): its image %s must be an agent of this version, see kubectl logs", name, p.Spec.NodeName, p.Status.Reason, p.Status.Message, r.image)
			case !podReady(p):
				pending = append(pending, fmt.Sprintf("%s on %s (%s)", name, p.Spec.NodeName, waiting(p)))
			}
		}
		r.pods = pods
		return ended != nil || len(pods) == want && len(pending) == 0
	})
	if err == nil {
		err = ended
	}
	if err != nil && len(pending) > 0 {
		slices.Sort(pending)
		err = fmt.Errorf("%w; these Pods are not ready: %s", err, strings.Join(pending, ", "))
	}
	if err != nil {
		return fmt.Errorf("wait for the Pods: %w", err)
	}
	return nil
}

// endpoints waits until the endpoints of a Service, by the names of their Pods and whether they are
// ready, satisfy a condition.
func (r *connectivityRun) endpoints(ctx context.Context, service string, satisfied func(map[string]bool) bool) error {
	return awaitObjects(ctx, slicesOf(r.fleet, r.namespace, service), func(slices map[string]*discoveryv1.EndpointSlice) bool {
		families := map[discoveryv1.AddressType]map[string]bool{}
		for _, s := range slices {
			if families[s.AddressType] == nil {
				families[s.AddressType] = map[string]bool{}
			}
			for _, e := range s.Endpoints {
				if e.TargetRef != nil {
					families[s.AddressType][e.TargetRef.Name] = e.Conditions.Ready == nil || *e.Conditions.Ready
				}
			}
		}
		for _, pods := range families {
			if !satisfied(pods) {
				return false
			}
		}
		return len(families) == max(len(r.services[service].Spec.IPFamilies), 1)
	})
}

func allTrue(m map[string]bool) bool {
	for _, v := range m {
		if !v {
			return false
		}
	}
	return true
}

func slicesOf(f *fleet.Fleet, namespace, service string) cache.ListerWatcher {
	return cache.NewFilteredListWatchFromClient(f.Client().DiscoveryV1().RESTClient(), "endpointslices", namespace, func(o *metav1.ListOptions) {
		o.LabelSelector = discoveryv1.LabelServiceName + "=" + service
	})
}
