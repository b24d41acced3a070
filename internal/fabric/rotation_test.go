// These tests prove that a rotation of the servers' own CA ends no stream and loses no update, and
// that agents can connect at every moment of it: new ones, and those that were away. Servers,
// agents, the Secret and the ConfigMap of a kube-apiserver, and ServiceAccount tokens are real; the
// clock of servers and agents is moved through five years.
package fabric

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/util/cert"

	"github.com/slicecast/slicecast/agent/client"
	"github.com/slicecast/slicecast/internal/auth"
	"github.com/slicecast/slicecast/internal/model/modeltest"
	"github.com/slicecast/slicecast/internal/proxytest"
	"github.com/slicecast/slicecast/internal/source/kube"
	"github.com/slicecast/slicecast/internal/testenv/controlplane"
	"github.com/slicecast/slicecast/internal/tlsfiles"
	"github.com/slicecast/slicecast/internal/wire"
	"github.com/slicecast/slicecast/server/app"
	"github.com/slicecast/slicecast/server/certificates"
)

// What an operator is told about the servers' own certificates. A certificate is renewed after 60
// days, so one that is looked at every stride never ends.
const (
	day       = 24 * time.Hour
	caLife    = 5 * 365 * day
	caRenewal = caSpread + 90*day
	caSpread  = 365 * day
	stride    = 25 * day
)

// rotation is a cluster whose servers have certificates of their own.
type rotation struct {
	t         *testing.T
	plane     *controlplane.ControlPlane
	core      typedcorev1.CoreV1Interface
	namespace string
	dir       string
	servers   []*server          // those that run
	places    []*proxytest.Proxy // the addresses of servers, which outlive them
	agents    []*rotated         // those that are not away
	streams   int                // how many the running servers had begun when the last agent settled

	// changing is locked while no change is made.
	changing sync.Mutex
	cluster  *cluster

	mu    sync.Mutex // guards the fields below
	begin time.Time
	now   time.Time
	files map[string]bool // the mounted files that kubelets update
}

// rotated is an agent with a CA file of its own.
type rotated struct {
	*agent
	file string
	// proxies lead to the places.
	proxies []*proxytest.Proxy
	// counted has the agent's counters of disturbances when it settled.
	counted [2]float64
}

// counters returns how many streams of an agent have ended, and how often it had to ask for state
// again.
func (a *rotated) counters(t *testing.T) (out [2]float64) {
	t.Helper()
	for i, name := range []string{"slicecast_agent_disconnects_total", "slicecast_agent_resyncs_total"} {
		var err error
		out[i], err = metric(a.registry, name)
		require.NoError(t, err)
	}
	return out
}

func newRotation(t *testing.T, servers int) *rotation {
	t.Helper()
	plane := controlplane.Start(t, controlplane.Options{})
	r := &rotation{
		t: t, plane: plane, core: plane.Client().CoreV1(), namespace: plane.Namespace(t), dir: t.TempDir(),
		cluster: newCluster(modeltest.Web(), web(1)), begin: time.Now(), now: time.Now(), files: make(map[string]bool),
	}
	_, err := r.core.ServiceAccounts(r.namespace).Create(t.Context(),
		&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "agent"}}, metav1.CreateOptions{})
	require.NoError(t, err)
	for range servers {
		r.places = append(r.places, proxytest.New(t, proxytest.Nowhere))
		r.serve(len(r.places) - 1)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { r.change(ctx) })
	running.Go(func() { r.kubelets(ctx) })
	t.Cleanup(func() {
		cancel()
		running.Wait()
	})
	return r
}

// serve starts a server at a place and waits until it is ready.
func (r *rotation) serve(place int) {
	r.t.Helper()
	core, _, err := kube.Core(r.plane.AdminConfig())
	require.NoError(r.t, err)
	review, err := kube.TokenReviews(r.plane.AdminConfig())
	require.NoError(r.t, err)
	access, err := kube.AccessReviews(r.plane.AdminConfig())
	require.NoError(r.t, err)
	paths, err := kube.Paths(r.plane.AdminConfig())
	require.NoError(r.t, err)
	name := func(name string) types.NamespacedName {
		return types.NamespacedName{Namespace: r.namespace, Name: name}
	}
	s := serve(r.t, &watch{cluster: r.cluster}, func(c *app.Config) {
		c.TLS = nil
		c.Certificates = &certificates.Options{
			Client: core, Secret: name("tls"), ConfigMaps: []types.NamespacedName{name("ca")},
			Names: []string{serversName}, Now: r.clock, Interval: 20 * time.Millisecond, Log: c.Logger, Registerer: c.Registry,
		}
		c.Tokens = &auth.TokenOptions{
			Review: review, Access: access, Get: paths, Audience: "slicecast", Agents: []types.NamespacedName{name("agent")},
		}
	})
	require.True(r.t, eventually(func() bool {
		return s.metric(r.t, "slicecast_server_certificate_expiry_timestamp_seconds") > 0 &&
			s.logs.Count("Synced with the source") > 0
	}), "a server does not get ready")
	r.servers = append(r.servers, s)
	r.places[place].Lead(s.address())
}

func (r *rotation) clock() time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.now
}

// change changes the cluster all the time, as often as a busy API server.
func (r *rotation) change(ctx context.Context) {
	busy := time.NewTicker(10 * time.Millisecond)
	defer busy.Stop()
	for i := 1; ; i++ {
		select {
		case <-ctx.Done():
			return
		case <-busy.C:
			r.changing.Lock()
			r.cluster.upsert(web(1 + i%50))
			r.changing.Unlock()
		}
	}
}

// kubelets keep the mounted files as the ConfigMap says.
func (r *rotation) kubelets(ctx context.Context) {
	again := time.NewTicker(20 * time.Millisecond)
	defer again.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-again.C:
		}
		bundle := r.bundle(ctx)
		if bundle == "" {
			continue
		}
		r.mu.Lock()
		for path, updated := range r.files {
			if have, err := os.ReadFile(path); updated && (err != nil || string(have) != bundle) {
				if os.WriteFile(path+".new", []byte(bundle), 0o600) != nil || os.Rename(path+".new", path) != nil {
					r.t.Error("cannot write the mounted file of an agent")
				}
			}
		}
		r.mu.Unlock()
	}
}

// bundle returns what the ConfigMap has, or nothing if there is none.
func (r *rotation) bundle(ctx context.Context) string {
	m, err := r.core.ConfigMaps(r.namespace).Get(ctx, "ca", metav1.GetOptions{})
	if err != nil {
		return ""
	}
	return m.Data["ca.crt"]
}

// mounts says whether a kubelet updates the file of an agent.
func (r *rotation) mounts(path string, updated bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.files[path] = updated
}

// join starts an agent on a new node and waits until it has everything.
func (r *rotation) join(node string) *rotated {
	r.t.Helper()
	r.undisturbed()
	a := &rotated{file: filepath.Join(r.dir, node+".crt")}
	r.mounts(a.file, true)
	require.True(r.t, eventually(func() bool { _, err := os.Stat(a.file); return err == nil }))
	files, err := tlsfiles.Follow(tlsfiles.Files{CA: a.file}, slog.New(slog.DiscardHandler))
	require.NoError(r.t, err)
	files.Now = r.clock
	var servers []client.Server
	for _, place := range r.places {
		p := proxytest.New(r.t, place.Address())
		a.proxies = append(a.proxies, p)
		servers = append(servers, client.Server{Address: p.Address(), Name: serversName})
	}
	a.agent = follow(r.t, agentOptions{
		node: node, find: func(context.Context) ([]client.Server, error) { return servers, nil },
		dial: []grpc.DialOption{
			grpc.WithTransportCredentials(files.ClientCredentials(wire.Protocol)),
			grpc.WithPerRPCCredentials(client.TokenFile(r.token(node))),
		},
	})
	r.settle(a)
	return a
}

// settle waits until a new or returning agent has everything, and expects no more of its streams to
// begin.
func (r *rotation) settle(a *rotated) {
	r.t.Helper()
	r.agents = append(without(r.agents, a), a)
	r.same()
	a.counted = a.counters(r.t)
	r.streams = r.starts()
}

// token returns a file with the token of an agent on a node.
func (r *rotation) token(node string) string {
	r.t.Helper()
	pod, err := r.core.Pods(r.namespace).Create(r.t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "agent-" + node},
		Spec: corev1.PodSpec{
			NodeName: node, ServiceAccountName: "agent", Containers: []corev1.Container{{Name: "c", Image: "none"}},
		},
	}, metav1.CreateOptions{})
	require.NoError(r.t, err)
	answer, err := r.core.ServiceAccounts(r.namespace).CreateToken(r.t.Context(), "agent", &authenticationv1.TokenRequest{
		Spec: authenticationv1.TokenRequestSpec{
			Audiences:      []string{"slicecast"},
			BoundObjectRef: &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: pod.Name, UID: pod.UID},
		},
	}, metav1.CreateOptions{})
	require.NoError(r.t, err)
	path := filepath.Join(r.dir, node+".token")
	require.NoError(r.t, os.WriteFile(path, []byte(answer.Status.Token), 0o600))
	return path
}

// leave disconnects an agent's node from the network.
func (r *rotation) leave(a *rotated) {
	r.mounts(a.file, false)
	for _, p := range a.proxies {
		p.Lead(proxytest.Nowhere)
		p.Cut()
	}
	r.agents = without(r.agents, a)
}

// back connects an agent's node again. Its kubelet does not update the file yet.
func (r *rotation) back(a *rotated) {
	for i, p := range a.proxies {
		p.Lead(r.places[i].Address())
	}
}

// same requires that all agents that are not away hold what the cluster holds.
func (r *rotation) same() {
	r.t.Helper()
	r.changing.Lock()
	defer r.changing.Unlock()
	for _, a := range r.agents {
		a.waitEquals(r.t, r.cluster)
	}
}

// reach moves the clock to a time after the begin, in strides in which servers look.
func (r *rotation) reach(after time.Duration) {
	r.t.Helper()
	for end := r.begin.Add(after); r.clock().Before(end); {
		r.mu.Lock()
		r.now = r.now.Add(min(stride, end.Sub(r.now)))
		now := r.now
		r.mu.Unlock()
		require.True(r.t, eventually(func() bool {
			for _, s := range r.servers {
				ends := s.metric(r.t, "slicecast_server_certificate_expiry_timestamp_seconds")
				if ends < float64(now.Add(23*day).Unix()) {
					return false
				}
			}
			return true
		}), "a server has a certificate that ends soon, at %s", now)
	}
}

// cas waits until the agents' files have a number of CAs, and returns these.
func (r *rotation) cas(n int) (cas []*x509.Certificate) {
	r.t.Helper()
	require.True(r.t, eventually(func() bool {
		for path, updated := range r.mounted() {
			content, err := os.ReadFile(path)
			if err == nil && updated {
				cas, err = cert.ParseCertsPEM(content)
			}
			if err != nil || len(cas) != n {
				return false
			}
		}
		return true
	}), "the files have %d CAs, instead of %d", len(cas), n)
	return cas
}

func (r *rotation) mounted() map[string]bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := make(map[string]bool)
	for path, updated := range r.files {
		if updated {
			out[path] = true
		}
	}
	return out
}

// issued reports whether the certificates that all servers show have been issued by a CA.
func (r *rotation) issued(by *x509.Certificate) bool {
	roots := x509.NewCertPool()
	roots.AddCert(by)
	for _, s := range r.servers {
		conn, err := tls.Dial("tcp", s.address(), &tls.Config{RootCAs: roots, ServerName: serversName, Time: r.clock})
		if err != nil {
			return false
		}
		_ = conn.Close() // the handshake was all
	}
	return true
}

// starts returns how many streams the running servers have begun.
func (r *rotation) starts() (n int) {
	for _, s := range r.servers {
		n += int(s.metric(r.t, "slicecast_server_stream_starts_total"))
	}
	return n
}

// undisturbed requires that all agents have everything, and that since they have settled, none of
// their streams ended, none began, and none of them had to ask for anything again.
func (r *rotation) undisturbed() {
	r.t.Helper()
	r.same()
	for _, a := range r.agents {
		require.Equal(r.t, a.counted, a.counters(r.t), a.node)
	}
	require.Equal(r.t, r.streams, r.starts())
}

func without[T comparable](list []T, one T) (out []T) {
	for _, other := range list {
		if other != one {
			out = append(out, other)
		}
	}
	return out
}

// TestRotation moves two servers and their agents through a whole rotation, under constant changes.
// An agent joins in each phase, and two agents are away through one or several.
func TestRotation(t *testing.T) {
	r := newRotation(t, 2)
	for _, node := range nodes {
		r.join(node)
	}
	early, late := r.join("away-before-the-new-ca"), r.join("away-after-it")
	first := r.cas(1)[0]
	require.True(t, r.issued(first))
	r.reach(caLife - caRenewal - day)
	require.Equal(t, first.Raw, r.cas(1)[0].Raw)
	require.True(t, r.issued(first))
	r.undisturbed()
	r.leave(early)

	r.reach(caLife - caRenewal + time.Hour)
	both := r.cas(2)
	next := both[0]
	require.Equal(t, first.Raw, both[1].Raw)
	require.True(t, r.issued(first), "nobody knows the new CA yet")
	r.join("joins-with-both")
	r.leave(late)

	r.reach(caLife - caRenewal + caSpread - day)
	require.True(t, r.issued(first), "the new CA has not been known for long enough")
	r.undisturbed()
	r.reach(caLife - caRenewal + caSpread + 2*time.Hour)
	require.True(t, eventually(func() bool { return r.issued(next) }))
	r.join("joins-with-the-new-certificate")
	r.undisturbed()

	// The servers cannot convince an agent that has never heard of the new CA. It joins as soon as
	// its kubelet has updated the file.
	refused := func() (n float64) {
		for _, s := range r.servers {
			n += s.metric(t, "slicecast_server_handshake_errors_total")
		}
		return n
	}
	before := refused()
	r.back(early)
	require.True(t, eventually(func() bool { return refused() > before }))
	r.undisturbed()
	r.mounts(early.file, true)
	r.settle(early)

	r.reach(caLife + day)
	require.Equal(t, next.Raw, r.cas(1)[0].Raw)
	require.True(t, r.issued(next))
	r.join("joins-with-the-new-ca-only")
	r.back(late) // its file still has both
	r.settle(late)
	r.undisturbed()
	require.Equal(t, 2, r.logged(`msg="Created a certificate" kind=ca`), "two servers, one CA at a time")
}

// logged returns how many lines of the servers' logs contain a text.
func (r *rotation) logged(text string) (n int) {
	for _, s := range r.servers {
		n += strings.Count(s.logs.String(), text)
	}
	return n
}

// TestAReplicaStopsInARotation stops one of two servers after it or the other has published a new
// CA. The other one completes the rotation, and a third one that starts then uses the same CA.
func TestAReplicaStopsInARotation(t *testing.T) {
	r := newRotation(t, 2)
	for _, node := range nodes {
		r.join(node)
	}
	first := r.cas(1)[0]
	r.reach(caLife - caRenewal + time.Hour)
	next := r.cas(2)[0]
	stopped := r.servers[0]
	streams := int(stopped.metric(t, "slicecast_server_streams"))
	r.undisturbed()
	r.servers = r.servers[1:]
	r.places[0].Lead(proxytest.Nowhere)
	stopped.stop()
	r.places[0].Cut()
	require.True(t, eventually(func() bool {
		return int(r.servers[0].metric(t, "slicecast_server_nodes")) == len(nodes)
	}))
	for _, a := range r.agents {
		if a.counted != a.counters(t) {
			streams--
			r.settle(a)
		}
	}
	require.Zero(t, streams, "its agents have moved, and no others")
	r.streams = r.starts()

	require.True(t, r.issued(first))
	r.reach(caLife - caRenewal + caSpread + 2*time.Hour)
	require.True(t, eventually(func() bool { return r.issued(next) }))
	r.undisturbed()
	r.serve(0)
	require.True(t, eventually(func() bool { return r.issued(next) }))
	secret, err := r.core.Secrets(r.namespace).Get(t.Context(), "tls", metav1.GetOptions{})
	require.NoError(t, err)
	r.join("joins-with-the-third-server")
	r.reach(caLife + day)
	require.Equal(t, next.Raw, r.cas(1)[0].Raw)
	after, err := r.core.Secrets(r.namespace).Get(t.Context(), "tls", metav1.GetOptions{})
	require.NoError(t, err)
	require.True(t, bytes.Equal(secret.Data["ca.key"], after.Data["ca.key"]), "the third server has made another CA")
	r.undisturbed()
}
