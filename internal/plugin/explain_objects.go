package plugin

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/slicecast/slicecast/internal/show"
	"github.com/slicecast/slicecast/internal/source"
)

// explained are the objects of the API server.
type explained struct {
	service *corev1.Service // nil if there is none
	slices  []discoveryv1.EndpointSlice
	node    *corev1.Node // nil if there is none
	// text is what the agent needs of all of them, as JSON compressed by gzip.
	text []byte
}

// readExplained reads the objects. All Services are read, because another one may have an address.
func readExplained(ctx context.Context, client kubernetes.Interface, q explainQuestion) (*explained, error) {
	ctx, cancel := context.WithTimeout(ctx, 6*q.timeout)
	defer cancel()
	o := &explained{}
	var all bytes.Buffer
	w := gzip.NewWriter(&all)
	read := func(from rest.Interface, resource, namespace, selector, name string, into any) error {
		request := from.Get().Resource(resource).SetHeader("Accept", "application/json")
		switch {
		case name != "":
			request = request.Name(name)
		case selector != "":
			request = request.Namespace(namespace).Param("labelSelector", selector)
		}
		text, err := request.Do(ctx).Raw()
		if err != nil {
			return err
		}
		if _, err := w.Write(text); err != nil {
			return err
		}
		return json.Unmarshal(text, into)
	}
	var services corev1.ServiceList
	var slicesOf discoveryv1.EndpointSliceList
	var node corev1.Node
	var ranges struct{}
	if err := read(client.CoreV1().RESTClient(), "services", "", "", "", &services); err != nil {
		return nil, fmt.Errorf("list the Services: %w; explain needs the right to list them in all namespaces", err)
	}
	selector := discoveryv1.LabelServiceName + "=" + q.service.Name
	if err := read(client.DiscoveryV1().RESTClient(), "endpointslices", q.service.Namespace, selector, "", &slicesOf); err != nil {
		return nil, fmt.Errorf("list the EndpointSlices of %v: %w", q.service, err)
	}
	err := read(client.NetworkingV1().RESTClient(), "servicecidrs", "", "", "", &ranges)
	if err != nil && !apierrors.IsNotFound(err) { // they exist since Kubernetes 1.33
		return nil, fmt.Errorf("list the ServiceCIDRs: %w", err)
	}
	switch err := read(client.CoreV1().RESTClient(), "nodes", "", "", q.node, &node); {
	case err == nil:
		o.node = &node
	case !apierrors.IsNotFound(err):
		return nil, fmt.Errorf("read the Node %s: %w", q.node, err)
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	if i := slices.IndexFunc(services.Items, func(s corev1.Service) bool {
		return s.Namespace == q.service.Namespace && s.Name == q.service.Name
	}); i >= 0 {
		o.service = &services.Items[i]
	}
	o.slices, o.text = slicesOf.Items, all.Bytes()
	return o, nil
}

// objects adds the step of the objects.
func (r *explainReport) objects(o *explained) {
	s := r.step("objects in the API server")
	if o.node == nil {
		s.differs("there is no Node %s: check its name", r.question.node)
	} else {
		s.fact("Node %s: zone %s, podCIDRs %s, resource version %s", o.node.Name, orNone(o.node.Labels[corev1.LabelTopologyZone]),
			orNone(strings.Join(o.node.Spec.PodCIDRs, " ")), o.node.ResourceVersion)
	}
	if o.service == nil {
		r.refused = true
		r.verdict = append(r.verdict, fmt.Sprintf("There is no Service %v", r.question.service))
		s.differs("there is no Service %v: check its namespace and name", r.question.service)
		return
	}
	describeService(s, o.service)
	shown, total := 0, 0
	for i := range o.slices {
		slice := &o.slices[i]
		var ports []string
		for _, p := range slice.Ports {
			ports = append(ports, fmt.Sprintf("%s=%d", deref(p.Name), deref(p.Port)))
		}
		s.fact("EndpointSlice %s: %s, ports %s, resource version %s", slice.Name, slice.AddressType, orNone(strings.Join(ports, " ")), slice.ResourceVersion)
		total += len(slice.Endpoints)
		for j := range slice.Endpoints {
			if shown++; shown <= maxShownEndpoints {
				s.fact("  %s", describeEndpoint(&slice.Endpoints[j]))
			}
		}
	}
	if total > maxShownEndpoints {
		s.fact("  … and %d more endpoints", total-maxShownEndpoints)
	}
	if len(o.slices) == 0 {
		s.fact("no EndpointSlice: does the Service's selector match pods?")
	}
}

// unchanged asks the API server whether the objects have changed while they were explained. If they
// have, what was found is about the past.
func (r *explainReport) unchanged(ctx context.Context, client kubernetes.Interface, o *explained) {
	ctx, cancel := context.WithTimeout(ctx, r.question.timeout)
	defer cancel()
	var service *corev1.Service
	services, err := client.CoreV1().Services(r.question.service.Namespace).List(ctx, metav1.ListOptions{
		FieldSelector: "metadata.name=" + r.question.service.Name,
	})
	var list *discoveryv1.EndpointSliceList
	if err == nil {
		if len(services.Items) > 0 {
			service = &services.Items[0]
		}
		list, err = client.DiscoveryV1().EndpointSlices(r.question.service.Namespace).List(ctx, metav1.ListOptions{
			LabelSelector: discoveryv1.LabelServiceName + "=" + r.question.service.Name,
		})
	}
	s := r.steps[0]
	switch {
	case err != nil:
		s.notJudged("whether the objects have changed meanwhile: %v", err)
	case !maps.Equal(resourceVersions(o.service, o.slices), resourceVersions(service, list.Items)):
		r.moving = true
		s.notJudged("the Service or its EndpointSlices have changed while they were explained: run the command again")
	}
}

// resourceVersions returns the versions of a Service, if it is not nil, and of slices, by their
// names.
func resourceVersions(service *corev1.Service, all []discoveryv1.EndpointSlice) map[string]string {
	versions := map[string]string{}
	if service != nil {
		versions[""] = string(service.UID) + " " + service.ResourceVersion
	}
	for i := range all {
		versions[all[i].Name] = string(all[i].UID) + " " + all[i].ResourceVersion
	}
	return versions
}

// maxShownPods bounds the Pods that are named, and maxReadPods those that are read.
const (
	maxShownPods = 5
	maxReadPods  = 500
)

// pods says why a Service has no endpoint that receives connections, as far as its Pods tell it. A
// user need not have the right to list them.
func (r *explainReport) pods(ctx context.Context, client kubernetes.Interface, o *explained) {
	if o.service == nil || len(o.service.Spec.Selector) == 0 || usable(o.slices) {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, r.question.timeout)
	defer cancel()
	selector := labels.SelectorFromSet(o.service.Spec.Selector).String()
	list, err := client.CoreV1().Pods(o.service.Namespace).List(ctx, metav1.ListOptions{LabelSelector: selector, Limit: maxReadPods})
	s := r.steps[0]
	if err != nil {
		s.fact("no endpoint is usable; why its Pods are not is not known: %v", err)
		return
	}
	var why []string
	for i := range list.Items {
		if text := notReady(&list.Items[i]); text != "" {
			why = append(why, fmt.Sprintf("Pod %s %s", list.Items[i].Name, text))
		}
	}
	text := fmt.Sprintf("No endpoint of %v is usable: no Pod has the labels %s", r.question.service, selector)
	switch {
	case len(why) > 0:
		text = fmt.Sprintf("No endpoint of %v is usable: %s", r.question.service, strings.Join(why[:min(len(why), maxShownPods)], "; "))
		if more := len(why) - maxShownPods; more > 0 {
			text += fmt.Sprintf("; and %d more", more)
		}
	case len(list.Items) > 0:
		text = fmt.Sprintf("No endpoint of %v is usable, although %s: its EndpointSlices do not follow them", r.question.service,
			show.Plural("ready Pod", len(list.Items))+" of its selector")
	}
	r.verdict = append(r.verdict, text)
}

// usable reports whether a proxy may lead connections to an endpoint.
func usable(all []discoveryv1.EndpointSlice) bool {
	for i := range all {
		for j := range all[i].Endpoints {
			c := &all[i].Endpoints[j].Conditions
			// A condition that is not set counts as true, except terminating.
			if c.Ready == nil || *c.Ready || deref(c.Terminating) && (c.Serving == nil || *c.Serving) {
				return true
			}
		}
	}
	return false
}

// notReady says why a Pod is not ready. It returns an empty string if the Pod is.
func notReady(p *corev1.Pod) string {
	if p.DeletionTimestamp != nil {
		return "terminates"
	}
	reason := func(kind corev1.PodConditionType) string {
		at := slices.IndexFunc(p.Status.Conditions, func(c corev1.PodCondition) bool { return c.Type == kind && c.Status != corev1.ConditionTrue })
		if at < 0 {
			return ""
		}
		c := &p.Status.Conditions[at]
		return fmt.Sprintf(" (%.200s)", strings.Trim(c.Reason+": "+c.Message, ": "))
	}
	for _, c := range p.Status.ContainerStatuses {
		if w := c.State.Waiting; w != nil && w.Reason != "" && w.Reason != "ContainerCreating" {
			return fmt.Sprintf("is %s, and its container %s waits (%.200s)", p.Status.Phase, c.Name, strings.Trim(w.Reason+": "+w.Message, ": "))
		}
	}
	switch {
	case p.Status.Phase != corev1.PodRunning:
		return fmt.Sprintf("is %s%s", p.Status.Phase, reason(corev1.PodScheduled))
	case reason(corev1.PodReady) != "":
		return "is Running, but not ready" + reason(corev1.PodReady)
	}
	return ""
}

func orNone(s string) string {
	if s == "" {
		return "none"
	}
	return s
}

func deref[T any](p *T) (v T) {
	if p != nil {
		v = *p
	}
	return v
}

func describeService(s *step, o *corev1.Service) {
	s.fact("Service %s/%s: type %s, cluster IPs %s, resource version %s", o.Namespace, o.Name, o.Spec.Type,
		orNone(strings.Join(o.Spec.ClusterIPs, " ")), o.ResourceVersion)
	for _, p := range o.Spec.Ports {
		s.fact("  port %s %d/%s, node port %d", orNone(p.Name), p.Port, p.Protocol, p.NodePort)
	}
	s.fact("  internalTrafficPolicy %s, externalTrafficPolicy %s, sessionAffinity %s, trafficDistribution %s",
		orNone(string(deref(o.Spec.InternalTrafficPolicy))), orNone(string(o.Spec.ExternalTrafficPolicy)), o.Spec.SessionAffinity,
		orNone(deref(o.Spec.TrafficDistribution)))
	if len(o.Spec.LoadBalancerSourceRanges) > 0 {
		s.fact("  loadBalancerSourceRanges %s", strings.Join(o.Spec.LoadBalancerSourceRanges, " "))
	}
	if len(o.Spec.ExternalIPs) > 0 {
		s.fact("  externalIPs %s", strings.Join(o.Spec.ExternalIPs, " "))
	}
	for _, i := range o.Status.LoadBalancer.Ingress {
		s.fact("  load balancer %s, ipMode %s", orNone(i.IP+i.Hostname), orNone(string(deref(i.IPMode))))
	}
	if p := o.Labels[source.LabelServiceProxyName]; p != "" {
		s.fact("  label %s: %s", source.LabelServiceProxyName, p)
	}
}

func describeEndpoint(e *discoveryv1.Endpoint) string {
	text := strings.Join(e.Addresses, " ")
	if e.TargetRef != nil {
		text += fmt.Sprintf(" %s %s", e.TargetRef.Kind, e.TargetRef.Name)
	}
	text += fmt.Sprintf(" on %s, zone %s,", orNone(deref(e.NodeName)), orNone(deref(e.Zone)))
	for _, c := range []struct {
		name string
		is   *bool
	}{{"ready", e.Conditions.Ready}, {"serving", e.Conditions.Serving}, {"terminating", e.Conditions.Terminating}} {
		// A condition that is not set counts as true, except terminating.
		if c.is != nil && *c.is || c.is == nil && c.name != "terminating" {
			text += " " + c.name
		} else if c.name != "terminating" {
			text += " not-" + c.name
		}
	}
	if e.Hints != nil {
		var hints []string
		for _, z := range e.Hints.ForZones {
			hints = append(hints, "zone "+z.Name)
		}
		for _, n := range e.Hints.ForNodes {
			hints = append(hints, "node "+n.Name)
		}
		text += ", hints: " + orNone(strings.Join(hints, ", "))
	}
	return text
}
