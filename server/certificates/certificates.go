// Package certificates provides the servers with certificates of their own, so that nobody has to
// create any. The servers share a CA and a certificate in a Secret, and publish the CAs that
// clients must trust in ConfigMaps. They renew both long before they end; no connection ends, and
// clients that follow a ConfigMap trust every certificate before it is used.
//
// All servers do the same. The first one to find that something is due writes it. The resource
// version of the Secret lets only one of several succeed, and the others use what that one wrote.
// So there is neither a leader nor a Lease.
package certificates

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"

	"github.com/slicecast/slicecast/internal/tlsfiles"
)

const (
	// defaultInterval is also how long a server may still use what another one has replaced.
	defaultInterval = time.Minute
	// intervalJitter is the part of an interval by which it may be longer.
	intervalJitter = 0.2
	// firstInterval is the longest time between two looks while there is no certificate yet.
	firstInterval = time.Second
	// requestTimeout bounds one look.
	requestTimeout = 15 * time.Second
)

// The kinds of objects that a Manager maintains: as resources of the API, and in logs and metrics.
const (
	secrets, configMaps = "secrets", "configmaps"
)

// providedAnnotation marks a ConfigMap, with any value, whose CAs somebody else provides. While an
// install changes where its certificates come from, such a bundle has the CAs of both ways.
const providedAnnotation = "slicecast.io/provided-cas"

// Options configure a Manager. All fields without a default are required.
type Options struct {
	// Client reads and writes Secrets and ConfigMaps.
	Client rest.Interface
	// Secret is shared by all servers. It is created if it is missing.
	Secret types.NamespacedName
	// ConfigMaps are those that the CAs are published in. They are created if they are missing. One
	// with providedAnnotation is only read.
	ConfigMaps []types.NamespacedName
	// Names are the DNS names of the servers' certificate.
	Names []string
	// Now returns the current time. It should be the API server's, so that all servers have the
	// same.
	Now func() time.Time
	// Interval is the time between two looks at the Secret and the ConfigMaps. 0 means
	// defaultInterval.
	Interval time.Duration

	Log        *slog.Logger
	Registerer prometheus.Registerer
}

// Manager keeps the Secret and the ConfigMaps as they must be, and provides their content. Its
// methods are safe for concurrent use.
//
// Invariants:
//
//  1. Once there is content, there always is. It changes only to content with a certificate and
//     its key, whatever becomes of the Secret.
//  2. Each failure is counted, and each kind of failure is logged once until its object is as it
//     must be again.
type Manager struct {
	Options
	renewals, failures *prometheus.CounterVec
	published, change  prometheus.Gauge

	mu      sync.Mutex       // guards the fields below
	content *tlsfiles.PEM    // nil until the Secret has been read or written once
	latest  error            // why the last look at the Secret failed; nil if it did not
	failing map[failure]bool // the failures that have been logged
	inPlace bool             // all ConfigMaps had the CAs at the last look
}

// failure is a kind of failure: of an object, with the API server's reason.
type failure struct {
	resource string
	name     types.NamespacedName
	reason   metav1.StatusReason
}

// New returns a Manager. The caller must run it.
func New(o Options) *Manager {
	m := &Manager{
		Options: o,
		renewals: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "slicecast_server_certificate_renewals_total",
			Help: "Number of CAs and servers' certificates that this server has created in the Secret, by kind: ca or " +
				"serving.",
		}, []string{"kind"}),
		failures: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "slicecast_server_certificate_errors_total",
			Help: "Number of times that the server could not maintain its certificates, by what it could not read, " +
				"understand or write: secrets or configmaps. The log has the reason.",
		}, []string{"resource"}),
		published: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "slicecast_server_ca_published",
			Help: "1 if all ConfigMaps of --ca-config-map had the CAs when the server could last look, 0 otherwise. A CA that is not " +
				"published does not issue the servers' certificate while another one can.",
		}),
		change: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "slicecast_server_ca_change_timestamp_seconds",
			Help: "Time at which a newer CA is to issue the servers' certificate, in seconds since 1970; 0 if none is. Clients " +
				"whose CA file lacks that CA cannot connect from then on.",
		}),
		failing: make(map[failure]bool),
	}
	for _, kind := range []string{"ca", "serving"} {
		m.renewals.WithLabelValues(kind)
	}
	for _, resource := range []string{secrets, configMaps} {
		m.failures.WithLabelValues(resource)
	}
	o.Registerer.MustRegister(m.renewals, m.failures, m.published, m.change)
	return m
}

// Content returns the servers' certificate and the CAs. It returns an error until the Secret has
// been read or written once.
func (m *Manager) Content() (tlsfiles.PEM, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.content != nil:
		return *m.content, nil
	case m.latest != nil:
		return tlsfiles.PEM{}, fmt.Errorf("no certificate yet: %w", m.latest)
	}
	return tlsfiles.PEM{}, fmt.Errorf("no certificate yet: Secret %s has not been read", m.Secret)
}

// Run keeps everything as it must be until ctx ends. If the API server cannot be reached, the
// content stays as it was.
func (m *Manager) Run(ctx context.Context) {
	interval := m.Interval
	if interval == 0 {
		interval = defaultInterval
	}
	for {
		m.look(ctx)
		pause := interval
		if _, err := m.Content(); err != nil {
			pause = min(interval, firstInterval)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait.Jitter(pause, intervalJitter)):
		}
	}
}

// look brings the Secret and the ConfigMaps up to date once. If another server replaces the Secret
// meanwhile, a ConfigMap may have the bundle of before until the next look. This does no harm,
// because a new CA is not used before caSpread. If the Secret cannot be written, look uses what it
// has.
func (m *Manager) look(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	data, err := m.secret(ctx)
	m.report(ctx, secrets, m.Secret, err)
	m.mu.Lock()
	m.latest = err
	_, unusable := tls.X509KeyPair(data[corev1.TLSCertKey], data[corev1.TLSPrivateKeyKey])
	if unusable == nil {
		m.content = &tlsfiles.PEM{
			Certificate: data[corev1.TLSCertKey], PrivateKey: data[corev1.TLSPrivateKeyKey], CA: data[caBundleKey],
		}
	}
	m.mu.Unlock()
	inPlace := err == nil
	if inPlace {
		for _, name := range m.ConfigMaps {
			err := m.publish(ctx, name, data[caBundleKey])
			inPlace = inPlace && err == nil
			m.report(ctx, configMaps, name, err)
		}
	}
	m.mu.Lock()
	m.inPlace = inPlace
	m.mu.Unlock()
	switch {
	case inPlace:
		m.mark(ctx, data)
		m.published.Set(1)
	case err == nil && ctx.Err() == nil: // otherwise it is not known whether they have the CAs
		m.published.Set(0)
	}
	if data != nil { // otherwise it is not known, and what is planned stays so
		m.change.Set(changeAt(data, m.Now()))
	}
}

// mark notes in the Secret that all ConfigMaps have its first CA, unless data says so. A failure
// delays only when that CA issues, and the next look tries again.
func (m *Manager) mark(ctx context.Context, data map[string][]byte) {
	if _, due := markPublished(data, m.Now()); !due {
		return
	}
	have := &corev1.Secret{ObjectMeta: meta(m.Secret), Type: corev1.SecretTypeTLS}
	err := m.get(ctx, secrets, m.Secret, have)
	if err != nil || !bytes.Equal(have.Data[caBundleKey], data[caBundleKey]) {
		return // the bundle in the ConfigMaps may be an older one
	}
	have.Data, _ = markPublished(have.Data, m.Now())
	if err := m.put(ctx, secrets, have); err != nil && !apierrors.IsConflict(err) {
		m.report(ctx, secrets, m.Secret, fmt.Errorf("write Secret %s: %w%s", m.Secret, err, advice(err)))
	}
}

// report counts and logs that an object could not be maintained, or logs that it is maintained
// again if err is nil.
func (m *Manager) report(ctx context.Context, resource string, name types.NamespacedName, err error) {
	if errors.Is(ctx.Err(), context.Canceled) {
		return // the server stops
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	kind := failure{resource, name, apierrors.ReasonForError(err)}
	if err != nil {
		m.failures.WithLabelValues(resource).Inc()
		if !m.failing[kind] {
			m.failing[kind] = true
			m.Log.Warn("Cannot maintain the certificates, trying again", "resource", resource, "name", name, "err", err)
		}
		return
	}
	recovered := false
	for other := range m.failing {
		if other.resource == resource && other.name == name {
			delete(m.failing, other)
			recovered = true
		}
	}
	if recovered {
		m.Log.Info("The certificates are maintained again", "resource", resource, "name", name)
	}
}

// secret returns the content of the Secret, which it creates or updates if something is due. If it
// could not write that, it returns the present content and an error.
func (m *Manager) secret(ctx context.Context) (map[string][]byte, error) {
	for {
		have := &corev1.Secret{ObjectMeta: meta(m.Secret), Type: corev1.SecretTypeTLS}
		if err := m.get(ctx, secrets, m.Secret, have); err != nil {
			return nil, fmt.Errorf("read Secret %s: %w%s", m.Secret, err, advice(err))
		}
		before := have.Data
		m.mu.Lock()
		inPlace := m.inPlace
		m.mu.Unlock()
		data, due, err := next(before, m.Names, m.Now(), inPlace)
		if err != nil {
			return nil, fmt.Errorf("read Secret %s: %w; delete it to let the servers create another one", m.Secret, err)
		}
		if !due {
			return data, nil
		}
		have.Data = data
		switch err := m.put(ctx, secrets, have); {
		case err == nil:
			m.renewed(before, data)
			return data, nil
		case !apierrors.IsConflict(err) && !apierrors.IsAlreadyExists(err):
			return before, fmt.Errorf("write Secret %s: %w%s", m.Secret, err, advice(err))
		}
	}
}

// renewed counts and logs what this server has written.
func (m *Manager) renewed(before, now map[string][]byte) {
	for key, kind := range map[string]string{caBundleKey: "ca", corev1.TLSCertKey: "serving"} {
		was, _ := pem.Decode(before[key])
		if is, _ := pem.Decode(now[key]); was == nil || !bytes.Equal(was.Bytes, is.Bytes) {
			m.renewals.WithLabelValues(kind).Inc()
			m.Log.Info("Created a certificate", "kind", kind, "secret", m.Secret)
		}
	}
}

// publish writes the bundle to a ConfigMap, unless it has it. If somebody else provides its CAs,
// publish returns an error if they lack one of the bundle.
func (m *Manager) publish(ctx context.Context, name types.NamespacedName, bundle []byte) error {
	for {
		have := &corev1.ConfigMap{ObjectMeta: meta(name)}
		if err := m.get(ctx, configMaps, name, have); err != nil {
			return fmt.Errorf("read ConfigMap %s: %w%s", name, err, advice(err))
		}
		if have.Data[caBundleKey] == string(bundle) {
			return nil
		}
		if _, ok := have.Annotations[providedAnnotation]; ok {
			if !includes([]byte(have.Data[caBundleKey]), bundle) {
				return fmt.Errorf("ConfigMap %s lacks CAs of the servers, and its annotation %s says that others provide "+
					"them; add %s of Secret %s, or remove the annotation", name, providedAnnotation, caBundleKey, m.Secret)
			}
			return nil
		}
		if have.Data == nil {
			have.Data = make(map[string]string)
		}
		have.Data[caBundleKey] = string(bundle)
		switch err := m.put(ctx, configMaps, have); {
		case err == nil:
			return nil
		case !apierrors.IsConflict(err) && !apierrors.IsAlreadyExists(err):
			return fmt.Errorf("write ConfigMap %s: %w%s", name, err, advice(err))
		}
	}
}

// advice returns what an operator can do about an error of the API server.
func advice(err error) string {
	switch {
	case apierrors.IsForbidden(err):
		return "; allow the server's user to get and update it, and create it or allow that, too"
	case apierrors.IsNotFound(err):
		return "; create its namespace"
	case apierrors.IsInvalid(err), apierrors.IsRequestEntityTooLargeError(err):
		return "; delete it to let the servers create another one"
	}
	return ""
}

// get reads an object. It leaves the object as it is if the API server has none.
func (m *Manager) get(ctx context.Context, resource string, name types.NamespacedName, into runtime.Object) error {
	err := m.Client.Get().Namespace(name.Namespace).Resource(resource).Name(name.Name).Do(ctx).Into(into)
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// put creates an object, or replaces it if it has been read with a resource version.
func (m *Manager) put(ctx context.Context, resource string, object object) error {
	request := m.Client.Post()
	if object.GetResourceVersion() != "" {
		request = m.Client.Put().Name(object.GetName())
	}
	return request.Namespace(object.GetNamespace()).Resource(resource).Body(object).Do(ctx).Error()
}

// object is a Secret or a ConfigMap.
type object interface {
	runtime.Object
	metav1.Object
}

func meta(name types.NamespacedName) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name}
}
