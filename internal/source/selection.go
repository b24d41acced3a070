package source

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
)

// SelectServices and SelectEndpointSlices are the selections that kube-proxy requests from an API
// server (cmd/kube-proxy/app, 1.37). They avoid the transfer of objects that FromService and
// FromEndpointSlice would leave out.

// SelectServices selects the Services of the proxy of that name. If the name is empty, it selects
// those of the cluster's default proxy.
func SelectServices(serviceProxyName string) metav1.ListOptions {
	labels := "!" + LabelServiceProxyName
	if serviceProxyName != "" {
		labels = LabelServiceProxyName + "=" + serviceProxyName
	}
	return metav1.ListOptions{LabelSelector: labels, FieldSelector: "spec.clusterIP!=" + corev1.ClusterIPNone}
}

// SelectEndpointSlices selects slices of Services with cluster IPs. It does not select by the
// proxy's name, as that label may be missing on slices or come late.
func SelectEndpointSlices() metav1.ListOptions {
	return metav1.ListOptions{LabelSelector: "!" + corev1.IsHeadlessService}
}

// ValidateProxyName returns an error if a flag's value cannot be the value of the label that names
// a proxy.
func ValidateProxyName(name string) error {
	if problems := validation.IsValidLabelValue(name); len(problems) > 0 {
		return fmt.Errorf("--service-proxy-name: %q is not a valid label value: %s", name, strings.Join(problems, "; "))
	}
	return nil
}
