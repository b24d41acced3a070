package controlplane

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes/scheme"
)

// seedBatch is the number of objects that Seed writes in one transaction. etcd admits 128, and 1.5
// MiB in total.
const seedBatch = 64

// Seed writes Services, their IPAddresses and EndpointSlices to etcd as the API server would, but
// without the API server, which sees them in its watches. For each Service that the API server
// creates, it goes through the addresses of all others to update a metric, so tens of thousands
// take half an hour. Nothing validates the objects or sets defaults, so they should be copies of an
// object that the API server has returned. A lent control plane refuses them, because its etcd is
// not reachable from here.
//
// The objects of a transaction have one resource version, which those of an API server never have.
// A list that the API server answers while it receives them, and a watch from that list's version
// on, would miss some. So Seed returns when the API server's caches have all of them.
func (cp *ControlPlane) Seed(ctx context.Context, objects []runtime.Object) error {
	if cp.Etcd == nil {
		return errors.New("the etcd of a lent control plane is not reachable: create the objects with Client")
	}
	for batch := range slices.Chunk(objects, seedBatch) {
		if err := cp.put(ctx, batch); err != nil {
			return fmt.Errorf("write %d objects to etcd: %w", len(batch), err)
		}
	}
	last := map[string]runtime.Object{}
	for _, o := range objects {
		last[fmt.Sprintf("%T", o)] = o
	}
	for kind, o := range last { // an API server receives the objects of a kind in their order
		if err := cp.awaitCached(ctx, o); err != nil {
			return fmt.Errorf("wait until the API server has the last %s: %w", kind, err)
		}
	}
	return nil
}

// awaitCached waits until the API server's cache has an object.
func (cp *ControlPlane) awaitCached(ctx context.Context, o runtime.Object) error {
	cached := metav1.GetOptions{ResourceVersion: "0"}
	return wait.PollUntilContextCancel(ctx, 10*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		var err error
		switch o := o.(type) {
		case *corev1.Service:
			_, err = cp.Client().CoreV1().Services(o.Namespace).Get(ctx, o.Name, cached)
		case *networkingv1.IPAddress:
			_, err = cp.Client().NetworkingV1().IPAddresses().Get(ctx, o.Name, cached)
		case *discoveryv1.EndpointSlice:
			_, err = cp.Client().DiscoveryV1().EndpointSlices(o.Namespace).Get(ctx, o.Name, cached)
		}
		if apierrors.IsNotFound(err) {
			return false, nil
		}
		return err == nil, err
	})
}

// put writes objects in one transaction, through etcd's JSON gateway.
func (cp *ControlPlane) put(ctx context.Context, objects []runtime.Object) error {
	type put struct {
		Key   []byte `json:"key"`
		Value []byte `json:"value"`
	}
	type operation struct {
		Put put `json:"requestPut"`
	}
	var transaction struct {
		Success []operation `json:"success"`
	}
	for _, o := range objects {
		key, version, err := stored(o)
		if err != nil {
			return err
		}
		serializer := protobuf.NewSerializer(scheme.Scheme, scheme.Scheme)
		value, err := runtime.Encode(scheme.Codecs.EncoderForVersion(serializer, version), o)
		if err != nil {
			return err
		}
		transaction.Success = append(transaction.Success, operation{put{[]byte(key), value}})
	}
	body, err := json.Marshal(transaction)
	if err != nil {
		return err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, cp.etcdURL+"/v3/kv/txn", bytes.NewReader(body))
	if err != nil {
		return err
	}
	response, err := (&http.Transport{DisableKeepAlives: true}).RoundTrip(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", response.Status, answer)
	}
	return err
}

// stored returns the key and the version with which the API server stores an object. Compare the
// REST storages in kubernetes/pkg/registry.
func stored(o runtime.Object) (key string, version schema.GroupVersion, err error) {
	switch o := o.(type) {
	case *corev1.Service:
		return "/registry/services/specs/" + o.Namespace + "/" + o.Name, corev1.SchemeGroupVersion, nil
	case *networkingv1.IPAddress:
		return "/registry/ipaddresses/" + o.Name, networkingv1.SchemeGroupVersion, nil
	case *discoveryv1.EndpointSlice:
		return "/registry/endpointslices/" + o.Namespace + "/" + o.Name, discoveryv1.SchemeGroupVersion, nil
	}
	return "", version, fmt.Errorf("a %T cannot be seeded", o)
}
