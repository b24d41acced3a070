package auth

import (
	"context"
	"crypto/x509"
	"slices"
	"strings"
)

// The names in Kubernetes' client certificates; see "Certificates and Certificate Signing Requests" in its documentation.
const (
	nodesGroup     = "system:nodes"
	nodeUserPrefix = "system:node:"
	mastersGroup   = "system:masters"
)

// Identity is who is behind a request: a node or an operator.
type Identity struct {
	// User is the name of the certificate or ServiceAccount, for logs.
	User string
	// Node is the node that the caller is; "" for an operator.
	Node string
	// Operator may be any node and an observer.
	Operator bool
}

type identityKey struct{}

func withIdentity(ctx context.Context, i Identity) context.Context {
	return context.WithValue(ctx, identityKey{}, i)
}

func identityOf(ctx context.Context) (Identity, bool) {
	i, ok := ctx.Value(identityKey{}).(Identity)
	return i, ok
}

// certificateIdentity is who a verified certificate names. It is false if that is neither a node nor an operator.
func certificateIdentity(c *x509.Certificate) (Identity, bool) {
	user := c.Subject.CommonName
	if slices.Contains(c.Subject.Organization, mastersGroup) {
		return Identity{User: user, Operator: true}, true
	}
	node, isNode := strings.CutPrefix(user, nodeUserPrefix)
	if !isNode || node == "" || !slices.Contains(c.Subject.Organization, nodesGroup) {
		return Identity{}, false
	}
	return Identity{User: user, Node: node}, true
}
