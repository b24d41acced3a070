package auth

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	lru "github.com/hashicorp/golang-lru/v2"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"golang.org/x/sync/singleflight"
	"golang.org/x/time/rate"
	"google.golang.org/grpc/codes"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"

	"github.com/slicecast/slicecast/internal/model"
)

const (
	// nodeNameClaim is the key in a reviewed user's extra fields for the node of the Pod that the
	// token is bound to (KEP-4193).
	nodeNameClaim = "authentication.kubernetes.io/node-name"
	// serviceAccountPrefix begins the user name of a ServiceAccount, which is
	// system:serviceaccount:<namespace>:<name>.
	serviceAccountPrefix = "system:serviceaccount:"
	// verdictLife is how long a verdict is reused, good or bad, unless the options say otherwise.
	// API server extensions trust a review for as long by default.
	verdictLife = 10 * time.Second
	// verdicts is how many verdicts are kept: a few for each node of a large cluster.
	verdicts = 16384
	// reviewTimeout bounds for how long a caller waits for the API server's keys, for the turn of a
	// review, and for the review. It is well below the time for which callers wait for an answer, as
	// with kubectl slicecast's --timeout, so that they are told what the server waits for.
	reviewTimeout = 5 * time.Second
	// budgetTimeout bounds for how long of it a review waits for its turn. What is left is for the
	// API server's answer, without which the turn is wasted.
	budgetTimeout = 4 * time.Second
	// clockSkew is how far this machine's clock may be ahead of the API server's.
	clockSkew = time.Minute
)

// These are the limits on TokenReviews that the server requests, per second and at once.
const (
	// reviewsOfKnown is the budget of all relays, of all nodes that have a Node, and of the
	// servers' namespace, unless the options say otherwise. It lets 5000 reconnecting nodes back
	// within half a minute.
	reviewsOfKnown      = 200
	reviewsOfKnownBurst = 400
	// reviewsOfUnknown is the budget of all nodes without a Node in the store: the server has not
	// synced yet, or the Node is gone.
	reviewsOfUnknown      = 50
	reviewsOfUnknownBurst = 200
	// reviewsOfOne is the share of one node or relay, unless the options say otherwise. A node
	// needs a review for each new token, and again after verdictLife.
	reviewsOfOne      = 1
	reviewsOfOneBurst = 10
	// shares is how many nodes' and relays' shares are kept.
	shares = 16384
	// reviewsOfOthers is the budget of all other ServiceAccounts, of which a review is two requests
	// to the API server. Any Pod can have a token for this server's audience.
	reviewsOfOthers      = 50
	reviewsOfOthersBurst = 200
	// reviewsOfNamespace is the share of the ServiceAccounts of a namespace, of which whoever may
	// create one can create many. It is enough for several operators who ask at the same time.
	reviewsOfNamespace      = 5
	reviewsOfNamespaceBurst = 50
	// namespaceRetry is when a caller whose namespace has used up its share should come back.
	namespaceRetry = time.Second
	// namespaces is how many namespaces' shares are kept.
	namespaces = 4096
)

// TokenOptions configures the review of ServiceAccount tokens.
type TokenOptions struct {
	// Review asks the API server about a token.
	Review func(context.Context, *authenticationv1.TokenReview) (*authenticationv1.TokenReview, error)
	// Access asks the API server whether a user may make a request, by the path and the verb of a
	// non-resource URL, as for other components of Kubernetes. If it is nil, the API server is asked
	// nothing about tokens of ServiceAccounts that are not listed here, and they are refused.
	Access func(context.Context, *authorizationv1.SubjectAccessReview) (*authorizationv1.SubjectAccessReview, error)
	// Get reads a path of the API server, such as that of its keys.
	Get func(ctx context.Context, path string) ([]byte, error)
	// Audience is the audience that tokens must have.
	Audience string
	// Agents are the ServiceAccounts whose tokens identify the nodes of their Pods. Relays are
	// those whose tokens identify relays, and Observers those whose tokens identify observers. All
	// others are observers for the requests that the API server allows them.
	Agents, Relays, Observers []types.NamespacedName
	// ObserversFlag is the flag for Observers, for messages.
	ObserversFlag string
	// Namespace is that of the servers. ServiceAccounts there, such as those of operators, do not
	// wait for those of other namespaces. It may be empty.
	Namespace string
	// Reuse is how long a good verdict is reused. 0 means ten seconds, for which all others are.
	Reuse time.Duration
	// Budget bounds the reviews of the ServiceAccounts that are listed here, and Share those of one
	// of them. Zero values mean those of a server.
	Budget, Share Limit
	// KeysInterval is the shortest time between two reads of the API server's keys, and KeysLife is
	// how long keys are used before they are read again. 0 means a server's. An older key does no
	// harm: the API server reviews each token, too.
	KeysInterval, KeysLife time.Duration
}

// ParseServiceAccounts returns the ServiceAccounts in a flag, each in the form namespace/name.
func ParseServiceAccounts(flag string, list []string) (accounts []types.NamespacedName, err error) {
	for _, s := range list {
		key, ok := model.ParseServiceKey(s) // ServiceAccounts are named in the same way
		if !ok || strings.Contains(s, ":") {
			err = errors.Join(err, fmt.Errorf("%s is %q: use namespace/name", flag, s))
		}
		accounts = append(accounts, types.NamespacedName(key))
	}
	return accounts, err
}

// Limit bounds reviews, per second and at once.
type Limit struct {
	PerSecond rate.Limit
	AtOnce    int
}

func (l Limit) limiter() *rate.Limiter { return rate.NewLimiter(l.PerSecond, l.AtOnce) }

// access is what a caller asks for: the path of a request, and the verb of its HTTP method as RBAC
// names it.
type access struct{ verb, path string }

// tokenReviewer identifies the ServiceAccount and the node of a token. It first checks the token by
// itself: signature, audience, expiry and subject. It then asks the API server, which also knows
// the issuers that it accepts, and whether the Pod still exists, within the budgets of the token's
// node. If the ServiceAccount is neither an agent's, a relay's nor an observer's, the API server
// also says whether it may make the request, or it is refused if the options say so. Verdicts are
// cached for a short time, by the token's hash, and those on requests also by the request.
//
// Invariants:
//
//  1. verdicts has verdicts of the API server only, each until it expires. Tokens that fail the
//     first check have none, so invented tokens do not displace others.
//  2. Each TokenReview is paid for with a token of the share of its node, relay or namespace, and
//     with one of a budget. So is the SubjectAccessReview that may follow it.
//  3. The shares and the budget of agents and relays are not those of other ServiceAccounts. Those
//     of the servers' namespace have a share like other namespaces, but the agents' budget.
type tokenReviewer struct {
	options   TokenOptions
	one       Limit                  // the share of one node, relay or observer
	knownNode func(name string) bool // reports whether a Node of that name exists
	now       func() time.Time
	keys      *keys
	verdicts  *lru.Cache[[sha256.Size]byte, verdict]
	flights   singleflight.Group
	// shares has the shares of nodes and relays, and namespaces those of other ServiceAccounts.
	shares, namespaces *lru.Cache[string, *rate.Limiter]
	// known and unknown are the budgets of agents and relays with and without a Node, and others is
	// that of ServiceAccounts of other namespaces than the servers'.
	known, unknown, others *rate.Limiter
	reviews                *prometheus.CounterVec
}

// These are the values of the label of the metric of reviews.
const (
	budgetKnown   = "known"
	budgetUnknown = "unknown"
	budgetOthers  = "others"
)

func newReviewsCounter(r prometheus.Registerer, program string) *prometheus.CounterVec {
	v := promauto.With(r).NewCounterVec(prometheus.CounterOpts{
		Namespace: "slicecast", Subsystem: program, Name: "token_reviews_total",
		Help: "Number of TokenReviews that were requested from the API server, by budget: known (of relays, of " +
			"nodes that have a Node, and of the servers' own namespace), unknown (of other nodes) or others (of other " +
			"ServiceAccounts). For an agent's metrics, all are known. A SubjectAccessReview may follow each review of what is neither an agent nor a relay.",
	}, []string{"budget"})
	for _, budget := range []string{budgetKnown, budgetUnknown, budgetOthers} {
		v.WithLabelValues(budget)
	}
	return v
}

// verdict is the result for a token: an identity, or a refusal with its reason and status code.
type verdict struct {
	identity Identity
	refusal  string
	reason   string
	code     codes.Code
	// retry is after how long the caller should come back; 0 means that it is not told.
	retry   time.Duration
	expires time.Time // the zero time means that the verdict is not reused
}

func newTokenReviewer(o TokenOptions, knownNode func(name string) bool, reviews *prometheus.CounterVec) *tokenReviewer {
	r := &tokenReviewer{
		options: o, knownNode: knownNode, now: time.Now, reviews: reviews,
		one:     cmp.Or(o.Share, Limit{reviewsOfOne, reviewsOfOneBurst}),
		known:   cmp.Or(o.Budget, Limit{reviewsOfKnown, reviewsOfKnownBurst}).limiter(),
		unknown: rate.NewLimiter(reviewsOfUnknown, reviewsOfUnknownBurst),
		others:  rate.NewLimiter(reviewsOfOthers, reviewsOfOthersBurst),
	}
	r.keys = newKeys(o.Get, func() time.Time { return r.now() })
	r.keys.interval, r.keys.life = cmp.Or(o.KeysInterval, keysInterval), cmp.Or(o.KeysLife, keysLife)
	var errs [3]error
	r.verdicts, errs[0] = lru.New[[sha256.Size]byte, verdict](verdicts)
	r.shares, errs[1] = lru.New[string, *rate.Limiter](shares)
	r.namespaces, errs[2] = lru.New[string, *rate.Limiter](namespaces)
	if err := errors.Join(errs[:]...); err != nil {
		panic(err) // an error is returned only for sizes that are not positive
	}
	return r
}

// errNoAnswer means that a caller has waited for the API server for as long as it may.
var errNoAnswer = fmt.Errorf("no answer within %v", reviewTimeout)

// review returns the verdict on a request with a token. It returns an error if the API server did
// not answer within reviewTimeout.
func (r *tokenReviewer) review(ctx context.Context, token string, request access) (verdict, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, reviewTimeout, errNoAnswer)
	defer cancel()
	v, err := r.find(ctx, token, request)
	if err != nil && errors.Is(context.Cause(ctx), errNoAnswer) {
		err = errNoAnswer
	}
	return v, err
}

// find returns a verdict that is known, or waits for the API server's until ctx ends.
func (r *tokenReviewer) find(ctx context.Context, token string, request access) (verdict, error) {
	// The prefixes keep what a caller sends as a token from being the key of a request.
	hash := sha256.Sum256([]byte("token " + token))
	cached := func() (verdict, bool) {
		v, ok := r.verdicts.Get(hash)
		return v, ok && r.now().Before(v.expires)
	}
	if v, ok := cached(); ok {
		return v, nil
	}
	c, v, err := r.check(ctx, token)
	if err != nil || v.refusal != "" {
		return v, err
	}
	if v.identity.isOther() {
		hash = sha256.Sum256(fmt.Appendf(nil, "request %x %s %s", hash, request.verb, request.path))
		if v, ok := cached(); ok {
			return v, nil
		}
	}
	// All callers with the token share one answer, so the request must not end with the first
	// caller's context.
	answer := r.flights.DoChan(string(hash[:]), func() (any, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), reviewTimeout)
		defer cancel()
		v, err := r.ask(ctx, token, request, c, v.identity)
		if !v.expires.IsZero() {
			r.verdicts.Add(hash, v)
		}
		return v, err
	})
	select {
	case a := <-answer:
		return a.Val.(verdict), a.Err
	case <-ctx.Done():
		return verdict{}, ctx.Err()
	}
}

// ask asks the API server about a request with a token with these claims, of this identity, if the
// budgets allow it. The verdict has no expiry if the API server was not asked.
func (r *tokenReviewer) ask(ctx context.Context, token string, request access, c claims, i Identity) (verdict, error) {
	if !r.claimReview(ctx, i) {
		// An empty share takes that long to fill.
		retry := time.Duration(float64(r.one.AtOnce) / float64(r.one.PerSecond) * float64(time.Second))
		if i.isOther() {
			retry = namespaceRetry
		}
		return verdict{
			reason: reasonTooManyReviews, code: codes.ResourceExhausted, retry: retry,
			refusal: "too many tokens of this node, relay or namespace, or of all of them, wait for a review by the " +
				"API server: try again later",
		}, nil
	}
	result, err := r.options.Review(ctx, &authenticationv1.TokenReview{
		Spec: authenticationv1.TokenReviewSpec{Token: token, Audiences: []string{r.options.Audience}},
	})
	if err != nil {
		return verdict{}, fmt.Errorf("create a TokenReview: %w", err)
	}
	v := r.invalid("the API server no longer accepts it: its Pod, Node or ServiceAccount may be gone")
	if s := result.Status; s.Authenticated {
		node := ""
		if names := s.User.Extra[nodeNameClaim]; len(names) == 1 {
			node = names[0]
		}
		// An API server that does not name the audience has not checked it.
		v = r.judge(s.User.Username, s.Audiences, node, c.Kubernetes.Pod.Name)
		v.identity.Until = c.Expiry.Time()
		if v.refusal == "" && v.identity.isOther() {
			if v, err = r.authorize(ctx, s.User, request, v); err != nil {
				return verdict{}, err
			}
		}
	}
	life := verdictLife
	if v.refusal == "" {
		life = cmp.Or(r.options.Reuse, verdictLife)
	}
	v.expires = r.now().Add(life)
	if end := c.Expiry.Time(); end.After(r.now()) && end.Before(v.expires) {
		v.expires = end
	}
	return v, nil
}

// authorize asks the API server whether a user may make a request. The verdict v on the user's
// token becomes one on the request.
func (r *tokenReviewer) authorize(
	ctx context.Context, user authenticationv1.UserInfo, request access, v verdict,
) (verdict, error) {
	extra := make(map[string]authorizationv1.ExtraValue, len(user.Extra))
	for key, values := range user.Extra {
		extra[key] = authorizationv1.ExtraValue(values)
	}
	result, err := r.options.Access(ctx, &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
		User: user.Username, Groups: user.Groups, UID: user.UID, Extra: extra,
		NonResourceAttributes: &authorizationv1.NonResourceAttributes{Verb: request.verb, Path: request.path},
	}})
	switch {
	case apierrors.IsForbidden(err):
		return verdict{}, fmt.Errorf("create a SubjectAccessReview: %w; allow this server to create subjectaccessreviews", err)
	case err != nil:
		return verdict{}, fmt.Errorf("create a SubjectAccessReview: %w", err)
	case !result.Status.Allowed:
		return verdict{reason: reasonAccess, code: codes.PermissionDenied, refusal: fmt.Sprintf(
			"the API server does not allow %.300q to %s %.300q: bind it to a ClusterRole with this verb and "+
				"nonResourceURL, such as slicecast-viewer; agents and relays have the ServiceAccounts of a server's "+
				"--agent-service-account and --relay-service-account",
			user.Username, request.verb, request.path)}, nil
	}
	v.identity.Observer = true
	return v, nil
}

// check checks a token without the API server. It returns an error if the keys could not be read.
func (r *tokenReviewer) check(ctx context.Context, token string) (claims, verdict, error) {
	c, err := r.keys.verify(ctx, token)
	bad, isBad := errors.AsType[tokenError](err)
	switch {
	case errors.Is(err, errTooSoon):
		return claims{}, verdict{reason: reasonToken, code: codes.Unavailable, retry: keysInterval, refusal: err.Error()}, nil
	case isBad:
		return claims{}, r.invalid(string(bad)), nil
	case err != nil:
		return claims{}, verdict{}, err
	case c.Expiry == nil || r.now().Add(-clockSkew).After(c.Expiry.Time()):
		return claims{}, r.invalid("it has expired"), nil
	}
	return c, r.judge(c.Subject, c.Audience, c.Kubernetes.Node.Name, c.Kubernetes.Pod.Name), nil
}

// claimReview claims one review of the share of a node, relay or namespace and of the budget that
// it belongs to. It waits for the budget. It returns false if the share is used up, or if the
// budget does not allow the review before ctx ends.
func (r *tokenReviewer) claimReview(ctx context.Context, i Identity) bool {
	who, budget, name := i.Name(), r.known, budgetKnown
	held, most := r.shares, r.one
	switch {
	case i.isOther():
		who, _, _ = strings.Cut(strings.TrimPrefix(i.User, serviceAccountPrefix), ":")
		if who != r.options.Namespace {
			budget, name = r.others, budgetOthers
		}
		held, most = r.namespaces, Limit{reviewsOfNamespace, reviewsOfNamespaceBurst}
	case i.Node != "":
		who = i.Node
		if !r.knownNode(i.Node) {
			budget, name = r.unknown, budgetUnknown
		}
	}
	share, ok := held.Get(who)
	if !ok {
		share = most.limiter()
		if before, ok, _ := held.PeekOrAdd(who, share); ok {
			share = before
		}
	}
	ctx, cancel := context.WithTimeout(ctx, budgetTimeout)
	defer cancel()
	if !share.AllowN(r.now(), 1) || budget.Wait(ctx) != nil {
		return false
	}
	r.reviews.WithLabelValues(name).Inc()
	return true
}

func (r *tokenReviewer) invalid(why string) verdict {
	return verdict{reason: reasonToken, code: codes.Unauthenticated, refusal: fmt.Sprintf(
		"the token is not valid for the audience %q: %s; use a projected ServiceAccount token with that audience, "+
			"and read its file again for each connection", r.options.Audience, why)}
}

// judge returns the verdict on the claims of a token, as the token or the API server states them.
// The identity has no role if the ServiceAccount is in none of the lists.
func (r *tokenReviewer) judge(user string, audiences []string, node, pod string) verdict {
	if !slices.Contains(audiences, r.options.Audience) {
		return r.invalid("it is for another audience")
	}
	account := func(n types.NamespacedName) bool { return user == serviceAccountPrefix+n.Namespace+":"+n.Name }
	agent, relay := slices.ContainsFunc(r.options.Agents, account), slices.ContainsFunc(r.options.Relays, account)
	observer := slices.ContainsFunc(r.options.Observers, account)
	switch {
	case !agent && !relay && !observer && r.options.Access == nil:
		return verdict{reason: reasonAccess, code: codes.PermissionDenied, refusal: fmt.Sprintf(
			"%.300q is not among the ServiceAccounts that may ask: add it to %s", user, r.options.ObserversFlag)}
	case agent && !relay && node == "":
		return verdict{reason: reasonUnboundToken, code: codes.PermissionDenied, refusal: fmt.Sprintf(
			"the token of %s names no node: use the projected token of a Pod, which Kubernetes 1.32 and later bind "+
				"to the Pod's node",
			user)}
	case !agent:
		node = ""
	}
	if !relay {
		pod = ""
	}
	return verdict{identity: Identity{User: user, Node: node, Pod: pod, Relay: relay, Observer: observer}}
}
