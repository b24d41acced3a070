// These tests prove that a server that has no room for a moment is asked again when it wants that,
// within the time for an answer, and that tokens are requested once for each tier of servers.
package fleet

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/slicecast/slicecast/internal/wire"
)

func TestInsist(t *testing.T) {
	later := func(after time.Duration) error {
		return wire.RetryLater(status.Error(codes.ResourceExhausted, "no room"), after)
	}
	other := errors.New("other")
	for name, test := range map[string]struct {
		answers []error // the last one is repeated
		want    error
		asked   int
		took    time.Duration
	}{
		"no error":        {[]error{nil}, nil, 1, 0},
		"another error":   {[]error{other, nil}, other, 1, 0},
		"no time":         {[]error{status.Error(codes.ResourceExhausted, "no room"), nil}, status.Error(codes.ResourceExhausted, "no room"), 1, 0},
		"another code":    {[]error{wire.RetryLater(status.Error(codes.Unavailable, "draining"), time.Second), nil}, wire.RetryLater(status.Error(codes.Unavailable, "draining"), time.Second), 1, 0},
		"comes back":      {[]error{later(time.Second), later(2 * time.Second), nil}, nil, 3, 3 * time.Second},
		"at once":         {[]error{later(time.Nanosecond), nil}, nil, 2, minRetryDelay},
		"too late":        {[]error{later(time.Second), later(9 * time.Second), nil}, later(9 * time.Second), 2, time.Second},
		"again and again": {[]error{later(time.Second)}, later(time.Second), attempts, (attempts - 1) * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
				defer cancel()
				began, asked := time.Now(), 0
				err := insist(ctx, func() error {
					asked++
					return test.answers[min(asked, len(test.answers))-1]
				})
				if test.want == nil {
					require.NoError(t, err)
				} else {
					require.EqualError(t, err, test.want.Error())
				}
				require.Equal(t, test.asked, asked)
				require.Equal(t, test.took, time.Since(began))
			})
		})
	}
}

// TestMetricsThatWait checks that a server that has no room for a request for metrics is asked
// again.
func TestMetricsThatWait(t *testing.T) {
	_, err := readMetrics(http.StatusTooManyRequests, strings.NewReader("no room"), 100)
	require.Equal(t, metricsRetry, retryDelay(err))
	_, err = readMetrics(http.StatusForbidden, strings.NewReader("not you"), 100)
	require.EqualError(t, err, "get /metrics: Forbidden: not you")
	require.Zero(t, retryDelay(err))
	body, err := readMetrics(http.StatusOK, strings.NewReader("0123456789"), 4)
	require.NoError(t, err)
	require.Equal(t, "0123", string(body))
}

// TestInsistEnds checks that Ctrl-C ends the wait.
func TestInsistEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, interrupt := context.WithCancel(t.Context())
		time.AfterFunc(time.Second, interrupt)
		began := time.Now()
		require.Error(t, insist(ctx, func() error {
			return wire.RetryLater(status.Error(codes.ResourceExhausted, "no room"), time.Hour)
		}))
		require.Equal(t, time.Second, time.Since(began))
	})
}

// TestTokens checks that calls for the same tier share a token, and that no two tiers do.
func TestTokens(t *testing.T) {
	client := fake.NewClientset()
	var mu sync.Mutex
	requests := make(map[string]int)
	client.PrependReactor("create", "serviceaccounts", func(a clienttesting.Action) (bool, runtime.Object, error) {
		r := a.(clienttesting.CreateActionImpl)
		spec := r.Object.(*authenticationv1.TokenRequest).Spec
		mu.Lock()
		defer mu.Unlock()
		name := a.GetNamespace() + " for " + spec.Audiences[0]
		requests[name]++
		return true, &authenticationv1.TokenRequest{Status: authenticationv1.TokenRequestStatus{
			Token: name, ExpirationTimestamp: metav1.NewTime(time.Now().Add(tokenLife)),
		}}, nil
	})
	tokens := newTokens(client, "viewer", time.Minute)
	var all sync.WaitGroup
	for range 8 {
		for _, key := range []tokenKey{{"a", "b/c"}, {"a/b", "c"}, {"a", "c"}} {
			all.Go(func() {
				got, err := tokens.get(t.Context(), key.namespace, key.audience)
				if err != nil || got != key.namespace+" for "+key.audience {
					t.Errorf("token for %v: %q, %v", key, got, err)
				}
			})
		}
	}
	all.Wait()
	require.Equal(t, map[string]int{"a for b/c": 1, "a/b for c": 1, "a for c": 1}, requests)
}

// TestTokensByAWrongClock checks that a token is used for as long as it lives, and no longer, by a
// clock that is minutes ahead of the API server's or behind it.
func TestTokensByAWrongClock(t *testing.T) {
	for name, c := range map[string]struct {
		wrong    time.Duration // how far the API server's clock is ahead
		granted  time.Duration
		requests int // within an hour
	}{
		"right":            {0, tokenLife, 7},
		"behind":           {5 * time.Minute, tokenLife, 7},
		"ahead":            {-15 * time.Minute, tokenLife, 7},
		"a longer life":    {time.Hour, time.Hour, 2},
		"a life too short": {0, tokenMargin / 2, 121},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				client, requests := fake.NewClientset(), 0
				var issued time.Time
				client.PrependReactor("create", "serviceaccounts", func(clienttesting.Action) (bool, runtime.Object, error) {
					requests++
					issued = time.Now()
					return true, &authenticationv1.TokenRequest{
						Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: new(int64(c.granted.Seconds()))},
						Status: authenticationv1.TokenRequestStatus{
							Token: "token", ExpirationTimestamp: metav1.NewTime(issued.Add(c.wrong + c.granted)),
						},
					}, nil
				})
				tokens := newTokens(client, "viewer", time.Minute)
				for end := time.Now().Add(time.Hour); !time.Now().After(end); <-time.After(30 * time.Second) {
					_, err := tokens.get(t.Context(), "a", "b")
					require.NoError(t, err)
					require.Less(t, time.Since(issued), c.granted, "the API server refuses it")
				}
				require.Equal(t, c.requests, requests)
			})
		})
	}
}
