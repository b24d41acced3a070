// This file creates and changes Services, slices and Pods through the API, and stands for the
// kubelet: it writes the status of Pods and gives them network namespaces.
package e2e

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/slicecast/slicecast/internal/testenv"
)

// podPort is the port on which pods serve, over TCP and UDP.
const podPort = 8080

// appLabel is the label by which Services select pods.
const appLabel = "app"

// pod is a Pod and the network namespace that has its addresses.
type pod struct {
	*testenv.Pod
}

// Deployment creates ready pods name-0, name-1 and so on with the label app=name, alternately on
// both nodes.
func (c *cluster) Deployment(name string, replicas int) []*pod {
	c.t.Helper()
	var pods []*pod
	for i := range replicas {
		pods = append(pods, c.Pod(fmt.Sprintf("%s-%d", name, i), name, c.nodes()[i%2]))
	}
	return pods
}

// Pod creates a ready pod that serves podPort and the given ports.
func (c *cluster) Pod(name, app string, n *node, ports ...corev1.ContainerPort) *pod {
	c.t.Helper()
	p := &pod{n.AddPod(name)}
	p.Serve(testenv.TCP, podPort)
	p.Serve(testenv.UDP, podPort)
	for _, port := range ports {
		p.Serve(testenv.TCP, uint16(port.ContainerPort))
	}
	c.createPod(c.t.Context(), podObject(name, app, n, ports...), p.IPv4.String(), p.IPv6.String())
	return p
}

func podObject(name, app string, n *node, ports ...corev1.ContainerPort) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{appLabel: app}},
		Spec: corev1.PodSpec{
			NodeName:   n.Name,
			Containers: []corev1.Container{{Name: "main", Image: "none", Ports: ports}},
			// Without a kubelet nothing would report the end of the containers.
			TerminationGracePeriodSeconds: new(int64),
		},
	}
}

// createPod creates a Pod object and then writes the status of a ready pod, as a kubelet does.
func (c *cluster) createPod(ctx context.Context, object *corev1.Pod, ips ...string) {
	c.t.Helper()
	pods := c.api.CoreV1().Pods(c.namespace)
	object, err := pods.Create(ctx, object, metav1.CreateOptions{})
	require.NoError(c.t, err)
	object.Status.Phase = corev1.PodRunning
	object.Status.PodIP = ips[0]
	for _, ip := range ips {
		object.Status.PodIPs = append(object.Status.PodIPs, corev1.PodIP{IP: ip})
	}
	object.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	_, err = pods.UpdateStatus(ctx, object, metav1.UpdateOptions{})
	require.NoError(c.t, err)
}

// SetReady reports a pod as ready or unready.
func (c *cluster) SetReady(p *pod, ready bool) {
	c.t.Helper()
	require.NoError(c.t, c.setReady(c.t.Context(), p.Name, ready))
}

func (c *cluster) setReady(ctx context.Context, name string, ready bool) error {
	status := corev1.ConditionFalse
	if ready {
		status = corev1.ConditionTrue
	}
	// The time becomes the trigger time of the EndpointSlice.
	patch := fmt.Sprintf(`{"status":{"conditions":[{"type":"Ready","status":%q,"lastTransitionTime":%q}]}}`,
		status, time.Now().UTC().Format(time.RFC3339))
	_, err := c.api.CoreV1().Pods(c.namespace).Patch(ctx, name, types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{}, "status")
	return err
}

// DeletePod deletes a Pod object. For grace seconds it remains as a terminating pod. The network
// namespace stays and answers.
func (c *cluster) DeletePod(name string, grace int64) {
	c.t.Helper()
	err := c.api.CoreV1().Pods(c.namespace).Delete(c.t.Context(), name, metav1.DeleteOptions{GracePeriodSeconds: &grace})
	require.NoError(c.t, err)
}

// service is a Service with the defaults that the API server has set.
type service struct {
	*corev1.Service
}

// Service creates a Service. Unless spec says otherwise, it has the type NodePort and both IP
// families.
func (c *cluster) Service(name string, spec corev1.ServiceSpec) *service {
	c.t.Helper()
	if spec.Type == "" {
		spec.Type = corev1.ServiceTypeNodePort
	}
	if spec.IPFamilyPolicy == nil && spec.Type != corev1.ServiceTypeExternalName {
		spec.IPFamilyPolicy = new(corev1.IPFamilyPolicyRequireDualStack)
	}
	created, err := c.api.CoreV1().Services(c.namespace).Create(c.t.Context(), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: spec,
	}, metav1.CreateOptions{})
	require.NoError(c.t, err)
	return &service{created}
}

// DeleteService deletes a Service.
func (c *cluster) DeleteService(s *service) {
	c.t.Helper()
	require.NoError(c.t, c.api.CoreV1().Services(c.namespace).Delete(c.t.Context(), s.Name, metav1.DeleteOptions{}))
}

// selecting returns the spec of a Service for the pods of a Deployment.
func selecting(app string, ports ...corev1.ServicePort) corev1.ServiceSpec {
	return corev1.ServiceSpec{Selector: map[string]string{appLabel: app}, Ports: ports}
}

// withoutSelector returns the spec of a Service whose endpoints the test writes.
func withoutSelector(ports ...corev1.ServicePort) corev1.ServiceSpec {
	return corev1.ServiceSpec{Ports: ports}
}

func tcp(name string, port int32, target intstr.IntOrString) corev1.ServicePort {
	return corev1.ServicePort{Name: name, Protocol: corev1.ProtocolTCP, Port: port, TargetPort: target}
}

func udp(name string, port int32, target intstr.IntOrString) corev1.ServicePort {
	return corev1.ServicePort{Name: name, Protocol: corev1.ProtocolUDP, Port: port, TargetPort: target}
}

// onPodPort returns the usual target port.
func onPodPort() intstr.IntOrString { return intstr.FromInt32(podPort) }

// Endpoints creates or replaces the Endpoints object of a Service, with the pods' addresses of both
// families.
func (c *cluster) Endpoints(s *service, ports []corev1.EndpointPort, ready, notReady []*pod) {
	c.t.Helper()
	addresses := func(pods []*pod) (list []corev1.EndpointAddress) {
		for _, p := range pods {
			list = append(list, corev1.EndpointAddress{IP: p.IPv4.String()}, corev1.EndpointAddress{IP: p.IPv6.String()})
		}
		return list
	}
	object := &corev1.Endpoints{
		ObjectMeta: metav1.ObjectMeta{Name: s.Name},
		Subsets:    []corev1.EndpointSubset{{Addresses: addresses(ready), NotReadyAddresses: addresses(notReady), Ports: ports}},
	}
	_, err := c.api.CoreV1().Endpoints(c.namespace).Get(c.t.Context(), s.Name, metav1.GetOptions{})
	if err == nil {
		_, err = c.api.CoreV1().Endpoints(c.namespace).Update(c.t.Context(), object, metav1.UpdateOptions{})
	} else {
		_, err = c.api.CoreV1().Endpoints(c.namespace).Create(c.t.Context(), object, metav1.CreateOptions{})
	}
	require.NoError(c.t, err)
}

// handWritten is a pair of slices, one of each family, that a test wrote for a Service.
type handWritten struct {
	c     *cluster
	names []string
}

// Slices writes a pair of slices: name-ipv4 and name-ipv6.
func (c *cluster) Slices(name string, s *service, ports []discoveryv1.EndpointPort, pods ...*pod) *handWritten {
	c.t.Helper()
	h := &handWritten{c: c}
	for _, addressType := range []discoveryv1.AddressType{discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6} {
		object := &discoveryv1.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{
				Name: name + "-" + strings.ToLower(string(addressType)),
				Labels: map[string]string{
					discoveryv1.LabelServiceName: s.Name, discoveryv1.LabelManagedBy: "e2e.slicecast.example",
				},
			},
			AddressType: addressType,
			Ports:       ports,
			Endpoints:   endpoints(addressType, pods),
		}
		_, err := c.api.DiscoveryV1().EndpointSlices(c.namespace).Create(c.t.Context(), object, metav1.CreateOptions{})
		require.NoError(c.t, err)
		h.names = append(h.names, object.Name)
	}
	return h
}

// FQDNSlice writes a slice with a host name.
func (c *cluster) FQDNSlice(name string, s *service, port discoveryv1.EndpointPort, host string) {
	c.t.Helper()
	_, err := c.api.DiscoveryV1().EndpointSlices(c.namespace).Create(c.t.Context(), &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: s.Name}},
		AddressType: discoveryv1.AddressTypeFQDN,
		Ports:       []discoveryv1.EndpointPort{port},
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{host}}},
	}, metav1.CreateOptions{})
	require.NoError(c.t, err)
}

func endpoints(addressType discoveryv1.AddressType, pods []*pod) []discoveryv1.Endpoint {
	list := []discoveryv1.Endpoint{}
	for _, p := range pods {
		address := p.Addr(addressType == discoveryv1.AddressTypeIPv6).String()
		list = append(list, discoveryv1.Endpoint{Addresses: []string{address}, NodeName: &p.Node.Name})
	}
	return list
}

// SetPods replaces the endpoints of the slices.
func (h *handWritten) SetPods(pods ...*pod) {
	h.c.t.Helper()
	h.update(func(object *discoveryv1.EndpointSlice) { object.Endpoints = endpoints(object.AddressType, pods) })
}

// HandTo makes the slices belong to another Service by changing their label.
func (h *handWritten) HandTo(s *service) {
	h.c.t.Helper()
	h.update(func(object *discoveryv1.EndpointSlice) { object.Labels[discoveryv1.LabelServiceName] = s.Name })
}

func (h *handWritten) update(change func(*discoveryv1.EndpointSlice)) {
	h.c.t.Helper()
	api := h.c.api.DiscoveryV1().EndpointSlices(h.c.namespace)
	for _, name := range h.names {
		object, err := api.Get(h.c.t.Context(), name, metav1.GetOptions{})
		require.NoError(h.c.t, err)
		change(object)
		_, err = api.Update(h.c.t.Context(), object, metav1.UpdateOptions{})
		require.NoError(h.c.t, err)
	}
}

// Delete deletes the slices.
func (h *handWritten) Delete() {
	h.c.t.Helper()
	for _, name := range h.names {
		err := h.c.api.DiscoveryV1().EndpointSlices(h.c.namespace).Delete(h.c.t.Context(), name, metav1.DeleteOptions{})
		require.NoError(h.c.t, err)
	}
}

func names(pods []*pod) []string {
	var list []string
	for _, p := range pods {
		list = append(list, p.Name)
	}
	slices.Sort(list)
	return list
}
