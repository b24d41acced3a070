// These tests prove that several servers, with a real kube-apiserver, share one CA and one
// certificate, publish what clients must trust, and come back from every loss: of objects, of
// rights, and of the API server.
package certificates

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/cert"

	"github.com/slicecast/slicecast/internal/ca"
	"github.com/slicecast/slicecast/internal/source/kube"
	"github.com/slicecast/slicecast/internal/testca"
	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/controlplane"
)

func TestMain(m *testing.M) {
	testenv.Main(m, func() error {
		_, err := controlplane.KubernetesBinary(context.Background(), "kube-apiserver")
		return err
	})
}

// replicas are the servers of one Deployment, with one clock.
type replicas struct {
	t       *testing.T
	plane   *controlplane.ControlPlane
	client  kubernetes.Interface
	mu      sync.Mutex
	now     time.Time // guarded by mu
	servers []*Manager
}

func startReplicas(t *testing.T, n int) *replicas {
	cp := controlplane.Start(t, controlplane.Options{})
	r := &replicas{t: t, plane: cp, client: cp.Client(), now: time.Now()}
	for _, namespace := range []string{"servers", "agents"} {
		_, err := r.client.CoreV1().Namespaces().Create(t.Context(),
			&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, metav1.CreateOptions{})
		require.NoError(t, err)
	}
	for range n {
		r.servers = append(r.servers, r.server(cp.AdminConfig(), &bytes.Buffer{}))
	}
	return r
}

// server returns a server that connects with a configuration. It does not look yet.
func (r *replicas) server(config *rest.Config, logs *bytes.Buffer) *Manager {
	r.t.Helper()
	core, _, err := kube.Core(config)
	require.NoError(r.t, err)
	return New(Options{
		Client: core, Secret: types.NamespacedName{Namespace: "servers", Name: "tls"},
		ConfigMaps: []types.NamespacedName{{Namespace: "servers", Name: "ca"}, {Namespace: "agents", Name: "ca"}},
		Names:      []string{serverName}, Now: r.clock, Log: slog.New(slog.NewTextHandler(logs, nil)),
		Registerer: prometheus.NewRegistry(), Interval: 10 * time.Millisecond,
	})
}

func (r *replicas) clock() time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.now
}

func (r *replicas) advance(by time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.now = r.now.Add(by)
}

// look lets all servers look at once, after some time. It requires that all of them use what the
// Secret has and clients accept, and returns the Secret.
func (r *replicas) look(after time.Duration) *corev1.Secret {
	r.t.Helper()
	r.advance(after)
	for range 2 { // the second time, each server sees what the others have written
		var all sync.WaitGroup
		for _, m := range r.servers {
			all.Go(func() { m.look(r.t.Context()) })
		}
		all.Wait()
	}
	secret := r.secret()
	for _, m := range r.servers {
		require.NoError(r.t, m.latest)
		require.Empty(r.t, m.failing)
		content, err := m.Content()
		require.NoError(r.t, err)
		require.Equal(r.t, secret.Data[corev1.TLSCertKey], content.Certificate)
		require.Equal(r.t, secret.Data[corev1.TLSPrivateKeyKey], content.PrivateKey)
		require.Equal(r.t, secret.Data[caBundleKey], content.CA)
		for _, of := range m.ConfigMaps {
			bundle, err := r.client.CoreV1().ConfigMaps(of.Namespace).Get(r.t.Context(), of.Name, metav1.GetOptions{})
			require.NoError(r.t, err)
			require.Equal(r.t, string(content.CA), bundle.Data[caBundleKey])
		}
	}
	verify(r.t, secret.Data, secret.Data[caBundleKey], r.clock())
	return secret
}

func (r *replicas) secret() *corev1.Secret {
	r.t.Helper()
	secret, err := r.client.CoreV1().Secrets("servers").Get(r.t.Context(), "tls", metav1.GetOptions{})
	require.NoError(r.t, err)
	return secret
}

func (r *replicas) edit(secret *corev1.Secret) {
	r.t.Helper()
	_, err := r.client.CoreV1().Secrets("servers").Update(r.t.Context(), secret, metav1.UpdateOptions{})
	require.NoError(r.t, err)
}

// failures returns how often a server has failed.
func failures(m *Manager, resource string) int {
	return int(testutil.ToFloat64(m.failures.WithLabelValues(resource)))
}

// warnings returns how often a log says that a server has failed.
func warnings(logs *bytes.Buffer) int { return strings.Count(logs.String(), "Cannot maintain") }

func TestReplicas(t *testing.T) {
	r := startReplicas(t, 5)
	_, err := r.servers[0].Content()
	require.ErrorContains(t, err, "no certificate yet: Secret servers/tls has not been read")
	first := r.look(0)
	require.Equal(t, first.ResourceVersion, r.look(day).ResourceVersion, "nothing is due")
	renewals := func(kind string) (sum float64) {
		for _, m := range r.servers {
			sum += testutil.ToFloat64(m.renewals.WithLabelValues(kind))
		}
		return sum
	}
	require.EqualValues(t, 1, renewals("ca"))
	require.EqualValues(t, 1, renewals("serving"))

	second := r.look(servingLife - servingRenewal)
	require.NotEqual(t, first.Data[corev1.TLSCertKey], second.Data[corev1.TLSCertKey])
	require.Equal(t, first.Data[caBundleKey], second.Data[caBundleKey])
	require.Equal(t, second.ResourceVersion, r.look(0).ResourceVersion)
	require.EqualValues(t, 1, renewals("ca"))
	require.EqualValues(t, 2, renewals("serving"))

	secrets, bundles := r.client.CoreV1().Secrets("servers"), r.client.CoreV1().ConfigMaps("agents")
	require.NoError(t, bundles.Delete(t.Context(), "ca", metav1.DeleteOptions{}))
	require.Equal(t, second.ResourceVersion, r.look(0).ResourceVersion)
	_, err = bundles.Update(t.Context(), &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: "ca"}, Data: map[string]string{caBundleKey: "x", "other": "y"},
	}, metav1.UpdateOptions{})
	require.NoError(t, err)
	require.Equal(t, second.ResourceVersion, r.look(0).ResourceVersion)
	bundle, err := bundles.Get(t.Context(), "ca", metav1.GetOptions{})
	require.NoError(t, err)
	require.Equal(t, "y", bundle.Data["other"], "what others keep there stays")

	// A server that stops right after it has written leaves nothing undone.
	r.advance(caLife - caRenewal)
	_, err = r.servers[0].secret(t.Context())
	require.NoError(t, err)
	stopped := r.servers[0]
	r.servers = r.servers[1:]
	r.look(0)
	r.servers = append(r.servers, stopped)
	require.EqualValues(t, 2, renewals("ca"))

	require.NoError(t, secrets.Delete(t.Context(), "tls", metav1.DeleteOptions{}))
	third := r.look(0)
	require.NotEqual(t, second.Data[caKeyKey], third.Data[caKeyKey])
	broken := third.DeepCopy()
	broken.Data[corev1.TLSCertKey], broken.Data[caKeyKey] = []byte("x"), []byte("x")
	r.edit(broken)
	fourth := r.look(0)
	require.Contains(t, string(fourth.Data[caBundleKey]), string(third.Data[caBundleKey]))
}

// TestWhatCannotBeWritten covers objects that the servers cannot understand or must not write. They
// stay, the servers keep what they have, and a server that starts uses a certificate that is good.
func TestWhatCannotBeWritten(t *testing.T) {
	r := startReplicas(t, 1)
	server := r.servers[0]
	good := r.look(0)
	secrets, bundles := r.client.CoreV1().Secrets("servers"), r.client.CoreV1().ConfigMaps("agents")

	foreign := good.DeepCopy()
	delete(foreign.Data, caKeyKey)
	r.edit(foreign)
	server.look(t.Context())
	require.ErrorContains(t, server.latest, "the servers did not create it; delete it to let the servers create another one")
	content, err := server.Content()
	require.NoError(t, err)
	require.Equal(t, good.Data[corev1.TLSCertKey], content.Certificate)
	require.Equal(t, foreign.Data, r.secret().Data)
	restarted := r.server(r.plane.AdminConfig(), &bytes.Buffer{})
	restarted.look(t.Context())
	_, err = restarted.Content()
	require.ErrorContains(t, err, "no certificate yet: read Secret servers/tls: it has a certificate but no ca.key")

	large := r.secret()
	large.Data = edited(good.Data, "note", nil)
	size := 0
	for _, value := range large.Data {
		size += len(value)
	}
	large.Data["note"] = make([]byte, corev1.MaxSecretSize-size)
	r.edit(large)
	r.advance(caLife - caRenewal) // a CA more
	server.look(t.Context())
	require.ErrorContains(t, server.latest, "write Secret servers/tls: ")
	require.ErrorContains(t, server.latest, "; delete it to let the servers create another one")
	restarted.look(t.Context())
	_, err = restarted.Content()
	require.NoError(t, err)
	require.NoError(t, secrets.Delete(t.Context(), "tls", metav1.DeleteOptions{}))
	r.look(0)

	fixed, err := bundles.Get(t.Context(), "ca", metav1.GetOptions{})
	require.NoError(t, err)
	fixed.Immutable = new(true)
	fixed.Data[caBundleKey] = "x"
	_, err = bundles.Update(t.Context(), fixed, metav1.UpdateOptions{})
	require.NoError(t, err)
	before := failures(server, configMaps)
	server.look(t.Context())
	require.Equal(t, before+1, failures(server, configMaps))
	require.NoError(t, bundles.Delete(t.Context(), "ca", metav1.DeleteOptions{}))
	r.look(0)
}

// TestANewCAIsPublishedFirst requires that a new CA issues nothing while a ConfigMap cannot be
// written, although its year is over, and not at once when it can.
func TestANewCAIsPublishedFirst(t *testing.T) {
	r := startReplicas(t, 2)
	first := r.look(0)
	r.look(caLife - caRenewal - day)
	for _, m := range r.servers {
		m.ConfigMaps[1].Namespace = "later"
	}
	lookAll := func(after time.Duration) map[string][]byte {
		r.advance(after)
		for range 2 {
			for _, m := range r.servers {
				m.look(t.Context())
			}
		}
		for _, m := range r.servers {
			content, err := m.Content()
			require.NoError(t, err)
			require.Equal(t, r.secret().Data[corev1.TLSCertKey], content.Certificate)
		}
		return r.secret().Data
	}
	for range 10 {
		verify(t, lookAll(40*day), first.Data[caBundleKey], r.clock())
		require.Zero(t, testutil.ToFloat64(r.servers[0].published))
	}
	planned := testutil.ToFloat64(r.servers[0].change)
	require.Greater(t, planned, float64(r.clock().Unix()))
	noTime, cancel := context.WithTimeout(t.Context(), 0)
	r.servers[0].look(noTime)
	cancel()
	require.Equal(t, planned, testutil.ToFloat64(r.servers[0].change), "also while the Secret cannot be read")
	_, err := r.client.CoreV1().Namespaces().Create(t.Context(),
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "later"}}, metav1.CreateOptions{})
	require.NoError(t, err)
	both := lookAll(0)
	stopped, stop := context.WithCancel(t.Context())
	stop()
	r.servers[1].look(stopped)
	require.EqualValues(t, 1, testutil.ToFloat64(r.servers[1].published), "also once the server stops")
	verify(t, both, first.Data[caBundleKey], r.clock())
	// The old CA has a month and a half left, so its copies cannot last for a year more.
	issued := lookAll(40 * day)
	verify(t, issued, both[caBundleKey], r.clock())
	pair, err := tls.X509KeyPair(issued[corev1.TLSCertKey], issued[corev1.TLSPrivateKeyKey])
	require.NoError(t, err)
	bundle, err := cert.ParseCertsPEM(issued[caBundleKey])
	require.NoError(t, err)
	require.NoError(t, pair.Leaf.CheckSignatureFrom(bundle[0]))
	require.Zero(t, testutil.ToFloat64(r.servers[0].change))
}

// TestChangesOfMode follows deploy/README.md from the servers' own certificates to others and back.
// In both directions, agents have the CAs of both ways while servers of both run, and the servers
// begin with a certificate that agents accept already.
func TestChangesOfMode(t *testing.T) {
	r := startReplicas(t, 2)
	first := r.look(0)
	other, err := testca.New()
	require.NoError(t, err)
	provide := func(bundle []byte, annotations map[string]string) {
		t.Helper()
		for _, of := range r.servers[0].ConfigMaps {
			_, err := r.client.CoreV1().ConfigMaps(of.Namespace).Update(t.Context(), &corev1.ConfigMap{
				ObjectMeta: metav1.ObjectMeta{Name: of.Name, Annotations: annotations},
				Data:       map[string]string{caBundleKey: string(bundle)},
			}, metav1.UpdateOptions{}) // it creates what is missing
			require.NoError(t, err)
		}
	}
	requireBundle := func(want []byte) {
		t.Helper()
		for _, m := range r.servers {
			m.look(t.Context())
			for _, of := range m.ConfigMaps {
				have, err := r.client.CoreV1().ConfigMaps(of.Namespace).Get(t.Context(), of.Name, metav1.GetOptions{})
				require.NoError(t, err)
				require.Equal(t, string(want), have.Data[caBundleKey])
			}
		}
	}
	provided := map[string]string{providedAnnotation: ""} // any value

	// The servers' own certificates go. Agents get both CAs, and the servers of before go on.
	both := slices.Concat([]byte("# the servers' own\n"), first.Data[caBundleKey], other.PEM())
	provide(both, provided)
	for range 3 {
		r.advance(servingLife - servingRenewal)
		requireBundle(both)
		verify(t, r.secret().Data, both, r.clock())
		for _, m := range r.servers {
			require.Empty(t, m.failing)
			require.EqualValues(t, 1, testutil.ToFloat64(m.published))
		}
	}
	// Then the old CA goes. A server of before that is still there says so, and changes nothing.
	provide(other.PEM(), provided)
	requireBundle(other.PEM())
	for _, m := range r.servers {
		require.Equal(t, 2, failures(m, configMaps))
		require.Zero(t, testutil.ToFloat64(m.published))
	}
	require.NoError(t, r.client.CoreV1().Secrets("servers").Delete(t.Context(), "tls", metav1.DeleteOptions{}))

	// The servers' own certificates come back. Agents get both CAs before the servers start.
	made, err := ca.New("slicecast", ca.Validity{NotBefore: time.Now().Add(-clockSkew), NotAfter: time.Now().Add(caLife)})
	require.NoError(t, err)
	next, key, err := made.PEM()
	require.NoError(t, err)
	_, err = r.client.CoreV1().Secrets("servers").Create(t.Context(), &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: "tls"}, Data: map[string][]byte{caBundleKey: next, caKeyKey: key},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	both = slices.Concat(other.PEM(), next)
	provide(both, provided)
	r.now = time.Now()
	r.servers = []*Manager{r.server(r.plane.AdminConfig(), &bytes.Buffer{}), r.server(r.plane.AdminConfig(), &bytes.Buffer{})}
	requireBundle(both)
	verify(t, r.secret().Data, both, r.clock())
	require.Equal(t, next, r.secret().Data[caBundleKey], "the CA that agents have already")
	provide(both, nil)
	r.look(0) // the ConfigMaps are the servers' again
}

// TestTimeOfALook holds the time until a server has looked at everything to docs/security.md.
func TestTimeOfALook(t *testing.T) {
	require.Equal(t, 87*time.Second, time.Duration(float64(defaultInterval)*(1+intervalJitter))+requestTimeout)
}

// TestRights covers servers without the rights that they need, from none to those that an install
// grants: to get and update a Secret and ConfigMaps that exist. Each lack is counted every time,
// and logged once.
func TestRights(t *testing.T) {
	r := startReplicas(t, 1)
	var logs bytes.Buffer
	m := r.server(r.plane.ConfigFor("server"), &logs)
	for range 3 {
		m.look(t.Context())
	}
	_, err := m.Content()
	require.ErrorContains(t, err, `no certificate yet: read Secret servers/tls: secrets "tls" is forbidden`)
	require.ErrorContains(t, err, "; allow the server's user to get and update it")
	require.Equal(t, 3, failures(m, secrets))
	require.Equal(t, 1, warnings(&logs), logs.String())

	r.grant("servers", secrets, "tls", "get")
	r.eventually(m, "without create", func(err error) bool { return strings.Contains(err.Error(), "cannot create resource") })
	require.Equal(t, 1, warnings(&logs), logs.String())
	// The right to create cannot be limited to a name, so an install creates empty objects.
	_, err = r.client.CoreV1().Secrets("servers").Create(t.Context(),
		&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "tls"}}, metav1.CreateOptions{})
	require.NoError(t, err)
	r.grant("servers", secrets, "tls", "get", "update")
	r.eventually(m, "with update", func(err error) bool { return err == nil })
	require.Equal(t, 1, strings.Count(logs.String(), "maintained again"), logs.String())
	require.Equal(t, corev1.SecretTypeOpaque, r.secret().Type, "it is the one that there was")

	m.look(t.Context())
	require.Equal(t, 3, warnings(&logs), "one more for each ConfigMap: %s", logs.String())
	for _, namespace := range []string{"servers", "agents"} {
		_, err := r.client.CoreV1().ConfigMaps(namespace).Create(t.Context(),
			&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "ca"}}, metav1.CreateOptions{})
		require.NoError(t, err)
		r.grant(namespace, configMaps, "ca", "get", "update")
	}
	require.Eventually(t, func() bool { m.look(t.Context()); return len(m.failing) == 0 }, time.Minute, 10*time.Millisecond)
	r.look(0) // others find nothing to do

	// Rights that are withdrawn, and a server that starts then.
	r.grant("servers", secrets, "tls", "get")
	r.advance(servingLife - servingRenewal + day)
	r.eventually(m, "without update", func(err error) bool { return err != nil })
	late := r.server(r.plane.ConfigFor("server"), &bytes.Buffer{})
	late.look(t.Context())
	_, err = late.Content()
	require.NoError(t, err, "what it has is good for a month")
}

// grant lets the user of TestRights do something with an object, and nothing else.
func (r *replicas) grant(namespace, resource, name string, verbs ...string) {
	r.t.Helper()
	role := &rbacv1.Role{
		ObjectMeta: metav1.ObjectMeta{Name: resource},
		Rules: []rbacv1.PolicyRule{{
			APIGroups: []string{""}, Resources: []string{resource}, ResourceNames: []string{name}, Verbs: verbs,
		}},
	}
	binding := &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: resource}, Subjects: []rbacv1.Subject{{Kind: rbacv1.UserKind, Name: "server"}},
		RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: resource},
	}
	// Update creates what is missing.
	_, err := r.client.RbacV1().Roles(namespace).Update(r.t.Context(), role, metav1.UpdateOptions{})
	require.NoError(r.t, err)
	_, err = r.client.RbacV1().RoleBindings(namespace).Update(r.t.Context(), binding, metav1.UpdateOptions{})
	require.NoError(r.t, err)
}

// eventually lets a server look until the outcome of its look at the Secret is as wanted, because
// the API server takes a moment to learn of new rights.
func (r *replicas) eventually(m *Manager, what string, is func(error) bool) {
	r.t.Helper()
	require.Eventually(r.t, func() bool { m.look(r.t.Context()); return is(m.latest) }, time.Minute, 10*time.Millisecond, what)
}

// TestTheAPIServerIsAway covers servers that start without an API server, and that run without one
// until their certificate has ended.
func TestTheAPIServerIsAway(t *testing.T) {
	r := startReplicas(t, 1)
	first := r.look(0)
	require.NoError(t, r.plane.APIServer.Kill())
	var logs bytes.Buffer
	started := r.server(r.plane.AdminConfig(), &logs)
	r.advance(servingLife + day)
	for _, m := range []*Manager{r.servers[0], started} {
		m.look(t.Context())
		m.look(t.Context())
		require.Equal(t, 2, failures(m, secrets))
	}
	content, err := r.servers[0].Content()
	require.NoError(t, err)
	require.Equal(t, first.Data[corev1.TLSCertKey], content.Certificate)
	_, err = started.Content()
	require.ErrorContains(t, err, "no certificate yet: read Secret servers/tls: ")
	require.Equal(t, 1, warnings(&logs), logs.String())

	require.NoError(t, r.plane.APIServer.Start(t.Context()))
	r.servers = append(r.servers, started)
	require.Equal(t, first.Data[caBundleKey], r.look(0).Data[caBundleKey])
}

// TestTheAPIServersClock requires that servers go by the API server's clock.
func TestTheAPIServersClock(t *testing.T) {
	wrong := time.Now().Add(1000 * day)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Date", wrong.UTC().Format(http.TimeFormat))
		w.WriteHeader(http.StatusNotFound)
	}))
	t.Cleanup(server.Close)
	client, now, err := kube.Core(&rest.Config{Host: server.URL})
	require.NoError(t, err)
	require.WithinDuration(t, time.Now(), now(), time.Minute)
	require.True(t, apierrors.IsNotFound(client.Get().Resource(secrets).Do(t.Context()).Error()))
	require.WithinDuration(t, wrong, now(), time.Minute)
}

// TestRun starts all servers at once, like a new Deployment.
func TestRun(t *testing.T) {
	r := startReplicas(t, 3)
	ctx, stop := context.WithCancel(t.Context())
	var all sync.WaitGroup
	for _, m := range r.servers {
		all.Go(func() { m.Run(ctx) })
	}
	require.Eventually(t, func() bool {
		seen := map[string]bool{}
		for _, m := range r.servers {
			content, err := m.Content()
			seen[fmt.Sprint(string(content.Certificate), err)] = true
		}
		_, err := r.servers[0].Content()
		return len(seen) == 1 && err == nil
	}, time.Minute, 10*time.Millisecond)
	stop()
	all.Wait()
}
