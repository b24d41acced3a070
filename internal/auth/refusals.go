package auth

import (
	"context"
	"log/slog"
	"net"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/slicecast/slicecast/internal/refusals"
)

// These are the reasons for which requests are refused, and values of the metric's label.
const (
	reasonNoCredentials  = "no_credentials"
	reasonCertificate    = "certificate"
	reasonToken          = "token"
	reasonAccess         = "access"
	reasonUnboundToken   = "unbound_token"
	reasonReview         = "token_review"
	reasonTooManyReviews = "too_many_reviews"
	reasonOtherNode      = "other_node"
	reasonRelay          = "relay"
	reasonObserver       = "observer"
)

func newRefusals(r prometheus.Registerer, log *slog.Logger, program string) *refusals.Counter {
	return refusals.New(log, r, prometheus.CounterOpts{
		Namespace: "slicecast", Subsystem: program, Name: "refused_requests_total",
		Help: "Number of requests that authentication or authorization refused, by reason.",
	}, map[string]string{
		reasonNoCredentials:  "neither a client certificate nor a token",
		reasonCertificate:    "the client certificate has no role",
		reasonToken:          "the token is invalid, or not for this audience",
		reasonAccess:         "the token is of another ServiceAccount, which may not make the request",
		reasonUnboundToken:   "the token names no node",
		reasonReview:         "the API server did not review the token",
		reasonTooManyReviews: "too many valid tokens of one node, relay or namespace, or of all of them",
		reasonOtherNode:      "the caller is not the node of the agent",
		reasonRelay:          "the caller may not be a relay",
		reasonObserver:       "the caller may not see everything",
	})
}

func (a *Auth) refuse(ctx context.Context, reason string, code codes.Code, format string, args ...any) error {
	s := status.Newf(code, format, args...)
	var client net.Addr
	if p, ok := peer.FromContext(ctx); ok {
		client = p.Addr
	}
	a.refusals.Add(reason, client, "err", s.Message())
	return s.Err()
}
