package source

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
)

// SelectServices and SelectEndpointSlices are what kube-proxy asks an API server for (cmd/kube-proxy/app, 1.37). They spare the
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

// ValidateProxyName tells whether a flag's value can be that of the label that names a proxy.
func ValidateProxyName(name string) error {
	if problems := validation.IsValidLabelValue(name); len(problems) > 0 {
		return fmt.Errorf("--service-proxy-name is %q, which no label has: %s", name, strings.Join(problems, "; "))
	}
	return nil
}
