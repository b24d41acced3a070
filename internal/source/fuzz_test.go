// The fuzz target proves that any object of an API server becomes a canonical object that survives
// encoding, or none.
package source

import (
	"encoding/json"
	"net/netip"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
	"github.com/slicecast/slicecast/internal/wire"
)

// FuzzConvert checks that any object of an API server is converted to a canonical object, which
// survives encoding, or to none.
func FuzzConvert(f *testing.F) {
	f.Add(uint8(0), []byte(`{"metadata": {"name": "web", "namespace": "default", "creationTimestamp": "2026-01-02T03:04:05Z",
		"annotations": {"slicecast.io/ipvs-scheduler": "lc"}}, "spec": {
		"type": "LoadBalancer", "clusterIPs": ["10.96.0.1", "fd00::1"], "externalIPs": ["192.0.2.1", "010.1.1.1"],
		"ports": [{"name": "http", "port": 80, "nodePort": 30080, "protocol": "SCTP"}, {"port": 0}, {"port": 1, "protocol": "x"}],
		"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 5}}, "internalTrafficPolicy": "Local",
		"loadBalancerSourceRanges": ["10.0.0.0/8 ", "::ffff:1.2.3.4/100"], "externalTrafficPolicy": "Local", "healthCheckNodePort": 31000},
		"status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.9", "ipMode": "Proxy"}, {"hostname": "x"}]}}}`))
	f.Add(uint8(0), []byte(`{"metadata": {"name": "db"}, "spec": {"clusterIP": "None"}}`))
	f.Add(uint8(0), []byte(`{"metadata": {"name": "out"}, "spec": {"type": "ExternalName"}}`))
	f.Add(uint8(1), []byte(`{"metadata": {"name": "web-1", "labels": {"kubernetes.io/service-name": "web"},
		"annotations": {"endpoints.kubernetes.io/last-change-trigger-time": "2026-01-02T03:04:05.678Z"}}, "addressType": "IPv4",
		"ports": [{"name": "http", "port": 8080}, {}], "endpoints": [
		{"addresses": ["10.0.0.1"], "conditions": {"ready": false}, "nodeName": "n", "zone": "z",
		"hints": {"forZones": [{"name": "z"}], "forNodes": [{"name": "n"}]}}, {"addresses": ["10.0.0.1"]}, {"addresses": ["fd00::1"]}]}`))
	f.Add(uint8(1), []byte(`{"metadata": {"name": "f", "labels": {"kubernetes.io/service-name": "web"}}, "addressType": "FQDN"}`))
	f.Add(uint8(2), []byte(`{"metadata": {"name": "node-1", "labels": {"a": "b"}}, "spec": {"podCIDRs": ["10.1.0.0/24", "fd00::/64"],
		"taints": [{"key": "ToBeDeletedByClusterAutoscaler"}]}, "status": {"addresses": [{"type": "InternalIP", "address": "10.0.0.1"}]}}`))
	f.Add(uint8(3), []byte(`{"metadata": {"name": "kubernetes"}, "spec": {"cidrs": ["10.96.0.0/16", "::ffff:10.0.0.0/104", "fd00::/112", "x"]}}`))
	f.Fuzz(checkConvert)
}

func checkConvert(t *testing.T, kind uint8, data []byte) {
	object := []metav1.Object{&corev1.Service{}, &discoveryv1.EndpointSlice{}, &corev1.Node{}, &networkingv1.ServiceCIDR{}}[kind%4]
	if json.Unmarshal(data, object) != nil || object.GetName() == "" {
		return // the API server accepts no object without a name
	}
	if kind%4 < 2 && object.GetNamespace() == "" {
		object.SetNamespace(metav1.NamespaceDefault)
	}
	key, converted, skips := NewConverter("").Convert(object)
	for _, s := range skips {
		require.NotEmpty(t, s.Reason)
		require.NotEmpty(t, s.Field)
	}
	if converted == nil {
		require.NotEmpty(t, skips, "there is a reason")
		return
	}
	require.Equal(t, key, converted.Key())
	_, again, _ := NewConverter("").Convert(object)
	require.Empty(t, modeltest.Diff(converted, again))
	u := &model.Update{}
	if s, ok := converted.(*ServiceCIDR); ok { // nodes receive it as part of a Node
		slices.SortFunc(s.CIDRs, netip.Prefix.Compare)
		converted = &model.Node{Name: "n", ServiceCIDRs: slices.Compact(s.CIDRs)}
	}
	if len(data) < 4<<10 { // too short for lists with too many entries
		require.NoError(t, converted.(interface{ Check() error }).Check())
	}
	switch o := converted.(type) {
	case *model.Node:
		frame, err := wire.EncodeNode(o.Name, o, 0)
		require.NoError(t, err)
		r, err := wire.Decode(frame)
		require.NoError(t, err)
		require.Empty(t, r.Problems)
		require.Empty(t, modeltest.Diff(o, r.Node.Node))
		return
	case *model.Service:
		u.Services = append(u.Services, o)
	case *model.Slice:
		u.Slices = append(u.Slices, o)
	}
	frame, err := wire.EncodeUpdate(u)
	require.NoError(t, err)
	r, err := wire.Decode(frame)
	require.NoError(t, err)
	require.Empty(t, r.Problems)
	require.Empty(t, modeltest.Diff(u, r.Update))
}
