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

// reason is why a request is refused, as the metric's label has it.
type reason string

const (
	reasonNoCredentials  reason = "no_credentials"   // neither certificate nor token
	reasonCertificate    reason = "certificate"      // a verified certificate of nobody known
	reasonToken          reason = "token"            // not valid, or not for this audience
	reasonServiceAccount reason = "service_account"  // a valid token of somebody else
	reasonUnboundToken   reason = "unbound_token"    // a valid token that names no node
	reasonReview         reason = "token_review"     // the API server gave no answer
	reasonTooManyReviews reason = "too_many_reviews" // of valid tokens of one node or relay, or of all
	reasonOtherNode      reason = "other_node"       // an agent of another node
	reasonRelay          reason = "relay"            // no relay, and wants to be one
	reasonObserver       reason = "observer"         // a node or relay that wants to look at everything
)

var reasons = []reason{
	reasonNoCredentials, reasonCertificate, reasonToken, reasonServiceAccount, reasonUnboundToken, reasonReview,
	reasonTooManyReviews, reasonOtherNode, reasonRelay, reasonObserver,
}

// logInterval is how often a reason may be logged: a fleet of nodes that retry must not fill the disk.
const logInterval = time.Minute

// refusals counts and logs them.
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
			Help: "Requests refused because of who sent them, by reason.",
		}, []string{"reason"}),
		sometime: make(map[reason]*rate.Sometimes),
	}
	for _, why := range reasons {
		f.count.WithLabelValues(string(why))
		f.sometime[why] = &rate.Sometimes{Interval: logInterval}
	}
	return f
}

// refuse makes the status that the caller gets.
func (f *refusals) refuse(ctx context.Context, why reason, code codes.Code, format string, args ...any) error {
	s := status.Newf(code, format, args...)
	f.count.WithLabelValues(string(why)).Inc()
	f.sometime[why].Do(func() {
		address := "unknown"
		if p, ok := peer.FromContext(ctx); ok {
			address = p.Addr.String()
		}
		f.log.Warn("Request refused; more for this reason are only counted for a while", "reason", string(why), "peer", address,
			"message", s.Message(), "interval", logInterval)
	})
	return s.Err()
}
