// This file asks the health checks of a case over HTTP, and judges the answers.
package conformance

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"reflect"
	"syscall"
	"time"

	"github.com/slicecast/slicecast/internal/testenv"
)

// requestTimeout bounds the time of one health check.
const requestTimeout = 2 * time.Second

// checkHealth repeats a health check until the answer is right.
func (s *stage) checkHealth(ctx context.Context, check *HealthCheck) error {
	host := s.node.Host
	if check.From != "" {
		host = s.hostOf(check.From)
	}
	expect := check.expected(s.reference())
	client := http.Client{
		Timeout:   requestTimeout,
		Transport: &http.Transport{DialContext: host.DialContext, DisableKeepAlives: true},
	}
	return testenv.WaitFor(ctx, func() error {
		request, err := http.NewRequestWithContext(context.Background(), http.MethodGet, check.URL, nil)
		if err != nil {
			return err
		}
		response, err := client.Do(request)
		if expect.Refused && errors.Is(err, syscall.ECONNREFUSED) {
			return nil
		}
		if err != nil {
			return err
		}
		defer response.Body.Close()
		body, err := io.ReadAll(io.LimitReader(response.Body, 1<<20))
		if err != nil {
			return err
		}
		return expect.differs(response, body)
	})
}

// expected returns what kube-proxy, or Slicecast, must answer.
func (c *HealthCheck) expected(reference bool) *ExpectHealth {
	if !reference && c.ExpectSlicecast != nil {
		return c.ExpectSlicecast
	}
	return &c.Expect
}

// differs returns an error that describes how an answer differs from the expected one.
func (e *ExpectHealth) differs(response *http.Response, body []byte) error {
	if e.Refused {
		return fmt.Errorf("the answer is %s: want the connection refused", response.Status)
	}
	var errs []error
	if response.StatusCode != e.Status {
		errs = append(errs, fmt.Errorf("the answer is %s: want %d", response.Status, e.Status))
	}
	for name, want := range e.Headers {
		if have := response.Header.Get(name); have != want {
			errs = append(errs, fmt.Errorf("%s is %q: want %q", name, have, want))
		}
	}
	if len(e.Body)+len(e.BodyKeys)+len(e.BodyAbsent) > 0 {
		var have map[string]any
		if err := json.Unmarshal(body, &have); err != nil {
			errs = append(errs, fmt.Errorf("the body is not a JSON object: %w", err))
		}
		errs = append(errs, e.bodyDiffers(have))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("%w; body: %s", err, body)
	}
	return nil
}

func (e *ExpectHealth) bodyDiffers(have map[string]any) error {
	var errs []error
	// Encode and decode the numbers, so that they have the same type as those in the answer.
	text, err := json.Marshal(e.Body)
	if err != nil {
		return err
	}
	var want map[string]any
	if err := json.Unmarshal(text, &want); err != nil {
		return err
	}
	for key, value := range want {
		if !contains(have[key], value) {
			errs = append(errs, fmt.Errorf("%s is %v: want %v", key, have[key], value))
		}
	}
	for _, key := range e.BodyKeys {
		if _, ok := have[key]; !ok {
			errs = append(errs, fmt.Errorf("%s is missing", key))
		}
	}
	for _, key := range e.BodyAbsent {
		if _, ok := have[key]; ok {
			errs = append(errs, fmt.Errorf("%s is present", key))
		}
	}
	return errors.Join(errs...)
}

// contains reports whether a JSON value equals another one or is an object that contains all fields
// of the other one.
func contains(have, want any) bool {
	wantObject, ok := want.(map[string]any)
	if !ok {
		return reflect.DeepEqual(have, want)
	}
	haveObject, ok := have.(map[string]any)
	for key, value := range wantObject {
		ok = ok && contains(haveObject[key], value)
	}
	return ok
}
