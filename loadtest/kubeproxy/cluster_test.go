// This file creates a cluster of a given size in a real API server, and a slicecast-server that
// watches it.
package kubeproxy

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

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
	ca, dir string
}

func newCluster(b *testing.B, s size) *cluster {
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
	making, ctx := errgroup.WithContext(b.Context())
	making.SetLimit(writers)
	add := func(name string, endpoints int) *discoveryv1.EndpointSlice {
		var all []*discoveryv1.EndpointSlice
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
		making.Go(func() error { return c.create(ctx, name, all) })
		return all[0]
	}
	for i := range s.services {
		c.ordinary = add(fmt.Sprintf("service-%05d", i), s.endpoints)
		c.first = cmp.Or(c.first, c.ordinary)
	}
	if s.large > 0 {
		c.large = add("large", s.large)
	}
	require.NoError(b, making.Wait())
	c.startServer(b)
	return c
}

func (c *cluster) create(ctx context.Context, name string, all []*discoveryv1.EndpointSlice) error {
	_, err := c.control.Client().CoreV1().Services(namespace).Create(ctx, &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Name: "http", Port: 80}}},
	}, metav1.CreateOptions{})
	for _, s := range all {
		if err == nil {
			_, err = c.control.Client().DiscoveryV1().EndpointSlices(namespace).Create(ctx, s, metav1.CreateOptions{})
		}
	}
	return err
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
func (c *cluster) startServer(b *testing.B) {
	b.Helper()
	world := c.network.World
	authority, err := testca.New()
	require.NoError(b, err)
	c.ca, err = authority.WriteCA(c.dir)
	require.NoError(b, err)
	serving, err := authority.Server(world.IPv4.String())
	require.NoError(b, err)
	cert, key, err := testca.Write(c.dir, "server", serving)
	require.NoError(b, err)
	server := start(b, world, "slicecast-server", nil, filepath.Join(os.Getenv(buildDirVariable), "server"),
		"--kubeconfig="+c.control.Kubeconfig(b, c.control.AdminConfig()),
		fmt.Sprintf("--bind-address=%s:%d", world.IPv4, serverPort), "--healthz-bind-address=127.0.0.1:8473",
		"--tls-cert-file="+cert, "--tls-private-key-file="+key,
		// Agents use the certificates of kubelets.
		"--client-ca-file="+c.write(b, "clients.crt", c.control.AdminConfig().CAData),
		"--drain-window=100ms")
	server.AwaitOK(b, 5*time.Minute, "http://127.0.0.1:8473/readyz")
}

func (c *cluster) write(b *testing.B, name string, content []byte) string {
	b.Helper()
	path := filepath.Join(c.dir, name)
	require.NoError(b, os.WriteFile(path, content, 0o600))
	return path
}
