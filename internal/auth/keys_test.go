// These tests prove that only a token with a valid signature and claims costs the API server a
// review, and that each node, relay and stranger has a budget of reviews. The API server's keys and
// reviews are made up. The fuzz target proves that no changed token passes.
package auth

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/slicecast/slicecast/internal/source/kube"
)

const issuer = "https://issuer.example"

// signer is an API server that issues tokens, publishes its keys and reviews tokens.
type signer struct {
	t testing.TB

	mu      sync.Mutex
	keys    map[string]crypto.Signer // published, by their IDs
	raw     []json.RawMessage        // published in addition
	reads   int                      // reads of the keys
	reviews int
	asked   []authorizationv1.SubjectAccessReviewSpec // each of these was allowed
	down    error
	// review answers reviews. nil confirms every token with its own claims.
	review func(*authenticationv1.TokenReview) authenticationv1.TokenReviewStatus
}

func newSigner(t testing.TB) *signer {
	s := &signer{t: t, keys: map[string]crypto.Signer{}}
	s.add("key-1")
	return s
}

// add creates and publishes a key.
func (s *signer) add(id string) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(s.t, err)
	s.keys[id] = key
}

func (s *signer) get(_ context.Context, path string) ([]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.down != nil {
		return nil, s.down
	}
	require.Equal(s.t, keysPath, path)
	s.reads++
	published := s.raw
	for id, key := range s.keys {
		one, err := json.Marshal(jose.JSONWebKey{Key: key.Public(), KeyID: id, Use: "sig"})
		if err != nil {
			return nil, err // a fuzz target must not use the methods of its fuzz test
		}
		published = append(published, one)
	}
	return json.Marshal(map[string]any{"keys": published})
}

func (s *signer) answer(_ context.Context, r *authenticationv1.TokenReview) (*authenticationv1.TokenReview, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reviews++
	if s.down != nil {
		return nil, s.down
	}
	if s.review != nil {
		return &authenticationv1.TokenReview{Status: s.review(r)}, nil
	}
	payload, err := base64.RawURLEncoding.DecodeString(strings.Split(r.Spec.Token, ".")[1])
	require.NoError(s.t, err)
	var c claims
	require.NoError(s.t, json.Unmarshal(payload, &c))
	return &authenticationv1.TokenReview{Status: authenticationv1.TokenReviewStatus{
		Authenticated: true, Audiences: c.Audience, User: authenticationv1.UserInfo{
			Username: c.Subject, Extra: map[string]authenticationv1.ExtraValue{nodeNameClaim: {c.Kubernetes.Node.Name}},
		},
	}}, nil
}

func (s *signer) allow(
	_ context.Context, r *authorizationv1.SubjectAccessReview,
) (*authorizationv1.SubjectAccessReview, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked = append(s.asked, r.Spec)
	return &authorizationv1.SubjectAccessReview{Status: authorizationv1.SubjectAccessReviewStatus{Allowed: true}}, nil
}

func (s *signer) options() TokenOptions {
	return TokenOptions{
		Review: s.answer, Access: s.allow, Get: s.get, Audience: audience, Agents: []types.NamespacedName{{Namespace: "ns", Name: "agent"}},
		Relays: []types.NamespacedName{{Namespace: "ns", Name: "relay"}}, Namespace: "ns",
	}
}

func (s *signer) reviewer() *tokenReviewer {
	return newTokenReviewer(s.options(), func(name string) bool { return strings.HasPrefix(name, "node-") }, newReviewsCounter(nil, "server"))
}

// good returns the claims of a valid token of a node's agent.
func good(node string) map[string]any {
	return map[string]any{
		"iss": issuer, "sub": "system:serviceaccount:ns:agent", "aud": []string{audience}, "exp": time.Now().Add(time.Hour).Unix(),
		"kubernetes.io": map[string]any{
			"namespace": "ns", "node": map[string]any{"name": node, "uid": "u"}, "pod": map[string]any{"name": "agent-" + node, "uid": "v"},
		},
	}
}

// changed returns a copy of claims with changes. A nil value removes a claim.
func changed(c map[string]any, by map[string]any) map[string]any {
	c = maps.Clone(c)
	maps.Copy(c, by)
	maps.DeleteFunc(c, func(_ string, v any) bool { return v == nil })
	return c
}

// sign returns a token signed with key, which it names by id.
func sign(t testing.TB, alg jose.SignatureAlgorithm, key any, id string, c map[string]any) string {
	t.Helper()
	s, err := jose.NewSigner(jose.SigningKey{Algorithm: alg, Key: jose.JSONWebKey{Key: key, KeyID: id}}, nil)
	require.NoError(t, err)
	payload, err := json.Marshal(c)
	require.NoError(t, err)
	signed, err := s.Sign(payload)
	require.NoError(t, err)
	token, err := signed.CompactSerialize()
	require.NoError(t, err)
	return token
}

func (s *signer) token(c map[string]any) string {
	return sign(s.t, jose.ES256, s.keys["key-1"], "key-1", c)
}

// invented returns a token with the given claims that names a published key but is signed with
// another one.
func invented(t testing.TB, id string, c map[string]any) string {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	return sign(t, jose.ES256, key, id, c)
}

// unsigned returns a token with the given header and signature.
func unsigned(t testing.TB, header, signature string, c map[string]any) string {
	t.Helper()
	payload, err := json.Marshal(c)
	require.NoError(t, err)
	encode := base64.RawURLEncoding.EncodeToString
	return encode([]byte(header)) + "." + encode(payload) + "." + encode([]byte(signature))
}

// TestInvalidTokensAreNotReviewed checks that only tokens with a valid signature, audience and
// expiry, of an agent with a node, are reviewed.
func TestInvalidTokensAreNotReviewed(t *testing.T) {
	s := newSigner(t)
	r := s.reviewer()
	c := good("node-1")
	// A public key is not secret. A token that is "signed" with it by HMAC must not pass (RFC 8725,
	// section 2.1).
	public, err := json.Marshal(jose.JSONWebKey{Key: s.keys["key-1"].Public()})
	require.NoError(t, err)
	for name, test := range map[string]struct {
		token   string
		reason  string
		message string
	}{
		"no JWT":           {"nonsense", reasonToken, "not a signed token"},
		"unsigned":         {unsigned(t, `{"alg":"none","kid":"key-1"}`, "", c), reasonToken, "not a signed token"},
		"HMAC":             {sign(t, jose.HS256, public, "key-1", c), reasonToken, "not a signed token"},
		"wrong signature":  {invented(t, "key-1", c), reasonToken, "signature"},
		"wrong algorithm":  {unsigned(t, `{"alg":"RS256","kid":"key-1"}`, "signature", c), reasonToken, "signature"},
		"critical header":  {unsigned(t, `{"alg":"ES256","kid":"key-1","crit":["x"],"x":1}`, "signature", c), reasonToken, "signature"},
		"no claims":        {unsigned(t, `{"alg":"ES256","kid":"key-1"}`, "signature", map[string]any{"iss": issuer}), reasonToken, "signature"},
		"other audience":   {s.token(changed(c, map[string]any{"aud": "somebody"})), reasonToken, "another audience"},
		"no audience":      {s.token(changed(c, map[string]any{"aud": nil})), reasonToken, "another audience"},
		"expired":          {s.token(changed(c, map[string]any{"exp": time.Now().Add(-2 * clockSkew).Unix()})), reasonToken, "expired"},
		"no end":           {s.token(changed(c, map[string]any{"exp": nil})), reasonToken, "expired"},
		"bound to no node": {s.token(changed(c, map[string]any{"kubernetes.io": nil})), reasonUnboundToken, "names no node"},
		"too long":         {s.token(changed(c, map[string]any{"x": strings.Repeat("x", maxTokenBytes)})), reasonToken, "not a signed token"},
	} {
		v, err := r.review(t.Context(), test.token, stream)
		require.NoError(t, err, name)
		require.Equal(t, test.reason, v.reason, name)
		require.Contains(t, v.refusal, test.message, name)
	}
	require.Zero(t, s.reviews)
	require.Equal(t, 1, s.reads)

	// Each of these is just within a bound that refuses a token above.
	long := func(n int) string { return s.token(changed(c, map[string]any{"x": strings.Repeat("x", n)})) }
	longest := long((maxTokenBytes - len(long(0))) / 4 * 3)
	require.Greater(t, len(longest), maxTokenBytes-4)
	require.LessOrEqual(t, len(longest), maxTokenBytes)
	for name, token := range map[string]string{
		"good": s.token(c), "one audience": s.token(changed(c, map[string]any{"aud": audience})), "longest": longest,
		"just over the end": s.token(changed(c, map[string]any{"exp": time.Now().Add(-clockSkew / 2).Unix()})),
		// This machine's clock may be behind the API server's. Only the API server decides from
		// when on a token is valid.
		"of a clock that is ahead": s.token(changed(c, map[string]any{
			"nbf": time.Now().Add(time.Hour).Unix(), "iat": time.Now().Add(time.Hour).Unix(),
		})),
	} {
		before := s.reviews
		v, err := r.review(t.Context(), token, stream)
		require.NoError(t, err, name)
		require.Empty(t, v.refusal, name)
		require.Equal(t, "node-1", v.identity.Node, name)
		require.Equal(t, before+1, s.reviews, name)
	}
}

// TestAlgorithms checks every algorithm with which Kubernetes signs, whatever else the API server
// publishes.
func TestAlgorithms(t *testing.T) {
	s := newSigner(t)
	s.raw = []json.RawMessage{[]byte(`{"kty":"of tomorrow","kid":"x"}`), []byte(`{"kty":"oct","kid":"shared","k":"c2VjcmV0"}`)}
	rsaKey, err := rsa.GenerateKey(rand.Reader, 2048)
	require.NoError(t, err)
	s.keys["RS256"] = rsaKey
	for id, curve := range map[string]elliptic.Curve{"ES256": elliptic.P256(), "ES384": elliptic.P384(), "ES512": elliptic.P521()} {
		s.keys[id], err = ecdsa.GenerateKey(curve, rand.Reader)
		require.NoError(t, err)
	}
	r := s.reviewer()
	for _, alg := range algorithms {
		v, err := r.review(t.Context(), sign(t, alg, s.keys[string(alg)], string(alg), good("node-1")), stream)
		require.NoError(t, err, alg)
		require.Empty(t, v.refusal, alg)
	}
	v, err := r.review(t.Context(), sign(t, jose.RS512, rsaKey, "RS256", good("node-1")), stream)
	require.NoError(t, err)
	require.Equal(t, reasonToken, v.reason)
	require.NotContains(t, r.keys.held.Load().keys, "shared")
}

// TestTokensExpireByTheServersClock checks that a token is not judged by the machine's clock if the
// server has another one.
func TestTokensExpireByTheServersClock(t *testing.T) {
	s := newSigner(t)
	options := s.options()
	token := s.token(changed(good("node-1"), map[string]any{"exp": time.Now().Add(-24 * time.Hour).Unix()}))
	for ahead, expired := range map[time.Duration]bool{-48 * time.Hour: false, 0: true} {
		a := New(Options{
			Program: "server", Tokens: &options, KnownNode: func(string) bool { return true },
			Now: func() time.Time { return time.Now().Add(ahead) }, Logger: slog.New(slog.DiscardHandler), Registerer: prometheus.NewRegistry(),
		})
		v, err := a.tokens.review(t.Context(), token, stream)
		require.NoError(t, err)
		require.Equal(t, expired, v.refusal != "", "%s", v.refusal)
	}
}

// TestKeysAreReadAgain checks when keys are read: when a token names an unknown key, at most once
// per keysInterval, and after keysLife.
func TestKeysAreReadAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSigner(t)
		r := s.reviewer()
		review := func(token string) verdict {
			t.Helper()
			v, err := r.review(t.Context(), token, stream)
			require.NoError(t, err)
			return v
		}
		require.Empty(t, review(s.token(good("node-1"))).refusal)
		require.Equal(t, 1, s.reads)

		// However many keys strangers invent, the keys are read at most once per keysInterval.
		start := time.Now()
		const shows = 1000
		for i := range shows {
			v := review(invented(t, fmt.Sprintf("key-of-nobody-%d", i), good("node-1")))
			require.Equal(t, reasonToken, v.reason)
			require.Contains(t, []codes.Code{codes.Unauthenticated, codes.Unavailable}, v.code)
			require.Equal(t, v.code == codes.Unavailable, v.retry > 0)
			require.LessOrEqual(t, s.reads, 1+int(time.Since(start)/keysInterval))
			<-time.After(keysInterval / 100)
		}
		require.Equal(t, shows/100-1, s.reads-1, "and that often")
		require.Equal(t, 1, s.reviews)

		// A new key is found while strangers go on.
		s.add("key-2")
		token := sign(t, jose.ES256, s.keys["key-2"], "key-2", good("node-2"))
		if v := review(token); v.refusal != "" {
			require.Equal(t, codes.Unavailable, v.code)
			require.Positive(t, v.retry)
			<-time.After(v.retry)
		}
		require.Empty(t, review(token).refusal)
		require.Empty(t, review(s.token(good("node-3"))).refusal, "the old one is still published")

		// A key that is no longer published is dropped.
		withdrawn := s.keys["key-2"]
		delete(s.keys, "key-2")
		<-time.After(keysLife)
		v := review(sign(t, jose.ES256, withdrawn, "key-2", good("node-2")))
		require.Equal(t, codes.Unauthenticated, v.code)
		require.Contains(t, v.refusal, "does not publish")
	})
}

// TestKeysOfManyReaders checks that a reader with a long interval reads no more often, whatever
// strangers invent, and that it soon tries again after a failure.
func TestKeysOfManyReaders(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const interval, life = 10 * time.Minute, time.Hour
		s := newSigner(t)
		r := s.reviewer()
		r.keys.interval, r.keys.life = interval, life
		failing, asked := true, 0
		get := r.keys.get
		r.keys.get = func(ctx context.Context, path string) ([]byte, error) {
			asked++
			if failing {
				return nil, errors.New("the API server is down")
			}
			return get(ctx, path)
		}
		show := func(token string) error {
			v, err := r.review(t.Context(), token, stream)
			if err == nil && v.refusal != "" {
				err = errors.New(v.refusal)
			}
			return err
		}
		fresh := func() string { return s.token(good("node-1")) }
		for begin := time.Now(); time.Since(begin) < 6*time.Hour; <-time.After(10 * time.Second) {
			require.Error(t, show(fresh()))
		}
		require.InDelta(t, 6*6, asked, 10, "the time between failures grows to the interval")
		failing = false
		<-time.After(interval)
		require.NoError(t, show(fresh()))

		require.Equal(t, 1, s.reads)
		begin := time.Now()
		for i := 0; time.Since(begin) < 6*time.Hour; i++ {
			require.Error(t, show(invented(t, fmt.Sprintf("key-of-nobody-%d", i), good("node-1"))))
			<-time.After(30 * time.Second)
		}
		require.LessOrEqual(t, s.reads, 1+int(time.Since(begin)/interval))

		failing, r.keys.failures = true, 0
		<-time.After(life)
		require.NoError(t, show(fresh()), "keys are used as long as no others can be read")
		failing = false
		<-time.After(keysInterval)
		reads := s.reads
		require.NoError(t, show(fresh()))
		require.Equal(t, reads+1, s.reads, "the first failure delays no more than that")
	})
}

// TestIssuer checks that the API server decides about a token's issuer, of which it may accept
// several and publishes one (gardener/gardener#5817, kubernetes/kubernetes#107031). A server that
// has just started has never heard of the earlier ones. Tokens that the API server refuses cost the
// shares of their nodes, and those that it has not signed cost nothing, whatever their issuer.
func TestIssuer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSigner(t)
		accepted := map[string]bool{issuer: true, "https://earlier.example": true, "kubernetes.default.svc": true}
		s.review = func(r *authenticationv1.TokenReview) authenticationv1.TokenReviewStatus {
			token, err := jwt.ParseSigned(r.Spec.Token, algorithms)
			require.NoError(t, err)
			var c claims
			require.NoError(t, token.UnsafeClaimsWithoutVerification(&c))
			return authenticationv1.TokenReviewStatus{
				Authenticated: accepted[c.Issuer], Audiences: c.Audience, User: authenticationv1.UserInfo{
					Username: c.Subject, Extra: map[string]authenticationv1.ExtraValue{nodeNameClaim: {c.Kubernetes.Node.Name}},
				},
			}
		}
		r := s.reviewer()
		show := func(token string) verdict {
			t.Helper()
			v, err := r.review(t.Context(), token, stream)
			require.NoError(t, err)
			return v
		}
		of := func(node, issuer string) map[string]any { return changed(good(node), map[string]any{"iss": issuer}) }
		node := 0
		for name := range accepted {
			node++
			require.Empty(t, show(s.token(of(fmt.Sprint("node-", node), name))).refusal, name)
		}
		require.Equal(t, len(accepted), s.reviews)
		require.Contains(t, show(s.token(of("node-4", "https://other.example"))).refusal, "no longer accepts it")
		require.Equal(t, len(accepted)+1, s.reviews)

		// Those of one node, as of another cluster with the same keys, cost no more than its share.
		for i := range 1000 {
			v := show(s.token(changed(of("node-5", "https://other.example"), map[string]any{"i": i})))
			require.NotEmpty(t, v.refusal)
		}
		require.Equal(t, len(accepted)+1+reviewsOfOneBurst, s.reviews)
		for _, name := range []string{issuer, "https://earlier.example", ""} {
			require.Contains(t, show(invented(t, "key-1", of("node-6", name))).refusal, "signature")
		}
		require.Equal(t, len(accepted)+1+reviewsOfOneBurst, s.reviews)
	})
}

// TestAPIServerWithoutKeys checks that tokens cannot be checked without the keys. The error then
// blames the server and not the token.
func TestAPIServerWithoutKeys(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSigner(t)
		r := s.reviewer()
		s.down = errors.New("connection refused")
		for range 3 {
			_, err := r.review(t.Context(), s.token(good("node-1")), stream)
			require.ErrorContains(t, err, "connection refused", "also when it was asked a moment ago")
		}
		s.down = nil
		<-time.After(keysInterval)
		v, err := r.review(t.Context(), s.token(good("node-1")), stream)
		require.NoError(t, err)
		require.Empty(t, v.refusal)

		// Old keys still verify tokens until there are new ones. The tokens cannot be reviewed
		// meanwhile.
		s.down = errors.New("connection refused")
		<-time.After(2 * keysLife)
		_, err = r.review(t.Context(), s.token(good("node-1")), stream)
		require.ErrorContains(t, err, "create a TokenReview: connection refused")
		v, err = r.review(t.Context(), invented(t, "key-1", good("node-1")), stream)
		require.NoError(t, err)
		require.Contains(t, v.refusal, "signature")

		s.down, s.keys = nil, nil
		<-time.After(keysInterval)
		_, err = s.reviewer().review(t.Context(), invented(t, "key-1", good("node-1")), stream)
		require.ErrorContains(t, err, "no RSA or ECDSA key")
	})
}

// TestBudgets checks that a caller with many valid tokens, such as a compromised node, only uses up
// its own share, and that unknown nodes only use up their budget.
func TestBudgets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSigner(t)
		r := s.reviewer()
		n := 0
		try := func(node string) verdict {
			t.Helper()
			n++
			v, err := r.review(t.Context(), s.token(changed(good(node), map[string]any{"jti": fmt.Sprint(n)})), stream)
			require.NoError(t, err)
			return v
		}
		for i := range 100 {
			v := try("node-compromised")
			if i < reviewsOfOneBurst {
				require.Empty(t, v.refusal, i)
				continue
			}
			require.Equal(t, reasonTooManyReviews, v.reason)
			require.Equal(t, codes.ResourceExhausted, v.code)
			require.Equal(t, reviewsOfOneBurst*time.Second/reviewsOfOne, v.retry)
		}
		require.Equal(t, reviewsOfOneBurst, s.reviews)
		require.Empty(t, try("node-1").refusal)
		<-time.After(time.Second / reviewsOfOne)
		require.Empty(t, try("node-compromised").refusal)
		require.NotEmpty(t, try("node-compromised").refusal)

		// A relay has a share for each Pod.
		relay := func(pod string) string {
			n++
			return s.token(changed(good(""), map[string]any{
				"sub": "system:serviceaccount:ns:relay", "jti": fmt.Sprint(n), "kubernetes.io": map[string]any{"pod": map[string]any{"name": pod}},
			}))
		}
		for range reviewsOfOneBurst {
			v, err := r.review(t.Context(), relay("a"), stream)
			require.NoError(t, err)
			require.True(t, v.identity.Relay)
			require.Equal(t, "system:serviceaccount:ns:relay/a", v.identity.Name())
		}
		v, err := r.review(t.Context(), relay("a"), stream)
		require.NoError(t, err)
		require.Equal(t, reasonTooManyReviews, v.reason)
		v, err = r.review(t.Context(), relay("b"), stream)
		require.NoError(t, err)
		require.Empty(t, v.refusal)

		// Ten times as many tokens as can be reviewed in time come from nodes without a Node. A few
		// come from nodes with one.
		before := s.reviews
		var unknown, known sync.Map
		var all sync.WaitGroup
		count := func(m *sync.Map) (n int) {
			m.Range(func(_, v any) bool {
				if v.(verdict).refusal == "" {
					n++
				}
				return true
			})
			return n
		}
		const most = reviewsOfUnknownBurst + reviewsOfUnknown*int(budgetTimeout/time.Second)
		for i := range 10 * most {
			token := s.token(good(fmt.Sprintf("unknown-%d", i)))
			all.Go(func() {
				v, err := r.review(t.Context(), token, stream)
				unknown.Store(i, v)
				if err != nil {
					t.Error(err)
				}
			})
		}
		synctest.Wait()
		start := time.Now()
		for i := range reviewsOfKnownBurst {
			token := s.token(good(fmt.Sprintf("node-%d", i+10)))
			all.Go(func() {
				v, err := r.review(t.Context(), token, stream)
				known.Store(i, v)
				if err != nil || time.Since(start) > time.Second {
					t.Error("a node with a Node waits", time.Since(start), err)
				}
			})
		}
		all.Wait()
		require.Equal(t, reviewsOfKnownBurst, count(&known))
		require.InDelta(t, most, count(&unknown), 1)
		require.Equal(t, count(&known)+count(&unknown), s.reviews-before)
	})
}

// FuzzVerify checks that a token that passes has the claims that were signed, however it was
// changed.
func FuzzVerify(f *testing.F) {
	s := newSigner(f)
	token := s.token(good("node-1"))
	r := s.reviewer()
	want, err := r.keys.verify(f.Context(), token)
	require.NoError(f, err)
	f.Add(0, []byte("e30"))
	f.Add(strings.IndexByte(token, '.'), []byte(".."))
	f.Add(len(token)-1, []byte("A"))
	f.Add(-1, []byte(unsigned(f, `{"alg":"none"}`, "", good("node-1"))))
	f.Add(-1, []byte(invented(f, "key-1", good("node-1"))))
	f.Fuzz(func(t *testing.T, at int, text []byte) {
		shown := string(text) // all of the token, or a replacement for a part of the valid one
		if at >= 0 && at < len(token) {
			shown = token[:at] + string(text) + token[min(len(token), at+len(text)):]
		}
		if c, err := r.keys.verify(t.Context(), shown); err == nil {
			require.Equal(t, want, c)
		}
	})
}

// TestKeysOfTheAPIServer checks that errors name what may not be read or does not exist.
func TestKeysOfTheAPIServer(t *testing.T) {
	get, err := kube.Paths(cluster.ConfigFor("nobody"))
	require.NoError(t, err)
	k := newKeys(get, time.Now)
	_, err = k.verify(t.Context(), invented(t, "key-1", good("node-1")))
	require.ErrorContains(t, err, "allow this server to get the nonResourceURL "+keysPath)

	admin, err := kube.Paths(cluster.AdminConfig())
	require.NoError(t, err)
	k = newKeys(func(ctx context.Context, _ string) ([]byte, error) { return admin(ctx, "/openid/v1/nothing") }, time.Now)
	_, err = k.verify(t.Context(), invented(t, "key-1", good("node-1")))
	require.ErrorContains(t, err, "--service-account-issuer to an https URL")
}
