// These tests prove which addresses an agent finds for its servers' Service: those of endpoints
// that are not unready, at the port of gRPC. While the API server is down, the last ones found
// remain. The API server is client-go's fake. They also prove when the servers' CAs are looked up.
package app

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"
	"k8s.io/utils/ptr"

	"github.com/slicecast/slicecast/agent/client"
	"github.com/slicecast/slicecast/internal/model"
)

func slice(name, service string, ready *bool, ports []discoveryv1.EndpointPort, addresses ...string) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "system", Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: service}},
		AddressType: discoveryv1.AddressTypeIPv4, Ports: ports,
	}
	for _, a := range addresses {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{a}, Conditions: discoveryv1.EndpointConditions{Ready: ready},
		})
	}
	return s
}

func TestFinder(t *testing.T) {
	grpc := discoveryv1.EndpointPort{Name: ptr.To("grpc"), Port: ptr.To(int32(8472))}
	metrics := discoveryv1.EndpointPort{Name: ptr.To("metrics"), Port: ptr.To(int32(8474))}
	api := fake.NewClientset(
		slice("a", "server", nil, []discoveryv1.EndpointPort{metrics, grpc}, "10.0.0.2", "10.0.0.1"),
		slice("b", "server", ptr.To(false), []discoveryv1.EndpointPort{grpc}, "10.0.0.3"),
		slice("c", "server", ptr.To(true), []discoveryv1.EndpointPort{{Port: ptr.To(int32(9000))}}, "10.0.0.4"),
		slice("d", "other", nil, []discoveryv1.EndpointPort{grpc}, "10.0.0.5"),
	)
	down, torn, connected := false, false, 0
	api.PrependReactor("list", "endpointslices", func(k8stesting.Action) (bool, runtime.Object, error) {
		if down {
			return true, nil, errors.New("connection refused")
		}
		return false, nil, nil
	})
	finder := func(name string) *finder {
		return &finder{
			connect: func() (lister, error) {
				connected++
				if torn {
					return nil, errors.New("the kubeconfig is torn")
				}
				return func(ctx context.Context) ([]discoveryv1.EndpointSlice, error) {
					list, err := api.DiscoveryV1().EndpointSlices("system").List(ctx, metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=" + name})
					return list.Items, err
				}, nil
			},
			service: model.ServiceKey{Namespace: "system", Name: name}, log: slog.New(slog.DiscardHandler),
		}
	}
	f := finder("server")
	var want []client.Server
	for _, address := range []string{"10.0.0.1:8472", "10.0.0.2:8472", "10.0.0.4:9000"} {
		want = append(want, client.Server{Address: address})
	}

	torn = true
	_, err := f.servers(t.Context())
	require.ErrorContains(t, err, "the kubeconfig is torn")
	torn, down = false, true
	_, err = f.servers(t.Context())
	require.ErrorContains(t, err, "list the EndpointSlices of Service system/server")
	down = false
	found, err := f.servers(t.Context())
	require.NoError(t, err)
	require.Equal(t, want, found)
	down = true
	found, err = f.servers(t.Context())
	require.NoError(t, err, "the API server is away, but servers are known")
	require.Equal(t, want, found)
	torn = true
	found, err = f.servers(t.Context())
	require.NoError(t, err, "it connects anew after a failure, and servers are known")
	require.Equal(t, want, found)
	require.Equal(t, 4, connected, "after the start, and after each failure")

	torn, down = false, false
	for range 2 {
		_, err = f.servers(t.Context())
		require.NoError(t, err)
	}
	require.Equal(t, 5, connected, "a connection that works is kept")
	_, err = finder("none").servers(t.Context())
	require.ErrorContains(t, err, "no ready endpoint")
}

// TestCAsAreLookedUpUntilThereIsAFile requires one request at most with each lookup that has found
// servers, and that servers are found whatever its outcome.
func TestCAsAreLookedUpUntilThereIsAFile(t *testing.T) {
	grpc := discoveryv1.EndpointPort{Name: ptr.To("grpc"), Port: ptr.To(int32(8472))}
	var found []discoveryv1.EndpointSlice
	cas, failure, reads := []byte("1"), error(nil), 0
	f := &finder{
		list: func(context.Context) ([]discoveryv1.EndpointSlice, error) { return found, nil },
		log:  slog.New(slog.DiscardHandler), caFile: filepath.Join(t.TempDir(), "ca.crt"),
		readCAs: func(ctx context.Context) ([]byte, error) {
			_, ends := ctx.Deadline()
			require.True(t, ends)
			reads++
			return cas, failure
		},
	}
	require.Nil(t, f.earlyCAs())
	_, err := f.servers(t.Context())
	require.Error(t, err)
	require.Zero(t, reads, "there is no server to verify")

	found = append(found, *slice("a", "server", nil, []discoveryv1.EndpointPort{grpc}, "10.0.0.1"))
	look := func(wantReads int, want string) {
		t.Helper()
		servers, err := f.servers(t.Context())
		require.NoError(t, err)
		require.Len(t, servers, 1)
		require.Equal(t, want, string(f.earlyCAs()))
		require.Equal(t, wantReads, reads)
	}
	failure = errors.New("forbidden")
	look(1, "")
	failure = nil
	look(2, "1")
	cas, failure = nil, errors.New("the API server is away")
	look(3, "1")
	cas, failure = []byte("2"), nil
	look(4, "2")
	require.NoError(t, os.WriteFile(f.caFile, nil, 0o600))
	look(4, "2")
	f.readCAs = nil // without --ca-config-map
	require.NoError(t, os.Remove(f.caFile))
	look(4, "2")
}
