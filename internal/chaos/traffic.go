package chaos

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/slicecast/slicecast/internal/probe"
	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/cluster"
)

const (
	// requestInterval is the time between two requests on new connections of a way, and
	// keepInterval that between two on an open one.
	requestInterval, keepInterval = 400 * time.Millisecond, time.Second
	// answerTimeout leaves time for two retransmissions of a packet on a slow machine.
	answerTimeout = 5 * time.Second
	// port is that of the Services and of their Pods, for TCP and UDP.
	port = 8080
)

// way is a source and an address for requests to a Service.
type way struct {
	from    *testenv.Host
	network string // tcp or udp
	service string
	to      netip.AddrPort
}

// String returns a description such as "node-1 to web-0 at 10.96.0.1:8080 over tcp".
func (w way) String() string {
	return fmt.Sprintf("%s to %s at %s over %s", w.from.Name, w.service, w.to, w.network)
}

// ask makes a new connection with a request, and returns the name of the Pod that has answered.
func (w way) ask(ctx context.Context, timeout time.Duration) (pod string, err error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	conn, err := w.dial(ctx)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	return w.askOn(conn, timeout)
}

func (w way) dial(ctx context.Context) (net.Conn, error) {
	conn, err := w.from.DialUnused(ctx, w.network, w.to)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", w, err)
	}
	return conn, nil
}

func (w way) askOn(conn net.Conn, timeout time.Duration) (pod string, err error) {
	if err := conn.SetDeadline(time.Now().Add(timeout)); err != nil {
		return "", fmt.Errorf("%s: %w", w, err)
	}
	if pod, _, err = probe.Ask(conn); err != nil {
		return "", fmt.Errorf("%s: %w", w, err)
	}
	return pod, nil
}

// addClients adds a Pod to each node that kubelet knows nothing of. They and the nodes are the
// sources of all requests.
func addClients(c *cluster.Cluster) []*testenv.Host {
	var all []*testenv.Host
	for _, node := range c.Nodes {
		four, six := node.PodCIDR4.Addr().As4(), node.PodCIDR6.Addr().As16()
		four[3], six[15] = 250, 250 // kubelet's Pods have lower addresses
		pod := node.AddPod("pod-on-"+node.Name, netip.AddrFrom4(four), netip.AddrFrom16(six))
		all = append(all, pod.Host, node.Host)
	}
	return all
}

// waysTo returns the ways from clients to a Service: TCP in both IP families, and UDP over IPv4.
func waysTo(service *corev1.Service, clients []*testenv.Host) []way {
	var ways []way
	for _, ip := range service.Spec.ClusterIPs {
		to := netip.AddrPortFrom(netip.MustParseAddr(ip), port)
		for _, client := range clients {
			ways = append(ways, way{client, "tcp", service.Name, to})
			if to.Addr().Is4() {
				ways = append(ways, way{client, "udp", service.Name, to})
			}
		}
	}
	return ways
}

// traffic sends requests on ways.
type traffic struct {
	ledger *ledger
	tally  *tally
	wg     sync.WaitGroup
}

// renew makes new connections on a way at a steady rate, whether or not earlier ones were answered.
// The source ports are new ones, too.
func (t *traffic) renew(ctx context.Context, w way) {
	every(ctx, requestInterval, func() {
		t.wg.Go(func() {
			began, count := time.Now(), t.tally.begin()
			pod, err := w.ask(ctx, answerTimeout)
			if ctx.Err() == nil {
				count(t.judge(w, pod, err, began))
			}
		})
	})
}

// judge returns the outcome of a request that began at a time.
func (t *traffic) judge(w way, pod string, err error, began time.Time) error {
	if err != nil {
		return err
	}
	if err := t.ledger.judge(w.service, pod, began); err != nil {
		return fmt.Errorf("%s: %w", w, err)
	}
	return nil
}

// keep sends requests over one TCP connection, or from one UDP port. A UDP flow stays with its Pod
// while that serves, so only answers of other Services count as misrouted. When the Pod ends, its
// addresses go before the API says so, and the flow loses a request with any proxy. So a request of
// a flow counts as lost only if the one before had no answer either.
func (t *traffic) keep(ctx context.Context, w way) {
	var open net.Conn
	var failed bool
	every(ctx, keepInterval, func() {
		if open == nil {
			limited, cancel := context.WithTimeout(ctx, answerTimeout)
			defer cancel()
			var err error
			if open, err = w.dial(limited); err != nil {
				return // what renew counts, too
			}
		}
		count := t.tally.begin()
		pod, err := w.askOn(open, answerTimeout)
		switch {
		case ctx.Err() != nil:
		case w.network == "udp":
			if err == nil || failed {
				count(t.judge(w, pod, err, time.Time{}))
			}
			failed = err != nil // an error leaves the socket as it is
		case err != nil:
			t.tally.broken(fmt.Errorf("open connection: %w", err))
			_ = open.Close()
			open = nil
		}
	})
	if open != nil {
		_ = open.Close()
	}
}

// every calls f at an interval until ctx ends.
func every(ctx context.Context, interval time.Duration, f func()) {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			f()
		}
	}
}

// start sends requests until ctx ends. Ways to the Deployment that never changes have an open TCP
// connection, too, and those to one that does an UDP flow.
func (t *traffic) start(ctx context.Context, ways []way) {
	for i, w := range ways {
		wait := requestInterval * time.Duration(i) / time.Duration(len(ways))
		t.wg.Go(func() {
			select {
			case <-ctx.Done():
			case <-time.After(wait): // so that requests are spread over the interval
				t.renew(ctx, w)
			}
		})
		if w.to.Addr().Is4() && (w.network == "tcp" && w.service == steady || w.network == "udp" && w.service != steady) {
			t.wg.Go(func() { t.keep(ctx, w) })
		}
	}
}

// look feeds the ledger from the EndpointSlices of a namespace. They are what proxies are told; how
// soon controllers write them is not up to the proxies. The ledger asks for all of them each time:
// a watch would be silent after a restore of etcd.
func (l *ledger) look(ctx context.Context, c *cluster.Cluster, namespace string) error {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	all, err := c.Client.DiscoveryV1().EndpointSlices(namespace).List(ctx, metav1.ListOptions{})
	if err == nil {
		l.update(readyPods(all.Items), time.Now())
	}
	return err
}

// readyPods returns the names of the Pods that are ready endpoints.
func readyPods(slices []discoveryv1.EndpointSlice) map[string]bool {
	ready := map[string]bool{}
	for _, slice := range slices {
		for i := range slice.Endpoints {
			e := &slice.Endpoints[i]
			if e.TargetRef != nil && e.Conditions.Ready != nil && *e.Conditions.Ready {
				ready[e.TargetRef.Name] = true
			}
		}
	}
	return ready
}
