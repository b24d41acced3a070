// This file creates a cluster of a given size in a real API server, and a slicecast-server that
// watches it.
package kubeproxy

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/uuid"

	"github.com/slicecast/slicecast/internal/testca"
	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/controlplane"
)

const (
	namespace = "bench"
	// sliceSize is the maximum number of endpoints that Kubernetes' controller puts into a slice.
	sliceSize = 100
	// endpointPort is the port of all endpoints.
	endpointPort = 8080
	serverPort   = 8472
	// writers is the number of objects that are created concurrently.
	writers = 16
)

// endpointCIDR contains the addresses of all endpoints.
var endpointCIDR = netip.MustParsePrefix("100.64.0.0/10")

// size is the size of a cluster: the number of Services, the endpoints of each, and those of one
// large Service.
type size struct{ services, endpoints, large int }

func parseSize(text string) (s size, err error) {
	if n, _ := fmt.Sscanf(text, "%dx%d+%d", &s.services, &s.endpoints, &s.large); n == 3 {
		return s, nil
	}
	if n, err := fmt.Sscanf(text, "%dx%d", &s.services, &s.endpoints); n != 2 {
		return s, fmt.Errorf("parse size %q: %w", text, err)
	}
	return s, nil
}

// cluster is an API server with Services, and a slicecast-server that watches it.
type cluster struct {
	network *testenv.Network
	control *controlplane.ControlPlane
	size    size
	// These are the first slices of the first Service, of another ordinary Service, and of the
	// large Service. large is nil if there is no large Service.
	first, ordinary, large *discoveryv1.EndpointSlice
	// ca is the file of the CA of the server's certificate. dir is the directory of credentials.
	ca, dir   string
	authority *testca.CA
}

// newCluster returns a cluster. The flags are for its slicecast-server.
func newCluster(b *testing.B, s size, flags ...string) *cluster {
	b.Helper()
	c := &cluster{network: testenv.NewNetwork(b), size: s, dir: b.TempDir()}
	c.control = controlplane.Start(b, controlplane.Options{Address: c.network.World.IPv4})
	_, err := c.control.Client().CoreV1().Namespaces().Create(b.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, metav1.CreateOptions{})
	require.NoError(b, err)
	random := rand.New(rand.NewPCG(1, 1))
	taken := map[netip.Addr]bool{}
	address := func() string {
		for {
			a := netip.AddrFrom4([4]byte{100, 64 + byte(random.IntN(64)), byte(random.IntN(256)), byte(random.IntN(256))})
			if !taken[a] {
				taken[a] = true
				return a.String()
			}
		}
	}
	var services []*corev1.Service
	var all []*discoveryv1.EndpointSlice
	add := func(name string, endpoints int) *discoveryv1.EndpointSlice {
		begin := len(all)
		services = append(services, &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Name: "http", Port: 80}}},
		})
		for first := 0; first < endpoints; first += sliceSize {
			s := &discoveryv1.EndpointSlice{
				ObjectMeta: metav1.ObjectMeta{
					Name:   fmt.Sprintf("%s-%d", name, first),
					Labels: map[string]string{discoveryv1.LabelServiceName: name, discoveryv1.LabelManagedBy: "endpointslice-controller.k8s.io"},
				},
				AddressType: discoveryv1.AddressTypeIPv4,
				Ports:       []discoveryv1.EndpointPort{{Name: new("http"), Port: new(int32(endpointPort)), Protocol: new(corev1.ProtocolTCP)}},
			}
			for range min(sliceSize, endpoints-first) {
				s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{
					Addresses:  []string{address()},
					Conditions: discoveryv1.EndpointConditions{Ready: new(true), Serving: new(true), Terminating: new(false)},
					NodeName:   new(fmt.Sprint("elsewhere-", random.IntN(3000))),
				})
			}
			all = append(all, s)
		}
		return all[begin]
	}
	for i := range s.services {
		c.ordinary = add(fmt.Sprintf("service-%05d", i), s.endpoints)
		c.first = cmp.Or(c.first, c.ordinary)
	}
	if s.large > 0 {
		c.large = add("large", s.large)
	}
	if c.control.Etcd == nil {
		c.create(b, services, all)
	} else {
		c.create(b, services[:1], all[:1])
		c.seed(b, services[1:], all[1:], random)
	}
	c.startServer(b, flags)
	return c
}

// create creates Services and slices through the API server, in place.
func (c *cluster) create(b *testing.B, services []*corev1.Service, all []*discoveryv1.EndpointSlice) {
	b.Helper()
	making, ctx := errgroup.WithContext(b.Context())
	making.SetLimit(writers)
	for i, s := range services {
		making.Go(func() (err error) {
			services[i], err = c.control.Client().CoreV1().Services(namespace).Create(ctx, s, metav1.CreateOptions{})
			return err
		})
	}
	for i, s := range all {
		making.Go(func() (err error) {
			all[i], err = c.control.Client().DiscoveryV1().EndpointSlices(namespace).Create(ctx, s, metav1.CreateOptions{})
			return err
		})
	}
	require.NoError(b, making.Wait())
}

// seed writes Services and slices to etcd, as copies of those that the API server has created. With
// tens of thousands of Services, the API server would take half an hour.
func (c *cluster) seed(b *testing.B, services []*corev1.Service, all []*discoveryv1.EndpointSlice, random *rand.Rand) {
	b.Helper()
	service, err := c.control.Client().CoreV1().Services(namespace).Get(b.Context(), c.first.Labels[discoveryv1.LabelServiceName], metav1.GetOptions{})
	require.NoError(b, err)
	slice, err := c.control.Client().DiscoveryV1().EndpointSlices(namespace).Get(b.Context(), c.first.Name, metav1.GetOptions{})
	require.NoError(b, err)
	address, err := c.control.Client().NetworkingV1().IPAddresses().Get(b.Context(), service.Spec.ClusterIP, metav1.GetOptions{})
	require.NoError(b, err)

	// The API server has taken the first addresses, and one for the first Service.
	free := random.Perm(1<<16 - 1<<8 - 1)
	next := func() string {
		n := free[0] + 1<<8
		free = free[1:]
		return netip.AddrFrom4([4]byte{10, 96, byte(n >> 8), byte(n)}).String()
	}
	stored := func(m metav1.ObjectMeta, name string) metav1.ObjectMeta {
		m.Name, m.UID, m.ResourceVersion = name, uuid.NewUUID(), ""
		return m
	}
	// Services come last. The API server would allocate the addresses of those that it sees before
	// their IPAddresses.
	var addresses, objects, last []runtime.Object
	for _, s := range services {
		ip := next()
		if ip == service.Spec.ClusterIP {
			ip = next()
		}
		c, a := service.DeepCopy(), address.DeepCopy()
		c.ObjectMeta = stored(c.ObjectMeta, s.Name)
		c.Spec.ClusterIP, c.Spec.ClusterIPs = ip, []string{ip}
		a.ObjectMeta, a.Spec.ParentRef.Name = stored(a.ObjectMeta, ip), s.Name
		addresses, last = append(addresses, a), append(last, c)
	}
	for _, s := range all {
		c := slice.DeepCopy()
		c.ObjectMeta = stored(c.ObjectMeta, s.Name)
		c.Labels, c.Endpoints = s.Labels, s.Endpoints
		objects = append(objects, c)
	}
	require.NoError(b, c.control.Seed(b.Context(), slices.Concat(addresses, objects, last)))
}

// flip changes the readiness of the first endpoint of a slice.
func (c *cluster) flip(b *testing.B, s *discoveryv1.EndpointSlice) {
	b.Helper()
	client := c.control.Client().DiscoveryV1().EndpointSlices(namespace)
	now, err := client.Get(b.Context(), s.Name, metav1.GetOptions{})
	require.NoError(b, err)
	conditions := &now.Endpoints[0].Conditions
	ready := !*conditions.Ready
	conditions.Ready, conditions.Serving = &ready, &ready
	_, err = client.Update(b.Context(), now, metav1.UpdateOptions{})
	require.NoError(b, err)
}

// startServer starts a slicecast-server for all agents.
func (c *cluster) startServer(b *testing.B, flags []string) {
	b.Helper()
	world := c.network.World
	var err error
	c.authority, err = testca.New()
	require.NoError(b, err)
	c.ca, err = c.authority.WriteCA(c.dir)
	require.NoError(b, err)
	serving, err := c.authority.Server(world.IPv4.String())
	require.NoError(b, err)
	cert, key, err := testca.Write(c.dir, "server", serving)
	require.NoError(b, err)
	server := start(b, world, "slicecast-server", nil, filepath.Join(os.Getenv(buildDirVariable), "server"), append(flags,
		"--kubeconfig="+c.control.Kubeconfig(b, c.control.AdminConfig()),
		fmt.Sprintf("--bind-address=%s:%d", world.IPv4, serverPort), "--healthz-bind-address=127.0.0.1:8473",
		"--tls-cert-file="+cert, "--tls-private-key-file="+key,
		// Agents use the certificates of kubelets.
		"--client-ca-file="+c.write(b, "clients.crt", c.control.AdminConfig().CAData),
		"--drain-window=100ms")...)
	server.AwaitOK(b, 5*time.Minute, "http://127.0.0.1:8473/readyz")
}

func (c *cluster) write(b *testing.B, name string, content []byte) string {
	b.Helper()
	path := filepath.Join(c.dir, name)
	require.NoError(b, os.WriteFile(path, content, 0o600))
	return path
}
