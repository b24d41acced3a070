// TestRealAPIServer proves that the source holds what a real API server has, after its components
// were killed and paused during churn, and that it never removed an object that was there all the
// time.
package kube

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/source"
	"github.com/slicecast/slicecast/internal/source/sourcetest"
	"github.com/slicecast/slicecast/internal/testenv/controlplane"
)

// churn changes objects of every kind at random until it is stopped. Objects with "stays" in the
// name stay.
type churn struct {
	client kubernetes.Interface
	random *rand.Rand
	done   atomic.Int64 // changes that the API server accepted
}

var errStays = errors.New("this one stays")

func (c *churn) run(ctx context.Context) {
	for ctx.Err() == nil {
		// Requests fail while components are down.
		ctx, cancel := context.WithTimeout(ctx, time.Second)
		if c.step(ctx) == nil {
			c.done.Add(1)
		}
		cancel()
	}
}

func (c *churn) step(ctx context.Context) error {
	n := c.random.IntN(20)
	name := fmt.Sprintf("s%d", n)
	if n < 5 {
		name += "-stays"
	}
	services, slices, nodes := c.client.CoreV1().Services("default"), c.client.DiscoveryV1().EndpointSlices("default"), c.client.CoreV1().Nodes()
	cidrs := c.client.NetworkingV1().ServiceCIDRs()
	switch c.random.IntN(9) {
	case 0:
		return c.createService(ctx, name)
	case 1:
		s, err := services.Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		s.Spec.Ports[0].Port = int32(1 + c.random.IntN(60000))
		s.Labels = nil
		if n >= 5 && c.random.IntN(2) == 0 {
			s.Labels = map[string]string{source.LabelServiceProxyName: "other"}
		}
		_, err = services.Update(ctx, s, metav1.UpdateOptions{})
		return err
	case 2:
		if n < 5 {
			return errStays
		}
		return services.Delete(ctx, name, metav1.DeleteOptions{})
	case 3:
		return c.createSlice(ctx, name)
	case 4, 5:
		s, err := slices.Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		s.Endpoints = append(s.Endpoints[:c.random.IntN(len(s.Endpoints))], discoveryv1.Endpoint{
			Addresses: []string{netip.AddrFrom4([4]byte{10, 1, byte(n), byte(1 + c.random.IntN(200))}).String()},
		})
		if n >= 5 {
			s.Labels = map[string]string{discoveryv1.LabelServiceName: fmt.Sprintf("s%d", c.random.IntN(20))}
			if c.random.IntN(3) == 0 {
				s.Labels[corev1.IsHeadlessService] = ""
			}
		}
		_, err = slices.Update(ctx, s, metav1.UpdateOptions{})
		return err
	case 6:
		if n < 5 {
			return errStays
		}
		return slices.Delete(ctx, name, metav1.DeleteOptions{})
	case 7:
		if _, err := cidrs.Create(ctx, serviceCIDR(name, fmt.Sprintf("10.%d.0.0/16", 128+n)), metav1.CreateOptions{}); err == nil || n < 5 {
			return err
		}
		return cidrs.Delete(ctx, name, metav1.DeleteOptions{})
	default:
		node, err := nodes.Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			_, err = nodes.Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
			return err
		}
		if n >= 5 && c.random.IntN(3) == 0 {
			return nodes.Delete(ctx, name, metav1.DeleteOptions{})
		}
		node.Labels = map[string]string{"zone": fmt.Sprint(c.random.IntN(3))}
		_, err = nodes.Update(ctx, node, metav1.UpdateOptions{})
		return err
	}
}

func (c *churn) createService(ctx context.Context, name string) error {
	s := service(name)
	s.Spec.ClusterIP, s.Spec.ClusterIPs = "", nil
	if c.random.IntN(4) == 0 && name[len(name)-1] != 's' {
		s.Spec.ClusterIP = corev1.ClusterIPNone
	}
	_, err := c.client.CoreV1().Services("default").Create(ctx, s, metav1.CreateOptions{})
	return err
}

func (c *churn) createSlice(ctx context.Context, name string) error {
	s := slice(name)
	s.Ports = []discoveryv1.EndpointPort{{Port: ptr.To[int32](80)}}
	_, err := c.client.DiscoveryV1().EndpointSlices("default").Create(ctx, s, metav1.CreateOptions{})
	return err
}

// directList returns what a list of everything converts to.
func directList(ctx context.Context, client kubernetes.Interface) (map[model.Key]model.Keyed, error) {
	objects := map[model.Key]model.Keyed{}
	converter := source.NewConverter("")
	add := func(o metav1.Object) {
		if key, converted, _ := converter.Convert(o); converted != nil {
			objects[key] = converted
		}
	}
	services, err := client.CoreV1().Services("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	for i := range services.Items {
		add(&services.Items[i])
	}
	endpointSlices, err := client.DiscoveryV1().EndpointSlices("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	for i := range endpointSlices.Items {
		add(&endpointSlices.Items[i])
	}
	nodes, err := client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	cidrs, err := client.NetworkingV1().ServiceCIDRs().List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	ranges := map[netip.Prefix]bool{}
	for i := range cidrs.Items {
		for _, cidr := range cidrs.Items[i].Spec.CIDRs {
			ranges[netip.MustParsePrefix(cidr)] = true
		}
	}
	for i := range nodes.Items {
		add(&nodes.Items[i])
		key := model.Key{Kind: model.KindNode, Name: nodes.Items[i].Name}
		objects[key].(*model.Node).ServiceCIDRs = slices.SortedFunc(maps.Keys(ranges), netip.Prefix.Compare)
	}
	return objects, nil
}

// TestRealAPIServer lets the source follow a real API server through its failures, during churn. In
// the end, it must hold what the API server has. Objects that existed all the time must never have
// been removed.
func TestRealAPIServer(t *testing.T) {
	cp := controlplane.Start(t, controlplane.Options{})
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	client := cp.Client()

	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	c := &churn{client: client, random: rand.New(rand.NewPCG(seed, 0))}
	stays := []string{}
	for n := range 5 {
		name := fmt.Sprintf("s%d-stays", n)
		require.NoError(t, c.createService(ctx, name))
		require.NoError(t, c.createSlice(ctx, name))
		stays = append(stays, "Service default/"+name, "EndpointSlice default/"+name)
	}

	config, err := Config(cp.Kubeconfig(t, cp.AdminConfig()))
	require.NoError(t, err)
	r := start(t, config)
	r.awaitSynced(t)

	var churning sync.WaitGroup
	churnContext, stopChurn := context.WithCancel(ctx)
	churning.Go(func() { c.run(churnContext) })
	defer func() {
		stopChurn()
		churning.Wait()
	}()
	progress := func(what string) {
		t.Helper()
		began := time.Now()
		defer func() { t.Logf("%s: %s", what, time.Since(began)) }()
		before := c.done.Load()
		eventually(t, what, func() bool { return c.done.Load() > before+100 })
	}
	inStep := func(what string) {
		t.Helper()
		stopChurn()
		churning.Wait()
		eventually(t, what, func() bool {
			want, err := directList(ctx, client)
			return err == nil && len(sourcetest.Difference(r.Objects(), want)) == 0
		})
		churnContext, stopChurn = context.WithCancel(ctx)
		churning.Go(func() { c.run(churnContext) })
	}

	progress("churn")
	inStep("the same state after churn")
	require.Equal(t, 1, r.Replaced(model.KindSlice), "one list, then a watch")

	require.NoError(t, cp.APIServer.Kill())
	require.NoError(t, cp.APIServer.Start(ctx))
	progress("churn after the API server was killed")
	inStep("the same state after the API server was killed")

	require.NoError(t, cp.Etcd.Pause())
	select { // etcd must hang for a while
	case <-time.After(3 * time.Second):
	case <-ctx.Done():
	}
	require.NoError(t, cp.Etcd.Resume())
	progress("churn after etcd hung")
	inStep("the same state after etcd hung")

	require.NoError(t, cp.Etcd.Kill())
	require.NoError(t, cp.Etcd.Start(ctx))
	progress("churn after etcd was killed")
	inStep("the same state after etcd was killed")

	for _, change := range r.Changes() {
		for _, s := range stays {
			require.NotEqual(t, "remove "+s, change)
		}
	}
	t.Logf("%d changes, %d lists of slices", c.done.Load(), r.Replaced(model.KindSlice))
}
