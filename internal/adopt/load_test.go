// This file makes the load of the tests: new connections all the time and connections that stay
// open, over TCP and UDP, from a pod, from a node and from outside, through a Service's cluster IP
// and node port. Any failure is reported.
package adopt

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/cluster"
)

const (
	// patience bounds the time of each wait, on a machine that does other things, too.
	patience = 5 * time.Minute
	// renewInterval is the time between two new connections on one way, and keepInterval that between
	// two requests on an open one.
	renewInterval = 50 * time.Millisecond
	keepInterval  = 250 * time.Millisecond
	// answerTimeout is longer than the retransmission of a lost packet takes on a slow machine.
	answerTimeout = 20 * time.Second
	// datagramTimeout is the time after which a datagram is sent again.
	datagramTimeout = 5 * time.Second
)

// webPods are pods with a TCP and a UDP server. The argument lists the nodes that they run on.
const webPods = `
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: web}
spec:
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      terminationGracePeriodSeconds: 1
      affinity:
        nodeAffinity:
          requiredDuringSchedulingIgnoredDuringExecution:
            nodeSelectorTerms:
            - matchExpressions: [{key: kubernetes.io/hostname, operator: In, values: [%s]}]
      containers:
      - name: web
        image: ` + cluster.AgnhostImage + `
        args: [netexec]
        # On a busy machine the pods get enough time to answer the load, and the kubelet.
        resources: {requests: {cpu: 500m}}
        readinessProbe: {httpGet: {path: /, port: 8080}, periodSeconds: 1, timeoutSeconds: 20}
`

// webService is a Service for these pods. The arguments are its name and its labels.
const webService = `
apiVersion: v1
kind: Service
metadata: {name: %s, labels: {%s}}
spec:
  type: NodePort
  ipFamilyPolicy: RequireDualStack
  selector: {app: web}
  ports:
  - {name: tcp, port: 80, targetPort: 8080, protocol: TCP}
  - {name: udp, port: 90, targetPort: 8081, protocol: UDP}
`

// way is a source, a protocol and an address for connections to a Service.
type way struct {
	from  *testenv.Host
	proto testenv.Proto
	to    netip.AddrPort
}

// String returns a description such as "client to 10.96.0.1:80 over tcp".
func (w way) String() string { return fmt.Sprintf("%s to %s over %s", w.from.Name, w.to, w.proto) }

// conn is an open connection to a pod.
type conn struct {
	way
	net.Conn
	lines *bufio.Reader
}

func (w way) dial(ctx context.Context) (*conn, error) {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	c, err := w.from.DialUnused(ctx, string(w.proto), w.to)
	if err != nil {
		return nil, err
	}
	return &conn{way: w, Conn: c, lines: bufio.NewReader(c)}, nil
}

// ask sends a request and reads the answer, which is the name of a pod.
func (c *conn) ask() error {
	if c.proto == testenv.UDP {
		return c.askUDP()
	}
	if err := c.SetDeadline(time.Now().Add(answerTimeout)); err != nil {
		return err
	}
	if _, err := io.WriteString(c, "GET /hostname HTTP/1.1\r\nHost: web\r\n\r\n"); err != nil {
		return err
	}
	response, err := http.ReadResponse(c.lines, nil)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err == nil && (response.StatusCode != http.StatusOK || !strings.HasPrefix(string(body), "web-")) {
		err = fmt.Errorf("answer %s: %s", response.Status, body)
	}
	return err
}

func (c *conn) askUDP() error {
	if err := c.SetDeadline(time.Now().Add(datagramTimeout)); err != nil {
		return err
	}
	if _, err := io.WriteString(c, "hostname"); err != nil {
		return err
	}
	answer := make([]byte, 256)
	n, err := c.Read(answer)
	if err == nil && !strings.HasPrefix(string(answer[:n]), "web-") {
		err = fmt.Errorf("answer %q", answer[:n])
	}
	return err
}

// try makes a new connection and asks once.
func (w way) try(ctx context.Context) error {
	c, err := w.dial(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	return c.ask()
}

// lost reports whether a datagram or its answer may have been lost, as any network may do.
func (w way) lost(err error) bool {
	var timeout net.Error
	return w.proto == testenv.UDP && errors.As(err, &timeout) && timeout.Timeout()
}

// load makes connections on several ways.
type load struct {
	t      *testing.T
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu       sync.Mutex // guards all below
	made     map[kind]int
	failures []failure
}

// kind is a kind of requests: those of a way on new connections, or on an open one.
type kind struct {
	way  way
	open bool
}

// failure is a request that was not answered as it should have been.
type failure struct {
	kind
	at  time.Time // when the request began
	err error
}

// String returns a description such as "14:07:01.123 client to 10.96.0.1:80 over tcp, new
// connection: connection refused".
func (f failure) String() string {
	what := "new connection"
	if f.open {
		what = "open connection"
	}
	return fmt.Sprintf("%s %s, %s: %v", f.at.Format(time.StampMilli), f.way, what, f.err)
}

// startLoad makes connections until requireNoFailure is called or the test ends.
func startLoad(t *testing.T, ways []way) *load {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	l := &load{t: t, cancel: cancel, made: map[kind]int{}}
	for _, w := range ways {
		l.made[kind{w, false}], l.made[kind{w, true}] = 0, 0
	}
	for _, w := range ways {
		l.wg.Go(func() { l.renew(ctx, w) })
		l.wg.Go(func() { l.keep(ctx, w) })
	}
	t.Cleanup(l.stop)
	l.requireSome()
	return l
}

// renew makes new connections on a way.
func (l *load) renew(ctx context.Context, w way) {
	every(ctx, renewInterval, func() {
		began := time.Now()
		err := w.try(ctx)
		if w.lost(err) && ctx.Err() == nil {
			err = w.try(ctx)
		}
		l.count(ctx, kind{w, false}, failure{kind{w, false}, began, err})
	})
}

// keep asks on one connection of a way. It opens another one only after a failure.
func (l *load) keep(ctx context.Context, w way) {
	var open *conn
	every(ctx, keepInterval, func() {
		began := time.Now()
		var err error
		if open == nil {
			open, err = w.dial(ctx)
		}
		if err == nil {
			if err = open.ask(); w.lost(err) && ctx.Err() == nil {
				err = open.ask()
			}
		}
		l.count(ctx, kind{w, true}, failure{kind{w, open != nil}, began, err})
		if err != nil && open != nil {
			open.Close()
			open = nil
		}
	})
	if open != nil {
		open.Close()
	}
}

func every(ctx context.Context, interval time.Duration, f func()) {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for ctx.Err() == nil {
		f()
		select {
		case <-ctx.Done():
		case <-ticker.C:
		}
	}
}

// count counts an attempt, with its error or nil. The result of one that the end interrupted says
// nothing.
func (l *load) count(ctx context.Context, of kind, attempt failure) {
	if ctx.Err() != nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.made[of]++
	if attempt.err != nil {
		l.failures = append(l.failures, attempt)
	}
}

func (l *load) stop() {
	l.cancel()
	l.wg.Wait()
}

// awaitSome waits until each way has had new requests of each kind. Those that were under way have
// then ended.
func (l *load) awaitSome() {
	l.t.Helper()
	testenv.AwaitGrowth(l.t, patience, func() map[kind]int {
		l.mu.Lock()
		defer l.mu.Unlock()
		return maps.Clone(l.made)
	})
}

// requireSome waits until each way has had new requests, and requires that nothing has failed so
// far.
func (l *load) requireSome() {
	l.t.Helper()
	l.awaitSome()
	l.requireNone()
}

// requireNone requires that nothing has failed so far.
func (l *load) requireNone() {
	l.t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	const shown = 10
	var lines strings.Builder
	for _, f := range l.failures[:min(shown, len(l.failures))] {
		fmt.Fprintln(&lines, f)
	}
	require.Empty(l.t, lines.String(), "%d requests failed; the first ones are listed", len(l.failures))
}

// passHandover forgets what failed while a Service changed hands by a label, and requires that
// nothing fails any more. It returns the number of failed requests, and the time from the change of
// the label to the beginning of the last one. One proxy may let go before the other one takes over,
// and kube-proxy ends UDP flows when it does. Open TCP connections may not fail even then.
func (l *load) passHandover(changed time.Time) (failed int, gap time.Duration) {
	l.t.Helper()
	l.awaitSome()
	l.mu.Lock()
	l.failures = slices.DeleteFunc(l.failures, func(f failure) bool {
		excused := !f.open || f.way.proto == testenv.UDP
		if excused {
			failed++
			gap = max(gap, f.at.Sub(changed))
		}
		return excused
	})
	l.mu.Unlock()
	l.requireSome()
	return failed, gap.Round(time.Millisecond)
}

// requireNoFailure ends the load and requires that every request was answered.
func (l *load) requireNoFailure(during string) {
	l.t.Helper()
	l.requireSome()
	l.stop()
	sums := map[bool]int{} // by whether the connection was open
	for k, n := range l.made {
		sums[k.open] += n
	}
	l.t.Logf("%s: %d new connections and %d requests on %d open ones, none failed",
		during, sums[false], sums[true], len(l.made)/2)
}

// clients are sources of connections: a pod and a node for each of some nodes, and a host outside
// of the cluster.
type clients struct {
	pods, nodes []*testenv.Host
	outside     *testenv.Host
	via         *cluster.Node // the node whose node ports the host outside uses
}

// newClients adds clients to nodes. The pods are not of kubelet, which takes lower addresses.
func newClients(c *cluster.Cluster, nodes ...*cluster.Node) clients {
	all := clients{outside: c.Network.AddClient("outside").Host, via: nodes[0]}
	for _, node := range nodes {
		four, six := node.PodCIDR4.Addr().As4(), node.PodCIDR6.Addr().As16()
		four[3], six[15] = 250, 250
		pod := node.AddPod("client-on-"+node.Name, netip.AddrFrom4(four), netip.AddrFrom16(six))
		all.pods, all.nodes = append(all.pods, pod.Host), append(all.nodes, node.Host)
	}
	return all
}

// ways returns the ways of the clients to a Service.
func (c clients) ways(t *testing.T, client *cluster.Cluster, name string) []way {
	t.Helper()
	service, err := client.Client.CoreV1().Services("default").Get(t.Context(), name, metav1.GetOptions{})
	require.NoError(t, err)
	protos := map[corev1.Protocol]testenv.Proto{corev1.ProtocolTCP: testenv.TCP, corev1.ProtocolUDP: testenv.UDP}
	var ways []way
	for _, port := range service.Spec.Ports {
		for _, ip := range service.Spec.ClusterIPs {
			to := netip.AddrPortFrom(netip.MustParseAddr(ip), uint16(port.Port))
			for i := range c.pods {
				ways = append(ways, way{c.pods[i], protos[port.Protocol], to}, way{c.nodes[i], protos[port.Protocol], to})
			}
			node := netip.AddrPortFrom(c.via.Addr(to.Addr().Is6()), uint16(port.NodePort))
			ways = append(ways, way{c.outside, protos[port.Protocol], node})
		}
	}
	return ways
}
