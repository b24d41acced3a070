package fleet

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/slicecast/slicecast/internal/wire"
)

// Log returns the end of the log of a container, or of its previous run, since some time ago. It is
// at most limit bytes.
func (f *Fleet) Log(
	ctx context.Context, pod types.NamespacedName, container string, previous bool, since time.Duration, limit int,
) ([]byte, error) {
	o := &corev1.PodLogOptions{
		Container: container, Previous: previous, Timestamps: true,
		// With a limit of bytes, the API server would leave out the end, so the lines are limited.
		TailLines: new(int64(limit / meanLine)),
	}
	if !previous {
		o.SinceSeconds = new(max(1, int64(since.Seconds())))
	}
	return Within(ctx, f, func(ctx context.Context) ([]byte, error) {
		body, err := f.client.CoreV1().Pods(pod.Namespace).GetLogs(pod.Name, o).Stream(ctx)
		if err != nil {
			return nil, withRights(err)
		}
		defer body.Close()
		log, err := io.ReadAll(io.LimitReader(body, longLines*int64(limit)))
		return log[max(0, len(log)-limit):], err
	})
}

// meanLine is the assumed length of a line of a log, in bytes. Lines may be longLines times as
// long.
const meanLine, longLines = 256, 4

// Metrics returns the metrics of a server, at most limit bytes. That needs the right to get
// /metrics.
func (f *Fleet) Metrics(ctx context.Context, s *Server, limit int) ([]byte, error) {
	pages, err := f.Pages(ctx, s)
	if err != nil {
		return nil, err
	}
	defer pages.Close()
	// A redirection could lead the token elsewhere.
	client := &http.Client{Transport: pages, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	return Within(ctx, f, func(ctx context.Context) (metrics []byte, err error) {
		err = insist(ctx, func() error {
			request, err := http.NewRequestWithContext(ctx, http.MethodGet, pages.Base.JoinPath("page", "metrics").String(), http.NoBody)
			if err != nil {
				return err
			}
			answer, err := client.Do(request)
			if err != nil {
				return err
			}
			defer answer.Body.Close()
			metrics, err = readMetrics(answer.StatusCode, answer.Body, limit)
			return err
		})
		return metrics, explain(ctx, err)
	})
}

// readMetrics returns the metrics in an answer with a status. A server that has no room now wants
// to be asked again soon; unlike over gRPC, it does not say when.
func readMetrics(code int, content io.Reader, limit int) ([]byte, error) {
	body, err := io.ReadAll(io.LimitReader(content, int64(limit)))
	switch {
	case err != nil:
		return nil, err
	case code == http.StatusTooManyRequests:
		return nil, wire.RetryLater(status.Errorf(codes.ResourceExhausted, "get /metrics: %.200s", body), metricsRetry)
	case code != http.StatusOK:
		return nil, fmt.Errorf("get /metrics: %s: %.200s", http.StatusText(code), body)
	}
	return body, nil
}

// metricsRetry is when a server that has no room is asked for its metrics again.
const metricsRetry = time.Second
