package fleet

import (
	"log/slog"
	"net/http"
	"time"
)

// logged logs requests to the API server: neither their headers, which have the user's credentials,
// nor their bodies.
type logged struct {
	http.RoundTripper
	log *slog.Logger
}

// RoundTrip implements http.RoundTripper.
func (l logged) RoundTrip(r *http.Request) (*http.Response, error) {
	began := time.Now()
	answer, err := l.RoundTripper.RoundTrip(r)
	code := 0
	if err == nil {
		code = answer.StatusCode
	}
	l.log.DebugContext(r.Context(), "Asked the API server", "method", r.Method, "path", r.URL.RequestURI(), "status", code, "took", time.Since(began), "err", err)
	return answer, err
}

// WrappedRoundTripper lets client-go find the transport below this one.
func (l logged) WrappedRoundTripper() http.RoundTripper { return l.RoundTripper }
