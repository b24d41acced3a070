package performance

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/slicecast/slicecast/loadtest/report"
	"github.com/slicecast/slicecast/loadtest/scenario"
)

// whole is the size of the headline's updates if nodes receive whole objects.
type whole struct {
	// Each counts one version of the object for each replaced pod, as the announcement of
	// EndpointSlices does. Played counts one version for each sync of the scenario that is played.
	Each, Played string
}

// endpoints computes the size of the headline's rolling update if nodes receive a whole Endpoints
// object each time that it changes. The object has all fields that the endpoints controller writes,
// in protobuf. In the scenario that is played it changes twice for each batch: when pods become
// ready, and when as many terminate, which removes them from the object.
func endpoints() (out whole, err error) {
	s, err := scenario.Load("headline", nil)
	if err != nil {
		return out, err
	}
	pods := s.Changing[0].Most
	e := corev1.Endpoints{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "headline"}}
	subset := corev1.EndpointSubset{Ports: []corev1.EndpointPort{{Name: "http", Port: 8080, Protocol: corev1.ProtocolTCP}}}
	for i := range pods {
		subset.Addresses = append(subset.Addresses, corev1.EndpointAddress{
			IP: fmt.Sprintf("100.64.%d.%d", i/250, i%250), NodeName: new(fmt.Sprintf("node-%05d", i%s.Nodes)),
			TargetRef: &corev1.ObjectReference{
				Kind: "Pod", Namespace: "default", Name: fmt.Sprintf("headline-7d4b9c6f58-%05x", i), UID: "00000000-0000-0000-0000-000000000000",
			},
		})
	}
	e.Subsets = append(e.Subsets, subset)
	object := float64(e.Size())
	times := func(versions int, what string) string {
		return fmt.Sprintf("%s × %d %s × %d nodes = %s", report.FormatValue(object, report.Bytes), versions, what, s.Nodes,
			report.FormatValue(object*float64(versions*s.Nodes), report.Bytes))
	}
	return whole{
		Each:   times(pods, "replaced pods"),
		Played: times(2*((pods+s.Batch-1)/s.Batch), fmt.Sprintf("syncs, two for each %d pods,", s.Batch)),
	}, nil
}
