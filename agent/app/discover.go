package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// serverPortName is the name of the server's port in its EndpointSlices; a slice with one port only needs no name.
const serverPortName = "grpc"

// lookupTimeout bounds one look at the API server.
const lookupTimeout = 10 * time.Second

// finder finds servers by their own EndpointSlices, with one GET each time it is asked. An agent cannot use their
// Service's virtual IP: it is the one who programs it.
type finder struct {
	client          kubernetes.Interface
	namespace, name string
	log             *slog.Logger
	known           []string
}

func newFinder(client kubernetes.Interface, service string, log *slog.Logger) *finder {
	namespace, name, _ := strings.Cut(service, "/")
	return &finder{client: client, namespace: namespace, name: name, log: log}
}

// servers gives the addresses of the servers that are ready. Where the API server can't tell, it gives the last ones.
func (f *finder) servers(ctx context.Context) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, lookupTimeout)
	defer cancel()
	list, err := f.client.DiscoveryV1().EndpointSlices(f.namespace).List(ctx, metav1.ListOptions{
		LabelSelector: discoveryv1.LabelServiceName + "=" + f.name,
	})
	if err != nil {
		err = fmt.Errorf("look up the endpoints of Service %s/%s: %w", f.namespace, f.name, err)
		if len(f.known) == 0 {
			return nil, err
		}
		f.log.Warn("Using the servers that were found before", "err", err)
		return f.known, nil
	}
	found := addresses(list.Items)
	if len(found) == 0 {
		return f.known, errors.New("Service " + f.namespace + "/" + f.name + " has no ready endpoint with a port named " +
			serverPortName + ": is slicecast-server running?")
	}
	f.known = found
	return found, nil
}

func addresses(list []discoveryv1.EndpointSlice) []string {
	var out []string
	for _, s := range list {
		if s.AddressType == discoveryv1.AddressTypeFQDN {
			continue
		}
		for _, p := range s.Ports {
			named := p.Name != nil && *p.Name == serverPortName
			if p.Port == nil || !named && len(s.Ports) > 1 {
				continue
			}
			for _, e := range s.Endpoints {
				if len(e.Addresses) > 0 && (e.Conditions.Ready == nil || *e.Conditions.Ready) {
					out = append(out, net.JoinHostPort(e.Addresses[0], strconv.Itoa(int(*p.Port))))
				}
			}
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}
