package apiserver

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/url"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/version"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/source"
	"github.com/slicecast/slicecast/internal/source/kube"
	"github.com/slicecast/slicecast/loadtest/fleet"
)

const (
	// maxNamed bounds what an error lists.
	maxNamed = 10
	// retryCheck is the pause before watchers that differ are looked at again.
	retryCheck = 200 * time.Millisecond
)

// Objects is how many Services, slices and endpoints the API server has for the first node.
func (w *Watchers) Objects() (services, endpointSlices, endpoints int) {
	held := func(of *stream, visit func(number int)) {
		of.mu.Lock()
		defer of.mu.Unlock()
		for number, version := range of.held {
			if version != 0 {
				visit(number)
			}
		}
	}
	held(w.all[0].streams[0], func(int) { services++ })
	held(w.all[0].streams[1], func(number int) {
		endpointSlices++
		endpoints += w.decoder.size(number)
	})
	return services, endpointSlices, endpoints
}

// Check compares what each watcher holds, by the resource versions of all objects, with what the API server lists, which is
// asked for again as long as they differ, until the context ends. Errors wrap fleet.ErrDiverged or are of requests.
func (w *Watchers) Check(ctx context.Context) error {
	verified := make([]bool, len(w.all))
	for {
		want, err := w.truth(ctx)
		if err != nil {
			return err
		}
		var wrong []string
		for i, n := range w.all {
			if verified[i] {
				continue
			}
			have := n.digests()
			if verified[i] = have == want; !verified[i] {
				wrong = append(wrong, fmt.Sprintf("  watcher %s: digests of Services and slices %016x, should be %016x", n.Name, have, want))
			}
		}
		if len(wrong) == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			n := len(wrong)
			return fmt.Errorf("%w: %d watchers differ from the API server's list:\n%s", fleet.ErrDiverged, n, strings.Join(wrong[:min(n, maxNamed)], "\n"))
		case <-time.After(retryCheck):
		}
	}
}

// Holds gives what tells whether a node holds what the API server lists now.
func (w *Watchers) Holds(ctx context.Context) (func(*fleet.Member) bool, error) {
	want, err := w.truth(ctx)
	return func(m *fleet.Member) bool { return w.all[m.Index].digests() == want }, err
}

// digests are those of all but the Node, of which each watcher has its own.
func (n *watcher) digests() (out [2]uint64) {
	for i := range out {
		s := n.streams[i]
		s.mu.Lock()
		out[i] = s.digest
		s.mu.Unlock()
	}
	return out
}

// truth gives the digests of what the API server has.
func (w *Watchers) truth(ctx context.Context) (out [2]uint64, err error) {
	for i := range out {
		if out[i], err = w.listed(ctx, w.all[0].streams[i]); err != nil {
			return out, err
		}
	}
	return out, nil
}

// listed lists what a stream watches, over a connection that is not counted as a node's.
func (w *Watchers) listed(ctx context.Context, of *stream) (digest uint64, err error) {
	m := &fleet.Member{Name: of.watcher.Name}
	n, err := w.newWatcher(m)
	if err != nil {
		return 0, err
	}
	defer n.transport.CloseIdleConnections()
	body, err := w.get(ctx, &stream{watcher: n, path: of.path, query: of.query}, url.Values{}, runtime.ContentTypeProtobuf)
	if err != nil {
		return 0, err
	}
	defer body.Close()
	content, err := io.ReadAll(io.LimitReader(body, maxList))
	if err != nil {
		return 0, err
	}
	l, err := w.decoder.list(content)
	if err != nil {
		return 0, err
	}
	for _, e := range l.events {
		digest += e.version
	}
	return digest, nil
}

// State gives the Services and slices of an API server as a Slicecast server takes them.
func State(ctx context.Context, kubeconfig, serviceProxyName string) (out []model.Object, err error) {
	config, err := kube.Config(kubeconfig)
	if err != nil {
		return nil, err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	services, err := client.CoreV1().Services("").List(ctx, source.SelectServices(serviceProxyName))
	if err != nil {
		return nil, fmt.Errorf("list of the Services: %w", err)
	}
	endpointSlices, err := client.DiscoveryV1().EndpointSlices("").List(ctx, source.SelectEndpointSlices())
	if err != nil {
		return nil, fmt.Errorf("list of the EndpointSlices: %w", err)
	}
	c := source.NewConverter(serviceProxyName)
	for i := range services.Items {
		if o, _ := c.FromService(&services.Items[i]); o != nil {
			out = append(out, o)
		}
	}
	for i := range endpointSlices.Items {
		if o, _ := c.FromEndpointSlice(&endpointSlices.Items[i]); o != nil {
			out = append(out, o)
		}
	}
	return out, nil
}

// Version asks an API server for its version.
func Version(ctx context.Context, config *rest.Config) (string, error) {
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return "", err
	}
	content, err := client.CoreV1().RESTClient().Get().AbsPath("/version").Do(ctx).Raw()
	if err != nil {
		return "", fmt.Errorf("the API server %s does not tell its version: %w", config.Host, err)
	}
	var v version.Info
	if err := json.Unmarshal(content, &v); err != nil {
		return "", fmt.Errorf("version of the API server: %w", err)
	}
	return v.GitVersion, nil
}
