package auth

import (
	"context"
	"crypto/ecdsa"
	"crypto/rsa"
	"encoding/json"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
	"golang.org/x/sync/singleflight"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// keysPath is the path at which an API server publishes the keys that verify its ServiceAccount
// tokens (KEP-1393).
const keysPath = "/openid/v1/jwks"

const (
	// maxTokenBytes bounds tokens. A ServiceAccount's token has about 1,000 bytes.
	maxTokenBytes = 16 << 10
	// keysLife is how long a server uses keys before it reads them again, so that a withdrawn key is
	// dropped.
	keysLife = 5 * time.Minute
	// keysInterval is the shortest time between two reads of the keys by a server, however many
	// tokens name unknown keys. It is also the time after the first of several failures.
	keysInterval = 5 * time.Second
	// keysTimeout bounds one read of the keys.
	keysTimeout = 10 * time.Second
	// refreshTimeout bounds for how long a caller whose key is known waits for newer keys.
	refreshTimeout = time.Second
	// maxDoublings bounds how often the time after failures doubles.
	maxDoublings = 16
)

// tokenError is what is wrong with a token. The token's bearer is told.
type tokenError string

// Error implements error.
func (e tokenError) Error() string { return string(e) }

const (
	// errNoToken means that the text is too long for a token, or has not the form of a signed one.
	errNoToken tokenError = "it is not a signed token"
	// errUnknownKey means that the token names a key that is not among those of the API server,
	// which were read after the token came.
	errUnknownKey tokenError = "it is signed with a key that the API server does not publish"
	// errSignature means that the named key did not sign the token.
	errSignature tokenError = "its signature is invalid"
)

// errTooSoon means that a token names an unknown key, and that the keys were read less than the
// interval ago.
var errTooSoon = errors.New("the API server's keys were just read, and the token's key is not among them: try again " +
	"later")

// algorithms are those with which Kubernetes signs ServiceAccount tokens, including external
// signers (KEP-740).
var algorithms = []jose.SignatureAlgorithm{jose.RS256, jose.ES256, jose.ES384, jose.ES512}

// claims are the claims of a verified token: those of RFC 7519, and Kubernetes' own (KEP-1205,
// KEP-4193).
type claims struct {
	jwt.Claims
	Kubernetes struct {
		Node objectName `json:"node"` // the node that the token's Pod is on
		Pod  objectName `json:"pod"`  // the Pod that the token is bound to
	} `json:"kubernetes.io"`
}

// objectName is the name of an object in a token, and empty if the token names none.
type objectName struct {
	Name string `json:"name"`
}

// keys verifies tokens with the keys that the API server publishes. It reads the keys when a token
// needs them. It does not check the issuer: an API server may accept several, and publishes only
// the one of new tokens. Whoever can sign with a published key is the API server, whose review of
// the token decides about the issuer, too.
//
// Invariants:
//
//  1. held is never nil. Only a flight replaces it, and there is one at a time.
//  2. After the keys were read, they are not read again for interval. After failures, it is
//     keysInterval at first, and twice as long each time, up to interval.
type keys struct {
	get      func(ctx context.Context, path string) ([]byte, error)
	now      func() time.Time
	interval time.Duration // the shortest time between two reads
	life     time.Duration // how long keys are used before they are read again
	flights  singleflight.Group
	held     atomic.Pointer[published]

	// Only the flight uses the fields below.
	next     time.Time // the keys are not read before
	failures int       // consecutive ones
}

// published is what the API server published when it was last read. It is immutable.
type published struct {
	keys map[string]any
	read time.Time // the zero time means never
	err  error     // why later reads have failed; nil if they have not
}

func newKeys(get func(ctx context.Context, path string) ([]byte, error), now func() time.Time) *keys {
	k := &keys{get: get, now: now, interval: keysInterval, life: keysLife}
	k.held.Store(&published{})
	return k
}

// verify checks a token's signature, and returns its claims. The caller must check audience,
// subject and expiry. An error that is neither a tokenError nor errTooSoon means that the keys
// could not be read from the API server.
func (k *keys) verify(ctx context.Context, token string) (c claims, err error) {
	if len(token) > maxTokenBytes {
		return claims{}, errNoToken
	}
	parsed, err := jwt.ParseSigned(token, algorithms)
	if err != nil {
		return claims{}, errNoToken
	}
	id := parsed.Headers[0].KeyID
	p, err := k.find(ctx, id)
	if err != nil {
		return claims{}, err
	}
	key, ok := p.keys[id]
	if !ok {
		return claims{}, errUnknownKey
	}
	if err := parsed.Claims(key, &c); err != nil {
		return claims{}, errSignature
	}
	return c, nil
}

// find returns what the API server has published. It reads it again if the key is unknown, or if
// the last read is older than life. For the latter it waits for refreshTimeout only, so that
// callers whose key is known still have time for what follows.
func (k *keys) find(ctx context.Context, id string) (*published, error) {
	has := func(p *published) bool { return p.keys[id] != nil }
	p := k.held.Load()
	if has(p) && k.now().Before(p.read.Add(k.life)) {
		return p, nil
	}
	// All callers share one answer, so the request must not end with the first caller's context.
	answer := k.flights.DoChan("", func() (any, error) {
		if k.now().Before(k.next) {
			return nil, errTooSoon
		}
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), keysTimeout)
		defer cancel()
		old := k.held.Load()
		next, err := k.read(ctx)
		pause := k.interval
		if err == nil {
			k.failures = 0
		} else {
			failed := *old
			failed.err = err
			next = &failed
			pause = min(pause, keysInterval<<min(k.failures, maxDoublings))
			k.failures++
		}
		k.next = k.now().Add(pause)
		k.held.Store(next)
		return nil, err
	})
	var patience <-chan time.Time
	if has(p) {
		patience = time.After(refreshTimeout)
	}
	var err error
	select {
	case a := <-answer:
		err = a.Err
	case <-patience:
		return p, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	switch p = k.held.Load(); {
	case err == nil || has(p):
		return p, nil
	case p.err != nil:
		return nil, p.err
	default:
		return nil, err
	}
}

func (k *keys) read(ctx context.Context) (*published, error) {
	var set struct {
		Keys []json.RawMessage `json:"keys"`
	}
	body, err := k.get(ctx, keysPath)
	switch {
	case apierrors.IsForbidden(err):
		return nil, fmt.Errorf("read the API server's keys: %w; allow this server to get the nonResourceURL %s", err, keysPath)
	case apierrors.IsNotFound(err):
		return nil, fmt.Errorf("read the API server's keys: %s: %w; set the API server's "+
			"--service-account-issuer to an https URL", keysPath, err)
	case err != nil:
		return nil, fmt.Errorf("read the API server's keys: %w", err)
	}
	if err := json.Unmarshal(body, &set); err != nil {
		return nil, fmt.Errorf("read the API server's keys: %s: %w", keysPath, err)
	}
	next := &published{keys: make(map[string]any), read: k.now()}
	for _, one := range set.Keys {
		var key jose.JSONWebKey
		if json.Unmarshal(one, &key) != nil {
			continue // a type of key that only later API servers have
		}
		switch key.Key.(type) {
		case *rsa.PublicKey, *ecdsa.PublicKey:
			next.keys[key.KeyID] = key.Key
		}
	}
	if len(next.keys) == 0 {
		return nil, fmt.Errorf("read the API server's keys: %s has no RSA or ECDSA key: at least one is required", keysPath)
	}
	return next, nil
}
