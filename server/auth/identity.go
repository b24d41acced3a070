package auth

import (
	"context"
	"crypto/x509"
	"slices"
	"strings"
	"time"
)

// Organizations and common names of client certificates. Kubernetes' own are in "Certificates and Certificate Signing
// Requests" of its documentation.
const (
	nodesGroup     = "system:nodes"
	nodeUserPrefix = "system:node:"
	mastersGroup   = "system:masters"
	relaysGroup    = "slicecast:relays"
	observersGroup = "slicecast:observers"
)

// Identity is who is behind a request, with one role at least.
type Identity struct {
	// User is the name of the certificate or ServiceAccount, for logs.
	User string
	// Node is the node that the caller is; "": none.
	Node string
	// Pod is the name of the Pod that a relay's token is bound to; "": none.
	Pod string
	// Relay may stream as a relay.
	Relay bool
	// Observer may look at everything, and be nobody else.
	Observer bool
	// Operator may be any node, a relay and an observer.
	Operator bool
	// Until is when the certificate or token expires; zero: never.
	Until time.Time
}

// Name returns whose share of a server the caller has where it is no node: that of its user, and of its
// Pod where it has one, as all relays of a Deployment have the same ServiceAccount.
func (i Identity) Name() string {
	if i.Pod == "" {
		return i.User
	}
	return i.User + "/" + i.Pod
}

type identityKey struct{}

func withIdentity(ctx context.Context, i Identity) context.Context {
	return context.WithValue(ctx, identityKey{}, i)
}

func identityOf(ctx context.Context) (Identity, bool) {
	i, ok := ctx.Value(identityKey{}).(Identity)
	return i, ok
}

// certificateIdentity is who a verified certificate names. It is false if that is nobody whom the server knows.
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
