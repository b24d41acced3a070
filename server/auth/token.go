package auth

import (
	"context"
	"crypto/sha256"
	"fmt"
	"slices"
	"strings"
	"time"

	lru "github.com/hashicorp/golang-lru/v2"
	"golang.org/x/sync/singleflight"
	"google.golang.org/grpc/codes"
	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	authenticationclient "k8s.io/client-go/kubernetes/typed/authentication/v1"
)

const (
	// nodeNameClaim is the key in a reviewed user's extra fields that holds the node of the Pod that the token is bound
	// to (KEP-4193).
	nodeNameClaim = "authentication.kubernetes.io/node-name"
	// serviceAccountPrefix begins the user name of a ServiceAccount: system:serviceaccount:<namespace>:<name>.
	serviceAccountPrefix = "system:serviceaccount:"
	// verdictLife is how long an answer holds, good or bad: as long as API server extensions trust a review by default.
	verdictLife = 10 * time.Second
	// verdicts is how many answers are kept, some for each node of a large cluster.
	verdicts = 16384
	// reviewTimeout bounds one review.
	reviewTimeout = 10 * time.Second
)

// TokenOptions set up a TokenReviewer.
type TokenOptions struct {
	// Reviews asks the API server. Its rate limit bounds what strangers can make the server ask.
	Reviews authenticationclient.TokenReviewInterface
	// Audience that tokens must be for.
	Audience string
	// ServiceAccounts whose tokens are accepted.
	ServiceAccounts []types.NamespacedName
}

// TokenReviewer finds out which node a ServiceAccount token belongs to. It remembers the answers for a short time, by the
// hash of the token.
type TokenReviewer struct {
	options  TokenOptions
	now      func() time.Time
	verdicts *lru.Cache[[sha256.Size]byte, verdict]
	flights  singleflight.Group
}

// verdict is what a review led to: an identity, or a refusal with its reason and status code.
type verdict struct {
	identity Identity
	refusal  string
	reason   reason
	code     codes.Code
	expires  time.Time
}

// NewTokenReviewer makes a TokenReviewer.
func NewTokenReviewer(o TokenOptions) *TokenReviewer {
	cache, err := lru.New[[sha256.Size]byte, verdict](verdicts)
	if err != nil {
		panic(err) // only for a size that is not positive
	}
	return &TokenReviewer{options: o, now: time.Now, verdicts: cache}
}

// review judges a token. It returns an error if there is no answer.
func (r *TokenReviewer) review(ctx context.Context, token string) (verdict, error) {
	hash := sha256.Sum256([]byte(token))
	if v, ok := r.verdicts.Get(hash); ok && r.now().Before(v.expires) {
		return v, nil
	}
	// Those who wait share the answer, so it must not depend on whether the first of them stays.
	answer := r.flights.DoChan(string(hash[:]), func() (any, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), reviewTimeout)
		defer cancel()
		result, err := r.options.Reviews.Create(ctx, &authenticationv1.TokenReview{
			Spec: authenticationv1.TokenReviewSpec{Token: token, Audiences: []string{r.options.Audience}},
		}, metav1.CreateOptions{})
		if err != nil {
			return nil, fmt.Errorf("create a TokenReview: %w", err)
		}
		v := r.judge(result.Status)
		v.expires = r.now().Add(verdictLife)
		r.verdicts.Add(hash, v)
		return v, nil
	})
	select {
	case a := <-answer:
		if a.Err != nil {
			return verdict{}, a.Err
		}
		return a.Val.(verdict), nil
	case <-ctx.Done():
		return verdict{}, ctx.Err()
	}
}

// judge makes a verdict of what the API server said.
func (r *TokenReviewer) judge(s authenticationv1.TokenReviewStatus) verdict {
	// An API server that does not name the audience did not check it.
	if !s.Authenticated || !slices.Contains(s.Audiences, r.options.Audience) {
		return verdict{reason: reasonToken, code: codes.Unauthenticated, refusal: fmt.Sprintf(
			"the token is not valid for the audience %q: mount a projected ServiceAccount token of that audience and read it again for each connection",
			r.options.Audience)}
	}
	user := s.User.Username
	if !slices.ContainsFunc(r.options.ServiceAccounts, func(n types.NamespacedName) bool {
		return user == serviceAccountPrefix+n.Namespace+":"+n.Name
	}) {
		return verdict{reason: reasonServiceAccount, code: codes.PermissionDenied, refusal: fmt.Sprintf(
			"%s is not the ServiceAccount of an agent: start the server with --agent-service-account=%s to let it in",
			user, strings.Replace(strings.TrimPrefix(user, serviceAccountPrefix), ":", "/", 1))}
	}
	nodes := s.User.Extra[nodeNameClaim]
	if len(nodes) != 1 || nodes[0] == "" {
		return verdict{reason: reasonUnboundToken, code: codes.PermissionDenied, refusal: fmt.Sprintf(
			"the token of %s names no node: use the projected token of a Pod, which Kubernetes 1.32 and later bind to the Pod's node", user)}
	}
	return verdict{identity: Identity{User: user, Node: nodes[0]}}
}
