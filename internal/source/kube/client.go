package kube

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync/atomic"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/client-go/rest"

	"github.com/slicecast/slicecast/internal/model"
)

// codecs knows the kinds that Slicecast reads and writes. client-go's clientset knows all kinds of
// Kubernetes, which would be most of an agent's memory.
var codecs = func() serializer.CodecFactory {
	scheme := runtime.NewScheme()
	metav1.AddToGroupVersion(scheme, corev1.SchemeGroupVersion)
	for _, add := range []func(*runtime.Scheme) error{
		corev1.AddToScheme, discoveryv1.AddToScheme, networkingv1.AddToScheme, authenticationv1.AddToScheme,
		authorizationv1.AddToScheme,
	} {
		utilruntime.Must(add(scheme))
	}
	return serializer.NewCodecFactory(scheme)
}()

// newClient returns a client for a group of the API. If over is nil, the client gets an HTTP client
// of its own.
func newClient(config *rest.Config, group schema.GroupVersion, over *http.Client) (*rest.RESTClient, error) {
	config = rest.CopyConfig(config)
	config.GroupVersion, config.APIPath = &group, "/apis"
	if group.Group == corev1.GroupName {
		config.APIPath = "/api"
	}
	config.NegotiatedSerializer = codecs.WithoutConversion()
	if over == nil {
		var err error
		if over, err = rest.HTTPClientFor(config); err != nil {
			return nil, fmt.Errorf("client for the API server %s: %w; correct the kubeconfig's cluster and user", config.Host, err)
		}
	}
	client, err := rest.RESTClientForConfigAndClient(config, over)
	if err != nil {
		return nil, fmt.Errorf("client for the API server %s: %w", config.Host, err)
	}
	return client, nil
}

// Core returns a client for objects of the core group, such as Secrets and ConfigMaps, and the API
// server's clock as the answers to the client tell it.
func Core(config *rest.Config) (rest.Interface, func() time.Time, error) {
	var server serverClock
	config = rest.CopyConfig(config)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			sent := time.Now()
			answer, err := next.RoundTrip(r)
			if err != nil {
				return nil, err
			}
			if date, err := http.ParseTime(answer.Header.Get("Date")); err == nil {
				server.observe(sent, date, time.Now())
			}
			return answer, nil
		})
	})
	client, err := newClient(config, corev1.SchemeGroupVersion, nil)
	if err != nil {
		return nil, nil, err
	}
	return client, func() time.Time { return time.Now().Add(server.ahead()) }, nil
}

// serverClock is a server's clock, relative to this machine's. The zero value is this machine's.
type serverClock struct {
	nanoseconds atomic.Int64 // by how much the server's clock is ahead
}

// observe considers an answer: when its request was sent, the time in it, and when it was there.
// That time has lost its fraction of a second (RFC 9110, section 5.6.7), and was read at any
// moment between the two others. So an answer tells the difference only within bounds, and the
// clock changes no more than those demand. Otherwise it would be up to a second late, and a
// certificate made a moment ago would not be valid yet.
func (c *serverClock) observe(sent, date, received time.Time) {
	earliest, latest := date.Sub(received), date.Add(time.Second).Sub(sent)
	c.nanoseconds.Store(int64(min(max(c.ahead(), earliest), latest)))
}

func (c *serverClock) ahead() time.Duration { return time.Duration(c.nanoseconds.Load()) }

// roundTripper is a function that implements http.RoundTripper.
type roundTripper func(*http.Request) (*http.Response, error)

// RoundTrip implements http.RoundTripper.
func (r roundTripper) RoundTrip(request *http.Request) (*http.Response, error) { return r(request) }

// Slices returns a function that lists the EndpointSlices of a Service with one request.
func Slices(config *rest.Config, of model.ServiceKey) (func(context.Context) ([]discoveryv1.EndpointSlice, error), error) {
	client, err := newClient(config, discoveryv1.SchemeGroupVersion, nil)
	if err != nil {
		return nil, err
	}
	options := metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=" + of.Name}
	return func(ctx context.Context) ([]discoveryv1.EndpointSlice, error) {
		var list discoveryv1.EndpointSliceList
		err := client.Get().Namespace(of.Namespace).Resource("endpointslices").
			VersionedParams(&options, metav1.ParameterCodec).Do(ctx).Into(&list)
		return list.Items, err
	}, nil
}

// Reviews returns the functions of TokenReviews, AccessReviews and Paths. Their requests are not
// limited: whoever reviews tokens has budgets of its own.
func Reviews(config *rest.Config) (
	tokens func(context.Context, *authenticationv1.TokenReview) (*authenticationv1.TokenReview, error),
	access func(context.Context, *authorizationv1.SubjectAccessReview) (*authorizationv1.SubjectAccessReview, error),
	paths func(ctx context.Context, path string) ([]byte, error),
	err error,
) {
	config = rest.CopyConfig(config)
	config.QPS = -1
	var errs [3]error
	tokens, errs[0] = TokenReviews(config)
	access, errs[1] = AccessReviews(config)
	paths, errs[2] = Paths(config)
	return tokens, access, paths, errors.Join(errs[:]...)
}

// TokenReviews returns a function that lets the API server review a token with one request.
func TokenReviews(config *rest.Config) (func(context.Context, *authenticationv1.TokenReview) (*authenticationv1.TokenReview, error), error) {
	client, err := newClient(config, authenticationv1.SchemeGroupVersion, nil)
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context, review *authenticationv1.TokenReview) (*authenticationv1.TokenReview, error) {
		var answer authenticationv1.TokenReview
		return &answer, client.Post().Resource("tokenreviews").Body(review).Do(ctx).Into(&answer)
	}, nil
}

// AccessReviews returns a function that asks the API server with one request whether a user may do
// something.
func AccessReviews(config *rest.Config) (func(context.Context, *authorizationv1.SubjectAccessReview) (*authorizationv1.SubjectAccessReview, error), error) {
	client, err := newClient(config, authorizationv1.SchemeGroupVersion, nil)
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context, review *authorizationv1.SubjectAccessReview) (*authorizationv1.SubjectAccessReview, error) {
		var answer authorizationv1.SubjectAccessReview
		return &answer, client.Post().Resource("subjectaccessreviews").Body(review).Do(ctx).Into(&answer)
	}, nil
}

// maxPublished bounds the size of what is read at a path of the API server, in bytes.
const maxPublished = 1 << 20

// Paths returns a function that reads a path of the API server with one request. It is for paths
// that are not those of objects, such as the path of the API server's keys.
func Paths(config *rest.Config) (func(ctx context.Context, path string) ([]byte, error), error) {
	client, err := newClient(config, authenticationv1.SchemeGroupVersion, nil)
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context, path string) ([]byte, error) {
		body, err := client.Get().AbsPath(path).SetHeader("Accept", "*/*").Stream(ctx)
		if err != nil {
			return nil, err
		}
		defer body.Close()
		b, err := io.ReadAll(io.LimitReader(body, maxPublished+1))
		if err == nil && len(b) > maxPublished {
			err = fmt.Errorf("%s has more than %d bytes", path, maxPublished)
		}
		return b, err
	}, nil
}
