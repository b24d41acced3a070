// This test proves that an agent has the metrics of a real kube-proxy, by name, type, labels and
// buckets, in the modes iptables and nftables. Both run on one node, serve a Service each, and are
// given the same changes.
package beside

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	promodel "github.com/prometheus/common/model"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/controlplane"
)

// absent are the metrics of kube-proxy that an agent lacks, by the beginnings of their names, with
// the reasons.
var absent = map[string]string{
	"rest_client_exec_plugin_":            "an agent uses no plugins for its credentials",
	"rest_client_rate_limiter_":           "an agent does not limit its own requests",
	"rest_client_request_duration_":       "client-go measures no watches, and this agent has nothing else; agents with servers have the metric",
	"rest_client_request_size_":           "no dashboard of kube-proxy has it, and an agent makes few requests",
	"rest_client_response_size_":          "no dashboard of kube-proxy has it, and an agent makes few requests",
	"rest_client_transport_":              "no dashboard of kube-proxy has them, and an agent makes few requests",
	"kubernetes_build_info":               "it would count as a component of Kubernetes with a version that differs from the others'",
	"kubernetes_feature_enabled":          "an agent has no feature gates",
	"hidden_metrics_total":                "an agent has no hidden metrics",
	"disabled_metrics_total":              "an agent has no disabled metrics",
	"registered_metrics_total":            "it counts metrics by the stability levels of Kubernetes, which an agent's have not",
	"apiserver_":                          "they are of a library for API servers, which an agent is not",
	"aggregator_":                         "they are of a library for API servers, which an agent is not",
	"cardinality_enforcement_unexpected_": "an agent does not limit labels",
	"go_":                                 "client_golang's collector exports fewer metrics of the Go runtime by default",
}

// shape is what dashboards and alerts rely on: the type of a metric, its labels and its buckets.
func shape(f *dto.MetricFamily) string {
	var labels []string
	var buckets []float64
	for _, m := range f.GetMetric() {
		for _, l := range m.GetLabel() {
			if !slices.Contains(labels, l.GetName()) {
				labels = append(labels, l.GetName())
			}
		}
		for _, b := range m.GetHistogram().GetBucket() {
			if !slices.Contains(buckets, b.GetUpperBound()) {
				buckets = append(buckets, b.GetUpperBound())
			}
		}
	}
	slices.Sort(labels)
	slices.Sort(buckets)
	return fmt.Sprintf("%v, labels %v, buckets %v", f.GetType(), labels, buckets)
}

// labelsOf returns the values of a label.
func labelsOf(f *dto.MetricFamily, name string) (values []string) {
	for _, m := range f.GetMetric() {
		for _, l := range m.GetLabel() {
			if l.GetName() == name && !slices.Contains(values, l.GetValue()) {
				values = append(values, l.GetValue())
			}
		}
	}
	return values
}

// page is what a URL answers.
type page struct {
	status int
	header http.Header
	body   string
}

// get returns what a URL answers on the node.
func (n *node) get(url string) (page, error) {
	client := &http.Client{Transport: &http.Transport{DialContext: n.DialContext, DisableKeepAlives: true}}
	r, err := client.Get(url)
	if err != nil {
		return page{}, err
	}
	defer r.Body.Close()
	body, err := io.ReadAll(r.Body)
	return page{r.StatusCode, r.Header, string(body)}, err
}

// scrape returns the metrics at an address on the node, by name.
func (n *node) scrape(address string) (map[string]*dto.MetricFamily, error) {
	metrics, err := n.get("http://" + address + "/metrics")
	if err != nil {
		return nil, err
	}
	parser := expfmt.NewTextParser(promodel.LegacyValidation)
	return parser.TextToMetricFamilies(strings.NewReader(metrics.body))
}

// trigger changes the endpoints of a Service, with the time of the change as a controller writes
// it.
func (w *world) trigger(service string, backends ...*testenv.Pod) {
	w.t.Helper()
	s := slice(service, backends)
	s.Annotations = map[string]string{corev1.EndpointsLastChangeTriggerTime: time.Now().UTC().Format(time.RFC3339Nano)}
	_, err := w.api.DiscoveryV1().EndpointSlices("default").Update(w.t.Context(), s, metav1.UpdateOptions{})
	require.NoError(w.t, err)
}

// overUDP creates a UDP Service, so that both proxies look for stale flows.
func (w *world) overUDP(name, proxy string) {
	w.t.Helper()
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default"},
		Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 53, Protocol: corev1.ProtocolUDP}}},
	}
	if proxy != "" {
		s.Labels = map[string]string{label: proxy}
	}
	_, err := w.api.CoreV1().Services("default").Create(w.t.Context(), s, metav1.CreateOptions{})
	require.NoError(w.t, err)
	_, err = w.api.DiscoveryV1().EndpointSlices("default").Create(w.t.Context(), &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: name + "-1", Namespace: "default", Labels: map[string]string{discoveryv1.LabelServiceName: name}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: ptr.To(""), Protocol: ptr.To(corev1.ProtocolUDP), Port: ptr.To[int32](53)}},
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{"10.180.99.99"}}},
	}, metav1.CreateOptions{})
	require.NoError(w.t, err)
}

func TestMetricsAreKubeProxys(t *testing.T) {
	network := testenv.NewNetwork(t)
	control := controlplane.Start(t, controlplane.Options{Address: network.World.IPv4})
	w := &world{t: t, api: control.Client(), outside: network.AddClient("outside")}
	var pods []*testenv.Pod
	for _, mode := range []string{"iptables", "nftables"} {
		n := newNode(t, network, control, "node-"+mode, mode)
		w.nodes = append(w.nodes, n)
		pods = append(pods, n.AddPod("web-"+mode))
		pods[len(pods)-1].Serve(testenv.TCP, port)
	}
	theirs := w.createService("theirs", "", pods...)
	w.createService("ours", proxyName, pods...)
	w.overUDP("theirs-udp", "")
	w.overUDP("ours-udp", proxyName)
	const kubeProxys, agents = "127.0.0.1:10249", "127.0.0.1:10259"
	for _, n := range w.nodes {
		n.proxy = n.startProxy()
		n.agent = n.startAgent("--programmer="+n.mode, "--metrics-bind-address="+agents, "--healthz-bind-address=127.0.0.1:8475",
			"--iptables-localhost-nodeports", "--nodeport-addresses=all")
	}
	w.requireServed(theirs, "kube-proxy", pods...)
	for _, n := range w.nodes {
		n.requireSamePages(kubeProxys, agents)
	}

	for i := range 3 { // kube-proxy measures changes from after its start only
		w.trigger("theirs", pods[i%2])
		w.trigger("ours", pods[i%2])
	}
	used := make(map[string]bool) // of absent
	for _, n := range w.nodes {
		for _, address := range []string{"127.0.0.1:10256", "127.0.0.1:8475"} {
			for _, path := range []string{"/healthz", "/livez"} {
				testenv.Eventually(t, settleTimeout, func() error {
					_, err := n.get("http://" + address + path)
					return err
				})
			}
		}
		testenv.Eventually(t, settleTimeout, func() error {
			reference, err := n.scrape(kubeProxys)
			if err != nil {
				return err
			}
			own, err := n.scrape(agents)
			if err != nil {
				return err
			}
			for name := range reference {
				if prefix, is := lacks(name); is {
					used[prefix] = true
				}
			}
			return compare(reference, own)
		})
	}
	for prefix := range absent {
		assert.True(t, used[prefix], "kube-proxy has no metric %s: remove it from absent", prefix)
	}
}

// lacks reports whether a metric is in absent, and under which name.
func lacks(metric string) (prefix string, is bool) {
	for prefix := range absent {
		if strings.HasPrefix(metric, prefix) {
			return prefix, true
		}
	}
	return "", false
}

// compare returns an error unless own has each metric of the reference, in the same shape, except
// for those in absent.
func compare(reference, own map[string]*dto.MetricFamily) error {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(reference)) {
		if _, is := lacks(name); is {
			continue
		}
		if own[name] == nil {
			errs = append(errs, fmt.Errorf("%s is missing", name))
			continue
		}
		if want, have := shape(reference[name]), shape(own[name]); want != have {
			errs = append(errs, fmt.Errorf("%s: have %s, want %s", name, have, want))
		}
		for _, label := range []string{"ip_family", "table", "traffic_policy", "code"} {
			if strings.HasPrefix(name, "rest_client_") {
				continue // their requests differ
			}
			for _, value := range labelsOf(reference[name], label) {
				if !slices.Contains(labelsOf(own[name], label), value) {
					errs = append(errs, fmt.Errorf("%s has no metric with %s=%s", name, label, value))
				}
			}
		}
	}
	for _, name := range []string{
		"kubeproxy_network_programming_duration_seconds", "kubeproxy_sync_proxy_rules_duration_seconds",
		"kubeproxy_sync_partial_proxy_rules_duration_seconds", "kubeproxy_conntrack_reconciler_sync_duration_seconds",
	} {
		if reference[name] == nil { // otherwise, the comparison would say little
			errs = append(errs, fmt.Errorf("kube-proxy has no %s yet", name))
		}
	}
	return errors.Join(errs...)
}

// requireSamePages asserts that the pages of both proxies have the same type and, where it does not
// depend on the program, the same content.
func (n *node) requireSamePages(kubeProxys, agents string) {
	n.t.Helper()
	different := []string{"/configz", "/statusz", "/flagz"}
	for _, path := range append([]string{"/proxyMode", "/healthz", "/healthz?verbose", "/healthz/ping"}, different...) {
		var kinds, bodies []string
		for _, address := range []string{kubeProxys, agents} {
			testenv.Eventually(n.t, settleTimeout, func() error {
				r, err := n.get("http://" + address + path)
				if err != nil {
					return err
				}
				if r.status != http.StatusOK {
					return fmt.Errorf("%s%s answers %d: %s", address, path, r.status, r.body)
				}
				if server := r.header.Get("Server"); (server == "") != (address == kubeProxys) {
					return fmt.Errorf("%s%s has the header Server: %s", address, path, server)
				}
				kinds, bodies = append(kinds, r.header.Get("Content-Type")), append(bodies, r.body)
				return nil
			})
		}
		require.Equal(n.t, kinds[0], kinds[1], path)
		if !slices.Contains(different, path) {
			require.Equal(n.t, bodies[0], bodies[1], path)
		}
	}
}
