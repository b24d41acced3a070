// This file writes the objects of a case to a real API server, and removes them after it.
package conformance

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// manager is the field manager of applied objects.
const manager = "conformance"

// cluster is the API server with the objects of one case at a time.
type cluster struct {
	api  kubernetes.Interface
	rest rest.Interface
}

func newCluster(api kubernetes.Interface) *cluster {
	return &cluster{api, api.Discovery().RESTClient()}
}

// Apply applies objects. Fields that an earlier call applied and that are missing now are removed.
func (c *cluster) Apply(ctx context.Context, objects Objects) error {
	for _, object := range objects {
		r := Reference{object.GetKind(), object.GetNamespace(), object.GetName()}
		data, err := object.MarshalJSON()
		if err != nil {
			return err
		}
		err = c.rest.Patch(types.ApplyPatchType).AbsPath(r.path()).Param("fieldManager", manager).Param("force", "true").
			Param("fieldValidation", "Strict").Body(data).Do(ctx).Error()
		if err != nil {
			return fmt.Errorf("apply %s: %w", r, err)
		}
	}
	return nil
}

// Patch applies a merge patch to an object, or to its status if subresource is "status".
func (c *cluster) Patch(ctx context.Context, r Reference, patch map[string]any, subresource ...string) error {
	data, err := json.Marshal(patch)
	if err != nil {
		return err
	}
	err = c.rest.Patch(types.MergePatchType).AbsPath(append([]string{r.path()}, subresource...)...).
		Param("fieldValidation", "Strict").Body(data).Do(ctx).Error()
	if err != nil {
		return fmt.Errorf("patch %s: %w", r, err)
	}
	return nil
}

// Delete deletes an object.
func (c *cluster) Delete(ctx context.Context, r Reference) error {
	if err := c.rest.Delete().AbsPath(r.path()).Do(ctx).Error(); err != nil {
		return fmt.Errorf("delete %s: %w", r, err)
	}
	return nil
}

// Clear deletes the Services, slices and ServiceCIDRs of all cases.
func (c *cluster) Clear(ctx context.Context) error {
	services, err := c.api.CoreV1().Services("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	for i := range services.Items {
		s := &services.Items[i]
		if s.Namespace == canaryNamespace || s.Namespace == metav1.NamespaceDefault {
			continue // the canary, and the API server's own Service
		}
		if err := c.Delete(ctx, Reference{"Service", s.Namespace, s.Name}); err != nil {
			return err
		}
	}
	slices, err := c.api.DiscoveryV1().EndpointSlices("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	for i := range slices.Items {
		s := &slices.Items[i]
		if s.Namespace == canaryNamespace {
			continue
		}
		if err := c.Delete(ctx, Reference{"EndpointSlice", s.Namespace, s.Name}); err != nil {
			return err
		}
	}
	ranges, err := c.api.NetworkingV1().ServiceCIDRs().List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	for i := range ranges.Items {
		if name := ranges.Items[i].Name; name != "kubernetes" { // the API server's own
			if err := c.Delete(ctx, Reference{"ServiceCIDR", "", name}); err != nil {
				return err
			}
		}
	}
	return nil
}

// RepeatZone removes the zone from a Node and sets it again.
func (c *cluster) RepeatZone(t *testing.T, name string) {
	t.Helper()
	ctx, nodes := t.Context(), c.api.CoreV1().Nodes()
	node, err := nodes.Get(ctx, name, metav1.GetOptions{})
	require.NoError(t, err)
	zone, ok := node.Labels[corev1.LabelTopologyZone]
	if !ok {
		return
	}
	delete(node.Labels, corev1.LabelTopologyZone)
	node, err = nodes.Update(ctx, node, metav1.UpdateOptions{})
	require.NoError(t, err)
	node.Labels[corev1.LabelTopologyZone] = zone
	_, err = nodes.Update(ctx, node, metav1.UpdateOptions{})
	require.NoError(t, err)
}

// NodeHas reports whether the Node has exactly these addresses in this order, and these pod CIDRs.
func (c *cluster) NodeHas(t *testing.T, want Node) bool {
	t.Helper()
	node, err := c.api.CoreV1().Nodes().Get(t.Context(), want.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return false
	}
	require.NoError(t, err)
	return slices.EqualFunc(node.Status.Addresses, want.IPs, func(address corev1.NodeAddress, ip Addr) bool { return address.Address == ip.String() }) &&
		slices.Equal(node.Spec.PodCIDRs, want.cidrs())
}

// SetNode puts the Node into the state with which a case begins.
func (c *cluster) SetNode(t *testing.T, want Node) {
	t.Helper()
	ctx, nodes := t.Context(), c.api.CoreV1().Nodes()
	spec := corev1.NodeSpec{PodCIDR: want.PodCIDR.String(), PodCIDRs: want.cidrs()}
	node, err := nodes.Get(ctx, want.Name, metav1.GetOptions{})
	if err == nil && !slices.Equal(node.Spec.PodCIDRs, spec.PodCIDRs) { // pod CIDRs cannot be changed
		require.NoError(t, nodes.Delete(ctx, want.Name, metav1.DeleteOptions{}))
		node, err = nodes.Get(ctx, want.Name, metav1.GetOptions{})
	}
	if apierrors.IsNotFound(err) {
		// The Node needs its pod CIDRs from the start: a kube-proxy that has lost its Node exits if
		// the next one has other pod CIDRs, or none yet.
		node, err = nodes.Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: want.Name}, Spec: spec}, metav1.CreateOptions{})
	}
	require.NoError(t, err)
	node.Labels = map[string]string{corev1.LabelHostname: want.Name}
	if want.Zone != nil {
		node.Labels[corev1.LabelTopologyZone] = *want.Zone
	}
	node.Annotations, node.Spec = nil, spec
	node, err = nodes.Update(ctx, node, metav1.UpdateOptions{})
	require.NoError(t, err)
	node.Status.Addresses = nil
	for _, ip := range want.IPs {
		node.Status.Addresses = append(node.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: ip.String()})
	}
	_, err = nodes.UpdateStatus(ctx, node, metav1.UpdateOptions{})
	require.NoError(t, err)
}
