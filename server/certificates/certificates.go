// Package certificates provides the servers with certificates of their own, so that nobody has to
// create any. The servers share a CA and a certificate in a Secret, and publish the CAs that
// clients must trust in ConfigMaps. They renew both long before they end; no connection ends, and
// clients that follow a ConfigMap trust every certificate before it is used.
//
// All servers do the same. The first one to find that something is due writes it. The resource
// version of the Secret lets only one of several succeed, and the others use what that one wrote. So
// there is neither a leader nor a Lease.
package certificates

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

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
	// interval is the time between two looks at the Secret and the ConfigMaps, so it is also how
	// long a server may still use what another one has replaced.
	interval = time.Minute
	// firstInterval is the same while there is no certificate yet.
	firstInterval = time.Second
	// requestTimeout bounds one look.
	requestTimeout = 15 * time.Second
)

// Options configure a Manager. All fields are required.
type Options struct {
	// Client reads and writes Secrets and ConfigMaps.
	Client rest.Interface
	// Secret is shared by all servers. It is created if it is missing.
	Secret types.NamespacedName
	// ConfigMaps are those that the CAs are published in. They are created if they are missing.
	ConfigMaps []types.NamespacedName
	// Names are the DNS names of the servers' certificate.
	Names []string
	// Now returns the current time.
	Now func() time.Time
	Log *slog.Logger
}

// Manager keeps the Secret and the ConfigMaps as they must be, and provides their content. Its
// methods are safe for concurrent use.
type Manager struct {
	Options
	content atomic.Pointer[tlsfiles.PEM] // nil until the Secret has been read or written once
}

// New returns a Manager. The caller must run it.
func New(o Options) *Manager { return &Manager{Options: o} }

// Content returns the servers' certificate and the CAs. It returns an error until the Secret has
// been read once.
func (m *Manager) Content() (tlsfiles.PEM, error) {
	if c := m.content.Load(); c != nil {
		return *c, nil
	}
	return tlsfiles.PEM{}, fmt.Errorf("no certificate from the Secret %s yet", m.Secret)
}

// Run keeps everything as it must be until ctx ends. If the API server cannot be reached, the
// content stays as it was.
func (m *Manager) Run(ctx context.Context) {
	for {
		if err := m.look(ctx); err != nil && ctx.Err() == nil {
			m.Log.Warn("Cannot maintain the certificates, trying again", "secret", m.Secret, "err", err)
		}
		pause := interval
		if m.content.Load() == nil {
			pause = firstInterval
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait.Jitter(pause, 0.2)):
		}
	}
}

// look brings the Secret and the ConfigMaps up to date once. If another server replaces the Secret
// meanwhile, a ConfigMap may have the bundle of before until the next look. This does no harm,
// because a new CA is not used before caSpread.
func (m *Manager) look(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	data, err := m.secret(ctx)
	if err != nil {
		return err
	}
	m.content.Store(&tlsfiles.PEM{
		Certificate: data[corev1.TLSCertKey], PrivateKey: data[corev1.TLSPrivateKeyKey], CA: data[caBundleKey],
	})
	var errs []error
	for _, name := range m.ConfigMaps {
		if err := m.publish(ctx, name, data[caBundleKey]); err != nil {
			errs = append(errs, fmt.Errorf("ConfigMap %s: %w", name, err))
		}
	}
	return errors.Join(errs...)
}

// secret returns the content of the Secret, which it creates or updates if something is due.
func (m *Manager) secret(ctx context.Context) (map[string][]byte, error) {
	for {
		have := &corev1.Secret{ObjectMeta: meta(m.Secret), Type: corev1.SecretTypeTLS}
		err := m.get(ctx, "secrets", m.Secret, have)
		if err != nil {
			return nil, fmt.Errorf("Secret %s: %w", m.Secret, err)
		}
		data, due, err := next(have.Data, m.Names, m.Now())
		if err != nil {
			return nil, fmt.Errorf("Secret %s: %w; delete it to let the servers create another one", m.Secret, err)
		}
		if !due {
			return data, nil
		}
		have.Data = data
		switch err := m.put(ctx, "secrets", have); {
		case err == nil:
			m.Log.Info("Renewed the certificates", "secret", m.Secret)
			return data, nil
		case !apierrors.IsConflict(err) && !apierrors.IsAlreadyExists(err):
			return nil, fmt.Errorf("Secret %s: %w", m.Secret, err)
		}
	}
}

// publish writes the bundle to a ConfigMap, unless it has it.
func (m *Manager) publish(ctx context.Context, name types.NamespacedName, bundle []byte) error {
	for {
		have := &corev1.ConfigMap{ObjectMeta: meta(name)}
		err := m.get(ctx, "configmaps", name, have)
		if err != nil || bytes.Equal([]byte(have.Data[caBundleKey]), bundle) {
			return err
		}
		have.Data = map[string]string{caBundleKey: string(bundle)}
		err = m.put(ctx, "configmaps", have)
		if !apierrors.IsConflict(err) && !apierrors.IsAlreadyExists(err) {
			return err
		}
	}
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
