package auth

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	lru "github.com/hashicorp/golang-lru/v2"
	"golang.org/x/sync/singleflight"
	"golang.org/x/time/rate"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	authenticationv1 "k8s.io/api/authentication/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/slicecast/slicecast/server/auth/jwt"
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
	// clockSkew is how far this machine's clock may be ahead of the API server's.
	clockSkew = time.Minute
	// reviewsPerAddress and its burst are each address's share, in reviews a second, of what the server may ask the API server.
	// A node needs one each time it connects. Where many share an address (behind a NAT), this is how fast they come back.
	reviewsPerAddress      = 10
	reviewsPerAddressBurst = 100
	// shareFills is how long a share takes to be whole again.
	shareFills = reviewsPerAddressBurst * time.Second / reviewsPerAddress
	// addresses is for how many of them shares are kept.
	addresses = 16384
)

// TokenOptions set up a TokenReviewer.
type TokenOptions struct {
	// Review asks the API server. Its rate limit bounds what all strangers together can make the server ask.
	Review func(context.Context, *authenticationv1.TokenReview) (*authenticationv1.TokenReview, error)
	// Audience that tokens must be for.
	Audience string
	// Agents are the ServiceAccounts whose tokens are their Pods' nodes, Relays those whose tokens are relays.
	Agents, Relays []types.NamespacedName
}

// TokenReviewer finds out whose a ServiceAccount token is, and of which node. The API server decides. It is not asked about
// tokens that say of themselves that they are not good here, nor more often than reviewsPerAddress for one address; its
// answers are remembered for a short time, by the hash of the token.
type TokenReviewer struct {
	options  TokenOptions
	now      func() time.Time
	verdicts *lru.Cache[[sha256.Size]byte, verdict]
	flights  singleflight.Group
	shares   *lru.Cache[netip.Addr, *rate.Limiter]
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
	r := &TokenReviewer{options: o, now: time.Now}
	var errs [2]error
	r.verdicts, errs[0] = lru.New[[sha256.Size]byte, verdict](verdicts)
	r.shares, errs[1] = lru.New[netip.Addr, *rate.Limiter](addresses)
	if err := errors.Join(errs[:]...); err != nil {
		panic(err) // only for sizes that are not positive
	}
	return r
}

// review judges a token. It returns an error if there is no answer.
func (r *TokenReviewer) review(ctx context.Context, token string) (verdict, error) {
	hash := sha256.Sum256([]byte(token))
	if v, ok := r.verdicts.Get(hash); ok && r.now().Before(v.expires) {
		return v, nil
	}
	c, ok := jwt.Parse(token)
	if !ok || c.Expired(r.now().Add(-clockSkew)) {
		return r.invalid(), nil
	}
	if v := r.judge(c.Subject, c.Audiences, c.Kubernetes.Node.Name); v.refusal != "" {
		return v, nil
	}
	// Those who wait share the answer, so it must not depend on whether the first of them stays.
	answer := r.flights.DoChan(string(hash[:]), func() (any, error) {
		if !r.mayAsk(ctx) {
			return verdict{reason: reasonTooManyReviews, code: codes.ResourceExhausted, refusal: "too many tokens came from this address " +
				"for the API server to be asked about them all"}, nil
		}
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), reviewTimeout)
		defer cancel()
		result, err := r.options.Review(ctx, &authenticationv1.TokenReview{
			Spec: authenticationv1.TokenReviewSpec{Token: token, Audiences: []string{r.options.Audience}},
		})
		if err != nil {
			return nil, fmt.Errorf("create a TokenReview: %w", err)
		}
		v := r.invalid()
		if s := result.Status; s.Authenticated {
			node := ""
			if names := s.User.Extra[nodeNameClaim]; len(names) == 1 {
				node = names[0]
			}
			// An API server that does not name the audience did not check it.
			v = r.judge(s.User.Username, s.Audiences, node)
			v.identity.Until = c.Until()
		}
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

// mayAsk takes one review from the share of the caller's address.
func (r *TokenReviewer) mayAsk(ctx context.Context) bool {
	var from netip.Addr // callers whose address is not known share one
	if p, ok := peer.FromContext(ctx); ok {
		if a, err := netip.ParseAddrPort(p.Addr.String()); err == nil {
			from = a.Addr().Unmap()
		}
	}
	share, ok := r.shares.Get(from)
	if !ok {
		share = rate.NewLimiter(reviewsPerAddress, reviewsPerAddressBurst)
		if before, ok, _ := r.shares.PeekOrAdd(from, share); ok {
			share = before
		}
	}
	return share.AllowN(r.now(), 1)
}

func (r *TokenReviewer) invalid() verdict {
	return verdict{reason: reasonToken, code: codes.Unauthenticated, refusal: fmt.Sprintf(
		"the token is not valid for the audience %q: mount a projected ServiceAccount token of that audience and read it again for each connection",
		r.options.Audience)}
}

// judge makes a verdict of what is said of a token, by itself or by the API server; only the latter is an identity.
func (r *TokenReviewer) judge(user string, audiences []string, node string) verdict {
	if !slices.Contains(audiences, r.options.Audience) {
		return r.invalid()
	}
	account := func(n types.NamespacedName) bool { return user == serviceAccountPrefix+n.Namespace+":"+n.Name }
	agent, relay := slices.ContainsFunc(r.options.Agents, account), slices.ContainsFunc(r.options.Relays, account)
	switch {
	case !agent && !relay:
		return verdict{reason: reasonServiceAccount, code: codes.PermissionDenied, refusal: fmt.Sprintf(
			"%.300q is the ServiceAccount of neither an agent nor a relay: to let it in, start the server with --agent-service-account or --relay-service-account=%.300q",
			user, strings.Replace(strings.TrimPrefix(user, serviceAccountPrefix), ":", "/", 1))}
	case agent && !relay && node == "":
		return verdict{reason: reasonUnboundToken, code: codes.PermissionDenied, refusal: fmt.Sprintf(
			"the token of %s names no node: use the projected token of a Pod, which Kubernetes 1.32 and later bind to the Pod's node", user)}
	case !agent:
		node = ""
	}
	return verdict{identity: Identity{User: user, Node: node, Relay: relay}}
}
