package source

import (
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Trim removes from a Service, an EndpointSlice or a ServiceCIDR what Converter does not use and
// anybody may make large, such as annotations. What it leaves is converted in the same way.
func Trim(o metav1.Object) {
	o.SetManagedFields(nil)
	o.SetOwnerReferences(nil)
	o.SetFinalizers(nil)
	o.SetLabels(only(o.GetLabels(), LabelServiceProxyName, discoveryv1.LabelServiceName, corev1.IsHeadlessService))
	o.SetAnnotations(only(o.GetAnnotations(), AnnotationIPVSScheduler, corev1.EndpointsLastChangeTriggerTime))
	switch o := o.(type) {
	case *corev1.Service:
		o.Spec.Selector, o.Status.Conditions = nil, nil
	case *discoveryv1.EndpointSlice:
		for i := range o.Endpoints {
			e := &o.Endpoints[i]
			e.Hostname, e.TargetRef, e.DeprecatedTopology = nil, nil, nil
		}
	}
}

// only returns the entries of a map with these keys.
func only(all map[string]string, keys ...string) map[string]string {
	var left map[string]string
	for _, k := range keys {
		if v, ok := all[k]; ok {
			if left == nil {
				left = map[string]string{}
			}
			left[k] = v
		}
	}
	return left
}
