package fleet

import (
	"context"
	"crypto/x509"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"
	authenticationv1 "k8s.io/api/authentication/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
)

const (
	// tokenLife is for how long tokens are requested. It is the shortest time that API servers
	// allow.
	tokenLife = 10 * time.Minute
	// tokenMargin is how long before its end a token is replaced.
	tokenMargin = time.Minute
)

// DefaultServiceAccount is the ServiceAccount of the chart whose tokens the servers are shown.
const DefaultServiceAccount = "slicecast-viewer"

// pool returns the CAs in a ConfigMap.
func (f *Fleet) pool(ctx context.Context, name types.NamespacedName) (*x509.CertPool, error) {
	held, err := f.client.CoreV1().ConfigMaps(name.Namespace).Get(ctx, name.Name, metav1.GetOptions{})
	if err != nil {
		return nil, fmt.Errorf("read the CAs of the servers: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM([]byte(held.Data["ca.crt"])) {
		return nil, fmt.Errorf("read the CAs of the servers: the ConfigMap %s has no certificates under ca.crt", name)
	}
	return pool, nil
}

// tokens requests tokens of a ServiceAccount, and replaces them before they end.
type tokens struct {
	client  kubernetes.Interface
	account string
	timeout time.Duration // of a request

	mu   sync.Mutex // guards held, and the tokens in it
	held map[tokenKey]*heldToken
}

// heldToken is the token for a key, with the request for the next one.
type heldToken struct {
	token

	flight singleflight.Group
}

// tokenKey is what a token is for. Each tier of servers has an audience of its own, so that no
// server can show the token to those of another tier.
type tokenKey struct{ namespace, audience string }

type token struct {
	value string
	until time.Time // when it expires, by this machine's clock, whatever the API server's says
}

func newTokens(client kubernetes.Interface, account string, timeout time.Duration) *tokens {
	return &tokens{client: client, account: account, timeout: timeout, held: make(map[tokenKey]*heldToken)}
}

// get returns a token for servers in a namespace with an audience.
func (t *tokens) get(ctx context.Context, namespace, audience string) (string, error) {
	key := tokenKey{namespace, audience}
	t.mu.Lock()
	held, ok := t.held[key]
	if !ok {
		held = &heldToken{}
		t.held[key] = held
	}
	if last := held.token; time.Now().Before(last.until.Add(-tokenMargin)) {
		t.mu.Unlock()
		return last.value, nil
	}
	// All calls that need the token share one request, which must not end with the first of them. A
	// call that has seen no token joins it before it can store one, because it needs mu for that.
	answer := held.flight.DoChan("", func() (any, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), t.timeout)
		defer cancel()
		next, err := t.request(ctx, key)
		if err == nil {
			t.mu.Lock()
			defer t.mu.Unlock()
			held.token = next
		}
		return next.value, err
	})
	t.mu.Unlock()
	select {
	case a := <-answer:
		return a.Val.(string), a.Err
	case <-ctx.Done():
		return "", ctx.Err()
	}
}

func (t *tokens) request(ctx context.Context, key tokenKey) (token, error) {
	begin := time.Now()
	answer, err := t.client.CoreV1().ServiceAccounts(key.namespace).CreateToken(ctx, t.account, &authenticationv1.TokenRequest{
		Spec: authenticationv1.TokenRequestSpec{
			Audiences: []string{key.audience}, ExpirationSeconds: new(int64(tokenLife.Seconds())),
		},
	}, metav1.CreateOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return token{}, fmt.Errorf("request a token for the servers: %w; upgrade the chart, which creates it, or set --service-account", err)
	case err != nil:
		return token{}, fmt.Errorf("request a token for the servers: %w", withRights(err))
	}
	life := tokenLife
	if granted := answer.Spec.ExpirationSeconds; granted != nil {
		life = time.Duration(*granted) * time.Second
	}
	return token{answer.Status.Token, begin.Add(life)}, nil
}
