package plugin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apiresource "k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	utilrand "k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	watchtools "k8s.io/client-go/tools/watch"

	"github.com/slicecast/slicecast/internal/plugin/fleet"
)

const (
	// namespacePrefix is the beginning of the names of runs' namespaces.
	namespacePrefix = "slicecast-connectivity-"
	// runLabel is on all objects of a run. Its value is the run's name.
	runLabel = "slicecast.io/connectivity-run"
	// expiresAnnotation on a run's namespace is when its Pods have ended by themselves.
	expiresAnnotation = "slicecast.io/connectivity-expires"
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
	fleet     *fleet.Fleet
	nodes     []chosenNode
	image     string
	name      string
	namespace string
	// uid is that of the namespace. nil means that the API server has not said that it created one.
	// uncertain is set if its answer, or a missing one, does not say whether it did.
	uid       *types.UID
	uncertain bool

	// pods are the Pods by their names, as they were when all were ready.
	pods map[string]*corev1.Pod
	// services are the Services by their names, as the API server has created them.
	services map[string]*corev1.Service
}

func newConnectivityRun(x *connectivity, f *fleet.Fleet, nodes []chosenNode, image string) *connectivityRun {
	name := utilrand.String(6)
	return &connectivityRun{
		connectivity: x, fleet: f, nodes: nodes, image: image, name: name, namespace: namespacePrefix + name,
		pods: map[string]*corev1.Pod{}, services: map[string]*corev1.Service{},
	}
}

// removeLeft removes namespaces of earlier runs and returns their names: all of them, or those
// whose Pods have ended by themselves.
func (x *connectivity) removeLeft(ctx context.Context, f *fleet.Fleet, all bool) ([]string, error) {
	list, err := fleet.Within(ctx, f, func(ctx context.Context) (*corev1.NamespaceList, error) {
		return f.Client().CoreV1().Namespaces().List(ctx, metav1.ListOptions{LabelSelector: runLabel})
	})
	if err != nil {
		return nil, fmt.Errorf("find earlier runs: %w", err)
	}
	removed := []string{}
	for _, n := range list.Items {
		if !strings.HasPrefix(n.Name, namespacePrefix) {
			x.say("The namespace %s has the label %s, and is left alone: its name is not that of a run.", n.Name, runLabel)
			continue
		}
		if !all && n.DeletionTimestamp != nil {
			x.say("The namespace %s of an earlier run is not gone yet: %s", n.Name, cmp.Or(whyLeft(&n), "its removal has begun"))
			continue
		}
		expires, err := time.Parse(time.RFC3339, n.Annotations[expiresAnnotation])
		if !all && err == nil && time.Now().Before(expires) {
			x.say("Another run is active or was killed: namespace %s. If nobody needs it, remove it by --cleanup.", n.Name)
			continue
		}
		if err := x.remove(ctx, f, n.Name, &n.UID); err != nil && all {
			return removed, err
		} else if err != nil {
			x.say("%v", err)
			continue
		}
		removed = append(removed, n.Name)
	}
	return removed, nil
}

// remove deletes a namespace, if it has this UID, and waits until it is gone. A nil UID is any.
func (x *connectivity) remove(ctx context.Context, f *fleet.Fleet, name string, uid *types.UID) error {
	ctx, cancel := context.WithTimeoutCause(ctx, cleanupTime, fmt.Errorf("it is not gone after %v", cleanupTime))
	defer cancel()
	namespaces := f.Client().CoreV1().Namespaces()
	err := namespaces.Delete(ctx, name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: uid}})
	if apierrors.IsNotFound(err) {
		return nil
	}
	next := "run kubectl slicecast connectivity --cleanup"
	if err == nil {
		err = awaitObjects(ctx, namespacesOf(f, name), func(left map[string]*corev1.Namespace) bool {
			if why := whyLeft(left[name]); why != "" {
				next = "the API server says why: " + why
			}
			return len(left) == 0
		})
	}
	if err != nil {
		return fmt.Errorf("remove the namespace %s: %w; %s", name, err, next)
	}
	return nil
}

// whyLeft returns what the API server says about a namespace that it cannot remove, such as that
// the objects of an aggregated API are unknown. It is empty if there is nothing.
func whyLeft(n *corev1.Namespace) string {
	if n == nil {
		return ""
	}
	var why []string
	for _, c := range n.Status.Conditions {
		if c.Status == corev1.ConditionTrue {
			why = append(why, fmt.Sprintf("%s (%s)", c.Message, c.Reason))
		}
	}
	return strings.Join(why, "; ")
}

// removeNamespace removes the namespace of the run, if there is one. If it is uncertain whether the
// API server has created it, or still does, removeNamespace waits for it for a while.
func (r *connectivityRun) removeNamespace(ctx context.Context) error {
	switch {
	case r.uncertain:
		r.say("The namespace %s may be created yet; waiting for up to %v to remove it", r.namespace, lateTime)
		late, cancel := context.WithTimeout(ctx, lateTime)
		defer cancel()
		// If it does not come, there is nothing to remove, and create's error says what to do later.
		_ = awaitObjects(late, namespacesOf(r.fleet, r.namespace), func(found map[string]*corev1.Namespace) bool { return len(found) > 0 })
	case r.uid == nil:
		return nil
	}
	return r.remove(ctx, r.fleet, r.namespace, r.uid)
}

// create creates everything, and waits until all Pods and endpoints are ready.
func (r *connectivityRun) create(ctx context.Context) error {
	level := "restricted"
	if r.hostNet {
		level = "privileged" // the baseline forbids the network of the node
	}
	labels := map[string]string{runLabel: r.name, "app.kubernetes.io/managed-by": "kubectl-slicecast"}
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{
		Name: r.namespace, Annotations: map[string]string{expiresAnnotation: time.Now().Add(r.lifetime()).UTC().Format(time.RFC3339)},
		Labels: map[string]string{"pod-security.kubernetes.io/enforce": level},
	}}
	for k, v := range labels {
		namespace.Labels[k] = v
	}
	core := r.fleet.Client().CoreV1()
	// An interruption must not leave open whether there is a namespace to remove.
	made, err := fleet.Within(context.WithoutCancel(ctx), r.fleet, func(ctx context.Context) (*corev1.Namespace, error) {
		return core.Namespaces().Create(ctx, namespace, metav1.CreateOptions{})
	})
	// Only an answer that refuses the request says that there is no namespace.
	var answer apierrors.APIStatus
	switch {
	case err == nil:
		r.uid = &made.UID
	case errors.As(err, &answer) && answer.Status().Code >= http.StatusBadRequest && answer.Status().Code < http.StatusInternalServerError:
		return fmt.Errorf("create the namespace %s: %w; docs/kubectl.md says which rights are needed", r.namespace, err)
	default:
		r.uncertain = true
		return fmt.Errorf("create the namespace %s: %w; if it exists later, run kubectl slicecast connectivity --cleanup", r.namespace, err)
	}
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "probe", Labels: labels}}
	if _, err := core.ServiceAccounts(r.namespace).Create(ctx, account, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("create a ServiceAccount: %w", err)
	}
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
	yes, no, user, grace, life := true, false, int64(65532), int64(1), int64(r.lifetime().Seconds())
	name := podName(role, index)
	container := corev1.Container{
		Name: "probe", Image: r.image, ImagePullPolicy: corev1.PullIfNotPresent,
		Command: []string{"slicecast-agent", "probe", "serve", "--name=" + name, fmt.Sprintf("--port=%d", firstPort), fmt.Sprintf("--ports=%d", manyPorts), fmt.Sprintf("--health-port=%d", probeHealthPort)},
		Resources: corev1.ResourceRequirements{
			Requests: corev1.ResourceList{corev1.ResourceCPU: apiresource.MustParse("10m"), corev1.ResourceMemory: apiresource.MustParse("32Mi")},
			Limits:   corev1.ResourceList{corev1.ResourceMemory: apiresource.MustParse("256Mi")},
		},
		SecurityContext: &corev1.SecurityContext{
			AllowPrivilegeEscalation: &no, ReadOnlyRootFilesystem: &yes, Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
		},
		ReadinessProbe: &corev1.Probe{
			ProbeHandler:  corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/ready", Port: intstr.FromInt32(probeHealthPort)}},
			PeriodSeconds: 1, FailureThreshold: 1, TimeoutSeconds: 5,
		},
	}
	if role == roleHost {
		// It must not take ports of the node.
		container.Command, container.ReadinessProbe = []string{"slicecast-agent", "probe", "wait"}, nil
	}
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{
			runLabel: r.name, roleLabel: role, indexLabel: strconv.Itoa(index), "app.kubernetes.io/managed-by": "kubectl-slicecast",
		}},
		Spec: corev1.PodSpec{
			NodeName: r.nodes[node].name, HostNetwork: role == roleHost, RestartPolicy: corev1.RestartPolicyNever,
			ServiceAccountName: "probe", AutomountServiceAccountToken: &no, EnableServiceLinks: &no,
			TerminationGracePeriodSeconds: &grace, ActiveDeadlineSeconds: &life,
			Tolerations: []corev1.Toleration{{Operator: corev1.TolerationOpExists}},
			SecurityContext: &corev1.PodSecurityContext{
				RunAsNonRoot: &yes, RunAsUser: &user, SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
			},
			Containers: []corev1.Container{container},
		},
	}
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
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{runLabel: r.name}},
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
					Labels: map[string]string{runLabel: r.name, discoveryv1.LabelServiceName: "many", discoveryv1.LabelManagedBy: "kubectl-slicecast"},
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

func podReady(p *corev1.Pod) bool {
	return slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

// waiting returns what a Pod waits for, such as ErrImagePull.
func waiting(p *corev1.Pod) string {
	for _, c := range p.Status.ContainerStatuses {
		if w := c.State.Waiting; w != nil {
			return strings.TrimSpace(w.Reason + " " + w.Message)
		}
	}
	return string(p.Status.Phase)
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

func podsOf(f *fleet.Fleet, namespace string) cache.ListerWatcher {
	return cache.NewListWatchFromClient(f.Client().CoreV1().RESTClient(), "pods", namespace, fields.Everything())
}

func namespacesOf(f *fleet.Fleet, name string) cache.ListerWatcher {
	return cache.NewListWatchFromClient(f.Client().CoreV1().RESTClient(), "namespaces", "", fields.OneTermEqualSelector("metadata.name", name))
}

func slicesOf(f *fleet.Fleet, namespace, service string) cache.ListerWatcher {
	return cache.NewFilteredListWatchFromClient(f.Client().DiscoveryV1().RESTClient(), "endpointslices", namespace, func(o *metav1.ListOptions) {
		o.LabelSelector = discoveryv1.LabelServiceName + "=" + service
	})
}

// object is an object of the API.
type object interface {
	metav1.Object
	runtime.Object
}

// awaitObjects waits until objects, by their names, satisfy a condition.
func awaitObjects[T object](ctx context.Context, from cache.ListerWatcher, satisfied func(map[string]T) bool) error {
	var kind T
	objects := map[string]T{}
	_, err := watchtools.UntilWithSync(ctx, from, kind, func(store cache.Store) (bool, error) {
		for _, one := range store.List() {
			if o, ok := one.(T); ok {
				objects[o.GetName()] = o
			}
		}
		return satisfied(objects), nil
	}, func(e watch.Event) (bool, error) {
		o, ok := e.Object.(T)
		if !ok {
			return false, nil
		}
		if objects[o.GetName()] = o; e.Type == watch.Deleted {
			delete(objects, o.GetName())
		}
		return satisfied(objects), nil
	})
	if err != nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	return err
}
