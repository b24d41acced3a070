package auth

import (
	"context"
	"crypto/x509"
	"slices"
	"strings"
	"time"
)

// These are the organizations and common names of client certificates. The Kubernetes documentation
// describes its own under "Certificates and Certificate Signing Requests".
const (
	nodesGroup     = "system:nodes"
	nodeUserPrefix = "system:node:"
	mastersGroup   = "system:masters"
	relaysGroup    = "slicecast:relays"
	observersGroup = "slicecast:observers"
)

// Identity is the caller behind a request. One that Auth returns has at least one role.
type Identity struct {
	// User is the name of the certificate or ServiceAccount, for logs.
	User string
	// Node is the node that the caller is; empty if it is none.
	Node string
	// Pod is the name of the Pod that a relay's token is bound to; empty if there is none.
	Pod string
	// Relay means that the caller may stream as a relay.
	Relay bool
	// Observer means that the caller may see everything, and act as nobody else. If the API server
	// has allowed it to a ServiceAccount, it holds for this request only.
	Observer bool
	// Operator means that the caller may act as any node, as a relay and as an observer.
	Operator bool
	// Until is when the certificate or token expires; the zero time means never.
	Until time.Time
}

// Name returns whose share of the server a caller that is no node uses. It is the caller's user,
// with the Pod if there is one, as all relays of a Deployment have the same ServiceAccount.
func (i Identity) Name() string {
	if i.Pod == "" {
		return i.User
	}
	return i.User + "/" + i.Pod
}

// isOther reports whether the caller has no role, as a ServiceAccount that is neither an agent's
// nor a relay's. The API server decides what it may do.
func (i Identity) isOther() bool { return i.Node == "" && !i.Relay && !i.Observer && !i.Operator }

type identityKey struct{}

func withIdentity(ctx context.Context, i Identity) context.Context {
	return context.WithValue(ctx, identityKey{}, i)
}

func identityOf(ctx context.Context) (Identity, bool) {
	i, ok := ctx.Value(identityKey{}).(Identity)
	return i, ok
}

// certificateIdentity returns the identity in a verified certificate. It returns false if the
// certificate has no role.
func certificateIdentity(c *x509.Certificate) (Identity, bool) {
	user, groups := c.Subject.CommonName, c.Subject.Organization
	i := Identity{
		User:     user,
		Relay:    slices.Contains(groups, relaysGroup) && user != "",
		Observer: slices.Contains(groups, observersGroup),
		Operator: slices.Contains(groups, mastersGroup),
		Until:    c.NotAfter,
	}
	if node, ok := strings.CutPrefix(user, nodeUserPrefix); ok && slices.Contains(groups, nodesGroup) {
		i.Node = node
	}
	return i, i.Node != "" || i.Relay || i.Observer || i.Operator
}
