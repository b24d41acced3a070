package auth

import (
	"context"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"golang.org/x/time/rate"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
)

// reason is why a request is refused. It is the value of the metric's label.
type reason string

const (
	reasonNoCredentials  reason = "no_credentials"  // neither a certificate nor a token
	reasonCertificate    reason = "certificate"     // a verified certificate without a role
	reasonToken          reason = "token"           // not valid, or not for this audience
	reasonServiceAccount reason = "service_account" // a valid token of another ServiceAccount
	reasonUnboundToken   reason = "unbound_token"   // a valid token that names no node
	reasonReview         reason = "token_review"    // the API server did not answer
	// Too many valid tokens of one node or relay, or of all.
	reasonTooManyReviews reason = "too_many_reviews"
	reasonOtherNode      reason = "other_node" // a caller that is not the node of the agent
	reasonRelay          reason = "relay"      // a caller that wants to be a relay and is none
	reasonObserver       reason = "observer"   // a caller that wants to see everything and may not
)

var reasons = []reason{
	reasonNoCredentials, reasonCertificate, reasonToken, reasonServiceAccount, reasonUnboundToken, reasonReview,
	reasonTooManyReviews, reasonOtherNode, reasonRelay, reasonObserver,
}

// logInterval is how often refusals of one reason may be logged. A fleet of nodes that retry must
// not fill the disk.
const logInterval = time.Minute

// refusals counts and logs refused requests.
type refusals struct {
	log      *slog.Logger
	count    *prometheus.CounterVec
	sometime map[reason]*rate.Sometimes
}

func newRefusals(r prometheus.Registerer, log *slog.Logger) *refusals {
	f := &refusals{
		log: log,
		count: promauto.With(r).NewCounterVec(prometheus.CounterOpts{
			Namespace: "slicecast", Subsystem: "server", Name: "refused_requests_total",
			Help: "Number of requests that authentication or authorization refused, by reason.",
		}, []string{"reason"}),
		sometime: make(map[reason]*rate.Sometimes),
	}
	for _, why := range reasons {
		f.count.WithLabelValues(string(why))
		f.sometime[why] = &rate.Sometimes{Interval: logInterval}
	}
	return f
}

// refuse counts a refusal and returns the status for the caller.
func (f *refusals) refuse(ctx context.Context, why reason, code codes.Code, format string, args ...any) error {
	s := status.Newf(code, format, args...)
	f.count.WithLabelValues(string(why)).Inc()
	f.sometime[why].Do(func() {
		address := "unknown"
		if p, ok := peer.FromContext(ctx); ok {
			address = p.Addr.String()
		}
		f.log.Warn("Refused a request; logged at most once per reason and interval",
			"reason", string(why), "client", address,
			"detail", s.Message(), "interval", logInterval)
	})
	return s.Err()
}
