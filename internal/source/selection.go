package source

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// SelectServices and SelectEndpointSlices are what kube-proxy asks an API server for (cmd/kube-proxy/app, 1.36). They spare the
// transfer of what FromService and FromEndpointSlice would leave out.

// SelectServices selects the Services of the proxy of that name, or, if it is empty, of the cluster's default one.
func SelectServices(serviceProxyName string) metav1.ListOptions {
	labels := "!" + LabelServiceProxyName
	if serviceProxyName != "" {
		labels = LabelServiceProxyName + "=" + serviceProxyName
	}
	return metav1.ListOptions{LabelSelector: labels, FieldSelector: "spec.clusterIP!=" + corev1.ClusterIPNone}
}

// SelectEndpointSlices selects slices by nothing but that their Service has cluster IPs: the proxy's name may be missing on them,
// or late.
func SelectEndpointSlices() metav1.ListOptions {
	return metav1.ListOptions{LabelSelector: "!" + corev1.IsHeadlessService}
}
